"""Types and functions that the readers of all programs share.

A reader converts each record of a program to messages in the chat format. The record itself is kept
in a field named after the program, so that nothing is lost. In this field, references replace the
long texts that the messages have, so that no long text is stored twice. Each message has an
identity, by which a later import recognizes stored messages.
"""

import errno
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from hashlib import sha256
from io import BufferedIOBase, BufferedReader
from json import JSONEncoder, dumps, loads
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct, field

from stenolog.catalog.message_metadata import FIELD, IDENTITY, RESPONSE, is_copied
from stenolog.stores.json_file import NotASession
from stenolog.transfer.transcripts.program_messages import KIND, Kind, kind_of, program_line

MAX_TITLE_CHARS: Final = 80
_REFERENCE_KEY: Final = "$text"
"""In a stored record, an object with only this key refers to a text of the messages."""
_MIN_REF_CHARS: Final = 40
"""Minimum number of characters of a text that is replaced by a reference."""
MAX_SIDE_FILE_BYTES: Final = 1024 * 1024
"""Maximum size of a file beside a transcript. A larger file is not read."""
MAX_RECORD_BYTES: Final = 64 * 1024 * 1024
"""Maximum size of a line or of a conversation of an export. Decoded, it may be 30 times larger."""
MAX_UNPACKED_BYTES: Final = 512 * 1024 * 1024
"""Maximum unpacked size of the conversations in a compressed file."""
MAX_RATIO: Final = 100
"""Maximum ratio of the unpacked size to the size of a compressed file. Transcripts have 5 to 20."""
_MIN_UNPACKED_BYTES: Final = 16 * 1024 * 1024
"""Unpacked size that is allowed for even the smallest file."""
MAX_ID_BYTES: Final = 512
"""Maximum size of an id in a key. A place of `steno view` may put its name before the key."""
SHAPE_ERRORS: Final = (AttributeError, LookupError, TypeError, ValueError, RecursionError)
"""Errors that occur if a value has an unexpected type."""
_decode_json: Final = msgspec.json.Decoder().decode
_to_json: Final = JSONEncoder(ensure_ascii=False).encode

Draft = tuple[dict[str, Any], dict[str, Any]]
"""A message in the chat format, and its annotations: keyword arguments of `Transcript.add`."""


class TranscriptMessage(Struct, kw_only=True):
    """A message of a transcript."""

    identity: str
    """Identifier of the message in its session; unchanged if the file is rewritten."""
    body: dict[str, Any]
    """The message in the chat format."""
    at: datetime | None = None
    hidden: bool = False
    """Whether the model no longer sees the message: abandoned, or replaced by a summary."""


class TranscriptFile(Struct, frozen=True, kw_only=True):
    """A transcript on disk that has not been read."""

    program: str
    key: str
    paths: tuple[Path, ...]
    """Files of the transcript, the oldest first. Most programs write one file."""
    size: int
    modified: int
    """Time of the last change, in nanoseconds."""
    conversation_id: str = ""
    """Identifier of the conversation in a file that holds several conversations."""


class Transcript(Struct, kw_only=True):
    """A conversation of another program."""

    program: str
    key: str
    title: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    """Facts about the session: working directory, branch, models, versions, parent, cost."""
    summary: str = ""
    messages: list[TranscriptMessage] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    unreadable_count: int = 0
    """Number of lines that are no JSON objects."""
    first_unreadable: bytes = b""

    def add(
        self,
        identity: str,
        body: dict[str, Any],
        *,
        at: Any,
        hidden: bool = False,
        kind: Kind | None = None,
        model: str = "",
        usage: Mapping[str, int] | None = None,
        response: str = "",
        seconds: float | None = None,
        failed: bool = False,
    ) -> TranscriptMessage:
        """Add a message with the fields that stenolog reads: identity, model, usage, failure.

        `at` is a time in any form that `parse_time` reads. `response` is the id of the response to
        which the message belongs. The usage of a response counts once, for all its messages.
        """
        annotations = {IDENTITY: identity, KIND: kind, "model": model, "usage": usage}
        notes = non_empty({**annotations, "failed": failed, RESPONSE: response})
        if seconds is not None:
            notes["seconds"] = round(seconds, 3)
        message = TranscriptMessage(
            identity=identity, body={**body, FIELD: notes}, at=parse_time(at), hidden=hidden
        )
        self.messages.append(message)
        return message

    def add_record(
        self, identity: str, drafts: Sequence[Draft], record: Any, *, at: Any, hidden: bool
    ) -> list[TranscriptMessage]:
        """Add the messages of a record. The first message gets this identity and the record."""
        identity = identity or digest_identity(record)
        keep_record([body for body, _ in drafts], self.program, record)
        return [
            self.add(
                f"{identity}#{number}" if number else identity, body, at=at, hidden=hidden, **notes
            )
            for number, (body, notes) in enumerate(drafts)
        ]

    def finish(self, title: str | None = None, **facts: Any) -> None:
        """Set the title and the known facts.

        The default title is the first prompt, or else a message of the program in one line.
        """
        model_names = (message.body[FIELD].get("model") for message in self.messages)
        if self.unreadable_count:
            are = (
                "lines are not JSON objects; the first is"
                if self.unreadable_count > 1
                else ("line is not a JSON object:")
            )
            self.problems.append(f"{self.unreadable_count:,} {are} {self.first_unreadable!r}")
        models = list(dict.fromkeys(filter(None, model_names)))
        default = self.first_prompt() or self._first_program_line() if title is None else title
        self.title = one_line(default)
        self.facts |= non_empty({"program": self.program, "models": models, **facts})

    def has_own_messages(self) -> bool:
        """Return whether a message was not copied from another session."""
        return any(not is_copied(message.body) for message in self.messages)

    def first_prompt(self) -> str:
        """Return the text of the first message that the user wrote."""
        bodies = (message.body for message in self.messages)
        prompts = (body for body in bodies if body["role"] == "user" and KIND not in body[FIELD])
        return next(filter(None, (text_of_parts(body["content"]) for body in prompts)), "")

    def _first_program_line(self) -> str:
        """Return the line of the first command, or else of the first message of the program."""
        bodies = [message.body for message in self.messages]
        commands = [body for body in bodies if kind_of(body) == "command"]
        return next(filter(None, map(program_line, (*commands, *bodies))), "")

    def add_unreadable_line(self, line: bytes) -> None:
        """Count a line that is no JSON object. All of them are one problem."""
        self.unreadable_count += 1
        self.first_unreadable = self.first_unreadable or line[:40]


# --- readers -------------------------------------------------------------------------------------


class TranscriptReader(ABC):
    """Reader of one program's transcripts."""

    program: str

    def default_folder(self) -> Path | None:
        """Return the folder or file of the program's transcripts; None if it is missing."""
        return None

    @abstractmethod
    def find(self, path: Path) -> Iterator[TranscriptFile]:
        """Yield the transcripts below a folder, or in one file, without reading their messages.

        Raises OSError, NotASession.
        """

    def read(self, file: TranscriptFile) -> Transcript:
        """Read a transcript. Raises OSError, NotASession.

        Messages that the program copied from another session, for example for a fork, are marked as
        copies. The usage of a copy counts for the other session, which `forked_from` names.
        `forked_after` is the identity of the last copied message.
        """
        transcript = Transcript(program=self.program, key=file.key)
        transcript.facts["path"] = printable_path(file.paths[-1])
        try:
            self.fill(transcript, file)
        except (OSError, NotASession):
            raise
        except SHAPE_ERRORS as error:
            # A file may have any JSON. A malformed file must not end the import of other files.
            reason = f"it has data of an unknown shape ({type(error).__name__}: {error})"
            raise NotASession(reason) from error
        return transcript

    @abstractmethod
    def fill(self, transcript: Transcript, file: TranscriptFile) -> None:
        """Add messages, title and facts of a file to an empty transcript. Mark copied messages."""

    def file_at(self, session_id: str, *paths: Path, conversation_id: str = "") -> TranscriptFile:
        """Describe the transcript of a session in these files. Raises OSError."""
        statuses = [path.stat() for path in paths]
        # A database may have new rows in its WAL file before the database file changes.
        wal_files = (path.with_name(f"{path.name}-wal") for path in paths if path.suffix == ".db")
        statuses += [wal.stat() for wal in wal_files if wal.exists()]
        return TranscriptFile(
            program=self.program,
            key=session_key(self.program, session_id),
            paths=paths,
            size=sum(status.st_size for status in statuses),
            modified=max(status.st_mtime_ns for status in statuses),
            conversation_id=conversation_id,
        )


def session_key(program: str, session_id: str) -> str:
    """Return the key of a session. A digest replaces an id that is too long or has surrogates."""
    try:
        fits = len(session_id.encode()) <= MAX_ID_BYTES  # guard: transcript-key-size
    except UnicodeEncodeError:
        fits = False  # guard: transcript-key-text
    return f"{program}:{session_id if fits else digest_identity(session_id)}"


def printable_path(path: str | Path) -> str:
    """Return the path as text. A replacement character replaces each byte that is not UTF-8."""
    return os.fsencode(path).decode(errors="replace")


def find_files_below(folder: Path, pattern: str) -> Iterator[Path]:
    """Yield the files below a folder whose names match the pattern, sorted by path.

    Pipes, devices and broken links are skipped, because reading a pipe may never end. Links to
    folders are not followed. Raises PermissionError at the end if a folder cannot be read.
    """
    errors: list[PermissionError] = []
    yield from _list_files_below(folder, pattern, errors)
    if errors:
        raise errors[0]


def _list_files_below(folder: Path, pattern: str, errors: list[PermissionError]) -> list[Path]:
    try:
        with os.scandir(folder) as scanned_entries:
            entries = sorted(scanned_entries, key=lambda entry: entry.name)
    except PermissionError as error:
        errors.append(error)
        return []
    except (FileNotFoundError, NotADirectoryError):
        return []
    files: list[Path] = []
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            files += _list_files_below(folder / entry.name, pattern, errors)
        elif fnmatchcase(entry.name, pattern) and (
            # `Path.is_file` raises for a link into a private folder.
            entry.is_file(follow_symlinks=False) or os.path.isfile(entry)  # noqa: PTH113
        ):
            files.append(folder / entry.name)
    return files


def first_failure(failures: Sequence[tuple[Path, OSError]]) -> OSError:
    """Return the first error of files that could not be read, with the name of its file."""
    file, error = failures[0]
    if error.errno is not None:
        return error
    more = f"; {len(failures) - 1} more files cannot be read" if len(failures) > 1 else ""
    return OSError(errno.EIO, f"{error}{more}", str(file))


def path_and_reason(error: Exception, path: Path) -> tuple[str, str]:
    """Return the path that could not be read, and the reason without the path."""
    if isinstance(error, OSError) and error.strerror:
        return printable_path(error.filename or path), error.strerror
    return printable_path(path), str(error)


# --- opening files -------------------------------------------------------------------------------


def open_transcript(path: Path) -> BufferedReader:
    """Open a transcript or an export, which may be a link. Raises OSError for pipes and devices."""
    return _open_file(path, os.O_RDONLY)


def read_side_file(folder: Path, *names: str, max_bytes: int = MAX_SIDE_FILE_BYTES) -> bytes:
    """Return the content of a file of the same program beside its transcripts.

    Empty if the file is missing, larger than `max_bytes`, or not a regular file. `names` are the
    names of the folders below `folder` on the way to the file, and of the file. None of them may be
    a link: a downloaded folder must not show other files of the user.
    """
    if not all(name == os.path.basename(name) != ".." for name in names):  # noqa: PTH119
        return b""
    with suppress(OSError, ValueError), ExitStack() as cleanup:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        descriptor = os.open(folder, flags)
        cleanup.callback(os.close, descriptor)
        for name in names[:-1]:
            inner_flags = flags | os.O_NOFOLLOW  # guard: side-folder-links
            descriptor = os.open(name, inner_flags, dir_fd=descriptor)
            cleanup.callback(os.close, descriptor)
        flags = os.O_RDONLY | os.O_NOFOLLOW  # guard: side-file-links
        with _open_file(names[-1], flags, descriptor) as file:
            content = file.read(max_bytes + 1)
            return content if len(content) <= max_bytes else b""  # guard: side-file-size
    return b""


def unpacked_limit(packed: int) -> int:
    """Return the maximum unpacked size of a compressed file, which may expand to any size."""
    return min(MAX_UNPACKED_BYTES, max(_MIN_UNPACKED_BYTES, MAX_RATIO * packed))


def _open_file(path: str | Path, flags: int, folder: int | None = None) -> BufferedReader:
    flags |= os.O_NONBLOCK | os.O_CLOEXEC  # guard: pipes-do-not-block
    descriptor = os.open(path, flags, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # guard: only-regular-files
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


# --- messages ------------------------------------------------------------------------------------


def usage_counts(*, prompt: Any, answer: Any, cached: Any = 0) -> dict[str, int]:
    """Return token counts as stenolog stores them; an empty dict if no count is known."""
    if not is_count(prompt) and not is_count(answer):
        return {}
    counts = {"prompt": prompt, "answer": answer, "cached": cached}
    return {name: value if is_count(value) else 0 for name, value in counts.items()}


def is_count(value: Any) -> bool:
    """Return whether the value is a plausible number of tokens."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**15


def sum_counts(*values: Any) -> int:
    """Return the sum of the values that are whole numbers."""
    return sum(value for value in values if isinstance(value, int))


def parse_time(value: Any) -> datetime | None:
    """Return a time given as ISO text, or as seconds or milliseconds since 1970; else None."""
    try:
        if isinstance(value, str) and value:
            at = datetime.fromisoformat(value)
            return at if at.tzinfo is not None else at.replace(tzinfo=UTC)
        if isinstance(value, int | float) and not isinstance(value, bool):
            seconds = value / 1000 if value > 1e11 else value
            return datetime.fromtimestamp(seconds, UTC)
    except (ValueError, OverflowError, OSError):
        pass
    return None


def one_line(text: str) -> str:
    """Return the text in one line, cut at the length of a title."""
    line = " ".join(text.split())
    return line if len(line) <= MAX_TITLE_CHARS else line[: MAX_TITLE_CHARS - 1].rstrip() + "…"


def make_message(
    role: str, content: Any, thoughts: Sequence[str] = (), calls: Sequence[dict[str, Any]] = ()
) -> dict[str, Any]:
    """Return a message in the chat format. Empty thoughts and calls are left out."""
    body: dict[str, Any] = {"role": role, "content": content}
    if thoughts:
        body["reasoning_content"] = "\n\n".join(thoughts)
    if calls:
        body["tool_calls"] = list(calls)
    return body


def make_tool_call(call_id: Any, name: Any, arguments: Any) -> dict[str, Any]:
    """Return a tool call in the chat format. Arguments that are not text become JSON."""
    text = arguments if isinstance(arguments, str) else _to_json(arguments)
    function = {"name": as_text(name), "arguments": text}
    return {"id": as_text(call_id), "type": "function", "function": function}


def make_tool_result(call_id: Any, content: Any) -> dict[str, Any]:
    """Return the result of a tool in the chat format."""
    return {"role": "tool", "tool_call_id": as_text(call_id), "content": content}


def make_content(parts: Sequence[Any]) -> Any:
    """Return the content with these parts: a string for a single text, None for no parts."""
    only_part = as_dict(parts[0]) if len(parts) == 1 else {}
    if only_part.keys() == {"type", "text"} and isinstance(only_part["text"], str):
        return only_part["text"]
    return list(parts) or None


def text_part(text: str) -> dict[str, Any]:
    """Return a text as a part of a message's content."""
    return {"type": "text", "text": text}


def image_part(url: str) -> dict[str, Any]:
    """Return an image as a part of a message's content."""
    return {"type": "image_url", "image_url": {"url": url}}


def text_of_parts(content: Any) -> str:
    """Return the content if it is a text, else the joined texts of its text parts."""
    if isinstance(content, str):
        return content
    parts = (as_dict(part) for part in list_or_empty(content))
    texts = (part.get("text") for part in parts if part.get("type") == "text")
    return "\n\n".join(text for text in texts if isinstance(text, str))


def branch_to(leaf: str | None, parents: Mapping[str, str | None]) -> list[str]:
    """Return the ids from a leaf of a tree to its root. `parents` has the parent of each id."""
    branch: dict[str, None] = {}
    while leaf is not None and leaf in parents and leaf not in branch:
        branch[leaf] = None
        leaf = parents[leaf]
    return list(branch)


# --- records -------------------------------------------------------------------------------------


def record_field_name(program: str) -> str:
    """Return the name of the field of a message that holds a record of this program."""
    return program.replace("-", "_")


def keep_record(messages: Sequence[dict[str, Any]], program: str, record: Any) -> None:
    """Store a record in the first of its messages.

    In the record, references replace the long texts that the messages have. A reference is the
    index of the text in `texts_of`.
    """
    try:
        texts = {text: index for index, text in enumerate(texts_of(messages))}
        stored_record = _add_references(record, texts)
    except RecursionError:
        stored_record = record  # nested too deeply
    messages[0][record_field_name(program)] = stored_record


def texts_of(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the texts in the content and the thoughts of messages, and in the calls of tools."""
    texts: list[str] = []
    for message in messages:
        calls = [call["function"]["arguments"] for call in message.get("tool_calls", ())]
        fields = [message.get("content"), message.get("reasoning_content"), calls]
        _collect_texts([*fields, *map(parse_json, calls)], texts)
    return texts


def _collect_texts(value: Any, texts: list[str]) -> None:
    if isinstance(value, str):
        texts.append(value)
        if value.startswith("data:"):
            texts.append(value.partition(",")[2])  # a record may have only the base64 text
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            _collect_texts(item, texts)


def _add_references(value: Any, texts: Mapping[str, int]) -> Any:
    """Return the value with references instead of the long texts of which the index is known."""
    if isinstance(value, dict):
        fields = {name: _add_references(item, texts) for name, item in value.items()}
        # An object that looks like a reference is wrapped.
        return {_REFERENCE_KEY: fields} if value.keys() == {_REFERENCE_KEY} else fields
    if isinstance(value, list):
        return [_add_references(item, texts) for item in value]
    if isinstance(value, str) and len(value) >= _MIN_REF_CHARS and value in texts:
        return {_REFERENCE_KEY: texts[value]}
    return value


# --- JSON ----------------------------------------------------------------------------------------


def digest_identity(record: Any) -> str:
    """Return an identity for a record without an id: a digest of the record."""
    return f"sha256:{digest_of_json(record)[:32]}"


def digest_of_json(value: Any) -> str:
    """Return the SHA-256 of a value as canonical JSON."""
    text = dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; an empty dict for other JSON. Raises OSError."""
    with open_transcript(path) as file:
        text = file.read(MAX_RECORD_BYTES + 1)
    if len(text) > MAX_RECORD_BYTES:
        raise OSError(f"the file has more than {MAX_RECORD_BYTES:,} bytes")
    return as_dict(parse_json(text))


def read_json_lines(path: Path) -> Iterator[tuple[bytes, Any]]:
    """Yield each complete line of a file with its JSON value; None for a line that is not JSON."""
    with open_transcript(path) as file:
        yield from parse_lines(read_lines(file))


def read_lines(file: BufferedIOBase) -> Iterator[bytes]:
    """Yield each line of a file. Raises OSError for a line that is too long."""
    while line := file.readline(MAX_RECORD_BYTES + 1):
        if len(line) > MAX_RECORD_BYTES:  # guard: transcript-line-size
            raise OSError(f"a line has more than {MAX_RECORD_BYTES:,} bytes")
        yield line


def parse_lines(lines: Iterable[bytes]) -> Iterator[tuple[bytes, Any]]:
    """Yield each complete line with its JSON value; None for a line that is not JSON.

    A last line without a line break is still being written and is skipped.
    """
    for line in lines:
        if line.endswith(b"\n") and not line.isspace():
            yield line, parse_json(line)


def parse_json(text: bytes | str) -> Any:
    """Return the JSON value, or None if the text is not JSON."""
    try:
        return _decode_json(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        pass
    try:
        # The standard library is slower, but accepts lone surrogates and large numbers.
        return loads(text)
    except (ValueError, RecursionError):
        return None


def as_dict(value: Any) -> dict[str, Any]:
    """Return the value if it is a dict, else an empty dict."""
    return value if isinstance(value, dict) else {}


def list_or_empty(value: Any) -> list[Any]:
    """Return the value if it is a list, else an empty list."""
    return value if isinstance(value, list) else []


def as_text(value: Any) -> str:
    """Return the value if it is a string, else an empty string."""
    return value if isinstance(value, str) else ""


def omit(fields: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Return the fields except those with these names."""
    return {name: value for name, value in fields.items() if name not in names}


def non_empty(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields whose value is not None, False, zero or empty."""
    return {name: value for name, value in fields.items() if value}
