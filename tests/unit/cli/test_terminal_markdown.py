"""Markdown in pieces: cut where blocks end, nothing lost, nothing of it obeyed by the terminal."""

import random
import re
from typing import Any

import markdown_it
import pytest
from rich.console import Console

from stenolog.cli.terminal_markdown import Block, MarkdownStream, render_block

PAGE = """\
# Title

Some *text* with `code`:
- one
- two
  - nested

1. first
1. second

> quoted

| a | b |
|---|---|
| 1 | 2 |

```python
x = 1

y = 2
```

<div>tags are text</div>

[1]: https://example.org

The **end
"""


def shown(blocks: list[Block], width: int = 60) -> list[str]:
    console = Console(width=width, color_system=None)
    return [line.rstrip() for block in blocks for line in render_block(block, console)]


def in_pieces(text: str, *, seed: int) -> list[Block]:
    chance = random.Random(seed)
    stream, blocks = MarkdownStream(), list[Block]()
    while text:
        size = chance.randint(1, 9)
        blocks += stream.add(text[:size])
        text = text[size:]
    return blocks + stream.end()


@pytest.mark.parametrize("seed", range(8))
def test_rendering_does_not_depend_on_chunks(seed: int) -> None:
    assert shown(in_pieces(PAGE, seed=seed)) == shown(in_pieces(PAGE, seed=100))


def test_markdown_page_is_rendered() -> None:
    assert shown(in_pieces(PAGE, seed=1)) == [
        "Title",
        "",
        "Some text with code:",
        " • one",
        " • two",
        "    • nested",
        "",
        " 1 first",
        " 2 second",
        "",
        "▌ quoted",
        "",
        " a  b",
        " ────",
        " 1  2",
        "",
        " x = 1",
        "",
        " y = 2",
        "",
        "<div>tags are text</div>",
        "",
        "[1]: https://example.org",
        "",
        "The **end",
    ]


PARTS = (
    "W ", "W\n", "\n", "# W\n", "- W\n", "  - W\n", "1. W\n", "3) W\n", "> W\n", "```py\nW\n",
    "```\n", "    W\n", "| W | W |\n", "|---|---|\n", "---\n", "**W** ", "*W", "`W` ",
    "[W](http://W) ", "<W> ", "<div>W</div>\n", "W\n===\n", "[W]: http://W\n", "- [ ] W\n",
    "![W](W) ", "\x1b[31mW\n", "\r\nW",
)  # fmt: skip


def test_rendering_shows_every_word_once() -> None:
    for seed in range(250):
        chance = random.Random(seed)
        text = "".join(chance.choices(PARTS, k=20))
        count = text.count("W")
        for number in range(count):
            text = text.replace("W", f"w{number}x", 1)
        found = re.sub(r"\s", "", "".join(shown(in_pieces(text, seed=seed))))
        assert [n for n in range(count) if found.count(f"w{n}x") != 1] == [], text


def test_finished_blocks_are_returned_once_and_the_last_is_pending() -> None:
    stream = MarkdownStream()
    assert stream.add("one\n\ntw") == []
    assert [block.source for block in stream.add("o\n\nthree")] == ["one"]
    assert shown(stream.unfinished) == ["", "two", "", "three"]
    assert [block.source for block in stream.end()] == ["two", "three"]
    assert stream.end() == []


def test_item_numbers_continue_after_a_split_list() -> None:
    stream = MarkdownStream()
    blocks = stream.add("1. a\n1. b\n1. c\n")
    blocks += stream.add("1. d\n\nafter\n") + stream.end()
    assert shown(blocks) == [" 1 a", " 2 b", " 3 c", " 4 d", "", "after"]


def test_long_code_is_returned_while_it_is_written() -> None:
    stream = MarkdownStream()
    code = "".join(f"def f{n}():\n    return {n}\n\n" for n in range(30))
    blocks = stream.add("\n```python\n")
    for line in code.splitlines(keepends=True):
        blocks += stream.add(line)
    assert len(blocks) >= 1
    assert len(stream.unfinished[0].source.splitlines()) < 60
    blocks += stream.add("```\n") + stream.end()
    lines = [line for line in shown(blocks) if line]
    assert lines == [f" {line}" for line in code.splitlines() if line]


def test_answer_cannot_control_the_terminal() -> None:
    blocks = in_pieces("\x1b]0;title\x07a \x1b[31mred\x1b[0m \x9b2Jb [x](\x1b[2Jhttp://e)", seed=3)
    assert re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", "\n".join(shown(blocks))) is None


def test_target_of_a_link_is_shown() -> None:
    assert shown(in_pieces("[home](https://example.org/x)", seed=1)) == [
        "home (https://example.org/x)"
    ]


def test_image_is_shown_as_its_text_and_address() -> None:
    assert shown(in_pieces("See ![a lake](https://example.org/l.png) here", seed=1)) == [
        "See [image: a lake] (https://example.org/l.png) here"
    ]


def test_line_ends_are_kept() -> None:
    assert shown(in_pieces("roses\nviolets\n", seed=1)) == ["roses", "violets"]


def line_by_line(text: str) -> tuple[list[Block], MarkdownStream]:
    stream, blocks = MarkdownStream(), list[Block]()
    for line in text.splitlines(keepends=True):
        blocks += stream.add(line)
    return blocks, stream


LONG = {
    "paragraph": ("", "words {} here\n", ["words {} here"]),
    "quote": ("", "> words {}\n", ["▌ words {}"]),
    "lazy quote": ("> first\n", "words {}\n", ["▌ words {}"]),
    "item": ("- top\n", "  - words {}\n", ["    • words {}"]),
    "numbered": ("7. top\n", "   - words {}\n", ["    • words {}"]),
    "far item": ("- top\n", "  - words {}\n\n", ["    • words {}"]),
    "lazy item": ("- top\n", "words {}\n", ["   words {}"]),
    "indented": ("", "    words {}\n", [" words {}"]),
    "code of an item": ("- ```\n", "  words {}\n", ["    words {}"]),
    "code of a quote": ("> ```\n", "> words {}\n", ["▌  words {}"]),
}


@pytest.mark.parametrize("kind", LONG)
def test_long_block_is_complete_at_its_end_and_only_its_last_lines_are_laid_out_before(
    kind: str,
) -> None:
    opening, line, looks = LONG[kind]
    blocks, stream = line_by_line(opening + "".join(line.format(n) for n in range(1_000)))
    assert blocks == []
    preview = shown(stream.unfinished)
    assert len(preview) < 500
    assert "words 999" in "".join(preview)
    blocks += stream.add("\n# After\n") + stream.end()
    lines = [line for line in shown(blocks) if line]
    expected = [look.format(n) for n in range(1_000) for look in looks]
    assert [line for line in lines if "words" in line and line not in expected] == []
    assert [line for line in lines if "words" in line] == expected
    assert shown(blocks)[-2:] == ["", "After"]
    assert sum("•" in line for line in lines if "words" not in line) <= 1


def test_long_table_is_one_table() -> None:
    rows = "".join(f"| r{n} | x |\n" for n in range(1_000))
    blocks, stream = line_by_line(f"| left | right |\n|---|---|\n{rows}")
    lines = shown(blocks + stream.end())
    assert re.findall(r"r\d+", "\n".join(lines)) == [f"r{n}" for n in range(1_000)]
    assert sum("left" in line and "right" in line for line in lines) == 1


def test_number_at_the_start_of_a_line_of_a_long_item_is_kept() -> None:
    blocks, stream = line_by_line("- top\n" + "".join(f"  {n} apples\n" for n in range(1_000)))
    found = re.findall(r"(\d+) apples", "\n".join(shown(blocks + stream.end())))
    assert found == [str(n) for n in range(1_000)]


def test_code_received_at_once_ends_at_its_fence() -> None:
    blocks, stream = line_by_line("")
    blocks += stream.add("```\n" + "words\n" * 300 + "```\n")
    blocks += stream.add("\nafter\n") + stream.end()
    assert shown(blocks)[-2:] == ["", "after"]
    assert len([line for line in shown(blocks) if line == " words"]) == 300
    assert len(blocks) == 2


def test_long_block_is_not_parsed_again_for_each_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read: list[int] = []
    parse = markdown_it.MarkdownIt.parse

    def counted(self: markdown_it.MarkdownIt, source: str) -> Any:
        read.append(source.count("\n"))
        return parse(self, source)

    monkeypatch.setattr(markdown_it.MarkdownIt, "parse", counted)
    line_by_line("> some words\n" * 4_000)
    assert sum(read) < 40 * 4_000


@pytest.mark.quick(5)
@pytest.mark.parametrize("width", [20, 40, 80])
@pytest.mark.parametrize("depth", [1, 5, 12, 19, 20, 21, 60])
@pytest.mark.parametrize("mark", ["> ", "- ", "> - "])
def test_deeply_nested_text_is_shown(mark: str, depth: int, width: int) -> None:
    text = f"{mark}begin\n{mark * depth}deep\n"
    found = re.sub(r"\s", "", "".join(shown(in_pieces(text, seed=1), width)))
    assert "begin" in found
    assert "deep" in found


def test_carriage_returns_shift_no_block() -> None:
    text = "a\rb\r\r\r\n\nsecond\r\n\r\n- third\r\r\n- fourth\n\nlast\n"
    for seed in range(20):
        assert shown(in_pieces(text, seed=seed)) == [
            *("ab", "", "second", "", " • third", " • fourth", "", "last")
        ]


def test_line_of_unusual_spaces_is_rendered() -> None:
    for space in ("\xa0", "\u2003", "\x0c", "\x1c"):
        blocks, stream = line_by_line(f"{space}\n")
        assert shown(blocks + stream.add("\nafter\n") + stream.end())[-1] == "after"
