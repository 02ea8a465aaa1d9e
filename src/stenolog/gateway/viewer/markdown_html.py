"""Convert Markdown from messages to safe HTML with coloured code.

There are three independent defences. The Markdown parser treats HTML as text. nh3 removes all tags
and attributes that are not explicitly allowed. The content security policy of the pages blocks
foreign scripts and addresses.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, Any, Final

from markupsafe import Markup, escape

from stenolog.transfer.export.code_blocks import (
    MAX_COLOURED_IN_MESSAGE,
    ColourBudget,
    colour_language,
)

if TYPE_CHECKING:
    # These modules are imported on first use, because a list of sessions does not need them.
    from markdown_it import MarkdownIt
    from markdown_it.renderer import RendererHTML
    from markdown_it.rules_core import StateCore
    from markdown_it.token import Token

MAX_RENDERED: Final = 100_000
"""Maximum number of characters that are rendered. Longer text is shown as plain text and cut."""
_MAX_CACHED_LENGTH: Final = 20_000
MAX_COLOURED_ON_PAGE: Final = 50_000
"""Maximum number of characters of code that are coloured on one page."""

_PICTURE_URL: Final = re.compile(r"data:image/(?:png|jpeg|gif|webp);base64,[A-Za-z0-9+/=\s]*")
_LINK_URL: Final = re.compile(r"(?:https?://|mailto:)[^\s\x00-\x1f]+", re.IGNORECASE)
_ALLOWED_TAGS: Final = {
    *("a", "blockquote", "br", "code", "del", "em", "hr", "img", "li", "ol", "p", "pre", "s"),
    *("h1", "h2", "h3", "h4", "h5", "h6", "span", "strong", "ul"),
    *("table", "tbody", "td", "th", "thead", "tr"),
}
_ALLOWED_ATTRIBUTES: Final = {
    "a": {"href", "title"},
    "code": {"class"},
    "img": {"src", "alt", "title"},
    "ol": {"start"},
    "span": {"class"},
    "td": {"class"},
    "th": {"class"},
}
_BARE_ADDRESS: Final = re.compile(r"(?<!\w)https?://[^\s<>\"'`]{1,2000}", re.IGNORECASE)
"""An address in plain text. Punctuation at the end of the address is removed later."""
_ALIGNMENTS: Final = {"text-align:right": "right", "text-align:center": "center"}
"""Class names of the alignments that the Markdown parser writes as styles."""
_TASK_BOXES: Final = {"[ ] ": "☐", "[x] ": "☑", "[X] ": "☑"}
_CLASS_NAMES: Final = re.compile(r"[A-Za-z0-9_+#. -]{1,60}")


def is_picture(address: object) -> bool:
    """Return whether an address is a data URL of a picture. Other pictures are never loaded."""
    return isinstance(address, str) and _PICTURE_URL.fullmatch(address) is not None


def is_address(address: object) -> bool:
    """Return whether an address may be used as a link."""
    return isinstance(address, str) and _LINK_URL.fullmatch(address) is not None


def to_html(text: str, budget: ColourBudget | None = None) -> Markup:
    """Return Markdown as safe HTML.

    `budget` is the remaining colour budget of the page that shows the text.
    """
    # Lone surrogates cannot be encoded as UTF-8.
    text = text.encode(errors="replace").decode()
    if len(text) > MAX_RENDERED:
        return _plain_html(text)
    budget = budget or ColourBudget()
    limit = min(budget.left, MAX_COLOURED_IN_MESSAGE)  # guard: colour-page
    html, coloured = (_render_cached if len(text) <= _MAX_CACHED_LENGTH else _render)(text, limit)
    budget.left -= coloured
    return html


def coloured_code(code: str, language: str, budget: ColourBudget | None = None) -> Markup:
    """Return code as HTML, coloured if `colour_language` and the page's budget allow it."""
    if budget is not None and colour_language(language, code) and not budget.take(code):
        language = ""
    return Markup(_coloured_block(code, language, ""))


@lru_cache(maxsize=2_048)
def _render_cached(text: str, limit: int) -> tuple[Markup, int]:
    return _render(text, limit)


def _render(text: str, limit: int) -> tuple[Markup, int]:
    """Return the HTML and the number of coloured characters of code, at most `limit`."""
    import nh3

    parser = _parser()
    try:
        tokens = parser.parse(text)
        budget = ColourBudget(limit)
        for token in tokens:
            if colour_language(token.info, token.content) and not budget.take(token.content):
                token.info = ""
        html: str = parser.renderer.render(tokens, parser.options, {})
    except RecursionError:
        return _plain_html(text), 0
    cleaned = nh3.clean(
        html,
        tags=_ALLOWED_TAGS,
        attributes=_ALLOWED_ATTRIBUTES,
        attribute_filter=_filter_attribute,
        url_schemes={"http", "https", "mailto", "data"},
        link_rel="noopener noreferrer nofollow",
    )
    return Markup(cleaned), limit - budget.left


def _plain_html(text: str) -> Markup:
    start = text[:MAX_RENDERED]
    omitted_count = len(text) - len(start)
    notice = Markup('<p class="cut">{:,} more characters are not shown.</p>').format(omitted_count)
    return Markup('<pre class="plain">{}</pre>').format(start) + (notice if omitted_count else "")


def _filter_attribute(tag: str, attribute: str, value: str) -> str | None:
    """Return the value of an attribute, or None if the attribute must be removed."""
    match tag, attribute:
        case "a", "href":
            return value if is_address(value) else None
        case "img", "src":
            return value if is_picture(value) else None
        case _, "class":
            return value if _CLASS_NAMES.fullmatch(value) else None
    return value


def _coloured_block(code: str, language: str, attributes: str) -> str:
    """Return the inner HTML of a code block. The Markdown parser calls this function."""
    del attributes
    lexer = colour_language(language, code)
    if not lexer:
        return str(escape(code))
    return str(_highlighter(lexer)(code))


@cache
def _highlighter(language: str) -> Callable[[str], Any]:
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import get_lexer_by_name

    lexer, formatter = get_lexer_by_name(language), HtmlFormatter(nowrap=True)
    return partial(highlight, lexer=lexer, formatter=formatter)


def _render_image(
    self: "RendererHTML", tokens: "Sequence[Token]", index: int, options: Any, env: Any
) -> str:
    """Render an embedded picture as an image, and any other picture only as a link."""
    token = tokens[index]
    source = str(token.attrGet("src") or "")
    alt_text = self.renderInlineAsText(token.children, options, env)
    if is_picture(source):  # guard: no-remote-images
        return str(Markup('<img src="{}" alt="{}">').format(source, alt_text))
    label = alt_text or source
    return str(Markup('<a href="{}">🖼 {}</a>').format(source, label))


def _add_links_and_tasks(state: "StateCore") -> None:
    """Add links to addresses in plain text, boxes of task lists, and alignment of columns."""
    last_types: list[str] = ["", ""]
    for token in state.tokens:
        if token.type in ("th_open", "td_open"):
            class_name = _ALIGNMENTS.get(str(token.attrs.pop("style", "")))
            if class_name:
                token.attrs["class"] = class_name
        elif token.type == "inline" and token.children:
            if last_types == ["list_item_open", "paragraph_open"]:
                token.children = [*_task_box(token.children[0]), *token.children]
            token.children = list(_with_links(token.children, state.md))
        last_types = [last_types[1], token.type]


def _task_box(first: "Token") -> "list[Token]":
    box = _TASK_BOXES.get(first.content[:4]) if first.type == "text" else None
    if box is None:
        return []
    first.content = first.content[4:]
    return [type(first)("task", "span", 0, content=box)]


def _render_task(
    self: "RendererHTML", tokens: "Sequence[Token]", index: int, options: Any, env: Any
) -> str:
    del self, options, env
    return f'<span class="task">{tokens[index].content}</span> '


def _with_links(tokens: "Sequence[Token]", parser: "MarkdownIt") -> "Iterator[Token]":
    """Return the tokens with a link around each address that is not yet in a link."""
    depth = 0
    for token in tokens:
        depth += token.nesting if token.type in ("link_open", "link_close") else 0
        if token.type != "text" or depth:
            yield token
            continue
        end, new_token = 0, type(token)
        for match in _BARE_ADDRESS.finditer(token.content):
            address = _without_punctuation(match[0])
            target = parser.normalizeLink(address)
            if not is_address(target):
                continue
            yield new_token("text", "", 0, content=token.content[end : match.start()])
            yield new_token("link_open", "a", 1, attrs={"href": target})
            yield new_token("text", "", 0, content=address)
            yield new_token("link_close", "a", -1)
            end = match.start() + len(address)
        yield new_token("text", "", 0, content=token.content[end:])


def _without_punctuation(address: str) -> str:
    """Remove punctuation and closing brackets that belong to the sentence around an address."""
    while address and (
        address[-1] in ".,;:!?*_~|"
        or (address[-1] == ")" and address.count(")") > address.count("("))
        or (address[-1] == "]" and address.count("]") > address.count("["))
    ):
        address = address[:-1]
    return address


@cache
def _parser() -> "MarkdownIt":
    from markdown_it import MarkdownIt

    # guard: markdown-no-html
    parser = MarkdownIt("commonmark", {"html": False, "highlight": _coloured_block, "breaks": True})
    parser.enable(["table", "strikethrough"])
    parser.add_render_rule("image", _render_image)
    parser.add_render_rule("task", _render_task)
    parser.core.ruler.push("links_and_tasks", _add_links_and_tasks)
    return parser
