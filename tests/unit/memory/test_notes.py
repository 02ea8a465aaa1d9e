"""Tests notes on every engine: current notes, idempotency keys, forgetting and purging."""

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import stenolog
from stenolog.errors import NothingToUndo, UsageError
from stenolog.memory.notes import Draft, Note, Notes
from stenolog.memory.scopes import Scope
from stenolog.records import PurgeResult
from stenolog.stores.base import Store
from stenolog.stores.in_memory import InMemoryStore

ANN = Scope(who="telegram:1")
BOB = Scope(who="telegram:2")
TEAM = Scope(who="slack:C42")


@pytest.fixture(params=["memory", "jsonl", "sqlite"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """Yield an empty store for notes."""
    where = {"jsonl": str(tmp_path / "w"), "sqlite": f"sqlite:{tmp_path}/s.db", "memory": "memory:"}
    with stenolog.open_store(where[request.param], namespace="notes") as opened:
        yield opened


@pytest.fixture
def notes(store: Store) -> Notes:
    """Return the notes in the empty store."""
    return Notes(store)


def _core(text: str, *supersedes: str, about: str = "") -> Draft:
    return Draft(kind="core", text=text, about=about, supersedes=supersedes)


def _add(notes: Notes, text: str, *supersedes: str, scope: Scope = ANN) -> str:
    [note] = notes.add(scope, [_core(text, *supersedes)])
    return note.id


def _forget_or_purge(notes: Notes, scope: Scope, id: str, *, purge: bool) -> None:
    if purge:
        notes.purge(scope, id)
    else:
        notes.forget(scope, id)


def _texts(found: list[Note]) -> list[str]:
    return [note.text for note in found]


# --- adding and listing ----------------------------------------------------------------------


def test_stored_note_equals_its_draft(notes: Notes) -> None:
    draft = Draft(
        kind="core",
        text="Eats no meat.\nSince May. \ud800",
        about="diet",
        quote="I'm a vegetarian",
        session="telegram:1",
        uid="u1",
        seqs=(3, 5),
        supersedes=("older",),
        at=datetime(2026, 5, 1, tzinfo=UTC),
    )
    [note] = notes.add(ANN, [draft])
    for field in Draft.__struct_fields__:
        assert getattr(note, field) == getattr(draft, field)
    assert (note.scope, note.superseded, note.superseded_by, note.forgotten) == (
        ANN,
        None,
        "",
        False,
    )
    assert notes.list(ANN) == [note]
    assert notes.get(ANN, note.id) == note


def test_notes_are_listed_in_the_order_they_were_added(notes: Notes) -> None:
    said = [f"fact {number}" for number in range(12)]
    notes.add(ANN, [_core(text) for text in said])
    notes.add(ANN, [Draft(kind="daily", text="they talked")])
    assert _texts(notes.list(ANN)) == [*said, "they talked"]
    assert _texts(notes.list(ANN, kind="core")) == said
    assert _texts(notes.list(ANN, kind="daily")) == ["they talked"]
    assert len({note.id for note in notes.list(ANN)}) == 13


def test_invalid_drafts_are_rejected_and_nothing_is_written(notes: Notes) -> None:
    for wrong in (_core(" \n"), Draft(kind="weekly", text="x")):  # type: ignore[arg-type]
        with pytest.raises(UsageError):
            notes.add(ANN, [_core("good"), wrong])
    with pytest.raises(UsageError):
        notes.add(Scope(who=""), [_core("good")])
    assert notes.add(ANN, []) == []
    assert notes.scopes() == []


def test_other_messages_in_the_store_are_not_notes(notes: Notes, store: Store) -> None:
    store.add_message(ANN.key, "user", "hello")
    store.add_full_message(ANN.key, {"role": "note", "kind": "core", "id": 7, "content": "x"})
    store.add_full_message(ANN.key, {"role": "note", "kind": "later", "id": "n", "content": "x"})
    store.add_message("no scope", "user", "hello")
    id = _add(notes, "kept")
    assert _texts(notes.list(ANN, full=True)) == ["kept"]
    assert notes.scopes() == [ANN]
    notes.purge(ANN, id)
    assert len(store.get_history(ANN.key)) == 4


def test_unknown_scope_has_no_notes_and_unknown_id_raises(notes: Notes) -> None:
    assert (notes.list(ANN, full=True), notes.search("x", scope=ANN)) == ([], [])
    _add(notes, "one")
    for scope in (ANN, BOB):
        for asked in (notes.get, notes.forget, notes.purge):
            with pytest.raises(UsageError, match="there is no note 'nothing'"):
                asked(scope, "nothing")
    assert notes.scopes() == [ANN]


# --- notes of other users --------------------------------------------------------------------


def test_users_see_only_their_own_notes(notes: Notes) -> None:
    people = [ANN, BOB, TEAM]
    ids = {}
    for scope in people:
        once = "the same token"
        [one, _] = notes.add(scope, [_core(f"secret of {scope.who}"), _core("common")], once=once)
        ids[scope] = one.id
    for scope in people:
        others = [other for other in people if other != scope]
        assert _texts(notes.list(scope, full=True)) == [f"secret of {scope.who}", "common"]
        assert _texts(notes.search("secret", scope=scope)) == [f"secret of {scope.who}"]
        for other in others:
            assert notes.search(f'"{other.who}"', scope=scope) == []


@pytest.mark.parametrize("change", ["forget", "purge", "supersede"])
def test_changes_of_one_user_do_not_affect_others(notes: Notes, change: str) -> None:
    theirs = {scope: _add(notes, f"of {scope.who}", scope=scope) for scope in (ANN, BOB, TEAM)}
    for scope in (BOB, TEAM):
        with pytest.raises(UsageError, match="there is no note"):
            notes.get(scope, theirs[ANN])
        with pytest.raises(UsageError, match="there is no note"):
            _forget_or_purge(notes, scope, theirs[ANN], purge=change == "purge")
        with pytest.raises(NothingToUndo):
            notes.undo(scope)
    if change == "supersede":
        _add(notes, "mine is newer", theirs[ANN], theirs[TEAM], scope=BOB)
    else:
        _forget_or_purge(notes, BOB, theirs[BOB], purge=change == "purge")
    for scope in (ANN, TEAM):
        assert _texts(notes.list(scope)) == [f"of {scope.who}"]


def test_scopes_of_one_user_differ_between_agents(notes: Notes) -> None:
    tutor = Scope(agent="tutor", who=ANN.who)
    _add(notes, "for main")
    _add(notes, "for the tutor", scope=tutor)
    assert _texts(notes.list(ANN)) == ["for main"]
    assert _texts(notes.list(tutor)) == ["for the tutor"]
    assert notes.scopes(agent="tutor") == [tutor]
    assert notes.scopes() == [ANN, tutor]


# --- superseded facts ------------------------------------------------------------------------


def test_superseded_note_has_successor_and_time(notes: Notes) -> None:
    old = _add(notes, "eats meat")
    new = _add(notes, "eats no meat", old)
    assert _texts(notes.list(ANN)) == ["eats no meat"]
    before, after = notes.list(ANN, full=True)
    assert (before.superseded, before.superseded_by) == (after.at, new)
    assert not before.in_force
    assert after.in_force


def test_forgetting_a_note_restores_the_one_it_superseded(notes: Notes) -> None:
    old = _add(notes, "eats meat")
    new = _add(notes, "eats no meat", old)
    assert notes.forget(ANN, new).forgotten
    assert _texts(notes.list(ANN)) == ["eats meat"]
    assert notes.undo(ANN).shown == 1
    assert _texts(notes.list(ANN)) == ["eats no meat"]


@pytest.mark.parametrize("purge", [False, True])
def test_forgetting_the_middle_note_does_not_restore_the_oldest(notes: Notes, purge: bool) -> None:
    oldest = _add(notes, "one")
    between = _add(notes, "two", oldest)
    newest = _add(notes, "three", between)
    _forget_or_purge(notes, ANN, between, purge=purge)
    assert _texts(notes.list(ANN)) == ["three"]
    assert notes.get(ANN, oldest).superseded_by == newest
    _forget_or_purge(notes, ANN, newest, purge=purge)
    assert _texts(notes.list(ANN)) == ["one"]


def test_notes_that_supersede_each_other_cause_no_endless_loop(notes: Notes, store: Store) -> None:
    for id, other in (("a", "b"), ("b", "a"), ("c", "c")):
        store.add_full_message(
            ANN.key,
            {"role": "note", "kind": "core", "id": id, "content": id, "supersedes": [other]},
        )
    assert _texts(notes.list(ANN)) == ["c"]
    notes.forget(ANN, "a")
    assert _texts(notes.list(ANN)) == ["b", "c"]


# --- idempotency keys ------------------------------------------------------------------------


def test_p12_known_idempotency_key_adds_no_notes_even_with_other_drafts(notes: Notes) -> None:
    first = notes.add(ANN, [_core("one"), _core("two")], once="u:1:core")
    _add(notes, "later")
    assert notes.add(ANN, [_core("one"), _core("two")], once="u:1:core") == first
    assert notes.add(ANN, [_core("other words")], once="u:1:core") == first
    assert notes.add(ANN, [_core(str(n)) for n in range(5)], once="u:1:core") == first
    assert _texts(notes.list(ANN)) == ["one", "two", "later"]


def test_p12_repeated_idempotency_key_returns_current_notes(notes: Notes) -> None:
    first, second = notes.add(ANN, [_core("one"), _core("two")], once="t")
    new = _add(notes, "three", first.id)
    notes.forget(ANN, second.id)
    again = notes.add(ANN, [_core("x")], once="t")
    assert [note.superseded_by for note in again] == [new, ""]
    assert [note.forgotten for note in again] == [False, True]


def test_p12_idempotency_key_of_notes_is_known_after_a_purge(notes: Notes) -> None:
    first, second = notes.add(ANN, [_core("one"), _core("two")], once="t")
    last = _add(notes, "three")
    notes.purge(ANN, last)
    assert notes.add(ANN, [_core("again")], once="t") == [first, second]
    notes.purge(ANN, first.id)
    assert notes.add(ANN, [_core("again")], once="t") == [second]
    notes.purge(ANN, second.id)
    assert notes.add(ANN, [_core("again")], once="t") == []
    assert notes.list(ANN, full=True) == []
    assert _texts(notes.add(ANN, [_core("new")], once="another")) == ["new"]


# --- searching -------------------------------------------------------------------------------


def test_search_finds_current_notes_with_all_words(notes: Notes) -> None:
    old = _add(notes, "Lives in Zürich")
    _add(notes, "Lives in Málaga with Lea's getUserName", old)
    notes.add(ANN, [_core("Likes it", about="music"), Draft(kind="daily", text="東京都に行った")])
    for query, count in {
        "lives malaga": 1,
        "zurich": 0,
        "music": 1,
        "mal*": 1,
        "al*": 0,
        '"lives in"': 1,
        '"in lives"': 0,
        "lives -malaga": 0,
        "likes -music": 0,
        "likes -sport": 1,
        "user": 1,
        "getusername": 1,
        "getUser*": 1,
        "東京": 1,
        "都": 1,
        "京東": 0,
        "": 0,
        "-malaga": 0,
        '"': 0,
    }.items():
        assert (query, len(notes.search(query, scope=ANN))) == (query, count)


def test_search_returns_the_newest_notes_first(notes: Notes) -> None:
    for number in range(3):
        _add(notes, f"word {number}")
    assert _texts(notes.search("word", scope=ANN)) == ["word 2", "word 1", "word 0"]


# --- forgetting ------------------------------------------------------------------------------


def test_p4_forgotten_note_is_hidden_and_can_be_restored(notes: Notes) -> None:
    ids = [_add(notes, f"fact {number}") for number in range(3)]
    assert notes.forget(ANN, ids[1]).text == "fact 1"
    notes.forget(ANN, ids[1])  # a second time changes nothing and cannot be undone separately
    assert _texts(notes.list(ANN)) == ["fact 0", "fact 2"]
    assert notes.search("1", scope=ANN) == []
    assert [note.forgotten for note in notes.list(ANN, full=True)] == [False, True, False]
    notes.undo(ANN)
    assert _texts(notes.list(ANN)) == ["fact 0", "fact 1", "fact 2"]
    with pytest.raises(NothingToUndo, match="telegram:1"):
        notes.undo(ANN)


# --- purging ---------------------------------------------------------------------------------


def test_after_a_purge_undo_restores_only_the_last_forgotten_later_note(notes: Notes) -> None:
    before, gone, later, last = (_add(notes, text) for text in ("before", "gone", "later", "last"))
    for id in (later, before, last):
        notes.forget(ANN, id)
    notes.purge(ANN, gone)
    assert notes.list(ANN) == []
    notes.undo(ANN)
    assert _texts(notes.list(ANN)) == ["last"]
    with pytest.raises(NothingToUndo):
        notes.undo(ANN)


def test_purge_does_not_change_other_notes(notes: Notes) -> None:
    old = _add(notes, "old")
    notes.add(ANN, [_core("new", old), _core("beside")])
    hidden = _add(notes, "hidden")
    notes.forget(ANN, hidden)
    gone = _add(notes, "xyzzy")
    notes.add(ANN, [_core("after")])
    before = [note for note in notes.list(ANN, full=True) if note.id != gone]
    purged = notes.purge(ANN, gone)
    assert (purged.note.id, purged.note.text, purged.not_reached) == (gone, "", ())
    assert notes.list(ANN, full=True) == before
    with pytest.raises(UsageError, match="there is no note"):
        notes.get(ANN, gone)
    with pytest.raises(UsageError, match="there is no note"):
        notes.forget(ANN, gone)
    with pytest.raises(NothingToUndo):
        notes.undo(ANN)
    assert notes.purge(ANN, gone).note == notes.purge(ANN, gone).note
    assert notes.list(ANN, full=True) == before


def test_purge_leaves_no_bytes_of_the_note(notes: Notes, store: Store, tmp_path: Path) -> None:
    _add(notes, "before")
    draft = Draft(kind="core", text="xyzzy", about="plugh", quote="frotz", seqs=(1,), session="s")
    [gone] = notes.add(ANN, [draft], once="t")
    _add(notes, "after")
    notes.forget(ANN, gone.id)
    store.truncate_history(ANN.key, 1)
    store.compact(ANN.key)
    notes.purge(ANN, gone.id)
    history = b"".join(message.to_json() for message in store.get_history(ANN.key, full=True))
    store.close()
    files = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    for word in (b"xyzzy", b"plugh", b"frotz"):
        assert word not in b"".join([history, *files])


def test_purge_lists_places_with_remaining_content(notes: Notes, store: Store) -> None:
    source: dict[str, Any] = {"session": "telegram:1", "uid": "u", "seqs": (4, 5)}
    [daily] = notes.add(ANN, [Draft(kind="daily", text="they talked", **source)])
    [fact, _] = notes.add(ANN, [Draft(kind="core", text="xyzzy", **source), _core("by hand")])
    store.fork(ANN.key, "a fork")
    of_the_store, *ours = notes.purge(ANN, fact.id).not_reached
    assert of_the_store.startswith("the fork 'a fork'")
    assert ours == [
        "the session 'telegram:1' still contains the original messages (seq 4, 5)",
        f"the note {daily.id} was made of the same messages",
    ]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["add", "add", "supersede", "forget", "undo", "purge"]),
            st.integers(0, 9),
            st.integers(0, 9),
        ),
        max_size=14,
    )
)
def test_purge_and_forget_leave_the_same_current_notes(
    steps: list[tuple[str, int, int]],
) -> None:
    notes = Notes(InMemoryStore())
    ids = [_add(notes, "first")]
    for number, (step, one, other) in enumerate(steps):
        chosen, second = ids[one % len(ids)], ids[other % len(ids)]
        try:
            if step == "add":
                ids.append(_add(notes, f"note {number}"))
            elif step == "supersede":
                ids.append(_add(notes, f"note {number}", chosen, second))
            elif step == "undo":
                notes.undo(ANN)
            else:
                notes.forget(ANN, chosen)
            if step == "purge":
                left = [note for note in notes.list(ANN, full=True) if note.id != chosen]
                notes.purge(ANN, chosen)
                assert notes.list(ANN, full=True) == left
        except UsageError as error:
            if not isinstance(error, NothingToUndo) and "there is no note" not in str(error):
                raise


class _Killed(Exception):
    pass


class _DyingStore:
    """A store whose process is killed before or after one of its calls."""

    def __init__(self, store: Store, call: str, *, done: bool) -> None:
        self._store, self._call, self._done = store, call, done
        self.ttl, self.renewed = 0.0, 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        if name == "admin":
            return _DyingStore(found, self._call, done=self._done)
        if name == "lease":
            return lambda key, ttl: _DyingLease(self, found(key, ttl=ttl), ttl)
        if name != self._call:
            return found

        def last_call(*given: Any, **options: Any) -> PurgeResult:
            if self._done:
                found(*given, **options)
            raise _Killed

        return last_call


class _DyingLease:
    def __init__(self, store: _DyingStore, lease: Any, ttl: float) -> None:
        self.store, self._lease = store, lease
        store.ttl = ttl

    def __enter__(self) -> "_DyingLease":
        return self

    def __exit__(self, *error: object) -> None:
        self._lease.release()

    def renew(self) -> None:
        self._lease.renew()
        self.store.renewed += 1


@pytest.mark.parametrize("done", [False, True])
@pytest.mark.parametrize("call", ["add_messages", "purge"])
@pytest.mark.parametrize("meanwhile", ["nothing", "add", "forget", "other purge", "compact"])
def test_p2_killed_purge_of_a_note_is_finished_by_the_next(
    store: Store, call: str, done: bool, meanwhile: str
) -> None:
    notes = Notes(store)
    ids = [_add(notes, f"fact {number}") for number in range(3)]
    gone = _add(notes, "xyzzy", ids[1])
    _add(notes, "after")
    notes.forget(ANN, ids[2])
    dying = Notes(_DyingStore(store, call, done=done))
    with pytest.raises(_Killed):
        dying.purge(ANN, gone)

    marked = done or call == "purge"
    expected = ["fact 0", *["fact 1"] * marked, *["xyzzy"] * (not marked), "after"]
    assert _texts(notes.list(ANN)) == expected
    if meanwhile == "add":
        _add(notes, "meanwhile")
    elif meanwhile == "forget":
        notes.forget(ANN, ids[0])
    elif meanwhile == "other purge":
        notes.purge(ANN, ids[0])
    elif meanwhile == "compact":
        store.compact(ANN.key)
    notes.purge(ANN, gone)
    left = {"add": ["fact 0", "fact 1", "after", "meanwhile"]}
    left["forget"] = left["other purge"] = ["fact 1", "after"]
    assert _texts(notes.list(ANN)) == left.get(meanwhile, ["fact 0", "fact 1", "after"])
    everything = _texts(notes.list(ANN, full=True))
    assert len(everything) == len(set(everything))
    assert "fact 2" in everything
    assert b"xyzzy" not in b"".join(
        message.to_json() for message in store.get_history(ANN.key, full=True)
    )


def test_killed_purge_blocks_the_next_for_at_most_ten_seconds(store: Store) -> None:
    watched = _DyingStore(store, "nothing", done=False)
    notes = Notes(watched)
    _add(notes, "kept")
    gone = _add(notes, "xyzzy")

    notes.purge(ANN, gone)

    # The lease is renewed, so each step has the full time.
    assert (watched.ttl, watched.renewed) == (10, 2)


def test_notes_rewritten_by_a_purge_keep_their_ids(notes: Notes, store: Store) -> None:
    kept, gone = _add(notes, "kept"), _add(notes, "xyzzy")
    notes.purge(ANN, gone)
    seen = [message.to_dict() for message in store.follow(ANN.key, after=2, timeout=0)]
    assert [(fields["kind"], fields["id"]) for fields in seen] == [("core", kept), ("purged", gone)]
