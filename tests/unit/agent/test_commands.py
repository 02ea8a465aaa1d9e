"""What a user says to the agent itself."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from stenolog.agent.commands import COMMANDS, Given, key_beside, new_key, parse
from stenolog.agent.events import Compacted, Inbound, Noticed
from stenolog.agent.loop import AgentLoop
from stenolog.catalog.owners import owner_of
from stenolog.errors import UsageError
from stenolog.providers.scripted import ScriptedModel
from unit.agent.agents import (
    KEY,
    SPEC,
    STORES,
    Heard,
    agent_loop,
    bodies,
    called,
    roles,
    say,
    until,
)

every_store = pytest.mark.parametrize("store", STORES)
with_store = pytest.mark.parametrize("store", ["jsonl", "sqlite"])


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("/new", Given("new", "")),
        ("/NEW ", Given("new", "")),
        ("/edit  two\nlines ", Given("edit", "two\nlines")),
        ("/stop@mybot", Given("stop", "")),
        ("/nothing x", Given("nothing", "x")),
        ("//etc", None),
        ("/", None),
        ("/etc/passwd is a file", None),
        ("/1", None),
        ("a /new", None),
        ("", None),
        ([{"type": "text", "text": "/new"}], None),
    ],
)
def test_what_is_a_command(text: Any, asked: Given | None) -> None:
    assert parse(text) == asked


def test_new_sessions_of_a_user_are_theirs() -> None:
    keys = {new_key(), new_key(), key_beside(KEY), key_beside(new_key())}
    assert len(keys) == 4
    assert {owner_of(key) for key in keys} == {KEY}
    assert owner_of(key_beside("telegram:a%3Ab")) == "telegram:a%3Ab"
    with pytest.raises(UsageError, match="channel:sender"):
        key_beside("whatever")


def _in(store: str, folder: Path, main: Callable[[AgentLoop], Any], script: Any = None) -> None:
    async def run() -> None:
        answers = script or [f"Answer {number}." for number in range(1, 20)]
        async with agent_loop(store, folder, answers) as loop:
            await main(loop)

    asyncio.run(run())


@every_store
def test_each_command_says_something_where_nothing_was_said(store: str, tmp_path: Path) -> None:
    async def main(loop: AgentLoop) -> None:
        for name in COMMANDS:
            answer = await say(loop, f"/{name}", key="cli:empty")
            assert answer.text.strip(), name
            assert answer.outcome == "command", name
        assert bodies(loop, "cli:empty") == []

    _in(store, tmp_path, main)


def test_an_unknown_command_is_told_and_not_sent(tmp_path: Path) -> None:
    async def main(loop: AgentLoop) -> None:
        assert "/help" in (await say(loop, "/nothing")).text
        assert bodies(loop) == []
        await say(loop, "//nothing")
        assert bodies(loop)[0]["content"] == "/nothing"

    _in("jsonl", tmp_path, main)


@every_store
def test_clear_hides_everything(store: str, tmp_path: Path) -> None:
    async def main(loop: AgentLoop) -> None:
        await say(loop, "one")
        answer = await say(loop, "/clear")
        assert bodies(loop) == []
        assert len(loop.registry.agent().sessions.get_history(KEY, full=True)) == 2
        assert ("/undo" in answer.text) == (store != "legacy")
        assert (await say(loop, "two")).text == "Answer 2."

    _in(store, tmp_path, main)


@with_store
def test_undo_brings_back_what_clear_hid(store: str, tmp_path: Path) -> None:
    async def main(loop: AgentLoop) -> None:
        await say(loop, "one")
        await say(loop, "/clear")
        assert "2 messages are back" in (await say(loop, "/undo")).text
        assert roles(loop) == ["user", "assistant"]
        assert "nothing" in (await say(loop, "/undo")).text

    _in(store, tmp_path, main)


@every_store
def test_retry_answers_the_last_message_again(store: str, tmp_path: Path) -> None:
    async def main(loop: AgentLoop) -> None:
        await say(loop, "one")
        answer = await say(loop, "/retry")
        assert (answer.outcome, answer.text) == ("answered", "Answer 2.")
        assert [body["content"] for body in bodies(loop)] == ["one", "Answer 2."]

    _in(store, tmp_path, main)


@every_store
def test_retry_takes_the_tools_of_the_turn_with_it(store: str, tmp_path: Path) -> None:
    async def main(loop: AgentLoop) -> None:
        await say(loop, "one")
        assert roles(loop) == ["user", "assistant", "tool", "assistant"]
        assert (await say(loop, "/retry")).text == "Without."
        assert roles(loop) == ["user", "assistant"]

    _in(store, tmp_path, main, [called("now"), "With.", "Without."])


@every_store
def test_edit_says_the_last_message_differently(store: str, tmp_path: Path) -> None:
    async def main(loop: AgentLoop) -> None:
        await say(loop, "one")
        await say(loop, "too")
        answer = await say(loop, "/edit two")
        assert answer.text == "Answer 3."
        assert [body["content"] for body in bodies(loop)] == [
            "one",
            "Answer 1.",
            "two",
            "Answer 3.",
        ]

    _in(store, tmp_path, main)


@with_store
@pytest.mark.parametrize("command", ["edit two", "retry"])
def test_an_edit_and_a_retry_can_be_undone(store: str, command: str, tmp_path: Path) -> None:
    async def main(loop: AgentLoop) -> None:
        await say(loop, "one")
        await say(loop, f"/{command}")
        assert bodies(loop)[-1]["content"] == "Answer 2."
        await say(loop, "/undo")
        assert [body["content"] for body in bodies(loop)] == ["one", "Answer 1."]
        await say(loop, "/retry")
        await say(loop, "three")
        await say(loop, "/undo")
        said = [body["content"] for body in bodies(loop)]
        assert said == ["one", "Answer 1.", "three", "Answer 4."]

    _in(store, tmp_path, main)


@every_store
def test_compact_makes_a_summary_and_tells(store: str, tmp_path: Path) -> None:
    async def main(loop: AgentLoop) -> None:
        for number in range(4):
            await say(loop, f"message {number}")
        heard = Heard()
        answer = await say(loop, "/compact", tell=heard)
        assert "are now a summary" in answer.text
        assert heard.of(Compacted)
        assert len(bodies(loop)) < 8

    _in(store, tmp_path, main)


def test_context_tells_how_much_room_is_left(tmp_path: Path) -> None:
    async def main(loop: AgentLoop) -> None:
        await say(loop, "one")
        words = (await say(loop, "/context")).text
        assert "of 27,904 tokens are sent to scripted" in words
        assert "2 messages are in sight" in words

    _in("jsonl", tmp_path, main)


def test_stop_ends_the_answer_and_what_changes_a_session_waits_for_it(tmp_path: Path) -> None:
    async def main(loop: AgentLoop) -> None:
        speaking = asyncio.create_task(say(loop, "Talk."))
        await until(lambda: KEY in loop.busy)
        for name in ("clear", "retry", "edit x", "undo", "compact", "fork"):
            assert "/stop" in (await say(loop, f"/{name}")).text
        assert (await say(loop, "/stop")).text == "Stopped."
        assert (await speaking).outcome == "interrupted"
        assert "No answer" in (await say(loop, "/stop")).text

    _in("jsonl", tmp_path, main, ScriptedModel(["word " * 500], pause=0.01))


@with_store
def test_fork_goes_on_in_a_copy(store: str, tmp_path: Path) -> None:
    async def main(loop: AgentLoop) -> None:
        await say(loop, "one")
        fork = await say(loop, "/fork what-if")
        assert fork.key == "cli:what-if:default"
        await say(loop, "two", key=fork.key)
        assert len(bodies(loop, fork.key)) == 4
        assert len(bodies(loop)) == 2
        assert "already" in (await say(loop, "/fork what-if")).text

    _in(store, tmp_path, main)


@with_store
def test_new_sessions_can_be_listed_and_resumed(store: str, tmp_path: Path) -> None:
    async def main(loop: AgentLoop) -> None:
        await say(loop, "About ferries.")
        new = await say(loop, "/new")
        assert new.key != KEY
        await say(loop, "About trains.", key=new.key)
        listed = (await say(loop, "/sessions", key=new.key)).text
        assert KEY in listed
        assert new.key in listed
        assert (await say(loop, "/resume ferries", key=new.key)).key == KEY
        assert (await say(loop, f"/resume {new.key}")).key == new.key
        assert "Several fit" in (await say(loop, "/resume about")).text
        assert "no session" in (await say(loop, "/resume zeppelin")).text

    _in(store, tmp_path, main)


@with_store
def test_the_sessions_of_other_users_are_not_shown_nor_opened(store: str, tmp_path: Path) -> None:
    async def main(loop: AgentLoop) -> None:
        await say(loop, "The secret of Ann.", key="telegram:1")
        await say(loop, "Bob.", key="telegram:2")
        assert "Ann" not in (await say(loop, "/sessions", key="telegram:2")).text
        assert (await say(loop, "/resume telegram:1", key="telegram:2")).key == "telegram:2"
        assert (await say(loop, "/resume secret", key="telegram:2")).key == "telegram:2"
        everything = await loop.hear(
            Inbound(key="telegram:2", content="/resume secret"), everything=True
        )
        assert everything.key == "telegram:1"

    _in(store, tmp_path, main)


@pytest.mark.parametrize("command", ["undo", "fork", "sessions", "resume x", "model x"])
def test_what_needs_the_store_says_that_it_is_off(command: str, tmp_path: Path) -> None:
    async def main(loop: AgentLoop) -> None:
        await say(loop, "one")
        answer = await say(loop, f"/{command}")
        assert "off while" in answer.text or "stood in for" in answer.text
        assert answer.key == KEY

    _in("legacy", tmp_path, main)


@with_store
def test_memory_is_shown_and_forgotten_by_its_user_alone(store: str, tmp_path: Path) -> None:
    async def main(loop: AgentLoop) -> None:
        memory = loop.registry.agent().memory
        assert memory is not None
        assert "Nothing" in (await say(loop, "/memory")).text
        note = memory.remember("Likes tea", key=KEY)
        assert "Likes tea" in (await say(loop, "/memory")).text
        assert "Likes tea" in (await say(loop, "/memory tea", key="cli:other:default")).text
        assert "Likes tea" not in (await say(loop, "/memory", key="cli:other")).text
        assert "no note" in (await say(loop, f"/forget {note.id}", key="cli:other")).text
        assert "Forgotten: Likes tea" in (await say(loop, f"/forget {note.id}")).text
        assert "Nothing" in (await say(loop, "/memory")).text

    _in(store, tmp_path, main)


@with_store
def test_a_session_keeps_the_model_that_was_chosen_for_it(store: str, tmp_path: Path) -> None:
    def opened(name: str) -> ScriptedModel:
        return ScriptedModel([f"I am {name}."] * 5, name=name)

    async def main() -> None:
        spec = replace(SPEC, models=("second",))
        script = ["I am the first."] * 2
        async with agent_loop(store, tmp_path, script, open_model=opened, spec=spec) as loop:
            await say(loop, "Who are you?")
            assert "not among the models" in (await say(loop, "/model third")).text
            assert "second" in (await say(loop, "/model second")).text
            assert (await say(loop, "Who?")).text == "I am second."
            assert (await say(loop, "Who?", key="cli:other")).text == "I am the first."
            local = await loop.hear(Inbound(key=KEY, content="/model third"), everything=True)
            assert "third" in local.text
            assert "scripted" in (await say(loop, "/model default")).text
            await say(loop, "/model second")
        async with agent_loop(store, tmp_path, [], open_model=opened) as loop:
            assert "second" in (await say(loop, "/model")).text
            assert (await say(loop, "Who?")).text == "I am second."
        async with agent_loop(store, tmp_path, ["Only me."]) as loop:
            heard = Heard()
            assert (await say(loop, "Who?", tell=heard)).text == "Only me."
            assert "one model only" in heard.of(Noticed)[0].words

    asyncio.run(main())
