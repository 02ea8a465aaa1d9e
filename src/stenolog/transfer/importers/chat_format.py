"""Import of plain messages: chat messages in JSON, without the format of a particular program.

Original values of converted fields are kept in the field `plain`, so that nothing is lost. This
field is not sent to providers.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from json import loads
from pathlib import Path
from typing import Any, Final

from stenolog.codec import encode_object
from stenolog.errors import RefusedMessage
from stenolog.stores.json_file import NO_TIME, JSONMessage, NotASession, parse_go_time
from stenolog.transfer.importers.legacy_session import (
    LegacySession,
    make_session,
)

MAX_PROBLEMS: Final = 20
"""Maximum number of problems of one session that are reported individually."""
MAX_PROBLEM_LENGTH: Final = 400
"""Maximum number of characters of a reported problem."""


class NotAMessage(ValueError):
    """Raised for a value that is not a message."""


class ImportProblems:
    """Problems and conversions of one imported session."""

    def __init__(self) -> None:
        self.dropped = 0
        self._problems: list[str] = []
        self._converted: Counter[str] = Counter()

    def report_dropped(self, text: str) -> None:
        """Report a message that is lost."""
        self.dropped += 1
        self._problems.append(_shorten(text, MAX_PROBLEM_LENGTH))

    @contextmanager
    def skip_unreadable(self, label: str) -> Iterator[None]:
        """Report the message with this label as lost if the `with` block cannot read it."""
        try:
            yield
        except (ValueError, RecursionError) as error:
            text = str(error)
            is_labelled = text.startswith(label)
            self.report_dropped(text if is_labelled else f"{label} cannot be read: {text}")

    def count_converted(self, text: str) -> None:
        """Count a message with the conversion that `text` describes."""
        self._converted[_shorten(text, MAX_PROBLEM_LENGTH // 10)] += 1

    def encode(self, fields: dict[str, Any], at: datetime | None, label: str) -> list[JSONMessage]:
        """Return a list with the encoded message. If it is refused, report it and return []."""
        try:
            return [JSONMessage(encode_object(fields), at)]
        except RefusedMessage as error:
            self.report_dropped(f"{label}: {error}")
            return []

    def problems(self) -> tuple[str, ...]:
        """Return the problems, each as a sentence."""
        more_count = len(self._problems) - MAX_PROBLEMS
        more_text = (f"and {more_count:,} more like these",) if more_count > 0 else ()
        return (*self._problems[:MAX_PROBLEMS], *more_text)

    def build_session(
        self, key: str, messages: Sequence[JSONMessage], **more: Any
    ) -> LegacySession:
        """Return the session with the problems so far. `more` are arguments of `make_session`.

        Raises NotASession if there are no messages.
        """
        if not messages:
            raise NotASession("; ".join(["it contains no messages", *self.problems()]))
        notes = (
            f"{text} in {count:,} message{'' if count == 1 else 's'}"
            for text, count in self._converted.most_common(MAX_PROBLEMS)
        )
        return make_session(
            messages,
            layout="plain",
            key=key,
            dropped=self.dropped,
            problems=self.problems(),
            notes=tuple(notes),
            **more,
        )


def _shorten(text: str, max_length: int) -> str:
    return text if len(text) <= max_length else text[: max_length - 1] + "…"


def parse_json(text: bytes, label: str) -> Any:
    """Return the JSON value in a text. Raises NotAMessage."""
    try:
        return loads(text.decode(), parse_constant=_reject_constant)
    except (ValueError, RecursionError) as error:
        preview = text[:40].decode(errors="replace")
        reason = f" ({error})" if isinstance(error, NotAMessage) else ""
        raise NotAMessage(f"{label} is not JSON{reason}: {preview!r}") from error


def _reject_constant(constant: str) -> Any:
    raise NotAMessage(f"{constant} is not valid JSON")


# `[{"role": …}]` or `{"messages": […]}` as one JSON value, or one message per line.

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
"""A message with none of these fields is empty, unless it has a `text` or `parts` of texts."""
_MIN_MILLIS: Final = 1e11
"""Smallest number that is read as milliseconds since 1970. Smaller numbers are seconds."""


def read_plain(
    content: list[Any] | bytes,
    other_fields: dict[str, Any],
    *,
    name: str,
    mtime: datetime,
) -> LegacySession:
    """Return the session in a file with this name. Raises NotASession.

    `content` is the message array of the file, or the text of a file with one message per line.
    `other_fields` are the other fields of the file, which are kept with the session.
    """
    report = ImportProblems()
    messages: list[JSONMessage] = []
    for label, value in _labelled_values(content, report):
        with report.skip_unreadable(label):
            fields = _as_chat_message(value, label, report)
            times = (_parse_any_time(fields.get(name)) for name in TIME_FIELDS)
            at = next((time for time in times if time is not None), None)
            messages += report.encode(fields, at, label)
    return report.build_session(Path(name).stem, messages, mtime=mtime, state=other_fields)


def has_message(values: list[Any]) -> bool:
    """Return whether this array contains a message."""
    return any(isinstance(value, dict) and isinstance(value.get("role"), str) for value in values)


def _labelled_values(
    content: list[Any] | bytes, report: ImportProblems
) -> Iterator[tuple[str, Any]]:
    """Yield each message with its label: the name of the message in reports."""
    if isinstance(content, list):
        yield from ((f"message {number}", value) for number, value in enumerate(content, 1))
        return
    for line_number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if line.strip():
            label = f"line {line_number}"
            with report.skip_unreadable(label):
                yield label, parse_json(line, label)


def _as_chat_message(value: Any, label: str, report: ImportProblems) -> dict[str, Any]:
    """Return the message in the chat format. Raises NotAMessage for an empty or other value.

    The original values of converted fields are kept in the field `plain`.
    """
    if not isinstance(value, dict):
        raise NotAMessage(f"{label} is not a JSON object")
    if not isinstance(value.get("role"), str):
        raise NotAMessage(f"{label} is not a message: it has no role")
    role = ROLE_ALIASES.get(value["role"].lower())
    original_values: dict[str, Any] = {}
    message = dict(value)
    if role is not None:
        report.count_converted(f"role {value['role']!r} read as {role!r}")
        original_values["role"], message["role"] = value["role"], role
    if CONTENT_FIELDS.isdisjoint(message):
        if isinstance(message.get("text"), str):
            report.count_converted("field 'text' read as the content")
            message["content"] = message.pop("text")
            original_values["content"] = "text"
        elif (text := _text_of_parts(message.get("parts"))) is not None:
            report.count_converted("field 'parts' read as the content")
            original_values["parts"] = message.pop("parts")
            message["content"] = text
        else:
            names = ", ".join(sorted(value))
            raise NotAMessage(
                f"{label} has neither content nor tool calls, only the fields {names}"
            )
    return {**message, "plain": original_values} if original_values else message


def _text_of_parts(parts: Any) -> str | None:
    """Return the joined texts of parts in the format of Gemini's API; None for other parts."""
    values = parts if isinstance(parts, list) else []
    texts: list[Any] = [p.get("text") if isinstance(p, dict) else p for p in values]
    are_texts = all(isinstance(text, str) for text in texts)
    return "\n\n".join(texts) if texts and are_texts else None


def _parse_any_time(value: Any) -> datetime | None:
    """Return a time: ISO 8601, or seconds or milliseconds since 1970 as a number or as text."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return parse_go_time(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        seconds = value / 1000 if value >= _MIN_MILLIS else value
        time = datetime.fromtimestamp(0, UTC) + timedelta(seconds=seconds)
    except (OverflowError, ValueError):
        return None
    return time if time > NO_TIME else None
