"""ADK's events as messages in the chat format: every event becomes at least one message.

Rewound events are hidden, and so are compacted ones, which the summary covers.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final

from msgspec import Struct

from stenolog.stores.json_file import JSONMessage
from stenolog.transfer.importers.chat_format import (
    NotAMessage,
    Part,
    Report,
    as_id,
    as_object,
    as_text,
    assembled,
    call_of,
    filled,
    image_part,
    moment,
    text_part,
)

FIELD: Final = "adk"
"""Field of a message with the data that the chat format does not have."""


class Event(Struct, frozen=True):
    """One event, with its name in reports."""

    what: str
    fields: dict[str, Any]

    @property
    def at(self) -> datetime | None:
        """Time of the event."""
        return moment(self.fields.get("timestamp"))

    @property
    def actions(self) -> dict[str, Any]:
        """Effects of the event besides its content."""
        found = self.fields.get("actions")
        return found if isinstance(found, dict) else {}


class Talk(Struct, frozen=True):
    """The messages and the summary of a session."""

    messages: list[JSONMessage]
    summary: str


def talk_of(events: Sequence[Event], report: Report) -> Talk:
    """Return the messages of these events, in order, and the summary of the compacted ones."""
    hidden = _rewound(events)
    compactions = _compactions(events)
    messages: list[JSONMessage] = []
    for number, event in enumerate(events):
        if event.fields.get("partial") is True:
            continue
        at = event.at
        covered = at is not None and any(one.covers(at) for one in compactions)
        try:
            made = messages_of(event.fields, report)
        except (ValueError, RecursionError) as error:
            report.drop(f"{event.what} cannot be read: {error}")
            continue
        for message in made:
            out = number in hidden or (covered and "compaction" not in event.actions)
            messages += report.keep(message, at, event.what, hidden=out)
    return Talk(messages, "\n\n".join(one.text for one in compactions))


def messages_of(event: dict[str, Any], report: Report) -> list[dict[str, Any]]:
    """Return the messages of one event. Raises NotAMessage, ValueError, RecursionError."""
    content = event.get("content")
    if content is None:
        content = {}
    role, parts = as_object(content, "its content").get("role"), content.get("parts") or []
    if not isinstance(parts, list):
        raise NotAMessage("its parts are no list")
    made: list[Part] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    thoughts: list[str] = []
    whole = True
    for part in parts:
        fields = filled(as_object(part, "a part of it"))
        call = _one(fields, "function_call", "functionCall")
        result = _one(fields, "function_response", "functionResponse")
        data = _one(fields, "inline_data", "inlineData")
        image = None if data is None else _image(data)
        text = fields.get("text")
        if call is not None:
            calls.append(call_of(call.get("id"), call.get("name"), call.get("args")))
            whole = whole and len(fields) == 1 and call.keys() <= {"id", "name", "args"}
        elif result is not None:
            results.append(_result(result))
            whole = whole and len(fields) == 1 and result.keys() <= {"id", "name", "response"}
        elif isinstance(text, str):
            if fields.get("thought") is True:
                thoughts.append(text)
            else:
                made.append(text_part(text))
            whole = whole and fields.keys() <= {"text", "thought"}
        elif image is not None:
            made.append(image)
            whole = whole and len(fields) == 1
        elif fields:
            whole = False
            report.unseen(" and ".join(fields))
    # An event that only changes a state is not a message of the user.
    is_user = bool(parts) and event.get("author") == "user" and role in (None, "user")
    found = assembled("user" if is_user else "assistant", made, calls, results, thoughts)
    found[-1][FIELD] = _rest(event, content, whole=whole)
    return found


def _rest(event: dict[str, Any], content: dict[str, Any], *, whole: bool) -> dict[str, Any]:
    rest = {n: v for n, v in event.items() if n not in ("content", "actions", "timestamp")}
    actions = event.get("actions")
    rest["actions"] = filled(actions) if isinstance(actions, dict) else actions
    if not whole:
        rest["content"] = content
    return filled(rest)


def _result(result: dict[str, Any]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "tool", "tool_call_id": as_id(result.get("id"))}
    if isinstance(result.get("name"), str):
        message["name"] = result["name"]
    return {**message, "content": as_text(result.get("response", {}))}


def _image(data: dict[str, Any]) -> Part | None:
    kind, text = data.get("mime_type", data.get("mimeType")), data.get("data")
    if not isinstance(kind, str) or not isinstance(text, str) or not kind.startswith("image/"):
        return None
    # ADK writes URL-safe base64, which other programs do not read.
    return image_part(f"data:{kind};base64,{text.replace('-', '+').replace('_', '/')}")


def _one(fields: dict[str, Any], *names: str) -> dict[str, Any] | None:
    found = (fields.get(name) for name in names)
    return next((value for value in found if isinstance(value, dict)), None)


def _rewound(events: Sequence[Event]) -> set[int]:
    """Return the indexes of the rewound events and of the events that rewound them."""
    hidden: set[int] = set()
    place = len(events) - 1
    while place >= 0:
        before = events[place].actions.get("rewind_before_invocation_id")
        first = place
        if isinstance(before, str):
            ids = (n for n in range(place) if events[n].fields.get("invocation_id") == before)
            first = next(ids, place)
            hidden.update(range(first, place + 1))
        place = first - 1
    return hidden


class _Compaction(Struct, frozen=True):
    start: datetime
    end: datetime
    text: str

    def covers(self, at: datetime) -> bool:
        return self.start <= at <= self.end

    def says(self, other: "_Compaction") -> bool:
        return self.start <= other.start and other.end <= self.end


def _compactions(events: Sequence[Event]) -> list[_Compaction]:
    """Return the compactions, oldest first, without those that another one includes."""
    found = [one for event in events if (one := _compaction(event)) is not None]
    # Of two with the same range the later one counts.
    found = list({(one.start, one.end): one for one in found}.values())
    outer = [
        one
        for number, one in enumerate(found)
        if not any(other.says(one) and place != number for place, other in enumerate(found))
    ]
    return sorted(outer, key=lambda one: one.start)


def _compaction(event: Event) -> _Compaction | None:
    given = event.actions.get("compaction")
    if not isinstance(given, dict):
        return None
    start, end = moment(given.get("start_timestamp")), moment(given.get("end_timestamp"))
    content = given.get("compacted_content")
    parts = content.get("parts") if isinstance(content, dict) else None
    listed = parts if isinstance(parts, list) else []
    texts = [part.get("text") for part in listed if isinstance(part, dict)]
    text = "\n\n".join(text for text in texts if isinstance(text, str))
    return None if start is None or end is None or not text else _Compaction(start, end, text)
