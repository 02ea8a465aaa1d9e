"""Tool calls and results as blocks: which shape becomes what, and that any input is bounded."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenolog.transfer.export.tool_views import (
    MAX_BLOCK,
    DiffBudget,
    ToolBlock,
    argument_blocks,
    checklist_text,
    diff_text,
    error_line,
    find_read_path,
    language_of,
    one_line,
    result_blocks,
    summary_of,
)
from support.resource_limits import MB, run_limited

_SAMPLES = Path(__file__).parents[2] / "samples" / "transcripts"


def _claude_calls() -> dict[str, Any]:
    """The first call of each tool in the samples of Claude Code."""
    found: dict[str, Any] = {}
    for file in sorted((_SAMPLES / "claude-code").rglob("*.jsonl")):
        for line in file.read_text().splitlines():
            try:
                content = json.loads(line)["message"]["content"]
            except (ValueError, KeyError, TypeError):
                continue
            for part in content if isinstance(content, list) else []:
                if isinstance(part, dict) and part.get("type") == "tool_use":
                    found.setdefault(part["name"], part["input"])
    return found


CLAUDE = _claude_calls()


def _kinds(blocks: tuple[ToolBlock, ...]) -> list[str]:
    return [block.kind for block in blocks]


# --- shapes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "path"),
    [
        ({"file_path": "/srv/a.py"}, "/srv/a.py"),
        ('{"filePath": "a.py", "offset": 10, "limit": 5}', "a.py"),
        ({"command": "view", "path": "a.py", "view_range": [1, 5]}, "a.py"),
        ({"command": "create", "path": "a.py"}, ""),
        ({"path": "a.py", "pattern": "def"}, ""),
        ({"path": "a.py", "file": "b.py"}, ""),
        ({"path": ["a.py"]}, ""),
        ("a.py", ""),
        (None, ""),
    ],
)
def test_call_that_reads_a_file_is_recognized_by_its_arguments(arguments: Any, path: str) -> None:
    assert find_read_path(arguments) == path


@pytest.mark.parametrize("sign", ["\t", "→"])
def test_file_that_was_read_is_code_without_line_numbers(sign: str) -> None:
    text = f"     7{sign}def f():\n     8{sign}\n     9{sign}    return 1\n\n<system-reminder>"
    code, rest = result_blocks(text, path="/srv/a.py")
    assert (code.kind, code.language, code.label) == ("code", "py", "from line 7")
    assert code.text == "def f():\n\n    return 1"
    assert (rest.kind, rest.text) == ("text", "<system-reminder>")


def test_file_without_line_numbers_is_shown_unchanged() -> None:
    for text in ("def f():\n    1\t2", '{"a": 1}', "12\n13"):
        assert [block.text for block in result_blocks(text, path="a.py")] == [text]
    [block] = result_blocks("     1\tboats", path="boats")
    assert (block.kind, block.text) == ("text", "     1\tboats")
    # A number that does not follow the number before it belongs to the file.
    code, rest = result_blocks("1\ta\n2\tb\n7\tc", path="a.py")
    assert (code.text, rest.text) == ("a\nb", "7\tc")


@pytest.mark.parametrize(
    ("name", "kinds", "summary"),
    [
        ("Edit", ["diff", "json"], CLAUDE["Edit"]["file_path"]),
        ("Write", ["code"], "/project/hello.py"),
        ("Bash", ["shell"], "ls -1"),
        ("Read", ["json"], CLAUDE["Read"]["file_path"]),
        ("Grep", ["json"], "tide"),
        ("WebFetch", ["json"], "https://docs.github.com/en/rest/pulls/comments"),
        ("Task", ["text", "json"], "Explore project structure for packaging"),
    ],
)
def test_calls_of_claude_code_have_the_blocks_of_their_shape(
    name: str, kinds: list[str], summary: str
) -> None:
    assert _kinds(argument_blocks(CLAUDE[name])) == kinds
    assert _kinds(argument_blocks(json.dumps(CLAUDE[name]))) == kinds
    assert summary_of(CLAUDE[name]) == summary


def test_several_edits_of_one_file_are_several_diffs() -> None:
    blocks = argument_blocks(CLAUDE["MultiEdit"])
    assert len(blocks) == len(CLAUDE["MultiEdit"]["edits"])
    assert set(_kinds(blocks)) == {"diff"}
    assert all(block.label.endswith("tokenizer.js") for block in blocks)


def test_todos_are_a_checklist() -> None:
    [block] = argument_blocks(CLAUDE["TodoWrite"])
    assert block.kind == "checklist"
    assert block.items[0].state == "open"
    assert block.items[0].text.startswith("Update JavaScript renderTokenAndText")


def test_calls_of_codex_have_the_blocks_of_their_shape() -> None:
    patch = "*** Begin Patch\n*** Add File: count.md\n+# Lighthouses\n+3\n*** End Patch"
    [shown] = argument_blocks(patch)
    assert argument_blocks({"input": patch}) == (shown,)
    assert [line.kind for line in shown.lines] == ["head", "head", "added", "added", "head"]
    assert summary_of({"input": patch}) == "count.md"
    [shell, more] = argument_blocks('{"command": ["bash", "-lc", "ls -l"], "workdir": "/srv"}')
    assert (shell.kind, shell.text) == ("shell", "ls -l")
    assert (more.kind, json.loads(more.text)) == ("json", {"workdir": "/srv"})
    [shell, _] = argument_blocks('{"cmd": "cat lighthouses.txt", "workdir": "/srv/coast"}')
    assert shell.text == "cat lighthouses.txt"
    plan = {"plan": [{"step": "Look", "status": "completed"}, {"step": "Do", "status": "pending"}]}
    [steps] = argument_blocks(plan)
    assert checklist_text(steps.items) == "- [x] Look\n- [ ] Do"
    assert summary_of(plan) == "1 of 2 done"


def test_a_command_next_to_a_path_is_no_shell_command() -> None:
    edit = {"command": "str_replace", "path": "a.py", "old_str": "a", "new_str": "b"}
    assert _kinds(argument_blocks(edit)) == ["diff", "json"]
    assert _kinds(argument_blocks({"command": "view", "path": "a.py"})) == ["json"]


def test_other_arguments_are_blocks_of_text_or_json() -> None:
    blocks = argument_blocks({"prompt": "one\ntwo", "limit": 3})
    assert [(one.kind, one.label) for one in blocks] == [("text", "prompt"), ("json", "")]
    assert argument_blocks(None) == ()
    assert _kinds(argument_blocks("{}")) == ["json"]
    assert argument_blocks("not json")[0].text == "not json"
    assert _kinds(argument_blocks({"patch": "@@ -1 +1 @@\n-a\n+b"})) == ["diff"]
    assert _kinds(argument_blocks({"todos": [{"content": "x"}]})) == ["json"]


def test_results_are_text_json_or_a_diff() -> None:
    assert _kinds(result_blocks("plain\ntext")) == ["text"]
    assert _kinds(result_blocks('{"a": [1, 2]}')) == ["json"]
    assert _kinds(result_blocks("diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b")) == [
        "diff"
    ]
    [output, rest] = result_blocks('{"output": "a\\nb", "metadata": {"exit_code": 0}}')
    assert (output.kind, output.label, rest.kind) == ("text", "output", "json")
    assert result_blocks("<tool_use_error>No file</tool_use_error>")[0].text == "No file"


def test_the_first_line_of_an_error_is_in_the_summary() -> None:
    assert error_line("<tool_use_error>Error: no such tool</tool_use_error>") == (
        "Error: no such tool"
    )
    assert error_line("\n\nExit code 1\nImportError: x\n  more") == "Exit code 1: ImportError: x"
    assert error_line("") == ""


def test_the_line_of_an_error_is_no_heading_of_codex() -> None:
    heading = "Chunk ID: 5a1a7d\nWall time: 0.0000 seconds\n"
    output = "Process exited with code 2\nOriginal token count: 14\nOutput:\nls: no such file\n"
    assert error_line(heading + output) == "Process exited with code 2: ls: no such file"
    assert error_line("Wall time: 3.9 seconds\naborted by user") == "aborted by user"
    assert error_line("Output: 3") == "Output: 3"


def test_code_is_coloured_by_the_name_of_its_file() -> None:
    assert language_of("/srv/app/a.py") == "py"
    assert language_of("C:\\app\\Index.HTM") == "html"
    assert language_of("Makefile") == ""
    assert language_of("py") == "py"


# --- diffs -----------------------------------------------------------------------------------


def _diff(old: str, new: str) -> str:
    [block] = argument_blocks({"path": "x", "old_string": old, "new_string": new})
    return diff_text(block.lines)


def test_a_diff_has_the_changed_lines_and_some_around_them() -> None:
    assert _diff("a\nb\nc", "a\nX\nc") == " a\n-b\n+X\n c"
    assert _diff("", "new\n") == "+new"
    assert _diff("old", "") == "-old"
    lines = [f"line {number}" for number in range(40)]
    changed = [*lines[:20], "changed", *lines[21:]]
    shown = _diff("\n".join(lines), "\n".join(changed))
    assert shown.startswith("… 17 unchanged lines\n line 17\n")
    assert "-line 20\n+changed\n" in shown
    assert shown.endswith(" line 23\n… 16 unchanged lines")


@given(st.lists(st.sampled_from("abc"), max_size=5), st.lists(st.sampled_from("abc"), max_size=5))
def test_a_diff_contains_both_texts(old: list[str], new: list[str]) -> None:
    [block] = argument_blocks({"old_string": "\n".join(old), "new_string": "\n".join(new)})
    assert [one.text for one in block.lines if one.kind in ("same", "removed")] == old
    assert [one.text for one in block.lines if one.kind in ("same", "added")] == new


@pytest.mark.parametrize("budget", [DiffBudget(), DiffBudget(steps=0)])
def test_texts_that_differ_too_much_are_shown_one_after_the_other(budget: DiffBudget) -> None:
    old = "\n".join(f"a{number}" for number in range(100))
    new = "\n".join(f"b{number}" for number in range(100))
    [block] = argument_blocks({"old_string": old, "new_string": new}, budget)
    assert [line.kind for line in block.lines] == ["removed"] * 100 + ["added"] * 100


# --- hostile input ---------------------------------------------------------------------------


HOSTILE: dict[str, Any] = {
    "long edit": {"old_string": "a\nb\n" * 500_000, "new_string": "b\na\na\n" * 300_000},
    "equal lines": {"old_string": "\n" * 900, "new_string": "a\n\n" * 450},
    "many edits": {"edits": [{"old_string": "a\nb\n" * 400, "new_string": "b\na\n" * 400}] * 50},
    "too many edits": {"edits": [{"old_string": "a", "new_string": "b"}] * 100_000},
    "long command": {"command": "x" * 5_000_000},
    "list of commands": {"command": ["x"] * 500_000},
    "many texts": {f"t{number}": "a\nb" for number in range(20_000)},
    "many steps": {"todos": [{"content": "x" * 9_000, "status": "done"}] * 50_000},
    "long patch": "*** Begin Patch\n" + "+x\n" * 1_000_000,
    "many files": "*** Begin Patch\n" + "*** Add File: x\n" * 200_000,
    "deep": '{"a":' * 100_000 + "1" + "}" * 100_000,
    "heads": "--- " * 1_000_000,
    "not a dict": [[[]], None, {"todos": 1}, 1.5],
    "odd types": {"command": [1], "path": 3, "content": [], "edits": [1], "todos": [[]]},
    "surrogate": '{"command": "\\ud800"}',
}


@pytest.mark.quick(5)
@pytest.mark.parametrize("name", HOSTILE)
def test_any_call_takes_bounded_time_and_space(name: str) -> None:
    def show() -> None:
        for blocks in (argument_blocks(HOSTILE[name]), result_blocks(HOSTILE[name])):
            size = sum(
                len(one.text) + sum(len(line.text) + 1 for line in one.lines) for one in blocks
            )
            assert size < 10 * MAX_BLOCK
            assert len(blocks) <= 50
        assert len(summary_of(HOSTILE[name])) <= 120

    run_limited(show, cpu=30, memory=400 * MB)


def test_long_edits_of_one_page_are_bounded() -> None:
    edits = [{"old_string": "\n" * 100_000, "new_string": "b" + "\n" * 99_999}] * 50
    blocks = argument_blocks({"file_path": "a.py", "edits": edits})
    assert len(blocks) == 50
    shown = [bool(block.lines) for block in blocks]
    assert shown == [True] * 4 + [False] * 46
    assert all(block.omitted > 100_000 for block in blocks[4:])
    short = {"file_path": "a.py", "old_string": "a", "new_string": "b"}
    budget = DiffBudget()
    argument_blocks({"file_path": "a.py", "edits": edits}, budget)
    [block] = argument_blocks(short, budget)
    assert diff_text(block.lines) == "-a\n+b"


def test_few_edits_of_one_page_that_take_long_to_compare_are_compared() -> None:
    old = [f"{number}" if number % 2 else "a" for number in range(1, 199)]
    edit = {"old_string": "\n".join([*old, "x"]), "new_string": "a\n" * 198 + "y"}
    budget = DiffBudget()
    blocks = [argument_blocks(edit, budget)[0] for _ in range(20)]
    compared = [any(line.kind == "same" for line in block.lines) for block in blocks]
    assert compared == [True] * 2 + [False] * 18


def test_label_of_a_patch_is_short() -> None:
    [block] = argument_blocks({"x " * 10_000: "*** Begin Patch\n+a"})
    assert block.label.startswith("x x x")
    assert len(block.label) < 500
    assert len(one_line(block.label)) <= 120


def test_short_description_of_a_command_is_its_caption() -> None:
    [shell] = argument_blocks({"command": "ls -1", "description": "List files"})
    assert (shell.kind, shell.label, shell.text) == ("shell", "List files", "ls -1")
    for kept in ("a\nb", "long " * 40, 7, ""):
        shell, rest = argument_blocks({"command": "ls -1", "description": kept})
        assert (shell.kind, shell.label) == ("shell", "")
        assert rest.kind in ("json", "text")
    shell, rest = argument_blocks({"command": "ls", "description": "List", "timeout": 5})
    assert shell.label == "List"
    assert json.loads(rest.text) == {"timeout": 5}
