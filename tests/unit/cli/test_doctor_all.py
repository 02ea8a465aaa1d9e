"""`steno doctor` beside the sessions: disk, index, versions, and turns without an end."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema_rs
import msgspec
import pytest
from click.testing import Result
from msgspec import Struct

from stenolog.maintenance.environment_check import (
    CheckNote,
    check_disk_space,
    list_notes,
)
from stenolog.stores.open_store import open_store

Steno = Callable[..., Result]
InTerminal = Callable[..., tuple[int, str]]

pytestmark = pytest.mark.usefixtures("place")


class Shape(Struct):
    """What there is of notes in the report."""

    notes: list[CheckNote]
    findings: list[dict[str, Any]]


def _kinds(notes: list[CheckNote]) -> list[str]:
    return [note.kind for note in notes if note.kind not in ("disk", "version")]


def test_notes_are_printed_only_on_request(steno: Steno, in_terminal: InTerminal) -> None:
    plain = steno("doctor")
    assert plain.exit_code == 0
    assert plain.stderr == "Checked 3 logs: no problems found.\n"
    told = steno("doctor", "-v")
    assert told.exit_code == 0
    assert told.stdout == ""
    assert "interrupted turns: There are 2 sessions with an unanswered last message" in told.stderr
    assert "cli:default" in told.stderr
    assert "日本:\\n語" in told.stderr, "in one line"
    assert "version: SQLite 3." in told.stderr
    assert "interrupted turns: " in in_terminal("doctor")[1]


def test_json_has_the_notes_if_asked_for(steno: Steno) -> None:
    found = json.loads(steno("doctor", "--json", "-v").stdout)
    jsonschema_rs.validate(msgspec.json.schema(Shape), found)
    assert "notes" not in json.loads(steno("doctor", "--json").stdout)
    assert "interrupted turns" in [note["kind"] for note in found["notes"]]


def test_doctor_checks_sessions_of_all_agents(place: Path) -> None:
    with open_store(place / "workspace" / "agents" / "ada") as store:
        store.add_message("k", "user", "hello?")
    told = [note.meaning for note in list_notes("workspace") if note.kind == "interrupted turns"]
    assert "There is 1 session of the agent ada with" in told[1]


def test_advice_does_not_promise_to_resume_imported_sessions(place: Path, steno: Steno) -> None:
    imported = place / "talk.json"
    imported.write_text('[{"role": "user", "content": "hello?"}]')
    assert steno("import", str(imported), "-w", "other").exit_code == 0
    [note] = [note for note in list_notes("other") if note.kind == "interrupted turns"]
    assert "an unanswered last message: talk." in note.meaning
    assert "resumes them" not in note.advice
    assert "not imported" in note.advice


def test_doctor_reports_running_turns(place: Path) -> None:
    with open_store(place / "workspace") as store, store.lease("telegram:123", ttl=60):
        [note] = [note for note in list_notes("workspace") if note.kind == "turns under way"]
    assert note.meaning == ("There is 1 session with a turn in progress: telegram:123.")


@pytest.mark.parametrize("where", ["workspace", "sqlite:some.db"])
def test_invalid_index_is_reported_and_not_changed(place: Path, steno: Steno, where: str) -> None:
    with open_store(where) as store:
        store.add_message("a", "user", "hello")
    assert steno("list", "-w", where).exit_code == 0
    assert "index" not in _kinds(list_notes(where))
    names = {"workspace": "workspace/sessions/catalog.db"}
    index = place / names.get(where, "some.db-sessions.catalog")
    intact = index.read_bytes()
    for content, reason in (
        (intact[:-100] + bytes(100), "malformed database schema"),
        (intact + b"x", "was changed by another program"),
    ):
        index.write_bytes(content)
        assert steno("doctor", "-v", where).exit_code == 0, "it is made anew by itself"
        [note] = [note for note in list_notes(where) if note.kind == "index"]
        assert "The search index cannot be used" in note.meaning
        assert reason in note.meaning
        assert index.read_bytes() == content, "nothing is written"
    assert steno("list", "-w", where).exit_code == 0
    assert "index" not in _kinds(list_notes(where))


@pytest.mark.parametrize(
    ("kind", "words"), [("tmpfs", "a restart or a power cut deletes"), ("overlay", "a container")]
)
def test_temporary_disk_is_reported(place: Path, kind: str, words: str) -> None:
    mounts = place / "mounts"
    mounts.write_text(f"disk / ext4 rw 0 0\nnone {place} {kind} rw 0 0\n")
    [note] = [note for note in list_notes("workspace", mounts=str(mounts)) if note.kind == "disk"]
    assert words in note.meaning
    mounts.write_text("disk / ext4 rw 0 0\n")
    assert not [note for note in list_notes("workspace", mounts=str(mounts)) if note.kind == "disk"]


@pytest.mark.parametrize("where", ["workspace", "sqlite:some.db"])
def test_nearly_full_disk_is_a_finding(where: str) -> None:
    with open_store("sqlite:some.db") as store:
        store.add_message("k", "user", "hello")
    assert check_disk_space(where) == []
    [found] = check_disk_space(where, min_bytes=1 << 62)
    assert found.kind == "low disk space"
    assert "bytes are free" in found.meaning
    assert check_disk_space("memory:", min_bytes=1 << 62) == []


def test_database_reports_version_and_turns(steno: Steno) -> None:
    with open_store("sqlite:some.db") as store:
        store.add_message("k", "user", "hello")
    result = steno("doctor", "sqlite:some.db", "-v")
    assert "with apsw 3." in result.stderr
    assert "There is 1 session with an unanswered last message: k." in result.stderr


def test_postgresql_version_is_reported(postgres_url: str) -> None:
    with open_store(postgres_url) as store:
        store.add_message("k", "user", "hello")
    notes = list_notes(postgres_url)
    assert _kinds(notes) == ["interrupted turns"]
    [version] = [note for note in notes if note.kind == "version"]
    assert version.meaning.startswith("PostgreSQL ")
