"""The gateway in the demo: `steno serve`, asked as OpenAI clients do, and followed over SSE."""

import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from demo_stage import Failed, tell

_PATIENCE = 30


class Gateway:
    """`steno serve` as a process. A context manager: it is asked to end, and waited for."""

    def __init__(self, model: str) -> None:
        """In the current folder, with a model at this address, or one of this name."""
        self._token = Path("gateway.token")
        # What the user has set is not the demo's business.
        config = Path("demo.toml")
        config.touch()
        named = f"{model}#scripted" if model.startswith("http") else model
        self._process = subprocess.Popen(
            [sys.executable, "-m", "stenolog", "serve", "--port", "0", "--model", named],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "STENO_CONFIG": str(config),
                "STENO_GATEWAY__TOKEN_FILE": str(self._token),
            },
        )
        assert self._process.stdout is not None
        self._url = self._process.stdout.readline().removeprefix("Listening at ").strip()

    def __enter__(self) -> Self:
        if not self._url:
            raise Failed(f"the gateway did not start: {self._ended()}")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.send_signal(signal.SIGTERM)
        words = self._ended()
        if kind is None and self._process.returncode != 0:
            raise Failed(f"the gateway ended with code {self._process.returncode}: {words}")

    def _ended(self) -> str:
        _, words = self._process.communicate(timeout=_PATIENCE)
        return words

    def ask(self, key: str, text: str) -> str:
        """Say something at `/v1/chat/completions`, in a session; the answer."""
        tell(f"  POST {self._url}/v1/chat/completions, X-Session-Key: {key}")
        tell(f"  Ada: {text}")
        body = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
        headers = {"X-Session-Key": key, "Content-Type": "application/json"}
        with self._open("/v1/chat/completions", headers, body) as response:
            told = json.load(response)
        answer = str(told["choices"][0]["message"]["content"])
        tell(f"  agent: {answer}")
        return answer

    def _open(self, path: str, headers: dict[str, str], body: bytes | None = None) -> Any:
        token = self._token.read_text().strip()
        wanted = urllib.request.Request(
            self._url + path, body, {**headers, "Authorization": f"Bearer {token}"}
        )
        return urllib.request.urlopen(wanted, timeout=_PATIENCE)

    def follow(self, key: str, after: int) -> "Following":
        """The messages of a session behind this seq, as they come."""
        path = f"/v1/sessions/{key.replace(':', '%3A')}/events?after={after}"
        tell(f"  GET {self._url}{path}")
        return Following(self._open(path, {"Accept": "text/event-stream"}))


class Following:
    """A stream of events, read by a thread of its own."""

    def __init__(self, response: Any) -> None:
        self._response = response
        self._heard: queue.Queue[tuple[str, dict[str, Any]]] = queue.Queue()
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self) -> None:
        id = ""
        for line in self._response:
            name, _, value = line.decode().rstrip("\n").partition(": ")
            if name == "id":
                id = value
            elif name == "data":
                self._heard.put((id, json.loads(value)))

    def next(self) -> dict[str, Any]:
        """The next message, with its seq."""
        try:
            id, told = self._heard.get(timeout=_PATIENCE)
        except queue.Empty:
            raise Failed(f"the stream was silent for {_PATIENCE} s") from None
        shown = re.sub(r"\s+", " ", str(told["message"]["content"]))
        tell(f"    event {id}: {told['message']['role']}: {shown}")
        return told
