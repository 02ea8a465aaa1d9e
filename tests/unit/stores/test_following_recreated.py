"""Tests a session that is deleted, and maybe created again, at any call of a follower."""

import asyncio
from collections.abc import Iterator
from contextlib import aclosing
from typing import Any

import pytest

from stenolog.errors import SessionDeleted
from stenolog.records import Message, SessionInfo
from stenolog.stores import async_store
from stenolog.stores.async_store import AsyncStore
from stenolog.stores.in_memory import InMemoryStore

OLD = ["old 1", "old 2"]
NEW = ["new 1", "new 2", "new 3", "new 4"]


class Striking(InMemoryStore):
    """A store whose session is deleted right before the call with this number.

    A call is `info`, `follow`, or a step of a follower.
    """

    def __init__(self, number: int, *, created_again: bool) -> None:
        super().__init__()
        self.calls = 0
        self._number = number
        self._created_again = created_again
        for text in OLD:
            self.add_message("a", "user", text)

    @property
    def struck(self) -> bool:
        return self.calls >= self._number

    def _count(self) -> None:
        self.calls += 1
        if self.calls == self._number:
            self.delete("a")
            for text in NEW if self._created_again else []:
                self.add_message("a", "user", text)

    def info(self, key: str) -> SessionInfo:
        self._count()
        return super().info(key)

    def follow(self, key: str, **options: Any) -> Iterator[Message]:
        self._count()
        arrivals = super().follow(key, **options)
        while True:
            self._count()
            message = next(arrivals, None)
            if message is None:
                return
            yield message


def _asynchronously(store: InMemoryStore) -> list[Any]:
    heard: list[Any] = []

    async def main() -> None:
        async with AsyncStore(store) as mine, aclosing(mine.follow("a", timeout=0.03)) as messages:
            try:
                async for message in messages:
                    heard.append(message.content)
            except SessionDeleted:
                heard.append("deleted")

    asyncio.run(main())
    return heard


@pytest.mark.parametrize("created_again", [False, True])
def test_follow_never_mixes_two_sessions_of_a_key(
    monkeypatch: pytest.MonkeyPatch, created_again: bool
) -> None:
    """Short intervals of 10 ms, so that each step between two rounds is tested."""
    monkeypatch.setattr(async_store, "READER_CHECK_SECONDS", 0.01)
    first_session_seen = 0
    for number in range(1, 40):
        store = Striking(number, created_again=created_again)
        heard = _asynchronously(store)
        if not store.struck:
            break
        ended = heard[-1:] == ["deleted"]
        told = heard[:-1] if ended else heard
        # Either the first session up to some message and its end, or the second from its start.
        if told[:1] == OLD[:1] or ended:
            first_session_seen += 1
            assert told == OLD[: len(told)], number
            # If the strike hits the last call, no end is reported.
            assert ended or told == OLD, number
        else:
            assert told == (NEW if created_again else []), number
    assert first_session_seen > 2
