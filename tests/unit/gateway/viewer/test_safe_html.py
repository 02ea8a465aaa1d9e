"""Messages are shown as readable HTML that runs nothing and loads nothing."""

import html
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenolog.gateway.viewer.safe_html import (
    MAX_RENDERED,
    coloured_code,
    cover_secrets,
    is_picture_url,
    masked_html,
    preview,
    to_html,
)

_PICTURE = "data:image/png;base64,iVBORw0KGgo="
_ACTS = re.compile(r"<(script|style|iframe|object|svg|form|input|meta|base|link)|\son\w+\s*=")
_SIGNS = "<>\"'`[]()!&/=: \n\tascriptonerrjvx#|-*_~\\"


def _acting(made: str) -> list[str]:
    """The tags that would do something; what stands in quotes is no part of a tag."""
    tags = re.findall(r"<[^>]*>", re.sub(r'"[^"]*"', '""', made).lower())
    return [tag for tag in tags if _ACTS.search(tag)]


def test_markdown_is_rendered() -> None:
    made = to_html("# Title\n\n*a* **b** `c` ~~d~~\n\n- one\n\n|x|y|\n|-|-|\n|1|2|")
    for tag in ("<h1>Title</h1>", "<em>a</em>", "<code>c</code>", "<s>d</s>", "<li>", "<td>1</td>"):
        assert tag in made


@pytest.mark.parametrize(
    ("text", "address", "shown"),
    [
        (
            "See https://a.example/b_c_d, please",
            "https://a.example/b_c_d",
            "https://a.example/b_c_d",
        ),
        ("(at https://a.example/x)", "https://a.example/x", "https://a.example/x"),
        ("http://a.example/x_(y)?a=1&b=2.", "http://a.example/x_(y)?a=1&b=2", None),
        ("<https://a.example/>", "https://a.example/", "https://a.example/"),
        ("[https://a.example/x](https://b.example/)", "https://b.example/", "https://a.example/x"),
        ("- [ ] do https://a.example/", "https://a.example/", "https://a.example/"),
    ],
)
def test_address_in_text_becomes_one_link(text: str, address: str, shown: str | None) -> None:
    made = to_html(text)
    [link] = re.findall(r'<a href="([^"]*)" rel="[^"]*">([^<]*)</a>', made)
    assert html.unescape(link[0]) == address
    assert html.unescape(link[1]) == (shown or address)


@pytest.mark.parametrize(
    "text",
    [
        "`https://a.example/`",
        "```\nhttps://a.example/\n```",
        "xhttps://a.example/",
        "javascript:alert(1) file:///etc/passwd",
        "https://",
    ],
)
def test_other_text_is_not_a_link(text: str) -> None:
    assert "<a" not in to_html(text)


def test_many_brackets_after_an_address_are_cut_in_bounded_time() -> None:
    assert to_html("https://a.example/" + ")" * 50_000).count("<a") == 1


def test_table_columns_keep_their_alignment() -> None:
    made = to_html("|a|b|c|\n|:-|:-:|-:|\n|1|2|3|")
    assert '<th class="center">b</th>' in made
    assert '<td class="right">3</td>' in made
    assert "style" not in made


def test_code_is_coloured_by_its_language() -> None:
    made = to_html("```python\ndef f(): return 'x'\n```")
    assert '<span class="k">def</span>' in made
    assert "def" in to_html("```no-such-language\ndef f()\n```")
    assert "<span" not in coloured_code("<b>" * 9_000, "html")


@pytest.mark.quick(6)
@pytest.mark.parametrize(
    "text",
    [
        "<script>alert(1)</script>",
        "<img src=x onerror=alert(1)>",
        "```html\n<script>alert(1)</script>\n```",
        '```"><script>\nx\n```',
        "[x](javascript:alert(1))",
        "[x](JaVaScRiPt:alert(1))",
        "[x](data:text/html;base64,PHNjcmlwdD4=)",
        "[x](vbscript:x)",
        "<javascript:alert(1)>",
        "![x](javascript:alert(1))",
        "![x](data:image/svg+xml;base64,PHN2Zz4=)",
        '![x](https://evil.example/"onerror=alert(1))',
        '[x](https://a.example "t\\" onclick=alert(1)")',
        "[x]: javascript:alert(1)\n\n[x]",
    ],
)
def test_hostile_markdown_renders_without_active_content(text: str) -> None:
    made = to_html(text)
    assert _acting(made) == []
    for address in re.findall(r'(?:href|src)="([^"]*)"', made):
        assert address.startswith(("https://", "http://", "mailto:"))


@given(st.text(alphabet=st.sampled_from(_SIGNS), max_size=80))
def test_no_text_renders_as_an_active_tag(text: str) -> None:
    assert _acting(to_html(text)) == []


def test_html_tags_in_messages_are_shown_as_text() -> None:
    assert to_html("a <b>bold</b> <i>word</i>") == (
        "<p>a &lt;b&gt;bold&lt;/b&gt; &lt;i&gt;word&lt;/i&gt;</p>\n"
    )
    assert "&lt;table&gt;" in to_html("<table><tr><td>x</td></tr></table>")


def test_only_embedded_pictures_are_shown() -> None:
    assert f'<img src="{_PICTURE}"' in to_html(f"![a]({_PICTURE})")
    made = to_html("![a cat](https://elsewhere.example/cat.png)")
    assert "<img" not in made
    assert 'href="https://elsewhere.example/cat.png"' in made
    assert "noreferrer" in made
    assert not is_picture_url("data:image/svg+xml;base64,PHN2Zz4=")
    assert not is_picture_url(7)


def test_very_long_text_is_cut_and_not_rendered() -> None:
    made = to_html("<b>" + "x" * MAX_RENDERED)
    assert made.startswith('<pre class="plain">&lt;b&gt;')
    assert "3 more characters" in made


def test_lone_surrogates_are_replaced() -> None:
    assert "a?b" in to_html("a\ud800b")


def test_no_part_of_a_secret_is_in_a_preview() -> None:
    secret = "ghp_" + "A1b2C3d4" * 5
    for length in range(60, 130):
        shown = preview("a" * length + f" {secret} " + "b " * 100)
        assert secret[:8] not in shown
        assert len(shown) <= 120
    for length in range(300, 400):
        for space in ("\n    ", "\t\t", " "):
            shown = preview("below" + length * space + " " + secret + " end")
            assert shown == "below •••••• end"


def test_control_sequences_are_removed_from_covered_texts() -> None:
    assert cover_secrets("a \x1b[1mbold\x1b[0m\x07 \u202etitle") == "a bold title"


def test_no_text_is_lost_after_a_closing_quote_in_another_encoding() -> None:
    text = "He said “stop” and the rest.".encode().decode("latin-1")
    assert "and the rest." in masked_html(text)
