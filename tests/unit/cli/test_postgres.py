"""The commands on a PostgreSQL database: the same as on files, and no password is printed."""

from pathlib import Path
from urllib.parse import urlsplit

import pytest

import stenolog
from support.cli import Steno

COMMANDS = [
    ["list"],
    ["show", "k"],
    ["search", "hello"],
    ["export", "k"],
    ["doctor"],
    ["memory", "list"],
    ["show", "nobody"],
    ["list", "--agent", "ada"],
    ["list", "--namespace", "other"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_accepts_the_url_and_prints_no_password(
    command: list[str], postgres_url: str, steno: Steno
) -> None:
    with stenolog.open_store(postgres_url) as store:
        store.add_message("k", "user", "hello")
    result = steno(*command, "-w", postgres_url)
    secret = urlsplit(postgres_url).password
    assert secret
    assert secret not in result.stdout + result.stderr
    assert "in memory" not in result.stderr
    assert "Traceback" not in result.stderr
    if command[0] in ("list", "search", "export") and len(command) < 3:
        assert "hello" in result.stdout


def test_answers_are_stored_in_postgresql(postgres_url: str, steno: Steno) -> None:
    for question in ("first", "second"):
        asked = steno("ask", "--model", "scripted", "--session", "k", "-w", postgres_url, question)
        assert asked.exit_code == 0, asked.stderr
    with stenolog.open_store(postgres_url) as store:
        assert [message.role for message in store.get_history("k")] == ["user", "assistant"] * 2


def test_database_is_rejected_as_a_backup_folder(
    postgres_url: str, steno: Steno, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for place in (postgres_url, "sqlite:x.db"):
        result = steno("backup", place)
        assert (result.exit_code, result.stdout) == (2, "")
        assert "Name the store to back up with -w" in result.stderr
    assert list(tmp_path.iterdir()) == []
