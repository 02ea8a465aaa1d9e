"""Tests that a conversation continues on a full disk, reports it, and loses nothing.

The disk is a small tmpfs where that can be mounted, and a file size limit everywhere.
"""

import asyncio
import errno
import resource
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Final, Protocol

import pytest
from msgspec.structs import replace

from stenolog.agent.instance import AgentRegistry
from stenolog.agent.loop import AgentLoop
from stenolog.agent.turn import CUT_OFF_TEXT
from stenolog.agent.turn_events import SaveFailed, SaveRecovered
from stenolog.context.window import Limits
from stenolog.errors import StoreUnavailable
from stenolog.testing.scripted_model import ScriptedModel
from support import needs
from support.agents import KEY, SPEC, Heard, bodies, called, open_agent, reopened, say
from support.crash.disks import tiny_tmpfs

# Longer than the free space in pages that a file already has.
LONG: Final = "and so on " * 12_000
WIDE: Final = replace(
    SPEC, limits=Limits(max_context_tokens=1_000_000), tool_output_limit=len(LONG)
)

every_store = pytest.mark.parametrize("store", ["jsonl", "sqlite"])
takes_leases_on_a_full_disk = pytest.mark.parametrize("store", ["jsonl"])
"""SQLite has to write to acquire a lease, and no turn runs without a lease."""
every_disk = pytest.mark.parametrize("kind", ["tmpfs", "limit"])


class Disk(Protocol):
    """A folder whose disk can be filled and emptied."""

    folder: Path

    def fill(self) -> None:
        """Fill the disk."""

    def free(self) -> None:
        """Free some space."""


class _Tmpfs:
    def __init__(self, mounted: Path) -> None:
        self.folder = mounted
        self._ballast = mounted / "ballast"

    def fill(self) -> None:
        with self._ballast.open("wb", buffering=0) as file:
            for size in (1 << 16, 1 << 10, 1):
                try:
                    while file.write(b"x" * size) == size:
                        pass
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise

    def free(self) -> None:
        self._ballast.unlink()


class _Limit:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._usual = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1, self._usual[1]))

    def free(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self._usual)


@pytest.fixture
def disk(tmp_path: Path, kind: str) -> Iterator[Disk]:
    if kind == "tmpfs":
        needs.kernel("mount")
        with tiny_tmpfs(tmp_path, "8m") as mounted:
            yield _Tmpfs(mounted)
    else:
        with _freed(_Limit(tmp_path)) as limited:
            yield limited


@contextmanager
def _freed(limit: _Limit) -> Iterator[_Limit]:
    try:
        yield limit
    finally:
        limit.free()


@asynccontextmanager
async def _loop(
    store: str, disk: Disk, model: ScriptedModel, tools: Sequence[Callable[[], str]] = ()
) -> AsyncIterator[AgentLoop]:
    """Yield a loop with short leases: on a full disk SQLite cannot release them."""
    agent = open_agent(store, disk.folder, model, spec=WIDE, tools=tools)
    loop = AgentLoop(AgentRegistry([agent]), ttl=0.5)
    try:
        yield loop
    finally:
        await asyncio.wait_for(loop.close(), 30)


def _contents(told: list[dict[str, Any]]) -> list[str]:
    return [str(body["content"])[:6] for body in told]


@takes_leases_on_a_full_disk
@every_disk
def test_full_disk_is_reported_and_messages_are_stored_in_order_later(
    store: str, disk: Disk
) -> None:
    model = ScriptedModel([f"to {number}" for number in range(1, 6)])

    async def main() -> None:
        async with _loop(store, disk, model) as loop:
            assert (await say(loop, "said 1")).saved
            disk.fill()
            heard = Heard()
            answer = await say(loop, f"said 2 {LONG}", on_event=heard)
            assert (answer.outcome, answer.text, answer.saved) == ("answered", "to 2", False)
            assert heard.of(SaveFailed)[0].count == 1
            assert "Nothing of it was stored" in heard.of(SaveFailed)[0].text
            # No message is in the log without the messages before it.
            assert _contents(bodies(loop)) == ["said 1", "to 1"]
            assert not (await say(loop, "said 3")).saved
            # The model has seen every message once, in order.
            shown = _contents(model.asked[-1].messages[1:])
            assert shown == ["said 1", "to 1", "said 2", "to 2", "said 3"]
            assert _contents(bodies(loop)) == ["said 1", "to 1"]
            disk.free()
            heard = Heard()
            assert (await say(loop, "said 4", on_event=heard)).saved
            assert [one.count for one in heard.of(SaveRecovered)] == [5]
            assert heard.of(SaveFailed) == []
            assert (await say(loop, "said 5")).saved

    asyncio.run(main())
    talk = [words for number in range(1, 6) for words in (f"said {number}", f"to {number}")]
    assert _contents(reopened(store, disk.folder)) == talk


@every_store
@every_disk
def test_disk_full_during_a_turn_keeps_its_messages_unsaved(store: str, disk: Disk) -> None:
    def fill() -> str:
        """Fill the disk."""
        disk.fill()
        return LONG

    model = ScriptedModel([called("fill"), "It is full.", "There is room."])

    async def main() -> None:
        async with _loop(store, disk, model, [fill]) as loop:
            heard = Heard()
            answer = await say(loop, "Fill it.", on_event=heard)
            assert (answer.outcome, answer.text, answer.saved) == ("answered", "It is full.", False)
            assert heard.of(SaveFailed)[-1].count == 2
            assert [body["role"] for body in bodies(loop)] == ["user", "assistant"]
            disk.free()
            assert (await say(loop, "And now?")).text == "There is room."

    asyncio.run(main())
    roles = [body["role"] for body in reopened(store, disk.folder)]
    assert roles == ["user", "assistant", "tool", "assistant", "user", "assistant"]
    assert [body["role"] for body in model.asked[-1].messages[1:]] == roles[:-1]


@every_store
@every_disk
def test_close_reports_unsaved_messages_and_the_next_start_resumes(store: str, disk: Disk) -> None:
    def fill() -> str:
        """Fill the disk."""
        disk.fill()
        return LONG

    async def before() -> None:
        model = ScriptedModel([called("fill"), "It is full."])
        async with _loop(store, disk, model, [fill]) as loop:
            await say(loop, "Fill it.", id="update-1")
            left = await loop.close()
            assert left.not_saved == 2
            assert "2 messages could not be saved and are lost" in str(left)

    async def after() -> None:
        model = ScriptedModel(["I do not know whether it is full."])
        async with _loop(store, disk, model, [fill]) as loop:
            async with asyncio.timeout(30):
                # If a process end cannot be detected, its lease has to expire first.
                while not (found := await loop.resume()):
                    pass
            [resumed] = found
            assert (resumed.key, resumed.outcome) == (KEY, "answered")
            assert bodies(loop)[2]["content"] == CUT_OFF_TEXT
            again = await say(loop, "Fill it.", id="update-1")
            assert (again.outcome, again.text) == ("again", resumed.text)

    asyncio.run(before())
    disk.free()
    asyncio.run(after())


# Not on a tmpfs: a lease may fit into existing pages of the write-ahead log.
@pytest.mark.parametrize("kind", ["limit"])
def test_sqlite_on_a_full_disk_runs_no_turn_and_answers_later(
    disk: Disk,
) -> None:
    model = ScriptedModel(["to 1", "to 2 and 3"])

    async def main() -> None:
        async with _loop("sqlite", disk, model) as loop:
            await say(loop, "said 1")
            disk.fill()
            for words in (f"said 2 {LONG}", "said 3"):
                answer = await say(loop, words)
                assert (answer.outcome, answer.saved) == ("failed", False)
                assert "could not be reserved" in answer.text
                assert "steno.db" in answer.text
            assert len(model.asked) == 1
            disk.free()
            [answer] = await loop.resume()
            assert answer.text == "to 2 and 3"

    asyncio.run(main())
    told = ["said 1", "to 1", "said 2", "said 3", "to 2 a"]
    assert _contents(reopened("sqlite", disk.folder)) == told


@takes_leases_on_a_full_disk
@every_disk
def test_unsaved_messages_are_stored_without_a_new_message(store: str, disk: Disk) -> None:
    model = ScriptedModel([f"to {number}" for number in range(1, 6)])

    async def main() -> None:
        async with _loop(store, disk, model) as loop:
            await say(loop, "said 1")
            disk.fill()
            assert not (await say(loop, f"said 2 {LONG}")).saved
            disk.free()
            await loop.resume()
            assert _contents(bodies(loop)) == ["said 1", "to 1", "said 2", "to 2"]
            disk.fill()
            assert not (await say(loop, f"said 3 {LONG}")).saved
            disk.free()
            left = await asyncio.wait_for(loop.close(), 30)
            assert left.not_saved == 0

    asyncio.run(main())
    assert _contents(reopened(store, disk.folder))[-2:] == ["said 3", "to 3"]


@every_store
@every_disk
def test_unsaved_messages_are_limited_in_size(
    store: str, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stenolog.agent.scheduler._MAX_UNSAVED_BYTES", len(LONG))

    async def main() -> None:
        async with _loop(store, disk, ScriptedModel(["to 1", "to 2", "to 3"])) as loop:
            disk.fill()
            assert not (await say(loop, f"said 1 {LONG}")).saved
            with pytest.raises(StoreUnavailable, match="too many are waiting"):
                await say(loop, "said 2", key="cli:another")
            disk.free()
            await loop.resume()
            assert (await say(loop, "said 3")).saved

    asyncio.run(main())
