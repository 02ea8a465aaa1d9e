"""`steno stats`: what is counted, what is estimated, and how it is shown."""

import json
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from zlib import crc32

import jsonschema_rs
import msgspec
import pytest
from click.testing import Result
from msgspec import Struct

from stenolog.catalog.message_metadata import mark_model
from stenolog.cli.stats import SCRIPTED_MODEL
from stenolog.sessions.usage import load_prices
from stenolog.settings.model_selection import SCRIPTED
from stenolog.stores.open_store import open_store
from stenolog.tokens import message_tokens
from support.file_modes import obey_modes
from support.transcripts import SAMPLES

__all__ = ["obey_modes"]

Steno = Callable[..., Result]
InTerminal = Callable[..., tuple[int, str]]

FIRST = datetime(2026, 1, 5, 9, 30, tzinfo=UTC)
DAY = timedelta(days=1)
ASKED = {"role": "user", "content": "how are you today, my friend?"}
PLAIN = {"role": "assistant", "content": "fine, and you?"}


def _answer(prompt: int, answer: int, *, cached: int = 0, model: str = "tiny") -> dict[str, Any]:
    usage = {"prompt": prompt, "answer": answer, "cached": cached}
    return mark_model(dict(PLAIN), model=model, seconds=1, usage=usage)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A workspace with counts of two models over three days, and a session without any."""
    monkeypatch.chdir(tmp_path)
    with open_store("workspace") as store:
        told = [ASKED, _answer(100, 10, cached=50), ASKED, _answer(200, 20, model="big")]
        store.add_messages("telegram:1", told, at=[FIRST, FIRST, FIRST + DAY, FIRST + DAY])
        store.checkpoint("telegram:1", summary="They met.", upto=2)
        store.compact("telegram:1")
        store.add_messages("notes", [ASKED, PLAIN], at=[FIRST + 2 * DAY] * 2)
    return tmp_path


class _Exact(Struct, forbid_unknown_fields=True):
    messages: int
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    estimated_tokens: int
    answers: int


class Day(_Exact):
    day: str


class Model(_Exact):
    model: str | None


class Channel(_Exact):
    channel: str | None


class Cost(Struct, forbid_unknown_fields=True):
    usd: float
    models: dict[str, float]
    unknown: list[str]


class SideCalls(_Exact):
    usd: float | None


class Problem(Struct, forbid_unknown_fields=True):
    key: str
    problem: str


class Stats(_Exact):
    since: str | None
    until: str | None
    sessions: int
    days: list[Day]
    models: list[Model]
    channels: list[Channel]
    cost: Cost | None
    side_calls: dict[str, SideCalls]
    problems: list[Problem]


def _stats(steno: Steno, *arguments: str) -> dict[str, Any]:
    result = steno("stats", "--json", *arguments)
    assert result.exit_code == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    jsonschema_rs.validate(msgspec.json.schema(Stats), found)
    return found


@pytest.mark.usefixtures("place")
def test_provider_counts_are_used_and_the_rest_is_estimated(steno: Steno) -> None:
    found = _stats(steno)
    about = message_tokens(ASKED) + message_tokens(PLAIN)
    assert (found["sessions"], found["messages"]) == (2, 6)
    assert (found["input_tokens"], found["output_tokens"], found["cached_tokens"]) == (300, 30, 50)
    assert found["estimated_tokens"] == about, "only what nobody counted"
    assert [
        (one["day"], one["input_tokens"], one["estimated_tokens"]) for one in found["days"]
    ] == [
        ("2026-01-05", 100, 0),
        ("2026-01-06", 200, 0),
        ("2026-01-07", 0, about),
    ]
    assert [(one["model"], one["input_tokens"]) for one in found["models"]] == [
        ("big", 200),
        ("tiny", 100),
        (None, 0),
    ]
    assert [(one["channel"], one["messages"]) for one in found["channels"]] == [
        ("telegram", 4),
        (None, 2),
    ]


@pytest.mark.usefixtures("place")
def test_stats_prints_rows_to_stdout_and_remarks_to_stderr(steno: Steno) -> None:
    about = message_tokens(ASKED) + message_tokens(PLAIN)
    own = message_tokens(PLAIN)
    result = steno("stats")
    assert result.stdout == (
        f"total\t-\t6\t300\t30\t50\t{about}\n"
        "day\t2026-01-05\t2\t100\t10\t50\t0\n"
        "day\t2026-01-06\t2\t200\t20\t0\t0\n"
        f"day\t2026-01-07\t2\t0\t0\t0\t{about}\n"
        "model\tbig\t1\t200\t20\t0\t0\n"
        "model\ttiny\t1\t100\t10\t50\t0\n"
        f"model\t-\t1\t0\t0\t0\t{own}\n"
        "channel\ttelegram\t4\t300\t30\t50\t0\n"
        f"channel\t-\t2\t0\t0\t0\t{about}\n"
    )
    assert result.stderr == (
        f"Tokens: 330 reported by providers, {about} estimated from the text.\n"
        "No price is known for tiny, big.\n"
    )


@pytest.mark.usefixtures("place")
def test_time_key_and_prefix_limit_the_statistics(steno: Steno) -> None:
    one = _stats(steno, "--since", "2026-01-06", "--until", "2026-01-07")
    assert (one["sessions"], one["messages"], one["input_tokens"]) == (1, 2, 200)
    assert [day["day"] for day in one["days"]] == ["2026-01-06"]
    assert [model["model"] for model in one["models"]] == ["big"]
    assert _stats(steno, "telegram:1")["messages"] == 4
    assert _stats(steno, "--prefix", "no")["messages"] == 2
    assert "estimated from the text." in steno("stats", "notes").stderr
    assert steno("stats", "nobody").exit_code == 1
    nothing = steno("stats", "--since", "2027-01-01")
    assert nothing.stderr == "There are no messages.\n"
    assert nothing.stdout == "total\t-\t0\t0\t0\t0\t0\n"


@pytest.mark.usefixtures("place")
def test_messages_copied_by_a_fork_are_counted_once(steno: Steno) -> None:
    with open_store("workspace") as store:
        store.fork("telegram:1", "telegram:2")
        store.add_messages("telegram:2", [ASKED, _answer(7, 3)], at=[FIRST + DAY] * 2)
    found = _stats(steno)
    assert (found["sessions"], found["messages"], found["input_tokens"]) == (3, 8, 307)


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize(
    "key",
    [
        "claude-code:20c7a18b-7d9d-457e-bc34-7dfb461f0515",
        "codex:01a1e437-7030-7230-8002-8dfe870f6794",
        "opencode:ses_e1bc54571ffeQCMUB5qfLoMXIy",
    ],
)
def test_usage_of_a_response_covers_all_its_messages(key: str, steno: Steno) -> None:
    program = key.partition(":")[0]
    # A file of Claude Code with token counts alone is no session, and reported.
    expected = 3 if program == "claude-code" else 0
    assert steno("import", "--from", program, str(SAMPLES / program)).exit_code == expected
    found = _stats(steno, key)
    assert found["output_tokens"] > 0
    assert found["estimated_tokens"] == 0


def test_response_without_usage_is_estimated(place: Path, steno: Steno) -> None:
    with open_store(place / "workspace") as store:
        for name in ("one", "one", "two"):
            notes = {"response": name, "model": "m"}
            body = {"role": "assistant", "content": "A piece.", "stenolog": notes}
            store.add_full_message("split", body)
        assert _stats(steno, "split")["estimated_tokens"] == 3 * message_tokens(
            {"role": "assistant", "content": "A piece."}
        )
        body["stenolog"] = {**notes, "response": "one", "usage": {"prompt": 5, "answer": 4}}
        store.add_full_message("split", body)
    found = _stats(steno, "split")
    assert found["output_tokens"] == 4
    assert found["estimated_tokens"] == message_tokens({"role": "assistant", "content": "A piece."})


def test_newer_session_is_reported_and_others_are_counted(place: Path, steno: Steno) -> None:
    [log] = (place / "workspace" / "sessions").glob("notes*.jsonl")
    log.write_bytes(_newer(log.read_bytes()))
    result = steno("stats", "--json")
    assert result.exit_code == 3
    found = json.loads(result.stdout)
    assert found["messages"] == 4
    assert [one["key"] for one in found["problems"]] == ["notes"]
    assert "notes: " in result.stderr


def _newer(text: bytes) -> bytes:
    first = text.splitlines()[0].rpartition(b',"crc":"')[0].replace(b'"format":1', b'"format":2')
    return text + b'%b,"crc":"%08x"}\n' % (first, crc32(first))


@pytest.mark.usefixtures("place")
@pytest.mark.slow
def test_terminal_shows_days_models_and_channels(in_terminal: InTerminal) -> None:
    code, shown = in_terminal("stats", NO_COLOR="1")
    assert code == 0
    assert not re.search(r"\x1b\[[\d;]*m", shown)
    assert "2 sessions, 6 messages" in shown
    rows = {line.split()[0]: line for line in shown.splitlines() if line.strip()}
    assert rows["2026-01-06"].count("█") > rows["2026-01-05"].count("█") > 0
    assert "big" in rows
    assert "telegram" in rows
    assert "~" in rows["2026-01-07"], "an estimate is marked"
    assert "\x1b[36" in in_terminal("stats")[1]


@pytest.mark.usefixtures("place")
def test_cost_is_shown_if_prices_are_installed(steno: Steno) -> None:
    with open_store("workspace") as store:
        store.add_messages("priced", [ASKED, _answer(1_000_000, 100_000, model="gpt-4o")])
    price = load_prices()
    assert price is not None
    dollars = price("gpt-4o", {"prompt": 1_000_000, "answer": 100_000, "cached": 0})
    found = _stats(steno)["cost"]
    assert found == {"usd": dollars, "models": {"gpt-4o": dollars}, "unknown": ["tiny", "big"]}
    assert "No price is known for tiny, big." in steno("stats").stderr


@pytest.mark.usefixtures("place")
def test_rows_by_day_are_sorted_by_date_as_the_help_says(steno: Steno) -> None:
    days = [line.split("\t")[1] for line in steno("stats", "--by", "day").stdout.splitlines()]
    assert days == ["2026-01-05", "2026-01-06", "2026-01-07"]
    help_text = " ".join(steno("stats", "--help").stdout.split())
    assert "Days are sorted by date, other rows by cost, the highest first." in help_text


@pytest.mark.usefixtures("place")
def test_rows_by_session_day_model_and_project_have_their_cost(steno: Steno) -> None:
    with open_store("workspace") as store:
        for key, tokens in (("cheap", 1_000), ("dear", 1_000_000), ("also", 2_000)):
            store.add_messages(key, [ASKED, _answer(tokens, 10, model="gpt-4o")], at=[FIRST] * 2)
            store.set_meta(key, cwd="/srv/a" if key != "also" else "/srv/b")
    price = load_prices()
    assert price is not None

    def cost(*prompts: int) -> Any:
        each = [price("gpt-4o", {"prompt": n, "answer": 10, "cached": 0}) or 0 for n in prompts]
        return pytest.approx(sum(each))

    def rows(by: str) -> dict[str | None, Any]:
        result = steno("stats", "--by", by, "--json")
        assert result.exit_code == 0
        found = json.loads(result.stdout)
        assert found["by"] == by
        assert found["cost"]["usd"] == cost(1_000, 1_000_000, 2_000)
        return {row[by]: row for row in found["rows"]}

    sessions = rows("session")
    assert list(sessions)[:3] == ["dear", "also", "cheap"], "the most expensive first"
    assert sessions["dear"]["usd"] == cost(1_000_000)
    assert sessions["dear"]["title"] == ASKED["content"]
    assert sessions["notes"]["usd"] is None
    projects = rows("project")
    assert list(projects) == ["/srv/a", "/srv/b", None]
    assert projects["/srv/a"]["usd"] == cost(1_000, 1_000_000)
    assert projects["/srv/a"]["input_tokens"] == 1_001_000
    days = rows("day")
    assert list(days) == sorted(days, key=str)
    assert days["2026-01-05"]["usd"] == cost(1_000, 1_000_000, 2_000)
    assert rows("model")["gpt-4o"]["usd"] == cost(1_000, 1_000_000, 2_000)
    lines = steno("stats", "--by", "project", "--prefix", "d").stdout.splitlines()
    assert [line.split("\t")[:4] for line in lines] == [["project", "/srv/a", "2", "1000000"]]
    assert float(lines[0].split("\t")[-1]) == cost(1_000_000)
    assert steno("stats", "--by", "weekday").exit_code == 2


@pytest.mark.usefixtures("place")
def test_a_terminal_shows_money_by_session(in_terminal: InTerminal) -> None:
    with open_store("workspace") as store:
        store.add_messages("dear", [ASKED, _answer(1_000_000, 10, model="gpt-4o")], at=[FIRST] * 2)
        store.add_messages("cli:20261117-192958-4a47:other", [ASKED], at=[FIRST])
        store.set_meta("dear", title="a title that is long enough to need the width")
    code, shown = in_terminal("stats", "--by", "session", NO_COLOR="1")
    assert code == 0
    rows = [line for line in shown.splitlines() if "dear" in line]
    assert "$2.50" in rows[0]
    assert "█" in rows[0]
    assert "cli:20261117-192958-4a47:other" in shown, "a key is wrapped only if it is long"
    code, shown = in_terminal("stats", NO_COLOR="1")
    day = next(line for line in shown.splitlines() if line.startswith("2026-01-05"))
    assert "$2.50" in day


@pytest.mark.usefixtures("place")
def test_early_year_is_printed_with_four_digits(steno: Steno) -> None:
    found = _stats(steno, "--since", "0001-01-01", "--until", "0999-12-31T23:59")
    assert (found["since"], found["until"]) == ("0001-01-01T00:00:00Z", "0999-12-31T23:59:00Z")
    elsewhere = _stats(steno, "--since", "2026-01-06T02:00+02:00")
    assert (elsewhere["since"], elsewhere["messages"]) == ("2026-01-06T00:00:00Z", 4)
    for never in ("0001", "0001-01-01T00:00+14:00"):
        assert steno("stats", "--since", never).exit_code == 2
    with open_store("workspace") as store:
        store.add_messages("old", [ASKED], at=[FIRST.replace(year=476)])
    assert steno("stats", "old").stdout.splitlines()[1].startswith("day\t0476-01-05\t1\t")
    assert "0476-01-05 09:30" in steno("export", "old", "--format", "markdown").stdout
    assert "0476-01-05 09:30" in steno("export", "old", "--format", "html").stdout


@pytest.mark.usefixtures("place")
def test_scripted_tokens_are_not_provider_counts(steno: Steno) -> None:
    assert SCRIPTED_MODEL == SCRIPTED
    with open_store("workspace") as store:
        store.add_messages("cli:a", [ASKED, _answer(7, 3, model="scripted")])
    alone = steno("stats", "cli:a")
    assert alone.stderr == "Tokens: 10 estimated by the scripted model.\n"
    about = message_tokens(ASKED) + message_tokens(PLAIN)
    assert steno("stats").stderr.splitlines()[0] == (
        "Tokens: 330 reported by providers, 10 estimated by the scripted model, "
        f"{about} estimated from the text."
    )


@pytest.mark.usefixtures("obey_modes")
def test_unreadable_session_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steno: Steno
) -> None:
    monkeypatch.chdir(tmp_path)
    with open_store("workspace") as store:
        store.add_message("a", "user", "hello")
        store.add_message("b:1", "user", "hello")
    Path("workspace/sessions/foreign.jsonl").write_text('{"role": "user", "content": "x"}\n')
    log = Path("workspace/sessions/b%3A1.jsonl")
    log.chmod(0)
    result = steno("stats")
    assert result.exit_code == 3
    assert result.stdout.startswith("total\t-\t1\t")
    problem, *_ = result.stderr.splitlines()
    assert problem.startswith(f"b:1: opening {log}: Permission denied")
    assert "foreign" not in result.stderr
    [told] = json.loads(steno("stats", "--json").stdout)["problems"]
    assert told["key"] == "b:1"
    assert steno("stats", "--prefix", "a").exit_code == 0
    log.chmod(0o600)
    assert steno("stats").exit_code == 0
