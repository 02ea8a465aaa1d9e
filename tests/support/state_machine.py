"""A hypothesis state machine that makes random calls on a store and on an in-memory reference.

After every step the store is compared with the reference. Steps include reopening, crashes and torn
writes. Run a subclass with `hypothesis.stateful.run_state_machine_as_test`.
"""

import os
from abc import abstractmethod
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from hypothesis.strategies import SearchStrategy

from stenolog.errors import NoSuchSession
from stenolog.stores.base import SessionView, Store
from stenolog.stores.in_memory import InMemoryStore
from support.contract.call_table import CHANGING_CALLS
from support.store_calls import Call, session_content, trash_content
from support.strategies import calls, once_values, small_messages, summaries, texts

KEYS = ("a", "A:b/\u00e9", "K" * 70)

keys = st.sampled_from(KEYS)
seqs = st.integers(-1, 12)
user_messages = st.builds(lambda text: {"role": "user", "content": text}, texts())


class _ReferenceStore(InMemoryStore):
    """The reference: an in-memory store that can skip the seqs of an unfinished write."""

    def skip_seqs(self, key: str, count: int) -> None:
        if key in self._sessions:
            self._sessions[key].last_seq += count


def call_rule(name: str, *arguments: SearchStrategy[Any], **options: SearchStrategy[Any]) -> Any:
    """Return a rule that calls one method, with generated arguments, on both stores."""

    def make_call(self: "StoreMachine", key: str, call: Call) -> None:
        self._call_both_stores(key, call)

    make_call.__name__ = name  # hypothesis turns rules on and off by their names
    return rule(key=keys, call=calls(name, *arguments, **options))(make_call)


class StoreMachine(RuleBasedStateMachine):
    """A state machine that compares a store with the reference. Subclasses implement `open`."""

    persistent: ClassVar[bool] = True
    """Whether data outlives the store object, so that the store can be opened again."""
    supports_torn_writes: ClassVar[bool] = False
    """Whether `add_torn_write` is implemented."""
    rule_counts: ClassVar[Counter[str]]
    """Number of runs of each rule, in all examples."""
    example_lengths: ClassVar[list[int]]
    """Number of steps of each example."""

    def __init_subclass__(cls) -> None:
        """Give each subclass its own counters."""
        cls.rule_counts = Counter()
        cls.example_lengths = []

    @abstractmethod
    def open(self, path: Path) -> Store:
        """Open the store in this folder."""

    def add_torn_write(self, path: Path, key: str, *, next_seq: int, kind: int, cut: float) -> int:  # noqa: ARG002 - a hook
        """Add bytes that a killed writer may leave at the end of a session's storage.

        Return how many seqs the killed writer used, starting with `next_seq`. The subclass decides
        what `kind` and `cut` (0 to 1) mean.
        """
        return 0

    def __init__(self) -> None:
        super().__init__()
        self.example_lengths.append(0)
        # Use a file system in memory if possible: these tests do not check whether data was synced.
        memory_folder = "/dev/shm" if os.access("/dev/shm", os.W_OK | os.X_OK) else None
        self._folder = TemporaryDirectory(prefix="steno-", dir=memory_folder)
        self._path = Path(self._folder.name)
        self._reference = _ReferenceStore()
        self._views: dict[str, SessionView] = {}
        """Older views of some sessions, by key."""
        self._open_stores: list[Store] = []
        self._store = self._open_store()

    def _open_store(self) -> Store:
        self._open_stores.append(self.open(self._path))
        return self._open_stores[-1]

    def teardown(self) -> None:
        """Compare all sessions once more, and clean up."""
        try:
            if self.persistent:
                self._store = self._open_store()
            self._compare_stores(*KEYS)
        finally:
            for store in self._open_stores:
                store.close()
            self._folder.cleanup()

    # --- one step ----------------------------------------------------------------------------

    def _count_step(self, rule_name: str) -> None:
        self.rule_counts[rule_name] += 1
        self.example_lengths[-1] += 1

    def _call_both_stores(self, key: str, call: Call) -> None:
        self._count_step(call.name)
        self._check_outcomes(key, call)

    def _check_outcomes(self, key: str, call: Call) -> None:
        expected = call.outcome(self._reference, key)
        outcome = call.outcome(self._store, key)
        assert outcome == expected, f"{call} on {key!r} gave {outcome}, the reference {expected}"
        self._compare_stores(key)

    def _compare_stores(self, *keys: str) -> None:
        assert self._store.list_sessions() == self._reference.list_sessions()
        # The store may have more stamps: a writer killed while it creates a session may leave one.
        assert self._store.admin.stamps().keys() >= set(self._reference.list_sessions())
        assert trash_content(self._store) == trash_content(self._reference)
        for key in keys:
            expected_content = session_content(self._reference, key)
            assert session_content(self._store, key) == expected_content

    # --- appending ---------------------------------------------------------------------------

    add_message = call_rule(
        "add_message",
        st.just("user"),
        st.sampled_from(["x", "y", None, ["z"]]),
        once=once_values,
    )
    add_full_message = call_rule(
        "add_full_message", small_messages() | user_messages, once=once_values
    )
    add_messages = call_rule(
        "add_messages", st.lists(small_messages(), max_size=4), once=once_values
    )

    # --- changing visibility ------------------------------------------------------------------

    @rule(
        key=keys,
        keep=st.integers(0, 6),
        new=st.lists(small_messages(), max_size=3),
        unseen=st.sampled_from([None, None, 0, 1]),
    )
    def set_history(
        self, key: str, keep: int, new: list[dict[str, Any]], unseen: int | None
    ) -> None:
        """Set a history of the first `keep` messages and some new messages.

        `unseen`: number of stored messages that the caller has not seen.
        """
        kept_messages = self._reference.get_history(key)[:keep]
        options = {} if unseen is None else {"expect_last": max(self._last_seq(key) - unseen, 0)}
        self._call_both_stores(key, Call("set_history", [*kept_messages, *new], **options))

    set_summary = call_rule("set_summary", summaries())
    truncate_history = call_rule("truncate_history", seqs)
    pop = call_rule("pop")

    @rule(key=keys, seqs_from_end=st.none() | seqs)
    def clear(self, key: str, seqs_from_end: int | None) -> None:
        """Hide all messages, or all messages up to a seq counted back from the end."""
        options = {} if seqs_from_end is None else {"upto": self._last_seq(key) - seqs_from_end}
        self._call_both_stores(key, Call("clear", **options))

    @rule(key=keys, first=seqs, length=st.integers(-1, 5), from_end=st.booleans())
    def hide(self, key: str, first: int, length: int, *, from_end: bool) -> None:
        """Hide a range of messages."""
        if from_end:
            first += max(self._last_seq(key) - 6, 0)
        self._call_both_stores(key, Call("hide", first, first + length))

    @rule(key=keys, first=seqs, length=st.integers(-1, 5))
    def show(self, key: str, first: int, length: int) -> None:
        """Show a range of messages."""
        self._call_both_stores(key, Call("show", first, first + length))

    @rule(
        key=keys,
        summary=summaries(),
        seqs_from_end=seqs,
        floor_offset=st.sampled_from([None, 0, 0, 1]),
    )
    def checkpoint(
        self, key: str, summary: str, seqs_from_end: int, floor_offset: int | None
    ) -> None:
        """Store a checkpoint at a seq counted back from the end. Some expected floors are wrong."""
        options: dict[str, Any] = {"summary": summary, "upto": self._last_seq(key) - seqs_from_end}
        if floor_offset is not None and key in self._reference.list_sessions():
            options["expect_floor"] = self._reference.info(key).floor + floor_offset
        self._call_both_stores(key, Call("checkpoint", **options))

    @rule(key=keys, times=st.integers(1, 3))
    def undo(self, key: str, times: int) -> None:
        """Undo the last operations."""
        self._count_step("undo")
        for _ in range(times):
            self._check_outcomes(key, Call("undo"))

    # --- lifecycle ----------------------------------------------------------------------------

    @rule(key=keys, new_key=keys, seqs_from_end=st.none() | seqs)
    def fork(self, key: str, new_key: str, seqs_from_end: int | None) -> None:
        """Fork a session up to a seq counted back from the end. Some new keys are in use."""
        fork_seq = None if seqs_from_end is None else self._last_seq(key) - seqs_from_end
        self._call_both_stores(key, Call("fork", new_key, at=fork_seq))
        self._compare_stores(new_key)

    delete = call_rule("delete")

    @rule(trash_index=st.integers(0, 5), key=keys, as_key=st.none() | keys, by_uid=st.booleans())
    def restore(self, trash_index: int, key: str, as_key: str | None, *, by_uid: bool) -> None:
        """Restore a session from the trash by its uid, or the last deleted session of the key."""
        self._count_step("restore")
        trash_entries = self._reference.admin.list_trash()
        entry_index = trash_index if by_uid and trash_index < len(trash_entries) else None
        if entry_index is not None:
            key = trash_entries[entry_index].key
        outcomes = []
        for store in (self._reference, self._store):
            uid = store.admin.list_trash()[entry_index].uid if entry_index is not None else None
            call = Call("restore", uid=uid, as_key=as_key)
            outcomes.append(call.outcome(store, key))
        assert outcomes[0] == outcomes[1], f"restore {key!r} gave {outcomes}"
        self._compare_stores(key, as_key or key)

    @rule(key=keys, before=seqs, from_end=st.booleans())
    def purge_before(self, key: str, before: int, *, from_end: bool) -> None:
        """Purge the first messages of a session."""
        if from_end:
            before = self._last_seq(key) - before
        self._count_step("purge_before")
        self._check_outcomes(key, Call("purge", before=before))

    @precondition(lambda self: self.example_lengths[-1] % 4 == 3)
    @rule(key=keys)
    def purge(self, key: str) -> None:
        """Purge all sessions of a key, but rarely, so that sessions can grow."""
        self._call_both_stores(key, Call("purge"))

    @rule(key=keys, call=st.sampled_from(CHANGING_CALLS))
    def change(self, key: str, call: Call) -> None:
        """Make a call of the contract's table."""
        self._call_both_stores(key, call)

    # --- everything else ---------------------------------------------------------------------

    compact = call_rule("compact")
    get_history = call_rule(
        "get_history", last=st.none() | seqs, after=st.none() | seqs, full=st.booleans()
    )

    @rule(
        key=keys,
        name=st.sampled_from(["title", "tags"]),
        value=st.sampled_from([None, "x", ["\ud800"], {"a": 1}, "y" * 40_000]),
    )
    def set_meta(self, key: str, name: str, value: Any) -> None:
        """Set a meta field."""
        self._call_both_stores(key, Call("set_meta", **{name: value}))

    @rule(key=keys, last=st.none() | st.integers(1, 4), keep=st.booleans())
    def refresh(self, key: str, last: int | None, *, keep: bool) -> None:
        """Compare a refreshed older view with a new view; with `keep`, keep the new view."""
        self._count_step("refresh")
        old_view = self._views.get(key)
        try:
            if old_view is not None:
                assert old_view.merged(
                    self._store.view(old_view.key, since=old_view)
                ) == self._store.view(key, last=old_view.last)
            if old_view is None or keep:
                self._views[key] = self._store.view(key, last=last)
        except NoSuchSession:
            assert key not in self._reference.list_sessions()

    @rule(key=keys, after=seqs)
    def follow(self, key: str, after: int) -> None:
        """Compare the messages that a follower gets."""
        self._count_step("follow")
        expected_messages = list(self._reference.follow(key, after=max(after, 0), timeout=0))
        assert list(self._store.follow(key, after=max(after, 0), timeout=0)) == expected_messages

    # --- the end of a process ----------------------------------------------------------------

    @precondition(lambda self: self.persistent)
    @rule()
    def reopen(self) -> None:
        """Close the store and open it again."""
        self._count_step("reopen")
        self._open_stores.remove(self._store)
        self._store.close()
        self._store = self._open_store()
        self._compare_stores(*KEYS)

    @precondition(lambda self: self.persistent)
    @rule()
    def crash(self) -> None:
        """Open the store again without closing it first, as after a crash."""
        self._count_step("crash")
        self._store = self._open_store()
        self._compare_stores(*KEYS)

    @precondition(lambda self: self.persistent)
    @rule(store_index=st.integers(0, 3))
    def switch(self, store_index: int) -> None:
        """Continue with another open store on the same folder, as another process would."""
        self._count_step("switch")
        self._store = (
            self._open_stores[store_index]
            if store_index < len(self._open_stores)
            else self._open_store()
        )
        self._compare_stores(*KEYS)

    @precondition(lambda self: self.persistent and self.supports_torn_writes)
    @rule(key=keys, kind=st.integers(0, 9), cut=st.floats(0, 1))
    def torn_crash(self, key: str, kind: int, cut: float) -> None:
        """Crash in the middle of a write."""
        self._count_step("torn_crash")
        used_seqs = self.add_torn_write(
            self._path, key, next_seq=self._last_seq(key) + 1, kind=kind, cut=cut
        )
        self._reference.skip_seqs(key, used_seqs)
        self._store = self._open_store()
        self._compare_stores(*KEYS)

    def _last_seq(self, key: str) -> int:
        return self._reference.info(key).last_seq if key in self._reference.list_sessions() else 0

    @classmethod
    def report(cls) -> str:
        """Return the number of runs of each rule in one line."""
        rules = ", ".join(f"{name} {times:,}" for name, times in sorted(cls.rule_counts.items()))
        steps = sum(cls.example_lengths)
        return f"{cls.__name__}: {len(cls.example_lengths):,} examples, {steps:,} steps: {rules}"


def machine_settings(examples: int, **options: Any) -> settings:
    """Return settings for examples of 50 steps, which are the same in each run.

    So a failure can be repeated on every machine. `options` replace these settings.
    """
    defaults: dict[str, Any] = {
        "max_examples": examples,
        "stateful_step_count": 50,
        "deadline": None,
        "database": None,
        "derandomize": True,
        "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
    }
    return settings(**{**defaults, **options})


def has_run_all_rules(machine: type[StoreMachine], *rules: str) -> bool:
    """Return whether each rule that every store needs, and each of `rules`, was run."""
    calls = {"add_messages", "undo", "compact", "refresh"}
    lifecycle = {"fork", "delete", "restore", "purge_before", "purge"}
    return machine.rule_counts.keys() >= {*calls, *lifecycle, *rules}


def check_runs(
    machine: type[StoreMachine], runs: int, capsys: pytest.CaptureFixture[str], *rules: str
) -> None:
    """Print the report, and check the number of long examples and that all rules were run."""
    with capsys.disabled():
        print(f"\n{machine.report()}")
    assert sum(length == 50 for length in machine.example_lengths) >= runs
    assert has_run_all_rules(machine, *rules)
