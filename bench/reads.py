"""Rows about reading, cold and warm, measured alternately with the fastest peer.

The peer runs in its own process. A cold read opens a new store object, so that the store has cached
nothing. The pages of the file stay in the kernel's cache, for both sides.
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
from measure import Context, Measurement, NotRun, alternate, percentiles, time_calls

_BLOCK = 10
_TAIL = len(b',"crc":"0123abcd"}')


class Peer:
    """Another program's session store in its own process, which runs measurements on request."""

    def __init__(
        self,
        context: Context,
        python: Path,
        messages: Sequence[dict[str, Any]],
        *,
        program: str = "openai_agents.py",
        arguments: Sequence[str] = (),
    ) -> None:
        folder = context.folder / "peer"
        folder.mkdir(exist_ok=True)
        file = folder / "messages.json"
        file.write_text(json.dumps(messages))
        self._process = subprocess.Popen(
            [python, Path(__file__).parent / "peers" / program, folder, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, command: str, **arguments: Any) -> Any:
        """Send a request to the peer and return its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps({"command": command, **arguments}) + "\n")
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


def prepare(context: Context, count: int) -> str:
    """Create a session with `count` messages, written as an agent writes them; return its key."""
    key = f"read-{count}"
    with stenolog.open_store(workspace(context)) as store:
        fill(store, key, count, one_by_one=min(count, 1000))
    return key


def touch(messages: Sequence[dict[str, Any]]) -> int:
    """Access every field once, as a caller does that passes the messages to a model."""
    count = 0
    for message in messages:
        for value in message.values():
            if value is not None:
                count += 1
    return count


def _touch_all(messages: Sequence[stenolog.Message]) -> None:
    touch([message.to_dict() for message in messages])


def _touch_role_and_content(messages: Sequence[stenolog.Message]) -> None:
    """Access role and content, which are decoded on first access."""
    for message in messages:
        message.role, message.content  # noqa: B018


def _time_cold_reads(
    context: Context,
    key: str,
    times: int,
    *,
    last: int | None = None,
    use: Callable[[Sequence[stenolog.Message]], None] = _touch_all,
) -> list[float]:
    path = workspace(context)
    durations = []
    for _ in range(times):
        start = perf_counter()
        store = stenolog.open_store(path)
        use(store.get_history(key, last=last))
        durations.append(perf_counter() - start)
        store.close()
    return durations


def full_read(context: Context, *, count: int, peer_python: Path) -> Measurement:
    """Measure how many times faster than the peer a cold read of all messages is."""
    key = prepare(context, count)
    with stenolog.open_store(workspace(context)) as store:
        messages = [message.to_dict() for message in store.get_history(key)]
    with Peer(context, peer_python, messages) as peer:
        peer.ask("cold", times=3)
        _time_cold_reads(context, key, 3)
        peer_times, ready_times, times = alternate(
            context.times(16),
            _peer_block(peer, "cold"),
            _peer_block(peer, "ready"),
            lambda: _time_cold_reads(context, key, _BLOCK),
        )
    raw, ours, ready = percentiles(peer_times), percentiles(times), percentiles(ready_times)
    return Measurement(
        measured=raw["p50_us"] / ours["p50_us"],
        ours=ours,
        raw=raw,
        others={
            "peer_object_ready_p50_us": ready["p50_us"],
            "faster_than_object_ready": round(ready["p50_us"] / ours["p50_us"], 3),
        },
    )


def full_read_with_floor(context: Context, *, count: int) -> Measurement:
    """Measure a cold read of all messages, as a multiple of decoding and checking their bytes."""
    key = prepare(context, count)
    lines = (Path(workspace(context)) / "sessions" / f"{key}.jsonl").read_bytes().splitlines()
    decode = msgspec.json.Decoder().decode

    def floor() -> None:
        for line in lines:
            assert line[-_TAIL:] == b',"crc":"%08x"}' % crc32(line[:-_TAIL])
            body = decode(line)["body"]
            body.get("role"), body.get("content")

    _time_cold_reads(context, key, 3, use=_touch_role_and_content)
    floor_times, times = alternate(
        context.times(16),
        lambda: time_calls(_BLOCK, floor),
        lambda: _time_cold_reads(context, key, _BLOCK, use=_touch_role_and_content),
    )
    raw, ours = percentiles(floor_times), percentiles(times)
    return Measurement(measured=ours["p50_us"] / raw["p50_us"], ours=ours, raw=raw)


def warm_read(context: Context, *, count: int, peer_python: Path) -> Measurement:
    """Measure how many times faster a second read is than a read with the peer's existing object.

    Only the call is measured. No field is accessed.
    """
    key = prepare(context, count)
    with stenolog.open_store(workspace(context)) as store:
        messages = [message.to_dict() for message in store.get_history(key)]
        with Peer(context, peer_python, messages) as peer:
            peer_times, times = alternate(
                context.times(12),
                _peer_block(peer, "call"),
                lambda: time_calls(100, lambda: store.get_history(key)),
            )
    raw, ours = percentiles(peer_times), percentiles(times)
    return Measurement(measured=raw["p50_us"] / ours["p50_us"], ours=ours, raw=raw)


def _peer_block(peer: Peer, command: str) -> Callable[[], list[float]]:
    def block() -> list[float]:
        times: list[float] = peer.ask(command, times=_BLOCK)
        return times

    return block


def last_messages(context: Context, *, short: int, long: int, ratio: bool) -> Measurement:
    """Measure a cold read of the last 20 messages in a long session.

    The result is in milliseconds, or with `ratio` a multiple of the same read in a short session.
    """
    short_key, long_key = prepare(context, short), prepare(context, long)
    short_times, times = alternate(
        context.times(20),
        lambda: _time_cold_reads(context, short_key, _BLOCK, last=20),
        lambda: _time_cold_reads(context, long_key, _BLOCK, last=20),
    )
    raw, ours = percentiles(short_times), percentiles(times)
    measured = ours["p50_us"] / (raw["p50_us"] if ratio else 1000)
    return Measurement(measured=measured, ours=ours, raw=raw)
