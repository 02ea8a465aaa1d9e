"""No tag of a message is one in the Markdown that it is exported as."""

import json
import re

from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from stenolog.transfer.export.formats import Part, _details_element, _escape_prose, _part_markdown

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
    assert _tags(_escape_prose(text)) == []


def test_html_in_tool_names_is_escaped() -> None:
    assert _tags(_details_element("<img src=4 onerror=x>", "done")) == []


def _call(name: str, arguments: object) -> str:
    return _part_markdown(Part(kind="call", name=name, text=json.dumps(arguments)))


def test_calls_are_written_by_the_shape_of_their_arguments() -> None:
    edit = {"file_path": "a_b.py", "old_string": "x = 1", "new_string": "x = 2"}
    assert _call("Edit", edit) == (
        "<details><summary>Edit a_b.py</summary>\n\n"
        "a\\_b.py\n\n```diff\n-x = 1\n+x = 2\n```\n\n</details>"
    )
    assert "```sh\nls -l\n```" in _call("Bash", {"command": "ls -l"})
    assert "```py\nx = 1\n\n```" in _call("Write", {"path": "a.py", "content": "x = 1\n"})
    steps = [{"step": "Look *here*", "status": "completed"}, {"step": "Do", "status": "pending"}]
    assert "- [x] Look \\*here\\*\n- [ ] Do" in _call("update_plan", {"plan": steps})


def test_html_in_arguments_is_escaped() -> None:
    tag = "<img src=4 onerror=x>"
    for arguments in (
        {"command": f"```\n{tag}"},
        {"path": tag, "old_string": tag, "new_string": f"```\n{tag}"},
        {"todos": [{"content": tag, "status": "done"}]},
        {tag: f"a\n{tag}"},
        {tag: tag},
    ):
        assert _tags(_call(tag, arguments)) == []
