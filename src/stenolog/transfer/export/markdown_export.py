"""Export of a conversation as Markdown.

Messages are mostly Markdown already and stay so, but must not affect the text around them: open
fences are closed, and HTML tags are shown as text.
"""

import re
from collections.abc import Iterator
from html import escape
from typing import Final

from stenolog.transfer.export.code_blocks import blocks, fence_for
from stenolog.transfer.export.message_parts import Conversation, Part, Said, minute

# Inline code is not escaped: the backslash would be visible.
_TAG: Final = re.compile(
    r"(?<!`)(?P<tick>`{1,3})(?!`)(?P<code>[^\n]{1,500}?)(?<!`)(?P=tick)(?!`)"
    r"|(?P<slashes>(?<!\\)\\*+)<(?=[A-Za-z/!?])"
)
_SIGNS: Final = re.compile(r"([\\`*_\[\]<>#|~])")
_LANGUAGE: Final = re.compile(r"[A-Za-z0-9_+.#-]{0,40}")


def as_markdown(conversation: Conversation) -> Iterator[str]:
    """Yield the document in pieces."""
    told = conversation
    yield f"# {_line(told.title)}\n\n"
    yield f"{_line(told.key)} · {minute(told.created)} – {minute(told.updated)} UTC"
    yield f" · {_count(len(told.said))}{_out_of_sight(told)}\n\n"
    if told.summary:
        yield "## Summary\n\n"
        yield f"{_prose(told.summary)}\n\n"
    for said in told.said:
        yield from _message(said)


def _message(said: Said) -> Iterator[str]:
    marks = [minute(said.at), _line(said.model)]
    marks.append(f"{said.seconds:.1f} s" if said.seconds is not None else "")
    marks.append("failed" if said.failed else "")
    marks.append(f"interrupted: {_line(said.interrupted)}" if said.interrupted else "")
    marks.append("hidden" if said.hidden else "")
    yield f'## <a id="m{said.seq}"></a>{said.seq} · {_line(said.role)}\n\n'
    yield f"*{' · '.join(filter(None, marks))}*\n\n"
    for part in said.parts:
        yield f"{_part(part)}\n\n"


def _part(part: Part) -> str:
    match part.kind:
        case "text":
            return _prose(part.text)
        case "image":
            return f"![an image]({part.text})"
    return _folded(part.head, part.text)


def _folded(head: str, text: str) -> str:
    # Markdown inside HTML needs the empty line before it.
    shown = escape(" ".join(head.split()))
    return f"<details><summary>{shown}</summary>\n\n{_code(text)}\n\n</details>"


def _prose(text: str) -> str:
    parts = []
    for block in blocks(text):
        if block.code:
            parts.append(_code(block.text, block.language))
        else:
            parts.append(_TAG.sub(_untagged, block.text))
    return "\n".join(parts).strip("\n")


def _untagged(found: re.Match[str]) -> str:
    """Escape the `<` of a message even in inline code, which other parsers may not see as code."""
    code = found["code"]
    if code is None:
        slashes = found["slashes"]
        return slashes[: len(slashes) // 2 * 2] + "&lt;"
    if "<" not in code:
        return found[0]
    return f"<code>{_SIGNS.sub(lambda one: f'&#{ord(one[0])};', code)}</code>"


def _code(text: str, language: str = "") -> str:
    fence = fence_for(text)
    shown = language if _LANGUAGE.fullmatch(language) else ""
    return f"{fence}{shown}\n{text}\n{fence}"


def _line(text: str) -> str:
    """Return a text as one line in which no character is Markdown syntax."""
    return _SIGNS.sub(r"\\\1", " ".join(text.split()))


def _count(number: int) -> str:
    return f"{number:,} message{'' if number == 1 else 's'}"


def _out_of_sight(told: Conversation) -> str:
    shown = sum(one.hidden for one in told.said)
    if shown:
        return f", {shown:,} of them hidden"
    return f" (and {told.hidden:,} hidden, not shown)" if told.hidden else ""
