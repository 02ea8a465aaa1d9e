"""What was said, as HTML that a page may hold: Markdown, coloured code, and nothing that acts.

Three walls stand one behind the other. The Markdown parser takes no HTML, so that tags are text.
What it makes is cleaned by a list of tags and attributes. And the pages' own policy lets no script
run and no address be loaded that is not the gateway's.
"""

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

import nh3
from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token
from markdown_it.utils import EnvType, OptionsDict
from markupsafe import Markup, escape
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name

from stenolog.sessions.exporting.fences import (
    MAX_COLOURED_IN_MESSAGE,
    ColourBudget,
    colour_language,
)

LONGEST: Final = 100_000
"""What is longer is shown as plain text, and cut here."""
_LONGEST_KEPT: Final = 20_000
MAX_COLOURED_ON_PAGE: Final = 50_000
"""Maximum number of characters of code that are coloured on one page."""

_PICTURE: Final = re.compile(r"data:image/(?:png|jpeg|gif|webp);base64,[A-Za-z0-9+/=\s]*")
_ADDRESS: Final = re.compile(r"(?:https?://|mailto:)[^\s\x00-\x1f]+", re.IGNORECASE)
_TAGS: Final = {
    *("a", "blockquote", "br", "code", "del", "em", "hr", "img", "li", "ol", "p", "pre", "s"),
    *("h1", "h2", "h3", "h4", "h5", "h6", "span", "strong", "ul"),
    *("table", "tbody", "td", "th", "thead", "tr"),
}
_ATTRIBUTES: Final = {
    "a": {"href", "title"},
    "code": {"class"},
    "img": {"src", "alt", "title"},
    "ol": {"start"},
    "span": {"class"},
}
_CLASS: Final = re.compile(r"[A-Za-z0-9_+#. -]{1,60}")


def is_picture(address: object) -> bool:
    """Whether an address holds a picture itself; any other one is not loaded."""
    return isinstance(address, str) and _PICTURE.fullmatch(address) is not None


def is_address(address: object) -> bool:
    """Whether an address may be a link."""
    return isinstance(address, str) and _ADDRESS.fullmatch(address) is not None


def to_html(text: str, page: ColourBudget | None = None) -> Markup:
    """Markdown as HTML that can do nothing but be read.

    `page`: what may still be coloured on the page that the text is for.
    """
    # Half a character cannot be sent.
    text = text.encode(errors="replace").decode()
    if len(text) > LONGEST:
        return _plain(text)
    page = page or ColourBudget()
    most = min(page.left, MAX_COLOURED_IN_MESSAGE)  # guard: colour-page
    made, used = (_kept if len(text) <= _LONGEST_KEPT else _made)(text, most)
    page.left -= used
    return made


def coloured(code: str, language: str, page: ColourBudget | None = None) -> Markup:
    """Return code as HTML, coloured if `colour_language` and the page's budget allow it."""
    if page is not None and colour_language(language, code) and not page.take(code):
        language = ""
    return Markup(_coloured(code, language, ""))


@lru_cache(maxsize=2_048)
def _kept(text: str, most: int) -> tuple[Markup, int]:
    return _made(text, most)


def _made(text: str, most: int) -> tuple[Markup, int]:
    """Return the HTML, and how many characters of code, at most `most`, are coloured in it."""
    try:
        tokens = _PARSER.parse(text)
        budget = ColourBudget(most)
        for token in tokens:
            if colour_language(token.info, token.content) and not budget.take(token.content):
                token.info = ""
        made: str = _PARSER.renderer.render(tokens, _PARSER.options, {})
    except RecursionError:
        return _plain(text), 0
    cleaned = nh3.clean(
        made,
        tags=_TAGS,
        attributes=_ATTRIBUTES,
        attribute_filter=_checked,
        url_schemes={"http", "https", "mailto", "data"},
        link_rel="noopener noreferrer nofollow",
    )
    return Markup(cleaned), most - budget.left


def _plain(text: str) -> Markup:
    cut = text[:LONGEST]
    left = len(text) - len(cut)
    more = Markup('<p class="cut">{:,} more characters are not shown here.</p>').format(left)
    return Markup('<pre class="plain">{}</pre>').format(cut) + (more if left else "")


def _checked(tag: str, attribute: str, value: str) -> str | None:
    """The value of an attribute; None where it may not stand there."""
    match tag, attribute:
        case "a", "href":
            return value if is_address(value) else None
        case "img", "src":
            return value if is_picture(value) else None
        case _, "class":
            return value if _CLASS.fullmatch(value) else None
    return value


def _coloured(code: str, language: str, attributes: str) -> str:
    """Return the inside of a code block; called by the Markdown parser."""
    del attributes
    lexer = colour_language(language, code)
    if not lexer:
        return str(escape(code))
    return str(highlight(code, get_lexer_by_name(lexer), _FORMATTER))


def _image(
    self: RendererHTML, tokens: Sequence[Token], index: int, options: OptionsDict, env: EnvType
) -> str:
    """A picture that is in the text itself is shown; of any other only the address is told."""
    token = tokens[index]
    source = str(token.attrGet("src") or "")
    words = self.renderInlineAsText(token.children, options, env)
    if is_picture(source):  # guard: no-remote-images
        return str(Markup('<img src="{}" alt="{}">').format(source, words))
    shown = words or source
    return str(Markup('<a href="{}">🖼 {}</a>').format(source, shown))


def _parser() -> MarkdownIt:
    # guard: markdown-no-html
    made = MarkdownIt("commonmark", {"html": False, "highlight": _coloured, "breaks": True})
    made.enable(["table", "strikethrough"])
    made.add_render_rule("image", _image)
    return made


_FORMATTER: Final[Any] = HtmlFormatter(nowrap=True)
_PARSER: Final = _parser()
