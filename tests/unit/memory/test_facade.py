"""Tests the Memory facade on every engine."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from stenolog.catalog.message_metadata import mark_received
from stenolog.context.context import Context
from stenolog.errors import StoreClosed, UsageError
from stenolog.memory.consolidation import ConsolidationReport
from stenolog.memory.facade import Memory, open_memory
from stenolog.memory.recall import strip_blocks
from stenolog.memory.scopes import Scope
from stenolog.sessions.aliases import change_alias_mark
from stenolog.sessions.session_store import JSONLBackend
from stenolog.stores.base import Store
from stenolog.stores.in_memory import InMemoryStore
from stenolog.stores.open_store import open_store
from stenolog.tokens import Tokens
from stenolog.transfer.open_sessions import open_sessions
from support.scripted_completion import ScriptedCompletion

ANN, BOB, EVE = "telegram:ann", "telegram:bob", "telegram:eve"
ENGINES = {"memory": "memory:", "jsonl": "{}/w", "sqlite": "sqlite:{}/s.db"}


def clerk(messages: Sequence[Mapping[str, Any]]) -> str:
    """Answer as a model that treats each sentence of the user as a fact."""
    lines = str(messages[-1]["content"]).splitlines()
    said = [lines[n + 1].strip() for n, line in enumerate(lines) if line == "user:"]
    facts = [{"text": text, "about": text[-8:], "quote": text} for text in said]
    return json.dumps({"turns": [{"turn": 1, "daily": "Talked.", "facts": facts}]})


@pytest.fixture(params=ENGINES)
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return ENGINES[request.param].format(tmp_path)


@pytest.fixture
def sessions(where: str) -> Iterator[Store]:
    with open_store(where) as store:
        yield store


@pytest.fixture
def memory(where: str, sessions: Store) -> Iterator[Memory]:
    with open_memory(where, complete=ScriptedCompletion([clerk] * 20), sessions=sessions) as opened:
        yield opened


def talk(sessions: Store, key: str, said: str) -> None:
    sessions.add_message(key, "user", said)
    sessions.add_message(key, "assistant", "Noted.")


def test_conversation_is_consolidated_and_recalled(sessions: Store, memory: Memory) -> None:
    talk(sessions, ANN, "My bicycle is red")

    assert memory.consolidate(ANN) == ConsolidationReport(turns=1, daily=1, core=1)

    found = memory.recall("which colour has the bicycle", key=ANN)
    assert "My bicycle is red" in found.block
    assert strip_blocks(found.block).strip() == ""
    assert found.tokens <= 1_500


def test_three_users_in_one_store_never_see_each_other(sessions: Store, memory: Memory) -> None:
    hobbies = {ANN: "chess", BOB: "tennis", EVE: "sailing"}
    for key, hobby in hobbies.items():
        talk(sessions, key, f"My secret hobby is {hobby}")
        memory.consolidate(key)
        memory.remember(f"The hobby of this one costs money: {hobby}", key=key)

    for key, hobby in hobbies.items():
        blocks = [
            memory.recall("what is my secret hobby and what costs money", key=key).block,
            memory.recall(" ".join(hobbies.values()), scope=Scope(who=key)).block,
        ]
        for block in blocks:
            told = [name for name in hobbies.values() if name in block]
            assert told == [hobby]
        for other in set(hobbies) - {key}:
            for note in memory.notes.list(Scope(who=other), full=True):
                with pytest.raises(UsageError, match="there is no note"):
                    memory.forget(note.id, key=key)
    assert all(len(memory.notes.list(Scope(who=key))) == 3 for key in hobbies)


def test_sessions_of_one_verified_sender_share_memory_with_threads(
    where: str, sessions: Store
) -> None:
    for key, sender, text in (
        ("slack:T1:ann", "slack:ann", "My bicycle is red"),
        ("any key", "slack:ann", "My boat is blue"),
        ("slack:T2:bob", "slack:bob", "My car is green"),
        ("slack:T3:ann", "", "My plane is white"),
    ):
        body = mark_received({"role": "user", "content": text}, sender=sender)
        sessions.add_full_message(key, body)
        sessions.add_message(key, "assistant", "Noted.")
    with open_memory(
        where, threads=True, complete=ScriptedCompletion([clerk] * 4), sessions=sessions
    ) as memory:
        question = "bicycle boat car plane"
        before = memory.recall(question, key="slack:T1:ann")
        for key in sessions.list_sessions():
            memory.consolidate(key)
        after = memory.recall(question, key="any key")
        unknown = memory.recall(question, key="slack:T3:ann")

        assert memory.scope(key="slack:T1:ann") == memory.scope(key="any key")
        assert memory.scope(key="slack:T1:ann") == Scope(who="slack:ann", of="sender")
        assert memory.scope(key="slack:ann") == Scope(who="slack:ann")
        assert memory.recall(question, key="slack:ann").block == ""
    assert [found.text for found in before.found if found.role == "user"] == ["My boat is blue"]
    assert {found.text for found in after.found if found.kind == "core"} == {
        *("My bicycle is red", "My boat is blue"),
    }
    assert {found.text for found in unknown.found if found.kind == "core"} == {"My plane is white"}


def test_alias_shares_the_memory_of_its_session(sessions: Store, memory: Memory) -> None:
    talk(sessions, ANN, "My bicycle is red")
    sessions.set_meta(ANN, aliases=["telegram_ann"])
    change_alias_mark(sessions)

    assert memory.consolidate("telegram_ann").turns == 1
    note = memory.remember("Has a dog.", key="telegram_ann")

    assert memory.scope(key="telegram_ann") == Scope(who=ANN)
    found = memory.recall("the bicycle and the dog", key="telegram_ann")
    assert sorted(one.text for one in found.found) == sorted(
        [
            *("Has a dog.", "My bicycle is red"),
        ]
    )
    assert {one.kind for one in found.found} == {"core"}, "what the session sees is not told again"
    assert memory.forget(note.id, key="telegram_ann").forgotten
    assert memory.notes.scopes() == [Scope(who=ANN)]


def test_withdrawn_messages_stay_withdrawn_after_summary(sessions: Store, memory: Memory) -> None:
    talk(sessions, ANN, "Hello there")
    talk(sessions, ANN, "My boss Karl is an idiot")
    sessions.admin.hide(ANN, 3, 4)
    talk(sessions, ANN, "What is the weather")
    talk(sessions, ANN, "And tomorrow")

    assert Context(sessions).summarize(ANN) is not None
    assert sessions.info(ANN).floor >= 4

    assert "Karl" not in memory.recall("boss Karl", scope=Scope(who=ANN)).block
    memory.consolidate(ANN)
    notes = memory.notes.list(Scope(who=ANN), full=True)
    assert "Karl" not in str(notes)
    assert "weather" in str(notes)


def test_remembered_note_can_be_forgotten(memory: Memory) -> None:
    note = memory.remember("Takes the bus at 8.", key=ANN, about="bus")
    assert "bus at 8" in memory.recall("when does the bus go", key=ANN).block

    memory.forget(note.id, key=ANN)

    assert memory.recall("when does the bus go", key=ANN).block == ""
    memory.notes.undo(Scope(who=ANN))
    memory.forget(note.id, scope=Scope(who=ANN), purge=True)
    assert memory.notes.list(Scope(who=ANN), full=True) == []


def test_waiting_lists_sessions_with_pending_turns(sessions: Store, memory: Memory) -> None:
    assert memory.waiting() == []
    for key in (ANN, BOB, EVE):
        talk(sessions, key, "My bicycle is red")
    memory.consolidate(BOB)
    sessions.add_message(BOB, "user", "not answered yet")
    memory.skip(EVE)

    assert memory.waiting() == [ANN]
    for key in memory.waiting():
        memory.consolidate(key)
    assert memory.waiting() == []
    sessions.add_message(BOB, "assistant", "answered")
    assert memory.waiting() == [BOB]


def test_consolidate_limits_number_of_model_calls(where: str, sessions: Store) -> None:
    for number in range(45):
        talk(sessions, ANN, f"My bicycle number {number} is red")
    model = ScriptedCompletion([clerk] * 9)
    with open_memory(where, complete=model, sessions=sessions) as memory:
        done = memory.consolidate(ANN, most_calls=1)
        assert (done.turns, done.waiting, len(model.calls)) == (20, 25, 1)
        assert memory.waiting() == [ANN]
        assert memory.consolidate(ANN).turns == 25
        assert (len(model.calls), memory.waiting()) == (3, [])
        with pytest.raises(UsageError, match="most_calls"):
            memory.consolidate(ANN, most_calls=0)


def test_budgets_use_the_token_counter_of_the_model(where: str, sessions: Store) -> None:
    for number in range(12):
        talk(sessions, ANN, f"My bicycle number {number} is red " + "word " * 100)
    model = ScriptedCompletion([clerk] * 12)
    many = Tokens(ratio=20.0)
    with open_memory(where, complete=model, sessions=sessions, tokens=many) as memory:
        memory.consolidate(ANN)
        assert len(model.calls) > 1, "by our own estimate one call would do"
        found = memory.recall("bicycle", scope=Scope(who=ANN), budget=6_000)
        assert found.found
        assert found.tokens == many.text(found.block) <= 6_000


def test_yesterday_uses_time_zone_of_the_user(sessions: Store) -> None:
    east = timezone(timedelta(hours=10))
    now = datetime(2026, 6, 17, 15, 30, tzinfo=UTC)  # the 18th in that time zone
    for hours, text in ((3, "ferry to Rome"), (20, "ferry to Oslo"), (41, "ferry to Lima")):
        sessions.add_messages(
            ANN, [{"role": "user", "content": text}], at=[now - timedelta(hours=hours)]
        )
    told = {}
    for zone in (UTC, east):
        with Memory(sessions, InMemoryStore(), zone=zone, clock=lambda: now) as memory:
            found = memory.recall("what was yesterday", scope=Scope(who=ANN))
            told[zone] = [one.text for one in found.found]
    assert told == {UTC: ["ferry to Oslo"], east: ["ferry to Rome", "ferry to Oslo"]}


def test_remembered_fact_supersedes_fact_with_same_subject(memory: Memory) -> None:
    memory.remember("Lives in Rome.", key=ANN, about="home town")
    memory.remember("Lives in Oslo.", key=ANN, about="Home-town")
    memory.remember("Went home.", key=ANN, about="home town", kind="daily")

    assert [note.text for note in memory.notes.list(Scope(who=ANN))] == [
        *("Lives in Oslo.", "Went home."),
    ]


def test_remember_redacts_secrets(memory: Memory) -> None:
    key = "sk-proj-" + "Ab3dEf9h" * 6

    assert key not in memory.remember(f"The key is {key}.", key=ANN).text


def test_disabled_consolidation_writes_and_loses_no_notes(where: str, sessions: Store) -> None:
    talk(sessions, ANN, "My bicycle is red")
    with open_memory(
        where, complete=ScriptedCompletion([]), consolidation=False, sessions=sessions
    ) as off:
        assert off.consolidate(ANN) == ConsolidationReport()
        off.skip(ANN)
        assert off.notes.list(Scope(who=ANN)) == []

    with open_memory(where, complete=ScriptedCompletion([clerk]), sessions=sessions) as on:
        assert on.consolidate(ANN).turns == 1


def test_key_or_scope_is_required(memory: Memory) -> None:
    with pytest.raises(UsageError, match="give the key of a session or a scope"):
        memory.recall("anything")
    with pytest.raises(UsageError, match="not to"):
        memory.recall("anything", key=ANN, scope=Scope(who=BOB))
    assert memory.scope(key=ANN) == memory.scope(scope=Scope(who=ANN)) == Scope(who=ANN)


def test_close_closes_only_stores_it_opened(where: str, sessions: Store) -> None:
    memory = open_memory(where, sessions=sessions)
    memory.remember("Has a dog.", key=ANN)
    memory.recall("dog", key=ANN)

    memory.close()
    memory.close()

    talk(sessions, ANN, "still open")
    with pytest.raises(StoreClosed):
        memory.recall("dog", key=ANN)
    with pytest.raises(StoreClosed):
        memory.notes.list(Scope(who=ANN))


def test_agents_have_separate_sessions_and_memories(tmp_path: Path) -> None:
    with open_memory(tmp_path) as main, open_memory(tmp_path, agent="cook") as cook:
        main.remember("Has a dog.", key=ANN)
        cook.remember("Eats no meat.", key=ANN)

        assert [note.text for note in main.notes.list(main.scope(key=ANN))] == ["Has a dog."]
        assert "dog" not in cook.recall("dog meat", key=ANN).block
        assert "meat" in cook.recall("dog meat", key=ANN).block


def _held() -> list[str]:
    """Return the open descriptors of this process."""
    links = (Path(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd"))  # noqa: PTH208
    return sorted(str(link.readlink()) for link in links if link.is_symlink())


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"complete": lambda messages: str(messages)}, "add **options"),
        ({"complete": "gpt-5"}, "str is not callable"),
        ({"zone": "../x"}, "unknown time zone '../x'"),
        ({"zone": 2}, "unknown time zone 2; use a name such as Europe/Berlin"),
    ],
)
def test_invalid_arguments_are_rejected_and_stores_closed(
    wrong: dict[str, Any], words: str, tmp_path: Path
) -> None:
    before = _held()
    with pytest.raises(UsageError) as raised:
        open_memory(tmp_path / "w", **wrong)
    assert words in str(raised.value)
    assert _held() == before


def test_session_store_facade_is_rejected_with_hint_to_its_store(tmp_path: Path) -> None:
    face = open_sessions(tmp_path / "w")
    assert isinstance(face, JSONLBackend)
    with pytest.raises(UsageError, match=r"sessions= needs a Store.* not JSONLBackend; .*\.store"):
        open_memory(tmp_path / "w", sessions=face)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"notes= needs a Store"):
        Memory(face.store, face)  # type: ignore[arg-type]
    with open_memory(tmp_path / "w", sessions=face.store) as memory:
        assert repr(memory) == (f"Memory({face.store!r}, {memory.notes.store!r}, agent='main')")
    face.close()


def test_zone_can_be_given_by_name(sessions: Store) -> None:
    late = datetime(2026, 6, 10, 21, 30, tzinfo=UTC)
    sessions.add_messages(ANN, [{"role": "user", "content": "I saw a comet."}], at=[late])
    for zone, day in (("Asia/Tokyo", "2026-06-11 06:30"), ("America/New_York", "2026-06-10 17:30")):
        with Memory(sessions, InMemoryStore(), zone=zone) as memory:
            assert f"[{day}]" in memory.recall("comet", scope=memory.scope(key=ANN)).block


def test_session_with_the_longest_key_has_notes_and_recall(tmp_path: Path) -> None:
    key = "cli:" + "x" * 1020
    with open_store(tmp_path) as store:
        store.add_message(key, "user", "hello")
    with open_memory(tmp_path) as memory:
        memory.remember("The red boat leaves Porto at nine.", key=key)
        assert "Porto" in memory.recall("When does the red boat leave?", key=key).block
