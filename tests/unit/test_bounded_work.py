"""Tests that no input makes the process slow or large: work grows linearly with the input.

The limits of CPU time are many times what linear work needs, and a fraction of what quadratic work
would need.
"""

import sys
from collections.abc import Callable, Mapping
from typing import Any, Literal

import pytest

from stenolog import InMemoryStore
from stenolog.catalog import message_search, query, searchable_text, tokenizer
from stenolog.cli.output import printable
from stenolog.cli.show import MessageRenderer
from stenolog.cli.terminal_markdown import MarkdownStream
from stenolog.gateway.responses import without_secrets
from stenolog.gateway.viewer.export_page import export_pieces
from stenolog.gateway.viewer.message_views import message_views, pretty_json
from stenolog.gateway.viewer.safe_html import MAX_RENDERED, SecretMask, to_html
from stenolog.memory.evidence import is_related, shares_enough_words, unsupported_details
from stenolog.memory.facts import Fact, is_supported
from stenolog.providers.request_errors import error_message
from stenolog.redaction.redact import SharingRedactor, redact
from stenolog.settings.values import mask_secrets
from stenolog.tokens import estimate
from stenolog.transfer.export.code_blocks import ColourBudget
from stenolog.transfer.export.tool_views import one_line
from support.resource_limits import MB, run_limited


@pytest.mark.parametrize(
    "text",
    [
        "a" * 2_000_000,
        "a.b-" * 500_000,
        "http://h/?" + "a" * 2_000_000,
        "http://h/?" + "pass" * 500_000,
        "x://" * 500_000,
        "a:b@" * 500_000,
        "pg://u:p@h/?" + "key" * 300_000 + "=" * 300_000,
    ],
    ids=lambda text: text[:12],
)
def test_cleaning_an_error_takes_linear_time(text: str) -> None:
    run_limited(lambda: (without_secrets(text, None), mask_secrets(text)), cpu=30)


@pytest.mark.parametrize("tag", ["<style", "<style>", "<script></", "<", "<!-"])
def test_reading_an_error_page_takes_linear_time(tag: str) -> None:
    run_limited(lambda: error_message(tag * 300_000), cpu=30)


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("<title> </title><h1>Bad gateway</h1><p>try later</p>", "Bad gateway try later"),
        (
            "<STYLE>b { }</style><TITLE class=x>502 Bad gateway</TITLE><p>later",
            "502 Bad gateway later",
        ),
        ("<title>Error</title><pre>Cannot POST /chat</pre>", "Error Cannot POST /chat"),
        ("a < b", "a < b"),
        ("a <b", "a <b"),
    ],
)
def test_text_of_an_error_page_is_kept(page: str, words: str) -> None:
    assert error_message(page) == words


@pytest.mark.parametrize(
    "unit",
    ["a", "a.", "A-", "1", "1,", "a@", "a:", "/", "a/", "://", "+", "_", "é", "A'"],
    ids=repr,
)
def test_checking_a_note_takes_linear_time(unit: str) -> None:
    text = (unit * 200_000)[:200_000]

    def check() -> None:
        unsupported_details(text, ["said"])
        unsupported_details("Likes 5 teas", [text])
        is_supported(Fact(text="The bank is near Oslo", quote="my bank"), [f"my bank {text}"])

    run_limited(check, cpu=20)


@pytest.mark.parametrize("unit", ["\u0301\u0327", "\uff9e\u0301", "\u0344\u0327"], ids=ascii)
def test_normalizing_a_text_of_marks_takes_linear_time(unit: str) -> None:
    text = unit * 150_000

    def normalize() -> None:
        tokenizer.token_lines(text)
        tokenizer.split_words(text)
        is_supported(Fact(text=f"my bank {text}", quote="my bank"), [f"my bank {text}"])

    run_limited(normalize, cpu=20)


def test_comparing_many_words_of_a_note_takes_linear_time() -> None:
    heard = " ".join(f"{number:x}" for number in range(40_000))
    fact = " ".join(f"g{number:x}" for number in range(40_000))
    run_limited(lambda: (shares_enough_words(fact, [heard]), is_related(fact, heard)), cpu=20)


@pytest.mark.parametrize("unit", ["`", "``a", "`a``b```c", "[", "**", "\\", "![", "<", "https://"])
@pytest.mark.parametrize("form", ["markdown", "html"])
def test_an_export_takes_linear_time(form: Literal["markdown", "html"], unit: str) -> None:
    with InMemoryStore() as store:
        store.add_message("k", "user", (unit * 4_000_000)[:4_000_000])
        info, history = store.info("k"), store.get_history("k")
    clean = SharingRedactor(enabled=False)
    run_limited(lambda: sum(map(len, export_pieces(form, info, history, clean))), cpu=30)


NESTED = {
    "one deep list": "[" * 270_000 + "]" * 270_000,
    "many deep lists": "[" + ",".join(["[" * 190 + "]" * 190] * 1_200) + "]",
    "many deep objects": "[" + ",".join(['{"a":' * 150 + "1" + "}" * 150] * 400) + "]",
    "one long text": '{"a":"' + "\\u0000" * 100_000 + '"}',
}


def _formatted(value: Any) -> str:
    return pretty_json(value, ColourBudget(), SecretMask(enabled=False))


@pytest.mark.parametrize("name", NESTED)
def test_tool_result_is_cut_before_it_is_formatted(name: str) -> None:
    run_limited(lambda: _formatted(NESTED[name]), cpu=30, memory=150 * MB)


def test_arguments_of_a_tool_are_cut_before_they_are_formatted() -> None:
    deep: Any = 1
    for _ in range(180):
        deep = [deep]
    value = {"a": [deep] * 2_000}

    def show() -> None:
        assert len(_formatted(value)) < 2 * MAX_RENDERED

    run_limited(show, cpu=30, memory=150 * MB)


def test_cut_result_has_a_mark() -> None:
    assert _formatted([1] * MAX_RENDERED).endswith("… cut")
    assert _formatted("x" * (MAX_RENDERED + 1)).endswith("… cut")
    assert "cut" not in _formatted([1, 2])


# --- doubled inputs --------------------------------------------------------------------------


def _calls(work: Callable[[], object]) -> int:
    """Count the calls of Python and C functions that the work makes."""
    count = 0

    def counted(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(counted)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


def _show_in_terminal(text: str) -> None:
    with InMemoryStore() as store:
        store.add_message("k", "assistant", text)
        for message in store.get_history("k"):
            list(MessageRenderer(color=True).message_lines(message))


def _show_in_viewer(text: str) -> None:
    with InMemoryStore() as store:
        store.add_message("k", "assistant", text)
        message_views(store.get_history("k"))


def _stream(text: str) -> None:
    stream = MarkdownStream()
    stream.add(text)
    stream.end()


def _snippet(text: str) -> None:
    message_search.make_snippet(text, query.parse_query("needle a*"))


READERS: Mapping[str, Callable[[str], object]] = {
    "viewer": _show_in_viewer,
    "html": to_html,
    "terminal": _show_in_terminal,
    "stream": _stream,
    "snippet": _snippet,
    "title": lambda text: searchable_text.title_from({"title": text}, text),
    "text": lambda text: searchable_text.text_of({"role": "tool", "content": text}),
    "words": tokenizer.token_lines,
    "line": one_line,
    "printable": printable,
    "redact": redact,
    "tokens": estimate,
}
UNITS = (
    *("a", "a ", "\n", "- a\n\n1. b\n\n", "> ", "* ", "`", "```\n", "[", "[a](", "*a_", "|a|\n"),
    *("|a|\n|-|\n", "<a", "\\", "&amp;", "\x1b[", "needle ", "東", "# a\n", "1. ", "~~", "!["),
)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("unit", UNITS, ids=repr)
def test_number_of_calls_grows_linearly_with_the_text(reader: str, unit: str) -> None:
    read = READERS[reader]
    read("warm up *this* and `that`")
    small, large = ((unit * size)[:size] for size in (1_500, 3_000))
    first = _calls(lambda: read(small))
    assert _calls(lambda: read(large)) <= 2.5 * first + 3_000
