"""Export of a conversation as Markdown.

Messages are mostly Markdown already and stay so, but must not affect the text around them: open
fences are closed, and HTML tags are shown as text.
"""

import re
from collections.abc import Iterator
from html import escape
from typing import Final

from stenolog.transfer.export.code_blocks import fence_for, split_blocks
from stenolog.transfer.export.message_parts import Conversation, Part, Said, minute
from stenolog.transfer.export.tool_views import (
    ChecklistItem,
    ToolBlock,
    argument_blocks,
    checklist_text,
    diff_text,
)

# Inline code is not escaped: the backslash would be visible.
_TAG: Final = re.compile(
    r"(?<!`)(?P<tick>`{1,3})(?!`)(?P<code>[^\n]{1,500}?)(?<!`)(?P=tick)(?!`)"
    r"|(?P<slashes>(?<!\\)\\*+)<(?=[A-Za-z/!?])"
)
_SYNTAX: Final = re.compile(r"([\\`*_\[\]<>#|~])")
_LANGUAGE: Final = re.compile(r"[A-Za-z0-9_+.#-]{0,40}")


def as_markdown(conversation: Conversation) -> Iterator[str]:
    """Yield the document in pieces."""
    yield f"# {_line(conversation.title)}\n\n"
    times = f"{minute(conversation.created)} – {minute(conversation.updated)} UTC"
    count = _count(len(conversation.said)) + _hidden_note(conversation)
    yield f"{_line(conversation.key)} · {times} · {count}\n\n"
    if conversation.summary:
        yield "## Summary\n\n"
        yield f"{_prose(conversation.summary)}\n\n"
    for said in conversation.said:
        yield from _message(said)


def _message(said: Said) -> Iterator[str]:
    details = [minute(said.at), _line(said.model)]
    details.append(f"{said.seconds:.1f} s" if said.seconds is not None else "")
    details.append("failed" if said.failed else "")
    details.append(f"interrupted: {_line(said.interrupted)}" if said.interrupted else "")
    details.append("hidden" if said.hidden else "")
    yield f'## <a id="m{said.seq}"></a>{said.seq} · {_line(said.role)}\n\n'
    yield f"*{' · '.join(filter(None, details))}*\n\n"
    for part in said.parts:
        yield f"{_part(part)}\n\n"


def _part(part: Part) -> str:
    match part.kind:
        case "text":
            return _prose(part.text)
        case "image":
            return f"![an image]({part.text})"
        case "call":
            return _details(part.head, "\n\n".join(map(_block, argument_blocks(part.text))))
    return _details(part.head, _code(part.text))


def _details(head: str, inner: str) -> str:
    # Markdown inside HTML needs the empty line before it.
    summary = escape(" ".join(head.split()))
    return f"<details><summary>{summary}</summary>\n\n{inner}\n\n</details>"


def _block(block: ToolBlock) -> str:
    more = f"\n\n{block.omitted:,} more" if block.omitted else ""
    label = f"{_line(block.label)}\n\n" if block.label else ""
    match block.kind:
        case "diff":
            return label + _code(diff_text(block.lines), "diff") + more
        case "checklist":
            items = [ChecklistItem(_line(item.text), item.state) for item in block.items]
            return label + checklist_text(items) + more
        case "shell":
            return label + _code(block.text, "sh")
        case "json":
            return label + _code(block.text, "json")
    return label + _code(block.text, block.language)


def _prose(text: str) -> str:
    parts = []
    for block in split_blocks(text):
        if block.code:
            parts.append(_code(block.text, block.language))
        else:
            parts.append(_TAG.sub(_escape_tag, block.text))
    return "\n".join(parts).strip("\n")


def _escape_tag(found: re.Match[str]) -> str:
    """Escape the `<` of a message even in inline code, which other parsers may not see as code."""
    code = found["code"]
    if code is None:
        backslashes = found["slashes"]
        return backslashes[: len(backslashes) // 2 * 2] + "&lt;"
    if "<" not in code:
        return found[0]
    return f"<code>{_SYNTAX.sub(lambda one: f'&#{ord(one[0])};', code)}</code>"


def _code(text: str, language: str = "") -> str:
    fence = fence_for(text)
    info = language if _LANGUAGE.fullmatch(language) else ""
    return f"{fence}{info}\n{text}\n{fence}"


def _line(text: str) -> str:
    """Return a text as one line in which no character is Markdown syntax."""
    return _SYNTAX.sub(r"\\\1", " ".join(text.split()))


def _count(number: int) -> str:
    return f"{number:,} message{'' if number == 1 else 's'}"


def _hidden_note(conversation: Conversation) -> str:
    hidden_count = sum(one.hidden for one in conversation.said)
    if hidden_count:
        return f", {hidden_count:,} of them hidden"
    return f" (and {conversation.hidden:,} hidden, not shown)" if conversation.hidden else ""
