"""HTML of the blocks of tool calls and results."""

from collections.abc import Sequence
from typing import Final

from markupsafe import Markup

from stenolog.gateway.viewer.formatting import plural
from stenolog.gateway.viewer.markdown_html import coloured_code
from stenolog.gateway.viewer.secret_masks import SecretMask
from stenolog.transfer.export.code_blocks import ColourBudget
from stenolog.transfer.export.tool_views import (
    MAX_OPEN_LINES,
    MAX_PREVIEW_LINES,
    ToolBlock,
    diff_text,
)

_MAX_PREVIEW_LENGTH: Final = 4_000
"""Maximum number of characters that are shown of a long text while it is folded."""
_BOXES: Final = {"done": "☑", "active": "◐", "open": "☐"}
_BUTTON: Final = Markup('<button type="button" class="copy-code" data-copy="block">copy</button>')
_BLOCK_FRAME: Final = Markup('<div class="block {}"><div class="label">{}</div>{}{}</div>\n')
_STATES: Final = {"done": "done", "active": "in progress", "open": "open"}


def blocks_html(
    blocks: Sequence[ToolBlock], label: str, colours: ColourBudget, mask: SecretMask, *, copy: bool
) -> Markup:
    """Return blocks as HTML. `label` names arguments or result; `copy` adds copy buttons."""
    button = _BUTTON if copy else Markup()
    html_blocks = []
    for number, block in enumerate(blocks):
        block_label = mask.cover(block.label) or _block_label(block, label, first=number == 0)
        content = _block_html(block, colours, mask)
        html_blocks.append(_BLOCK_FRAME.format(block.kind, block_label, button, content))
    return Markup().join(html_blocks)


def _block_label(block: ToolBlock, label: str, *, first: bool) -> str:
    if first:
        return {"shell": "Command", "checklist": "Steps"}.get(block.kind, label)
    return "More" if block.kind == "json" else ""


def _block_html(block: ToolBlock, colours: ColourBudget, mask: SecretMask) -> Markup:
    match block.kind:
        case "diff":
            return _diff_html(block, mask)
        case "checklist":
            return _checklist_html(block, mask)
        case "shell":
            code = _code_html(block.text, "bash", colours, mask)
            return Markup('<pre class="shell">{}</pre>').format(code)
    language = "json" if block.kind == "json" else block.language
    return _folded_html(block.text, language, colours, mask)


def _diff_html(block: ToolBlock, mask: SecretMask) -> Markup:
    # The lines are masked as one text, because a private key has several lines.
    texts = mask.hide("\n".join(line.text for line in block.lines)).split("\n")
    if len(texts) != len(block.lines):
        text = mask.hide(diff_text(block.lines))
        return mask.buttons(Markup('<pre class="diff">{}</pre>').format(text))
    row = Markup('<span class="{}"><i>{}</i>{}\n</span>')
    rows = Markup().join(
        row.format("hunk" if line.kind == "head" else line.kind, line.sign, text)
        for line, text in zip(block.lines, texts, strict=True)
    )
    return mask.buttons(Markup('<pre class="diff">{}</pre>{}').format(rows, _omitted_html(block)))


def _checklist_html(block: ToolBlock, mask: SecretMask) -> Markup:
    row = Markup('<li class="{}"><span role="img" aria-label="{}">{}</span> {}</li>\n')
    rows = Markup().join(
        row.format(item.state, _STATES[item.state], _BOXES[item.state], mask.hide(item.text))
        for item in block.items
    )
    return mask.buttons(
        Markup('<ul class="checklist">{}</ul>{}').format(rows, _omitted_html(block))
    )


def _omitted_html(block: ToolBlock) -> Markup:
    if not block.omitted:
        return Markup()
    noun = "more item" if block.kind == "checklist" else "more line"
    return Markup('<p class="cut">{}</p>').format(plural(block.omitted, noun))


def _folded_html(text: str, language: str, colours: ColourBudget, mask: SecretMask) -> Markup:
    """Return a text as HTML. A long text shows only its start; the rest can be unfolded."""
    text = text.rstrip("\n")
    count = text.count("\n") + 1
    if count <= MAX_OPEN_LINES and len(text) <= 2 * _MAX_PREVIEW_LENGTH:
        return Markup("<pre>{}</pre>").format(_code_html(text, language, colours, mask))
    masked_text = mask.hide(text)
    end = mask.end_before(masked_text, _preview_end(masked_text))
    start, rest = masked_text[:end].removesuffix("\n"), masked_text[end:]
    length = plural(count, "line") if count > 1 else plural(len(text), "character")
    html = Markup(
        '<pre>{}</pre><details class="rest"><summary>{} · show all</summary><pre>{}</pre></details>'
    ).format(_masked_code_html(start, language, colours), length, rest)
    return mask.buttons(html)


def _preview_end(text: str) -> int:
    """Return the index at which the preview of a text ends."""
    end = 0
    for _ in range(MAX_PREVIEW_LINES):
        line_end = text.find("\n", end, _MAX_PREVIEW_LENGTH)
        if line_end < 0:
            return end or _MAX_PREVIEW_LENGTH
        end = line_end + 1
    return end


def _code_html(text: str, language: str, colours: ColourBudget, mask: SecretMask) -> Markup:
    return mask.buttons(_masked_code_html(mask.hide(text), language, colours))


def _masked_code_html(text: str, language: str, colours: ColourBudget) -> Markup:
    return coloured_code(text, language, colours) if language else Markup("{}").format(text)
