"""Several places as one store that cannot be written."""

from collections.abc import Collection
from pathlib import Path

import pytest

from stenolog.errors import NoSuchSession, ReadOnly, StoreUnavailable, UsageError
from stenolog.stores.in_memory import InMemoryStore
from stenolog.stores.open_store import open_store
from stenolog.transfer.combined_store import CombinedStore, StorePlace
from stenolog.transfer.viewed_places import ViewedPlace, index_file, open_places, recognize_place
from support.transcripts import SAMPLES


def filled(*keys: str) -> InMemoryStore:
    store = InMemoryStore()
    for key in keys:
        store.add_message(key, "user", f"hello from {key}")
    return store


def test_keys_have_the_prefix_of_their_place() -> None:
    first, second = filled("cli:a", "cli:b"), filled("cli:a")
    second.fork("cli:a", "cli:c")
    places = [StorePlace(store=first, prefix="one/"), StorePlace(store=second, prefix="two/")]
    with CombinedStore(places) as store:
        assert store.list_sessions() == ["one/cli:a", "one/cli:b", "two/cli:a", "two/cli:c"]
        assert store.list_sessions(prefix="two/", limit=1) == ["two/cli:a"]
        assert store.list_sessions(after="one/cli:b") == ["two/cli:a", "two/cli:c"]
        info = store.info("two/cli:c")
        assert (info.key, info.forked_from) == ("two/cli:c", "two/cli:a")
        assert store.view("one/cli:b").key == "one/cli:b"
        assert [one.content for one in store.get_history("one/cli:b")] == ["hello from cli:b"]
        with second.lease("cli:a", ttl=10):
            assert store.leased(["one/cli:a", "two/cli:a"]) == {"two/cli:a"}
        with pytest.raises(NoSuchSession):
            store.info("three/cli:a")


def test_writing_is_refused() -> None:
    with CombinedStore([StorePlace(store=filled("a"))]) as store:
        for write in (store.add_message, store.delete, store.set_meta, store.lease, store.purge):
            with pytest.raises(ReadOnly):
                write("a")
        with pytest.raises(ReadOnly):
            store.change_mark("aliases")


class _FailingStore(InMemoryStore):
    fails = False

    def stamps(self) -> dict[str, str]:
        if self.fails:
            raise StoreUnavailable("not now")
        return super().stamps()

    def leased(self, keys: Collection[str]) -> set[str]:
        if self.fails:
            raise StoreUnavailable("not now")
        return super().leased(keys)


def test_place_that_cannot_be_read_keeps_its_sessions_until_it_is_gone() -> None:
    failing = _FailingStore()
    failing.add_message("a", "user", "hello")
    exists = True
    place = StorePlace(store=failing, prefix="one/", exists=lambda: exists)
    with CombinedStore([place, StorePlace(store=filled("b"), prefix="two/")]) as store:
        assert store.list_sessions() == ["one/a", "two/b"]
        failing.fails = True
        assert store.list_sessions() == ["one/a", "two/b"]
        assert store.leased(["one/a", "two/b"]) == set()
        exists = False
        assert store.list_sessions() == ["two/b"]


def test_places_are_recognized(tmp_path: Path) -> None:
    workspace, database = tmp_path / "work", tmp_path / "steno.db"
    for where in (str(workspace), f"sqlite:{database}"):
        with open_store(where) as store:
            store.add_message("a", "user", "hello")
    found = {
        "stenolog": [str(workspace), f"jsonl:{workspace}", str(database), f"sqlite:{database}"],
        "claude-code": [str(SAMPLES / "claude-code" / "projects")],
        "codex": [str(SAMPLES / "codex")],
        "llm": [str(next((SAMPLES / "llm-logs").glob("*.db")))],
    }
    for program, places in found.items():
        for place in places:
            assert recognize_place(place).program == program, place
    assert recognize_place("postgresql://host/db").where == "postgresql://host/db"
    with pytest.raises(UsageError, match="no file or folder"):
        recognize_place(str(tmp_path / "nothing"))
    (tmp_path / "notes.txt").write_text("hello\n")
    with pytest.raises(UsageError, match="neither"):
        recognize_place(str(tmp_path / "notes.txt"))


def test_two_workspaces_of_the_same_name_do_not_collide(tmp_path: Path) -> None:
    places = []
    for parent in ("x", "y"):
        workspace = tmp_path / parent / "workspace"
        with open_store(str(workspace)) as store:
            store.add_message("cli:a", "user", f"hello from {parent}")
        with open_store(str(workspace / "agents" / "helper")) as store:
            store.add_message("cli:h", "user", "hello")
        places.append(recognize_place(str(workspace)))
    with open_places(places, catalog=None) as combined:
        keys = combined.list_sessions()
        assert len(keys) == 4
        assert {key.partition("/")[2] for key in keys} == {"cli:a", "helper/cli:h"}
        texts = {combined.get_history(key)[0].content for key in keys}
        assert texts == {"hello from x", "hello from y", "hello"}
    # Alone, a workspace needs no prefix.
    with open_places(places[:1], catalog=None) as combined:
        assert combined.list_sessions() == ["cli:a", "helper/cli:h"]


def test_index_of_a_place_that_is_gone_is_deleted(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    old = index_file([ViewedPlace(program="codex", where=str(place))], tmp_path / "cache")
    for name in (old.name, f"{old.name}.lock", f"{old.name}-journal", f".{old.name}.new"):
        old.with_name(name).write_text("words of a message")
    place.rmdir()
    other = index_file([ViewedPlace(program="codex", where=str(tmp_path))], tmp_path / "cache")
    left = {path.name for path in old.parent.iterdir()}
    assert left == {other.with_suffix(".places").name}


def test_password_of_a_database_is_not_written_to_the_cache(tmp_path: Path) -> None:
    place = ViewedPlace(program="stenolog", where="postgresql://ada:secret@host/db")
    index = index_file([place], tmp_path)
    assert b"secret" not in b"".join(path.read_bytes() for path in index.parent.iterdir())


def test_place_that_cannot_be_opened_is_reported_and_the_others_are_shown(tmp_path: Path) -> None:
    crashed, damaged, good = tmp_path / "crashed.db", tmp_path / "damaged.db", tmp_path / "good"
    for where in (f"sqlite:{crashed}", f"sqlite:{damaged}", str(good)):
        with open_store(where) as store:
            store.add_message("a", "user", "hello")
    # As after a crash on another machine: a log without its index.
    with open_store(f"sqlite:{crashed}") as store:
        store.add_message("a", "user", "again")
        files = {name: (tmp_path / name).read_bytes() for name in ("crashed.db", "crashed.db-wal")}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "crashed.db-shm").unlink(missing_ok=True)
    damaged.write_bytes(damaged.read_bytes()[:100] + b"x" * 5_000)
    places = [
        ViewedPlace(program="stenolog", where=str(where)) for where in (crashed, damaged, good)
    ]
    failed: dict[str, str] = {}

    def report(place: ViewedPlace, error: Exception) -> None:
        failed[place.where] = str(error)

    with open_places(places, catalog=None, on_problem=report) as combined:
        assert combined.list_sessions() == ["good/a"]
    assert list(failed) == [str(crashed), str(damaged)]
    assert "write-ahead log" in failed[str(crashed)]
    assert not (tmp_path / "crashed.db-shm").exists()
    with pytest.raises(StoreUnavailable):
        open_places(places[:1], catalog=None, on_problem=report)
