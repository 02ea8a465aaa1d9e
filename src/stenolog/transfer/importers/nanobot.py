"""nanobot's logs: a line with the session's metadata, then one message per line.

Its times have no offset: they are read as local time of this machine.
"""

from base64 import urlsafe_b64decode
from binascii import Error as NotBase64
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

from stenolog.stores.json_file import JSONMessage
from stenolog.transfer.importers.chat_format import (
    NotAMessage,
    Report,
    as_message,
    as_object,
    filled,
    local_time,
    parsed,
)
from stenolog.transfer.importers.legacy_session import LegacySession

KIND: Final = "_type"
"""Field that marks lines other than messages."""
KNOWN: Final = (KIND, "key", "created_at", "updated_at")
"""Fields of the first line that have their own field here."""

Head = Mapping[str, Any]


def read(log: bytes, *, name: str, changed: datetime) -> LegacySession:
    """Return the session in a log of this name and modification time. Raises NotASession."""
    report = Report()
    head: Head = {}
    others: list[dict[str, Any]] = []
    messages: list[JSONMessage] = []
    # `last_consolidated` counts all messages, including those that cannot be imported.
    places: list[int] = []
    place = 0
    for number, line in enumerate(log.split(b"\n"), 1):
        if not line.strip():
            continue
        what = f"line {number}"
        try:
            fields = as_object(parsed(line, what), what)
            kind = fields.get(KIND)
            if kind is None:
                fields = as_message(fields, what)
        except NotAMessage as error:
            report.drop(str(error))
            place += 1
            continue
        if kind == "metadata":
            head = fields
        elif kind is not None:
            others.append(fields)
        else:
            kept = report.keep(fields, local_time(fields.get("timestamp")), what)
            messages += kept
            places += [place] * len(kept)
            place += 1
    report.check(messages)
    hidden = _hidden(head, place, report)
    kept = [
        JSONMessage(message.payload, message.at, hidden=at < hidden)
        for message, at in zip(messages, places, strict=True)
    ]
    return report.session(
        "nanobot",
        _key(head, name),
        kept,
        changed=changed,
        created=local_time(head.get("created_at")),
        updated=local_time(head.get("updated_at")),
        summary=_summary(head),
        state=filled({n: v for n, v in head.items() if n not in KNOWN} | {"lines": others}),
    )


def looks_like(log: bytes) -> bool:
    """Return whether the first line is nanobot's metadata."""
    first = next((line for line in log.split(b"\n", 3)[:3] if line.strip()), b"")
    try:
        fields = parsed(first, "")
    except NotAMessage:
        return False
    return isinstance(fields, dict) and fields.get(KIND) == "metadata"


def _key(head: Head, name: str) -> str:
    key = head.get("key")
    if isinstance(key, str) and key:
        return key
    stem = name.removesuffix(".jsonl")
    try:
        found = urlsafe_b64decode(stem + "=" * (-len(stem) % 4)).decode()
    except (ValueError, NotBase64):
        return stem
    return found if ":" in found and found.isprintable() else stem


def _hidden(head: Head, count: int, report: Report) -> int:
    """Return the number of messages, from the first on, that its model no longer sees."""
    given = head.get("last_consolidated", 0)
    if isinstance(given, int) and not isinstance(given, bool) and 0 <= given <= count:
        return given
    report.note(f"last_consolidated is {given!r} of {count:,}: nothing is hidden")
    return 0


def _summary(head: Head) -> str:
    about = head.get("metadata")
    last = about.get("_last_summary") if isinstance(about, dict) else None
    text = last.get("text") if isinstance(last, dict) else None
    return text if isinstance(text, str) else ""
