"""Texts of messages as safe HTML: Markdown with coloured code, and covered secrets.

There are three independent defences. The Markdown parser treats HTML as text. nh3 removes all tags
and attributes that are not explicitly allowed. The content security policy of the pages allows only
the viewer's own scripts, and blocks requests to other servers.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache, partial
from secrets import randbelow
from typing import TYPE_CHECKING, Any, Final

from markupsafe import Markup, escape

from stenolog.redaction.redact import find_secrets, line_start, printable
from stenolog.transfer.export.code_blocks import (
    MAX_COLOURED_IN_MESSAGE,
    ColourBudget,
    find_lexer,
)
from stenolog.transfer.export.tool_views import one_line

if TYPE_CHECKING:
    # These modules are imported on first use, because a list of sessions does not need them.
    from markdown_it import MarkdownIt
    from markdown_it.renderer import RendererHTML
    from markdown_it.rules_core import StateCore
    from markdown_it.token import Token

MAX_RENDERED: Final = 100_000
"""Maximum number of characters of Markdown to render. Longer text is shown as plain text, cut."""
_MAX_CACHED_LENGTH: Final = 20_000
"""Maximum number of characters of a text whose HTML and secrets are cached."""
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
_CLASS_NAMES: Final = re.compile(r"[A-Za-z0-9_+#. -]{1,60}")


def is_picture_url(address: object) -> bool:
    """Return whether an address is a data URL of a picture. Other pictures are never loaded."""
    return isinstance(address, str) and _PICTURE_URL.fullmatch(address) is not None


def is_link_address(address: object) -> bool:
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
    render = _render_cached if len(text) <= _MAX_CACHED_LENGTH else _render
    html, coloured_count = render(text, limit)
    budget.left -= coloured_count
    return html


def coloured_code(code: str, language: str, budget: ColourBudget | None = None) -> Markup:
    """Return code as HTML, coloured if `find_lexer` and the page's budget allow it."""
    if budget is not None and find_lexer(language, code) and not budget.take(code):
        language = ""
    return Markup(_coloured_block(code, language, ""))


def _render(text: str, max_coloured: int) -> tuple[Markup, int]:
    """Return the HTML and the number of coloured characters of code, at most `max_coloured`."""
    import nh3

    parser = _markdown_parser()
    try:
        tokens = parser.parse(text)
        budget = ColourBudget(max_coloured)
        for token in tokens:
            if find_lexer(token.info, token.content) and not budget.take(token.content):
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
    return Markup(cleaned), max_coloured - budget.left


_render_cached: Final = lru_cache(maxsize=2_048)(_render)


def _plain_html(text: str) -> Markup:
    start = text[:MAX_RENDERED]
    omitted_count = len(text) - len(start)
    notice = Markup('<p class="cut">{:,} more characters are not shown.</p>').format(omitted_count)
    return Markup('<pre class="plain">{}</pre>').format(start) + (notice if omitted_count else "")


def _filter_attribute(tag: str, attribute: str, value: str) -> str | None:
    """Return the value of an attribute, or None if the attribute must be removed."""
    match tag, attribute:
        case "a", "href":
            return value if is_link_address(value) else None
        case "img", "src":
            return value if is_picture_url(value) else None
        case _, "class":
            return value if _CLASS_NAMES.fullmatch(value) else None
    return value


def _coloured_block(code: str, language: str, attributes: str) -> str:
    """Return the inner HTML of a code block. The Markdown parser determines the parameters."""
    del attributes
    lexer = find_lexer(language, code)
    return str(_highlighter(lexer)(code) if lexer else escape(code))


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
    if is_picture_url(source):  # guard: no-remote-images
        return str(Markup('<img src="{}" alt="{}">').format(source, alt_text))
    return str(Markup('<a href="{}">🖼 {}</a>').format(source, alt_text or source))


def _add_links_and_alignment(state: "StateCore") -> None:
    """Add links to addresses in plain text, and alignment to columns."""
    for token in state.tokens:
        if token.type in ("th_open", "td_open"):
            class_name = _ALIGNMENTS.get(str(token.attrs.pop("style", "")))
            if class_name:
                token.attrs["class"] = class_name
        elif token.type == "inline" and token.children:
            token.children = list(_with_links(token.children, state.md))


def _with_links(tokens: "Sequence[Token]", parser: "MarkdownIt") -> "Iterator[Token]":
    """Yield the tokens, with a link around each address that is not yet in a link."""
    depth = 0
    for token in tokens:
        depth += token.nesting if token.type in ("link_open", "link_close") else 0
        if token.type != "text" or depth:
            yield token
            continue
        position, token_type = 0, type(token)
        for match in _BARE_ADDRESS.finditer(token.content):
            address = _without_punctuation(match[0])
            target = parser.normalizeLink(address)
            if not is_link_address(target):
                continue
            yield token_type("text", "", 0, content=token.content[position : match.start()])
            yield token_type("link_open", "a", 1, attrs={"href": target})
            yield token_type("text", "", 0, content=address)
            yield token_type("link_close", "a", -1)
            position = match.start() + len(address)
        yield token_type("text", "", 0, content=token.content[position:])


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
def _markdown_parser() -> "MarkdownIt":
    from markdown_it import MarkdownIt

    # guard: markdown-no-html
    parser = MarkdownIt("commonmark", {"html": False, "highlight": _coloured_block, "breaks": True})
    parser.enable(["table", "strikethrough"])
    parser.add_render_rule("image", _render_image)
    parser.core.ruler.push("links_and_alignment", _add_links_and_alignment)
    return parser


# --- secrets ----------------------------------------------------------------------------------
# Secrets on a page are covered until they are clicked, so that a shared screen does not show them.
# A cover is no access control: the page contains the secrets. Exports are redacted instead.


_PREVIEW_SOURCE_LENGTH: Final = 2_000
"""Number of characters of a text in one line from which its preview is made."""
_MAX_SEARCHED: Final = 1_000_000
"""Maximum number of characters on one page that are searched for secrets.

Further texts are covered as a whole.
"""
# A placeholder consists only of digits, because the lexers of JSON and TOML split other words.
_NONCE: Final = str(10**19 + randbelow(10**19))
"""Random number in placeholders, so that no message can contain a placeholder."""
_TAG_OR_PLACEHOLDER: Final = re.compile(
    rf'<(?:[^<>"]|"[^"]*")*+>|{_NONCE}(?P<number>\d{{6}})', re.ASCII
)
_PLACEHOLDER: Final = re.compile(rf"{_NONCE}\d{{6}}", re.ASCII)
COVER_TEXT: Final = "••••••"
_find_secrets_cached: Final = lru_cache(maxsize=1_024)(find_secrets)
_SECRET_BUTTON: Final = Markup(
    '<button type="button" class="secret" data-secret="{}" data-kind="{}" aria-pressed="false" '
    'title="Show this {}">{} {}</button>'
)


class SecretMask:
    """The secrets of one page. A disabled mask returns texts unchanged."""

    def __init__(self, *, enabled: bool = True) -> None:
        self._secrets: list[tuple[str, str]] = []
        """Text and kind of each secret."""
        self._enabled = enabled
        self._characters_left = _MAX_SEARCHED

    def with_placeholders(self, text: str) -> str:
        """Return the text with a placeholder for each secret. Rendering keeps placeholders.

        Control sequences are removed.
        """
        text = printable(text)
        if not self._enabled:
            return text
        if len(text) > self._characters_left:
            return self._add_secret(text, "unsearched text")
        self._characters_left -= len(text)
        pieces, position = list[str](), 0
        find = _find_secrets_cached if len(text) <= _MAX_CACHED_LENGTH else find_secrets
        for secret in find(text):
            kind = secret.stub.strip("\"'").removeprefix("[redacted: ").removesuffix("]")
            secret_text = text[secret.start : secret.end]
            pieces += [text[position : secret.start], self._add_secret(secret_text, kind)]
            position = secret.end
        return "".join([*pieces, text[position:]]) if pieces else text

    def _add_secret(self, text: str, kind: str) -> str:
        """Store a secret and return its placeholder."""
        self._secrets.append((text, kind))
        return f"{_NONCE}{len(self._secrets) - 1:06}"

    def cut_position(self, text: str, end: int) -> int:
        """Return where to cut the text: at `end`, or before a placeholder that `end` splits."""
        start = text.rfind(_NONCE, 0, end + len(_NONCE))
        match = _PLACEHOLDER.match(text, start) if start >= 0 else None
        return end if match is None or match.end() <= end else start

    def cover(self, text: str) -> str:
        """Return the text with secrets covered, for places that cannot have a button."""
        return _PLACEHOLDER.sub(COVER_TEXT, self.with_placeholders(text))

    def preview(self, text: str) -> str:
        """Return the start of the text in one line, with secrets covered."""
        source = line_start(text, _PREVIEW_SOURCE_LENGTH)
        return one_line(self.cover(source))  # guard: preview-covered

    def with_buttons(self, html: Markup) -> Markup:
        """Replace placeholders in text by buttons that show the secret, and in attributes by dots.

        `html` must be well-formed: attributes are quoted, and `<` in text is escaped.
        """
        if _NONCE not in html:
            return html
        return Markup(_TAG_OR_PLACEHOLDER.sub(self._button_or_cover, str(html)))

    def _button_or_cover(self, match: re.Match[str]) -> str:
        if match["number"] is None:
            return _PLACEHOLDER.sub(COVER_TEXT, match[0])
        secret, kind = self._secrets[int(match["number"])]
        return str(_SECRET_BUTTON.format(secret, kind, kind, kind, COVER_TEXT))


def cover_secrets(text: str) -> str:
    """Return one line, such as a title, with its secrets covered."""
    return SecretMask().cover(text)


def preview(text: str) -> str:
    """Return the start of a text in one line, with its secrets covered."""
    return SecretMask().preview(text)


def masked_html(text: str) -> Markup:
    """Return Markdown as safe HTML with its secrets covered."""
    mask = SecretMask()
    return mask.with_buttons(to_html(mask.with_placeholders(text)))
