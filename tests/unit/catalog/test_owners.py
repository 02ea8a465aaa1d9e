"""Whose a session is: decided by the marks of its user messages, never by its key."""

from datetime import UTC, datetime
from typing import Any

import pytest
from msgspec import Raw

from stenolog.catalog.message_metadata import Ownership, mark_received
from stenolog.codec import encode_object
from stenolog.records import Message

ANN, BOB = "telegram:1", "telegram:2"


def _message(seq: int, body: dict[str, Any]) -> Message:
    return Message(seq=seq, _at=datetime.now(UTC).isoformat(), _body=Raw(encode_object(body)))


def _said(*senders: str | None) -> list[Message]:
    """User messages of these senders; None for one without a mark, "-" for an answer."""
    bodies: list[dict[str, Any]] = []
    for sender in senders:
        plain = {"role": "assistant" if sender == "-" else "user", "content": "x"}
        marked = sender is not None and sender != "-"
        bodies.append(mark_received(plain, sender=sender or "") if marked else plain)
    return [_message(seq, body) for seq, body in enumerate(bodies, 1)]


@pytest.mark.parametrize(
    ("senders", "sender"),
    [
        ([], ""),
        (["-"], ""),
        ([ANN], ANN),
        ([ANN, "-", ANN], ANN),
        (["-", ANN], ANN),
        ([ANN, BOB], ""),
        ([ANN, ""], ""),
        ([ANN, None], ""),
        (["", ANN], ""),
        ([None, ANN], ""),
        ([None], ""),
    ],
)
def test_session_belongs_to_the_one_sender_of_all_its_user_messages(
    senders: list[str | None], sender: str
) -> None:
    messages = _said(*senders)
    assert Ownership().with_messages(messages).sender == sender
    step_by_step = Ownership()
    for message in messages:
        step_by_step = step_by_step.with_messages([message])
    assert step_by_step == Ownership().with_messages(messages)


@pytest.mark.parametrize(
    "mark",
    [
        {"sender": ANN},
        {"received": ANN},
        {"received": [{"sender": ANN}]},
        {"received": {"sender": [ANN]}},
        {"received": {"sender": 1}},
        [{"received": {"sender": ANN}}],
    ],
)
def test_malformed_mark_has_no_sender(mark: Any) -> None:
    body = {"role": "user", "content": "x", "stenolog": mark}
    assert Ownership().with_messages([_message(1, body)]).sender == ""


def test_mark_in_an_answer_or_content_part_has_no_sender() -> None:
    mark = {"received": {"sender": ANN}}
    answer = {"role": "assistant", "content": "x", "stenolog": mark}
    nested = {"role": "user", "content": [{"type": "text", "text": "x", "stenolog": mark}]}
    assert Ownership().with_messages([_message(1, answer)]).sender == ""
    assert Ownership().with_messages([_message(1, nested)]).sender == ""
