"""The crash contract: the content that a store must have after its writer was killed.

`kill -9` shows whether stored data was still only in the memory of the process. Only a power cut
would show whether data was synced to the disk.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any, ClassVar, Self

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stenolog.errors import NoSuchSession, SessionDeleted, StoreBusy
from stenolog.stores.base import Store
from stenolog.stores.in_memory import InMemoryStore
from support.contract.call_table import WRITE_CALLS
from support.contract.open_store_base import (
    append,
    assert_raises,
    user_message,
    user_messages,
    visible_texts,
)
from support.store_calls import (
    Call,
    all_contents,
    open_with_factory,
    session_content,
    trash_content,
)
from support.strategies import operations

KEY = "telegram:123"

_SCRIPT = (
    Call("add_message", "user", "1"),
    Call("add_messages", user_messages(*"234"), once="t1"),
    Call("set_meta", title="A talk"),
    Call("set_summary", "so far"),
    Call("set_history", user_messages(*"1xy")),
    Call("undo"),
    Call("hide", 3, 3),
    Call("show", 3, 3),
    Call("add_full_message", {"role": "tool", "content": "z" * 20_000}),
    Call("checkpoint", summary="up to two", upto=2),
    Call("compact"),
    Call("fork", "fork"),
    Call("add_messages", user_messages("5", "6")),
    Call("delete"),
    Call("restore"),
    Call("pop"),
    Call("truncate_history", 1),
    Call("compact"),
    Call("set_summary", "long " * 3000),
    Call("add_message", "user", "7", once="t2"),
    Call("clear"),
    Call("undo"),
    Call("undo"),
    Call("set_history", []),
    Call("compact"),
    Call("undo"),
    Call("purge", before=6),
    Call("delete"),
    Call("add_message", "user", "another life"),
    Call("compact"),
    Call("delete"),
    Call("restore"),
    Call("purge"),
    Call("add_message", "user", "8"),
    Call("set_meta", title="A talk"),
)
"""Calls in an order in which each call has an effect."""

_SCRIPTED = {call.name for call in _SCRIPT}
SCRIPT = (*_SCRIPT, *(call for call in WRITE_CALLS if call.name not in _SCRIPTED))
"""Every call that writes."""


class CrashContract:
    """Tests for a store that outlives its process.

    A subclass sets `factory`: the function that opens the store, as `module:function`. The function
    gets one argument: the folder of the test, unless `where` is overridden.
    """

    factory: ClassVar[str]

    def where(self, path: Path) -> str:
        """Return the argument of the factory for a store in this folder."""
        return str(path)

    def open(self, path: Path) -> Store:
        """Open the store in this folder."""
        return open_with_factory(self.factory, self.where(path))

    @contextmanager
    def start_writer(self, path: Path, calls: Sequence[Call]) -> Iterator["Writer"]:
        """Start a process that makes these calls. The process is killed when the `with` ends."""
        call_lines = "".join(
            json.dumps([KEY, call.name, call.arguments, call.options]) + "\n" for call in calls
        )
        module = "support.store_calls"
        command = [sys.executable, "-m", module, self.factory, self.where(path)]
        with TemporaryFile("w+") as calls_file:
            calls_file.write(call_lines)
            calls_file.seek(0)
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
            with subprocess.Popen(
                command, stdin=calls_file, stdout=subprocess.PIPE, env=environment
            ) as process:
                try:
                    yield Writer(process)
                finally:
                    process.kill()

    # --- kill -9 -----------------------------------------------------------------------------

    def test_p1_every_acknowledged_message_survives_kill_9(self, tmp_path: Path) -> None:
        randomness = random.Random(1)
        acked_texts: dict[int, str] = {}
        for run in range(4):
            calls = [Call("add_message", "user", f"{run}.{n}") for n in range(3000)]
            with self.start_writer(tmp_path, calls) as writer:
                killed_writer = writer.kill_during(randomness.randrange(1, 150), randomness)
            acked_texts |= {seq: f"{run}.{n}" for n, seq in enumerate(killed_writer.results)}
            with self.open(tmp_path) as store:
                texts = {m.seq: m.content for m in store.get_history(KEY)}
                assert sorted(texts) == list(texts)
                assert acked_texts.items() <= texts.items()
                # The message of the interrupted call may be stored, too.
                run_texts = [text for text in texts.values() if text.startswith(f"{run}.")]
                assert run_texts == [f"{run}.{n}" for n in range(len(run_texts))]
                assert len(run_texts) in (len(killed_writer.results), killed_writer.started_count)
                assert len(set(texts.values())) == len(texts)
                seq = store.add_message(KEY, "user", f"after kill {run}")
                acked_texts[seq] = f"after kill {run}"
            acked_count = len(killed_writer.results)
            print(f"{acked_count} messages were acknowledged, {len(run_texts)} are stored")

    @pytest.mark.parametrize(
        "call_index", range(len(SCRIPT)), ids=lambda n: f"{n}-{SCRIPT[n].name}"
    )
    def test_p2_killed_operation_is_complete_or_absent(
        self, tmp_path: Path, call_index: int
    ) -> None:
        with self.start_writer(tmp_path, SCRIPT) as writer:
            killed_writer = writer.kill_during(call_index, random.Random(call_index))
        done_count, call = len(killed_writer.results), SCRIPT[killed_writer.started_count - 1]
        before, after = (
            _expected_content(done_count),
            _expected_content(killed_writer.started_count),
        )
        with self.open(tmp_path) as store:
            if call.name == "purge" and _sessions_and_trash(store) != before:
                # A second call finishes an interrupted purge.
                with suppress(NoSuchSession):
                    call.make(store, KEY)
            assert _sessions_and_trash(store) in (before, after)
            print(f"in {call.name}: {'whole' if _sessions_and_trash(store) == after else 'absent'}")
            content = session_content(store, KEY)
            store.add_message(KEY, "user", "after the crash")
            texts = visible_texts(store, KEY)
        assert texts[-1] == "after the crash"
        assert len(texts) == 1 + (content["visible"] if content is not None else 0)
        with self.open(tmp_path) as store:
            assert visible_texts(store, KEY) == texts

    def test_p2_killed_batch_is_complete_or_absent(self, tmp_path: Path) -> None:
        calls = [
            Call("add_messages", [user_message(f"{n}.{part}") for part in range(20)])
            for n in range(200)
        ]
        for run in range(3):
            folder = tmp_path / str(run)
            folder.mkdir(mode=0o700)
            with self.start_writer(folder, calls) as writer:
                killed_writer = writer.kill_during(3 + run, random.Random(run))
            with self.open(folder) as store:
                texts = visible_texts(store, KEY)
            assert texts == [f"{n}.{part}" for n in range(len(texts) // 20) for part in range(20)]
            assert len(texts) // 20 in (len(killed_writer.results), killed_writer.started_count)

    def test_p12_calls_repeated_after_a_kill_are_stored_once(self, tmp_path: Path) -> None:
        calls = [
            Call("add_messages", [user_message(f"{n}{part}") for part in "ab"], once=f"t{n}")
            for n in range(60)
        ]
        with self.start_writer(tmp_path, calls) as writer:
            killed_writer = writer.kill_during(25, random.Random(2))
        with self.open(tmp_path) as store:
            results = [call.make(store, KEY) for call in calls]
            assert results[: len(killed_writer.results)] == killed_writer.results
            assert visible_texts(store, KEY) == [f"{n}{part}" for n in range(60) for part in "ab"]

    def test_p7_killed_writer_does_not_affect_another_writer(self, tmp_path: Path) -> None:
        first_calls, second_calls = (
            [Call("add_message", "user", f"{name}.{n}") for n in range(200)] for name in "ab"
        )
        with (
            self.start_writer(tmp_path, first_calls) as first_writer,
            self.start_writer(tmp_path, second_calls) as second_writer,
        ):
            killed_writer = first_writer.kill_during(60, random.Random(3))
            finished_writer = second_writer.finish()
        assert len(finished_writer.results) == 200
        with self.open(tmp_path) as store:
            texts = {m.seq: m.content for m in store.get_history(KEY)}
        for name, done in (("a", killed_writer.results), ("b", finished_writer.results)):
            assert [texts[seq] for seq in done] == [f"{name}.{n}" for n in range(len(done))]
        assert len(texts) - len(finished_writer.results) in (
            len(killed_writer.results),
            killed_writer.started_count,
        )
        assert len(set(texts.values())) == len(texts)

    # --- several stores, and stores that are opened again -------------------------------------

    def test_p2_each_operation_is_visible_to_another_store(self, tmp_path: Path) -> None:
        with self.open(tmp_path) as writing_store:
            for call_count, call in enumerate(SCRIPT, start=1):
                call.make(writing_store, KEY)
                with self.open(tmp_path) as reading_store:
                    assert _sessions_and_trash(reading_store) == _expected_content(call_count)

    def test_p7_two_stores_writing_alternately_agree(self, tmp_path: Path) -> None:
        reference_store = InMemoryStore()
        with self.open(tmp_path) as first, self.open(tmp_path) as second:
            for call_index, call in enumerate(SCRIPT):
                store = (first, second)[call_index % 2]
                assert call.outcome(store, KEY) == call.outcome(reference_store, KEY)
                assert (
                    _sessions_and_trash(first)
                    == _sessions_and_trash(second)
                    == _sessions_and_trash(reference_store)
                )

    def test_p4_undo_continues_after_reopening(self, tmp_path: Path) -> None:
        with self.open(tmp_path) as store:
            append(store, KEY, "1", "2", "3")
            store.truncate_history(KEY, 1)
            store.compact(KEY)
            store.set_history(KEY, user_messages("x"))
        with self.open(tmp_path) as store:
            assert store.undo(KEY).op == "replace"
        with self.open(tmp_path) as store:
            assert store.undo(KEY).op == "truncate"
            assert visible_texts(store, KEY) == ["1", "2", "3"]

    def test_p12_idempotency_keys_are_known_after_reopening(self, tmp_path: Path) -> None:
        store = self.open(tmp_path)
        store.add_message(KEY, "user", "x", once="\ud800 t1")
        store.add_messages(KEY, user_messages(*"yz"), once="t2")
        store.clear(KEY)
        store.compact(KEY)
        with self.open(tmp_path) as reopened:
            assert reopened.add_message(KEY, "user", "x", once="\ud800 t1") == 1
            assert reopened.add_messages(KEY, user_messages(*"yz"), once="t2") == [2, 3]
            assert reopened.info(KEY).count == 3
        store.close()

    def test_uid_and_times_survive_reopening(self, tmp_path: Path) -> None:
        with self.open(tmp_path) as store:
            append(store, KEY, "1")
            info_before, [message_before] = store.info(KEY), store.get_history(KEY)
        with self.open(tmp_path) as store:
            info_after, [message_after] = store.info(KEY), store.get_history(KEY)
        assert (info_after.uid, info_after.created) == (info_before.uid, info_before.created)
        assert (info_after.updated, message_after.at) == (info_before.updated, message_before.at)

    def test_p7_follow_returns_messages_of_another_store(self, tmp_path: Path) -> None:
        with self.open(tmp_path) as first, self.open(tmp_path) as second:
            new_messages = first.follow(KEY, timeout=60)
            append(second, KEY, "1", "2")
            assert [next(new_messages).content, next(new_messages).content] == ["1", "2"]
            second.clear(KEY)
            second.compact(KEY)
            append(second, KEY, "3")
            assert next(new_messages).content == "3"

    def test_p4_a_deleted_session_is_restored_by_another_store(self, tmp_path: Path) -> None:
        with self.open(tmp_path) as first, self.open(tmp_path) as second:
            append(first, KEY, "1", "2")
            content_before = session_content(second, KEY)
            new_messages = second.follow(KEY, after=1, timeout=60)
            assert next(new_messages).content == "2"
            first.delete(KEY)
            assert_raises(SessionDeleted, next, new_messages)
            assert second.admin.list_trash() == first.admin.list_trash()
            second.admin.restore(KEY)
            assert session_content(first, KEY) == content_before
            assert append(first, KEY, "3") == [3]
            assert visible_texts(second, KEY) == ["1", "2", "3"]

    def test_p7_one_store_at_a_time_holds_the_lease(self, tmp_path: Path) -> None:
        with self.open(tmp_path) as first, self.open(tmp_path) as second:
            append(first, KEY, "1")
            with first.lease(KEY, ttl=60) as lease:
                assert_raises(StoreBusy, second.lease, KEY, ttl=60, wait=0.01)
                append(second, KEY, "plain calls work")
            with second.lease(KEY, ttl=60, wait=0) as next_lease:
                assert next_lease.epoch > lease.epoch

    def test_closing_a_store_frees_its_leases(self, tmp_path: Path) -> None:
        with self.open(tmp_path) as other_store:
            with self.open(tmp_path) as closed_store:
                append(closed_store, KEY, "1")
                closed_store.lease(KEY, ttl=3600)
            other_store.lease(KEY, ttl=60, wait=1).release()

    @settings(
        max_examples=25,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.differing_executors, HealthCheck.too_slow],
    )
    @given(calls=st.lists(operations(), max_size=30))
    def test_p2_results_of_any_calls_survive_reopening(self, calls: list[Call]) -> None:
        reference_store = InMemoryStore()
        with TemporaryDirectory() as folder:
            # Leave the store open, like a process that ends without closing the store.
            store = self.open(Path(folder))
            for call in calls:
                assert call.outcome(store, KEY) == call.outcome(reference_store, KEY)
            with self.open(Path(folder)) as reopened:
                assert session_content(reopened, KEY) == session_content(reference_store, KEY)
            store.close()


class Writer:
    """A process that makes calls on a store, controlled by the test."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.started_count = 0
        """Number of calls that were started."""
        self.results: list[Any] = []
        """Results of the calls that returned."""

    def kill_during(self, call_index: int, randomness: random.Random) -> Self:
        """Wait until the call with this index starts, and kill the process up to 0.5 ms later."""
        while self.started_count <= call_index and self._read_report():
            pass
        time.sleep(randomness.random() * 0.0005)
        os.kill(self._process.pid, signal.SIGKILL)
        return self.finish()

    def finish(self) -> Self:
        """Wait until the process ends."""
        while self._read_report():
            pass
        return self

    def _read_report(self) -> bool:
        """Read one line that the process printed; return False after the last line."""
        assert self._process.stdout is not None, "it is a pipe"
        line = self._process.stdout.readline()
        if not line.endswith(b"\n"):
            return False
        event, call_index, result = json.loads(line)
        if event == "begin":
            self.started_count = call_index + 1
        else:
            self.results.append(result)
        return True


def _sessions_and_trash(store: Store) -> tuple[Any, Any]:
    """Return the content of all sessions, and of the trash."""
    return all_contents(store), trash_content(store)


def _expected_content(call_count: int) -> tuple[Any, Any]:
    """Return the expected sessions and trash after the first `call_count` calls of SCRIPT."""
    reference_store = InMemoryStore()
    for call in SCRIPT[:call_count]:
        call.make(reference_store, KEY)
    return _sessions_and_trash(reference_store)
