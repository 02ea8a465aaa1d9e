"""Tests that code is coloured only by lexers that no input makes slow, in viewer and terminal."""

import json
import re
import signal
from collections.abc import Iterable, Iterator

import pytest
from pygments.lexers import get_lexer_by_name
from rich.console import Console

from stenolog import InMemoryStore
from stenolog.cli.show import MessageRenderer
from stenolog.cli.terminal_markdown import Block, MarkdownStream, render_block
from stenolog.gateway.viewer.message_views import message_views
from stenolog.gateway.viewer.safe_html import MAX_COLOURED_ON_PAGE, coloured_code, to_html
from stenolog.transfer.export.code_blocks import (
    LANGUAGES,
    MAX_COLOURED,
    MAX_COLOURED_IN_MESSAGE,
    ColourBudget,
    find_lexer,
)
from support.resource_limits import run_limited

_STARTS = (
    *("", "a", "0", "'", '"', '"""', "'''", "/*", "//", "<", "</", "<a ", "<!--", "{", "${", "$("),
    *("`", "#", "@", "(", "[", "class ", "def ", "f'", "import ", "from ", "a = ", "a:", "- "),
    *("|\n ", "<<A\n", "func ", "fn ", "let ", "select ", 'r#"', "<script>", "<style>", "@media "),
    *("%", "\\", "0x", "1e", "a<", "&", "+++ ", "@@ ", "[a]\n", "--- "),
)
_REPEATED = (
    *("a", "A", "0", "_", " ", "\t", "\n", '"', "'", "`", "/", "*", "\\", "<", "(", "[", "{", ":"),
    *("=", "#", "$", "@", "-", "\t\n", " \n", "a ", "a.", ".A", "'\\", '"\\', "\\'", "<:", "/*"),
    *("/@", "{}", "()", "[[", "${", "a=", "a:", ": ", "- ", "*@", "+%", "\\\n", "a\n", "é", "\r"),
)


def _hostile() -> Iterator[str]:
    """Yield inputs of 2,000 characters for which the slowest lexers of Pygments need minutes."""
    for start in _STARTS:
        for repeated in _REPEATED:
            yield (start + repeated * MAX_COLOURED)[:MAX_COLOURED]


def _attack(lexer: str, inputs: Iterable[str]) -> None:
    for text in inputs:
        # Limit of CPU seconds for this input, after which the process ends. The slowest allowed
        # lexer needs a tenth of a second, the others minutes or hours.
        signal.setitimer(signal.ITIMER_PROF, 2)
        assert coloured_code(text, lexer)


@pytest.mark.parametrize("lexer", sorted(set(LANGUAGES.values())))
def test_no_input_makes_an_allowed_lexer_slow(lexer: str) -> None:
    get_lexer_by_name(lexer)  # imported before the fork
    inputs = list(_hostile())[::17]
    run_limited(lambda: _attack(lexer, inputs), cpu=60)


@pytest.mark.full
@pytest.mark.parametrize("lexer", sorted(set(LANGUAGES.values())))
def test_no_hostile_input_at_all_makes_an_allowed_lexer_slow(lexer: str) -> None:
    get_lexer_by_name(lexer)
    run_limited(lambda: _attack(lexer, _hostile()), cpu=300)


@pytest.mark.parametrize("language", ["easytrieve", "csharp", "autoit", "nit", "gherkin", "adl"])
def test_languages_outside_the_list_are_shown_without_colours(language: str) -> None:
    text = f"```{language}\n{'	' * 2_500}x\n```"

    def show() -> None:
        assert "<span" not in to_html(text)
        assert "x" in "".join(_in_terminal(text))

    run_limited(show, cpu=20)
    assert find_lexer(language, "x") == ""


def test_long_code_is_shown_without_colours() -> None:
    assert "<span" in coloured_code("x = 1\n", "python")
    assert "<span" not in coloured_code("x = 1\n" * 400, "python")
    short, long = (_in_terminal(f"```python\n{'x = 1;' * count}\n```") for count in (3, 400))
    assert any("\x1b[" in line for line in short)
    assert not any("\x1b[" in line for line in long)


def test_code_in_one_message_is_coloured_up_to_a_total_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    block = f"```python\n{'x = 1;' * 300}\n```\n\n"
    coloured_blocks = MAX_COLOURED_IN_MESSAGE // len("x = 1;" * 300 + "\n")
    text = block * 40

    pieces = to_html(text).split("</pre>")[:-1]
    assert sum("<span" in piece for piece in pieces) == coloured_blocks
    assert len(pieces) == 40
    assert "<span" in to_html(block)

    monkeypatch.setenv("TERM", "xterm-256color")
    page = MessageRenderer(color=True)
    with InMemoryStore() as store:
        store.add_message("k", "assistant", text)
        [said] = store.get_history("k")
    lines = [line for line in page.message_lines(said) if "=" in line]
    assert lines[0] != lines[-1]
    assert lines[0] == lines[len(lines) * (coloured_blocks - 1) // 40]


def test_code_on_one_page_is_coloured_up_to_a_total_length() -> None:
    code = "x = 1;" * 300
    text = f"```python\n{code}\n```\n\n" * 10
    arguments = json.dumps({"path": "x" * 1_900})
    call = {"id": "c", "function": {"name": "read_file", "arguments": arguments}}
    with InMemoryStore() as store:
        for _ in range(30):
            store.add_message("k", "assistant", text)
            store.add_full_message("k", {"role": "assistant", "tool_calls": [call]})
        page = message_views(store.get_history("k"))
    blocks = [piece for one in page for piece in one.html.split("</pre>")[:-1]]
    calls = [call.arguments for one in page for call in one.calls]
    assert (len(blocks), len(calls)) == (300, 30)
    coloured_blocks = sum("<span" in block for block in blocks)
    coloured_calls = sum("<span" in call for call in calls)
    total = coloured_blocks * len(code + "\n") + coloured_calls * len(arguments)
    assert MAX_COLOURED_ON_PAGE - 2 * MAX_COLOURED < total <= MAX_COLOURED_ON_PAGE
    # The newest blocks have colours, because a page opens at its end.
    assert ("<span" in blocks[0], "<span" in page[-2].html) == (False, True)
    assert ("<span" in calls[0], "<span" in calls[-1]) == (False, True)


def test_an_answer_in_the_chat_is_coloured_up_to_a_total_length() -> None:
    console = Console(width=80, force_terminal=True, color_system="standard")
    budget = ColourBudget()
    block = Block(source=f"```python\n{'x = 1;' * 300}\n```")
    shown = [render_block(block, console, colour_budget=budget) for _ in range(40)]
    plain = render_block(block, console, colour_budget=ColourBudget(0))
    assert shown[0] != plain
    assert shown[-1] == plain


@pytest.mark.quick(4)
@pytest.mark.parametrize("name", sorted(LANGUAGES))
def test_every_allowed_name_is_coloured_in_viewer_and_terminal(name: str) -> None:
    # In each language, one of these has a colour.
    code = '<a b="c">1</a>\n{"a": [1, true]}\n+ select 1 # "x"\nkey = 1\nlet x: y = "z"\n'
    assert "<span" in coloured_code(code, name)
    assert "<span" in coloured_code(code, name.upper())
    assert any("\x1b[" in line for line in _in_terminal(f"```{name} title=x\n{code}```"))


def test_the_first_word_after_the_fence_names_the_language() -> None:
    assert find_lexer(' Python title="a b"', "x") == "python"
    assert find_lexer("", "x") == find_lexer("   ", "x") == ""
    assert find_lexer("pythonx", "x") == ""


def _in_terminal(text: str) -> list[str]:
    console = Console(width=80, force_terminal=True, color_system="standard")
    stream = MarkdownStream()
    blocks = [*stream.add(text), *stream.end()]
    lines = [line for block in blocks for line in render_block(block, console)]
    return [re.sub(r"\x1b\[(?:0|40|49)?m", "", line) for line in lines]
