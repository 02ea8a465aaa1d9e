"""Tests consolidation on every engine: which turns and facts become notes, and only once."""

import json
import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct

from stenolog.errors import NotStored
from stenolog.memory import consolidation as module
from stenolog.memory.consolidation import MAX_ATTEMPTS, ConsolidationReport, Consolidator
from stenolog.memory.notes import Notes
from stenolog.memory.recall import memory_block
from stenolog.memory.scopes import Scope
from stenolog.memory.transcript import Turn, make_turn
from stenolog.records import Message, SessionInfo
from stenolog.stores.base import Store
from stenolog.stores.in_memory import InMemoryStore
from stenolog.stores.open_store import open_store
from support.scripted_completion import CompletionStep, ScriptedCompletion
from support.strategies import messages

KEY = "telegram:1"
ANN = Scope(who="telegram:1")
NOON = datetime(2026, 5, 4, 12, 0, tzinfo=UTC)


class Place(Struct):
    """Stores of sessions and notes."""

    sessions: Store
    notes: Notes

    def consolidation(self, ask: Any, **options: Any) -> Consolidator:
        return Consolidator(self.sessions, self.notes, ask, **options)

    def run(self, *answers: CompletionStep, key: str = KEY, **options: Any) -> ConsolidationReport:
        """Run once with a model that has these answers."""
        return self.consolidation(ScriptedCompletion(answers), **options).run(key)

    def talk(self, said: str, answer: str = "Fine.", *, key: str = KEY) -> None:
        self.sessions.add_message(key, "user", said)
        self.sessions.add_message(key, "assistant", answer)

    def daily(self, scope: Scope = ANN) -> list[str]:
        return [note.text for note in self.notes.list(scope, kind="daily", full=True)]

    def core(self, scope: Scope = ANN) -> list[str]:
        return [note.text for note in self.notes.list(scope, kind="core")]


@pytest.fixture(params=["memory:", "{}/w", "sqlite:{}/s.db"], ids=["memory", "jsonl", "sqlite"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """Yield two empty stores on one engine."""
    where = request.param.format(tmp_path)
    with open_store(where) as sessions, open_store(where, namespace="notes") as notes:
        yield Place(sessions, Notes(notes))


@pytest.fixture
def quick() -> Place:
    """Return two empty stores in memory, for tests that do not depend on the engine."""
    return Place(InMemoryStore(), Notes(InMemoryStore()))


def fact(text: str, quote: str, about: str = "") -> dict[str, Any]:
    return {"text": text, "about": about, "quote": quote}


def happened(number: int) -> str:
    """Return a daily entry for this turn, without digits that do not occur in the conversation."""
    return f"Happened {'abcdefghijklmnopqrst'[number - 1]}."


def answer(*turns: Sequence[Mapping[str, Any]]) -> str:
    """Return a model's answer about these turns, with these facts."""
    told = [
        {"turn": number, "daily": happened(number), "facts": found}
        for number, found in enumerate(turns, 1)
    ]
    return json.dumps({"turns": told})


def sentences(messages: Sequence[Mapping[str, Any]]) -> str:
    """Answer as a model that treats every line as a fact, and quotes it."""
    turns = re.split(r"^## Turn \d+.*$", str(messages[-1]["content"]), flags=re.MULTILINE)[1:]
    return answer(
        *(
            [fact(line.strip(), line.strip()) for line in turn.splitlines() if line[:1] == " "]
            for turn in turns
        )
    )


# --- two phases ------------------------------------------------------------------------------


def test_finished_turn_becomes_a_daily_entry_and_facts(place: Place) -> None:
    place.talk("I eat no meat, by the way")

    done = place.run(answer([fact("Eats no meat.", "I eat no meat", "diet")]))

    assert done == ConsolidationReport(turns=1, daily=1, core=1)
    [daily] = place.notes.list(ANN, kind="daily")
    [core] = place.notes.list(ANN, kind="core")
    assert (daily.kind, daily.text) == ("daily", happened(1))
    assert (core.kind, core.text, core.about, core.quote) == (
        *("core", "Eats no meat.", "diet", "I eat no meat"),
    )
    info = place.sessions.info(KEY)
    said = place.sessions.get_history(KEY)[0].at
    for note in (daily, core):
        assert (note.session, note.uid, note.seqs, note.at) == (KEY, info.uid, (1, 2), said)


def test_a_turn_is_consolidated_once_and_the_next_one_follows(place: Place) -> None:
    place.talk("one")
    assert place.run(answer([])).turns == 1
    assert place.run() == ConsolidationReport()
    place.talk("two")
    place.sessions.add_message(KEY, "user", "not answered yet")

    assert place.run(answer([])).turns == 1
    assert place.run() == ConsolidationReport()
    assert len(place.daily()) == 2


def test_newer_fact_supersedes_the_older_one_of_its_subject(place: Place) -> None:
    place.talk("I live in Rome")
    place.talk("I moved, I live in Oslo now")

    place.run(
        answer(
            [fact("Lives in Rome.", "I live in Rome", "home town")],
            [fact("Lives in Oslo.", "I live in Oslo now", "Home town")],
        )
    )
    place.talk("Back again: I live in Rome")
    place.run(answer([fact("Lives in Rome.", "I live in Rome", "home town")]))

    assert place.core() == ["Lives in Rome."]
    all_of_them = place.notes.list(ANN, kind="core", full=True)
    assert [note.text for note in all_of_them] == [
        *("Lives in Rome.", "Lives in Oslo.", "Lives in Rome."),
    ]
    assert [note.superseded is None for note in all_of_them] == [False, False, True]
    # The link is stored, so that readers need not compute it.
    assert all_of_them[1].supersedes == (all_of_them[0].id,)


def test_recreated_session_is_consolidated_from_the_start(place: Place) -> None:
    place.talk("one")
    place.run(answer([]))
    place.sessions.delete(KEY)
    assert place.run() == ConsolidationReport()
    place.talk("two")

    assert place.run(answer([])).turns == 1
    place.sessions.delete(KEY)
    place.sessions.admin.restore(KEY)
    assert place.run() == ConsolidationReport()


def test_fork_point_does_not_depend_on_clocks(place: Place) -> None:
    said = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    place.sessions.add_messages(KEY, said, at=[NOON + timedelta(days=90_000)] * 2)
    place.sessions.fork(KEY, "telegram:2")
    place.sessions.add_messages("telegram:2", said, at=[NOON - timedelta(days=900)] * 2)

    assert place.run(answer([]), key="telegram:2").turns == 1
    [note] = place.notes.list(Scope(who="telegram:2"))
    assert note.seqs == (3, 4)
    assert place.run(answer([])).turns == 1


def test_summarized_messages_are_consolidated_and_cleared_ones_are_not(place: Place) -> None:
    place.talk("one")
    place.talk("two")
    place.sessions.checkpoint(KEY, summary="they talked", upto=2)
    assert place.run(answer([], [])).turns == 2
    place.talk("three")
    place.sessions.clear(KEY)
    assert place.run() == ConsolidationReport()

    place.talk("four")
    assert place.run(answer([])).turns == 1
    place.sessions.undo(KEY)
    assert place.run() == ConsolidationReport()


def test_skipped_messages_are_never_consolidated(quick: Place) -> None:
    quick.talk("one")
    consolidation = quick.consolidation(ScriptedCompletion([answer([])]))
    consolidation.skip_session(KEY)
    consolidation.skip_session("nobody:0")
    quick.talk("two")

    assert consolidation.run(KEY).turns == 1
    assert quick.daily() == [happened(1)]


# --- rejected facts --------------------------------------------------------------------------


def test_planted_hallucinations_are_rejected_and_counted(place: Place) -> None:
    place.sessions.add_message(KEY, "user", "Which wine goes with fish? Sounds good to me")
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    place.sessions.add_full_message(KEY, {"role": "assistant", "tool_calls": [call]})
    place.sessions.add_full_message(
        KEY, {"role": "tool", "tool_call_id": "1", "content": "I collect old wine"}
    )
    place.sessions.add_message(KEY, "assistant", "You own a boat, don't you?")

    done = place.run(
        answer(
            [
                fact("Eats no meat.", "I eat no meat", "diet"),
                fact("Owns a boat.", "You own a boat", "boat"),
                fact("Collects old wine.", "I collect old wine", "hobby"),
                fact("Owns a boat.", "Sounds good", "boat"),
                fact("Is rich.", ""),
                fact("Asks about wine with fish.", "wine goes with fish", "wine"),
            ]
        )
    )

    assert done.rejected == 5
    assert place.core() == ["Asks about wine with fish."]


def test_quote_must_be_from_the_same_turn(quick: Place) -> None:
    quick.talk("I live in Oslo")
    quick.talk("Thanks a lot")

    done = quick.run(answer([], [fact("Lives in Oslo.", "I live in Oslo")]))

    assert (done.core, done.rejected) == (0, 1)


def test_planted_secrets_reach_neither_the_model_nor_the_notes(tmp_path: Path) -> None:
    key, card = "sk-proj-" + "Ab3dEf9h" * 6, "4111 1111 1111 1111"
    with open_store(tmp_path) as sessions, open_store(tmp_path, namespace="notes") as store:
        place = Place(sessions, Notes(store))
        place.talk(f"my api key is {key} and I pay with {card}", f"Got it: {key}")
        told = {
            "turn": 1,
            "daily": f"The user gave the key {key}.",
            "facts": [
                fact(f"Pays with {card}.", "I pay with", f"card {card}"),
                fact(f"The key is {key}.", f"my api key is {key}", "key"),
            ],
        }
        model = ScriptedCompletion([json.dumps({"turns": [told]})])

        done = place.consolidation(model).run(KEY)

        assert done.redacted >= 3
        assert (done.daily, done.core, done.rejected) == (1, 0, 2)
        shown = json.dumps(model.calls)
    kept = b"".join(p.read_bytes() for p in (tmp_path / "notes").rglob("*") if p.is_file())
    assert b"redacted" in kept
    for secret in (key, card, card.replace(" ", "")):
        assert secret not in shown
        assert secret.encode() not in kept


def test_recalled_text_is_not_learned_again(quick: Place) -> None:
    consolidation = quick.consolidation(ScriptedCompletion([sentences] * 40))
    quick.talk("My dog is called Rex")
    consolidation.run(KEY)
    for number in range(30):
        block = memory_block([f"{note.at:%Y-%m-%d}: {note.text}" for note in quick.notes.list(ANN)])
        quick.sessions.add_message(KEY, "user", f"{block}\nHow is his paw today?")
        quick.sessions.add_message(KEY, "assistant", f"Rex is fine, day {number}. {block}")
        consolidation.run(KEY)

    assert quick.core() == ["My dog is called Rex", "How is his paw today?"]
    assert max(map(len, quick.daily())) < 100


# --- a model that fails ----------------------------------------------------------------------


def test_turn_gets_a_daily_entry_without_a_model(place: Place) -> None:
    place.talk("Where is my bike?", "In the yard.")

    assert place.consolidation(None).run(KEY) == ConsolidationReport(turns=1, daily=1)
    assert place.daily() == ["The user: Where is my bike? The assistant: In the yard."]
    assert place.consolidation(None).run(KEY) == ConsolidationReport()


@pytest.mark.parametrize("given", ["I'd rather not.", None, 5, b"{}", {"turns": []}])
def test_answer_that_is_not_json_leaves_a_daily_entry(quick: Place, given: Any) -> None:
    quick.talk("Where is my bike?", "In the yard.")

    done = quick.run(lambda _: given)

    assert (done.turns, done.daily, done.core, done.waiting) == (1, 1, 0, 0)
    assert "not JSON" in done.problems[0]
    assert quick.daily() == ["The user: Where is my bike? The assistant: In the yard."]


def test_unusable_answer_is_followed_by_one_request_per_turn(quick: Place) -> None:
    for number in range(3):
        quick.talk(f"I like tea number {number}")
    model = ScriptedCompletion(
        ["{", answer([fact("Likes tea.", "I like tea")]), "no", "```json\n" + answer([]) + "\n```"]
    )

    done = quick.consolidation(model).run(KEY)

    assert (done.turns, done.daily, done.core, len(done.problems)) == (3, 3, 1, 1)


def test_requests_per_turn_count_as_calls(quick: Place) -> None:
    for number in range(5):
        quick.talk(f"I like tea number {number}")
    model = ScriptedCompletion(["{", *[answer([])] * 5])
    consolidation = quick.consolidation(model)

    done = consolidation.run(KEY, most_calls=3)

    assert (done.turns, done.waiting, len(model.calls)) == (2, 3, 3)
    assert consolidation.run(KEY).turns == 3
    assert len(quick.daily()) == 5


def test_only_turns_of_the_next_requests_are_prepared(
    quick: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(100):
        quick.talk(f"said {number}")
    made: list[Sequence[Message]] = []

    def counted(turn: Sequence[Message], info: SessionInfo) -> Turn | None:
        made.append(turn)
        return make_turn(turn, info)

    monkeypatch.setattr(module, "make_turn", counted)
    done = quick.consolidation(ScriptedCompletion([answer([], [])] * 3), max_turns=2).run(
        KEY, most_calls=3
    )

    # Each once more after the model call: messages may have been withdrawn.
    assert (done.turns, done.waiting, len(made)) == (6, 94, 12)


def test_turn_missing_in_the_answer_gets_a_daily_entry(quick: Place) -> None:
    quick.talk("one")
    quick.talk("two", "Well.")

    assert quick.run(answer([])).turns == 2
    assert quick.daily() == [happened(1), "The user: two The assistant: Well."]


def test_model_failure_is_logged_without_secrets(
    quick: Place, caplog: pytest.LogCaptureFixture
) -> None:
    quick.talk("I live in Oslo")
    down = TimeoutError("no route for sk-abcdefghijklmnopqrstuvwxyz123456")
    done = quick.run(down, clock=lambda: NOON)
    assert "TimeoutError: no route for [redacted" in done.problems[0]
    quick.run("Oslo!", clock=lambda: NOON + timedelta(days=1))
    failed, unread = [record.getMessage() for record in caplog.records]
    assert failed.startswith(f"no notes of {KEY!r} yet: the model failed: TimeoutError: no route")
    assert "sk-abc" not in failed
    assert unread == f"no facts of {KEY!r}: the model's answer about the turn at 2 is not JSON"


def test_failed_request_is_retried_later_without_loss(place: Place) -> None:
    now = NOON
    place.talk("I live in Oslo")
    model = ScriptedCompletion(
        [TimeoutError("no route"), answer([fact("Lives in Oslo.", "live in Oslo")])]
    )

    def run() -> ConsolidationReport:
        # A new object each time: attempts are known after a restart, too.
        return place.consolidation(model, clock=lambda: now).run(KEY)

    first = run()
    assert (first.turns, first.waiting) == (0, 1)
    assert "TimeoutError: no route" in first.problems[0]
    assert place.daily() == []
    again = run()
    assert (again.waiting, again.retry_at) == (1, first.retry_at)
    assert first.retry_at is not None
    assert len(model.calls) == 1
    now += timedelta(minutes=2)
    assert run() == ConsolidationReport(turns=1, daily=1, core=1)


def test_turn_gets_daily_entry_after_last_failed_attempt(quick: Place) -> None:
    now = NOON
    quick.talk("poison")
    quick.talk("I live in Oslo")

    def fails_on_poison(messages: Sequence[Mapping[str, Any]]) -> str:
        if "poison" in str(messages[-1]["content"]):
            raise ValueError("filtered")
        return answer([fact("Lives in Oslo.", "live in Oslo")])

    consolidation = quick.consolidation(
        ScriptedCompletion([fails_on_poison] * 20), clock=lambda: now
    )
    waits = []
    while (done := consolidation.run(KEY)).waiting:
        waits.append(done.waiting)
        now += timedelta(days=1)

    assert waits == [2] * (MAX_ATTEMPTS - 1)
    assert (done.turns, done.daily, done.core) == (2, 2, 1)
    assert quick.daily() == ["The user: poison The assistant: Fine.", happened(1)]


def test_failed_batch_is_retried_with_one_turn(quick: Place) -> None:
    now = NOON
    for number in range(4):
        quick.talk(f"said {number}")

    def small(messages: Sequence[Mapping[str, Any]]) -> str:
        count = str(messages[-1]["content"]).count("## Turn")
        if count == 4:
            raise ValueError("maximum context length exceeded")
        return answer(*[[]] * count)

    model = ScriptedCompletion([small] * 9)
    assert quick.consolidation(model, clock=lambda: now).run(KEY).waiting == 4
    now += timedelta(hours=1)
    assert quick.consolidation(model, clock=lambda: now).run(KEY).turns == 4
    assert len(model.calls) == 3


# --- interruptions and concurrency -----------------------------------------------------------


class Interrupted(InMemoryStore):
    """A store of notes in which the n-th write fails."""

    def __init__(self) -> None:
        super().__init__()
        self._until = [-1]  # shared with the stores of its leases

    @property
    def left(self) -> int:
        return self._until[0]

    @left.setter
    def left(self, writes: int) -> None:
        self._until[0] = writes

    def _count(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise NotStored("no space left on device")

    def add_messages(self, *arguments: Any, **options: Any) -> list[int]:
        self._count()
        return super().add_messages(*arguments, **options)

    def set_meta(self, key: str, /, **fields: Any) -> None:
        self._count()
        super().set_meta(key, **fields)


def _rephrased(messages: Sequence[Mapping[str, Any]]) -> str:
    return sentences(messages).replace("Happened", "It happened")


def test_interruption_at_any_write_loses_and_repeats_no_turn() -> None:
    step = interrupted = 0
    while interrupted == step:
        step += 1
        store = Interrupted()
        place = Place(InMemoryStore(), Notes(store))
        told = [f"I have seen city{number} twice" for number in range(5)]
        for said in told[:4]:
            place.talk(said)
        store.left = step
        try:
            place.consolidation(ScriptedCompletion([sentences] * 2), max_turns=3).run(KEY)
        except NotStored:
            interrupted += 1

        # The conversation continues, and the model phrases the same facts differently.
        store.left = -1
        place.talk(told[4])
        place.consolidation(ScriptedCompletion([_rephrased] * 3), max_turns=2).run(KEY)

        assert place.core() == told
        daily = place.notes.list(ANN, kind="daily", full=True)
        assert [note.seqs for note in daily] == [(1, 2), (3, 4), (5, 6), (7, 8), (9, 10)]
    assert interrupted == 1 + 4 * 2 + 2  # the scope, the notes, the mark


def test_messages_of_other_processes_are_synced_before_consolidation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    real = os.fdatasync

    def fdatasync(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink())
        real(descriptor)

    with open_store(tmp_path) as other:
        other.add_message(KEY, "user", "My dog is called Rex")
        other.add_message(KEY, "assistant", "Hello, Rex.")
    with open_store(tmp_path) as sessions, open_store(tmp_path, namespace="notes") as notes:
        monkeypatch.setattr(os, "fdatasync", fdatasync)

        Place(sessions, Notes(notes)).run(sentences)

    places = [path.parent.name for path in synced]
    assert places[0] == "sessions"
    assert set(places[1:]) == {"notes", "locks"}


def test_note_forgotten_during_consolidation_is_not_restored(quick: Place) -> None:
    store = Interrupted()
    place = Place(quick.sessions, Notes(store))
    place.talk("My dog is called Rex")
    store.left = 4
    with pytest.raises(NotStored):
        place.run(sentences)
    [core] = place.notes.list(ANN, kind="core")
    place.notes.forget(ANN, core.id)

    place.run(sentences)

    assert place.core() == []
    assert len(place.daily()) == 1


@pytest.mark.quick(6)
@pytest.mark.parametrize("how", ["pop", "purge", "delete", "made again", "clear and skip", "hide"])
def test_messages_withdrawn_during_model_call_are_not_noted(place: Place, how: str) -> None:
    place.talk("I have been ill since May")
    place.talk("I like tea")

    def meanwhile(_: Sequence[Mapping[str, Any]]) -> str:
        match how:
            case "pop":
                while place.sessions.pop(KEY):
                    pass
            case "purge":
                place.sessions.admin.purge(KEY, before=5)
            case "delete" | "made again":
                place.sessions.delete(KEY)
            case "clear and skip":
                place.sessions.clear(KEY)
                place.consolidation(None).skip_session(KEY)
            case "hide":
                place.sessions.admin.hide(KEY, 1, 4)
        if how == "made again":
            place.talk("one", "two")
            place.talk("three", "four")
        return answer(
            [fact("Has been ill.", "I have been ill", "health")], [fact("Likes tea.", "I like tea")]
        )

    done = place.run(meanwhile)

    assert (done.turns, done.daily, done.core, done.waiting) == (0, 0, 0, 0)
    assert place.notes.list(ANN, full=True) == []


def test_rest_of_a_changed_turn_gets_entry_without_model(quick: Place) -> None:
    quick.talk("I like tea")
    quick.talk("I have been ill since May", "How sad!")

    def meanwhile(_: Sequence[Mapping[str, Any]]) -> str:
        quick.sessions.pop(KEY)
        return answer([fact("Likes tea.", "I like tea")], [fact("Is sad.", "I have been ill")])

    assert quick.run(meanwhile).turns == 2
    assert quick.core() == ["Likes tea."]
    assert quick.daily() == [happened(1), "The user: I have been ill since May"]


def test_session_deleted_during_consolidation_is_consolidated_after_restore(quick: Place) -> None:
    quick.talk("I like tea")
    quick.run(lambda _: str(quick.sessions.delete(KEY)) and answer([]))
    quick.sessions.admin.restore(KEY)

    assert quick.run(answer([])).turns == 1


class ConcurrentNotes(Notes):
    """Notes whose writers wait for a second one before they lock the scope."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.barrier = threading.Barrier(2)

    @contextmanager
    def guarded(self, scope: Scope) -> Iterator[Notes]:
        self.barrier.wait(20)
        with super().guarded(scope) as notes:
            yield notes


def test_concurrent_sessions_leave_one_fact_per_subject(place: Place) -> None:
    place.talk("I live in Rome", key="telegram:t1:1")
    place.talk("I live in Oslo", key="telegram:t2:1")
    barrier = threading.Barrier(2)

    def at_once(messages: Sequence[Mapping[str, Any]]) -> str:
        barrier.wait(20)
        town = "Rome" if "Rome" in str(messages[-1]) else "Oslo"
        return answer([fact(f"Lives in {town}.", f"I live in {town}", "home")])

    both = Place(place.sessions, ConcurrentNotes(place.notes.store))
    sender = Scope(who=KEY, of="sender")
    options = {"scope_of": lambda _: sender}
    runs = [
        threading.Thread(target=both.run, args=(at_once,), kwargs={"key": key, **options})
        for key in ("telegram:t1:1", "telegram:t2:1")
    ]
    for run in runs:
        run.start()
    for run in runs:
        run.join(60)

    assert place.core(sender) == ["Lives in Oslo."]
    # Rome is superseded if it was stored first, and otherwise left out, because it is older.
    *earlier, oslo = place.notes.list(sender, kind="core", full=True)
    assert [(note.text, note.superseded_by) for note in earlier] in (
        [],
        [("Lives in Rome.", oslo.id)],
    )


def test_concurrent_consolidations_note_each_turn_once(place: Place) -> None:
    for number in range(6):
        place.talk(f"I have seen city{number} twice")
    barrier = threading.Barrier(2)

    def at_once(messages: Sequence[Mapping[str, Any]]) -> str:
        barrier.wait(20)
        return sentences(messages)

    # Two objects, as in two processes: one object lets in only one thread.
    runs = [
        threading.Thread(
            target=place.consolidation(ScriptedCompletion([at_once, at_once]), max_turns=3).run,
            args=(KEY,),
        )
        for _ in range(2)
    ]
    for run in runs:
        run.start()
    for run in runs:
        run.join()

    assert len(place.daily()) == 6
    assert len(place.notes.list(ANN, kind="core", full=True)) == 6
    assert place.run() == ConsolidationReport()


@given(st.lists(messages(), max_size=4), st.text() | st.just("\ud83d\ude00"))
def test_consolidation_ends_for_any_conversation_and_answers(
    bodies: list[dict[str, Any]], told: str
) -> None:
    place = Place(InMemoryStore(), Notes(InMemoryStore()))
    place.sessions.add_messages(KEY, bodies)
    place.talk("the end")
    reply = {"turns": [{"turn": 1, "daily": told, "facts": [fact(told, told, told)]}]}

    done = place.run(*[json.dumps(reply, ensure_ascii=False)] * 9)

    assert done.waiting == 0
    assert len(place.daily()) == done.turns >= 1
    assert place.run() == ConsolidationReport()
