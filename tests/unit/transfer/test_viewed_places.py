"""The places that `steno view` shows: found, recognized, and opened as one store."""

import os
import shutil
from pathlib import Path

import pytest

from stenolog.errors import StoreUnavailable, UsageError
from stenolog.stores.open_store import open_store
from stenolog.transfer.transcripts.codex import Codex
from stenolog.transfer.transcripts.transcript_import import import_transcript
from stenolog.transfer.viewed_places import (
    ViewedPlace,
    find_usual_places,
    open_places,
    prepare_index_file,
    recognize_place,
)
from support.file_modes import modes_of_root
from support.transcripts import SAMPLES

__all__ = ["modes_of_root"]


def test_imported_transcript_is_shown_once(tmp_path: Path) -> None:
    sessions = tmp_path / "codex" / "sessions"
    shutil.copytree(SAMPLES / "codex" / "sessions", sessions)
    reader = Codex()
    workspace = tmp_path / "workspace"
    with open_store(workspace) as store:
        for file in reader.find(sessions):
            import_transcript(reader, file, store)
        # Only the key looks like an imported session.
        store.add_message("codex:mine", "user", "hello")
        keys = store.list_sessions()
    first, second, *rest = (key for key in keys if key != "codex:mine")
    places = [
        ViewedPlace(program="codex", where=str(sessions.parent)),
        ViewedPlace(program="stenolog", where=str(workspace)),
    ]
    with open_places(places, catalog=None) as combined:
        shown = {first, second, *rest, "workspace/codex:mine"}
        assert set(combined.list_sessions()) == shown
        # A link to the copy still works.
        assert combined.get_history(f"workspace/{first}")
    with open_store(workspace) as store:
        store.add_message(first, "user", "continued in stenolog")
    for path in next(file.paths for file in reader.find(sessions) if file.key == second):
        path.unlink()
    shown = shown - {first, second} | {f"workspace/{first}", f"workspace/{second}"}
    with open_places(places, catalog=None) as combined:
        assert set(combined.list_sessions()) == shown
    with open_places(places[1:], catalog=None) as combined:
        assert combined.list_sessions() == keys


@pytest.mark.usefixtures("modes_of_root")
def test_workspace_that_cannot_be_read_is_reported(tmp_path: Path) -> None:
    workspace = tmp_path / "workspace"
    with open_store(workspace) as store:
        store.add_message("a", "user", "hello")
    (workspace / "sessions").chmod(0)
    assert find_usual_places(str(workspace))[-1].where == str(workspace)


@pytest.mark.parametrize("damage", ["unreadable", "emptied"])
@pytest.mark.usefixtures("modes_of_root")
def test_imported_copy_of_a_transcript_that_lost_messages_is_shown(
    tmp_path: Path, damage: str
) -> None:
    sessions = tmp_path / "codex" / "sessions"
    shutil.copytree(SAMPLES / "codex" / "sessions", sessions)
    reader = Codex()
    workspace = tmp_path / "workspace"
    file = next(iter(reader.find(sessions)))
    with open_store(workspace) as store:
        import_transcript(reader, file, store)
    for path in file.paths:
        if damage == "unreadable":
            path.chmod(0)
        else:
            path.write_bytes(b"")
    places = [
        ViewedPlace(program="codex", where=str(sessions.parent)),
        ViewedPlace(program="stenolog", where=str(workspace)),
    ]
    with open_places(places, catalog=None) as combined:
        assert f"workspace/{file.key}" in combined.list_sessions()
        assert (file.key in combined.list_sessions()) == (damage == "emptied")


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
    with pytest.raises(UsageError, match="no file or folder"):
        recognize_place(str(tmp_path / "nothing.db"))
    with pytest.raises(UsageError, match="'memory:' is empty"):
        recognize_place("memory:")
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
    old = prepare_index_file([ViewedPlace(program="codex", where=str(place))], tmp_path / "cache")
    for name in (old.name, f"{old.name}.lock", f"{old.name}-journal", f".{old.name}.new"):
        old.with_name(name).write_text("words of a message")
    place.rmdir()
    other = prepare_index_file(
        [ViewedPlace(program="codex", where=str(tmp_path))], tmp_path / "cache"
    )
    left = {path.name for path in old.parent.iterdir()}
    assert left == {other.with_suffix(".places").name}


def test_index_of_a_place_that_is_used_again_stays(tmp_path: Path) -> None:
    place = ViewedPlace(program="codex", where=str(tmp_path))
    list_file = prepare_index_file([place], tmp_path / "cache").with_suffix(".places")
    before = list_file.stat()
    os.utime(list_file, (before.st_atime, before.st_mtime - 89 * 86_400))
    prepare_index_file([place], tmp_path / "cache")
    after = list_file.stat()
    # The file itself is not written again, but its time is new.
    assert (after.st_ino, after.st_mtime >= before.st_mtime - 1) == (before.st_ino, True)


def test_password_of_a_database_is_not_written_to_the_cache(tmp_path: Path) -> None:
    place = ViewedPlace(program="stenolog", where="postgresql://ada:secret@host/db")
    index = prepare_index_file([place], tmp_path)
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
        problems = combined.admin.health().problems
    assert problems == tuple(f"{where}: {reason}" for where, reason in failed.items())
    assert list(failed) == [str(crashed), str(damaged)]
    assert "write-ahead log" in failed[str(crashed)]
    assert not (tmp_path / "crashed.db-shm").exists()
    with pytest.raises(StoreUnavailable):
        open_places(places[:1], catalog=None, on_problem=report)


def test_health_names_a_place_that_cannot_be_read_until_it_can_be_read(tmp_path: Path) -> None:
    good, opencode = tmp_path / "good", tmp_path / "opencode"
    with open_store(good) as store:
        store.add_message("a", "user", "hello")
    opencode.mkdir()
    database = opencode / "opencode.db"
    database.write_bytes(b"SQLite format 3\x00" + b"x" * 200)
    places = [
        ViewedPlace(program="stenolog", where=str(good)),
        ViewedPlace(program="opencode", where=str(opencode)),
    ]
    with open_places(places, catalog=None) as combined:
        assert len(combined.list_sessions()) == 1
        (problem,) = combined.admin.health().problems
        assert problem.startswith(f"{opencode}: ")
        database.unlink()
    with open_places(places, catalog=None) as combined:
        combined.list_sessions()
        assert combined.admin.health().problems == ()


@pytest.mark.usefixtures("modes_of_root")
def test_unreadable_folder_of_transcripts_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CLAUDE_CONFIG_DIR", raising=False)
    monkeypatch.delenv("CODEX_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    claude, codex = tmp_path / ".claude" / "projects", tmp_path / ".codex" / "sessions"
    shutil.copytree(SAMPLES / "claude-code" / "projects", claude)
    shutil.copytree(SAMPLES / "codex" / "sessions", codex)
    for closed in (claude, claude.parent):
        closed.chmod(0)
        places = find_usual_places(str(tmp_path / "workspace"))
        reported: dict[str, str] = {}

        def report(place: ViewedPlace, error: Exception, into: dict[str, str] = reported) -> None:
            into[place.where] = str(error)

        with open_places(places, catalog=None, on_problem=report) as combined:
            assert len(combined.list_sessions()) == 6
            assert combined.admin.health().problems == (f"{claude}: Permission denied",)
        assert reported == {str(claude): "Permission denied"}
        closed.chmod(0o700)
    codex.chmod(0)
    with open_places(places, catalog=None) as combined:
        assert len(combined.list_sessions()) == 6
        assert combined.admin.health().problems == (f"{codex}: Permission denied",)
    codex.chmod(0o700)


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("ada:hunter2@127.0.0.1:1/tides", "tides"),
        # An unknown parameter is rejected at once, without trying to connect.
        ("ada:[hunter2@host/tides?x=1", "tides"),
        ("ada:hunter2@host?x=1", "stenolog"),
        ("ada:hun/ter2@host?x=1", "host"),
        ("host/tides?password=hun/ter2&x=1", "tides"),
    ],
)
def test_name_of_an_unreadable_database_has_no_password(
    tmp_path: Path, address: str, name: str
) -> None:
    with open_store(tmp_path / "good") as store:
        store.add_message("a", "user", "hello")
    places = [
        ViewedPlace(program="stenolog", where=str(tmp_path / "good")),
        ViewedPlace(program="stenolog", where=f"postgresql://{address}"),
    ]
    with open_places(places, catalog=None) as combined:
        (problem,) = combined.admin.health().problems
    assert problem.startswith(f"{name}: ")
    assert "ter2" not in problem
