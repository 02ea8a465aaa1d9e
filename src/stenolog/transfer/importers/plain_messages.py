"""Chat messages without a framework: `[{"role": …}]` as one JSON file, or one message per line."""

from collections.abc import Iterator
from datetime import datetime
from pathlib import PurePath
from typing import Any, Final

from msgspec.structs import replace

from stenolog.stores.json_file import JSONMessage
from stenolog.transfer.importers.chat_format import (
    ImportProblems,
    NotAMessage,
    as_message,
    parse_json,
    parse_time,
)
from stenolog.transfer.importers.legacy_session import LegacySession

CHAT_FIELDS: Final = frozenset(
    {"role", "content", "name", "refusal", "tool_calls", "tool_call_id", "function_call"}
)
"""Fields of a message in the format of chat APIs."""
TIME_FIELDS: Final = ("created_at", "timestamp", "at", "time")
"""Fields that may contain the time of a message."""


def read_array(
    found: list[Any], rest: dict[str, Any], *, name: str, changed: datetime
) -> LegacySession:
    """Return the session in the array of a file of this name. Raises NotASession.

    The other fields of the file are kept with the session.
    """
    given = ((f"message {number}", value) for number, value in enumerate(found, 1))
    return replace(_read_session(given, ImportProblems(), name=name, changed=changed), state=rest)


def read_lines(text: bytes, *, name: str, changed: datetime) -> LegacySession:
    """Return the session in a file of this name with one message per line. Raises NotASession."""
    report = ImportProblems()
    return _read_session(_parse_lines(text, report), report, name=name, changed=changed)


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
    given: Iterator[tuple[str, Any]], report: ImportProblems, *, name: str, changed: datetime
) -> LegacySession:
    messages: list[JSONMessage] = []
    for label, value in given:
        try:
            fields = as_message(value, label)
        except NotAMessage as error:
            report.report_dropped(str(error))
            continue
        messages += report.encode(fields, _time_of(fields), label)
    report.check_not_empty(messages)
    return report.session("plain", stem_of(name), messages, changed=changed)


def _time_of(fields: dict[str, Any]) -> datetime | None:
    found = (parse_time(fields.get(name)) for name in TIME_FIELDS)
    return next((at for at in found if at is not None), None)
