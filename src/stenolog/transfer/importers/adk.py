"""ADK's events as messages in the chat format: every event becomes at least one message.

Rewound events are hidden, and so are compacted ones, which the summary covers.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final

from msgspec import Struct

from stenolog.stores.json_file import JSONMessage
from stenolog.transfer.importers.chat_format import (
    ImportProblems,
    NotAMessage,
    Part,
    as_id,
    as_object,
    as_text,
    build_messages,
    image_part,
    make_call,
    non_empty,
    parse_time,
    text_part,
)

FIELD: Final = "adk"
"""Field of a message with the data that the chat format does not have."""


class Event(Struct, frozen=True):
    """One event, with its name in reports."""

    label: str
    fields: dict[str, Any]

    @property
    def at(self) -> datetime | None:
        """Time of the event."""
        return parse_time(self.fields.get("timestamp"))

    @property
    def actions(self) -> dict[str, Any]:
        """Effects of the event besides its content."""
        found = self.fields.get("actions")
        return found if isinstance(found, dict) else {}


class Conversation(Struct, frozen=True):
    """The messages and the summary of a session."""

    messages: list[JSONMessage]
    summary: str


def read_events(events: Sequence[Event], report: ImportProblems) -> Conversation:
    """Return the messages of these events, in order, and the summary of the compacted ones."""
    hidden = _rewound_indexes(events)
    compactions = _compactions(events)
    messages: list[JSONMessage] = []
    for number, event in enumerate(events):
        if event.fields.get("partial") is True:
            continue
        at = event.at
        covered = at is not None and any(one.covers(at) for one in compactions)
        try:
            content_parts = messages_of(event.fields, report)
        except (ValueError, RecursionError) as error:
            report.report_dropped(f"{event.label} cannot be read: {error}")
            continue
        for message in content_parts:
            is_hidden = number in hidden or (covered and "compaction" not in event.actions)
            messages += report.encode(message, at, event.label, hidden=is_hidden)
    return Conversation(messages, "\n\n".join(one.text for one in compactions))


def messages_of(event: dict[str, Any], report: ImportProblems) -> list[dict[str, Any]]:
    """Return the messages of one event. Raises NotAMessage, ValueError, RecursionError."""
    content = event.get("content")
    if content is None:
        content = {}
    role, parts = as_object(content, "its content").get("role"), content.get("parts") or []
    if not isinstance(parts, list):
        raise NotAMessage("its parts are not a list")
    content_parts: list[Part] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    thoughts: list[str] = []
    is_lossless = True
    for part in parts:
        fields = non_empty(as_object(part, "a part of it"))
        call = _first_object(fields, "function_call", "functionCall")
        result = _first_object(fields, "function_response", "functionResponse")
        data = _first_object(fields, "inline_data", "inlineData")
        image = None if data is None else _image(data)
        text = fields.get("text")
        if call is not None:
            calls.append(make_call(call.get("id"), call.get("name"), call.get("args")))
            is_lossless = is_lossless and len(fields) == 1 and call.keys() <= {"id", "name", "args"}
        elif result is not None:
            results.append(_tool_result(result))
            is_lossless = (
                is_lossless and len(fields) == 1 and result.keys() <= {"id", "name", "response"}
            )
        elif isinstance(text, str):
            if fields.get("thought") is True:
                thoughts.append(text)
            else:
                content_parts.append(text_part(text))
            is_lossless = is_lossless and fields.keys() <= {"text", "thought"}
        elif image is not None:
            content_parts.append(image)
            is_lossless = is_lossless and len(fields) == 1
        elif fields:
            is_lossless = False
            report.count_unseen(" and ".join(fields))
    # An event that only changes a state is not a message of the user.
    is_user = bool(parts) and event.get("author") == "user" and role in (None, "user")
    found = build_messages(
        "user" if is_user else "assistant", content_parts, calls, results, thoughts
    )
    found[-1][FIELD] = _remaining_fields(event, content, is_lossless=is_lossless)
    return found


def _remaining_fields(
    event: dict[str, Any], content: dict[str, Any], *, is_lossless: bool
) -> dict[str, Any]:
    rest = {n: v for n, v in event.items() if n not in ("content", "actions", "timestamp")}
    actions = event.get("actions")
    rest["actions"] = non_empty(actions) if isinstance(actions, dict) else actions
    if not is_lossless:
        rest["content"] = content
    return non_empty(rest)


def _tool_result(result: dict[str, Any]) -> dict[str, Any]:
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


def _first_object(fields: dict[str, Any], *names: str) -> dict[str, Any] | None:
    found = (fields.get(name) for name in names)
    return next((value for value in found if isinstance(value, dict)), None)


def _rewound_indexes(events: Sequence[Event]) -> set[int]:
    """Return the indexes of the rewound events and of the events that rewound them."""
    hidden: set[int] = set()
    index = len(events) - 1
    while index >= 0:
        before = events[index].actions.get("rewind_before_invocation_id")
        first = index
        if isinstance(before, str):
            ids = (n for n in range(index) if events[n].fields.get("invocation_id") == before)
            first = next(ids, index)
            hidden.update(range(first, index + 1))
        index = first - 1
    return hidden


class _Compaction(Struct, frozen=True):
    start: datetime
    end: datetime
    text: str

    def covers(self, at: datetime) -> bool:
        return self.start <= at <= self.end

    def includes(self, other: "_Compaction") -> bool:
        return self.start <= other.start and other.end <= self.end


def _compactions(events: Sequence[Event]) -> list[_Compaction]:
    """Return the compactions, oldest first, without those that another one includes."""
    found = [one for event in events if (one := _compaction(event)) is not None]
    # Of two with the same range the later one counts.
    found = list({(one.start, one.end): one for one in found}.values())
    outermost = [
        one
        for number, one in enumerate(found)
        if not any(other.includes(one) and index != number for index, other in enumerate(found))
    ]
    return sorted(outermost, key=lambda one: one.start)


def _compaction(event: Event) -> _Compaction | None:
    compaction = event.actions.get("compaction")
    if not isinstance(compaction, dict):
        return None
    start, end = (
        parse_time(compaction.get("start_timestamp")),
        parse_time(compaction.get("end_timestamp")),
    )
    content = compaction.get("compacted_content")
    parts = content.get("parts") if isinstance(content, dict) else None
    listed = parts if isinstance(parts, list) else []
    texts = [part.get("text") for part in listed if isinstance(part, dict)]
    text = "\n\n".join(text for text in texts if isinstance(text, str))
    return None if start is None or end is None or not text else _Compaction(start, end, text)
