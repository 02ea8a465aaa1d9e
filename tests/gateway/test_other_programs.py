"""A gateway on a workspace in which another program stores its conversations, as a real process."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from stenolog.catalog.message_metadata import mark_received
from stenolog.stores.base import Store
from stenolog.stores.open_store import open_store
from support.gateway.clients import wait_until
from support.gateway.gateway_process import TOKEN, Process

OWN = "cli:own:default"
"""A session in which a stenolog agent was asked: its answer shows that the gateway has looked."""


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[Store]:
    with open_store(str(tmp_path / "workspace")) as store:
        yield store


def _gateway(place: Path) -> Process:
    """`steno serve` with the scripted model."""
    workspace, token = place / "workspace", place / "gateway" / "token"
    process = Process(place / "gateway", sessions=str(workspace), model="scripted")
    (place / "gateway" / "config.toml").write_text(
        f"[agent]\nsessions = '{workspace}'\nmodel = 'scripted'\n"
        f"[gateway]\ntoken_file = '{token}'\ntakeover = 0.5\n"
    )
    assert token.read_text() == TOKEN
    return process


def _ask(store: Store, key: str) -> None:
    """Leave a message as a killed stenolog agent leaves it."""
    store.add_full_message(key, mark_received({"role": "user", "content": "Are you there?"}))


def _is_answered(store: Store, key: str) -> bool:
    return store.get_history(key)[-1].role == "assistant"


def _roles(store: Store, key: str) -> list[str]:
    return [message.role for message in store.get_history(key, full=True)]


def test_gateway_does_not_answer_a_message_while_its_own_program_is_answering_it(
    tmp_path: Path, workspace: Store
) -> None:
    process = _gateway(tmp_path).start()
    try:
        workspace.add_message("support:42", "user", "Why was I charged twice in October?")
        _ask(workspace, OWN)
        wait_until(lambda: _is_answered(workspace, OWN))  # later than it would answer the other one
        workspace.add_message("support:42", "assistant", "A refund is on its way.")
        assert process.stop() == 0
    finally:
        process.close()
    assert _roles(workspace, "support:42") == ["user", "assistant"]
    assert f"Answered the unanswered messages in {OWN}" in process.words.read_text()


def test_gateway_neither_answers_nor_closes_the_sessions_of_another_program(
    tmp_path: Path, workspace: Store
) -> None:
    long_ago = datetime.now(UTC) - timedelta(days=3)
    question = {"role": "user", "content": "Hello?"}
    young = [f"app:{number}" for number in range(5)]
    old = [f"app:old-{number}" for number in range(20)]
    for key in young:
        workspace.add_full_message(key, question)
    for key in old:
        workspace.add_messages(key, [question], at=[long_ago])
    workspace.add_messages("cli:old:default", [mark_received(question)], at=[long_ago])
    _ask(workspace, OWN)
    process = _gateway(tmp_path).start()
    try:
        wait_until(lambda: _is_answered(workspace, OWN))
        _ask(workspace, "cli:later:default")
        wait_until(lambda: _is_answered(workspace, "cli:later:default"))
        wait_until(lambda: "Closed" in process.words.read_text())
        assert process.stop() == 0
    finally:
        process.close()
    assert all(_roles(workspace, key) == ["user"] for key in (*young, *old))
    lines = process.words.read_text().splitlines()
    assert sum("Answered the unanswered messages in" in line for line in lines) == 2
    [closed] = [line for line in lines if "Closed" in line]
    assert closed.endswith("Closed the unanswered turn in cli:old:default: it is too old")
