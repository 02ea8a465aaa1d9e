"""`steno show`: Markdown and tools in a terminal, the pager, anchors, and JSON."""

import json
import re
from pathlib import Path

import pytest

from stenolog.catalog.message_metadata import PROGRAM_FIELDS
from stenolog.stores.open_store import open_store
from stenolog.transfer.transcripts.programs import PROGRAMS
from stenolog.transfer.transcripts.transcript import record_field_name
from support.cli import InTerminal, Steno
from support.tool_samples import CODING, fill_tools

pytestmark = pytest.mark.usefixtures("place")

KEY = "telegram:123"
COMPACTED = "claude-code:20c7a18b-7d9d-457e-bc34-7dfb461f0515"
MOMENT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")
LOCAL = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d [A-Z]+")
STYLE = re.compile(r"\x1b\[[0-9;]*m")


def _golden(text: str) -> str:
    return MOMENT.sub("TIME", text)


# --- one message, and those around it --------------------------------------------------------


def test_anchor_shows_a_message_with_those_around_it_hidden_ones_too(steno: Steno) -> None:
    with open_store("workspace") as store:
        for number in range(1, 31):
            store.add_message("long", "user", f"number {number}")
        store.checkpoint("long", summary="Short.", upto=12)
    result = steno("show", "long:14")
    assert (result.exit_code, result.stderr) == (0, "")
    heads = re.findall(r"(?m)^\[(\d+)\] user · TIME(.*)$", _golden(result.stdout))
    assert [int(seq) for seq, _ in heads] == list(range(9, 20))
    assert [rest for _, rest in heads] == [" · hidden"] * 4 + [""] * 7
    assert "Summary" not in result.stdout


@pytest.mark.parametrize("key", ["long", "telegram:5", "a:b:c"])
def test_show_accepts_the_anchors_of_search(steno: Steno, key: str) -> None:
    with open_store("workspace") as store:
        store.add_messages(key, [{"role": "user", "content": f"needle {n}"} for n in range(9)])
    [line] = steno("search", "needle 7", "--json").stdout.splitlines()
    anchor = json.loads(line)["anchor"]
    assert anchor == f"{key}:8"
    shown = steno("show", anchor)
    assert shown.exit_code == 0
    assert "needle 7" in shown.stdout
    assert "needle 1\n" not in shown.stdout


def test_existing_key_takes_precedence_over_an_anchor(steno: Steno) -> None:
    with open_store("workspace") as store:
        store.add_message(f"{KEY}:2", "user", "a session of its own")
    assert "a session of its own" in steno("show", f"{KEY}:2").stdout


# --- JSON ------------------------------------------------------------------------------------


def test_json_has_the_messages_exactly_as_they_were_given(steno: Steno) -> None:
    given = {"role": "user", "content": "a\x1b[31m\u202eb\ud800", "z": [1.5, None]}
    with open_store("workspace") as store:
        store.add_full_message("k", given)
        store.set_meta("k", title="Named")
    result = steno("show", "k", "--json")
    assert "\x1b" not in result.stdout
    found = json.loads(result.stdout)
    assert (found["key"], found["title"], found["count"]) == ("k", "Named", 1)
    assert [one["message"] for one in found["messages"]] == [given]
    hidden = json.loads(steno("show", KEY, "--json", "--all").stdout)
    assert [one["hidden"] for one in hidden["messages"]] == [True, True, False, False]
    assert hidden["summary"] == "They counted to two."
    listed = json.loads(steno("list", "--prefix", KEY, "--json").stdout)
    assert hidden["title"] == listed["title"] == "message 1"


# --- in a terminal ---------------------------------------------------------------------------


def test_tool_calls_have_formatted_blocks_in_a_terminal(
    place: Path, in_terminal: InTerminal
) -> None:
    fill_tools(place / "workspace")
    _, shown = in_terminal("show", CODING, LINES="9999", NO_COLOR="1")
    assert "→ Bash cd /srv/app && python -m pytest -q\n" in shown
    assert '→ Edit /srv/app/harbour/invoice.py\n def total(rows):\n-    """Return' in shown
    assert "+    result = Decimal(0)\n" in shown
    assert "→ apply_patch harbour/tides.py\n*** Begin Patch\n" in shown
    assert "☑ Read the failing test\n◐ Round in one place\n☐ Run all tests\n" in shown
    assert "CENT = Decimal('0.01')" in shown
    assert "line 11\n… 1,489 more lines; use --tools to show them\n" in shown
    _, coloured = in_terminal("show", CODING, LINES="9999")
    assert "\x1b[32m+    result = Decimal(0)\x1b[0m" in coloured
    assert "\x1b[31m-    result = 0\x1b[0m" in coloured
    assert "\x1b[31mExit code 1\x1b[0m" in coloured
    _, whole = in_terminal("show", CODING, "--tools", LINES="9999", NO_COLOR="1")
    assert "$ seq 1 1500\n" in whole
    assert "line 1500\n" in whole


def test_results_are_shown_with_the_name_of_their_tool(in_terminal: InTerminal) -> None:
    with open_store("workspace") as store:
        call = {"id": "c1", "function": {"name": "Bash", "arguments": "{}"}}
        store.add_full_message("k", {"role": "assistant", "tool_calls": [call]})
        result = {"role": "tool", "tool_call_id": "c1", "content": "x"}
        store.add_full_message("k", {**result, "stenolog": {"seconds": 2.0, "failed": True}})
        store.add_full_message("k", {"role": "tool", "name": "Gr\x07ep", "content": "y"})
    _, shown = in_terminal("show", "k", NO_COLOR="1")
    text = LOCAL.sub("TIME", shown)
    assert "[2] tool Bash · TIME · 2.0 s · failed\nx\n" in text
    assert "[3] tool Grep · TIME\ny\n\n" in text


def test_inline_code_has_no_background(in_terminal: InTerminal) -> None:
    with open_store("workspace") as store:
        store.add_message("k", "user", "Use `pip list` now")
    _, shown = in_terminal("show", "k", NO_COLOR="", TERM="xterm-256color")
    assert "\x1b[1;36mpip list\x1b[0m" in shown


def test_message_of_unknown_format_is_shown_in_a_terminal(in_terminal: InTerminal) -> None:
    strange: list[dict[str, object]] = [
        {},
        {"role": 7, "content": 1.5, "tool_calls": "none"},
        {"content": {"a": None}, "tool_calls": [1, {"function": {"name": 3}}]},
        {"role": "assistant", "stenolog": 5, "reasoning": {"x": 1}},
        {"role": "\x1b[2J", "content": "\x1b]0;t\x07> \u202equote", "tool_calls": [{}]},
        {"role": "tool", "content": "\x1b[2Jcleared", "\x1b[1mname": "\u202e\x9b31mvalue"},
        {"role": "assistant", "content": "x", "reasoning": "\x1b[31mred"},
    ]
    with open_store("workspace") as store:
        store.add_messages("k", strange)
    code, shown = in_terminal("show", "k", LINES="9999", NO_COLOR="1")
    assert code == 0
    assert not {"\x1b", "\x07", "\u202e"} & set(shown)
    assert [int(seq) for seq in re.findall(r"(?m)^\[(\d+)\]", shown)] == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.slow
def test_output_longer_than_the_screen_is_paged(
    place: Path, in_terminal: InTerminal, steno: Steno
) -> None:
    pager = place / "pager"
    pager.write_text("#!/bin/sh\necho PAGED\nexec cat\n")
    pager.chmod(0o755)
    named = {"PAGER": str(pager), "LINES": "12", "NO_COLOR": "1"}
    with open_store("workspace") as store:
        for number in range(9):
            store.add_message("long", "user", f"number {number}")
    code, shown = in_terminal("show", "long", **named)
    assert code == 0
    assert shown.startswith("PAGED\n[1] user")
    assert [f"number {number}\n" in shown for number in range(9)] == [True] * 9
    assert "PAGED" not in in_terminal("show", KEY, **named)[1]
    assert "PAGED" not in steno("show", "long").stdout


def test_leaving_the_pager_early_exits_with_0(place: Path, in_terminal: InTerminal) -> None:
    pager = place / "pager"
    pager.write_text("#!/bin/sh\nhead -1\n")
    pager.chmod(0o755)
    with open_store("workspace") as store:
        store.add_messages("long", [{"role": "user", "content": "x" * 900}] * 2_000)
    code, shown = in_terminal("show", "long", PAGER=str(pager), NO_COLOR="1")
    assert code == 0
    assert "Traceback" not in shown
    assert shown.count("\n") < 5


def test_original_records_of_all_programs_are_known() -> None:
    assert set(map(record_field_name, PROGRAMS)) == PROGRAM_FIELDS


# --- forks ------------------------------------------------------------------------------------


def test_name_of_the_source_cannot_control_the_terminal(steno: Steno) -> None:
    with open_store("workspace") as store:
        store.add_message("k", "user", "hello")
        store.set_meta("k", transcript={"forked_from": "a\x1b[2J\nb", "forked_after": "id"})
    shown = steno("show", "k").stdout
    assert "\x1b" not in shown
    assert shown.startswith("forked from a\\x1b[2J\\nb\n\n[1] user")
