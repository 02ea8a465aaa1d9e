"""Values and rules that the readers of all programs share.

A reader maps each record of a program to messages in the chat format. The rest of the record is
kept in a field named after the program, so that the record can be rebuilt. Each message has an
identity, by which a later import recognizes stored messages.
"""

import os
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from hashlib import sha256
from json import dumps, loads
from pathlib import Path
from typing import Any, Final, Literal, Protocol

import msgspec
from msgspec import Raw, Struct, field
from msgspec.structs import replace

from stenolog.catalog.message_metadata import FIELD

Kind = Literal["injected", "command", "interruption", "notification", "summary"]
"""A message with role `user` that the user did not write: it is not a prompt.

injected: text that the program added. command: a command of the program, or its output.
interruption: the user stopped the answer. notification: a background task ended. summary: written
by a compaction.
"""
IDENTITY: Final = "id"
"""Name of the identity in the `stenolog` field of a stored message."""
KIND: Final = "kind"
RESPONSE: Final = "response"
COPY: Final = "record"
"""Field of a record that is kept as a whole."""
SAME: Final = "$content"
"""Replaces a text that the content of the message has already."""
LONGEST_TITLE: Final = 80
MAX_EXPORT_BYTES: Final = 2 * 1024**3
"""Maximum size of a file in a zip: a small zip may expand to any size."""
_decode: Final = msgspec.json.Decoder().decode
MAX_PROBLEMS: Final = 20
"""Maximum number of problems of one transcript that are reported individually."""


class TranscriptMessage(Struct, frozen=True, kw_only=True):
    """A message of a transcript."""

    identity: str
    """Identifies the message within its session, also in a file that was rewritten."""
    message: dict[str, Any]
    at: datetime | None = None
    hidden: bool = False
    """Whether the model no longer sees it: an abandoned branch, or replaced by a summary."""


class TranscriptFile(Struct, frozen=True, kw_only=True):
    """A transcript on disk that has not been read."""

    program: str
    key: str
    paths: tuple[Path, ...]
    """Its files, the oldest first; most programs write one."""
    size: int
    modified: int
    """Time of the last change, in nanoseconds."""
    item: str = ""
    """Identifies the conversation in a file that holds several."""


class Transcript(Struct, kw_only=True):
    """A conversation of another program."""

    program: str
    key: str
    title: str = ""
    source: dict[str, Any] = field(default_factory=dict)
    """Facts about the session: working directory, branch, models, versions, parent, cost."""
    summary: str = ""
    messages: list[TranscriptMessage] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)
    """Number of bytes of each kind of record that is not imported."""
    problems: list[str] = field(default_factory=list)

    def leave_out(self, kind: str, size: int) -> None:
        """Count a record that is not imported."""
        self.left_out[kind] = self.left_out.get(kind, 0) + size

    def add_problem(self, text: str) -> None:
        """Report content that could not be read."""
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(text)
        elif len(self.problems) == MAX_PROBLEMS:
            self.problems.append("and more problems of the same transcript")


class TranscriptReader(Protocol):
    """Reader of one program's transcripts."""

    program: str

    def default_folder(self) -> Path | None:
        """Return the folder in which the program keeps its transcripts; None if there is none."""
        ...

    def find(self, path: Path) -> Iterator[TranscriptFile]:
        """Yield the transcripts below a folder, or in one file. Reads no messages."""
        ...

    def read(self, file: TranscriptFile, *, is_complete: bool = True) -> Transcript:
        """Read a transcript. Raises OSError.

        `is_complete` False leaves out messages that the program copied from another session, for
        example for a fork; `forked_from` names that session.
        """
        ...


class ExportFile:
    """The conversations of an export: a JSON array, or such files in a zip.

    The file that was read last is kept, so that reading its conversations parses it once.
    """

    def __init__(self, *ids: str, members: str = r"conversations(-\d+)?\.json") -> None:
        """Create a reader. `ids`: fields that name a conversation. `members`: files in a zip."""
        self._ids = ids
        self._members = re.compile(members)
        self._kept: tuple[Path, int, dict[str, Raw]] | None = None

    def is_member(self, name: str) -> bool:
        """Return whether a file of this name holds conversations."""
        return self._members.fullmatch(name) is not None

    def conversations(self, path: Path) -> dict[str, Raw]:
        """Return the conversations of a file by their ids, not yet decoded. Raises OSError."""
        modified = path.stat().st_mtime_ns
        if self._kept is None or self._kept[:2] != (path, modified):
            found: dict[str, Raw] = {}
            for content in self._contents(path):
                try:
                    listed = msgspec.json.decode(content, type=list[Raw])
                except msgspec.DecodeError:
                    continue  # not an export of this kind
                for raw in listed:
                    head = as_dict(parse_json(bytes(raw)))
                    if name := next(
                        filter(None, (as_text(head.get(one)) for one in self._ids)), ""
                    ):
                        found[name] = raw
            self._kept = path, modified, found
        return self._kept[2]

    def read(self, file: TranscriptFile) -> dict[str, Any]:
        """Return a conversation; empty if the file no longer has it. Raises OSError."""
        found = self.conversations(file.paths[0]).get(file.item)
        return {} if found is None else as_dict(parse_json(bytes(found)))

    def _contents(self, path: Path) -> Iterator[bytes]:
        if not zipfile.is_zipfile(path):
            yield path.read_bytes()
            return
        with zipfile.ZipFile(path) as archive:
            for info in sorted(archive.infolist(), key=lambda one: one.filename):
                name = info.filename.rpartition("/")[2]
                if not self.is_member(name) or info.filename.startswith("__MACOSX"):
                    continue
                if info.file_size > MAX_EXPORT_BYTES:
                    raise OSError(f"{info.filename} in {path.name} has {info.file_size:,} bytes")
                yield archive.read(info)


def files_below(folder: Path, pattern: str) -> Iterator[Path]:
    """Yield the files below a folder in order, without pipes, devices and links to nothing.

    One of these would hide all other files: reading a pipe may never end.
    """
    return filter(os.path.isfile, sorted(folder.rglob(pattern)))


def file_at(program: str, key: str, *paths: Path, item: str = "") -> TranscriptFile:
    """Return the transcript in these files. Raises OSError."""
    status = [path.stat() for path in paths]
    # A database may have new rows in its log before the file itself changes.
    logs = (path.with_name(f"{path.name}-wal") for path in paths if path.suffix == ".db")
    status += [log.stat() for log in logs if log.exists()]
    return TranscriptFile(
        program=program,
        key=key,
        paths=paths,
        size=sum(one.st_size for one in status),
        modified=max(one.st_mtime_ns for one in status),
        item=item,
    )


def annotated(
    message: dict[str, Any],
    identity: str,
    *,
    kind: Kind | None = None,
    model: str = "",
    usage: Mapping[str, int] | None = None,
    response: str = "",
    seconds: float | None = None,
    failed: bool = False,
) -> dict[str, Any]:
    """Return the message with what stenolog's own readers use: identity, model, usage, failure.

    `response` identifies the response that the usage belongs to, so that it counts once.
    """
    notes: dict[str, Any] = {IDENTITY: identity}
    if kind is not None:
        notes[KIND] = kind
    if model:
        notes["model"] = model
    if usage:
        notes["usage"] = dict(usage)
        if response:
            notes[RESPONSE] = response
    if seconds is not None:
        notes["seconds"] = round(seconds, 3)
    if failed:
        notes["failed"] = True
    return {**message, FIELD: notes}


def identity_of(body: Mapping[str, Any]) -> str | None:
    """Return the identity of a stored message, or None if it was not imported from a transcript."""
    notes = body.get(FIELD)
    found = notes.get(IDENTITY) if isinstance(notes, Mapping) else None
    return found if isinstance(found, str) else None


def usage_counts(*, prompt: Any, answer: Any, cached: Any = 0) -> dict[str, int]:
    """Return token counts as stenolog stores them; an empty dict if there are none."""
    if not is_count(prompt) and not is_count(answer):
        return {}
    given = {"prompt": prompt, "answer": answer, "cached": cached}
    return {name: value if is_count(value) else 0 for name, value in given.items()}


def is_count(value: Any) -> bool:
    """Return whether the value is a plausible number of tokens."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**15


def time_from(value: Any) -> datetime | None:
    """Return a time given as ISO text, or as seconds or milliseconds since 1970; else None."""
    try:
        if isinstance(value, str) and value:
            found = datetime.fromisoformat(value)
            return found if found.tzinfo is not None else found.replace(tzinfo=UTC)
        if isinstance(value, int | float) and not isinstance(value, bool):
            seconds = value / 1000 if value > 1e11 else value
            return datetime.fromtimestamp(seconds, UTC)
    except (ValueError, OverflowError, OSError):
        pass
    return None


def one_line(text: str) -> str:
    """Return the text in one line, cut at the length of a title."""
    line = " ".join(text.split())
    return line if len(line) <= LONGEST_TITLE else line[: LONGEST_TITLE - 1].rstrip() + "…"


def tool_call(call_id: Any, name: Any, arguments: Any) -> dict[str, Any]:
    """Return a tool call in the chat format. Arguments that are not text become JSON."""
    text = arguments if isinstance(arguments, str) else dumps(arguments, ensure_ascii=False)
    return {
        "id": call_id if isinstance(call_id, str) else "",
        "type": "function",
        "function": {"name": name if isinstance(name, str) else "", "arguments": text},
    }


def digest_of(value: Any) -> str:
    """Return the SHA-256 of a value as canonical JSON, for records without an id."""
    text = dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def json_lines(path: Path) -> Iterator[tuple[bytes, Any]]:
    """Yield each complete line of a file with its JSON value; None for a line that is not JSON.

    A last line without a line break is still being written and is skipped.
    """
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                return
            if line.strip():
                yield line, parse_json(line)


def parse_json(text: bytes | str) -> Any:
    """Return the JSON value, or None if the text is not JSON."""
    try:
        return _decode(text)
    except (msgspec.MsgspecError, RecursionError):
        pass
    try:
        # Slower, and more tolerant: for example of single surrogates and large numbers.
        return loads(text)
    except (ValueError, RecursionError):
        return None


def reversible(
    messages: list[TranscriptMessage],
    field: str,
    record: Any,
    restore: Callable[[Sequence[Mapping[str, Any]]], Any],
) -> list[TranscriptMessage]:
    """Return the messages of a record, from which `restore` makes the record again.

    A record of an unusual form, from which it cannot, is kept in the first message as a whole.
    """
    try:
        is_same = restore([one.message for one in messages]) == record
    except (LookupError, TypeError, ValueError, AttributeError, StopIteration):
        is_same = False
    if is_same or not messages:
        return messages
    first = messages[0]
    return [replace(first, message={**first.message, field: {COPY: record}}), *messages[1:]]


def split_text(text: str, lengths: Iterable[int], separator: str) -> list[str]:
    """Return the texts of these lengths that were joined with a separator."""
    found, start = [], 0
    for length in lengths:
        found.append(text[start : start + length])
        start += length + len(separator)
    return found


def shared(value: Any, text: Any) -> Any:
    """Return the value with a marker instead of each copy of a text that is stored elsewhere."""
    if isinstance(text, str) and len(text) > len(SAME) and value == text:
        return SAME
    if isinstance(value, dict):
        return {name: shared(one, text) for name, one in value.items()}
    return [shared(one, text) for one in value] if isinstance(value, list) else value


def unshared(value: Any, text: Any) -> Any:
    """Return the value with the text instead of each marker."""
    if value == SAME:
        return text
    if isinstance(value, dict):
        return {name: unshared(one, text) for name, one in value.items()}
    return [unshared(one, text) for one in value] if isinstance(value, list) else value


def text_of_parts(parts: Any, types: Iterable[str] = ("text",)) -> str:
    """Return the joined text of content parts of these types, or the content if it is a string."""
    if isinstance(parts, str):
        return parts
    if not isinstance(parts, list):
        return ""
    wanted = tuple(types)
    found = (part for part in parts if isinstance(part, dict) and part.get("type") in wanted)
    return "\n\n".join(part["text"] for part in found if isinstance(part.get("text"), str))


def as_dict(value: Any) -> dict[str, Any]:
    """Return the value if it is an object, else an empty one."""
    return value if isinstance(value, dict) else {}


def as_text(value: Any) -> str:
    """Return the value if it is a text, else an empty one."""
    return value if isinstance(value, str) else ""


def without(fields: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Return the fields except those with these names."""
    return {name: value for name, value in fields.items() if name not in names}


def filled(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that have a value."""
    return {name: value for name, value in fields.items() if value}


def hidden(message: TranscriptMessage) -> TranscriptMessage:
    """Return the message as one that the model no longer sees."""
    return replace(message, hidden=True)


def branch_to(parents: Mapping[str, str | None], leaf: str | None) -> set[str]:
    """Return the ids from a leaf of a tree up to its root. `parents`: the parent of each id."""
    branch: set[str] = set()
    while leaf is not None and leaf in parents and leaf not in branch:
        branch.add(leaf)
        leaf = parents[leaf]
    return branch
