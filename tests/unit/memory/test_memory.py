"""Memory as a loop holds it, on every engine."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from stenolog.errors import NoSuchNote, StoreClosed, UsageError
from stenolog.memory.blocks import strip_blocks
from stenolog.memory.consolidation import Consolidated
from stenolog.memory.memory import Memory, open_memory
from stenolog.memory.scopes import Scope
from stenolog.providers.scripted import Scripted
from stenolog.stores.base import Store
from stenolog.stores.opening import open_store

ANN, BOB, EVE = "telegram:ann", "telegram:bob", "telegram:eve"
ENGINES = {"memory": "memory:", "jsonl": "{}/w", "sqlite": "sqlite:{}/s.db"}


def clerk(messages: Sequence[Mapping[str, Any]]) -> str:
    """A model that takes each sentence of the user for a fact."""
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
    with open_memory(where, ask=Scripted([clerk] * 20), sessions=sessions) as opened:
        yield opened


def talk(sessions: Store, key: str, said: str) -> None:
    sessions.add_message(key, "user", said)
    sessions.add_message(key, "assistant", "Noted.")


def test_what_was_said_is_consolidated_and_recalled(sessions: Store, memory: Memory) -> None:
    talk(sessions, ANN, "My bicycle is red")

    assert memory.consolidate(ANN) == Consolidated(turns=1, daily=1, core=1)

    found = memory.recall("which colour has the bicycle", key="telegram:elsewhere:ann")
    assert "My bicycle is red" in found.block
    assert strip_blocks(found.block).strip() == ""
    assert found.tokens <= 1_500


def test_recall_works_before_consolidation(sessions: Store, memory: Memory) -> None:
    talk(sessions, ANN, "My bicycle is red")

    assert "bicycle is red" in memory.recall("bicycle", scope=Scope(who=ANN)).block


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
                with pytest.raises(NoSuchNote):
                    memory.forget(note.id, key=key)
    assert all(len(memory.notes.list(Scope(who=key))) == 3 for key in hobbies)


def test_what_is_remembered_by_hand_can_be_forgotten_by_hand(memory: Memory) -> None:
    note = memory.remember("Takes the bus at 8.", key=ANN, about="bus")
    assert "bus at 8" in memory.recall("when does the bus go", key=ANN).block

    memory.forget(note.id, key=ANN)

    assert memory.recall("when does the bus go", key=ANN).block == ""
    memory.notes.undo(Scope(who=ANN))
    memory.forget(note.id, scope=Scope(who=ANN), purge=True)
    assert memory.notes.list(Scope(who=ANN), full=True) == []


def test_what_is_remembered_about_the_same_takes_the_place_of_the_old(memory: Memory) -> None:
    memory.remember("Lives in Rome.", key=ANN, about="home town")
    memory.remember("Lives in Oslo.", key=ANN, about="Home-town")
    memory.remember("Went home.", key=ANN, about="home town", kind="daily")

    assert [note.text for note in memory.notes.list(Scope(who=ANN))] == [
        *("Lives in Oslo.", "Went home."),
    ]


def test_a_secret_is_not_remembered_by_hand_either(memory: Memory) -> None:
    key = "sk-proj-" + "Ab3dEf9h" * 6

    assert key not in memory.remember(f"The key is {key}.", key=ANN).text


def test_switched_off_it_makes_no_notes_and_loses_none(where: str, sessions: Store) -> None:
    talk(sessions, ANN, "My bicycle is red")
    with open_memory(where, ask=Scripted([]), consolidation=False, sessions=sessions) as off:
        assert off.consolidate(ANN) == Consolidated()
        off.skip(ANN)
        assert off.notes.list(Scope(who=ANN)) == []

    with open_memory(where, ask=Scripted([clerk]), sessions=sessions) as on:
        assert on.consolidate(ANN).turns == 1


def test_whose_memory_is_meant_must_be_said(memory: Memory) -> None:
    with pytest.raises(UsageError, match="whose memory"):
        memory.recall("anything")
    with pytest.raises(UsageError, match="not of"):
        memory.recall("anything", key=ANN, scope=Scope(who=BOB))
    assert memory.scope(key="telegram:thread:ann") == memory.scope(key=ANN) == Scope(who=ANN)


def test_it_closes_what_it_opened_and_nothing_else(where: str, sessions: Store) -> None:
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


def test_agents_have_sessions_and_memories_of_their_own(tmp_path: Path) -> None:
    with open_memory(tmp_path) as main, open_memory(tmp_path, agent="cook") as cook:
        main.remember("Has a dog.", key=ANN)
        cook.remember("Eats no meat.", key=ANN)

        assert [note.text for note in main.notes.list(main.scope(key=ANN))] == ["Has a dog."]
        assert "dog" not in cook.recall("dog meat", key=ANN).block
        assert "meat" in cook.recall("dog meat", key=ANN).block


def test_a_place_that_cannot_be_opened_leaves_nothing_open(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("in the way")

    with pytest.raises(Exception, match="notes"):
        open_memory(tmp_path)
