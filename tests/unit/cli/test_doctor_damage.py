"""`steno doctor` on damaged records of every engine: the advice that it prints works."""

import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import apsw
import psycopg
import pytest

import stenolog
from stenolog.errors import DamagedStore
from support.cli import Steno

Damage = Callable[[str], None]
"""Damages the state, the newest change, the trash entry or message 2 of the only session."""


class Place:
    """A workspace with one session, and a way to damage its records."""

    def __init__(self, where: str, damage: Damage) -> None:
        self.where = where
        self.damage = damage


def _in_file(file: Path) -> Damage:
    def damage(record: str) -> None:
        statement = {
            "state": "UPDATE state SET body = x'7b22ff'",
            "trash": "DELETE FROM state",
            "change": "DELETE FROM change WHERE number = (SELECT max(number) FROM change)",
            "message": "UPDATE message SET body = x'7b22ff' WHERE seq = 2",
        }[record]
        connection = apsw.Connection(str(file))
        connection.execute(statement)
        connection.close()

    return damage


def _on_server(url: str) -> Damage:
    def damage(record: str) -> None:
        newest = "(SELECT max(number) FROM stenolog.change)"
        statement = {
            "state": "UPDATE stenolog.session SET state = '{'",
            "trash": "UPDATE stenolog.session SET state = ''",
            "change": f"UPDATE stenolog.change SET body = '{{' WHERE number = {newest}",  # noqa: S608
            "message": "UPDATE stenolog.message SET body = '{' WHERE seq = 2",
        }[record]
        with psycopg.connect(url, autocommit=True) as server:
            assert server.execute(statement.encode()).rowcount == 1

    return damage


def _in_folder(folder: Path) -> Damage:
    def damage(record: str) -> None:
        [file] = (folder / "sessions").rglob("*.jsonl")
        lines = file.read_bytes().splitlines(keepends=True)
        kind = b"state" if record in ("state", "trash") else record.encode()
        chosen = [at for at, line in enumerate(lines) if b'"kind":"%b"' % kind in line]
        for at in {"change": chosen[-1:], "message": chosen[1:2]}.get(record, chosen):
            lines[at] = lines[at].replace(b'"at":', b'"xx"#')
        file.write_bytes(b"".join(lines))

    return damage


def _made(where: str, damage: Damage) -> Place:
    """A session "a b" with five messages: 2 and 3 are hidden, and undo needs the last change."""
    with stenolog.open_store(where) as store:
        for number in range(1, 6):
            store.add_message("a b", "user", f"word {number}")
        store.set_summary("a b", "long " * 2_000)
        store.admin.hide("a b", 2, 3)
        store.set_summary("a b", "so far")
    return Place(where, damage)


def _advised_commands(stdout: str) -> list[list[str]]:
    return [shlex.split(found) for found in re.findall(r"`steno ([^`]*)`", stdout)]


class DamagedPlace:
    """Tests for every engine; a subclass gives the fixture `place`."""

    @pytest.mark.parametrize("record", ["state", "change", "message"])
    def test_p3_damaged_session_can_be_exported_as_doctor_advises(
        self, place: Place, steno: Steno, record: str
    ) -> None:
        place.damage(record)
        examined = steno("doctor", place.where)
        assert examined.exit_code == 1
        assert "damaged" in examined.stdout
        assert "a b" in examined.stdout
        commands = [command for command in _advised_commands(examined.stdout) if command[1:]]
        exported = steno(*(commands or [["export", "a b"]])[0], "-w", place.where)
        assert exported.exit_code == 0
        lines = [json.loads(line) for line in exported.stdout.splitlines()]
        told = [one["content"] for one in lines if str(one.get("content", "")).startswith("word")]
        assert told == [f"word {number}" for number in (1, 4, 5)]

    @pytest.mark.parametrize("record", ["state", "change", "message"])
    @pytest.mark.parametrize("command", ["delete", "purge"])
    def test_damaged_session_can_be_deleted_and_purged(
        self, place: Place, steno: Steno, record: str, command: str
    ) -> None:
        place.damage(record)
        ended = steno(command, "a b", "-w", place.where, "--yes")
        assert ended.exit_code == 0, ended.stderr
        with stenolog.open_store(place.where) as store:
            assert store.list_sessions() == []
            assert [trashed.key for trashed in store.admin.list_trash()] == ["a b"] * (
                command == "delete"
            )


class DamagedDatabase(DamagedPlace):
    """In a log damaged lines stay; the row of a state is replaced."""

    @pytest.mark.parametrize("record", ["state", "trash"])
    def test_p3_next_change_stores_the_rebuilt_state(
        self, place: Place, steno: Steno, record: str
    ) -> None:
        if record == "trash":
            with stenolog.open_store(place.where) as store:
                store.delete("a b")
        place.damage(record)
        assert steno("doctor", place.where).exit_code == 1
        with stenolog.open_store(place.where) as store:
            if record == "trash":
                store.admin.restore("a b")
            assert [message.seq for message in store.get_history("a b")] == [1, 4, 5]
            assert store.get_summary("a b") == "so far"
            store.admin.hide("a b", 1, 1)
            store.undo("a b")
        assert steno("doctor", place.where).exit_code == 0

    def test_p3_damaged_change_is_reported_and_newer_changes_can_be_undone(
        self, place: Place, steno: Steno
    ) -> None:
        place.damage("change")
        assert steno("doctor", place.where).exit_code == 1
        with stenolog.open_store(place.where) as store:
            store.admin.hide("a b", 1, 1)
            store.undo("a b")
            assert [message.seq for message in store.get_history("a b")] == [1, 4, 5]
            with pytest.raises(DamagedStore, match="is damaged and cannot be undone"):
                store.undo("a b")


class TestFolder(DamagedPlace):
    @pytest.fixture
    def place(self, tmp_path: Path) -> Place:
        tmp_path.chmod(0o700)
        return _made(str(tmp_path / "workspace"), _in_folder(tmp_path / "workspace"))


class TestSQLite(DamagedDatabase):
    @pytest.fixture
    def place(self, tmp_path: Path) -> Place:
        tmp_path.chmod(0o700)
        file = tmp_path / "steno.db"
        return _made(f"sqlite:{file}", _in_file(file))


class TestPostgreSQL(DamagedDatabase):
    @pytest.fixture
    def place(self, postgres_url: str) -> Place:
        return _made(postgres_url, _on_server(postgres_url))


def test_damaged_file_in_the_trash_can_be_recovered_or_purged_as_doctor_advises(
    tmp_path: Path, steno: Steno
) -> None:
    tmp_path.chmod(0o700)
    workspace = tmp_path / "workspace"
    with stenolog.open_store(workspace) as store:
        store.add_message("a", "user", "word")
        uid = store.delete("a").uid
    _in_folder(workspace)("trash")
    examined = steno("doctor", str(workspace))
    assert examined.exit_code == 1
    [file] = (workspace / "sessions" / "trash").iterdir()
    assert str(file) in examined.stdout
    assert f"`steno restore {uid} --as KEY`" in examined.stdout
    assert f"`steno purge {uid}`" in examined.stdout
    copied = tmp_path / "copied"
    shutil.copytree(workspace, copied)
    assert steno("restore", uid, "--as", "a", "-w", str(workspace)).exit_code == 0
    exported = steno("export", "a", "-w", str(workspace))
    assert (exported.exit_code, json.loads(exported.stdout)["content"]) == (0, "word")
    assert steno("purge", uid, "--yes", "-w", str(copied)).exit_code == 0
    assert [one for one in copied.rglob("*") if one.is_file() and b"word" in one.read_bytes()] == []
