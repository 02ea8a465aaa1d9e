"""A hypothesis state machine that drives a store and the model with the same random calls.

After every step the two are compared; reopening, crashes and torn writes come in between. Run a
subclass with `hypothesis.stateful.run_state_machine_as_test`.
"""

import os
from abc import abstractmethod
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from stenolog.errors import NoSuchSession
from stenolog.stores.base import SessionView, Store
from stenolog.stores.in_memory import InMemoryStore
from stenolog.testing.calls import Call, picture, trash
from stenolog.testing.strategies import TOKENS, small_messages, summaries, texts

KEYS = ("a", "A:b/\u00e9", "K" * 70)

keys = st.sampled_from(KEYS)
tokens = st.sampled_from([None, None, *TOKENS])
places = st.integers(-1, 12)
spoken = st.builds(lambda text: {"role": "user", "content": text}, texts())


class _Model(InMemoryStore):
    """The model, which also knows of seqs that an unfinished write used up."""

    def skip(self, key: str, seqs: int) -> None:
        if key in self._sessions:
            self._sessions[key].last_seq += seqs


class StoreMachine(RuleBasedStateMachine):
    """Drives a store and the model with the same calls; subclasses give `open`."""

    persistent: ClassVar[bool] = True
    """Whether what is stored outlives the object, so that it can be opened again."""
    tears: ClassVar[bool] = False
    """Whether `tear` does something."""
    ran: ClassVar[Counter[str]]
    """How often each rule ran, in all examples."""
    lengths: ClassVar[list[int]]
    """How many steps each example had."""

    def __init_subclass__(cls) -> None:
        """Let each subclass count for itself."""
        cls.ran = Counter()
        cls.lengths = []

    @abstractmethod
    def open(self, path: Path) -> Store:
        """The store that lives in this folder."""

    def tear(self, path: Path, key: str, *, next_seq: int, kind: int, cut: float) -> int:  # noqa: ARG002 - a hook
        """Leave what a killed writer may leave at the end of a session's storage.

        Returns how many seqs, from `next_seq` on, it used up. `kind` and `cut` (0 to 1) say what
        and how much, in any way that the subclass likes.
        """
        return 0

    def __init__(self) -> None:
        super().__init__()
        self.lengths.append(0)
        # In memory where that can be: nothing here shows whether anything was synced.
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK | os.X_OK) else None
        self._folder = TemporaryDirectory(prefix="steno-", dir=memory)
        self._path = Path(self._folder.name)
        self._model = _Model()
        self._views: dict[str, SessionView] = {}
        """An older view of some sessions."""
        self._opened: list[Store] = []
        self._store = self._open()

    def _open(self) -> Store:
        self._opened.append(self.open(self._path))
        return self._opened[-1]

    def teardown(self) -> None:
        """Look at everything once more, and leave nothing behind."""
        try:
            if self.persistent:
                self._store = self._open()
            self._compare(*KEYS)
        finally:
            for store in self._opened:
                store.close()
            self._folder.cleanup()

    # --- one step ----------------------------------------------------------------------------

    def _step(self, name: str) -> None:
        self.ran[name] += 1
        self.lengths[-1] += 1

    def _both(self, key: str, call: Call) -> None:
        self._step(call.name)
        self._agree(key, call)

    def _agree(self, key: str, call: Call) -> None:
        expected = call.outcome(self._model, key)
        found = call.outcome(self._store, key)
        assert found == expected, f"{call} on {key!r} gave {found}, the model {expected}"
        self._compare(key)

    def _compare(self, *keys: str) -> None:
        assert self._store.list_sessions() == self._model.list_sessions()
        # What a killed creator left may have a stamp, and is no session.
        assert self._store.stamps().keys() >= set(self._model.list_sessions())
        assert trash(self._store) == trash(self._model)
        for key in keys:
            expected = picture(self._model, key)
            assert picture(self._store, key) == expected

    # --- appending ---------------------------------------------------------------------------

    @rule(key=keys, content=st.sampled_from(["x", "y", None, ["z"]]), once=tokens)
    def add_message(self, key: str, content: Any, once: str | None) -> None:
        """A message by role and content."""
        self._both(key, Call("add_message", ("user", content), {"once": once}))

    @rule(key=keys, message=st.one_of(small_messages(), spoken), once=tokens)
    def add_full_message(self, key: str, message: dict[str, Any], once: str | None) -> None:
        """A message of any shape."""
        self._both(key, Call("add_full_message", (message,), {"once": once}))

    @rule(key=keys, batch=st.lists(small_messages(), max_size=4), once=tokens)
    def add_messages(self, key: str, batch: list[dict[str, Any]], once: str | None) -> None:
        """A batch."""
        self._both(key, Call("add_messages", (batch,), {"once": once}))

    # --- changing what is in sight -----------------------------------------------------------

    @rule(
        key=keys,
        keep=st.integers(0, 6),
        new=st.lists(small_messages(), max_size=3),
        unseen=st.sampled_from([None, None, 0, 1]),
    )
    def set_history(
        self, key: str, keep: int, new: list[dict[str, Any]], unseen: int | None
    ) -> None:
        """Another history with the same beginning. `unseen`: messages the caller has not seen."""
        kept = self._model.get_history(key)[:keep]
        options = {} if unseen is None else {"expect_last": max(self._end(key) - unseen, 0)}
        self._both(key, Call("set_history", ([*kept, *new],), options))

    @rule(key=keys, text=summaries())
    def set_summary(self, key: str, text: str) -> None:
        """A summary."""
        self._both(key, Call("set_summary", (text,)))

    @rule(key=keys, keep_last=places)
    def truncate_history(self, key: str, keep_last: int) -> None:
        """All but the last ones out of sight."""
        self._both(key, Call("truncate_history", (keep_last,)))

    @rule(key=keys, back=st.none() | places)
    def clear(self, key: str, back: int | None) -> None:
        """Hide everything, or everything up to a seq counted back from the end."""
        options = {} if back is None else {"upto": self._end(key) - back}
        self._both(key, Call("clear", (), options))

    @rule(key=keys, first=places, length=st.integers(-1, 5), from_end=st.booleans())
    def hide(self, key: str, first: int, length: int, *, from_end: bool) -> None:
        """A range out of sight."""
        if from_end:
            first += max(self._end(key) - 6, 0)
        self._both(key, Call("hide", (first, first + length)))

    @rule(key=keys)
    def pop(self, key: str) -> None:
        """The last one out of sight."""
        self._both(key, Call("pop"))

    @rule(key=keys, summary=summaries(), back=places, floor=st.sampled_from([None, 0, 0, 1]))
    def checkpoint(self, key: str, summary: str, back: int, floor: int | None) -> None:
        """Summary and floor together, counted back from the end; some are stale or beyond it."""
        options: dict[str, Any] = {"summary": summary, "upto": self._end(key) - back}
        if floor is not None and key in self._model.list_sessions():
            options["expect_floor"] = self._model.info(key).floor + floor
        self._both(key, Call("checkpoint", (), options))

    @rule(key=keys, times=st.integers(1, 3))
    def undo(self, key: str, times: int) -> None:
        """The newest steps taken back."""
        self._step("undo")
        for _ in range(times):
            self._agree(key, Call("undo"))

    # --- beginning and ending ----------------------------------------------------------------

    @rule(key=keys, new_key=keys, back=st.none() | places)
    def fork(self, key: str, new_key: str, back: int | None) -> None:
        """A session of its own, up to a seq counted back from the end; some keys are taken."""
        at = None if back is None else self._end(key) - back
        self._both(key, Call("fork", (new_key,), {"at": at}))
        self._compare(new_key)

    @rule(key=keys)
    def delete(self, key: str) -> None:
        """Into the trash."""
        self._both(key, Call("delete"))

    @rule(which=st.integers(0, 5), key=keys, as_key=st.none() | keys, by_uid=st.booleans())
    def restore(self, which: int, key: str, as_key: str | None, *, by_uid: bool) -> None:
        """Out of the trash: one that is there, by its uid, or whatever the key had last."""
        self._step("restore")
        deleted = self._model.list_trash()
        place = which if by_uid and which < len(deleted) else None
        if place is not None:
            key = deleted[place].key
        outcomes = []
        for store in (self._model, self._store):
            uid = store.list_trash()[place].uid if place is not None else None
            call = Call("restore", (), {"uid": uid, "as_key": as_key})
            outcomes.append(call.outcome(store, key))
        assert outcomes[0] == outcomes[1], f"restore {key!r} gave {outcomes}"
        self._compare(key, as_key or key)

    @rule(key=keys, before=places, from_end=st.booleans())
    def purge_before(self, key: str, before: int, *, from_end: bool) -> None:
        """The beginning of a session deleted for good."""
        if from_end:
            before = self._end(key) - before
        self._step("purge_before")
        self._agree(key, Call("purge", (), {"before": before}))

    @precondition(lambda self: self.lengths[-1] % 4 == 3)
    @rule(key=keys)
    def purge(self, key: str) -> None:
        """All lives of a key deleted for good; not too often, or nothing ever grows."""
        self._both(key, Call("purge"))

    # --- everything else ---------------------------------------------------------------------

    @rule(key=keys)
    def compact(self, key: str) -> None:
        """The hidden start into an archive."""
        self._both(key, Call("compact"))

    @rule(
        key=keys,
        name=st.sampled_from(["title", "tags"]),
        value=st.sampled_from([None, "x", ["\ud800"], {"a": 1}, "y" * 40_000]),
    )
    def set_meta(self, key: str, name: str, value: Any) -> None:
        """A field of the session's own data."""
        self._both(key, Call("set_meta", (), {name: value}))

    @rule(key=keys, last=st.none() | places, after=st.none() | places, full=st.booleans())
    def get_history(self, key: str, last: int | None, after: int | None, *, full: bool) -> None:
        """A part of the history."""
        self._both(key, Call("get_history", (), {"last": last, "after": after, "full": full}))

    @rule(key=keys, last=st.none() | st.integers(1, 4), keep=st.booleans())
    def refresh(self, key: str, last: int | None, *, keep: bool) -> None:
        """An older view brought up to date is the view of now; then `keep` that one for later."""
        self._step("refresh")
        old = self._views.get(key)
        try:
            if old is not None:
                assert old.merged(self._store.refresh(old)) == self._store.view(key, last=old.last)
            if old is None or keep:
                self._views[key] = self._store.view(key, last=last)
        except NoSuchSession:
            assert key not in self._model.list_sessions()

    @rule(key=keys, after=places)
    def follow(self, key: str, after: int) -> None:
        """All that a follower would get."""
        self._step("follow")
        expected = list(self._model.follow(key, after=max(after, 0), timeout=0))
        assert list(self._store.follow(key, after=max(after, 0), timeout=0)) == expected

    # --- the end of a process ----------------------------------------------------------------

    @precondition(lambda self: self.persistent)
    @rule()
    def reopen(self) -> None:
        """Close the store and open it again."""
        self._step("reopen")
        self._opened.remove(self._store)
        self._store.close()
        self._store = self._open()
        self._compare(*KEYS)

    @precondition(lambda self: self.persistent)
    @rule()
    def crash(self) -> None:
        """Open the store again without having closed it; the old one is not used any more."""
        self._step("crash")
        self._store = self._open()
        self._compare(*KEYS)

    @precondition(lambda self: self.persistent)
    @rule(which=st.integers(0, 3))
    def switch(self, which: int) -> None:
        """Go on with another open store on the same folder, as another process would."""
        self._step("switch")
        self._store = self._opened[which] if which < len(self._opened) else self._open()
        self._compare(*KEYS)

    @precondition(lambda self: self.persistent and self.tears)
    @rule(key=keys, kind=st.integers(0, 9), cut=st.floats(0, 1))
    def torn_crash(self, key: str, kind: int, cut: float) -> None:
        """Crash in the middle of a write."""
        self._step("torn_crash")
        used = self.tear(self._path, key, next_seq=self._end(key) + 1, kind=kind, cut=cut)
        self._model.skip(key, used)
        self._store = self._open()
        self._compare(*KEYS)

    def _end(self, key: str) -> int:
        return self._model.info(key).last_seq if key in self._model.list_sessions() else 0

    @classmethod
    def report(cls) -> str:
        """What was run, in one paragraph."""
        rules = ", ".join(f"{name} {times:,}" for name, times in sorted(cls.ran.items()))
        return f"{cls.__name__}: {len(cls.lengths):,} examples, {sum(cls.lengths):,} steps: {rules}"
