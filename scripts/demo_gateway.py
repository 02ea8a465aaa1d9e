"""Gateway of the demo: `steno serve`, used like any OpenAI server and followed over SSE."""

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
    """Context manager that runs a `steno serve` process, and stops it at the end."""

    def __init__(self, model: str) -> None:
        """Start the gateway in the current folder, with a model address or name."""
        self._token = Path("gateway.token")
        # Ignore the user's own settings.
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
            raise Failed(f"the gateway did not start: {self._exit_text()}")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.send_signal(signal.SIGTERM)
        words = self._exit_text()
        if kind is None and self._process.returncode != 0:
            raise Failed(f"the gateway ended with code {self._process.returncode}: {words}")

    def _exit_text(self) -> str:
        _, words = self._process.communicate(timeout=_PATIENCE)
        return words

    def ask(self, key: str, text: str) -> str:
        """Send a text to `/v1/chat/completions` in a session and return the answer."""
        tell(f"  POST {self._url}/v1/chat/completions, X-Session-Key: {key}")
        tell(f"  Ada: {text}")
        body = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
        headers = {"X-Session-Key": key, "Content-Type": "application/json"}
        with self._open("/v1/chat/completions", headers, body) as response:
            completion = json.load(response)
        answer = str(completion["choices"][0]["message"]["content"])
        tell(f"  agent: {answer}")
        return answer

    def _open(self, path: str, headers: dict[str, str], body: bytes | None = None) -> Any:
        token = self._token.read_text().strip()
        wanted = urllib.request.Request(
            self._url + path, body, {**headers, "Authorization": f"Bearer {token}"}
        )
        return urllib.request.urlopen(wanted, timeout=_PATIENCE)

    def follow(self, key: str, after: int) -> "Following":
        """Stream the messages of a session with seq greater than `after`."""
        path = f"/v1/sessions/{key.replace(':', '%3A')}/events?after={after}"
        tell(f"  GET {self._url}{path}")
        return Following(self._open(path, {"Accept": "text/event-stream"}))


class Following:
    """A stream of events, read by its own thread."""

    def __init__(self, response: Any) -> None:
        self._response = response
        self._heard: queue.Queue[tuple[str, dict[str, Any]]] = queue.Queue()
        self._reading = threading.Thread(target=self._read_events, daemon=True)
        self._reading.start()

    def _read_events(self) -> None:
        id = ""
        for line in self._response:
            name, _, value = line.decode().rstrip("\n").partition(": ")
            if name == "id":
                id = value
            elif name == "data":
                self._heard.put((id, json.loads(value)))

    def next(self) -> dict[str, Any]:
        """Return the next message with its seq."""
        try:
            id, told = self._heard.get(timeout=_PATIENCE)
        except queue.Empty:
            raise Failed(f"the stream was silent for {_PATIENCE} s") from None
        shown = re.sub(r"\s+", " ", str(told["message"]["content"]))
        tell(f"    event {id}: {told['message']['role']}: {shown}")
        return told
