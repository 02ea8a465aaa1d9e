"""nanobot's logs: what is hidden there, its summary, and how its keys are found."""

import json
from datetime import UTC, datetime
from typing import Any

import pytest

from stenolog.stores.json_file import NotASession
from stenolog.transfer.importers import nanobot
from stenolog.transfer.importers.legacy_session import LegacySession

CHANGED = datetime(2026, 1, 2, tzinfo=UTC)


def read(*lines: Any, name: str = "x.jsonl") -> LegacySession:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    log = "".join(text + "\n" for text in texts).encode()
    return nanobot.read(log, name=name, mtime=CHANGED)


def head(**more: Any) -> dict[str, Any]:
    return {"_type": "metadata", **more}


def said(*words: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": word} for word in words]


def test_consolidated_messages_are_hidden_and_summary_is_imported() -> None:
    about = {"_last_summary": {"text": "so far", "last_active": "x"}}
    old = read(head(key="k", last_consolidated=2, metadata=about), *said("a", "b", "c"))
    assert [message.hidden for message in old.messages] == [True, True, False]
    assert old.summary == "so far"
    assert old.state == {"metadata": about, "last_consolidated": 2}


def test_unreadable_line_counts_for_last_consolidated() -> None:
    old = read(head(key="k", last_consolidated=2), *said("a"), "torn", *said("c"))
    assert [message.hidden for message in old.messages] == [True, False]
    assert old.dropped == 1


@pytest.mark.parametrize("given", [-1, 4, "2", True, None])
def test_invalid_last_consolidated_hides_nothing(given: Any) -> None:
    old = read(head(key="k", last_consolidated=given), *said("a", "b", "c"))
    assert not any(message.hidden for message in old.messages)
    assert "nothing is hidden" in old.problems[0]


@pytest.mark.parametrize(
    ("about", "name", "key"),
    [
        ({"key": "telegram:1"}, "x.jsonl", "telegram:1"),
        ({}, "dGVsZWdyYW06MTAwMQ.jsonl", "telegram:1001"),
        ({"key": 7}, "telegram_1001.jsonl", "telegram_1001"),
        ({"key": ""}, "abcd.jsonl", "abcd"),
    ],
)
def test_key_comes_from_the_first_line_or_the_file_name(
    about: dict[str, Any], name: str, key: str
) -> None:
    assert read(head(**about), *said("a"), name=name).key == key


def test_lines_of_another_kind_are_kept_with_the_session() -> None:
    provider = {"_type": "provider_state", "id": "resp_1"}
    old = read(head(key="k"), provider, *said("a"))
    assert old.state == {"lines": [provider]}
    assert len(old.messages) == 1


def test_log_without_messages_is_not_a_session() -> None:
    with pytest.raises(NotASession, match="it contains no messages"):
        read(head(key="k"))
