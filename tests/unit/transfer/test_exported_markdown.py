"""No tag of a message is one in the Markdown that it is exported as."""

import re

from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from stenolog.transfer.export.markdown_export import _details, _prose

PIECES = [
    "<img src=1 onerror=x>",
    "\\",
    "`",
    "``",
    "```",
    "\n",
    " ",
    "a",
    "<b>",
    "<!--",
    "-->",
    "&lt;",
]


def _tags(text: str) -> list[str]:
    shown = MarkdownIt("commonmark", {"html": True}).render(text)
    return re.findall(r"<(?:img|b\b|!--)", shown)


@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
def test_html_in_messages_is_escaped(text: str) -> None:
    assert _tags(_prose(text)) == []


def test_html_in_tool_names_is_escaped() -> None:
    assert _tags(_details("<img src=4 onerror=x>", "done")) == []
