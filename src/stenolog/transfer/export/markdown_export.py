"""Export of a conversation as Markdown.

Most messages are Markdown and are exported unchanged. But a message must not affect the text around
it, so open fences are closed, and HTML tags are shown as text.
"""

import re
from collections.abc import Iterator
from html import escape
from typing import Final

from stenolog.transfer.export.code_blocks import fence_for, split_blocks
from stenolog.transfer.export.message_parts import (
    Conversation,
    Part,
    ReadableMessage,
    format_minute,
)
from stenolog.transfer.export.tool_views import (
    ChecklistItem,
    ToolBlock,
    argument_blocks,
    checklist_text,
    diff_text,
)

# The pattern also matches inline code, in which an escaped `<` would be shown as `&lt;`.
_TAG: Final = re.compile(
    r"(?<!`)(?P<tick>`{1,3})(?!`)(?P<code>[^\n]{1,500}?)(?<!`)(?P=tick)(?!`)"
    r"|(?P<slashes>(?<!\\)\\*+)<(?=[A-Za-z/!?])"
)
_SYNTAX_CHARACTERS: Final = re.compile(r"([\\`*_\[\]<>#|~])")
_LANGUAGE: Final = re.compile(r"[A-Za-z0-9_+.#-]{0,40}")


def markdown_pieces(conversation: Conversation) -> Iterator[str]:
    """Yield the document in pieces."""
    yield f"# {_escape_line(conversation.title)}\n\n"
    times = f"{format_minute(conversation.created)} – {format_minute(conversation.updated)} UTC"
    total = len(conversation.messages)
    count_text = f"{total:,} message{'' if total == 1 else 's'}{_hidden_note(conversation)}"
    yield f"{_escape_line(conversation.key)} · {times} · {count_text}\n\n"
    if conversation.summary:
        yield "## Summary\n\n"
        yield f"{_escape_prose(conversation.summary)}\n\n"
    for message in conversation.messages:
        yield from _message_markdown(message)


def _message_markdown(message: ReadableMessage) -> Iterator[str]:
    interruption = message.interrupted
    details = [format_minute(message.at), _escape_line(message.model)]
    details.append(f"{message.seconds:.1f} s" if message.seconds is not None else "")
    details.append("failed" if message.failed else "")
    details.append(f"interrupted: {_escape_line(interruption)}" if interruption else "")
    details.append("hidden" if message.hidden else "")
    yield f'## <a id="m{message.seq}"></a>{message.seq} · {_escape_line(message.role)}\n\n'
    yield f"*{' · '.join(filter(None, details))}*\n\n"
    for part in message.parts:
        yield f"{_part_markdown(part)}\n\n"


def _part_markdown(part: Part) -> str:
    match part.kind:
        case "text":
            return _escape_prose(part.text)
        case "image":
            return f"![an image]({part.text})"
        case "call":
            blocks = map(_block_markdown, argument_blocks(part.text))
            return _details_element(part.head, "\n\n".join(blocks))
    return _details_element(part.head, _fenced_code(part.text))


def _details_element(heading: str, content: str) -> str:
    # Markdown inside HTML needs an empty line before the Markdown.
    summary = escape(" ".join(heading.split()))
    return f"<details><summary>{summary}</summary>\n\n{content}\n\n</details>"


def _block_markdown(block: ToolBlock) -> str:
    more = f"\n\n{block.omitted:,} more" if block.omitted else ""
    label = f"{_escape_line(block.label)}\n\n" if block.label else ""
    match block.kind:
        case "diff":
            return label + _fenced_code(diff_text(block.lines), "diff") + more
        case "checklist":
            items = [ChecklistItem(_escape_line(item.text), item.state) for item in block.items]
            return label + checklist_text(items) + more
        case "shell":
            return label + _fenced_code(block.text, "sh")
        case "json":
            return label + _fenced_code(block.text, "json")
    return label + _fenced_code(block.text, block.language)


def _escape_prose(text: str) -> str:
    parts = []
    for block in split_blocks(text):
        if block.code:
            parts.append(_fenced_code(block.text, block.language))
        else:
            parts.append(_TAG.sub(_escape_tag, block.text))
    return "\n".join(parts).strip("\n")


def _escape_tag(match: re.Match[str]) -> str:
    """Escape `<`, even in inline code: other parsers may not recognize the inline code."""
    code = match["code"]
    if code is None:
        backslashes = match["slashes"]
        return backslashes[: len(backslashes) // 2 * 2] + "&lt;"
    if "<" not in code:
        return match[0]
    return f"<code>{_SYNTAX_CHARACTERS.sub(lambda char: f'&#{ord(char[0])};', code)}</code>"


def _fenced_code(text: str, language: str = "") -> str:
    fence = fence_for(text)
    info = language if _LANGUAGE.fullmatch(language) else ""
    return f"{fence}{info}\n{text}\n{fence}"


def _escape_line(text: str) -> str:
    """Return a text as one line in which no character is Markdown syntax."""
    return _SYNTAX_CHARACTERS.sub(r"\\\1", " ".join(text.split()))


def _hidden_note(conversation: Conversation) -> str:
    hidden_count = sum(message.hidden for message in conversation.messages)
    if hidden_count:
        return f", {hidden_count:,} of them hidden"
    return f" (and {conversation.hidden:,} hidden, not shown)" if conversation.hidden else ""
