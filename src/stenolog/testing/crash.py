"""The crash contract: what a store must contain after its writing process was killed.

`kill -9` proves that no data waits in the memory of the process. Only a power cut would show
whether data was synced.
"""
# ruff: noqa: D102 - the name of a test describes it

import importlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any, ClassVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stenolog.errors import NoSuchSession, SessionDeleted, StoreBusy
from stenolog.stores.base import Store
from stenolog.stores.in_memory import InMemoryStore
from stenolog.testing import crash_writer
from stenolog.testing.contract.open_store_base import say, shown, user
from stenolog.testing.store_calls import Call, all_contents, session_content, trash_content
from stenolog.testing.strategies import operations

KEY = "telegram:123"

SCRIPT = (
    Call("add_message", ("user", "1")),
    Call("add_messages", ([user("2"), user("3"), user("4")],), {"once": "t1"}),
    Call("set_meta", (), {"title": "A talk"}),
    Call("set_summary", ("so far",)),
    Call("set_history", ([user("1"), user("x"), user("y")],)),
    Call("undo"),
    Call("hide", (3, 3)),
    Call("add_full_message", ({"role": "tool", "content": "z" * 20_000},)),
    Call("checkpoint", (), {"summary": "up to two", "upto": 2}),
    Call("compact"),
    Call("fork", ("fork",)),
    Call("add_messages", ([user("5"), user("6")],)),
    Call("delete"),
    Call("restore"),
    Call("pop"),
    Call("truncate_history", (1,)),
    Call("compact"),
    Call("set_summary", ("long " * 3000,)),
    Call("add_message", ("user", "7"), {"once": "t2"}),
    Call("clear"),
    Call("undo"),
    Call("undo"),
    Call("set_history", ([],)),
    Call("compact"),
    Call("undo"),
    Call("purge", (), {"before": 6}),
    Call("delete"),
    Call("add_message", ("user", "another life")),
    Call("compact"),
    Call("delete"),
    Call("restore"),
    Call("purge"),
    Call("add_message", ("user", "8")),
    Call("set_meta", (), {"title": "A talk"}),
)
"""Calls of every operation, each on a session on which it has an effect."""


@dataclass(frozen=True, slots=True)
class Killed:
    """The progress of a killed writer."""

    begun: int
    done: list[Any]
    """Results of the calls that returned."""


class CrashContract:
    """Tests for a store that outlives its process.

    A subclass names the function that opens it, as `module:function`. It is called with one text:
    the folder of the test, unless `where` is overridden.
    """

    factory: ClassVar[str]

    def where(self, path: Path) -> str:
        """Return the argument of the factory for a store in this folder."""
        return str(path)

    def open(self, path: Path) -> Store:
        """Open the store in this folder."""
        module, _, function = self.factory.partition(":")
        store: Store = getattr(importlib.import_module(module), function)(self.where(path))
        return store

    @contextmanager
    def writing(self, path: Path, calls: Sequence[Call]) -> Iterator["Writer"]:
        """Start a process that makes these calls. It is killed at the end in any case."""
        lines = "".join(
            json.dumps([KEY, call.name, call.arguments, call.options]) + "\n" for call in calls
        )
        command = [sys.executable, crash_writer.__file__, self.factory, self.where(path)]
        with TemporaryDirectory() as folder:
            told = Path(folder) / "calls"
            told.write_text(lines)
            with (
                told.open() as given,
                subprocess.Popen(
                    command,
                    stdin=given,
                    stdout=subprocess.PIPE,
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
                ) as process,
            ):
                try:
                    yield Writer(process)
                finally:
                    process.kill()

    # --- kill -9 -----------------------------------------------------------------------------

    def test_p1_every_acknowledged_message_survives_kill_9(self, tmp_path: Path) -> None:
        chance = random.Random(1)
        acknowledged: dict[int, str] = {}
        for turn in range(4):
            calls = [Call("add_message", ("user", f"{turn}.{n}")) for n in range(3000)]
            with self.writing(tmp_path, calls) as writer:
                killed = writer.kill_in(chance.randrange(1, 150), chance)
            acknowledged |= {seq: f"{turn}.{n}" for n, seq in enumerate(killed.done)}
            with self.open(tmp_path) as store:
                found = {m.seq: m.content for m in store.get_history(KEY)}
                assert sorted(found) == list(found)
                assert acknowledged.items() <= found.items()
                # The interrupted message may be stored too: it was not rejected.
                own = [text for text in found.values() if text.startswith(f"{turn}.")]
                assert own == [f"{turn}.{n}" for n in range(len(own))]
                assert len(own) in (len(killed.done), killed.begun)
                assert len(set(found.values())) == len(found)
                seq = store.add_message(KEY, "user", f"after kill {turn}")
                acknowledged[seq] = f"after kill {turn}"
            print(f"{len(killed.done)} messages were acknowledged, {len(own)} are there")

    @pytest.mark.parametrize("hit", range(len(SCRIPT)), ids=lambda n: f"{n}-{SCRIPT[n].name}")
    def test_p2_killed_operation_is_complete_or_absent(self, tmp_path: Path, hit: int) -> None:
        with self.writing(tmp_path, SCRIPT) as writer:
            killed = writer.kill_in(hit, random.Random(hit))
        done, hit_call = len(killed.done), SCRIPT[killed.begun - 1]
        before, after = _expected(done), _expected(killed.begun)
        with self.open(tmp_path) as store:
            if hit_call.name == "purge" and _shown(store) != before:
                # A purge that was started is finished by the same call.
                with suppress(NoSuchSession):
                    hit_call.make(store, KEY)
            assert _shown(store) in (before, after)
            print(f"in {hit_call.name}: {'whole' if _shown(store) == after else 'absent'}")
            found = session_content(store, KEY)
            store.add_message(KEY, "user", "after the crash")
            contents = shown(store, KEY)
        assert contents[-1] == "after the crash"
        assert len(contents) == 1 + (len(found.visible) if found is not None else 0)
        with self.open(tmp_path) as store:
            assert shown(store, KEY) == contents

    def test_p2_killed_batch_is_complete_or_absent(self, tmp_path: Path) -> None:
        calls = [
            Call("add_messages", ([user(f"{n}.{part}") for part in range(20)],)) for n in range(200)
        ]
        for turn in range(3):
            place = tmp_path / str(turn)
            place.mkdir(mode=0o700)
            with self.writing(place, calls) as writer:
                killed = writer.kill_in(3 + turn, random.Random(turn))
            with self.open(place) as store:
                found = shown(store, KEY)
            assert found == [f"{n}.{part}" for n in range(len(found) // 20) for part in range(20)]
            assert len(found) // 20 in (len(killed.done), killed.begun)

    def test_p12_calls_repeated_after_a_kill_are_stored_once(self, tmp_path: Path) -> None:
        calls = [
            Call("add_messages", ([user(f"{n}a"), user(f"{n}b")],), {"once": f"t{n}"})
            for n in range(60)
        ]
        with self.writing(tmp_path, calls) as writer:
            killed = writer.kill_in(25, random.Random(2))
        with self.open(tmp_path) as store:
            given = [call.make(store, KEY) for call in calls]
            assert given[: len(killed.done)] == killed.done
            assert shown(store, KEY) == [f"{n}{part}" for n in range(60) for part in "ab"]

    def test_p7_killed_writer_does_not_affect_another_writer(self, tmp_path: Path) -> None:
        mine, other = (
            [Call("add_message", ("user", f"{name}.{n}")) for n in range(200)] for name in "ab"
        )
        with self.writing(tmp_path, mine) as one, self.writing(tmp_path, other) as two:
            killed = one.kill_in(60, random.Random(3))
            finished = two.finish()
        assert len(finished.done) == 200
        with self.open(tmp_path) as store:
            found = {m.seq: m.content for m in store.get_history(KEY)}
        for name, done in (("a", killed.done), ("b", finished.done)):
            assert [found[seq] for seq in done] == [f"{name}.{n}" for n in range(len(done))]
        assert len(found) - len(finished.done) in (len(killed.done), killed.begun)
        assert len(set(found.values())) == len(found)

    # --- gone without a word -----------------------------------------------------------------

    def test_p2_each_operation_is_visible_to_another_store(self, tmp_path: Path) -> None:
        with self.open(tmp_path) as writing:
            for number, call in enumerate(SCRIPT, start=1):
                call.make(writing, KEY)
                with self.open(tmp_path) as reading:
                    assert _shown(reading) == _expected(number)

    def test_p7_two_stores_writing_alternately_agree(self, tmp_path: Path) -> None:
        model = InMemoryStore()
        with self.open(tmp_path) as one, self.open(tmp_path) as two:
            for number, call in enumerate(SCRIPT):
                store = (one, two)[number % 2]
                assert call.outcome(store, KEY) == call.outcome(model, KEY)
                assert _shown(one) == _shown(two) == _shown(model)

    def test_p4_undo_continues_after_reopening(self, tmp_path: Path) -> None:
        with self.open(tmp_path) as store:
            say(store, KEY, "1", "2", "3")
            store.truncate_history(KEY, 1)
            store.compact(KEY)
            store.set_history(KEY, [user("x")])
        with self.open(tmp_path) as store:
            assert store.undo(KEY).op == "replace"
        with self.open(tmp_path) as store:
            assert store.undo(KEY).op == "truncate"
            assert shown(store, KEY) == ["1", "2", "3"]

    def test_p12_idempotency_keys_are_known_after_reopening(self, tmp_path: Path) -> None:
        store = self.open(tmp_path)
        store.add_message(KEY, "user", "x", once="\ud800 t1")
        store.add_messages(KEY, [user("y"), user("z")], once="t2")
        store.clear(KEY)
        store.compact(KEY)
        with self.open(tmp_path) as again:
            assert again.add_message(KEY, "user", "x", once="\ud800 t1") == 1
            assert again.add_messages(KEY, [user("y"), user("z")], once="t2") == [2, 3]
            assert again.info(KEY).count == 3
        store.close()

    def test_uid_and_times_survive_reopening(self, tmp_path: Path) -> None:
        with self.open(tmp_path) as store:
            say(store, KEY, "1")
            before, [message] = store.info(KEY), store.get_history(KEY)
        with self.open(tmp_path) as store:
            after, [again] = store.info(KEY), store.get_history(KEY)
        assert (after.uid, after.created, after.updated) == (
            before.uid,
            before.created,
            before.updated,
        )
        assert again.at == message.at

    def test_p7_follow_returns_messages_of_another_store(self, tmp_path: Path) -> None:
        with self.open(tmp_path) as one, self.open(tmp_path) as two:
            following = one.follow(KEY, timeout=60)
            say(two, KEY, "1", "2")
            assert [next(following).content, next(following).content] == ["1", "2"]
            two.clear(KEY)
            two.compact(KEY)
            say(two, KEY, "3")
            assert next(following).content == "3"

    def test_p4_a_deleted_session_is_restored_by_another_store(self, tmp_path: Path) -> None:
        with self.open(tmp_path) as one, self.open(tmp_path) as two:
            say(one, KEY, "1", "2")
            before = session_content(two, KEY)
            following = two.follow(KEY, after=1, timeout=60)
            assert next(following).content == "2"
            one.delete(KEY)
            with pytest.raises(SessionDeleted):
                next(following)
            assert two.list_trash() == one.list_trash()
            two.restore(KEY)
            assert session_content(one, KEY) == before
            assert say(one, KEY, "3") == [3]
            assert shown(two, KEY) == ["1", "2", "3"]

    def test_p7_one_store_at_a_time_holds_the_lease(self, tmp_path: Path) -> None:
        with self.open(tmp_path) as one, self.open(tmp_path) as two:
            say(one, KEY, "1")
            with one.lease(KEY, ttl=60) as first:
                with pytest.raises(StoreBusy):
                    two.lease(KEY, ttl=60, wait=0.01)
                say(two, KEY, "plain calls work")
            with two.lease(KEY, ttl=60, wait=0) as second:
                assert second.epoch > first.epoch

    def test_closing_a_store_frees_its_leases(self, tmp_path: Path) -> None:
        with self.open(tmp_path) as two:
            with self.open(tmp_path) as one:
                say(one, KEY, "1")
                one.lease(KEY, ttl=3600)
            two.lease(KEY, ttl=60, wait=1).release()

    @settings(
        max_examples=25,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.differing_executors, HealthCheck.too_slow],
    )
    @given(calls=st.lists(operations(), max_size=30))
    def test_p2_results_of_any_calls_survive_reopening(self, calls: list[Call]) -> None:
        model = InMemoryStore()
        with TemporaryDirectory() as folder:
            # Left open, as by a process that ends without closing the store.
            store = self.open(Path(folder))
            for call in calls:
                assert call.outcome(store, KEY) == call.outcome(model, KEY)
            with self.open(Path(folder)) as again:
                assert session_content(again, KEY) == session_content(model, KEY)
            store.close()


class Writer:
    """A process that makes calls, as seen from the test."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._begun = 0
        self._done: list[Any] = []

    def kill_in(self, number: int, chance: random.Random) -> Killed:
        """Wait for the call with this number, kill the process during it, return the progress."""
        while self._begun <= number and self._hear():
            pass
        time.sleep(chance.random() * 0.0005)
        os.kill(self._process.pid, signal.SIGKILL)
        return self.finish()

    def finish(self) -> Killed:
        """Wait until the process ends."""
        while self._hear():
            pass
        return Killed(self._begun, self._done)

    def _hear(self) -> bool:
        output: IO[bytes] | None = self._process.stdout
        line = output.readline() if output is not None else b""
        if not line.endswith(b"\n"):
            return False
        word, number, result = json.loads(line)
        if word == "begin":
            self._begun = number + 1
        else:
            self._done.append(result)
        return True


def _shown(store: Store) -> tuple[Any, Any]:
    """Return all sessions, and the trash."""
    return all_contents(store), trash_content(store)


def _expected(count: int) -> tuple[Any, Any]:
    """Return all sessions and the trash after the first `count` calls of the script."""
    model = InMemoryStore()
    for call in SCRIPT[:count]:
        call.make(model, KEY)
    return _shown(model)
