"""HTML of the blocks of tool calls and results."""

from collections.abc import Sequence
from typing import Final

from markupsafe import Markup

from stenolog.gateway.viewer.formatting import plural
from stenolog.gateway.viewer.markdown_html import coloured
from stenolog.gateway.viewer.secret_masks import SecretMask
from stenolog.transfer.export.code_blocks import ColourBudget
from stenolog.transfer.export.tool_views import (
    MAX_OPEN_LINES,
    MAX_PREVIEW_LINES,
    ToolBlock,
    diff_text,
)

_MAX_PREVIEW: Final = 4_000
"""Maximum number of characters that are shown of a long text before it is unfolded."""
_TICKS: Final = {"done": "☑", "active": "◐", "open": "☐"}
_COPY: Final = Markup('<button type="button" class="copy-code" data-copy="block">copy</button>')
_FRAME: Final = Markup('<div class="block {}"><div class="label">{}</div>{}{}</div>\n')
_STATES: Final = {"done": "done", "active": "in progress", "open": "open"}


def blocks_html(
    blocks: Sequence[ToolBlock],
    label: str,
    colours: ColourBudget,
    mask: SecretMask,
    *,
    copy: bool,
) -> Markup:
    """Return blocks as HTML, with copy buttons if `copy`. `label` names arguments or result."""
    button = _COPY if copy else Markup()
    made = []
    for number, block in enumerate(blocks):
        told = mask.cover(block.label) or _label(block, label, first=number == 0)
        shown = _shown(block, colours, mask)
        made.append(_FRAME.format(block.kind, told, button, shown))
    return Markup().join(made)


def _label(block: ToolBlock, label: str, *, first: bool) -> str:
    if first:
        return {"shell": "Command", "checklist": "Steps"}.get(block.kind, label)
    return "More" if block.kind == "json" else ""


def _shown(block: ToolBlock, colours: ColourBudget, mask: SecretMask) -> Markup:
    match block.kind:
        case "diff":
            return _diff(block, mask)
        case "checklist":
            return _checklist(block, mask)
        case "shell":
            inner = _code(block.text, "bash", colours, mask)
            return Markup('<pre class="shell">{}</pre>').format(inner)
    language = "json" if block.kind == "json" else block.language
    return _folded(block.text, language, colours, mask)


def _diff(block: ToolBlock, mask: SecretMask) -> Markup:
    # Masked as one text: a private key has several lines.
    texts = mask.hide("\n".join(line.text for line in block.lines)).split("\n")
    if len(texts) != len(block.lines):
        text = mask.hide(diff_text(block.lines))
        return mask.buttons(Markup('<pre class="diff">{}</pre>').format(text))
    row = Markup('<span class="{}"><i>{}</i>{}\n</span>')
    rows = Markup().join(
        row.format("hunk" if line.kind == "head" else line.kind, line.sign, text)
        for line, text in zip(block.lines, texts, strict=True)
    )
    return mask.buttons(Markup('<pre class="diff">{}</pre>{}').format(rows, _omitted(block)))


def _checklist(block: ToolBlock, mask: SecretMask) -> Markup:
    row = Markup('<li class="{}"><span role="img" aria-label="{}">{}</span> {}</li>\n')
    rows = Markup().join(
        row.format(item.state, _STATES[item.state], _TICKS[item.state], mask.hide(item.text))
        for item in block.items
    )
    return mask.buttons(Markup('<ul class="checklist">{}</ul>{}').format(rows, _omitted(block)))


def _omitted(block: ToolBlock) -> Markup:
    if not block.omitted:
        return Markup()
    noun = "more item" if block.kind == "checklist" else "more line"
    return Markup('<p class="cut">{}</p>').format(plural(block.omitted, noun))


def _folded(text: str, language: str, colours: ColourBudget, mask: SecretMask) -> Markup:
    """Return a text; of a long one the start, and the rest folded below its length."""
    text = text.rstrip("\n")
    count = text.count("\n") + 1
    if count <= MAX_OPEN_LINES and len(text) <= 2 * _MAX_PREVIEW:
        return Markup("<pre>{}</pre>").format(_code(text, language, colours, mask))
    shown = mask.hide(text)
    end = mask.end_before(shown, _preview_end(shown))
    start, rest = shown[:end].removesuffix("\n"), shown[end:]
    length = plural(count, "line") if count > 1 else plural(len(text), "character")
    folded = Markup(
        '<pre>{}</pre><details class="rest"><summary>{} · show all</summary><pre>{}</pre></details>'
    ).format(_hidden_code(start, language, colours), length, rest)
    return mask.buttons(folded)


def _preview_end(text: str) -> int:
    """Return the end of the first lines of a text."""
    end = 0
    for _ in range(MAX_PREVIEW_LINES):
        found = text.find("\n", end, _MAX_PREVIEW)
        if found < 0:
            return end or _MAX_PREVIEW
        end = found + 1
    return end


def _code(text: str, language: str, colours: ColourBudget, mask: SecretMask) -> Markup:
    return mask.buttons(_hidden_code(mask.hide(text), language, colours))


def _hidden_code(text: str, language: str, colours: ColourBudget) -> Markup:
    return coloured(text, language, colours) if language else Markup("{}").format(text)
