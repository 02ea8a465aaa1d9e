"""Tests recall from notes and messages: the right ones, once, and never another user's."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import stenolog
from stenolog.catalog import Catalog, open_catalog
from stenolog.catalog.message_metadata import mark_received
from stenolog.errors import UsageError
from stenolog.memory.notes import Draft, Notes
from stenolog.memory.ranking import Candidate, Kind, parse_question
from stenolog.memory.recall import (
    CLOSING,
    HEADING,
    MAX_TEXT_CHARACTERS,
    OPENING,
    RecallResult,
    excerpt,
    format_recall,
    memory_block,
    recall,
)
from stenolog.memory.scopes import Scope
from stenolog.sessions.keys import owner_in_key
from stenolog.stores.base import Store
from stenolog.tokens import estimate
from support.recall_set import OWNER, Place, plain_search, talks, tell_all

NOW = datetime(2026, 6, 17, 15, 30, tzinfo=UTC)
ME = Scope(who="telegram:1", of="sender")


@pytest.fixture(params=["jsonl", "sqlite", "memory"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return {"jsonl": f"{tmp_path}/w", "sqlite": f"sqlite:{tmp_path}/s.db", "memory": "memory:"}[
        request.param
    ]


@pytest.fixture
def store(where: str) -> Iterator[Store]:
    with stenolog.open_store(where) as opened:
        yield opened


@pytest.fixture
def catalog(store: Store) -> Iterator[Catalog]:
    with open_catalog(store) as opened:
        yield opened


@pytest.fixture
def notes(where: str) -> Iterator[Notes]:
    with stenolog.open_store(where, namespace="notes") as opened:
        yield Notes(opened)


def _say(store: Store, key: str, *texts: str, days: float = 1) -> None:
    said = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]
    said = [
        mark_received(body, sender=owner_in_key(key)) if body["role"] == "user" else body
        for body in said
    ]
    store.add_messages(key, said, at=[NOW - timedelta(days=days)] * len(said))


def _fact(text: str, **more: object) -> Draft:
    return Draft(kind="core", text=text, **more)  # type: ignore[arg-type]


def _texts(found: RecallResult) -> list[str]:
    return [one.text for one in found.found]


# --- results ---------------------------------------------------------------------------------


def test_messages_are_found_without_any_note(store: Store, catalog: Catalog) -> None:
    _say(store, "telegram:1", "When do we sail?", "The ferries leave at nine.")
    found = recall("ferry?", scope=ME, notes=None, catalog=catalog, now=NOW)
    assert "(assistant, telegram:1:2) The ferries leave at nine." in found.block
    assert found.tokens == estimate(found.block)


def test_notes_are_found_without_any_message(notes: Notes) -> None:
    notes.add(ME, [_fact("Eats no meat.", about="diet"), _fact("Plays chess.")])
    asked = partial(recall, "What is my diet?", scope=ME, notes=notes, catalog=None, now=NOW)
    assert sorted(_texts(asked())) == ["Eats no meat.", "Plays chess."]
    # Notes that match the question come first.
    found = asked(budget=asked().tokens - 1)
    assert _texts(found) == ["Eats no meat."]
    assert f"(fact, {found.found[0].source}) Eats no meat." in found.block


def test_newest_facts_are_included_without_match(notes: Notes) -> None:
    notes.add(ME, [_fact(f"Fact number {number}.") for number in range(80)])
    notes.add(Scope(who="telegram:2"), [_fact("Somebody else's.")])
    for question in ("Hello!", "", "What shall I wear?"):
        asked = partial(recall, question, scope=ME, notes=notes, catalog=None, now=NOW)
        found = asked(budget=400)
        assert found.block
        assert found.tokens <= 400
        assert "Somebody" not in found.block


def test_notes_and_messages_share_one_block(store: Store, catalog: Catalog, notes: Notes) -> None:
    _say(store, "telegram:1", "The ferry was late.")
    notes.add(ME, [_fact("Is afraid of ferries."), Draft(kind="daily", text="Missed a ferry.")])
    found = recall("ferry", scope=ME, notes=notes, catalog=catalog, now=NOW)
    assert _texts(found)[0] == "Is afraid of ferries."
    assert sorted(_texts(found)[1:]) == ["Missed a ferry.", "The ferry was late."]


def test_empty_question_or_result_gives_no_block(
    store: Store, catalog: Catalog, notes: Notes
) -> None:
    _say(store, "telegram:1", "The ferry was late.")
    for question in ("", "and then?", "zanzibar"):
        found = recall(question, scope=ME, notes=notes, catalog=catalog, now=NOW)
        assert found == RecallResult(block="", found=(), tokens=0)


def test_superseded_and_forgotten_notes_are_not_recalled(notes: Notes) -> None:
    old, other = notes.add(ME, [_fact("Lives in Rome."), _fact("Lives with two cats.")])
    notes.add(ME, [_fact("Lives in Graz.", supersedes=(old.id,))])
    notes.forget(ME, other.id)
    found = recall("where do I live", scope=ME, notes=notes, catalog=None, now=NOW)
    assert _texts(found) == ["Lives in Graz."]


def test_visible_messages_of_asking_session_are_left_out(store: Store, catalog: Catalog) -> None:
    _say(store, "telegram:1", "The first ferry.", "Yes.", "The second ferry.", "No.")
    _say(store, "telegram:t:1", "The third ferry.")
    store.checkpoint("telegram:1", summary="ferries", upto=2)
    found = recall(
        *("ferry",),
        scope=ME,
        notes=None,
        catalog=catalog,
        now=NOW,
        exclude_session="telegram:1",
    )
    assert set(_texts(found)) == {"The first ferry.", "Yes.", "The third ferry."}


def test_the_question_itself_is_not_recalled(store: Store, catalog: Catalog) -> None:
    _say(store, "telegram:1", "Which  ferry is best?", "The ferry at nine.")
    found = recall("which ferry is best?", scope=ME, notes=None, catalog=catalog, now=NOW)
    assert _texts(found) == ["The ferry at nine."]


def test_earlier_recall_blocks_are_neither_matched_nor_returned(
    store: Store, catalog: Catalog
) -> None:
    block = memory_block(["zanzibar is far"])
    _say(store, "telegram:1", f"{block}\nWhere is the ferry?")
    assert recall("zanzibar", scope=ME, notes=None, catalog=catalog, now=NOW).block == ""
    found = recall("ferry", scope=ME, notes=None, catalog=catalog, now=NOW)
    assert _texts(found) == ["Where is the ferry?"]
    assert "zanzibar" not in found.block
    _say(store, "telegram:2:1", "Zanzibar at noon.")
    asked = f"{block}\nHello!"
    assert recall(asked, scope=ME, notes=None, catalog=catalog, now=NOW).block == ""


def test_duplicate_texts_are_returned_once(store: Store, catalog: Catalog) -> None:
    for days in (1, 2, 3):
        _say(store, f"telegram:{days}:1", "The ferry leaves at nine.", days=days)
    found = recall("ferry", scope=ME, notes=None, catalog=catalog, now=NOW)
    assert [one.at for one in found.found] == [NOW - timedelta(days=1)]


def test_period_in_the_question_limits_the_result(store: Store, catalog: Catalog) -> None:
    _say(store, "telegram:1:1", "We met Anna.", days=40)
    _say(store, "telegram:2:1", "We met Bert.", days=1)
    for question, first in (("Who did we meet in May?", "We met Anna."), ("yesterday", "Bert")):
        found = recall(question, scope=ME, notes=None, catalog=catalog, now=NOW)
        assert first in found.found[0].text


def test_time_without_a_zone_is_rejected() -> None:
    with pytest.raises(UsageError, match="zone"):
        recall("x", scope=ME, notes=None, catalog=None, now=datetime(2026, 1, 1))  # noqa: DTZ001


# --- users -----------------------------------------------------------------------------------


def test_two_agents_of_one_user_have_separate_notes(
    store: Store, catalog: Catalog, notes: Notes
) -> None:
    coder = Scope(agent="coder", who=ME.who, of="sender")
    notes.add(coder, [_fact("Knows the ferry.")])
    _say(store, "telegram:t:1", "Said to coder: ferry.")
    store.set_meta("telegram:t:1", agent="coder")
    asked = partial(recall, "ferry", notes=notes, catalog=catalog, now=NOW)
    assert asked(scope=ME).block == ""
    assert len(asked(scope=coder).found) == 2


# --- quality ---------------------------------------------------------------------------------


def _place(source: str) -> Place:
    key, _, seq = source.rpartition(":")
    return key, int(seq)


def test_recall_finds_more_answers_than_plain_search(store: Store, catalog: Catalog) -> None:
    """Counts how many answers of recall_set.txt are among the first five results."""
    said = talks()
    tell_all(store, said)
    asked = [one for talk in said for one in talk.asked]
    plain = plain_search(said, [one.text for one in asked], limit=5)
    ours = [
        {
            _place(found.source)
            for found in recall(
                one.text,
                scope=Scope(who=OWNER, of="sender"),
                notes=None,
                catalog=catalog,
                now=NOW,
            ).found[:5]
        }
        for one in asked
    ]
    found_plain = sum(bool(one.answers & found) for one, found in zip(asked, plain, strict=True))
    found_ours = sum(bool(one.answers & found) for one, found in zip(asked, ours, strict=True))
    assert len(asked) >= 50
    assert found_ours >= 1.4 * found_plain


# --- the block ------------------------------------------------------------------------------------


ASKED = parse_question("when does the ferry leave?", now=NOW)


def _ranked(
    text: str, *, kind: Kind = "message", score: float = 1.0, days: int = 0, source: str = "cli:a:7"
) -> Candidate:
    at = NOW - timedelta(days=days)
    role = "user" if kind == "message" else ""
    return Candidate(kind=kind, source=source, at=at, text=text, role=role, score=score)


def _format(*ranked: Candidate, budget: int = 1_500) -> RecallResult:
    return format_recall(ranked, ASKED, budget=budget, count_tokens=estimate, zone=UTC)


def test_each_line_has_its_date_its_source_and_its_text() -> None:
    found = _format(
        _ranked("The ferry leaves\nat nine."),
        _ranked("Asked about ferries.", kind="daily", score=0.5, days=1, source="n2"),
        _ranked("Is afraid of ferries.", kind="core", score=0.4, days=60, source="n1"),
    )
    assert found.block.splitlines() == [
        OPENING,
        HEADING,
        "- [2026-04-18 15:30] (fact, n1) Is afraid of ferries.",
        "- [2026-06-17 15:30] (user, cli:a:7) The ferry leaves at nine.",
        "- [2026-06-16 15:30] (note, n2) Asked about ferries.",
        CLOSING,
    ]
    assert [one.source for one in found.found] == ["n1", "cli:a:7", "n2"]
    assert found.tokens == estimate(found.block)


def test_dates_are_shown_in_the_zone() -> None:
    east = timezone(timedelta(hours=9))
    found = format_recall([_ranked("x")], ASKED, budget=500, count_tokens=estimate, zone=east)
    assert "[2026-06-18 00:30]" in found.block


def test_the_newest_facts_come_first_and_the_rest_by_score() -> None:
    found = _format(
        _ranked("a", score=3, days=9),
        _ranked("b", score=2, days=1),
        _ranked("old", kind="core", score=2, days=50),
        _ranked("new", kind="core", score=1, days=2),
    )
    assert [one.text for one in found.found] == ["new", "old", "a", "b"]


def test_worst_entries_are_dropped_first() -> None:
    many = [_ranked(f"ferry number {n}", score=100 - n, source=f"cli:a:{n}") for n in range(90)]
    found = _format(*many, budget=200)
    assert found.tokens <= 200
    assert [one.source for one in found.found] == [f"cli:a:{n}" for n in range(len(found.found))]
    assert 3 < len(found.found) < 30
    assert _format(*many, budget=5) == RecallResult()


def test_shorter_entry_may_fit_after_a_longer_one_did_not() -> None:
    found = _format(_ranked("ferry " * 60, score=2), _ranked("ferry at nine", score=1), budget=80)
    assert [one.text for one in found.found] == ["ferry at nine"]


def test_excerpt_is_cut_around_the_matched_words() -> None:
    text = f"{'before ' * 200}the ferries leave at nine{' after' * 200}"
    short = excerpt(text, ASKED.stems)
    assert "the ferries leave at nine" in short
    assert short.startswith("…")
    assert short.endswith("…")
    assert len(short) <= MAX_TEXT_CHARACTERS + 2
    assert excerpt("beginning " * 200, ASKED.stems).startswith("beginning beginning")


@given(
    st.lists(st.builds(_ranked, st.text(max_size=900), score=st.floats(0.1, 9))),
    st.integers(0, 600),
)
def test_block_never_exceeds_its_budget(ranked: list[Candidate], budget: int) -> None:
    found = _format(*ranked, budget=budget)
    assert found.tokens == estimate(found.block) <= budget
    assert bool(found.block) == bool(found.found)


def test_budget_holds_for_a_non_additive_token_counter() -> None:
    def count(text: str) -> int:
        return text.count("\n") ** 2

    ranked = [_ranked(f"ferry {number}") for number in range(9)]
    found = format_recall(ranked, ASKED, budget=30, count_tokens=count, zone=UTC)
    assert found.tokens == count(found.block) <= 30
    assert len(found.found) == 3
