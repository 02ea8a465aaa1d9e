"""Extract searchable text, titles, tags and states from messages and sessions. Pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from stenolog.catalog.catalog_database import replace_surrogates
from stenolog.catalog.entries import State
from stenolog.catalog.message_metadata import FIELD, last_seen_seq
from stenolog.messages import (
    REASONING_FIELDS,
    UNNAMED,
    FilePart,
    Part,
    TextPart,
    ToolCall,
    ToolResult,
    UnknownPart,
    calls_of,
    read_content,
    read_message,
)
from stenolog.records import Message

LONGEST_TEXT: Final = 64 * 1024
"""Maximum number of characters that are indexed of a message."""

LONGEST_PROMPT: Final = 500
LONGEST_TITLE: Final = 80
LONGEST_NAME: Final = 500
"""Maximum number of characters of a program, project or model."""

_LONGEST_JSON: Final = 4 * LONGEST_TEXT
_NO_VALUES: Final = {"{}", "[]"}
"""Arguments or results of a tool without content."""
_LONGEST_WORD: Final = 200
"""Maximum length of a word in a part of unknown type; longer ones are encoded data."""


def text_of(fields: Mapping[str, Any], parts: Iterable[Part] | None = None) -> str:
    """Return the searchable text: content, tool calls and results, but no reasoning.

    `parts`: the result of read_message, if the caller has it.
    """
    said: list[str] = []
    attached: list[str] = []
    for part in read_message(fields) if parts is None else parts:
        # Last: a prompt, from which a title is made, starts with the user's own words.
        last = isinstance(part, FilePart | UnknownPart)
        (attached if last else said).extend(_texts(part))
    return replace_surrogates("\n".join(said + attached)[:LONGEST_TEXT])


def role_of(fields: Mapping[str, Any]) -> str:
    """Return the role of a message; empty if it has none."""
    role = fields.get("role")
    return replace_surrogates(role) if isinstance(role, str) else ""


def prompt_from(said: Iterable[tuple[str, str]]) -> str:
    """Return the start of the first user message of (role, text) pairs, or an empty string."""
    for role, text in said:
        if role == "user" and (words := text[:LONGEST_PROMPT].strip()):
            return words
    return ""


def title_from(meta: Mapping[str, Any], prompt: str) -> str:
    """Return the title in meta, or else the first prompt in one line, cut at a word."""
    given = meta.get("title")
    if isinstance(given, str) and given.strip():
        return replace_surrogates(" ".join(given.split()))
    line = " ".join(prompt.split())
    if len(line) <= LONGEST_TITLE:
        return line
    cut = line[: LONGEST_TITLE - 1]
    # Scripts without spaces have no word boundary to cut at.
    head, space, _ = cut.rpartition(" ")
    return (head if space and len(head) > LONGEST_TITLE // 2 else cut).rstrip(" ,;:.-") + "…"


def tags_from(meta: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the different tags, sorted."""
    tags = meta.get("tags")
    given = tags if isinstance(tags, list) else [tags]
    return tuple(sorted({replace_surrogates(tag) for tag in given if isinstance(tag, str) and tag}))


def agent_from(meta: Mapping[str, Any]) -> str | None:
    """Return the name of the session's agent, or None."""
    agent = meta.get("agent")
    return replace_surrogates(agent) if isinstance(agent, str) and agent else None


def program_from(meta: Mapping[str, Any]) -> str:
    """Return the program that an imported session came from, or an empty string."""
    return _name(_transcript(meta).get("program"))


def project_from(meta: Mapping[str, Any]) -> str:
    """Return the first working directory of the session, or an empty string."""
    folders = _transcript(meta).get("folders")
    return _name(folders[0] if isinstance(folders, list) and folders else meta.get("cwd"))


def source_from(meta: Mapping[str, Any]) -> str | None:
    """Return the session from which another program forked this one, or None."""
    return _name(_transcript(meta).get("forked_from")) or None


def _transcript(meta: Mapping[str, Any]) -> Mapping[str, Any]:
    found = meta.get("transcript")
    return found if isinstance(found, Mapping) else {}


def _name(value: Any) -> str:
    return replace_surrogates(value[:LONGEST_NAME]) if isinstance(value, str) else ""


def is_speech(fields: Mapping[str, Any], parts: Iterable[Part]) -> bool:
    """Whether a user or a model said something in a message.

    It is not for tool calls, results of tools, and user messages that a program wrote.
    """
    marks = fields.get(FIELD)
    if fields.get("role") not in ("user", "assistant") or (
        isinstance(marks, Mapping) and isinstance(marks.get("kind"), str)
    ):
        return False
    return any(isinstance(part, TextPart) and part.text.strip() for part in parts)


def channel_of(key: str) -> str | None:
    """Return the part of a key before the first colon, or None."""
    channel, colon, _ = key.partition(":")
    return channel if colon and channel else None


def state_from(tail: Sequence[Message], *, whole: bool) -> State | None:
    """Return whether the last turn is finished, or None if the tail is too short to decide.

    It is interrupted if the last message is from the user or a tool, has tool calls, or is an
    answer that does not take an earlier user message into account. `whole`: the tail is the whole
    session.
    """
    seen: int | None = None
    for message in reversed(tail):
        fields = message.to_dict()
        if seen is not None and message.seq <= seen:
            return "idle"
        if fields.get("role") == "user":
            return "interrupted"
        if seen is None:
            if fields.get("role") == "tool" or calls_of(fields):
                return "interrupted"
            seen = last_seen_seq(fields, message.seq)
    return "idle" if whole else None


# --- text of messages ------------------------------------------------------------------------


def _texts(part: Part, *, of_tool: bool = False) -> Iterator[str]:
    """Yield the texts of a part. Text of tools is often JSON."""
    match part:
        case TextPart():
            yield _told(part.text) if of_tool else part.text
        case ToolCall():
            yield from _call("" if part.name == UNNAMED else part.name, part.arguments)
        case ToolResult():
            for inner in read_content(part.content):
                yield from _texts(inner, of_tool=True)
        case FilePart():
            if part.name:
                yield part.name
            for inner in read_content(part.content):
                yield from _texts(inner, of_tool=of_tool)
        case UnknownPart() if part.field not in REASONING_FIELDS:
            if part.text is not None:
                yield _told(part.text) if of_tool else part.text
            elif words := _words(part.value):
                yield words


def _words(value: Any) -> str:
    """Return the names and values of a part of unknown type, without encoded data."""
    if isinstance(value, dict):
        value = {name: inner for name, inner in value.items() if name not in ("type", FIELD)}
    words = _flat(value).split() if isinstance(value, dict | list) else []
    return " ".join(word for word in words if len(word) <= _LONGEST_WORD)


def _call(name: str, arguments: Any) -> Iterator[str]:
    told = _told(arguments) if isinstance(arguments, str) else _flat(arguments)
    if words := " ".join(filter(None, (name, told))):
        yield words


def _told(text: str) -> str:
    """Return JSON text with its structure removed, so that every word in it can be found.

    An escaped line end would otherwise stick to the next word. Other text is returned unchanged.
    """
    if text[:1] in ("{", "[") and len(text) <= _LONGEST_JSON:
        try:
            return _flat(msgspec.json.decode(text)) or ("" if text in _NO_VALUES else text)
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
            pass
    return text


def _flat(value: Any) -> str:
    """Return the values and names of a JSON value in one line.

    Uses a stack instead of recursion: the depth that recursion allows differs between Python
    versions.
    """
    pieces: list[str] = []
    stack = [value]
    while stack:
        one = stack.pop()
        if isinstance(one, str):
            pieces.append(one)
        elif isinstance(one, dict):
            for name, inner in reversed(one.items()):
                stack += (inner, f"{name}: ", ", ")
            del stack[len(stack) - bool(one) :]  # no comma before the first
        elif isinstance(one, list):
            for inner in reversed(one):
                stack += (inner, ", ")
            del stack[len(stack) - bool(one) :]
        elif one is not None:
            pieces.append(msgspec.json.encode(one).decode())
    return "".join(pieces)
