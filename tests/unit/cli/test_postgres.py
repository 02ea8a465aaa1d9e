"""The commands on a PostgreSQL database: the same as on files, and no password is printed."""

from urllib.parse import urlsplit

import pytest

import stenolog
from unit.cli.conftest import Steno

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
def test_every_command_takes_the_url_and_keeps_the_password_to_itself(
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


def test_an_answer_is_kept_and_the_talk_goes_on(postgres_url: str, steno: Steno) -> None:
    for question in ("first", "second"):
        asked = steno("ask", "--model", "scripted", "--session", "k", "-w", postgres_url, question)
        assert asked.exit_code == 0, asked.stderr
    with stenolog.open_store(postgres_url) as store:
        assert [message.role for message in store.get_history("k")] == ["user", "assistant"] * 2


def test_a_store_is_not_imported_and_its_password_not_repeated(
    postgres_url: str, steno: Steno
) -> None:
    result = steno("import", postgres_url)
    assert result.exit_code == 2
    assert "`steno copy SRC DST` copies it" in result.stderr
    assert str(urlsplit(postgres_url).password) not in result.stderr
