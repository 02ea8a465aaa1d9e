"""Which of what a client sends is new, whichever way it sends it."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from stenolog.catalog.message_metadata import mark_client_calls, mark_seen
from stenolog.gateway.history_matching import answer_text_at, client_messages, match_history
from stenolog.records import Message
from stenolog.stores.in_memory import InMemoryStore
from stenolog.testing.scripted_model import tool_call


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def _log(*bodies: dict[str, Any], hide: int = 0) -> tuple[list[Message], list[Message]]:
    """What is in sight, and what no longer is, once so many were compacted."""
    store = InMemoryStore()
    store.add_messages("k", bodies)
    if hide:
        store.checkpoint("k", summary="before", upto=hide)
    everything = store.get_history("k", full=True)
    return store.get_history("k"), [message for message in everything if message.hidden]


U1, A1, U2, A2, U3 = _user("one?"), _said("One."), _user("two?"), _said("Two."), _user("three?")


def test_full_history_adds_only_messages_after_the_common_prefix() -> None:
    shown, _ = _log(U1, A1)
    found = match_history(shown, [U1, A1, U2])
    assert (found.kept_count, found.new_messages) == (2, (U2,))


def test_new_messages_alone_are_added() -> None:
    shown, _ = _log(U1, A1)
    assert match_history(shown, [U2]).new_messages == (U2,)
    # Also where it says again what it said first: nothing is taken out of sight.
    again = match_history(shown, [U1])
    assert (again.kept_count, again.new_messages) == (2, (U1,))


def test_messages_from_the_first_edited_one_are_replaced() -> None:
    shown, _ = _log(U1, A1, U2, A2)
    edited = _user("two, please?")
    found = match_history(shown, [U1, A1, edited])
    assert (found.kept_count, found.new_messages) == (2, (edited,))


def test_repeated_request_is_not_stored_twice() -> None:
    unanswered, _ = _log(U1, A1, U2)
    assert match_history(unanswered, [U2]).new_messages == ()
    assert match_history(unanswered, [U1, A1, U2]).new_messages == ()
    answered, _ = _log(U1, A1, U2, A2)
    assert match_history(answered, [U2]).answer_seq == 4
    whole = match_history(answered, [U1, A1, U2])
    assert (whole.answer_seq, whole.kept_count, whole.new_messages) == (4, 3, ())


def test_summarized_messages_are_matched() -> None:
    shown, gone = _log(U1, A1, U2, A2, hide=2)
    found = match_history(shown, [U1, A1, U2, A2, U3], read_hidden=lambda: gone)
    assert (found.kept_count, found.new_messages) == (2, (U3,))
    all_gone, gone = _log(U1, A1, U2, A2, hide=4)
    found = match_history(all_gone, [U1, A1, U2, A2, U3], read_hidden=lambda: gone)
    assert (found.kept_count, found.new_messages) == (0, (U3,))


def test_edit_of_a_summarized_message_is_detected() -> None:
    shown, gone = _log(U1, A1, U2, A2, hide=2)
    edited = _user("two, please?")
    found = match_history(shown, [U1, A1, edited], read_hidden=lambda: gone)
    assert (found.kept_count, found.new_messages) == (0, (edited,))
    again = match_history(shown, [U1, A1, U2, _said("Too."), U3], read_hidden=lambda: gone)
    assert (again.kept_count, again.new_messages) == (1, (_said("Too."), U3))


def test_newest_messages_alone_hide_nothing() -> None:
    shown, _ = _log(U1, A1, U2, A2)
    found = match_history(shown, [U2, A2, U3])
    assert (found.kept_count, found.new_messages) == (4, (U3,))


def test_unknown_history_replaces_the_stored_one() -> None:
    shown, _ = _log(U1, A1)
    other = [_user("Hello."), _said("Hello!"), _user("Go on.")]
    found = match_history(shown, other)
    assert (found.kept_count, found.new_messages) == (0, tuple(other))


def test_tool_calls_of_the_agent_are_one_message_to_the_client() -> None:
    call = tool_call("clock", id="c1")
    shown, _ = _log(
        U1,
        {"role": "assistant", "content": "I look.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "noon"},
        _said("It is noon."),
    )
    assert [part.role for part in client_messages(shown)] == ["user", "assistant"]
    assert answer_text_at(shown, 4) == "I look.\n\nIt is noon."
    found = match_history(shown, [U1, _said("I look.\n\nIt is noon."), U2])
    assert (found.kept_count, found.new_messages) == (4, (U2,))


def test_client_tool_calls_and_results_are_separate_messages() -> None:
    call = tool_call("lamp", {"on": True}, id="c1")
    calling = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "c1", "content": "done"}
    shown, _ = _log(U1, mark_client_calls(calling, ["c1"]))
    assert match_history(shown, [result]).new_messages == (result,)
    assert match_history(shown, [U1, {**calling, "content": None}, result]).new_messages == (
        result,
    )


def test_interrupted_answer_is_matched_by_its_prefix() -> None:
    shown, _ = _log(U1, mark_seen(_said("A long ans [interrupted]"), seen=1, interrupted="stopped"))
    found = match_history(shown, [U1, _said("A long"), U2])
    assert (found.kept_count, found.new_messages) == (2, (U2,))


def test_text_and_a_single_text_part_are_equal() -> None:
    shown, _ = _log(U1, A1)
    parts = {"role": "user", "content": [{"type": "text", "text": "one?"}]}
    assert match_history(shown, [parts, A1, U2]).new_messages == (U2,)


_talks = st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("xy")), min_size=1, max_size=6)


@given(_talks, st.data())
def test_full_history_adds_only_its_last_message_after_any_summary(
    talk: list[tuple[str, str]], data: st.DataObject
) -> None:
    bodies = [body for asked, said in talk for body in (_user(asked), _said(said))]
    hide = data.draw(st.integers(0, len(talk))) * 2
    shown, gone = _log(*bodies, hide=hide)
    found = match_history(shown, [*bodies, U3], read_hidden=lambda: gone)
    assert (found.kept_count, found.new_messages) == (len(shown), (U3,))


@given(_talks, _talks, st.booleans())
def test_visible_messages_equal_the_sent_history(
    talk: list[tuple[str, str]], other: list[tuple[str, str]], ends: bool
) -> None:
    """Where nothing was compacted, and the client's talk begins as the log does."""
    bodies = [body for asked, said in talk for body in (_user(asked), _said(said))]
    sent = [_user("hello"), _said("hello")]
    sent += [body for asked, said in other for body in (_user(asked), _said(said))]
    sent = sent if ends else [*sent, U3]
    shown, _ = _log(_user("hello"), _said("hello"), *bodies)
    found = match_history(shown, sent)
    assert [message.to_dict() for message in shown[: found.kept_count]] + list(
        found.new_messages
    ) == sent


def test_reused_ids_and_reformatted_calls_are_matched() -> None:
    own = {"role": "assistant", "content": "Let me look.\n", "tool_calls": [tool_call("t", id="c")]}
    done = {"role": "tool", "tool_call_id": "c", "content": "noon"}
    call = tool_call("lamp", '{"on":true}', id="c")
    handed = mark_client_calls({"role": "assistant", "content": "", "tool_calls": [call]}, ["c"])
    result = {"role": "tool", "tool_call_id": "c", "content": "on"}
    shown, _ = _log(U1, own, done, _said("It is noon."), U2, handed, result, A2)
    again = tool_call("lamp", '{"on": true}', id="c")
    sent = [
        U1,
        _said("Let me look.\n\n\nIt is noon."),
        U2,
        {"role": "assistant", "content": None, "tool_calls": [again]},
        result,
        A2,
        U3,
    ]
    found = match_history(shown, sent)
    assert (found.kept_count, found.new_messages) == (len(shown), (U3,))
