"""From stored messages to what a page shows of them."""

from typing import Any

from stenolog.gateway.viewer.messages import Gap, gaps, prompt_line, shown
from stenolog.records import Message
from stenolog.stores.in_memory import InMemoryStore


def _stored(*bodies: dict[str, Any]) -> list[Message]:
    with InMemoryStore() as store:
        store.add_messages("s", bodies)
        return store.get_history("s")


def _call(id: str, name: str = "look", arguments: Any = "{}") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_a_result_stands_with_its_call() -> None:
    made = shown(
        _stored(
            {"role": "assistant", "content": "", "tool_calls": [_call("a"), _call("b", "<b>")]},
            {
                "role": "tool",
                "tool_call_id": "b",
                "content": '{"x": 1}',
                "stenolog": {"seconds": 2},
            },
            {"role": "tool", "tool_call_id": "a", "content": "no", "stenolog": {"failed": True}},
            {"role": "assistant", "content": "done"},
        )
    )
    assert [one.seq for one in made] == [1, 4]
    first, second = made[0].calls
    assert (first.name, first.failed, first.result_seq) == ("look", True, 3)
    assert (second.name, second.seconds, second.failed) == ("<b>", 2.0, False)
    assert second.result is not None
    assert "1" in second.result


def test_a_result_without_its_call_is_a_message() -> None:
    [one] = shown(_stored({"role": "tool", "tool_call_id": "x", "content": "<i>alone</i>"}))
    assert one.kind == "tool"
    assert "&lt;i&gt;alone" in one.words


def test_a_result_may_come_behind_what_is_shown() -> None:
    call, result = _stored(
        {"role": "assistant", "content": None, "tool_calls": [_call("a")]},
        {"role": "tool", "tool_call_id": "a", "content": "late"},
    )
    [one] = shown([call], [result])
    assert one.calls[0].result == "late"


def test_parts_of_other_shapes_are_read() -> None:
    made = shown(
        _stored(
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm"},
                    {"type": "text", "text": "Look."},
                    {"type": "tool_use", "id": "a", "name": "look", "input": {"at": 1}},
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "a", "content": "x"}],
            },
            {"role": "user", "content": {"not": "known"}},
            {"role": 5, "content": None},
            {"no": "role"},
        )
    )
    assert [one.seq for one in made] == [1, 3, 4, 5]
    assert made[0].thoughts == ("<p>hm</p>\n",)
    assert made[0].calls[0].result == "x"
    assert made[2].kind == "other"


def test_pictures_are_shown_or_linked_or_neither() -> None:
    address = "data:image/png;base64,iVBORw0KGgo="
    content = [
        {"type": "image_url", "image_url": {"url": address}},
        {"type": "image_url", "image_url": {"url": "https://a.example/x.png"}},
        {"type": "image_url", "image_url": {"url": "javascript:alert(1)"}},
        {"type": "image", "source": {"media_type": "image/gif", "data": "R0lGOD=="}},
        {"type": "image"},
        {"type": "text", "text": "What is this?"},
    ]
    [message] = _stored({"role": "user", "content": content})
    [one] = shown([message])
    told = [(picture.shown, picture.link) for picture in one.pictures]
    assert told == [(True, False), (False, True), (False, False), (True, False), (False, False)]
    assert prompt_line(message.to_dict()) == "What is this?"


def test_what_is_out_of_sight_is_told_by_its_runs() -> None:
    assert gaps([(1, 9)], last=9, floor=0, hidden=0) == []
    [one] = gaps([(6, 9)], last=9, floor=5, hidden=4)
    assert one == Gap(first=1, last=5, count=4, at_floor=True)
    found = gaps([(8, 9), (12, 12)], last=14, floor=5, hidden=11)
    assert [(run.first, run.last, run.at_floor) for run in found] == [
        (1, 5, True),
        (6, 7, False),
        (10, 11, False),
        (13, 14, False),
    ]
    [everything] = gaps([], last=3, floor=3, hidden=3)
    assert (everything.first, everything.last) == (1, 3)
