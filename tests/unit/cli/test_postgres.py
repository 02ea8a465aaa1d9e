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


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize(
    "where",
    [
        "postgresql://u:SECRET/pw@127.0.0.1:1/db",
        "postgresql://u:1/SECRET@127.0.0.1:1/db",
        "postgresql://u:SECRET@pw@127.0.0.1:1/db",
        "postgresql://u:SECRET:x/y@[::1]:1/db",
        "postgres://u@h,v:SECRET/pw@127.0.0.1/db",
        "host=127.0.0.1 port=1 password=SECRET",
        "user=u password = 'SECRET'",
    ],
)
def test_p11_password_that_is_not_encoded_is_not_printed(
    command: list[str], where: str, steno: Steno
) -> None:
    result = steno(*command, "-w", where)
    assert result.exit_code != 0
    assert "SECRET" not in result.stdout + result.stderr
    assert "password" in result.stderr or "postgresql://" in result.stderr


def test_answers_are_stored_in_postgresql(postgres_url: str, steno: Steno) -> None:
    for question in ("first", "second"):
        asked = steno("ask", "--model", "scripted", "--session", "k", "-w", postgres_url, question)
        assert asked.exit_code == 0, asked.stderr
    with stenolog.open_store(postgres_url) as store:
        assert [message.role for message in store.get_history("k")] == ["user", "assistant"] * 2


def test_import_from_a_store_url_is_rejected_without_the_password(
    postgres_url: str, steno: Steno
) -> None:
    result = steno("import", postgres_url)
    assert result.exit_code == 2
    assert "copy it with `steno copy SRC DST`" in result.stderr
    assert str(urlsplit(postgres_url).password) not in result.stderr


def test_database_is_rejected_as_a_backup_folder(
    postgres_url: str, steno: Steno, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for place in (postgres_url, "sqlite:x.db"):
        result = steno("backup", place)
        assert (result.exit_code, result.stdout) == (2, "")
        assert "Name the store to back up with -w" in result.stderr
    assert list(tmp_path.iterdir()) == []
