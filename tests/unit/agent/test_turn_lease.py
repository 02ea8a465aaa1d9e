"""Tests that a turn runs only while its process holds the lease of the session."""

import asyncio
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stenolog.agent.lease_renewal import HeldLease
from stenolog.agent.tools import Tool, tool
from stenolog.errors import DamagedStore
from stenolog.stores.base import Store
from stenolog.stores.in_memory import InMemoryStore
from stenolog.stores.jsonl.leases import FOLDER, JSONLLease, lock_name
from stenolog.testing.scripted_model import ScriptedModel
from support.agents import KEY, agent_loop, called, roles, say


def _paying(paid: list[str], name: str) -> Tool:
    @tool()
    def pay() -> str:
        """Pay a bill."""
        paid.append(name)
        return "paid"

    return pay


def _scripted(name: str) -> ScriptedModel:
    return ScriptedModel([called("pay", id=f"call-{name}"), f"{name}: it is paid."])


@pytest.fixture
def block_lease(tmp_path: Path) -> Callable[[], Path]:
    """Return a function that makes the lease fail and returns what to remove to repair it.

    A directory at the path of the lock file fails like a lock file of another user.
    """

    def block() -> Path:
        path = tmp_path / "sessions" / FOLDER / lock_name(KEY)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir()
        return path

    return block


def test_turn_without_lease_does_not_run_in_any_process(
    tmp_path: Path, block_lease: Callable[[], Path]
) -> None:
    async def main() -> None:
        paid: list[str] = []
        async with (
            agent_loop("jsonl", tmp_path, _scripted("A"), tools=[_paying(paid, "A")]) as first,
            agent_loop("jsonl", tmp_path, _scripted("B"), tools=[_paying(paid, "B")]) as second,
        ):
            block_lease()
            answers = await asyncio.gather(
                *(say(loop, "Pay my bill.", id="update-1") for loop in (first, second))
            )
            for answer in answers:
                assert (answer.outcome, answer.saved) == ("failed", True)
                assert isinstance(answer.error, DamagedStore)
                for text in ("could not be reserved", "Is a directory", "answered as soon as"):
                    assert text in answer.text
            assert paid == []
            assert roles(first) == ["user"]

    asyncio.run(main())


def test_change_without_lease_raises_the_error_of_the_store(
    tmp_path: Path, block_lease: Callable[[], Path]
) -> None:
    changed: list[str] = []

    async def change(_: Store) -> None:
        changed.append("changed")

    async def main() -> None:
        async with agent_loop("jsonl", tmp_path, ["Never."]) as loop:
            block_lease()
            answer = await loop.change_and_answer(KEY, change)
            assert isinstance(answer.error, DamagedStore)
            assert "answered as soon as" not in answer.text

    asyncio.run(main())
    assert changed == []


def test_message_is_answered_once_the_lease_works_again(
    tmp_path: Path, block_lease: Callable[[], Path]
) -> None:
    async def main() -> None:
        paid: list[str] = []
        async with agent_loop(
            "jsonl", tmp_path, _scripted("A"), tools=[_paying(paid, "A")]
        ) as loop:
            blocking = block_lease()
            assert (await say(loop, "Pay my bill.")).outcome == "failed"
            blocking.rmdir()
            [answer] = await loop.resume()
            assert answer.text == "A: it is paid."
            assert paid == ["A"]

    asyncio.run(main())


def test_redelivered_message_is_answered_once_the_lease_works_again(
    tmp_path: Path, block_lease: Callable[[], Path]
) -> None:
    async def main() -> None:
        async with agent_loop("jsonl", tmp_path, ["Hello."]) as loop:
            blocking = block_lease()
            assert (await say(loop, "Hi.", id="7")).outcome == "failed"
            blocking.rmdir()
            answer = await say(loop, "Hi.", id="7")
            assert (answer.outcome, answer.text) == ("answered", "Hello.")
            assert roles(loop) == ["user", "assistant"]

    asyncio.run(main())


def test_command_without_lease_changes_nothing(
    tmp_path: Path, block_lease: Callable[[], Path]
) -> None:
    async def main() -> None:
        async with agent_loop("jsonl", tmp_path, ["One.", "Two."]) as loop:
            assert (await say(loop, "Hi.")).text == "One."
            await loop.wait_until_idle()
            path = tmp_path / "sessions" / FOLDER / lock_name(KEY)
            path.unlink()
            block_lease()
            for command in ("/retry", "/edit Ho.", "/clear"):
                assert "Is a directory" in (await say(loop, command)).text
            assert roles(loop) == ["user", "assistant"]

    asyncio.run(main())


_OUT_OF_DESCRIPTORS = """
    import asyncio, os, resource, sys
    from pathlib import Path
    from support.agents import agent_loop, called, say
    from stenolog.agent.tools import tool

    paid = []

    @tool()
    def pay() -> str:
        "Pay a bill."
        paid.append("x")
        return "paid"

    def fill():
        held = []
        try:
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        except OSError:
            return held

    async def main():
        script = ["Warm.", "Hi.", called("pay"), "Paid."]
        async with agent_loop("jsonl", Path(sys.argv[1]), script, tools=[pay]) as loop:
            await say(loop, "Warm up.", key="other")
            await say(loop, "Hi.")
            await loop.wait_until_idle()
            _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (128, hard))
            held = fill()
            answer = await say(loop, "Pay my bill.")
            for descriptor in held:
                os.close(descriptor)
            print(answer.outcome, len(paid))
            answers = await loop.resume() or [await say(loop, "Again.")]
            print(answers[0].text, len(paid))

    asyncio.run(main())
"""


def test_turn_does_not_run_in_a_process_without_file_descriptors(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(_OUT_OF_DESCRIPTORS), str(tmp_path)],
        cwd=Path(__file__).parents[2],
        env={"PYTHONPATH": "."},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.stdout.splitlines() == ["failed 0", "Paid. 1"], ran.stderr


@pytest.mark.parametrize("store", ["jsonl", "sqlite"])
def test_cancelled_message_that_has_taken_the_lease_releases_it(store: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with agent_loop(store, tmp_path, ["one", "two"]) as loop:
            await say(loop, "first")
            await loop.wait_until_idle()
            agent = loop.registry.agent()
            lease, begun, go_on = agent.store.lease, threading.Event(), threading.Event()
            was_locked: list[bool] = []

            def lease_slowly(*values: Any, **named: Any) -> Any:
                begun.set()
                assert go_on.wait(30)
                taken = lease(*values, **named)
                release = taken.release

                def release_and_note(_: Any) -> None:
                    [session] = loop._scheduler._sessions
                    was_locked.append(session.lock.locked())
                    release()

                patch.setattr(type(taken), "release", release_and_note)
                return taken

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(agent.store, "lease", lease_slowly)
                asking = asyncio.create_task(say(loop, "second"))
                await asyncio.to_thread(begun.wait, 30)
                asking.cancel()
                go_on.set()
                with pytest.raises(asyncio.CancelledError):
                    await asking
            agent.store.lease(KEY, ttl=60, wait=0).release()
            assert roles(loop) == ["user", "assistant", "user"]
            assert was_locked == [True]  # the next turn of this process starts with a free lease

    asyncio.run(main())


def test_released_lease_is_neither_renewed_nor_released_again() -> None:
    store = InMemoryStore()
    store.add_message(KEY, "user", "hello")
    held = HeldLease(store.lease(KEY, ttl=60))
    held.renew()
    held.release()
    next_lease = store.lease(KEY, ttl=60, wait=0)
    held.renew()  # a turn has released the lease while its renewal was due
    held.release()
    assert not next_lease.lost


def test_error_of_the_release_after_the_answer_does_not_fail_the_turn(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(_: object) -> None:
        raise OSError("the lock server is gone")

    async def main() -> None:
        async with agent_loop("jsonl", tmp_path, ["Hello."]) as loop:
            monkeypatch.setattr(JSONLLease, "release", fail)
            assert (await say(loop, "Hi.")).text == "Hello."
            monkeypatch.undo()

    asyncio.run(main())
