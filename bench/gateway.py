"""Rows about the gateway: the time that the gateway adds to the time of the model."""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from urllib.parse import urlsplit

from gateway_server import TOKEN
from measure import Context, Measurement, NotRun, percentiles
from stenolog.stores.jsonl.store import CACHE_BYTES

MODEL_SECONDS = 0.05
_RETRY_SECONDS = 0.1
"""Seconds that a user waits after a rejected request."""


@contextmanager
def gateway(
    workspace: Path,
    *,
    max_turns: int = 256,
    cache_bytes: int = CACHE_BYTES,
    plain_malloc: bool = False,
    memory: bool = True,
) -> Iterator[tuple[str, int]]:
    """Run a gateway in a process and yield its address and pid.

    `plain_malloc` switches off the caches that glibc keeps for each thread, so that resident memory
    is the memory in use.
    """
    options = (str(MODEL_SECONDS), str(max_turns), str(cache_bytes), str(int(memory)))
    with _run_server("gateway_server.py", workspace, *options, plain_malloc=plain_malloc) as (
        url,
        pid,
    ):
        yield url, pid


@contextmanager
def _run_server(
    program: str, folder: Path, *options: str, plain_malloc: bool = False
) -> Iterator[tuple[str, int]]:
    """Run a server program in a process and yield its address and pid."""
    command = [sys.executable, str(Path(__file__).with_name(program)), str(folder), *options]
    environment = dict(os.environ)
    if plain_malloc:
        environment["MALLOC_ARENA_MAX"] = "1"
        environment["GLIBC_TUNABLES"] = "glibc.malloc.tcache_count=0"
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield process.stdout.readline().decode().strip(), process.pid
    finally:
        process.stdin.close()
        process.wait(60)
        process.stdout.close()


class User:
    """Client with one connection that sends one request after another, without an HTTP library."""

    def __init__(self, url: str, key: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 0
        body = json.dumps({"messages": [{"role": "user", "content": "Is that so?"}]}).encode()
        self._request = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {parts.netloc}\r\n"
            f"Authorization: Bearer {TOKEN}\r\nX-Session-Key: {key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        ).encode() + body
        self.statuses: Counter[int] = Counter()
        self.seconds: list[float] = []

    async def talk(self, until: float) -> None:
        """Send requests until a time and record the duration of each answer.

        A connection that is closed without a response counts as status 0.
        """
        while perf_counter() < until:
            try:
                await self._talk(until)
            except (OSError, asyncio.IncompleteReadError):
                self.statuses[0] += 1
                await asyncio.sleep(_RETRY_SECONDS)

    async def _talk(self, until: float) -> None:
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            while perf_counter() < until:
                start = perf_counter()
                writer.write(self._request)
                status = await _status(reader)
                self.statuses[status] += 1
                if status == 200:
                    self.seconds.append(perf_counter() - start)
                else:
                    await asyncio.sleep(_RETRY_SECONDS)
        finally:
            writer.close()


async def _status(reader: asyncio.StreamReader) -> int:
    head = await reader.readuntil(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    fields = dict(line.lower().split(": ", 1) for line in lines[1:] if ": " in line)
    await reader.readexactly(int(fields["content-length"]))
    return int(lines[0].split()[1])


def run_users(url: str, users: int, seconds: float) -> list[User]:
    """Run `users` users at once, each with a separate session, for `seconds`."""

    async def run_all() -> list[User]:
        until = perf_counter() + seconds
        clients = [User(url, f"user:{number}") for number in range(users)]
        await asyncio.gather(*(client.talk(until) for client in clients))
        return clients

    return asyncio.run(run_all())


def added_latency(context: Context, *, users: int, memory: bool = False) -> Measurement:
    """Measure the time that a turn adds to the model's time, as a multiple of a bare handler's.

    The two servers are measured alternately, so that both see the same load of the machine.
    """
    ours: list[float] = []
    floor: list[float] = []
    # The repetitions of a row share the folder. Each repetition starts with an empty subfolder.
    folder = Path(tempfile.mkdtemp(prefix="gateway-", dir=context.folder))
    with (
        gateway(folder / "ours", memory=memory) as (url, _),
        _run_server("floor_server.py", folder / "floor", str(MODEL_SECONDS)) as (bare, _),
    ):
        for address in (url, bare):
            run_users(address, users, 1.0)
        for _round in range(3):
            ours += _added_seconds(url, users, context.seconds(4))
            floor += _added_seconds(bare, users, context.seconds(2))
    stats, floor_stats = percentiles(ours), percentiles(floor)
    return Measurement(
        measured=stats["p50_us"] / floor_stats["p50_us"],
        ours=stats,
        raw=floor_stats,
        others={
            "p99_ms": stats["p99_us"] / 1000,
            "turns_per_second": round(len(ours) / (3 * context.seconds(4)), 1),
        },
    )


def _added_seconds(url: str, users: int, seconds: float) -> list[float]:
    finished = run_users(url, users, seconds)
    others = sum(
        count for user in finished for status, count in user.statuses.items() if status != 200
    )
    if others:
        raise NotRun(f"{others} requests were not answered")
    return [seconds - MODEL_SECONDS for user in finished for seconds in user.seconds]
