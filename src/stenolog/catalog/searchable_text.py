"""Extract searchable text, titles, tags and states from messages and sessions. Pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from stenolog.catalog.catalog_database import replace_surrogates
from stenolog.catalog.entries import State
from stenolog.catalog.message_metadata import FIELD, AnsweredMessages
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
from stenolog.redaction.redact import cut_start, redact_text

LONGEST_TEXT: Final = 64 * 1024
"""Maximum number of characters that are indexed per message."""

LONGEST_PROMPT: Final = 500  # characters
LONGEST_TITLE: Final = 80  # characters
LONGEST_NAME: Final = 500
"""Maximum number of characters in the name of a program, project or model."""

_LONGEST_JSON: Final = 4 * LONGEST_TEXT
"""Maximum number of characters of a text that is parsed as JSON."""
_EMPTY_JSON: Final = {"{}", "[]"}
"""JSON texts of arguments or results that have no content."""
_LONGEST_WORD: Final = 200
"""Maximum length of a word in a part of unknown type. Longer words are probably encoded data."""


def text_of(fields: Mapping[str, Any], parts: Iterable[Part] | None = None) -> str:
    """Return the searchable text: content, tool calls and results, but no reasoning.

    `parts`: the result of read_message, if the caller has it.
    """
    texts: list[str] = []
    last_texts: list[str] = []
    for part in read_message(fields) if parts is None else parts:
        # Files and unknown parts come last: a title should consist of the user's own words.
        comes_last = isinstance(part, FilePart | UnknownPart)
        (last_texts if comes_last else texts).extend(_texts_of_part(part))
    return replace_surrogates("\n".join(texts + last_texts)[:LONGEST_TEXT])


def role_of(fields: Mapping[str, Any]) -> str:
    """Return the role of a message; empty for a message without a role."""
    role = fields.get("role")
    return replace_surrogates(role) if isinstance(role, str) else ""


def prompt_from(roles_and_texts: Iterable[tuple[str, str]]) -> str:
    """Return the start of the first user message with text, or an empty string."""
    for role, text in roles_and_texts:
        if role == "user" and (start := text[:LONGEST_PROMPT].strip()):
            # A part of a secret is not recognized. A text that is one long word is kept.
            return cut_start(text, LONGEST_PROMPT).strip() or start
    return ""


def title_from(meta: Mapping[str, Any], prompt: str) -> str:
    """Return the title in meta, or else the first prompt in one line, cut between words."""
    meta_title = meta.get("title")
    if isinstance(meta_title, str) and meta_title.strip():
        return replace_surrogates(" ".join(meta_title.split()))
    line = " ".join(prompt.split())
    if len(line) <= LONGEST_TITLE:
        return line
    # Cut at a space in the second half, if any: scripts without spaces have none.
    head, space, _ = line[: LONGEST_TITLE - 1].rpartition(" ")
    if not space or len(head) <= LONGEST_TITLE // 2:
        # The cut divides a long word, which may be a key: a part of a key is not recognized.
        head = redact_text(line)[: LONGEST_TITLE - 1]
    return head.rstrip(" ,;:.-") + "…"


def tags_from(meta: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the tags of a session without duplicates, sorted."""
    tags = meta.get("tags")
    items = tags if isinstance(tags, list) else [tags]
    return tuple(sorted({replace_surrogates(tag) for tag in items if isinstance(tag, str) and tag}))


def agent_from(meta: Mapping[str, Any]) -> str | None:
    """Return the name of the session's agent, or None."""
    agent = meta.get("agent")
    return replace_surrogates(agent) if isinstance(agent, str) and agent else None


def program_from(meta: Mapping[str, Any]) -> str:
    """Return the program that an imported session came from, or an empty string."""
    return _clean_name(_transcript_facts(meta).get("program"))


def project_from(meta: Mapping[str, Any]) -> str:
    """Return the first working directory of the session, or an empty string."""
    folders = _transcript_facts(meta).get("folders")
    return _clean_name(folders[0] if isinstance(folders, list) and folders else meta.get("cwd"))


def source_from(meta: Mapping[str, Any]) -> str | None:
    """Return the session from which another program forked this session, or None."""
    return _clean_name(_transcript_facts(meta).get("forked_from")) or None


def last_copied_from(meta: Mapping[str, Any]) -> str:
    """Return the id of the last message that another program copied into a fork, or empty."""
    return _clean_name(_transcript_facts(meta).get("forked_after"))


def _transcript_facts(meta: Mapping[str, Any]) -> Mapping[str, Any]:
    facts = meta.get("transcript")
    return facts if isinstance(facts, Mapping) else {}


def _clean_name(value: Any) -> str:
    return replace_surrogates(value[:LONGEST_NAME]) if isinstance(value, str) else ""


def is_speech(fields: Mapping[str, Any], parts: Iterable[Part]) -> bool:
    """Return whether a message has text that a user or a model wrote.

    Returns False for tool calls, results of tools, and user messages that a program wrote.
    """
    if fields.get("role") not in ("user", "assistant") or _kind_of(fields):
        return False
    return any(isinstance(part, TextPart) and part.text.strip() for part in parts)


def _kind_of(fields: Mapping[str, Any]) -> str:
    """Return the kind of a message that another program wrote itself; empty for other messages."""
    metadata = fields.get(FIELD)
    kind = metadata.get("kind") if isinstance(metadata, Mapping) else None
    return kind if isinstance(kind, str) else ""


def channel_of(key: str) -> str | None:
    """Return the part of a key before the first colon, or None."""
    channel, colon, _ = key.partition(":")
    return channel if colon and channel else None


def state_from(tail: Sequence[Message], *, whole: bool) -> State | None:
    """Return the state of the last turn, or None if `tail` is too short to decide.

    `tail`: the last messages. `whole`: whether `tail` is the whole session. The turn is interrupted
    if the last message is from the user or a tool, has tool calls, or is an answer that does not
    take an earlier user message into account. What another program wrote itself, such as the output
    of a command, is no part of a turn, except for a notice that the user interrupted the turn.
    """
    seen = AnsweredMessages()
    is_last = True
    for message in reversed(tail):
        fields = message.to_dict()
        if _kind_of(fields) not in ("", "interruption"):
            continue
        if message.seq <= seen.upto:
            return "idle"
        if fields.get("role") == "user":
            if message.seq not in seen:
                return "interrupted"
            continue
        has_calls = bool(calls_of(fields))
        if is_last and (fields.get("role") == "tool" or has_calls or _is_call_item(fields)):
            return "interrupted"
        if is_last or (fields.get("role") == "assistant" and not has_calls):
            seen.add(fields, message.seq)
        is_last = False
    return "idle" if whole else None


def _is_call_item(fields: Mapping[str, Any]) -> bool:
    """Return whether this is a Responses item with a tool call or its result."""
    return "role" not in fields and any(
        isinstance(part, ToolCall | ToolResult) for part in read_message(fields)
    )


# --- text of messages ------------------------------------------------------------------------


def _texts_of_part(part: Part, *, is_tool_output: bool = False) -> Iterator[str]:
    """Yield the texts of a message part. `is_tool_output`: the texts may be JSON."""
    match part:
        case TextPart():
            yield _words_of_json(part.text) if is_tool_output else part.text
        case ToolCall():
            arguments = part.arguments
            is_text = isinstance(arguments, str)
            words = _words_of_json(arguments) if is_text else _flatten_json(arguments)
            name = "" if part.name == UNNAMED else part.name
            if text := " ".join(filter(None, (name, words))):
                yield text
        case ToolResult():
            for inner in read_content(part.content):
                yield from _texts_of_part(inner, is_tool_output=True)
        case FilePart():
            if part.name:
                yield part.name
            for inner in read_content(part.content):
                yield from _texts_of_part(inner, is_tool_output=is_tool_output)
        case UnknownPart() if part.field not in REASONING_FIELDS:
            if part.text is not None:
                yield _words_of_json(part.text) if is_tool_output else part.text
            elif words := _collect_words(part.value):
                yield words


def _collect_words(value: Any) -> str:
    """Return the names and values in a message part of unknown type, without encoded data."""
    if isinstance(value, dict):
        value = {name: inner for name, inner in value.items() if name not in ("type", FIELD)}
    words = _flatten_json(value).split() if isinstance(value, dict | list) else []
    return " ".join(word for word in words if len(word) <= _LONGEST_WORD)


def _words_of_json(text: str) -> str:
    """Return the words of a JSON text without its structure, so that each word can be found.

    An escaped line end would otherwise become part of the next word. A text that is not JSON is
    returned unchanged.
    """
    if text[:1] in ("{", "[") and len(text) <= _LONGEST_JSON:
        try:
            return _flatten_json(msgspec.json.decode(text)) or ("" if text in _EMPTY_JSON else text)
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
            pass
    return text


def _flatten_json(value: Any) -> str:
    """Return the values and names of a JSON value in one line.

    Uses a stack instead of recursion: the depth that recursion allows differs between Python
    versions.
    """
    texts_found: list[str] = []
    stack = [value]
    while stack:
        current = stack.pop()
        if isinstance(current, str):
            texts_found.append(current)
        elif isinstance(current, dict):
            for name, inner in reversed(current.items()):
                stack += (inner, f"{name}: ", ", ")
            del stack[len(stack) - bool(current) :]  # remove the comma before the first name
        elif isinstance(current, list):
            for inner in reversed(current):
                stack += (inner, ", ")
            del stack[len(stack) - bool(current) :]
        elif current is not None:
            texts_found.append(msgspec.json.encode(current).decode())
    return "".join(texts_found)
