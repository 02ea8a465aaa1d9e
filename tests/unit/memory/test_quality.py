"""Tests the basis of docs/memory.md: fair questions, a model that only copies, true figures."""

import json
import re
from pathlib import Path

from recallable import PAGE, RESULTS, ROWS, measure, renew
from talk import Fact, facts, turns

from stenolog.catalog.tokenizer import stems
from stenolog.context.summary import SCHEMA
from stenolog.memory.facts import answer_schema
from support.copying_model import copying

RARE = 10
"""Maximum number of the user's messages that contain a rare word."""


def _spoken() -> list[set[str]]:
    return [set(stems(turn.messages[0]["content"])) for turn in turns()]


def _shared(fact: Fact, spoken: list[set[str]]) -> set[str]:
    common = set(stems(fact.question)) & set(stems(fact.said))
    return {word for word in common if sum(word in said for said in spoken) <= RARE}


def test_quality_corpus_has_fifty_facts_and_fair_questions() -> None:
    told = [turn.fact for turn in turns() if turn.fact is not None]
    assert sorted(told) == sorted(facts())
    assert len(told) == 50
    spoken = _spoken()
    assert [fact.question for fact in told if bool(_shared(fact, spoken)) != fact.plain] == []
    assert sum(fact.plain for fact in told) == 25
    assert all(fact.answer in fact.said for fact in told)
    assert not any(fact.answer.lower() in fact.question.lower() for fact in told if not fact.plain)


def test_scripted_model_only_copies() -> None:
    shown = (
        "Summary so far:\n(nothing yet)\n\nNext part of the conversation:\n"
        "[1] user: I live in Lisbon. Is it far?\n[2] assistant: It is not far."
    )
    turn = "## Turn 1, 2026-05-01 10:00 UTC\nuser:\n    I live in Lisbon. Is it far?"
    for asked, wanted in ((shown, dict(SCHEMA)), (turn, answer_schema(1))):
        answer = copying([{"role": "user", "content": asked}], schema=wanted)
        assert "I live in Lisbon." in answer
        for text in _texts(json.loads(answer)):
            # An "about" consists of words of the sentence; everything else is copied literally.
            assert text in asked or all(word in asked for word in text.split())


def _texts(value: object) -> list[str]:
    if isinstance(value, str):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for item in items for text in _texts(item)]


def test_facts_are_recalled_after_many_turns(tmp_path: Path) -> None:
    found = measure(tmp_path, copying, count=80)
    assert found["summaries"] > 2
    plain, other = found["plain"], found["facts"] - found["plain"]
    assert plain + other == 50
    # Visible messages of the session are not recalled again.
    told, shown = found["found"], found["found"]["window"][0]
    assert told["any"][0] >= 0.9 * plain
    assert min(told[way][0] for way in ("messages", "notes", "both")) >= 0.9 * plain - shown


def test_quality_page_matches_the_last_run() -> None:
    results = json.loads(RESULTS.read_text())
    assert {"scripted", "real"} <= set(results)
    for found in results.values():
        assert found["turns"] == 300
        assert found["facts"] == 50
        assert set(found["found"]) == set(ROWS)
    page = PAGE.read_text()
    assert renew(page, results) == page
    assert re.search(r"\d+/25 and \d+/25", page)
