"""Tests consolidation and a summary by a real small model, from messages to the recalled block.

The model is very small and seldom right, so the tests check what holds for every answer: the
requested shape, no fact without the user's words, nothing over the budget.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from stenolog.context.context import Context
from stenolog.context.summary import SECTIONS
from stenolog.context.window import Limits
from stenolog.memory.evidence import is_quoted
from stenolog.memory.facade import Memory, open_memory
from stenolog.providers.json_answers import read_object
from stenolog.stores.open_store import open_store
from support.small_model import CONTEXT_TOKENS, SmallModel, weights

pytestmark = pytest.mark.llm

KEY = "telegram:7"
TALK = (
    ("I live in Lisbon and I am allergic to hazelnuts.", "Good to know: no hazelnuts."),
    ("Which river flows through my city?", "The Tagus."),
    ("My sister Ingrid visits me in March. Remind me to book a table.", "I will remind you."),
    ("We decided to use PostgreSQL for the booking service.", "PostgreSQL it is."),
)


@pytest.fixture(scope="module")
def model() -> SmallModel:
    return SmallModel(weights())


@pytest.fixture
def memory(tmp_path: Path, model: SmallModel) -> Iterator[Memory]:
    with open_store(tmp_path) as store:
        for asked, answered in TALK:
            store.add_message(KEY, "user", asked)
            store.add_message(KEY, "assistant", answered)
    with open_memory(tmp_path, complete=model) as opened:
        yield opened


def test_consolidation_by_a_real_model_covers_every_turn_without_invented_facts(
    memory: Memory, model: SmallModel, capsys: pytest.CaptureFixture[str]
) -> None:
    before = model.calls
    done = memory.consolidate(KEY)
    assert model.calls > before
    assert (done.turns, done.daily, done.waiting, done.problems) == (len(TALK), len(TALK), 0, ())
    spoken = [asked for asked, _ in TALK]
    notes = memory.notes.list(memory.scope(key=KEY))
    facts = [note for note in notes if note.kind == "core"]
    assert all(is_quoted(note.quote, spoken) for note in facts)
    with capsys.disabled():
        print(f"\n    {done}")
        for note in notes:
            print(f"    {note.kind}: {note.text!r}" + (f" <- {note.quote!r}" * bool(note.quote)))
    assert memory.consolidate(KEY).turns == 0
    # Its notes and the user's words: the latter are found regardless of the notes.
    asked, scope = "When does my sister Ingrid visit?", memory.scope(key=KEY)
    recalled = memory.recall(asked, scope=scope)
    assert TALK[2][0] in recalled.block
    assert 0 < recalled.tokens <= 1_500
    assert 0 < memory.recall(asked, scope=scope, budget=100).tokens <= 100 < recalled.tokens


def test_summary_of_a_real_model_is_continued_and_the_window_fits(
    tmp_path: Path, model: SmallModel, capsys: pytest.CaptureFixture[str]
) -> None:
    limits = Limits(max_context_tokens=CONTEXT_TOKENS // 4, max_history_messages=8)
    with open_store(tmp_path) as store:
        context = Context(store, model, limits=limits, system="You are brief.")
        told = []
        for number in range(12):
            asked, answered = TALK[number % len(TALK)]
            store.add_message(KEY, "user", f"{asked} ({number})")
            store.add_message(KEY, "assistant", answered)
            if (done := context.summarize_if_needed(KEY)) is not None:
                told.append(done)
            assert context.window(KEY).tokens <= limits.room
        assert told
        assert any(not done.fallback for done in told), [done.fallback for done in told]
        summary = store.get_summary(KEY)
        with capsys.disabled():
            print(f"\n    {len(told)} compactions; the summary:\n{summary}")
        assert summary
        answer = context.call(KEY, lambda messages: model(messages, max_tokens=40))
        assert answer
        prompt, _ = model.reported
        assert prompt <= limits.max_context_tokens


def test_real_model_follows_the_schema(model: SmallModel) -> None:
    from stenolog.context.summary import SCHEMA

    asked = [{"role": "user", "content": "user: I moved to Porto. We chose the blue tiles."}]
    found = read_object(model(asked, schema=SCHEMA, max_tokens=300))
    # A long answer may be cut off, but it starts in the requested shape.
    assert found
    assert set(found) <= {*SECTIONS, "last_state", "outdated"}
    for name, told in found.items():
        assert isinstance(told, str if name == "last_state" else list)


def test_too_long_request_is_recognized_as_overflow(model: SmallModel, tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        for number in range(30):
            store.add_message(
                KEY, "user", f"{number}: " + "tell me about tides and the moon. " * 40
            )
            store.add_message(KEY, "assistant", "The moon pulls. " * 20)
        # With a limit that is too large, the server's error message reduces it.
        context = Context(store, limits=Limits(max_context_tokens=4 * CONTEXT_TOKENS))
        assert context.window(KEY).tokens > CONTEXT_TOKENS
        answer = context.call(KEY, lambda messages: model(messages, max_tokens=20))
        assert answer
        assert context.window(KEY).tokens < CONTEXT_TOKENS
