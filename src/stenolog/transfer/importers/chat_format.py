"""Conversion of imported messages to OpenAI's chat format: contents, tool calls, times, problems.

Fields that the format does not have are kept in a field named after the program, so that nothing is
lost. Such fields are not sent to providers.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from json import dumps, loads
from pathlib import PurePath
from typing import Any, Final

from msgspec.structs import replace

from stenolog.codec import encode_object
from stenolog.errors import RefusedMessage
from stenolog.stores.json_file import NO_TIME, JSONMessage, NotASession, time_of
from stenolog.transfer.importers.legacy_session import Layout, LegacySession, with_times

Part = dict[str, Any]

_EMPTY: Final[tuple[Any, ...]] = (None, "", [], {})
MAX_PROBLEMS: Final = 20
"""Maximum number of problems of one session that are reported individually."""
MAX_PROBLEM_LENGTH: Final = 400
"""Maximum number of characters of a reported problem."""


class NotAMessage(ValueError):
    """The value is not a message."""


class ImportProblems:
    """Problems of one imported session: lost messages, lost parts, and parts no model sees."""

    def __init__(self) -> None:
        self.dropped = 0
        self._problems: list[str] = []
        self._unseen_parts: Counter[str] = Counter()
        self._converted: Counter[str] = Counter()

    def report_dropped(self, text: str, count: int = 1) -> None:
        """Report messages that are lost."""
        self.dropped += count
        self._problems.append(_shortened(text, MAX_PROBLEM_LENGTH))

    def report_loss(self, text: str) -> None:
        """Report another loss."""
        self._problems.append(_shortened(text, MAX_PROBLEM_LENGTH))

    def count_unseen(self, kind: str) -> None:
        """Count a part that is kept in an additional field, which no model sees."""
        self._unseen_parts[_shortened(kind, MAX_PROBLEM_LENGTH // 10)] += 1

    def count_converted(self, text: str) -> None:
        """Count a field that was converted to the chat format."""
        self._converted[_shortened(text, MAX_PROBLEM_LENGTH // 10)] += 1

    def notes(self) -> tuple[str, ...]:
        """Return what was converted, each as a sentence."""
        return tuple(
            f"{text} in {count:,} message{'' if count == 1 else 's'}"
            for text, count in self._converted.most_common(MAX_PROBLEMS)
        )

    def encode(
        self, fields: dict[str, Any], at: datetime | None, label: str, *, hidden: bool = False
    ) -> list[JSONMessage]:
        """Return the message to store; if it cannot be stored, report it and return nothing."""
        try:
            return [JSONMessage(encode_object(fields), at, hidden=hidden)]
        except RefusedMessage as error:
            self.report_dropped(f"{label}: {error}")
            return []

    def problems(self) -> tuple[str, ...]:
        """Return the problems, each as a sentence."""
        more = len(self._problems) - MAX_PROBLEMS
        rest = (f"and {more:,} more like these",) if more > 0 else ()
        kinds = ", ".join(
            f"{count:,} {kind}" for kind, count in self._unseen_parts.most_common(MAX_PROBLEMS)
        )
        count_unseen = (f"stored, but not shown to models: {kinds}",) if kinds else ()
        return (*self._problems[:MAX_PROBLEMS], *rest, *count_unseen)

    def session(
        self,
        layout: Layout,
        key: str,
        messages: Sequence[JSONMessage],
        *,
        changed: datetime,
        created: datetime | None = None,
        updated: datetime | None = None,
        **more: Any,
    ) -> LegacySession:
        """Return the session; missing times come from its messages, or else from its file."""
        times = [message.at for message in messages if message.at is not None]
        created = created or min(times, default=changed)
        updated = updated or max(times, default=changed)
        return LegacySession(
            layout=layout,
            key=key,
            messages=with_times(messages, created, updated),
            created=created,
            updated=updated,
            dropped=self.dropped,
            problems=self.problems(),
            notes=self.notes(),
            **more,
        )

    def check_not_empty(self, messages: list[JSONMessage]) -> None:
        """Raise NotASession if there are no messages."""
        if not messages:
            text = "".join(f"; {text}" for text in self.problems())
            raise NotASession(f"it contains no messages{text}")


def _shortened(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def parse_json(text: bytes, label: str) -> Any:
    """Return the JSON value in a text. Raises NotAMessage."""
    try:
        return loads(text.decode(), parse_constant=_reject_constant)
    except (ValueError, RecursionError) as error:
        preview = text[:40].decode(errors="replace")
        reason = f" ({error})" if isinstance(error, NotAMessage) else ""
        raise NotAMessage(f"{label} is not JSON{reason}: {preview!r}") from error


def as_object(value: Any, label: str) -> dict[str, Any]:
    """Return the value if it is an object. Raises NotAMessage."""
    if not isinstance(value, dict):
        raise NotAMessage(f"{label} is not a JSON object")
    return value


def as_message(value: Any, label: str) -> dict[str, Any]:
    """Return the value if it is an object with a role. Raises NotAMessage."""
    fields = as_object(value, label)
    if not isinstance(fields.get("role"), str):
        raise NotAMessage(f"{label} is not a message: it has no role")
    return fields


def as_text(value: Any) -> str:
    """Return a text unchanged, other values as JSON. Raises ValueError, RecursionError."""
    if isinstance(value, str):
        return value
    return dumps(value, ensure_ascii=False, allow_nan=False)


def text_part(text: str) -> Part:
    """Return a text part of a content."""
    return {"type": "text", "text": text}


def image_part(url: str, **more: Any) -> Part:
    """Return an image part of a content."""
    return {"type": "image_url", "image_url": {"url": url, **non_empty(more)}}


def make_content(parts: Sequence[Part]) -> str | list[Part] | None:
    """Return the content of these parts: a single text as a string, None for no parts."""
    if len(parts) == 1 and parts[0].keys() == {"type", "text"}:
        text: str = parts[0]["text"]
        return text
    return list(parts) or None


def build_messages(
    role: str,
    parts: Sequence[Part],
    calls: list[dict[str, Any]],
    results: Sequence[dict[str, Any]],
    thoughts: Sequence[str],
) -> list[dict[str, Any]]:
    """Return the messages of these pieces: the tool results first, at least one message."""
    found = list(results)
    if parts or calls or thoughts or not found:
        message: dict[str, Any] = {"role": role, "content": make_content(parts)}
        if thoughts:
            message["reasoning_content"] = "\n\n".join(thoughts)
        if calls:
            message["tool_calls"] = calls
        found.append(message)
    return found


def make_call(id: Any, name: Any, arguments: Any) -> dict[str, Any]:
    """Return a tool call. Raises ValueError, RecursionError."""
    text = "{}" if arguments is None else as_text(arguments)
    function = {"name": name if isinstance(name, str) else "unknown", "arguments": text}
    return {"id": as_id(id), "type": "function", "function": function}


def as_id(id: Any) -> str | None:
    """Return the id of a tool call as text; None if there is none."""
    return None if id is None else as_text(id)


def non_empty(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that are not empty."""
    return {name: value for name, value in fields.items() if value not in _EMPTY}


def with_extra(message: dict[str, Any], name: str, rest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the message with the remaining data, if any, in a field of this name."""
    return {**message, name: dict(rest)} if rest else message


def _reject_constant(constant: str) -> Any:
    raise NotAMessage(f"{constant} is not valid JSON")


def parse_time(value: Any) -> datetime | None:
    """Return a time given as ISO 8601 or as seconds since 1970; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return time_of(value)
    try:
        found = datetime.fromtimestamp(0, UTC) + timedelta(seconds=value)
    except (OverflowError, ValueError):
        return None
    return found if found > NO_TIME else None


def parse_local_time(text: Any) -> datetime | None:
    """Return a time given as ISO 8601; without an offset it is local time."""
    if not isinstance(text, str):
        return None
    try:
        found = datetime.fromisoformat(text).astimezone(UTC)
    except (ValueError, OverflowError, OSError):
        return None
    return found if found > NO_TIME else None


# --- plain messages ------------------------------------------------------------------------------
# Chat messages without a framework: `[{"role": …}]` as one JSON file, or one message per line.

CHAT_FIELDS: Final = frozenset(
    {"role", "content", "name", "refusal", "tool_calls", "tool_call_id", "function_call"}
)
"""Fields of a message in the format of chat APIs."""
TIME_FIELDS: Final = ("created_at", "timestamp", "at", "time")
"""Fields that may contain the time of a message."""
ROLE_ALIASES: Final = {"human": "user", "ai": "assistant", "bot": "assistant", "model": "assistant"}
"""Roles of other programs, with the role of the chat format."""
CONTENT_FIELDS: Final = CHAT_FIELDS - {"role", "name", "tool_call_id"} | {
    "audio",
    "reasoning",
    "reasoning_content",
    "thinking",
}
"""Fields of which a message has at least one: otherwise it says nothing."""
_MILLISECONDS: Final = 1e11
"""Smallest number that counts as milliseconds since 1970, not as seconds: 5138 in seconds."""


def read_plain_array(
    found: list[Any],
    rest: dict[str, Any],
    *,
    name: str,
    changed: datetime,
    time_field: str = "",
) -> LegacySession:
    """Return the session in the array of a file of this name. Raises NotASession.

    The other fields of the file are kept with the session.
    """
    given = ((f"message {number}", value) for number, value in enumerate(found, 1))
    session = _read_session(
        given, ImportProblems(), name=name, changed=changed, time_field=time_field
    )
    return replace(session, state=rest)


def read_plain_lines(
    text: bytes, *, name: str, changed: datetime, time_field: str = ""
) -> LegacySession:
    """Return the session in a file of this name with one message per line. Raises NotASession."""
    report = ImportProblems()
    lines = _parse_lines(text, report)
    return _read_session(lines, report, name=name, changed=changed, time_field=time_field)


def has_message(found: list[Any]) -> bool:
    """Return whether this array contains a message."""
    return any(isinstance(one, dict) and isinstance(one.get("role"), str) for one in found)


def stem_of(name: str) -> str:
    """Return the name of a file without its suffix; it becomes the key."""
    return PurePath(name).stem


def _parse_lines(text: bytes, report: ImportProblems) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(text.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            yield f"line {number}", parse_json(line, f"line {number}")
        except NotAMessage as error:
            report.report_dropped(str(error))


def _read_session(
    given: Iterator[tuple[str, Any]],
    report: ImportProblems,
    *,
    name: str,
    changed: datetime,
    time_field: str,
) -> LegacySession:
    messages: list[JSONMessage] = []
    for label, value in given:
        try:
            fields = _as_chat_message(as_message(value, label), label, report)
        except NotAMessage as error:
            report.report_dropped(str(error))
            continue
        at = _time_of(fields, time_field)
        if time_field and at is None:
            report.report_loss(f"{label} has no time in the field {time_field!r}")
        messages += report.encode(fields, at or _time_of(fields), label)
    report.check_not_empty(messages)
    return report.session("plain", stem_of(name), messages, changed=changed)


def _as_chat_message(fields: dict[str, Any], label: str, report: ImportProblems) -> dict[str, Any]:
    """Return the message in the chat format. Raises NotAMessage if it says nothing.

    Values that were converted are kept in the field `plain`.
    """
    role = ROLE_ALIASES.get(fields["role"].lower())
    original: dict[str, Any] = {}
    message = dict(fields)
    if role is not None:
        report.count_converted(f"role {fields['role']!r} read as {role!r}")
        original["role"], message["role"] = fields["role"], role
    if not CONTENT_FIELDS.isdisjoint(message):
        return with_extra(message, "plain", original)
    if isinstance(message.get("text"), str):
        report.count_converted("field 'text' read as the content")
        message["content"] = message.pop("text")
        original["content"] = "text"
    elif (text := _text_of_parts(message.get("parts"))) is not None:
        report.count_converted("field 'parts' read as the content")
        original["parts"] = message.pop("parts")
        message["content"] = text
    else:
        names = ", ".join(sorted(fields))
        raise NotAMessage(f"{label} has neither content nor tool calls, only the fields {names}")
    return with_extra(message, "plain", original)


def _text_of_parts(parts: Any) -> str | None:
    """Return the joined texts of parts as Gemini's API has them; None for other parts."""
    texts = [
        part if isinstance(part, str) else part.get("text") if isinstance(part, dict) else None
        for part in (parts if isinstance(parts, list) else [])
    ]
    found = [text for text in texts if isinstance(text, str)]
    return "\n\n".join(found) if found and len(found) == len(texts) else None


def _time_of(fields: dict[str, Any], time_field: str = "") -> datetime | None:
    names = (time_field,) if time_field else TIME_FIELDS
    found = (_parse_epoch(fields.get(name)) for name in names)
    return next((at for at in found if at is not None), None)


def _parse_epoch(value: Any) -> datetime | None:
    """Return a time in ISO 8601, or in seconds or milliseconds since 1970, also as text."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return parse_time(value)
    if isinstance(value, int | float) and not isinstance(value, bool) and value >= _MILLISECONDS:
        value = value / 1000
    return parse_time(value)
