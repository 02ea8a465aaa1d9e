"""Rows about the gateway: what it adds to the time that a model takes."""

import asyncio
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from urllib.parse import urlsplit

from gateway_server import TOKEN
from measure import Figure, NotRun, Place, percentiles

MODEL_SECONDS = 0.05
_AGAIN = 0.1
"""Seconds after which who was refused asks again."""


@contextmanager
def gateway(workspace: Path, *, max_turns: int = 256) -> Iterator[tuple[str, int]]:
    """The address and the number of a process that serves, until this is left."""
    program = Path(__file__).with_name("gateway_server.py")
    command = [sys.executable, str(program), str(workspace), str(MODEL_SECONDS), str(max_turns)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
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


def added(place: Place, *, users: int) -> Figure:
    """The milliseconds that a turn takes beyond the model's own time."""
    with gateway(place.folder / f"gateway-{users}") as (url, _):
        talking(url, users, 1.0)
        found = talking(url, users, place.seconds(9))
    others = sum(
        count for user in found for status, count in user.statuses.items() if status != 200
    )
    if others:
        raise NotRun(f"{others} requests were not answered")
    seconds = [one - MODEL_SECONDS for user in found for one in user.seconds]
    ours = percentiles(seconds)
    return Figure(
        measured=ours["p50_us"] / 1000,
        ours=ours,
        raw=percentiles([MODEL_SECONDS]),
        others={
            "p99_ms": ours["p99_us"] / 1000,
            "turns_per_second": round(len(seconds) / place.seconds(9), 1),
        },
    )
