"""nanobot's logs: a line with the session's metadata, then one message per line.

The times in these logs have no offset and are read as local time of this machine.
"""

from base64 import urlsafe_b64decode
from binascii import Error as NotBase64
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

from stenolog.stores.json_file import JSONMessage
from stenolog.transfer.importers.chat_format import (
    ImportProblems,
    NotAMessage,
    as_message,
    as_object,
    non_empty,
    omit,
    parse_json,
    parse_local_time,
)
from stenolog.transfer.importers.legacy_session import LegacySession

KIND_FIELD: Final = "_type"
"""Field that occurs only in lines that are not messages."""
KNOWN_FIELDS: Final = (KIND_FIELD, "key", "created_at", "updated_at")
"""Fields of the first line that `LegacySession` has as separate fields."""

Metadata = Mapping[str, Any]


def read(log: bytes, *, name: str, mtime: datetime) -> LegacySession:
    """Return the session in a log with this name and modification time. Raises NotASession."""
    report = ImportProblems()
    metadata: Metadata = {}
    other_lines: list[dict[str, Any]] = []
    # `last_consolidated` counts all messages, including those that cannot be imported.
    # An empty list therefore takes the place of such a message.
    message_slots: list[list[JSONMessage]] = []
    for line_number, line in enumerate(log.split(b"\n"), 1):
        if not line.strip():
            continue
        label = f"line {line_number}"
        try:
            fields = as_object(parse_json(line, label), label)
            line_kind = fields.get(KIND_FIELD)
            if line_kind is None:
                fields = as_message(fields, label)
        except NotAMessage as error:
            report.report_dropped(str(error))
            message_slots.append([])
            continue
        if line_kind == "metadata":
            metadata = fields
        elif line_kind is not None:
            other_lines.append(fields)
        else:
            at = parse_local_time(fields.get("timestamp"))
            message_slots.append(report.encode(fields, at, label))
    hidden_count = report.check_hidden_count(
        "last_consolidated", metadata.get("last_consolidated", 0), len(message_slots)
    )
    messages = [
        JSONMessage(message.payload, message.at, hidden=index < hidden_count)
        for index, slot in enumerate(message_slots)
        for message in slot
    ]
    return report.build_session(
        "nanobot",
        _find_key(metadata, name),
        messages,
        mtime=mtime,
        created=parse_local_time(metadata.get("created_at")),
        updated=parse_local_time(metadata.get("updated_at")),
        summary=_read_summary(metadata),
        state=non_empty({**omit(metadata, *KNOWN_FIELDS), "lines": other_lines}),
    )


def is_log(log: bytes) -> bool:
    """Return whether the first line is nanobot's metadata."""
    first_line = next((line for line in log.split(b"\n", 3)[:3] if line.strip()), b"")
    try:
        fields = parse_json(first_line, "")
    except NotAMessage:
        return False
    return isinstance(fields, dict) and fields.get(KIND_FIELD) == "metadata"


def _find_key(metadata: Metadata, name: str) -> str:
    key = metadata.get("key")
    if isinstance(key, str) and key:
        return key
    stem = name.removesuffix(".jsonl")
    try:
        decoded_key = urlsafe_b64decode(stem + "=" * (-len(stem) % 4)).decode()
    except (ValueError, NotBase64):
        return stem
    return decoded_key if ":" in decoded_key and decoded_key.isprintable() else stem


def _read_summary(metadata: Metadata) -> str:
    inner_metadata = metadata.get("metadata")
    last_summary = inner_metadata.get("_last_summary") if isinstance(inner_metadata, dict) else None
    text = last_summary.get("text") if isinstance(last_summary, dict) else None
    return text if isinstance(text, str) else ""
