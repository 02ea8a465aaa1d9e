"""`steno search`: golden outputs, filters, exit codes, and the terminal."""

import os
import re
from pathlib import Path

import pytest

from stenolog.cli.list_search import IndexProgress
from stenolog.stores.open_store import open_store
from support.cli import InTerminal, Steno
from support.file_modes import obey_modes

__all__ = ["obey_modes"]


pytestmark = pytest.mark.usefixtures("place")

MOMENT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")
LOCAL = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d [A-Z]+")


@pytest.mark.usefixtures("obey_modes")
@pytest.mark.parametrize(("asked", "code"), [("message", 1), ("こんにちは", 0)])
def test_search_names_a_session_that_cannot_be_read(steno: Steno, asked: str, code: int) -> None:
    log = Path("workspace/sessions/telegram%3A123.jsonl")
    log.chmod(0)
    result = steno("search", asked)
    assert result.exit_code == code
    assert f"telegram:123: opening {log}: Permission denied" in result.stderr
    assert steno("search", asked, "--prefix", "cli").stderr == "No matching messages.\n"
    log.chmod(0o600)
    assert "telegram" not in steno("search", asked).stderr


def test_a_key_is_folded_and_never_cut(in_terminal: InTerminal) -> None:
    key = "slack:" + "C42" * 20
    with open_store("workspace") as store:
        store.add_message(key, "user", "needle in a long title, longer than that")
    _, shown = in_terminal("search", "needle", NO_COLOR="1", COLUMNS="40")
    assert key in shown.replace("\n", "")
    _, shown = in_terminal("search", "needle", NO_COLOR="1", COLUMNS="80")
    assert shown.startswith(f"{key}  needle in a…\n")


def test_words_that_were_found_stand_out_in_colour(in_terminal: InTerminal) -> None:
    _, shown = in_terminal("search", "message", "1")
    assert "\x1b[1;33mmessage\x1b[0m" in shown
    assert "\x1b" not in in_terminal("search", "message", "1", NO_COLOR="1")[1]


def test_index_progress_is_shown_only_in_a_terminal(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setitem(os.environ, "TTY_COMPATIBLE", "1")
    quick = IndexProgress()
    quick(1, 10)
    quick.close()
    assert capfd.readouterr().err == ""
    monkeypatch.setattr("stenolog.cli.list_search._PROGRESS_DELAY_SECONDS", 0)
    slow = IndexProgress()
    slow(3, 10)
    slow.close()
    assert "Indexing sessions" in capfd.readouterr().err
    monkeypatch.setattr("sys.stderr.isatty", lambda: False, raising=False)
    piped = IndexProgress()
    piped(3, 10)
    piped.close()
    assert capfd.readouterr().err == ""
