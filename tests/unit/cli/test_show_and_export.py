"""`steno show` and `steno export`: golden outputs, errors, and the terminal."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from stenolog.cli.workspace import Location
from stenolog.errors import ReadOnly
from stenolog.stores.open_store import open_store
from support.cli import InTerminal, Steno

pytestmark = pytest.mark.usefixtures("place")

MOMENT = re.compile(r"\d{4}-\d\d-\d\d(T\d\d:\d\d:\d\dZ| \d\d:\d\d:\d\d \S+)")


def _golden(text: str) -> str:
    return MOMENT.sub("TIME", text)


def _bytes(folder: Path) -> dict[Path, tuple[int, bytes]]:
    return {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in folder.rglob("*") if p.is_file()}


# --- damage ----------------------------------------------------------------------------------


def test_suggested_command_names_a_folder_with_a_space(place: Path, steno: Steno) -> None:
    log = place / "workspace" / "sessions" / "telegram%3A123.jsonl"
    log.write_bytes(log.read_bytes().replace(b'"message 3"', b'"message 3'))
    (place / "workspace").rename(place / "my notes")
    result = steno("list", "-w", "my notes")
    suggested = re.findall(r"`steno (doctor .*?)`", result.stderr)
    assert suggested == ["doctor 'my notes'"]


def test_p3_show_reports_damage_found_only_by_a_full_read(place: Path, steno: Steno) -> None:
    with open_store("workspace") as store:
        store.add_messages("k", [{"role": "user", "content": f"number {n}"} for n in range(600)])
        for number in range(300):
            store.add_message("k", "user", f"later {number}")
    log = place / "workspace" / "sessions" / "k.jsonl"
    log.write_bytes(log.read_bytes().replace(b'"number 7"', b'"number 7'))

    result = steno("show", "k")

    assert "k is damaged: at least 1 message is lost" in result.stderr


# --- show ------------------------------------------------------------------------------------


def test_show_accepts_any_key_and_any_message(steno: Steno) -> None:
    strange: list[dict[str, Any]] = [
        {},
        {"role": 7, "content": 1.5},
        {"content": {"a": None}},
        {"x": "\ud800"},
    ]
    with open_store("workspace") as store:
        store.add_messages("--all", strange)

    result = steno("show", "--", "--all")

    assert result.exit_code == 0
    assert _golden(result.stdout) == (
        "[1] message · TIME\n\n"
        "[2] 7 · TIME\n1.5\n\n"
        '[3] message · TIME\n{"a": null}\n\n'
        '[4] message · TIME\nx: "\\ud800"\n\n'
    )


@pytest.mark.slow
def test_colours_are_used_only_in_terminals_without_no_color(
    steno: Steno, in_terminal: InTerminal
) -> None:
    assert "\x1b[" in in_terminal("show", "telegram:123")[1]
    assert "\x1b[" in in_terminal("list")[1]
    assert "\x1b" not in in_terminal("show", "telegram:123", NO_COLOR="1")[1]
    assert "\x1b" not in in_terminal("list", NO_COLOR="1")[1]
    assert "\x1b" not in steno("show", "telegram:123").stdout


# --- export ----------------------------------------------------------------------------------


def test_p10_export_prints_messages_unchanged(steno: Steno) -> None:
    given: list[dict[str, Any]] = [
        {"role": "user", "content": "line\nend \x1b[31m ☕ \u202e"},
        {"z": 1, "role": "tool", "a": [1.5, None, True, 10**40]},
        {"role": "user", "content": "\ud800"},
    ]
    with open_store("workspace") as store:
        store.add_messages("k", given)

    result = steno("export", "k")

    assert result.exit_code == 0
    lines = result.stdout_bytes.splitlines()
    assert [json.loads(line) for line in lines] == given
    assert [list(json.loads(line)) for line in lines] == [list(message) for message in given]


def test_exported_message_cannot_control_the_terminal(in_terminal: InTerminal) -> None:
    with open_store("workspace") as store:
        store.add_message("k", "user", "a\x9b31mb\u202ec")
    assert in_terminal("export", "k") == (0, '{"role":"user","content":"abc"}\n')


# --- errors ----------------------------------------------------------------------------------


def test_log_of_another_program_is_reported_in_one_sentence(place: Path, steno: Steno) -> None:
    log = place / "workspace" / "sessions" / "other.jsonl"
    log.write_bytes(b'{"role":"user","content":"hello"}\n')
    result = steno("show", "other")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.count("\n") == 1
    assert "was not written by stenolog" in result.stderr
    assert "other" not in steno("list").stdout


def test_read_commands_open_the_store_read_only() -> None:
    with Location(workspace="workspace").open() as store, pytest.raises(ReadOnly):
        store.add_message("telegram:123", "user", "x")


def test_read_commands_write_nothing(place: Path, steno: Steno) -> None:
    log = place / "workspace" / "sessions" / "telegram%3A123.jsonl"
    log.write_bytes(log.read_bytes() + b'{"kind":"mess')
    before = _bytes(place)

    for command in (["list"], ["show", "telegram:123", "--all"], ["export", "telegram:123"]):
        assert steno(*command).exit_code == 0

    after = _bytes(place)
    # The index, which is made for a list, is no part of what was stored.
    assert {path: after[path] for path in after if "catalog.db" not in path.name} == before


def test_metadata_of_an_answer_is_shown_as_text(steno: Steno) -> None:
    with open_store("workspace") as store:
        store.add_message("k", "user", "hello")
        for why in ("stopped", "broken off"):
            body = {"role": "assistant", "content": "Half [interrupted]"}
            store.add_full_message("k", {**body, "stenolog": {"seen": 1, "interrupted": why}})
    shown = steno("show", "k").stdout
    assert "\nHalf (interrupted)\n" in shown
    assert "\nHalf (interrupted: broken off)\n" in shown
    assert "stenolog" not in shown
    assert steno("show", "k", "--all").stdout == shown
