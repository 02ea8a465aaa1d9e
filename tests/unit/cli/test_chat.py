"""How `steno chat` starts: in a terminal only, in which session; and the input history."""

import asyncio
import os
from pathlib import Path

import pytest

from stenolog.cli.agents import open_agent
from stenolog.cli.chat import ChatStart, find_start
from stenolog.cli.chat_input import InputHistory
from stenolog.cli.config import AgentOptions
from stenolog.stores.open_store import open_store

pytestmark = pytest.mark.usefixtures("here")


def start(
    key: str | None = None, *, continue_last: bool = False, search_text: str | None = None
) -> ChatStart:
    """The session in which a chat with these options starts."""

    async def find() -> ChatStart | None:
        opened = open_agent(AgentOptions(model="scripted"))
        try:
            return await find_start(
                opened, key=key, continue_last=continue_last, search_text=search_text
            )
        finally:
            await opened.loop.close()

    found = asyncio.run(find())
    assert found is not None
    return found


# --- which session ---------------------------------------------------------------------------


@pytest.fixture
def talks(here: Path) -> None:
    """Three sessions: two of a terminal, one of a chat app, which changed last."""
    with open_store(here / "workspace") as store:
        for key, question in (
            ("cli:1:default", "About mountains"),
            ("cli:2:default", "About rivers"),
            ("telegram:7", "About rivers too"),
        ):
            store.add_message(key, "user", question)
            store.add_message(key, "assistant", "Yes, about the sea.")


@pytest.mark.usefixtures("talks")
def test_chat_starts_a_new_session() -> None:
    found = start()
    assert found.key not in ("cli:1:default", "cli:2:default", "telegram:7")
    assert found.key.startswith("cli:")
    assert found.key.endswith(":default")
    assert not found.resumes


@pytest.mark.usefixtures("talks")
def test_continue_selects_the_last_cli_session() -> None:
    found = start(continue_last=True)
    assert (found.key, found.resumes) == ("cli:2:default", True)
    assert found.description == "About rivers (2 messages, just now)"


def test_continue_without_sessions_starts_a_new_one() -> None:
    found = start(continue_last=True)
    assert found.description == "There is no earlier session to continue. This is a new one."
    assert not found.resumes


@pytest.mark.usefixtures("talks")
def test_resume_selects_the_only_match() -> None:
    assert start(search_text="mountains").key == "cli:1:default"


def test_chat_with_a_part_of_a_key_names_the_session_that_has_the_whole_key() -> None:
    with open_store("workspace") as store:
        store.add_message("codex:20c7a18b-7d9d", "user", "hello")
    assert start("20c7a18b").key == "20c7a18b"
    assert start("20c7a18b").description == (
        "New session with this key. To continue codex:20c7a18b-7d9d, use the whole key."
    )
    assert start("cli:b").description == "New session with this key."
    assert start("codex:20c7a18b-7d9d").description == ""


def test_new_chat_mentions_an_interrupted_session() -> None:
    with open_store("workspace") as store:
        store.add_message("cli:a:default", "user", "hello")
    assert start().description == (
        "New session. The last one was interrupted; `steno chat -c` finishes the answer: hello"
    )
    with open_store("workspace") as store:
        store.add_message("cli:a:default", "assistant", "Hello.")
    assert start().description == "New session. `steno chat -c` continues the last one: hello"


# --- what was typed --------------------------------------------------------------------------


def test_input_history_is_private_and_newest_first(tmp_path: Path) -> None:
    file = tmp_path / "state" / "typed"
    history = InputHistory(file)
    history.store_string("one\ntwo")
    history.store_string("three")
    assert list(InputHistory(file).load_history_strings()) == ["three", "one\ntwo"]
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700


def test_chat_works_if_the_input_history_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    history = InputHistory(tmp_path / "file" / "typed")
    history.store_string("x")
    assert list(history.load_history_strings()) == []


def test_p11_input_history_follows_no_link_and_is_private_if_it_was_deleted(tmp_path: Path) -> None:
    other, file = tmp_path / "other", tmp_path / "typed"
    other.write_text("\n# 2026\n+secret\n")
    file.symlink_to(other)
    history = InputHistory(file)
    history.store_string("one")
    assert list(history.load_history_strings()) == []
    assert "one" not in other.read_text()
    file.unlink()
    before = os.umask(0)
    try:
        history.store_string("two")
    finally:
        os.umask(before)
    assert list(history.load_history_strings()) == ["two"]
    assert file.stat().st_mode & 0o777 == 0o600
