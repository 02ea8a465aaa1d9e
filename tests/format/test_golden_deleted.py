"""Tests P13 with forked, purged, deleted and moved sessions of every released format.

The folders under golden/lives are never changed. `python tests/format/test_golden_deleted.py`
writes a missing one for the newest format of each engine.
"""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any, Final

import pytest
from click.testing import CliRunner

from stenolog import JSONLStore, SQLiteStore, open_sessions
from stenolog.cli import main
from stenolog.records import FORMAT
from stenolog.stores.base import Store
from stenolog.stores.sqlite.database_file import fingerprint

GOLDEN: Final = Path(__file__).parent / "golden" / "lives"
VERSIONS: Final = sorted(path.name for path in GOLDEN.iterdir()) if GOLDEN.is_dir() else []
NEWEST: Final = (f"jsonl-v{FORMAT}", f"sqlite-{fingerprint():08x}")
TOKENS: Final = {"talk": ("fourth", "number 4", 4), "purged": ("sixth", "number 6", 6)}
"""Messages stored with an idempotency key, by session: key, content, seq."""


def opened(version: str, place: Path, *, read_only: bool = False) -> Store:
    """Open the store of a golden folder."""
    if version.startswith("jsonl"):
        return JSONLStore(place, read_only=read_only)
    return SQLiteStore(place / "sessions.db", read_only=read_only)


def write(store: Store) -> None:
    """Create sessions that start and end in every possible way."""
    for key in ("talk", "purged", "gone", "moved"):
        once, _, seq = TOKENS.get(key, ("", "", 0))
        for number in range(1, 8):
            token = once if number == seq else None
            store.add_message(key, "user", f"number {number}", once=token)
    store.checkpoint("talk", summary="the first two – naïve ☃", upto=2)
    store.admin.hide("talk", 5, 5)
    store.set_meta("talk", title="A talk", tags=["a", "b"])
    store.fork("talk", "talk, forked", at=6)
    store.add_full_message("talk, forked", {"role": "tool", "n": 2**80, "x": "lone \ud83d, NUL \0"})
    store.compact("talk")
    store.admin.hide("purged", 2, 4)
    store.set_summary("purged", "of later ones")
    store.admin.purge("purged", before=4)
    store.truncate_history("gone", 3)
    store.compact("gone")
    store.delete("gone")
    store.add_messages("gone", [{"role": "user", "content": text} for text in ("new", "life")])
    store.set_summary("gone", "a second life")
    store.delete("gone")
    store.add_message("gone", "user", "a third life")
    store.delete("moved")
    store.admin.restore("moved", as_key="moved elsewhere")


def read_sessions(store: Store) -> dict[str, Any]:
    """Return everything that a reader sees of every session."""
    return {key: _read_session(store, key) for key in store.list_sessions()}


def _read_session(store: Store, key: str) -> dict[str, Any]:
    info = store.info(key)
    return {
        "visible": [[m.seq, m.at.isoformat()] for m in store.get_history(key)],
        "full": [
            [m.seq, m.hidden, m.to_json().decode("utf-8", "surrogatepass")]
            for m in store.get_history(key, full=True)
        ],
        "summary": store.get_summary(key),
        "meta": dict(info.meta),
        "uid": info.uid,
        "created": info.created.isoformat(),
        "forked_from": info.forked_from,
        "floor": info.floor,
        "last_seq": info.last_seq,
        "undoable": info.undoable,
        "lost": info.lost,
    }


def read_folder(version: str, place: Path) -> dict[str, Any]:
    """Return the content of a folder, its trash, and the results of writing to it."""
    with opened(version, place) as store:
        found = {"sessions": read_sessions(store), "trash": _trash(store)}
        before = set(store.list_sessions())
        for number, trashed in enumerate(store.admin.list_trash(), 1):
            store.admin.restore(trashed.key, uid=trashed.uid, as_key=f"back {number}")
        back = sorted(set(store.list_sessions()) - before)
        found["restored"] = {key: _read_session(store, key) for key in back}
        found["tokens"] = {
            key: store.add_message(key, "user", content, once=once)
            for key, (once, content, _) in TOKENS.items()
        }
        for key in ("talk", "back 2"):
            store.undo(key)
        found["undone"] = {key: _read_session(store, key) for key in ("talk", "back 2")}
        found["added"] = {key: store.add_message(key, "user", "new") for key in sorted(before)}
    return found


def _trash(store: Store) -> list[list[Any]]:
    return [
        [one.key, one.uid, one.deleted.isoformat(), one.count] for one in store.admin.list_trash()
    ]


@pytest.mark.parametrize("version", VERSIONS)
def test_p13_forked_purged_and_deleted_sessions_stay_readable(version: str, tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / version, tmp_path / "w")
    expected = json.loads((GOLDEN / version / "expected.json").read_text(encoding="utf-8"))
    assert read_folder(version, tmp_path / "w") == expected


# --- read-only access ------------------------------------------------------------------------


def _copied(version: str, folder: Path) -> Path:
    """Copy a golden folder, with private modes."""
    place = folder / "w"
    shutil.copytree(GOLDEN / version, place)
    (place / "expected.json").unlink()
    for path in (place, *place.rglob("*")):
        path.chmod(0o700 if path.is_dir() else 0o600)
    return place


def _expected(version: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((GOLDEN / version / "expected.json").read_text("utf-8"))
    return found


def _logs(place: Path) -> dict[str, bytes]:
    """Return the content of all files with sessions."""
    found = [*place.rglob("*.jsonl"), *place.rglob("*.gz"), *place.glob("sessions.db")]
    return {str(path): path.read_bytes() for path in found}


def _steno(version: str, place: Path, *arguments: str) -> str:
    """Run a command on a golden folder and return its output; check that it succeeds silently."""
    where = str(place) if version.startswith("jsonl") else f"sqlite:{place}/sessions.db"
    result = CliRunner().invoke(main, [*arguments, "-w", where], prog_name="steno")
    assert result.exit_code == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("version", VERSIONS)
def test_p13_read_only_store_reads_the_same_and_changes_nothing(
    version: str, tmp_path: Path
) -> None:
    place, expected = _copied(version, tmp_path), _expected(version)
    before = _logs(place)
    with opened(version, place, read_only=True) as store:
        assert read_sessions(store) == expected["sessions"]
        assert _trash(store) == expected["trash"]
        for key, session in expected["sessions"].items():
            seqs = [one[0] for one in session["full"]]
            assert [m.seq for m in store.get_history(key, full=True, last=2)] == seqs[-2:]
            assert [m.seq for m in store.follow(key, timeout=0)] == seqs
        assert store.admin.health().ok
    assert _logs(place) == before


@pytest.mark.parametrize("version", VERSIONS)
def test_p13_doctor_reports_no_findings_and_changes_nothing(version: str, tmp_path: Path) -> None:
    place = _copied(version, tmp_path)
    before = _logs(place)
    assert _steno(version, place, "doctor") == ""
    assert _logs(place) == before


@pytest.mark.parametrize("version", VERSIONS)
def test_p13_read_commands_do_not_upgrade_the_format(version: str, tmp_path: Path) -> None:
    place, expected = _copied(version, tmp_path), _expected(version)
    before = _logs(place)
    for key, session in expected["sessions"].items():
        shown = _steno(version, place, "show", key)
        assert all(f"[{seq}] " in shown for seq, _ in session["visible"])
        lines = _steno(version, place, "export", key).splitlines()
        assert len(lines) == len(session["visible"])
    listed = _steno(version, place, "list")
    assert all(key in listed for key in expected["sessions"])
    assert "talk" in _steno(version, place, "search", '"number 7"')
    if version.startswith("jsonl"):  # a database has its index in the same folder
        assert _logs(place) == before


@pytest.mark.parametrize("version", VERSIONS)
def test_p13_sessions_can_be_written_while_they_are_read(version: str, tmp_path: Path) -> None:
    place = _copied(version, tmp_path)
    with opened(version, place, read_only=True) as reading, opened(version, place) as writing:
        assert writing.add_message("talk", "user", "new") == 8
        assert [m.content for m in reading.get_history("talk", last=1)] == ["new"]
    if version.startswith("sqlite"):
        sessions = open_sessions(f"sqlite:{place}/sessions.db")
        assert sessions.get_history("talk")[-1].content == "new"
        sessions.close()


@pytest.mark.parametrize("version", VERSIONS)
def test_p13_expected_content_of_the_golden_folders_is_correct(version: str) -> None:
    expected = json.loads((GOLDEN / version / "expected.json").read_text(encoding="utf-8"))
    sessions = expected["sessions"]
    assert list(sessions) == ["gone", "moved elsewhere", "purged", "talk", "talk, forked"]
    seqs = {key: [seq for seq, _ in sessions[key]["visible"]] for key in sessions}
    assert seqs["talk"] == [3, 4, 6, 7]
    assert seqs["talk, forked"] == [3, 4, 6, 7]
    assert seqs["purged"] == [5, 6, 7]
    assert [one[0] for one in sessions["purged"]["full"]] == [4, 5, 6, 7]
    assert sessions["talk, forked"]["forked_from"] == "talk"
    assert [(key, count) for key, _, _, count in expected["trash"]] == [("gone", 2), ("gone", 7)]
    assert [one[0] for one in expected["restored"]["back 2"]["full"]] == [1, 2, 3, 4, 5, 6, 7]
    assert expected["tokens"] == {key: seq for key, (_, _, seq) in TOKENS.items()}
    assert not any(session["lost"] for session in sessions.values())


def test_p13_golden_folders_exist_for_the_newest_formats() -> None:
    assert set(NEWEST) <= set(VERSIONS)


def _main() -> None:
    for version in NEWEST:
        folder = GOLDEN / version
        if not folder.exists():
            folder.mkdir(parents=True, mode=0o700)
            with opened(version, folder) as store:
                write(store)
            for beside in folder.glob("sessions.db-*"):
                beside.unlink()
            with tempfile.TemporaryDirectory() as copy:
                shutil.copytree(folder, Path(copy) / "w")
                found = json.dumps(read_folder(version, Path(copy) / "w"), indent=1)
            (folder / "expected.json").write_text(found + "\n", encoding="utf-8")


if __name__ == "__main__":
    _main()
