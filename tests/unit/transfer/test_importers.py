"""The layouts of other programs, and `steno import`, which takes them in as a copy."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
from click.testing import CliRunner, Result

from stenolog.cli import main
from stenolog.codec import MAX_MESSAGE_BYTES
from stenolog.stores.open_store import open_store
from stenolog.transfer.importers.layouts import (
    is_picoclaw_log,
    is_zeroclaw_log,
    read_lines,
    read_meta,
    unpack_content,
)
from stenolog.transfer.migration import import_folder

SAMPLES: Final = Path(__file__).parents[2] / "samples"
LAYOUTS: Final = ("picoclaw", "picoclaw-legacy", "zeroclaw")

Steno = Callable[..., Result]


@pytest.fixture
def steno(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Steno:
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> Result:
        return CliRunner().invoke(main, [str(one) for one in arguments], prog_name="steno")

    return run


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


# --- layouts ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"role": "user", "content": "hi"}, None),
        ({"role": "user", "content": '{"tool_calls":[{"id":"a","name":"b"}]}'}, None),
        ({"role": "assistant", "content": "{not json"}, None),
        ({"role": "assistant", "content": "[1]"}, None),
        ({"role": "assistant", "content": '{"tool_calls":[]}'}, None),
        ({"role": "assistant", "content": '{"tool_calls":[{"id":"a","name":"b"}]}'}, None),
        ({"role": "assistant", "content": '{"tool_calls":[7]}'}, None),
        ({"role": "assistant", "content": '{"answer": 42}'}, None),
        ({"role": "assistant", "content": None}, None),
        ({"role": "assistant"}, None),
        ({"role": "tool", "content": '{"content":"42"}'}, None),
        (
            {
                "role": "assistant",
                "content": json.dumps(
                    {
                        "content": "Let me see.",
                        "reasoning_content": "hm",
                        "tool_calls": [{"id": "a", "name": "b", "arguments": {"q": "é"}}],
                    }
                ),
            },
            {
                "role": "assistant",
                "content": "Let me see.",
                "reasoning_content": "hm",
                "tool_calls": [
                    {
                        "id": "a",
                        "type": "function",
                        "function": {"name": "b", "arguments": '{"q": "é"}'},
                    }
                ],
            },
        ),
        (
            {"role": "tool", "content": '{"tool_call_id":"a","content":"42","role":"user"}'},
            {"role": "tool", "content": "42", "tool_call_id": "a"},
        ),
    ],
)
def test_zeroclaw_packs_tool_calls_as_text(
    message: dict[str, Any], expected: dict[str, Any] | None
) -> None:
    assert unpack_content(message) == (message if expected is None else expected)


@pytest.mark.parametrize(
    ("line", "layout"),
    [
        (b'{"role":"user","content":"x"}', "zeroclaw"),
        (b'{"role":"user","content":"x","created_at":"2026-11-15T09:15:41Z"}', "picoclaw"),
        (b'{"role":"user","content":"x","timestamp":"2026"}', None),
        (b"words", None),
        (b"", None),
    ],
)
def test_log_without_meta_file_is_recognized_by_its_fields(line: bytes, layout: str | None) -> None:
    found = list(read_lines(line))
    layouts = (("picoclaw", is_picoclaw_log), ("zeroclaw", is_zeroclaw_log))
    known = [name for name, is_log in layouts if is_log(found)]
    assert known == ([] if layout is None else [layout])


@pytest.mark.parametrize("meta", [b"", b"[]", b"{", b"\xff", b'{"key":7,"skip":0,"aliases":"x"}'])
def test_unreadable_meta_file_does_not_prevent_import(meta: bytes, tmp_path: Path) -> None:
    (tmp_path / "a_1.jsonl").write_text('{"role":"user","content":"x"}\n')
    (tmp_path / "a_1.meta.json").write_bytes(meta)
    assert read_meta(meta)["key"] is None
    with open_store("memory:") as store:
        [taken] = import_folder(tmp_path, store, rename_files=False).imported
        assert (taken.key, taken.messages) == ("a_1", 1)
        assert store.get_history("a_1")[0].content == "x"


# --- steno import ----------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["workspace", "sqlite:steno.db"])
def test_second_import_of_all_samples_adds_nothing(
    steno: Steno, tmp_path: Path, where: str
) -> None:
    for layout, expected in zip(LAYOUTS, [(3, 36), (2, 11), (1, 5)], strict=True):
        shutil.copytree(SAMPLES / layout, tmp_path / layout)
        before = bytes_of(tmp_path / layout)

        first = steno("import", layout, "-w", where)

        sessions, messages = expected
        rows = [line.split("\t") for line in first.stdout.splitlines()]
        assert len(rows) == sessions
        assert sum(int(row[1]) for row in rows) == messages
        assert {row[3] for row in rows} == {layout}
        plural = "" if sessions == 1 else "s"
        assert f"Imported {sessions} session{plural}, {messages} messages" in first.stderr
        assert bytes_of(tmp_path / layout) == before
        # The torn line, broken.json, the line that is not JSON.
        assert first.exit_code == 3

        second = steno("import", layout, "-w", where)
        # What could not be carried then is not here now either, and that is told again.
        assert second.exit_code == 3
        assert "Imported 0 sessions, 0 messages" in second.stderr
        assert f"{sessions} session{'' if sessions == 1 else 's'} already imported" in second.stderr
        if layout != "picoclaw-legacy":
            assert "already imported; 1 message could not be imported." in second.stderr
            assert "is not JSON" in second.stderr
    with open_store(where) as store:
        assert len(store.list_sessions()) == 6
        assert sum(store.info(key).count for key in store.list_sessions()) == 52


def test_dry_run_prints_same_report_and_writes_nothing(steno: Steno, tmp_path: Path) -> None:
    shutil.copytree(SAMPLES / "picoclaw", tmp_path / "old")
    before = bytes_of(tmp_path)
    dry = steno("import", "old", "--dry-run")
    assert bytes_of(tmp_path) == before
    assert not (tmp_path / "workspace").exists()
    carried = "Would import 3 sessions, 36 messages; 1 message could not be imported."
    assert carried in dry.stderr
    wet = steno("import", "old")
    assert wet.stdout == dry.stdout
    after = bytes_of(tmp_path)
    again = steno("import", "old", "--dry-run")
    assert "Would import 0 sessions, 0 messages; 3 sessions already" in again.stderr
    assert bytes_of(tmp_path) == after


def test_one_file_and_the_workspace_of_the_other_program(steno: Steno, tmp_path: Path) -> None:
    shutil.copytree(SAMPLES / "picoclaw", tmp_path / "other" / "sessions")
    (tmp_path / "other" / "config.json").write_text("{}")
    one = steno("import", "other/sessions/telegram_1001.meta.json")
    assert one.exit_code == 0
    assert one.stdout.split("\t")[:3] == ["telegram:1001", "5", "5"]
    whole = steno("import", "other")
    assert "Imported 2 sessions, 31 messages; 1 session already imported" in whole.stderr
    assert "config.json" not in whole.stderr


def test_import_in_place_renames_files(steno: Steno, tmp_path: Path) -> None:
    place = tmp_path / "workspace" / "sessions"
    for layout in LAYOUTS:
        shutil.copytree(SAMPLES / layout, place, dirs_exist_ok=True)
    before = bytes_of(place)
    dry = steno("import", "workspace", "--dry-run")
    assert "Would import 6 sessions, 52 messages" in dry.stderr
    assert bytes_of(place) == before
    result = steno("import", "workspace/sessions")
    assert "Imported 6 sessions, 52 messages" in result.stderr
    assert (place / "telegram_1001_alice.jsonl.migrated").exists()
    assert steno("show", "telegram_1001_alice").exit_code == 0
    assert {path.stat().st_mode & 0o777 for path in place.glob("*.migrated")} == {0o600}
    again = steno("import", "workspace")
    assert "Already imported: 9 files *.migrated.\n" in again.stderr
    assert "Imported 0 sessions, 0 messages; 1 file skipped." in again.stderr
    assert again.exit_code == 3
    (place / "broken.json").unlink()
    again = steno("import", "workspace")
    assert (again.exit_code, again.stderr) == (0, "Already imported: 9 files *.migrated.\n")
    one = steno("import", "workspace/sessions/telegram_1001.jsonl.migrated")
    assert (one.exit_code, one.stderr) == (0, "Already imported: 1 file *.migrated.\n")


@pytest.mark.parametrize("where", ["workspace", "sqlite:steno.db"])
def test_oversized_summary_is_skipped_and_session_imported(
    steno: Steno, tmp_path: Path, where: str
) -> None:
    old = tmp_path / "old"
    old.mkdir()
    (old / "k.jsonl").write_text('{"role":"user","content":"a"}\n{"role":"user","content":"b"}\n')
    meta = {"key": "k", "summary": "x" * MAX_MESSAGE_BYTES, "skip": 1}
    (old / "k.meta.json").write_text(json.dumps(meta))

    result = steno("import", "old", "-w", where)

    assert result.exit_code == 3
    assert "old/k.jsonl: the summary was skipped: 67,108,878 bytes as" in result.stderr
    assert "Imported 1 session, 2 messages.\n" in result.stderr
    with open_store(where) as store:
        assert [m.content for m in store.get_history("k")] == ["b"]
        assert "importing" not in store.info("k").meta
    again = steno("import", "old", "-w", where)
    assert again.exit_code == 3
    assert "old/k.jsonl: the summary was skipped: 67,108,878 bytes as" in again.stderr


@pytest.mark.parametrize("content", [None, "{}", "hello"])
def test_folder_without_sessions_is_reported(
    steno: Steno, tmp_path: Path, content: str | None
) -> None:
    (tmp_path / "old").mkdir()
    if content is not None:
        (tmp_path / "old" / "x.json").write_text(content)
    result = steno("import", "old")
    assert result.exit_code == 1
    none = "No session files of a known program in old. `steno import --help` lists the programs."
    assert "skipped" in result.stderr if content else result.stderr == f"{none}\n"
    for where in ("workspace", "sqlite:new/steno.db"):
        assert steno("import", "old", "-w", where).exit_code == 1
    assert [path.name for path in tmp_path.iterdir()] == ["old"]  # no workspace for nothing
    assert steno("import", "nowhere").exit_code == 2


def test_file_name_cannot_control_the_terminal(steno: Steno, tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    text = json.dumps({"key": "\x1b[31mred\n", "messages": [{"role": "user", "content": "x"}]})
    (tmp_path / "old" / "a\x1b[31m.json").write_text(text)
    result = steno("import", "old")
    assert result.exit_code == 0
    assert "\x1b" not in result.output
    assert result.stdout.count("\n") == 1
