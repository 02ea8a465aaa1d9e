"""`steno stats`: what is counted, what is estimated, and how it is shown."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from stenolog.catalog.message_metadata import mark_model
from stenolog.sessions.usage import load_prices
from stenolog.stores.open_store import open_store
from stenolog.tokens import message_tokens
from support.cli import Steno
from support.file_modes import obey_modes
from support.transcripts import SAMPLES

__all__ = ["obey_modes"]


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


def _stats(steno: Steno, *arguments: str) -> dict[str, Any]:
    result = steno("stats", "--json", *arguments)
    assert result.exit_code == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
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
