"""ADK's events as messages in the chat format: every complete event becomes at least one message.

Partial events are skipped. Events that the user rewound, and events that a summary replaced, become
hidden messages.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final

from msgspec import Struct

from stenolog.stores.json_file import JSONMessage
from stenolog.transfer.importers.chat_format import (
    ImportProblems,
    MessagePieces,
    NotAMessage,
    Part,
    as_id,
    as_object,
    image_part,
    join_texts,
    make_call,
    non_empty,
    omit,
    parse_time,
    text_part,
    to_text,
)

EXTRA_FIELD: Final = "adk"
"""Field of a message with the data that the chat format does not have."""


class Event(Struct, frozen=True):
    """One event, and the name of the event in reports."""

    label: str
    fields: dict[str, Any]

    @property
    def at(self) -> datetime | None:
        """Time of the event."""
        return parse_time(self.fields.get("timestamp"))

    @property
    def actions(self) -> dict[str, Any]:
        """Effects of the event besides its content."""
        value = self.fields.get("actions")
        return value if isinstance(value, dict) else {}


def read_events(events: Sequence[Event], report: ImportProblems) -> tuple[list[JSONMessage], str]:
    """Return the messages of these events, and the summary of the compacted events."""
    rewound_indexes = _find_rewound_indexes(events)
    compactions = _find_compactions(events)
    messages: list[JSONMessage] = []
    for index, event in enumerate(events):
        if event.fields.get("partial") is True:
            continue
        at = event.at
        is_covered = at is not None and any(c.start <= at <= c.end for c in compactions)
        is_compacted = is_covered and "compaction" not in event.actions
        is_hidden = is_compacted or index in rewound_indexes
        with report.skip_unreadable(event.label):
            for message in messages_of(event.fields, report):
                messages += report.encode(message, at, event.label, hidden=is_hidden)
    return messages, "\n\n".join(compaction.text for compaction in compactions)


def messages_of(event: dict[str, Any], report: ImportProblems) -> list[dict[str, Any]]:
    """Return the messages of one event. Raises NotAMessage, ValueError, RecursionError."""
    content_value = event.get("content")
    content = as_object({} if content_value is None else content_value, "its content")
    role, parts = content.get("role"), content.get("parts") or []
    if not isinstance(parts, list):
        raise NotAMessage("its parts are not a list")
    pieces = MessagePieces()
    for part in parts:
        fields = non_empty(as_object(part, "a part of it"))
        call = _first_object(fields, "function_call", "functionCall")
        result = _first_object(fields, "function_response", "functionResponse")
        data = _first_object(fields, "inline_data", "inlineData")
        image = None if data is None else _image_part(data)
        text = fields.get("text")
        if call is not None:
            pieces.calls.append(make_call(call.get("id"), call.get("name"), call.get("args")))
            pieces.is_lossless &= len(fields) == 1 and call.keys() <= {"id", "name", "args"}
        elif result is not None:
            pieces.results.append(_tool_result(result))
            pieces.is_lossless &= len(fields) == 1 and result.keys() <= {"id", "name", "response"}
        elif isinstance(text, str):
            if fields.get("thought") is True:
                pieces.thoughts.append(text)
            else:
                pieces.parts.append(text_part(text))
            pieces.is_lossless &= fields.keys() <= {"text", "thought"}
        elif image is not None:
            pieces.parts.append(image)
            pieces.is_lossless &= len(fields) == 1
        elif fields:
            pieces.is_lossless = False
            report.count_unseen(" and ".join(fields))
    # An event without content only changes the state of a session, so it is not a user message.
    is_user = bool(parts) and event.get("author") == "user" and role in (None, "user")
    messages = pieces.messages("user" if is_user else "assistant")
    other_fields = omit(event, "content", "actions", "timestamp")
    actions = event.get("actions")
    other_fields["actions"] = non_empty(actions) if isinstance(actions, dict) else actions
    if not pieces.is_lossless:
        other_fields["content"] = content
    messages[-1][EXTRA_FIELD] = non_empty(other_fields)
    return messages


def _tool_result(result: dict[str, Any]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "tool", "tool_call_id": as_id(result.get("id"))}
    if isinstance(result.get("name"), str):
        message["name"] = result["name"]
    return {**message, "content": to_text(result.get("response", {}))}


def _image_part(data: dict[str, Any]) -> Part | None:
    mime_type, text = data.get("mime_type", data.get("mimeType")), data.get("data")
    if isinstance(mime_type, str) and isinstance(text, str) and mime_type.startswith("image/"):
        # ADK writes URL-safe base64, which other programs do not read.
        return image_part(f"data:{mime_type};base64,{text.replace('-', '+').replace('_', '/')}")
    return None


def _first_object(fields: dict[str, Any], *names: str) -> dict[str, Any] | None:
    values = (fields.get(name) for name in names)
    return next((value for value in values if isinstance(value, dict)), None)


def _find_rewound_indexes(events: Sequence[Event]) -> set[int]:
    """Return the indexes of the rewound events and of the events that rewound them."""
    hidden_indexes: set[int] = set()
    index = len(events) - 1
    while index >= 0:
        run_id = events[index].actions.get("rewind_before_invocation_id")
        first_index = index
        if isinstance(run_id, str):
            indexes = (n for n in range(index) if events[n].fields.get("invocation_id") == run_id)
            first_index = next(indexes, index)
            hidden_indexes.update(range(first_index, index + 1))
        index = first_index - 1
    return hidden_indexes


class _Compaction(Struct, frozen=True):
    start: datetime
    end: datetime
    text: str

    def includes(self, other: "_Compaction") -> bool:
        return self.start <= other.start and other.end <= self.end


def _find_compactions(events: Sequence[Event]) -> list[_Compaction]:
    """Return the compactions, oldest first. A compaction inside a larger one is left out."""
    all_compactions = filter(None, map(_read_compaction, events))
    # If two compactions have the same range, the later compaction counts.
    compactions = {(c.start, c.end): c for c in all_compactions}.values()
    outermost_compactions = [
        inner
        for inner in compactions
        if not any(outer.includes(inner) and outer is not inner for outer in compactions)
    ]
    return sorted(outermost_compactions, key=lambda compaction: compaction.start)


def _read_compaction(event: Event) -> _Compaction | None:
    compaction = event.actions.get("compaction")
    if not isinstance(compaction, dict):
        return None
    start = parse_time(compaction.get("start_timestamp"))
    end = parse_time(compaction.get("end_timestamp"))
    content = compaction.get("compacted_content")
    text = join_texts(content.get("parts")) if isinstance(content, dict) else ""
    return None if start is None or end is None or not text else _Compaction(start, end, text)
