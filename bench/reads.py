"""Rows about reading, cold and warm, by turns with the fastest peer in a process of its own.

Cold: a new store object for each read, so that nothing of ours is remembered; the pages of the
file stay in the kernel's cache, for both.
"""

import json
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any, Self
from zlib import crc32

import msgspec

import stenolog
from appends import fill, workspace
from measure import Figure, NotRun, Place, in_turn, percentiles, timed

_BLOCK = 10
_TAIL = len(b',"crc":"0123abcd"}')


class Peer:
    """Another program's session store in a process of its own, which measures itself on request."""

    def __init__(
        self,
        place: Place,
        python: Path,
        messages: Sequence[dict[str, Any]],
        *,
        program: str = "openai_agents.py",
        arguments: Sequence[str] = (),
    ) -> None:
        folder = place.folder / "peer"
        folder.mkdir(exist_ok=True)
        file = folder / "messages.json"
        file.write_text(json.dumps(messages))
        self._process = subprocess.Popen(
            [python, Path(__file__).parent / "peers" / program, folder, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, what: str, **details: Any) -> Any:
        """What the peer answers."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps({"what": what, **details}) + "\n")
            self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise NotRun(f"the peer ended with {self._process.wait()}")
        return json.loads(answer)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()


def prepare(place: Place, count: int) -> str:
    """The key of a session with so many messages, written as an agent writes them."""
    key = f"read-{count}"
    with stenolog.open_store(workspace(place)) as store:
        fill(store, key, count, singly=min(count, 1000))
    return key


def touch(messages: Sequence[dict[str, Any]]) -> int:
    """Look at every field once, as a caller does that hands them to a model."""
    found = 0
    for message in messages:
        for value in message.values():
            if value is not None:
                found += 1
    return found


def _touch_all(messages: Sequence[stenolog.Message]) -> None:
    touch([message.to_dict() for message in messages])


def _touch_words(messages: Sequence[stenolog.Message]) -> None:
    """Look at who said it and what was said, which are decoded when they are asked for."""
    for message in messages:
        message.role, message.content  # noqa: B018


def _cold(
    place: Place,
    key: str,
    times: int,
    *,
    last: int | None = None,
    use: Callable[[Sequence[stenolog.Message]], None] = _touch_all,
) -> list[float]:
    where = workspace(place)
    found = []
    for _ in range(times):
        start = perf_counter()
        store = stenolog.open_store(where)
        use(store.get_history(key, last=last))
        found.append(perf_counter() - start)
        store.close()
    return found


def full_read(place: Place, *, count: int, peer_python: Path) -> Figure:
    """How many times faster than the peer a cold read of everything is."""
    key = prepare(place, count)
    with stenolog.open_store(workspace(place)) as store:
        messages = [message.to_dict() for message in store.get_history(key)]
    with Peer(place, peer_python, messages) as peer:
        peer.ask("cold", times=3)
        _cold(place, key, 3)
        peer_times, ready_times, times = in_turn(
            place.times(16),
            _peer_block(peer, "cold"),
            _peer_block(peer, "ready"),
            lambda: _cold(place, key, _BLOCK),
        )
    raw, ours, ready = percentiles(peer_times), percentiles(times), percentiles(ready_times)
    return Figure(
        measured=raw["p50_us"] / ours["p50_us"],
        ours=ours,
        raw=raw,
        others={
            "peer_object_ready_p50_us": ready["p50_us"],
            "faster_than_object_ready": round(ready["p50_us"] / ours["p50_us"], 3),
        },
    )


def full_read_floor(place: Place, *, count: int) -> Figure:
    """A cold read of everything, as a multiple of decoding and checking the same bytes."""
    key = prepare(place, count)
    lines = (Path(workspace(place)) / "sessions" / f"{key}.jsonl").read_bytes().splitlines()
    decode = msgspec.json.Decoder().decode

    def floor() -> None:
        for line in lines:
            assert line[-_TAIL:] == b',"crc":"%08x"}' % crc32(line[:-_TAIL])
            body = decode(line)["body"]
            body.get("role"), body.get("content")

    _cold(place, key, 3, use=_touch_words)
    floor_times, times = in_turn(
        place.times(16),
        lambda: timed(_BLOCK, floor),
        lambda: _cold(place, key, _BLOCK, use=_touch_words),
    )
    raw, ours = percentiles(floor_times), percentiles(times)
    return Figure(measured=ours["p50_us"] / raw["p50_us"], ours=ours, raw=raw)


def warm_read(place: Place, *, count: int, peer_python: Path) -> Figure:
    """How many times faster than the peer's ready object a second read is, the call alone."""
    key = prepare(place, count)
    with stenolog.open_store(workspace(place)) as store:
        messages = [message.to_dict() for message in store.get_history(key)]
        with Peer(place, peer_python, messages) as peer:
            peer_times, times = in_turn(
                place.times(12),
                _peer_block(peer, "call"),
                lambda: timed(100, lambda: store.get_history(key)),
            )
    raw, ours = percentiles(peer_times), percentiles(times)
    return Figure(measured=raw["p50_us"] / ours["p50_us"], ours=ours, raw=raw)


def _peer_block(peer: Peer, what: str) -> Callable[[], list[float]]:
    def block() -> list[float]:
        times: list[float] = peer.ask(what, times=_BLOCK)
        return times

    return block


def last_messages(place: Place, *, short: int, long: int, ratio: bool) -> Figure:
    """A cold read of the last 20 in a long session: in milliseconds, or against a short one."""
    short_key, long_key = prepare(place, short), prepare(place, long)
    short_times, times = in_turn(
        place.times(20),
        lambda: _cold(place, short_key, _BLOCK, last=20),
        lambda: _cold(place, long_key, _BLOCK, last=20),
    )
    raw, ours = percentiles(short_times), percentiles(times)
    measured = ours["p50_us"] / (raw["p50_us"] if ratio else 1000)
    return Figure(measured=measured, ours=ours, raw=raw)
