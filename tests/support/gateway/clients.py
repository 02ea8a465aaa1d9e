"""Clients of one or more gateways: some send messages until they are answered, some listen."""

import json
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import httpx2

from stenolog.stores.open_store import open_store
from support.gateway.gateway_process import TOKEN

_HEADERS: Final = {"Authorization": f"Bearer {TOKEN}"}
_SOON: Final = 0.05


def wait_until(holds: Callable[[], bool]) -> None:
    """Wait until a condition holds for which there is no event."""
    deadline = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Talker(threading.Thread):
    """Sends one message after the other in a session, and retries each until it is answered."""

    def __init__(
        self, urls: Sequence[str], key: str, seed: int, stop: threading.Event, *, who: str = "a"
    ) -> None:
        """Create a client. `who` distinguishes clients in the same session."""
        super().__init__(name=f"talker {key} {who}")
        self._urls = urls
        self._key = key
        self._who = who
        self._chance = random.Random(seed)
        self._enough = stop
        self.answers: dict[str, set[str]] = {}
        """Answers to each message; more than one answer is an error."""
        self.unclean: list[str] = []
        """Responses that are neither an answer nor a clear rejection."""
        self._given_up = False
        self.failed = 0
        """How often a request failed and was retried."""

    def run(self) -> None:
        """Send messages until told to stop; all sent messages are answered before."""
        number = 0
        while not self._enough.is_set():
            number += 1
            words = f"{self._key} {self._who} says {number}"
            self.answers[words] = set()
            while not self._answered(words, f"{self._key}-{self._who}-{number}"):
                self.failed += 1
                if self._given_up:
                    return
                time.sleep(_SOON)

    def give_up(self) -> None:
        """Stop retrying unanswered messages."""
        self._given_up = True

    def _answered(self, words: str, token: str) -> bool:
        url = self._chance.choice(self._urls)
        stream = self._chance.random() < 0.5
        body = {"messages": [{"role": "user", "content": words}], "stream": stream}
        headers = {**_HEADERS, "X-Session-Key": self._key, "Idempotency-Key": token}
        try:
            with httpx2.Client(timeout=60, headers=headers) as client:
                response = client.post(f"{url}/v1/chat/completions", json=body)
                told = response.text
        except httpx2.TransportError:
            return False
        if not response.is_success:
            if response.status_code not in (429, 503):
                self.unclean.append(f"{response.status_code} {told}")
            return False
        answer = _streamed(told) if stream else json.loads(told)["choices"][0]["message"]["content"]
        if answer is None:
            return False
        self.answers[words].add(answer)
        return True


def _streamed(text: str) -> str | None:
    """Return the text of a stream, or None if it is incomplete."""
    data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    if not data or data[-1] != "[DONE]":
        return None
    pieces = [json.loads(one)["choices"][0]["delta"] for one in data[:-1]]
    return "".join(piece.get("content") or "" for piece in pieces)


class Listener(threading.Thread):
    """Follows a session over SSE, and reconnects when the stream breaks."""

    def __init__(self, urls: Sequence[str], key: str, seed: int, stop: threading.Event) -> None:
        super().__init__(name=f"listener {key}")
        self._urls = urls
        self._path = f"/v1/sessions/{key}/events"
        self._chance = random.Random(seed)
        self._enough = stop
        self._last = ""
        self.heard: list[tuple[int, Any]] = []
        """Seq and text of each message, in order of arrival."""
        self.broken = 0
        """How often the stream broke."""

    def run(self) -> None:
        """Listen until told to stop."""
        while not self._enough.is_set():
            try:
                self._listen(self._chance.choice(self._urls))
            except httpx2.TransportError:
                self.broken += 1
                self._enough.wait(_SOON)

    def heard_up_to(self) -> int:
        """The newest seq."""
        return self.heard[-1][0] if self.heard else 0

    def _listen(self, url: str) -> None:
        headers = dict(_HEADERS)
        if self._last:
            headers["Last-Event-ID"] = self._last
        # Sometimes a read times out; the listener then checks whether to stop.
        timeout = httpx2.Timeout(5, read=1)
        with (
            httpx2.Client(timeout=timeout, headers=headers) as client,
            client.stream("GET", f"{url}{self._path}") as response,
        ):
            id = ""
            for line in response.iter_lines():
                name, _, value = line.partition(": ")
                if name == "id":
                    id = value
                elif name == "data":
                    told = json.loads(value)
                    self.heard.append((told["seq"], told["message"]["content"]))
                    self._last = id
                if self._enough.is_set():
                    return


def wait_for_listeners(where: str, listeners: list[Listener]) -> None:
    """Wait until all listeners have received everything, or a minute has passed."""
    deadline = time.monotonic() + 60
    with open_store(where, read_only=True) as store:
        for number, listener in enumerate(listeners):
            last = store.info(f"s{number}").last_seq
            while listener.heard_up_to() < last and time.monotonic() < deadline:
                time.sleep(0.02)
