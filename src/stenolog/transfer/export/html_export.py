"""Export of a conversation as one self-contained HTML page, without scripts, fonts or requests.

The content security policy of the page allows only its own style and embedded images, so that a
mistake in this module cannot cause a request. All text of messages is escaped.
"""

import re
from collections.abc import Iterator
from html import escape
from typing import Final

from stenolog.transfer.export.code_blocks import split_blocks
from stenolog.transfer.export.message_parts import Conversation, Part, Said, minute

_ROLES: Final = ("user", "assistant", "tool", "system")
_HEADING: Final = re.compile(r"(#{1,6}) +(.+)")
# Each part has a maximum length, so that matching a line of brackets takes bounded time.
_INLINE: Final = re.compile(  # guard: export-links-http-only
    r"(?<!`)(?P<tick>`{1,3})(?!`)(?P<code>[^\n]{1,500}?)(?<!`)(?P=tick)(?!`)"
    r"|\*\*(?P<bold>[^*\n]{1,500})\*\*"
    r"|\[(?P<words>[^\[\]\n]{1,300})\]\((?P<target>https?://[^\s()<>\"']{1,2000})\)"
    r"|(?P<bare>https?://[^\s<>\"'`()\[\]]{1,2000})"
)

_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_STYLE: Final = """
:root { color-scheme: light dark; --ink: #1b1d22; --paper: #fbfaf8; --soft: #6a6f7a;
  --line: #dedbd4; --box: #f1efea; --user: #2457c5; --assistant: #1c7c4a; --tool: #93650a; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e4df; --paper: #16181c; --soft: #979ca8; --line: #32363e; --box: #1f2228;
    --user: #86aaff; --assistant: #7dd3a2; --tool: #e0b25e; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, sans-serif; }
main { max-width: 46rem; margin: 0 auto; padding: 1.5rem 1rem 5rem; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 .25rem; overflow-wrap: anywhere; }
.about, .place { color: var(--soft); font-size: .85rem; overflow-wrap: anywhere; }
article { border-top: 1px solid var(--line); padding: .9rem 0; scroll-margin-top: 1rem; }
article:target { box-shadow: -4px 0 0 var(--user); padding-left: .75rem; }
article > header { display: flex; gap: .6rem; align-items: baseline; flex-wrap: wrap; }
.role { font-weight: 600; }
.user .role { color: var(--user); } .assistant .role { color: var(--assistant); }
.tool .role { color: var(--tool); }
a { color: inherit; } .place a { text-decoration: none; }
.hidden { opacity: .7; border-left: 3px dashed var(--line); padding-left: .75rem; }
p { margin: .5rem 0; white-space: pre-wrap; overflow-wrap: anywhere; }
.heading { font-weight: 600; font-size: 1.08rem; margin-top: 1rem; }
code { font: .88em ui-monospace, monospace; background: var(--box); border-radius: 3px;
  padding: .1em .25em; }
pre { background: var(--box); border-radius: 6px; padding: .7rem .85rem; overflow-x: auto;
  margin: .5rem 0; }
pre code { background: none; padding: 0; }
details { margin: .4rem 0; } summary { cursor: pointer; color: var(--soft); }
details pre { max-height: 30rem; white-space: pre-wrap; overflow-wrap: anywhere; }
img { max-width: 100%; height: auto; border-radius: 6px; }
@media print { details > pre { max-height: none; } }
""".strip()


def as_page(conversation: Conversation) -> Iterator[str]:
    """Yield the page in pieces."""
    title = escape(" ".join(conversation.title.split()))
    yield (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(_POLICY)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="referrer" content="no-referrer">\n'
        f"<title>{title}</title>\n<style>\n{_STYLE}\n</style>\n</head>\n<body>\n<main>\n"
    )
    yield f'<h1>{title}</h1>\n<p class="about">{_session_line(conversation)}</p>\n'
    if conversation.summary:
        yield '<details class="summary"><summary>Summary of what was compacted</summary>\n'
        yield f"{_prose(conversation.summary)}</details>\n"
    for said in conversation.said:
        yield from _message(said)
    yield "</main>\n</body>\n</html>\n"


def _session_line(conversation: Conversation) -> str:
    hidden_count = sum(one.hidden for one in conversation.said)
    count = f"{len(conversation.said):,} message{'' if len(conversation.said) == 1 else 's'}"
    if hidden_count:
        count += f", {hidden_count:,} of them hidden"
    elif conversation.hidden:
        count += f" (and {conversation.hidden:,} hidden, not shown)"
    times = f"{minute(conversation.created)} – {minute(conversation.updated)} UTC"
    return f"{escape(conversation.key)} · {times} · {count}"


def _message(said: Said) -> Iterator[str]:
    classes = [said.role] if said.role in _ROLES else []
    classes += ["hidden"] if said.hidden else []
    details = [minute(said.at), escape(said.model)]
    details.append(f"{said.seconds:.1f} s" if said.seconds is not None else "")
    details.append("failed" if said.failed else "")
    details.append(f"interrupted: {escape(said.interrupted)}" if said.interrupted else "")
    details.append("hidden" if said.hidden else "")
    yield (
        f'<article id="m{said.seq}" class="{" ".join(classes)}">\n<header>'
        f'<span class="role">{escape(said.role)}</span> <span class="place">'
        f'<a href="#m{said.seq}">#{said.seq}</a> · {" · ".join(filter(None, details))}</span>'
        "</header>\n"
    )
    for part in said.parts:
        yield _part(part)
    yield "</article>\n"


def _part(part: Part) -> str:
    match part.kind:
        case "text":
            return _prose(part.text)
        case "image":
            return f'<p><img src="{escape(part.text)}" alt="an image"></p>\n'
    return _details(part.head, part.text)


def _details(head: str, text: str) -> str:
    return (
        f"<details><summary>{escape(head)}</summary>"
        f"<pre><code>{escape(text)}</code></pre></details>\n"
    )


def _prose(text: str) -> str:
    return "".join(
        f"<pre><code>{escape(block.text)}</code></pre>\n"
        if block.code
        else "".join(_paragraphs(block.text))
        for block in split_blocks(text)
    )


def _paragraphs(text: str) -> Iterator[str]:
    lines: list[str] = []
    for line in [*text.split("\n"), ""]:
        heading = _HEADING.fullmatch(line)
        if lines and (heading or not line.strip()):
            joined = "\n".join(lines)
            yield f"<p>{_inline(joined)}</p>\n"
            lines = []
        if heading:
            yield f'<p class="heading">{_inline(heading[2])}</p>\n'
        elif line.strip():
            lines.append(line)


def _inline(text: str) -> str:
    pieces = []
    at = 0
    for found in _INLINE.finditer(text):
        pieces += [escape(text[at : found.start()]), _inline_markup(found)]
        at = found.end()
    return "".join([*pieces, escape(text[at:])])  # guard: export-escaped


def _inline_markup(found: re.Match[str]) -> str:
    if found["code"] is not None:
        return f"<code>{escape(found['code'])}</code>"
    if found["bold"] is not None:
        return f"<strong>{escape(found['bold'])}</strong>"
    target = found["target"] or found["bare"]
    words = found["words"] or target
    return f'<a href="{escape(target)}" rel="noopener noreferrer">{escape(words)}</a>'
