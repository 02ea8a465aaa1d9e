"""`steno show`: Markdown and tools in a terminal, the pager, anchors, and JSON."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from stenolog.catalog.message_metadata import PROGRAM_FIELDS
from stenolog.stores.open_store import open_store
from stenolog.transfer.transcripts.programs import PROGRAMS
from stenolog.transfer.transcripts.transcript import record_field_name
from support.tool_samples import CODING, fill_tools
from support.transcripts import SAMPLES

Steno = Callable[..., Result]
InTerminal = Callable[..., tuple[int, str]]

pytestmark = pytest.mark.usefixtures("place")

KEY = "telegram:123"
COMPACTED = "claude-code:20c7a18b-7d9d-457e-bc34-7dfb461f0515"
MOMENT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")
LOCAL = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d [A-Z]+")
STYLE = re.compile(r"\x1b\[[0-9;]*m")


def _golden(text: str) -> str:
    return MOMENT.sub("TIME", text)


# --- one message, and those around it --------------------------------------------------------


def test_at_shows_a_message_with_those_around_it_hidden_ones_too(steno: Steno) -> None:
    with open_store("workspace") as store:
        for number in range(1, 31):
            store.add_message("long", "user", f"number {number}")
        store.checkpoint("long", summary="Short.", upto=12)
    result = steno("show", "long", "--at", "14")
    assert (result.exit_code, result.stderr) == (0, "")
    heads = re.findall(r"(?m)^\[(\d+)\] user · TIME(.*)$", _golden(result.stdout))
    assert [int(seq) for seq, _ in heads] == list(range(9, 20))
    assert [rest for _, rest in heads] == [" · hidden"] * 4 + [""] * 7
    assert "Summary" not in result.stdout


def test_embedded_image_is_shown_with_its_kind_and_size(steno: Steno) -> None:
    url = "data:image/png;base64," + "A" * 4_000
    content = [{"type": "text", "text": "look"}, {"type": "image_url", "image_url": {"url": url}}]
    with open_store("workspace") as store:
        store.add_full_message("a", {"role": "user", "content": content})
    result = steno("show", "a")
    assert "look\n[image/png, about 3,000 bytes]\n" in result.stdout
    assert url in steno("show", "a", "--json").stdout


@pytest.mark.parametrize("key", ["long", "telegram:5", "a:b:c"])
def test_show_accepts_the_anchors_of_search(steno: Steno, key: str) -> None:
    with open_store("workspace") as store:
        store.add_messages(key, [{"role": "user", "content": f"needle {n}"} for n in range(9)])
    [line] = steno("search", "needle 7", "--json").stdout.splitlines()
    anchor = json.loads(line)["anchor"]
    assert anchor == f"{key}:8"
    shown = steno("show", anchor)
    assert shown.exit_code == 0
    assert shown.stdout == steno("show", key, "--at", "8").stdout
    assert "needle 7" in shown.stdout
    assert "needle 1\n" not in shown.stdout


def test_existing_key_takes_precedence_over_an_anchor(steno: Steno) -> None:
    with open_store("workspace") as store:
        store.add_message(f"{KEY}:2", "user", "a session of its own")
    assert "a session of its own" in steno("show", f"{KEY}:2").stdout


def test_missing_message_is_reported_in_one_sentence(steno: Steno) -> None:
    for arguments in ([KEY, "--at", "9"], [f"{KEY}:9"]):
        result = steno("show", *arguments)
        assert (result.exit_code, result.stdout) == (1, "")
        assert result.stderr == f"Error: There is no message 9 in {KEY}; the last is 4.\n"
    nobody = steno("show", "nobody:7")
    assert nobody.stderr.startswith("Error: There is no session 'nobody:7' in ./workspace.")
    assert steno("show", KEY, "--at", "0").exit_code == 2


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


def test_markdown_is_laid_out_in_a_terminal_and_left_alone_in_a_pipe(
    steno: Steno, in_terminal: InTerminal
) -> None:
    said = "# Title\n\nSome **bold** words.\n\n- one\n- two"
    with open_store("workspace") as store:
        store.add_message("k", "assistant", said)
    assert said in steno("show", "k").stdout
    _, shown = in_terminal("show", "k", NO_COLOR="1")
    assert LOCAL.sub("TIME", shown) == (
        "[1] assistant · TIME\nTitle\n\nSome bold words.\n\n • one\n • two\n\n"
    )
    _, coloured = in_terminal("show", "k")
    assert "\x1b[1mbold\x1b[0m" in coloured
    assert STYLE.sub("", coloured) == shown


def test_tools_are_shortened_in_a_terminal_unless_requested(in_terminal: InTerminal) -> None:
    arguments = json.dumps({"path": "/home", "pattern": "x" * 60})
    call = {"id": "1", "type": "function", "function": {"name": "find", "arguments": arguments}}
    found = "\n".join(f"file {number}" for number in range(40))
    with open_store("workspace") as store:
        store.add_full_message("k", {"role": "assistant", "content": None, "tool_calls": [call]})
        result = {"role": "tool", "tool_call_id": "1", "content": found}
        store.add_full_message("k", {**result, "stenolog": {"seconds": 0.314}})
    _, shown = in_terminal("show", "k", NO_COLOR="1", LINES="100")
    assert '→ find(path="/home", pattern="xxxxx' in shown
    assert "x" * 60 not in shown
    assert "[2] tool find · TIME · 0.3 s\nfile 0\n" in LOCAL.sub("TIME", shown)
    assert "file 10\n… 29 more lines; use --tools to show them\n" in shown
    assert "tool_call_id" not in shown
    assert "stenolog" not in shown
    _, whole = in_terminal("show", "k", "--tools", NO_COLOR="1", LINES="100")
    assert "file 39\n" in whole
    assert "x" * 60 in whole.replace("\n", "")


def test_tool_calls_have_formatted_blocks_in_a_terminal(
    place: Path, in_terminal: InTerminal
) -> None:
    fill_tools(place / "workspace")
    _, shown = in_terminal("show", CODING, "--no-pager", NO_COLOR="1")
    assert "→ Bash cd /srv/app && python -m pytest -q\n" in shown
    assert '→ Edit /srv/app/harbour/invoice.py\n def total(rows):\n-    """Return' in shown
    assert "+    result = Decimal(0)\n" in shown
    assert "→ apply_patch harbour/tides.py\n*** Begin Patch\n" in shown
    assert "☑ Read the failing test\n◐ Round in one place\n☐ Run all tests\n" in shown
    assert "CENT = Decimal('0.01')" in shown
    assert "line 11\n… 1,489 more lines; use --tools to show them\n" in shown
    _, coloured = in_terminal("show", CODING, "--no-pager")
    assert "\x1b[32m+    result = Decimal(0)\x1b[0m" in coloured
    assert "\x1b[31m-    result = 0\x1b[0m" in coloured
    assert "\x1b[31mExit code 1\x1b[0m" in coloured
    _, whole = in_terminal("show", CODING, "--no-pager", "--tools", NO_COLOR="1")
    assert "$ seq 1 1500\n" in whole
    assert "line 1500\n" in whole


def test_show_prints_model_and_reasoning(in_terminal: InTerminal) -> None:
    body = {"role": "assistant", "content": "42", "reasoning_content": "Let me see."}
    with open_store("workspace") as store:
        store.add_full_message("k", {**body, "stenolog": {"model": "deep", "seconds": 7.5}})
    _, shown = in_terminal("show", "k", NO_COLOR="1")
    assert LOCAL.sub("TIME", shown) == "[1] assistant · TIME · deep · 7.5 s\nLet me see.\n42\n\n"


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


def test_blocks_of_anthropic_are_shown_as_calls_and_results(in_terminal: InTerminal) -> None:
    use = {"type": "tool_use", "id": "1", "name": "find", "input": {"path": "/home"}}
    said = [{"type": "thinking", "thinking": "Let me see."}, {"type": "text", "text": "Wait."}, use]
    found = "\n".join(f"file {number}" for number in range(40))
    results = [
        {"type": "tool_result", "tool_use_id": "1", "content": found},
        {"type": "tool_result", "tool_use_id": "2"},
    ]
    with open_store("workspace") as store:
        store.add_full_message("k", {"role": "assistant", "content": said})
        store.add_full_message("k", {"role": "user", "content": results})
    _, shown = in_terminal("show", "k", NO_COLOR="1", LINES="100")
    assert 'Let me see.\nWait.\n→ find(path="/home")\n' in shown
    assert "file 10\n… 29 more lines" in shown
    assert '{"type": "tool_result", "tool_use_id": "2"}\n' in shown


def test_an_image_does_not_fill_the_screen(in_terminal: InTerminal) -> None:
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 5000}}
    with open_store("workspace") as store:
        store.add_message("k", "user", [{"type": "text", "text": "look"}, part])
    _, shown = in_terminal("show", "k", NO_COLOR="1")
    assert "look\n" in shown
    assert len(shown) < 700


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
    code, shown = in_terminal("show", "k", "--no-pager", NO_COLOR="1")
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
    assert "PAGED" not in in_terminal("show", "long", "--no-pager", **named)[1]
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


@pytest.mark.parametrize("is_terminal", [True, False])
def test_original_record_of_another_program_is_not_shown(
    place: Path, steno: Steno, in_terminal: InTerminal, is_terminal: bool
) -> None:
    del place
    with open_store("workspace") as store:
        body = {"role": "user", "content": "hello", "claude_code": {"uuid": "1"}, "other": 2}
        store.add_messages("k", [body])
    if is_terminal:
        _, shown = in_terminal("show", "k", "--no-pager", NO_COLOR="1")
    else:
        shown = steno("show", "k").stdout
    assert "claude_code" not in shown
    assert "other: 2" in shown


@pytest.mark.parametrize("is_terminal", [True, False])
def test_session_of_another_program_shows_what_happened(
    steno: Steno, in_terminal: InTerminal, is_terminal: bool
) -> None:
    folder = SAMPLES / "claude-code" / "projects"
    assert steno("import", "--from", "claude-code", str(folder)).exit_code == 0

    def show(*options: str) -> str:
        if is_terminal:
            return in_terminal("show", COMPACTED, *options, "--no-pager", NO_COLOR="1")[1]
        return steno("show", COMPACTED, *options).stdout

    shown = show()
    # The mark of the compaction, 21, has no content.
    headers = {int(seq) for seq in re.findall(r"(?m)^\[(\d+)\]", shown)}
    assert headers == set(range(1, 29)) - {21}
    assert "\n[22] Compaction: summary of the earlier messages · " in shown
    assert "\n[24] /compact keep the tide table · " in shown
    assert "<command-name>" not in shown
    assert "[22]" not in (visible := show("--visible-only"))
    assert "Summary\n" in visible
    assert "<command-name>/compact" in show("--tools")
    assert "<command-name>/compact" in show("--at", "24")


def test_original_records_of_all_programs_are_known() -> None:
    assert set(map(record_field_name, PROGRAMS)) == PROGRAM_FIELDS


# --- forks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_terminal", [True, False])
def test_show_names_the_source_of_an_imported_fork(
    steno: Steno, in_terminal: InTerminal, is_terminal: bool
) -> None:
    folder = SAMPLES / "claude-code" / "projects"
    assert steno("import", "--from", "claude-code", str(folder)).exit_code == 0
    fork = "claude-code:9e1eb1be-32e7-4220-a0bf-a63df7f38f75"
    [source] = {
        session["forked_from"]
        for line in steno("list", "--json").stdout.splitlines()
        if (session := json.loads(line))["key"] == fork
    }

    def first_line() -> str:
        if is_terminal:
            return in_terminal("show", fork, "--no-pager", NO_COLOR="1")[1].splitlines()[0]
        return steno("show", fork).stdout.splitlines()[0]

    assert first_line() == f"forked from {source} at message 28"
    assert "continues" not in steno("show", f"{fork}:1").stdout
    # Without its source, the number is unknown.
    assert steno("delete", source, "--yes").exit_code == 0
    assert first_line() == f"forked from {source}"


def test_show_names_the_source_of_a_fork(steno: Steno) -> None:
    assert steno("fork", KEY, "copy", "--at", "3").exit_code == 0
    assert steno("show", "copy").stdout.startswith(f"forked from {KEY} at message 3\n\nSummary\n")
    assert "forked" not in steno("show", KEY).stdout


def test_name_of_the_source_cannot_control_the_terminal(steno: Steno) -> None:
    with open_store("workspace") as store:
        store.add_message("k", "user", "hello")
        store.set_meta("k", transcript={"forked_from": "a\x1b[2J\nb", "forked_after": "id"})
    shown = steno("show", "k").stdout
    assert "\x1b" not in shown
    assert shown.startswith("forked from a\\x1b[2J\\nb\n\n[1] user")
