"""Files with one conversation per line: `{"messages": [{"role": …}, …]}`, as for fine-tuning.

Each line is a session of its own. Its key is the name of the file and the number of the line.
"""

from datetime import UTC, datetime, timedelta
from hashlib import sha256
from json import loads
from pathlib import Path
from typing import Any, Final

from msgspec.structs import replace

from stenolog.stores.json_file import NotASession
from stenolog.transfer.importers import chat_format
from stenolog.transfer.importers.chat_format import NotAMessage
from stenolog.transfer.importers.legacy_session import (
    Source,
    SourceContent,
    drop_oversized_state,
)

MAX_LINE: Final = 64 * 1024 * 1024
"""Maximum number of bytes of a line."""


class ConversationLines:
    """A file with one conversation per line."""

    def __init__(self, file: Path, *, time_field: str = "") -> None:
        self.path = file.parent
        self.name = str(file)
        self._file = file
        self._time_field = time_field

    def sources(self, *, thorough: bool) -> list[Source]:  # noqa: ARG002
        """Return a source for each line that is not empty, with its position. Raises OSError."""
        found = []
        position = 0
        with self._file.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    where = str(number), str(position)
                    source = Source(name=self._file.name, body=None, identifier=where)
                    found.append(replace(source, bytes=len(line)))
                position += len(line)
        return found

    def read(self, source: Source) -> SourceContent:
        """Return the conversation of a line. Raises NotASession, OSError."""
        number, position = source.identifier
        changed = datetime.fromtimestamp(0, UTC)
        changed += timedelta(microseconds=self._file.stat().st_mtime_ns // 1000)
        with self._file.open("rb") as file:
            file.seek(int(position))
            line = file.readline(MAX_LINE)
        try:
            value = chat_format.parse_json(line.removeprefix(b"\xef\xbb\xbf"), f"line {number}")
            messages, rest = _messages_in(value, number)
        except NotAMessage as error:
            raise NotASession(str(error)) from error
        try:
            session = chat_format.read_plain_array(
                messages,
                rest,
                name=f"{chat_format.stem_of(self._file.name)}:{number}.jsonl",
                changed=changed,
                time_field=self._time_field,
            )
        except NotASession as error:
            raise NotASession(f"line {number}: {error}") from error
        problems = tuple(f"line {number}, {problem}" for problem in session.problems)
        session = drop_oversized_state(replace(session, problems=problems))
        return SourceContent(session, sha256(line).hexdigest(), changed, ())


def _messages_in(value: Any, number: str) -> tuple[list[Any], dict[str, Any]]:
    """Return the messages of a line and its other fields. Raises NotAMessage."""
    if not isinstance(value, dict) or not isinstance(value.get("messages"), list):
        raise NotAMessage(f"line {number} has no list of messages")
    return value["messages"], {name: one for name, one in value.items() if name != "messages"}


def is_conversation_lines(file: Path) -> bool:
    """Return whether the first line of a file is a whole conversation."""
    try:
        with file.open("rb") as opened:
            first = next((line for line in opened if line.strip()), b"")
            has_more = bool(opened.readline(MAX_LINE).strip())
        value = loads(first.decode("utf-8-sig")) if len(first) <= MAX_LINE else None
    except (OSError, ValueError, RecursionError):
        return False
    is_conversation = (
        isinstance(value, dict)
        and isinstance(value.get("messages"), list)
        and not isinstance(value.get("role"), str)
    )
    # A .json file with one line is a single conversation.
    return is_conversation and (has_more or file.suffix.lower() in (".jsonl", ".ndjson"))
