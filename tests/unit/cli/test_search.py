"""`steno search`: golden outputs, filters, exit codes, and the terminal."""

import json
import os
import re
import shlex
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from click.testing import Result

from stenolog.cli.list_search import IndexProgress
from stenolog.stores.open_store import open_store
from support.file_modes import obey_modes

__all__ = ["obey_modes"]

Steno = Callable[..., Result]
InTerminal = Callable[..., tuple[int, str]]

pytestmark = pytest.mark.usefixtures("place")

MOMENT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")
LOCAL = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d [A-Z]+")


def _found(result: Result) -> list[tuple[str, int]]:
    assert result.exit_code == 0
    rows = [line.split("\t") for line in result.stdout.splitlines()]
    return [(key, int(seq)) for key, seq, *_ in rows]


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


def test_search_prints_a_line_for_each_message(steno: Steno) -> None:
    result = steno("search", "--newest", "message")
    assert result.exit_code == 0
    assert MOMENT.sub("TIME", result.stdout) == (
        "telegram:123\t4\tassistant\tTIME\tvisible\tmessage 4\n"
        "telegram:123\t3\tuser\tTIME\tvisible\tmessage 3\n"
        "telegram:123\t2\tassistant\tTIME\thidden\tmessage 2\n"
        "telegram:123\t1\tuser\tTIME\thidden\tmessage 1\n"
    )
    assert result.stderr == ""


def test_search_takes_words_and_queries(steno: Steno) -> None:
    assert _found(steno("search", "message", "3")) == [("telegram:123", 3)]
    assert _found(steno("search", '"message 3"')) == [("telegram:123", 3)]
    assert _found(steno("search", "mess* -2 -3 -4")) == [("telegram:123", 1)]
    assert _found(steno("search", "こんにちは")) == [("日本:\\n語", 1)]
    assert _found(steno("search", "a.txt")) == [("cli:default", 2)]


def test_nothing_found_is_exit_code_1_like_grep(steno: Steno) -> None:
    result = steno("search", "nothing")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "No matching messages.\n"


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (["message nowhere"], "No matching messages. A message must contain all words."),
        (["nowhere -message"], "No matching messages."),
        (
            ['"unclosed'],
            'No matching messages. The last quotation mark is not closed: write "two words".',
        ),
        (
            ["message OR nowhere"],
            "No matching messages. A message must contain all words. "
            "OR is searched as an ordinary word.",
        ),
        (
            ["message", "--role", "usr"],
            "No matching messages of this role. Roles with matches: assistant, user.",
        ),
        (["nowhere", "--role", "usr"], "No matching messages."),
    ],
)
def test_empty_result_explains_the_query(steno: Steno, asked: list[str], words: str) -> None:
    result = steno("search", *asked)
    assert (result.exit_code, result.stdout, result.stderr) == (1, "", f"{words}\n")


@pytest.mark.parametrize("query", ["*", "", "-x", '"'])
def test_a_query_without_a_word_is_wrong_usage(steno: Steno, query: str) -> None:
    result = steno("search", "--", query)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "contains no word to search for" in result.stderr


@pytest.mark.parametrize(
    ("query", "suggested"),
    [
        (["lightho"], "'lightho*'"),
        (["old lightho"], "'old* lightho*'"),
        (["lightho -storm"], "'lightho* -storm'"),
        (["lightho", "--role", "user"], "'lightho*'"),
        (['"the old" lightho'], "'\"the old\" lightho*'"),
    ],
)
def test_word_that_begins_other_words_gets_a_suggestion(
    steno: Steno, query: list[str], suggested: str
) -> None:
    with open_store("workspace") as store:
        store.add_message("k", "user", "Count the old lighthouses.")
    result = steno("search", *query)
    assert result.exit_code == 1
    assert result.stderr.endswith(f" Longer words match: steno search {suggested}\n")
    [suggestion] = shlex.split(suggested)
    assert steno("search", suggestion).exit_code == 0


@pytest.mark.parametrize(
    "query", [["lightho*"], ['"lightho"'], ["lightho", "--role", "tool"], ["tho"], ["lightho -old"]]
)
def test_search_suggests_nothing_that_finds_nothing(steno: Steno, query: list[str]) -> None:
    with open_store("workspace") as store:
        store.add_message("k", "user", "Count the old houses of lightning.")
    assert "Longer words" not in steno("search", *query).stderr


def test_search_takes_filters(steno: Steno) -> None:
    long_ago = datetime.now(UTC) - timedelta(days=10)
    with open_store("workspace") as store:
        store.add_messages("old:1", [{"role": "tool", "content": "message 5"}], at=[long_ago])
        store.set_meta("old:1", tags=["work"])
    assert _found(steno("search", "message", "--role", "tool")) == [("old:1", 1)]
    assert _found(steno("search", "message", "--prefix", "old:")) == [("old:1", 1)]
    assert _found(steno("search", "message", "--tag", "work")) == [("old:1", 1)]
    assert _found(steno("search", "message", "--until", "3d")) == [("old:1", 1)]
    assert len(_found(steno("search", "message", "--since", "3d"))) == 4
    day = long_ago.date().isoformat()
    assert len(_found(steno("search", "message", "--since", day))) == 5
    assert len(_found(steno("search", "message", "--since", "yesterday"))) == 4
    assert steno("search", "message", "--since", "tomorrow").exit_code == 2


def test_search_says_how_many_more_there_are(steno: Steno) -> None:
    result = steno("search", "message", "--limit", "3")
    assert len(_found(result)) == 3
    assert result.stderr == "Showing 3 of 4. Use --limit for more.\n"
    newest = steno("search", "message", "--limit", "1", "--newest")
    assert newest.stderr == "Showing 1 of more than 1. Use --limit for more.\n"


def test_search_writes_json_for_programs(steno: Steno) -> None:
    lines = steno("search", "message", "1", "--json").stdout.splitlines()
    [hit] = map(json.loads, lines)
    assert MOMENT.fullmatch(hit.pop("at"))
    assert len(hit.pop("uid")) == 16
    assert hit == {
        "anchor": "telegram:123:1",
        "key": "telegram:123",
        "title": "message 1",
        "seq": 1,
        "role": "user",
        "hidden": True,
        "snippet": "message 1",
        "marks": [[0, 7], [8, 9]],
    }


def test_in_a_terminal_it_is_laid_out_for_reading(in_terminal: InTerminal) -> None:
    with open_store("workspace") as store:
        store.add_message("k", "user", "word " * 30)
    code, shown = in_terminal("search", "message", "--newest", NO_COLOR="1", COLUMNS="80")
    assert code == 0
    assert LOCAL.sub("TIME", shown).startswith(
        "telegram:123  message 1\n"
        "  telegram:123:4 assistant · TIME\n  message 4\n\n  telegram:123:3 user · TIME\n"
    )
    assert "telegram:123:2 assistant · TIME · hidden" in LOCAL.sub("TIME", shown)
    _, shown = in_terminal("search", "word", NO_COLOR="1", COLUMNS="80")
    assert all(len(line) <= 80 for line in shown.splitlines())
    assert shown.count("word") > 30


def test_a_key_is_folded_and_never_cut(in_terminal: InTerminal) -> None:
    key = "slack:" + "C42" * 20
    with open_store("workspace") as store:
        store.add_message(key, "user", "needle in a long title, longer than that")
    _, shown = in_terminal("search", "needle", NO_COLOR="1", COLUMNS="40")
    assert key in shown.replace("\n", "")
    _, shown = in_terminal("search", "needle", NO_COLOR="1", COLUMNS="80")
    assert shown.startswith(f"{key}  needle in a…\n")


def test_invalid_time_lists_the_formats(steno: Steno) -> None:
    assert "an age: 90s, 15m, 2h, 3d, 1w" in " ".join(steno("search", "--help").stdout.split())
    result = steno("search", "x", "--since", "3d ago")
    assert result.exit_code == 2
    told = " ".join(result.stderr.split())
    assert "'3d ago' is not a time; write 2026-11-05, 2026-11-05T14:30 (UTC), today, " in told


def test_words_that_were_found_stand_out_in_colour(in_terminal: InTerminal) -> None:
    _, shown = in_terminal("search", "message", "1")
    assert "\x1b[1;33mmessage\x1b[0m" in shown
    assert "\x1b" not in in_terminal("search", "message", "1", NO_COLOR="1")[1]


def test_a_message_does_not_drive_the_terminal(steno: Steno, in_terminal: InTerminal) -> None:
    with open_store("workspace") as store:
        said = {"role": "us\x1b[2Jer", "content": "find \x1b[31mthis\x07 \u202enow [bold]x\ty"}
        store.add_full_message("k\x1b[2J", said)
    line = steno("search", "find").stdout
    assert MOMENT.sub("TIME", line) == (
        "k\\x1b[2J\t1\tus\\x1b[2Jer\tTIME\tvisible\tfind this now [bold]x y\n"
    )
    _, shown = in_terminal("search", "find", NO_COLOR="1")
    assert "find this now [bold]x y" in shown
    assert not {"\x1b", "\x07", "\u202e"} & set(shown)


def test_search_takes_a_sqlite_store(steno: Steno) -> None:
    with open_store("sqlite:some.db") as store:
        store.add_message("k", "user", "a needle")
    assert _found(steno("search", "needle", "-w", "sqlite:some.db")) == [("k", 1)]


def test_search_in_a_missing_workspace_is_reported_in_one_sentence(steno: Steno) -> None:
    result = steno("search", "x", "-w", "nowhere")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "Error: There is no workspace at nowhere; check the path.\n"


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
