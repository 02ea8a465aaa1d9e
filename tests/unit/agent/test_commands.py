"""Tests the chat commands that a user sends to the agent."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from stenolog.agent.commands import COMMANDS, ParsedCommand, new_key, parse_command, sibling_key
from stenolog.agent.loop import AgentLoop
from stenolog.agent.turn_events import Answer, InboundMessage, Notice, SummaryCreated
from stenolog.catalog.message_metadata import mark_seen
from stenolog.errors import UsageError
from stenolog.memory.scopes import Scope
from stenolog.sessions.keys import owner_in_key
from stenolog.testing.scripted_model import ScriptedModel
from support.agents import KEY, SPEC, STORES, Heard, agent_loop, bodies, called, roles, say, until

every_store = pytest.mark.parametrize("store", STORES)
with_store = pytest.mark.parametrize("store", ["jsonl", "sqlite"])


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("/new", ParsedCommand("new", "")),
        ("/NEW ", ParsedCommand("new", "")),
        ("/edit  two\nlines ", ParsedCommand("edit", "two\nlines")),
        ("/stop@mybot", ParsedCommand("stop", "")),
        ("/nothing x", ParsedCommand("nothing", "x")),
        ("//etc", None),
        ("/", None),
        ("/etc/passwd is a file", None),
        ("/1", None),
        ("a /new", None),
        ("", None),
        ([{"type": "text", "text": "/new"}], None),
    ],
)
def test_parse_command_recognizes_commands(text: Any, asked: ParsedCommand | None) -> None:
    assert parse_command(text) == asked


def test_new_key_belongs_to_the_same_user() -> None:
    keys = {new_key(), new_key(), sibling_key(KEY), sibling_key(new_key())}
    assert len(keys) == 4
    assert {owner_in_key(key) for key in keys} == {KEY}
    assert owner_in_key(sibling_key("telegram:a%3Ab")) == "telegram:a%3Ab"
    with pytest.raises(UsageError, match="channel:sender"):
        sibling_key("whatever")


def _in(store: str, folder: Path, main: Callable[[AgentLoop], Any], script: Any = None) -> None:
    async def run() -> None:
        answers = script or [f"Answer {number}." for number in range(1, 20)]
        async with agent_loop(store, folder, answers) as loop:
            await main(loop)

    asyncio.run(run())


@every_store
def test_every_command_replies_in_an_empty_session(store: str, tmp_path: Path) -> None:
    async def main(loop: AgentLoop) -> None:
        for name in COMMANDS:
            answer = await say(loop, f"/{name}", key="cli:empty")
            assert answer.text.strip(), name
            assert answer.outcome == "command", name
        assert bodies(loop, "cli:empty") == []

    _in(store, tmp_path, main)


def test_unknown_command_is_not_sent_to_the_model(tmp_path: Path) -> None:
    async def main(loop: AgentLoop) -> None:
        assert "/help" in (await say(loop, "/nothing")).text
        assert bodies(loop) == []
        await say(loop, "//nothing")
        assert bodies(loop)[0]["content"] == "/nothing"

    _in("jsonl", tmp_path, main)


@every_store
def test_clear_hides_all_messages_and_undo_shows_them(store: str, tmp_path: Path) -> None:
    async def main(loop: AgentLoop) -> None:
        await say(loop, "one")
        assert "/undo" in (await say(loop, "/clear")).text
        assert bodies(loop) == []
        assert len(loop.registry.agent().sessions.get_history(KEY, full=True)) == 2
        assert "2 messages are visible again" in (await say(loop, "/undo")).text
        assert roles(loop) == ["user", "assistant"]
        assert "Nothing to undo" in (await say(loop, "/undo")).text

    _in(store, tmp_path, main)


@every_store
def test_retry_hides_the_answer_and_the_tool_calls_of_the_turn(store: str, tmp_path: Path) -> None:
    async def main(loop: AgentLoop) -> None:
        await say(loop, "one")
        assert roles(loop) == ["user", "assistant", "tool", "assistant"]
        answer = await say(loop, "/retry")
        assert (answer.outcome, answer.text) == ("answered", "Without.")
        assert [body["content"] for body in bodies(loop)] == ["one", "Without."]

    _in(store, tmp_path, main, [called("now"), "With.", "Without."])


@every_store
def test_edit_replaces_the_last_message(store: str, tmp_path: Path) -> None:
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


@every_store
@pytest.mark.parametrize(
    ("command", "visible"),
    [
        ("/retry", ["first", "second", "to first", "to second again"]),
        ("/edit third", ["first", "to first", "third", "to second again"]),
    ],
)
def test_retry_keeps_the_answer_to_an_earlier_message(
    store: str, command: str, visible: list[str], tmp_path: Path
) -> None:
    async def main(loop: AgentLoop) -> None:
        sessions = loop.registry.agent().sessions
        for body in (
            {"role": "user", "content": "first"},
            {"role": "user", "content": "second"},
            mark_seen({"role": "assistant", "content": "to first"}, seen=1),
            mark_seen({"role": "assistant", "content": "to second"}, seen=3),
        ):
            sessions.add_full_message(KEY, body)
        assert (await say(loop, command)).text == "to second again"
        assert [body["content"] for body in bodies(loop)] == visible

    _in(store, tmp_path, main, ["to second again"])


@with_store
@pytest.mark.parametrize("command", ["edit two", "retry"])
def test_edit_and_retry_can_be_undone(store: str, command: str, tmp_path: Path) -> None:
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
def test_compact_summarizes_and_reports(store: str, tmp_path: Path) -> None:
    async def main(loop: AgentLoop) -> None:
        for number in range(4):
            await say(loop, f"message {number}")
        heard = Heard()
        answer = await say(loop, "/compact", on_event=heard)
        assert "were summarized" in answer.text
        assert heard.of(SummaryCreated)
        assert len(bodies(loop)) < 8

    _in(store, tmp_path, main)


def test_context_shows_used_and_available_tokens(tmp_path: Path) -> None:
    async def main(loop: AgentLoop) -> None:
        await say(loop, "one")
        words = (await say(loop, "/context")).text
        assert "of 27,904 tokens" in words
        assert "2 messages are visible" in words

    _in("jsonl", tmp_path, main)


def test_stop_ends_the_answer_and_changes_are_rejected_before_it(tmp_path: Path) -> None:
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
def test_fork_continues_in_a_copy(store: str, tmp_path: Path) -> None:
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
        assert "Several sessions match" in (await say(loop, "/resume about")).text
        assert "no session" in (await say(loop, "/resume zeppelin")).text

    _in(store, tmp_path, main)


@with_store
def test_sessions_of_other_users_are_neither_listed_nor_opened(store: str, tmp_path: Path) -> None:
    async def main(loop: AgentLoop) -> None:
        async def hear(text: str, key: str, sender: str) -> Answer:
            return await loop.handle(InboundMessage(key=key, content=text, sender=sender))

        await hear("The secret of Ann.", "telegram:1", "telegram:1")
        await hear("Ann again.", "telegram:T9:1", "telegram:1")
        await hear("Bob.", "telegram:2", "telegram:2")
        await hear("A client.", "telegram:T8:2", "")
        listed = (await hear("/sessions", "telegram:1", "telegram:1")).text
        assert "telegram:T9:1" in listed
        # The last two callers are clients of the gateway that chose a user's key.
        for key, sender in (
            *(("telegram:2", "telegram:2"), ("telegram:T8:2", ""), ("telegram:T7:1", "")),
        ):
            listed = (await hear("/sessions", key, sender)).text
            assert "Ann" not in listed
            assert ("telegram:T8:2" in listed) == (key == "telegram:T8:2")
            assert (await hear("/resume telegram:1", key, sender)).key == key
            assert (await hear("/resume secret", key, sender)).key == key
        everything = await loop.handle(
            InboundMessage(key="telegram:2", content="/resume secret"), all_sessions=True
        )
        assert everything.key == "telegram:1"

    _in(store, tmp_path, main)


def test_fork_of_a_session_manager_replies_with_the_reason(tmp_path: Path) -> None:
    async def main(loop: AgentLoop) -> None:
        await say(loop, "one")
        answer = await say(loop, "/fork")
        assert "SessionManager keeps sessions as plain JSON files" in answer.text
        assert answer.key == KEY

    _in("legacy", tmp_path, main)


def test_sessions_of_a_session_manager_are_listed_and_resumed(tmp_path: Path) -> None:
    async def main(loop: AgentLoop) -> None:
        await say(loop, "one")
        assert f"`{KEY}` · 2 messages" in (await say(loop, "/sessions")).text
        assert (await say(loop, "/resume one")).key == KEY

    _in("legacy", tmp_path, main)


@with_store
def test_only_the_user_can_list_and_delete_their_notes(store: str, tmp_path: Path) -> None:
    async def main(loop: AgentLoop) -> None:
        memory = loop.registry.agent().memory
        assert memory is not None
        assert "no notes" in (await say(loop, "/memory")).text
        note = memory.remember("Likes tea", scope=Scope(who=KEY, of="sender"))
        assert "Likes tea" in (await say(loop, "/memory")).text
        assert "Likes tea" in (await say(loop, "/memory tea", key="cli:other:default")).text
        assert "Likes tea" not in (await say(loop, "/memory", key="cli:other")).text
        assert "no note" in (await say(loop, f"/forget {note.id}", key="cli:other")).text
        assert "Forgotten: Likes tea" in (await say(loop, f"/forget {note.id}")).text
        assert "no notes" in (await say(loop, "/memory")).text

    _in(store, tmp_path, main)


@with_store
def test_session_keeps_its_chosen_model(store: str, tmp_path: Path) -> None:
    def opened(name: str) -> ScriptedModel:
        return ScriptedModel([f"I am {name}."] * 5, name=name)

    async def main() -> None:
        spec = replace(SPEC, models=("second",))
        script = ["I am the first."] * 2
        async with agent_loop(store, tmp_path, script, open_model=opened, spec=spec) as loop:
            await say(loop, "Who are you?")
            assert "not a model of this agent" in (await say(loop, "/model third")).text
            assert "second" in (await say(loop, "/model second")).text
            assert (await say(loop, "Who?")).text == "I am second."
            assert (await say(loop, "Who?", key="cli:other")).text == "I am the first."
            local = await loop.handle(
                InboundMessage(key=KEY, content="/model third"), all_sessions=True
            )
            assert "third" in local.text
            assert "scripted" in (await say(loop, "/model default")).text
            await say(loop, "/model second")
        async with agent_loop(store, tmp_path, [], open_model=opened) as loop:
            assert "second" in (await say(loop, "/model")).text
            assert (await say(loop, "Who?")).text == "I am second."
        async with agent_loop(store, tmp_path, ["Only me."]) as loop:
            heard = Heard()
            assert (await say(loop, "Who?", on_event=heard)).text == "Only me."
            assert "only one model" in heard.of(Notice)[0].text

    asyncio.run(main())
