"""Conversion of imported messages to OpenAI's chat format: contents, tool calls, times, problems.

Fields that do not exist in the chat format are kept in a field named after the program, so that
nothing is lost. The field of the program is not sent to providers.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from json import dumps, loads
from pathlib import Path
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from stenolog.codec import encode_object
from stenolog.errors import RefusedMessage
from stenolog.stores.json_file import NO_TIME, JSONMessage, NotASession, parse_go_time
from stenolog.transfer.importers.legacy_session import (
    Layout,
    LegacySession,
    Source,
    SourceContent,
    make_session,
    time_of_nanoseconds,
    without_oversized_parts,
)

Part = dict[str, Any]

MAX_PROBLEMS: Final = 20
"""Maximum number of problems of one session that are reported individually."""
MAX_PROBLEM_LENGTH: Final = 400
"""Maximum number of characters of a reported problem."""


class NotAMessage(ValueError):
    """Raised for a value that is not a message."""


class ImportProblems:
    """Problems of one imported session: lost messages, lost parts, and parts hidden from models."""

    def __init__(self) -> None:
        self.dropped = 0
        self._problems: list[str] = []
        self._unseen_parts: Counter[str] = Counter()
        self._converted: Counter[str] = Counter()

    def report_dropped(self, text: str, count: int = 1) -> None:
        """Report messages that are lost."""
        self.dropped += count
        self.report_loss(text)

    @contextmanager
    def skip_unreadable(self, label: str) -> Iterator[None]:
        """Report the message with this label as lost if the `with` block cannot read it."""
        try:
            yield
        except (ValueError, RecursionError) as error:
            text = str(error)
            is_labelled = text.startswith(label)
            self.report_dropped(text if is_labelled else f"{label} cannot be read: {text}")

    def report_loss(self, text: str) -> None:
        """Report lost content that is less than a message."""
        self._problems.append(_shorten(text, MAX_PROBLEM_LENGTH))

    def count_unseen(self, kind: str) -> None:
        """Count a part of this kind that is kept in an additional field, which no model sees."""
        self._unseen_parts[_shorten(kind, MAX_PROBLEM_LENGTH // 10)] += 1

    def count_converted(self, text: str) -> None:
        """Count a message with the conversion that `text` describes."""
        self._converted[_shorten(text, MAX_PROBLEM_LENGTH // 10)] += 1

    def check_hidden_count(self, name: str, count: Any, message_count: int | None = None) -> int:
        """Return `count`, the number of messages at the start that the model no longer sees.

        If the number is invalid, report this with the name of its field, and return 0.
        """
        is_valid = isinstance(count, int) and not isinstance(count, bool) and count >= 0
        if is_valid and (message_count is None or count <= message_count):
            return int(count)
        total_text = "" if message_count is None else f" of {message_count:,}"
        self.report_loss(f"{name} is {count!r}{total_text}: nothing is hidden")
        return 0

    def encode(
        self, fields: dict[str, Any], at: datetime | None, label: str, *, hidden: bool = False
    ) -> list[JSONMessage]:
        """Return a list with the encoded message. If it is refused, report it and return []."""
        try:
            return [JSONMessage(encode_object(fields), at, hidden=hidden)]
        except RefusedMessage as error:
            self.report_dropped(f"{label}: {error}")
            return []

    def problems(self) -> tuple[str, ...]:
        """Return the problems, each as a sentence."""
        more_count = len(self._problems) - MAX_PROBLEMS
        more_text = (f"and {more_count:,} more like these",) if more_count > 0 else ()
        kinds = ", ".join(
            f"{count:,} {kind}" for kind, count in self._unseen_parts.most_common(MAX_PROBLEMS)
        )
        unseen_text = (f"stored, but not shown to models: {kinds}",) if kinds else ()
        return (*self._problems[:MAX_PROBLEMS], *more_text, *unseen_text)

    def build_session(
        self, layout: Layout, key: str, messages: Sequence[JSONMessage], **more: Any
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
            layout=layout,
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


def to_text(value: Any) -> str:
    """Return a text unchanged and any other value as JSON. Raises ValueError, RecursionError."""
    if isinstance(value, str):
        return value
    return dumps(value, ensure_ascii=False, allow_nan=False)


def text_part(text: str) -> Part:
    """Return a text as a part of a message's content."""
    return {"type": "text", "text": text}


def image_part(url: str, **options: Any) -> Part:
    """Return an image as a part of a message's content."""
    return {"type": "image_url", "image_url": {"url": url, **non_empty(options)}}


def make_content(parts: Sequence[Part]) -> str | list[Part] | None:
    """Return the content with these parts: a string for a single text, None for no parts."""
    if len(parts) == 1 and parts[0].keys() == {"type", "text"}:
        text: str = parts[0]["text"]
        return text
    return list(parts) or None


def convert_parts(
    values: list[Any],
    convert_part: Callable[[Any], tuple[Part | None, bool]],
    report: ImportProblems,
    *,
    texts_only: bool = False,
    ignored_types: Sequence[str] = (),
) -> tuple[str | list[Part] | None, bool]:
    """Return the content with the converted parts, and whether the conversion is lossless.

    `convert_part` does the same for one part, and returns None for a part that the chat format does
    not have. These parts are left out; with `texts_only`, so are all parts other than texts. Parts
    that are left out are counted, unless their type is in `ignored_types`.
    """
    parts: list[Part] = []
    is_lossless = True
    for value in values:
        part, part_is_lossless = convert_part(value)
        if part is not None and (part["type"] == "text" or not texts_only):
            parts.append(part)
            is_lossless &= part_is_lossless
            continue
        is_lossless = False
        kind = value.get("type") if isinstance(value, dict) else None
        if kind not in ignored_types:
            report.count_unseen(kind if isinstance(kind, str) else "unknown part")
    return make_content(parts), is_lossless


class MessagePieces(Struct):
    """The converted pieces of one message of another program."""

    parts: list[Part] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    thoughts: list[str] = []
    is_lossless: bool = True
    """Whether the original can be rebuilt from the pieces."""

    def messages(self, role: str) -> list[dict[str, Any]]:
        """Return the pieces as one or more messages. Tool results come first."""
        messages = list(self.results)
        if self.parts or self.calls or self.thoughts or not messages:
            message: dict[str, Any] = {"role": role, "content": make_content(self.parts)}
            if self.thoughts:
                message["reasoning_content"] = "\n\n".join(self.thoughts)
            if self.calls:
                message["tool_calls"] = self.calls
            messages.append(message)
        return messages


def join_texts(blocks: Any) -> str:
    """Return the joined texts of the blocks in a list. Blocks without a text are left out."""
    texts = (block.get("text") for block in as_objects(blocks))
    return "\n\n".join(text for text in texts if isinstance(text, str))


def as_objects(value: Any) -> list[dict[str, Any]]:
    """Return the objects in a list; an empty list for any other value."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def omit(fields: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Return the fields except those with these names."""
    return {name: value for name, value in fields.items() if name not in names}


def make_call(call_id: Any, name: Any, arguments: Any) -> dict[str, Any]:
    """Return a tool call. Raises ValueError, RecursionError."""
    text = "{}" if arguments is None else to_text(arguments)
    function = {"name": name if isinstance(name, str) else "unknown", "arguments": text}
    return {"id": as_id(call_id), "type": "function", "function": function}


def as_id(call_id: Any) -> str | None:
    """Return the id of a tool call as text; None if the call has no id."""
    return None if call_id is None else to_text(call_id)


def non_empty(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that are not empty. Zero and False are not empty."""
    return {name: value for name, value in fields.items() if value not in (None, "", [], {})}


def with_extra(
    message: dict[str, Any], field_name: str, extra: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the message with `extra` in this field, or unchanged if `extra` is empty."""
    return {**message, field_name: dict(extra)} if extra else message


def _reject_constant(constant: str) -> Any:
    raise NotAMessage(f"{constant} is not valid JSON")


def parse_time(value: Any) -> datetime | None:
    """Return a time given as ISO 8601 or as seconds since 1970; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return parse_go_time(value)
    try:
        time = datetime.fromtimestamp(0, UTC) + timedelta(seconds=value)
    except (OverflowError, ValueError):
        return None
    return time if time > NO_TIME else None


def parse_local_time(text: Any) -> datetime | None:
    """Return a time given as ISO 8601. A time without an offset is local time."""
    if not isinstance(text, str):
        return None
    try:
        time = datetime.fromisoformat(text).astimezone(UTC)
    except (ValueError, OverflowError, OSError):
        return None
    return time if time > NO_TIME else None


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
"""A message with none of these fields is empty, unless it has a `text` or `parts` of texts."""
_MIN_MILLIS: Final = 1e11
"""Smallest number that is read as milliseconds since 1970. Smaller numbers are seconds."""


def read_plain(
    content: list[Any] | bytes,
    other_fields: dict[str, Any],
    *,
    name: str,
    mtime: datetime,
    time_field: str,
) -> LegacySession:
    """Return the session in a file with this name. Raises NotASession.

    `content` is the message array of the file, or the text of a file with one message per line.
    `other_fields` are the other fields of the file, which are kept with the session.
    """
    report = ImportProblems()
    messages: list[JSONMessage] = []
    for label, value in _labelled_values(content, report):
        with report.skip_unreadable(label):
            fields = _as_chat_message(as_message(value, label), label, report)
            at = _find_time(fields, time_field)
            if time_field and at is None:
                report.report_loss(f"{label} has no time in the field {time_field!r}")
            messages += report.encode(fields, at or _find_time(fields), label)
    return report.build_session("plain", Path(name).stem, messages, mtime=mtime, state=other_fields)


def with_labels(messages: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Yield each message with its label: the name of the message in reports."""
    return ((f"message {number}", message) for number, message in enumerate(messages, 1))


def has_message(values: list[Any]) -> bool:
    """Return whether this array contains a message."""
    return any(isinstance(value, dict) and isinstance(value.get("role"), str) for value in values)


def _labelled_values(
    content: list[Any] | bytes, report: ImportProblems
) -> Iterator[tuple[str, Any]]:
    if isinstance(content, list):
        yield from with_labels(content)
        return
    for line_number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if line.strip():
            label = f"line {line_number}"
            with report.skip_unreadable(label):
                yield label, parse_json(line, label)


def _as_chat_message(fields: dict[str, Any], label: str, report: ImportProblems) -> dict[str, Any]:
    """Return the message in the chat format. Raises NotAMessage if the message is empty.

    The original values of converted fields are kept in the field `plain`.
    """
    role = ROLE_ALIASES.get(fields["role"].lower())
    original_values: dict[str, Any] = {}
    message = dict(fields)
    if role is not None:
        report.count_converted(f"role {fields['role']!r} read as {role!r}")
        original_values["role"], message["role"] = fields["role"], role
    if not CONTENT_FIELDS.isdisjoint(message):
        return with_extra(message, "plain", original_values)
    if isinstance(message.get("text"), str):
        report.count_converted("field 'text' read as the content")
        message["content"] = message.pop("text")
        original_values["content"] = "text"
    elif (text := _text_of_parts(message.get("parts"))) is not None:
        report.count_converted("field 'parts' read as the content")
        original_values["parts"] = message.pop("parts")
        message["content"] = text
    else:
        names = ", ".join(sorted(fields))
        raise NotAMessage(f"{label} has neither content nor tool calls, only the fields {names}")
    return with_extra(message, "plain", original_values)


def _text_of_parts(parts: Any) -> str | None:
    """Return the joined texts of parts in the format of Gemini's API; None for other parts."""
    values = parts if isinstance(parts, list) else []
    texts: list[Any] = [p.get("text") if isinstance(p, dict) else p for p in values]
    are_texts = all(isinstance(text, str) for text in texts)
    return "\n\n".join(texts) if texts and are_texts else None


def _find_time(fields: dict[str, Any], time_field: str = "") -> datetime | None:
    names = (time_field,) if time_field else TIME_FIELDS
    times = (_parse_any_time(fields.get(name)) for name in names)
    return next((at for at in times if at is not None), None)


def _parse_any_time(value: Any) -> datetime | None:
    """Return a time: ISO 8601, or seconds or milliseconds since 1970 as a number or as text."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return parse_time(value)
    if isinstance(value, int | float) and not isinstance(value, bool) and value >= _MIN_MILLIS:
        value = value / 1000
    return parse_time(value)


# --- one conversation per line -------------------------------------------------------------------
# Files for fine-tuning have `{"messages": [{"role": …}, …]}` in each line.
# Each line becomes a separate session.
# The key of the session is the name of the file and the number of the line.

MAX_LINE_BYTES: Final = 64 * 1024 * 1024
"""Maximum number of bytes of a line. A longer line is not imported."""


class ConversationLines:
    """A file with one conversation per line."""

    def __init__(self, file: Path, *, time_field: str = "") -> None:
        self.path = file.parent
        self.name = str(file)
        self._file = file
        self._time_field = time_field

    def sources(self) -> list[Source]:
        """Return a source for each line that is not empty, with its offset. Raises OSError."""
        sources = []
        offset = 0
        name = self._file.name
        with self._file.open("rb") as file:
            for line_number, line in enumerate(file, 1):
                if line.strip():
                    identifier, size = (str(line_number), str(offset)), len(line)
                    sources.append(Source(name=name, body=None, identifier=identifier, bytes=size))
                offset += len(line)
        return sources

    def read(self, source: Source) -> SourceContent:
        """Return the conversation of a line. Raises NotASession, OSError."""
        line_number, offset = source.identifier
        label = f"line {line_number}"
        mtime = time_of_nanoseconds(self._file.stat().st_mtime_ns)
        with self._file.open("rb") as file:
            file.seek(int(offset))
            line = file.readline(MAX_LINE_BYTES)
        try:
            value = parse_json(line.removeprefix(b"\xef\xbb\xbf"), label)
        except NotAMessage as error:
            raise NotASession(str(error)) from error
        messages = value.pop("messages", None) if isinstance(value, dict) else None
        if not isinstance(messages, list):
            raise NotASession(f"{label} has no list of messages")
        name = f"{self._file.stem}:{line_number}.jsonl"
        try:
            session = read_plain(
                messages, value, name=name, mtime=mtime, time_field=self._time_field
            )
        except NotASession as error:
            raise NotASession(f"{label}: {error}") from error
        session = without_oversized_parts(session)
        problems = tuple(f"{label}, {problem}" for problem in session.problems)
        session = replace(session, problems=problems)
        return SourceContent(session, sha256(line).hexdigest(), mtime, ())


def has_conversation_lines(file: Path) -> bool:
    """Return whether the file has one conversation per line, judged by its first line."""
    try:
        with file.open("rb") as lines:
            first_line = next((line for line in lines if line.strip()), b"")
            has_second_line = bool(lines.readline(MAX_LINE_BYTES).strip())
        value = loads(first_line.decode("utf-8-sig")) if len(first_line) <= MAX_LINE_BYTES else None
    except (OSError, ValueError, RecursionError):
        return False
    is_conversation = (
        isinstance(value, dict)
        and isinstance(value.get("messages"), list)
        and not isinstance(value.get("role"), str)
    )
    # A .json file with one line is a single conversation.
    return is_conversation and (has_second_line or file.suffix.lower() in (".jsonl", ".ndjson"))
