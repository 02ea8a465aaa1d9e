"""`steno rename`, `tag`, `fork`, `undo`, `compact` and `archive`: on every engine, and in words."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from stenolog.cli.output import show_progress
from stenolog.cli.workspace import display_name
from stenolog.stores.open_store import open_store
from support.cli import Steno, log_of_newer_version

pytestmark = pytest.mark.usefixtures("place")

KEY = "telegram:123"


def _json(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


# --- on every engine -------------------------------------------------------------------------


def test_summarize_makes_a_summary_that_the_suggested_undo_reverts(
    steno: Steno, where: str
) -> None:
    with open_store(where) as store:
        for number in range(5, 11):
            store.add_message(KEY, "user" if number % 2 else "assistant", f"message {number}")
    result = steno("summarize", KEY, "--model", "scripted", "-w", where)
    assert (result.exit_code, result.stdout) == (0, "")
    suggested = re.search(r"`steno (undo .*?)`", result.stderr)
    assert suggested is not None
    assert shlex.split(suggested[1]) == ["undo", KEY, "-w", display_name(where)]
    with open_store(where, read_only=True) as store:
        assert store.info(KEY).floor > 2
        assert store.info(KEY).visible == 10 - store.info(KEY).floor
    assert steno("undo", KEY, "-w", where).exit_code == 0
    with open_store(where, read_only=True) as store:
        assert store.info(KEY).visible == 8


# --- what can be wrong -----------------------------------------------------------------------


def test_misspelt_key_or_place_creates_nothing(place: Path, steno: Steno) -> None:
    commands = ("rename nobody x", "tag nobody", "tag nobody +x", "fork nobody x", "undo nobody")
    for command in (*commands, "archive nobody", "summarize nobody -m scripted"):
        for elsewhere in ("workspace", "nowhere", "sqlite:nowhere.db"):
            result = steno(*command.split(), "-w", elsewhere)
            assert (result.exit_code, result.stdout) == (1, "")
    with open_store("workspace", read_only=True) as store:
        assert "nobody" not in store.list_sessions()
    assert not list(place.glob("nowhere*"))


def test_archive_all_continues_after_a_failed_session(place: Path, steno: Steno) -> None:
    with open_store("workspace") as store:
        for key in ("a", "z"):
            store.add_message(key, "user", "hello")
            store.checkpoint(key, summary="A greeting.", upto=1)
    log = place / "workspace" / "sessions" / "a.jsonl"
    log.write_bytes(log_of_newer_version(log.read_bytes()))

    result = steno("archive", "--all")

    assert result.exit_code == 3
    assert [line.split("\t")[:2] for line in result.stdout.splitlines()] == [[KEY, "2"], ["z", "1"]]
    assert "newer stenolog" in result.stderr
    rows = [json.loads(line) for line in steno("archive", "--all", "--json").stdout.splitlines()]
    assert [row["key"] for row in rows if row["problem"]] == ["a"]
    alone = steno("archive", "a")
    assert (alone.exit_code, alone.stdout) == (1, "")


def test_running_session_is_not_summarized(steno: Steno) -> None:
    with open_store("workspace") as store, store.lease(KEY, ttl=30):
        result = steno("summarize", KEY, "-m", "scripted")
    assert (result.exit_code, result.stdout) == (1, "")
    assert f"An answer is being written in {KEY}. Try again when it is finished." in result.stderr


def test_title_cannot_control_the_terminal(steno: Steno) -> None:
    result = steno("rename", KEY, "\x1b[31mred\x07")
    assert "\x1b" not in result.stderr
    assert "“red”" in result.stderr


def test_only_sessions_of_the_given_agent_are_changed(steno: Steno) -> None:
    with open_store("workspace/agents/ada") as store:
        store.add_message(KEY, "user", "hello")
    assert steno("rename", KEY, "Hers", "--agent", "ada").exit_code == 0
    assert "Hers" in steno("list", "--agent", "ada").stdout
    assert "Hers" not in steno("list").stdout


# --- progress --------------------------------------------------------------------------------


def test_progress_bar_is_shown_only_in_a_terminal(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with show_progress("Working", 2) as step:
        step()
    assert capfd.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    with show_progress("Working", 2) as step:
        step()
        step()
    assert "Working" in capfd.readouterr().err
    with show_progress("Working", 2, enabled=False) as step:
        step()
    assert capfd.readouterr().err == ""


def test_undo_of_an_edit_also_hides_its_answer(steno: Steno, where: str) -> None:
    """As /undo in a chat does: an answer without its question is nobody's."""
    with open_store(where, namespace="sessions") as store:
        store.add_messages(
            "e", [{"role": "user", "content": "one"}, {"role": "assistant", "content": "1"}]
        )
        store.set_history("e", [{"role": "user", "content": "two"}])
        store.add_message("e", "assistant", "2")
    done = _json(steno("undo", "e", "--json", "-w", where))
    assert (done["shown"], done["hid"]) == (2, 2)
    with open_store(where, namespace="sessions") as store:
        assert [message.content for message in store.get_history("e")] == ["one", "1"]
