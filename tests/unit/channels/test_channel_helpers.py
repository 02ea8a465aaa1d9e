"""Tests the allow-list, signatures, update tracker, chat moves, delivery marks and user texts."""

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stenolog.agent.scheduler import CLOSING_TEXT
from stenolog.agent.turn_events import Answer
from stenolog.channels.channel import AllowList, IncomingMessage, is_local
from stenolog.channels.delivery import make_owed_mark
from stenolog.channels.inbox import ChatMove, find_session_key, read_move, text_for_user
from stenolog.channels.telegram import UpdateTracker
from stenolog.channels.webhook import MAX_SIGNATURE_AGE_SECONDS, is_signed, make_signature
from stenolog.errors import NotStored
from stenolog.sessions.chat_marks import MAX_OWED, DeliveryMark, read_mark

SECRET = "a secret of both sides"
BODY = b'{"text":"hello"}'


# --- allow-list ----------------------------------------------------------------------------------


@given(st.text(), st.text())
def test_empty_allow_list_allows_no_sender(id: str, name: str) -> None:
    for entries in ((), ("", " ", "@", " @ ")):
        assert not AllowList(entries, setting="x").allows(id, name)


def test_allow_list_distinguishes_ids_and_names() -> None:
    allowed = AllowList(("123", "@Alice"), setting="x")
    assert allowed.allows("123")
    assert allowed.allows("7", "aLICE")
    assert not allowed.allows("7", "123")
    assert not allowed.allows("alice", "")
    assert not allowed.allows("@Alice", "")


def test_rejected_sender_is_logged_once_with_its_id(caplog: pytest.LogCaptureFixture) -> None:
    allowed = AllowList((), setting="channels.telegram.allow")
    for _ in range(3):
        allowed.allows("4711", "mallory")
    [record] = caplog.records
    assert "4711" in record.getMessage()
    assert "channels.telegram.allow" in record.getMessage()


# --- signatures ----------------------------------------------------------------------------------


def test_signature_is_valid_for_its_secret_body_and_time() -> None:
    header = make_signature(SECRET, BODY, signed_at=1_000)
    assert is_signed(SECRET, BODY, header, now=1_000)
    assert is_signed(SECRET, BODY, header, now=1_000 + MAX_SIGNATURE_AGE_SECONDS)
    assert not is_signed(SECRET, BODY, header, now=1_001 + MAX_SIGNATURE_AGE_SECONDS)
    assert not is_signed(SECRET, BODY, header, now=999 - MAX_SIGNATURE_AGE_SECONDS)
    assert not is_signed(SECRET, BODY + b" ", header, now=1_000)
    assert not is_signed("another secret", BODY, header, now=1_000)


@given(st.text() | st.from_regex(r"t=[0-9]+,v1=[0-9a-f]*", fullmatch=True))
def test_malformed_signature_is_rejected(header: str) -> None:
    assert not is_signed(SECRET, BODY, header, now=1_000)


def test_the_time_of_a_signature_cannot_be_changed() -> None:
    header = make_signature(SECRET, BODY, signed_at=1_000).replace("t=1000", "t=2000")
    assert not is_signed(SECRET, BODY, header, now=2_000)


# --- updates -------------------------------------------------------------------------------------


@example([(2, False), (1, True)])
@given(st.lists(st.tuples(st.integers(1, 30), st.booleans()), max_size=60))
def test_next_offset_never_passes_an_update_that_is_not_durable(
    steps: list[tuple[int, bool]],
) -> None:
    tracker = UpdateTracker()
    open_ones: set[int] = set()
    for number, durable in steps:
        # the updates that the server returns
        everything = range(max(tracker.next_number or 1, 1), 31)
        open_ones.update(tracker.add_updates([one for one in everything if one <= number]))
        if number in open_ones:
            tracker.settle_update(number, durable=durable)
            open_ones -= {number} if durable else set()
        assert all(one >= (tracker.next_number or 0) for one in open_ones)


def test_update_is_accepted_once_and_again_if_it_was_not_stored() -> None:
    tracker = UpdateTracker()
    assert tracker.add_updates([5, 6]) == [5, 6]
    assert tracker.add_updates([5, 6, 7]) == [7]
    tracker.settle_update(6, durable=True)
    assert tracker.next_number == 5
    tracker.settle_update(5, durable=False)
    assert tracker.next_number == 5
    assert tracker.add_updates([5, 6, 7]) == [5]
    tracker.settle_update(5, durable=True)
    assert tracker.next_number == 7


def test_offset_skips_updates_that_the_app_no_longer_has() -> None:
    tracker = UpdateTracker()
    tracker.add_updates([5])
    tracker.settle_update(5, durable=False)
    assert tracker.add_updates([9]) == [9]
    tracker.settle_update(9, durable=True)
    assert tracker.next_number == 10


# --- chat moves ----------------------------------------------------------------------------------


def _arrival(number: int, chat: str | None = None) -> IncomingMessage:
    return IncomingMessage(sender="1", text="hi", id=str(number), chat=chat, message_number=number)


def test_messages_before_a_move_stay_in_the_earlier_session() -> None:
    last_move = ChatMove(key="t:new:1", before="t:1", chat="", number=7)
    assert find_session_key("t:1", None, _arrival(3)) == "t:1"
    assert find_session_key("t:1", last_move, _arrival(8)) == "t:new:1"
    assert find_session_key("t:1", last_move, _arrival(6)) == "t:1"
    # the command itself, delivered again
    assert find_session_key("t:1", last_move, _arrival(7)) is None
    assert find_session_key("t:1", last_move, _arrival(6, chat="-5")) == "t:new:1"
    assert find_session_key("t:1", last_move, _arrival(0)) == "t:new:1"


def test_each_message_belongs_to_the_session_at_its_time() -> None:
    moves = ((3, "t:1"), (5, "t:a:1"))
    last_move = ChatMove(key="t:c:1", before="t:b:1", chat="", number=7, earlier=moves)
    found = [find_session_key("t:1", last_move, _arrival(number)) for number in range(1, 9)]
    there = ["t:1", "t:1", None, "t:a:1", None, "t:b:1", None, "t:c:1"]
    assert found == there


# --- texts and marks -----------------------------------------------------------------------------


@pytest.mark.parametrize("owed", [None, "x", [3, "x", True, 1], {"a": 1}])
def test_a_damaged_list_of_owed_answers_does_not_lose_the_mark(owed: object) -> None:
    fields = {"seq": 4, "mark": "sent", "origin": {"chat": "1"}, "owed": owed}
    mark = read_mark({"delivery": fields})
    assert mark is not None
    assert (mark.seq, mark.owed) == (4, [1, 3] if isinstance(owed, list) else [])


@pytest.mark.parametrize("damage", [{"chat": 7}, {"number": "x"}, {"earlier": [1]}])
def test_a_damaged_move_still_names_the_session_that_a_chat_continues_in(damage: object) -> None:
    assert isinstance(damage, dict)
    found = read_move({"continued_in": {"key": "a", "before": "b", **damage}})
    assert found == ChatMove(key="a", before="b")


def test_delivery_mark_is_read_back_and_invalid_marks_are_ignored() -> None:
    mark = DeliveryMark(seq=4, state="sending", origin={"channel": "telegram", "chat": 1})
    assert read_mark({"delivery": msgspec.to_builtins(mark)}) == mark
    assert read_mark({"delivery": msgspec.to_builtins(make_owed_mark(mark, 4))}) == make_owed_mark(
        mark, 4
    )
    for told in (None, 4, {}, {"seq": "4"}, {"seq": 4, "mark": "lost", "origin": {}}):
        assert read_mark({"delivery": told}) is None


def test_number_of_owed_answers_is_limited_to_the_newest() -> None:
    mark = DeliveryMark(seq=99, state="sending", origin={})
    for seq in range(MAX_OWED + 5):
        mark = make_owed_mark(mark, seq)
    assert mark.owed == list(range(5, MAX_OWED + 5))


def test_only_local_addresses_bypass_the_proxy() -> None:
    here = ("localhost:9000/a", "127.0.0.1", "127.9.9.9:1", "[::1]:9000", "0.0.0.0")
    assert all(is_local(f"http://{place}") for place in here)
    assert not any(
        is_local(f"http://{place}") for place in ("example.org", "10.0.0.1", "localhost.x")
    )


def test_turn_taken_over_by_another_process_has_no_text_for_the_user() -> None:
    assert text_for_user(Answer(key="k", text=CLOSING_TEXT, outcome="failed")) == ""
    taken_over = "Another process has taken over this turn."
    assert text_for_user(Answer(key="k", text=taken_over, outcome="failed")) == ""
    told = text_for_user(Answer(key="k", text="at 10.0.0.7: no", outcome="failed"))
    assert told == "I could not answer: something went wrong. Your message is saved."


def test_answer_that_is_not_kept_has_a_notice_for_the_user() -> None:
    answer = Answer(key="k", text="Hello.", outcome="answered", saved=False)
    assert text_for_user(answer).endswith(
        "(The conversation was cleared or changed by another process, so this answer is not kept.)"
    )
    error = NotStored("the disk is full: /srv/sessions")
    answer = Answer(key="k", text=str(error), outcome="failed", saved=False, error=error)
    assert text_for_user(answer) == (
        "I could not answer: storage is not available right now. Your message is not saved yet."
    )
