"""Rows about the gateway: what it adds to the time that a model takes."""

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
from measure import Figure, NotRun, Place, percentiles
from stenolog.stores.jsonl.store import CACHE_BYTES

MODEL_SECONDS = 0.05
_AGAIN = 0.1
"""Seconds after which who was refused asks again."""


@contextmanager
def gateway(
    workspace: Path,
    *,
    max_turns: int = 256,
    cache_bytes: int = CACHE_BYTES,
    plain_malloc: bool = False,
    memory: bool = True,
) -> Iterator[tuple[str, int]]:
    """Yield the address and the pid of a process that serves the workspace.

    `plain_malloc`: without the caches that glibc keeps for each thread, so that the memory of the
    process shows what it uses.
    """
    options = (str(MODEL_SECONDS), str(max_turns), str(cache_bytes), str(int(memory)))
    with _serving("gateway_server.py", workspace, *options, plain_malloc=plain_malloc) as (
        url,
        pid,
    ):
        yield url, pid


@contextmanager
def _serving(
    program: str, folder: Path, *options: str, plain_malloc: bool = False
) -> Iterator[tuple[str, int]]:
    """Yield the address and the pid of a server."""
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
    """One connection that is kept, and asks one thing after the other; no library, no overhead."""

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
        """Ask, wait for the answer, ask again; each answer is timed.

        A connection that is closed unheard is a refusal, too, and counted as status 0.
        """
        while perf_counter() < until:
            try:
                await self._talk(until)
            except (OSError, asyncio.IncompleteReadError):
                self.statuses[0] += 1
                await asyncio.sleep(_AGAIN)

    async def _talk(self, until: float) -> None:
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            while perf_counter() < until:
                began = perf_counter()
                writer.write(self._request)
                status = await _status(reader)
                self.statuses[status] += 1
                if status == 200:
                    self.seconds.append(perf_counter() - began)
                else:
                    await asyncio.sleep(_AGAIN)
        finally:
            writer.close()


async def _status(reader: asyncio.StreamReader) -> int:
    head = await reader.readuntil(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    fields = dict(line.lower().split(": ", 1) for line in lines[1:] if ": " in line)
    await reader.readexactly(int(fields["content-length"]))
    return int(lines[0].split()[1])


def talking(url: str, users: int, seconds: float) -> list[User]:
    """So many users at once, each in a session of its own, for so long."""

    async def all_of_them() -> list[User]:
        until = perf_counter() + seconds
        found = [User(url, f"user:{number}") for number in range(users)]
        await asyncio.gather(*(one.talk(until) for one in found))
        return found

    return asyncio.run(all_of_them())


def added(place: Place, *, users: int, memory: bool = False) -> Figure:
    """How much longer a turn takes beyond the model's time than in a bare handler (the floor).

    The two servers are measured in turns, so that both meet the same load of the machine.
    """
    ours: list[float] = []
    floor: list[float] = []
    # The repetitions of a row share `place.folder`; each one starts with empty folders.
    folder = Path(tempfile.mkdtemp(prefix="gateway-", dir=place.folder))
    with (
        gateway(folder / "ours", memory=memory) as (url, _),
        _serving("floor_server.py", folder / "floor", str(MODEL_SECONDS)) as (bare, _),
    ):
        for address in (url, bare):
            talking(address, users, 1.0)
        for _round in range(3):
            ours += _added(url, users, place.seconds(4))
            floor += _added(bare, users, place.seconds(2))
    found, least = percentiles(ours), percentiles(floor)
    return Figure(
        measured=found["p50_us"] / least["p50_us"],
        ours=found,
        raw=least,
        others={
            "p99_ms": found["p99_us"] / 1000,
            "turns_per_second": round(len(ours) / (3 * place.seconds(4)), 1),
        },
    )


def _added(url: str, users: int, seconds: float) -> list[float]:
    found = talking(url, users, seconds)
    others = sum(
        count for user in found for status, count in user.statuses.items() if status != 200
    )
    if others:
        raise NotRun(f"{others} requests were not answered")
    return [one - MODEL_SECONDS for user in found for one in user.seconds]
