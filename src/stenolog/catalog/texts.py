"""What an index takes from a message and makes of a session. Pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from stenolog.catalog.answers import seen_by
from stenolog.catalog.database import clean
from stenolog.catalog.entries import State
from stenolog.records import Message

LONGEST_TEXT: Final = 64 * 1024
"""Of a longer message so many characters are indexed."""

LONGEST_PROMPT: Final = 500
LONGEST_TITLE: Final = 80

_LONGEST_JSON: Final = 4 * LONGEST_TEXT
_NO_VALUES: Final = {"{}", "[]"}
"""Arguments or results of a tool that say nothing."""
_NOT_SAID: Final = {"thinking", "redacted_thinking", "reasoning"}


def text_of(fields: Mapping[str, Any]) -> str:
    """What can be searched for: content, calls of tools and their results, but no reasoning."""
    said = [*_content(fields.get("content"), of_tool=fields.get("role") == "tool")]
    said += _calls(fields.get("tool_calls"))
    said += _calls([fields.get("function_call")])
    return clean("\n".join(said)[:LONGEST_TEXT])


def role_of(fields: Mapping[str, Any]) -> str:
    """Who said it; empty where nobody is named."""
    role = fields.get("role")
    return clean(role) if isinstance(role, str) else ""


def prompt_from(said: Iterable[tuple[str, str]]) -> str:
    """The first words of a user, of (role, text) in their order; empty where there are none."""
    for role, text in said:
        if role == "user" and (words := text[:LONGEST_PROMPT].strip()):
            return words
    return ""


def title_from(meta: Mapping[str, Any], prompt: str) -> str:
    """The title that somebody gave, else the first prompt in one line, cut at a word."""
    given = meta.get("title")
    if isinstance(given, str) and given.strip():
        return clean(" ".join(given.split()))
    line = " ".join(prompt.split())
    if len(line) <= LONGEST_TITLE:
        return line
    cut = line[: LONGEST_TITLE - 1]
    # What is written without spaces has no word to end at.
    head, space, _ = cut.rpartition(" ")
    return (head if space and len(head) > LONGEST_TITLE // 2 else cut).rstrip(" ,;:.-") + "…"


def tags_from(meta: Mapping[str, Any]) -> tuple[str, ...]:
    """The tags, each once."""
    tags = meta.get("tags")
    given = tags if isinstance(tags, list) else [tags]
    return tuple(sorted({clean(tag) for tag in given if isinstance(tag, str) and tag}))


def agent_from(meta: Mapping[str, Any]) -> str | None:
    """Whose session it is."""
    agent = meta.get("agent")
    return clean(agent) if isinstance(agent, str) and agent else None


def channel_of(key: str) -> str | None:
    """The part of a key before the first colon."""
    channel, colon, _ = key.partition(":")
    return channel if colon and channel else None


def state_from(tail: Sequence[Message], *, whole: bool) -> State | None:
    """Whether the last turn came to its end; None where the tail does not reach far enough.

    It did not where the last word is the user's, a tool's, a call, or an answer that has not seen
    all that a user said before it. `whole`: the tail is all there is.
    """
    seen: int | None = None
    for message in reversed(tail):
        fields = message.to_dict()
        if seen is not None and message.seq <= seen:
            return "idle"
        if fields.get("role") == "user":
            return "interrupted"
        if seen is None:
            if fields.get("role") == "tool" or fields.get("tool_calls"):
                return "interrupted"
            seen = seen_by(fields, message.seq)
    return "idle" if whole else None


# --- what was said ---------------------------------------------------------------------------


def _content(content: Any, *, of_tool: bool) -> Iterator[str]:
    """The text of a content: itself, or the parts of it that are text."""
    for part in content if isinstance(content, list) else [content]:
        if isinstance(part, str):
            yield _told(part) if of_tool else part
        elif isinstance(part, dict) and (kind := _kind(part)) not in _NOT_SAID:
            text = part.get("text")
            if isinstance(text, str):
                yield _told(text) if of_tool else text
            elif kind == "tool_use":
                yield from _call(part.get("name"), part.get("input"))
            elif kind == "tool_result":
                yield from _content(part.get("content"), of_tool=True)


def _kind(part: Mapping[str, Any]) -> str:
    """The type of a part; empty if it is missing or not a string."""
    kind = part.get("type")
    return kind if isinstance(kind, str) else ""


def _calls(calls: Any) -> Iterator[str]:
    for call in calls if isinstance(calls, list) else []:
        if isinstance(call, dict):
            inner = call.get("function")
            function = inner if isinstance(inner, dict) else call
            yield from _call(function.get("name"), function.get("arguments"))


def _call(name: Any, arguments: Any) -> Iterator[str]:
    told = _told(arguments) if isinstance(arguments, str) else _flat(arguments)
    words = [word for word in (name if isinstance(name, str) else "", told) if word]
    if words:
        yield " ".join(words)


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
