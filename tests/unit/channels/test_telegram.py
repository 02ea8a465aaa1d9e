"""Tests a bot with the real Telegram library against a fake Telegram server."""

import asyncio
import logging
import shutil
import threading
from collections.abc import AsyncGenerator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from stenolog.agent.instance import AgentInstance
from stenolog.channels.channel import IncomingMessage, Undeliverable
from stenolog.channels.claims import Claims
from stenolog.channels.inbox import Inbox
from stenolog.channels.telegram import Telegram
from stenolog.errors import NotStored
from stenolog.providers.chat_model import Delta
from stenolog.sessions.chat_marks import MOVE_FIELD
from stenolog.stores.jsonl.store import JSONLStore
from stenolog.stores.open_store import open_store
from stenolog.testing.scripted_model import ScriptedModel
from stenolog.transfer.importers.legacy_session import ALL_LAYOUTS
from stenolog.transfer.migration import import_folder
from support.agents import agent_loop, bodies
from support.agents import until as until_it_holds
from support.bots import (
    ALICE,
    KEY,
    agent_and_channels,
    bot,
    confirmed,
    in_the_end,
    mark,
    telegram_settings,
    until,
)
from support.damage import damage_message
from support.telegram_server import TOKEN, USERNAME, TelegramServer

SAMPLES = Path(__file__).parents[2] / "samples"
pytestmark = pytest.mark.filterwarnings("ignore::telegram.warnings.PTBDeprecationWarning")


def _echo(messages: Sequence[Mapping[str, Any]], tools: object) -> str:
    del tools
    return f"You said: {messages[-1]['content']}"


def _have_come(server: TelegramServer, count: int) -> bool:
    return len(server.sent) == count


async def test_message_is_answered_in_its_chat_with_a_typing_indicator(
    server: TelegramServer, tmp_path: Path
) -> None:
    async with bot(tmp_path, server, ["Hello, alice."]) as loop:
        number = server.say("hello")
        await until(server, lambda: server.texts(ALICE) == ["Hello, alice."])
        await until(server, confirmed(server, number))
        assert [body["content"] for body in bodies(loop, KEY)] == ["hello", "Hello, alice."]
        assert ALICE in server.typing


async def test_empty_allow_list_answers_no_message(
    server: TelegramServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = ScriptedModel(_echo)
    async with bot(tmp_path, server, model, settings={"allow": ()}) as loop:
        for text in ("hello", "/help", None):
            number = server.say(text)
        await until(server, confirmed(server, number))
        assert loop.registry.agent().sessions.list_sessions() == []
    assert server.sent == []
    assert model.asked == []
    assert sum("1001" in record.getMessage() for record in caplog.records) == 1


async def test_only_senders_on_the_allow_list_are_answered(
    server: TelegramServer, tmp_path: Path
) -> None:
    async with bot(tmp_path, server, ScriptedModel(_echo), settings={"allow": ("@Alice",)}):
        server.say("let me in", user=666, name="mallory")
        server.say("hello")
        await until(server, lambda: bool(server.texts(ALICE)))
    assert server.texts(666) == []


async def test_messages_of_one_chat_stay_in_order_and_chats_do_not_wait_for_each_other(
    server: TelegramServer, tmp_path: Path
) -> None:
    hold = threading.Event()

    model = ScriptedModel(_echo)

    async def stream(*given: Any, **named: Any) -> Any:
        if any(body["content"] == "slow" for body in given[0]):
            await asyncio.to_thread(hold.wait)
        async for delta in ScriptedModel.stream(model, *given, **named):
            yield delta

    model.stream = stream  # type: ignore[method-assign]
    settings = {"allow": ("1001", "1002")}
    async with bot(tmp_path, server, model, settings=settings) as loop, in_the_end(hold.set):
        for text in ("slow", "second", "third"):
            server.say(text)
        last = server.say("quick", user=1002, name="bob")
        await until(server, lambda: server.texts(1002) == ["You said: quick"])
        await until(server, confirmed(server, last))
        assert server.texts(ALICE) == []
        assert [body["content"] for body in bodies(loop, KEY)] == ["slow", "second", "third"]
        hold.set()
        await until(server, lambda: "You said: third" in server.texts(ALICE))


async def test_redelivered_update_is_answered_once(server: TelegramServer, tmp_path: Path) -> None:
    async with bot(tmp_path, server, ["once", "and that"]) as loop:
        server.say("hello", message=50)
        await until(server, lambda: len(server.sent) == 1)
        again = server.say("hello", message=50)
        await until(server, confirmed(server, again))
        server.say("more", message=51)
        await until(server, lambda: len(server.sent) == 2)
        said = [body["content"] for body in bodies(loop, KEY)]
        assert said == ["hello", "once", "more", "and that"]
    assert server.texts(ALICE) == ["once", "and that"]


@pytest.mark.parametrize("store", ["jsonl", "sqlite"])
@pytest.mark.parametrize("change", ["hidden", "damaged"])
async def test_redelivered_update_does_not_get_the_answer_to_another_one(
    store: str, change: str, server: TelegramServer, tmp_path: Path
) -> None:
    async def redeliver(model: ScriptedModel) -> None:
        async with bot(tmp_path, server, model, store=store):
            await until(server, confirmed(server, server.say("one", message=50)))

    async with bot(tmp_path, server, ["to one", "to two"], store=store):
        for number, text in ((50, "one"), (51, "two")):
            server.say(text, message=number)
            await until(server, lambda text=text: f"to {text}" in server.texts(ALICE))  # type: ignore[misc]
    where = f"sqlite:{tmp_path / 'steno.db'}" if store == "sqlite" else str(tmp_path)
    with open_store(where) as opened:
        opened.truncate_history(KEY, 2)
    if change == "damaged":
        damage_message(where, KEY, 2)
    model = ScriptedModel(["again"])
    await redeliver(model)
    assert model.asked == []
    problem = [
        "I could not answer: the earlier answer to this message is damaged, so please write it "
        "again. Your message is saved."
    ]
    told = problem if change == "damaged" else []
    assert server.texts(ALICE) == ["to one", "to two", *told]


async def test_long_answer_is_sent_in_pieces(server: TelegramServer, tmp_path: Path) -> None:
    text = "\n\n".join(f"Paragraph {number}. " + "😀 word " * 60 for number in range(30))

    async with bot(tmp_path, server, [text]):
        server.say("tell me everything")
        await until(server, lambda: "Paragraph 29" in "".join(server.texts(ALICE)))
    found = server.texts(ALICE)
    assert len(found) > 3
    assert "".join("".join(found).split()) == "".join(text.split())


async def test_new_session_of_a_chat_survives_a_restart(
    server: TelegramServer, tmp_path: Path
) -> None:
    async with bot(tmp_path, server, ScriptedModel(_echo)):
        server.say("one")
        server.say("/new")
        server.say("two")
        await until(server, lambda: "You said: two" in server.texts(ALICE))
        server.say("/start")
        await until(server, lambda: "`/new`" in server.texts(ALICE)[-1])
    model = ScriptedModel(_echo)
    async with bot(tmp_path, server, model) as loop:
        server.say("three")
        await until(server, lambda: "You said: three" in server.texts(ALICE))
        asked = [body["content"] for body in model.asked[0].messages[1:]]
        assert asked == ["two", "You said: two", "three"]
        assert [body["content"] for body in bodies(loop, KEY)] == ["one", "You said: one"]


async def test_chat_whose_move_cannot_be_stored_stays_in_its_session(
    server: TelegramServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_meta, failures = JSONLStore.set_meta, [1]

    def fail_once(self: JSONLStore, key: str, **fields: Any) -> None:
        if MOVE_FIELD in fields and failures:
            failures.pop()
            raise NotStored("the disk is full")
        set_meta(self, key, **fields)

    monkeypatch.setattr(JSONLStore, "set_meta", fail_once)

    async with bot(tmp_path, server, ScriptedModel(_echo)) as loop:
        for count, text in enumerate(("/new", "one", "/new", "two"), 1):
            server.say(text)
            await until(server, partial(_have_come, server, count))
        assert server.texts(ALICE)[0].startswith("I could not answer: storage is not available")
        assert [body["content"] for body in bodies(loop, KEY)] == ["one", "You said: one"]


async def test_stop_interrupts_the_answer_in_progress(
    server: TelegramServer, tmp_path: Path
) -> None:
    endless = ScriptedModel(["word " * 100_000], pause=0.01)
    async with bot(tmp_path, server, endless) as loop:
        number = server.say("talk")
        await until(server, lambda: bool(server.typing))
        await until(server, confirmed(server, number))
        await until_it_holds(lambda: KEY in loop.busy)
        server.say("/stop")
        await until(server, lambda: len(server.sent) == 2)
    assert "Stopped." in server.texts(ALICE)
    assert any("[interrupted]" in text for text in server.texts(ALICE))


async def test_stop_interrupts_an_answer_started_by_a_command(
    server: TelegramServer, tmp_path: Path
) -> None:
    async with bot(tmp_path, server, ScriptedModel(["Short.", "x" * 99_999], pause=0.01)) as loop:
        server.say("talk")
        await until(server, lambda: server.texts(ALICE) == ["Short."])
        server.say("/retry")
        await until_it_holds(lambda: KEY in loop.busy)
        server.say("/stop")
        await until(server, lambda: "Stopped." in server.texts(ALICE))


async def test_message_without_text_is_answered_by_its_caption_or_a_notice(
    server: TelegramServer, tmp_path: Path
) -> None:
    photo: dict[str, Any] = {
        "photo": [{"file_id": "a", "file_unique_id": "b", "width": 1, "height": 1}]
    }
    async with bot(tmp_path, server, ScriptedModel(_echo)):
        server.say(None, **photo)
        await until(server, lambda: server.texts(ALICE) == ["I can only read text messages."])
        server.say(None, caption="a cat", **photo)
        await until(server, lambda: server.texts(ALICE)[-1] == "You said: a cat")


async def test_group_messages_are_answered_and_commands_of_other_bots_ignored(
    server: TelegramServer, tmp_path: Path
) -> None:
    settings = {"allow": ("1001", "1002"), "scope": "group"}
    async with bot(tmp_path, server, ScriptedModel(_echo), settings=settings) as loop:
        server.say("/help@another_bot", chat=-77, thread=5)
        server.say(f"/help@{USERNAME.upper()}", chat=-77, thread=5)
        server.say("hello", chat=-77, thread=5)
        await until(server, lambda: len(server.texts(-77)) == 2)
        server.say("me too", user=1002, name="bob", chat=-77, thread=5)
        await until(server, lambda: len(server.texts(-77)) == 3)
        assert {one.thread for one in server.sent} == {5}
        said = [body["content"] for body in bodies(loop, "telegram:-77")]
        assert said[::2] == ["hello", "me too"]


# --- stored before confirmed ---------------------------------------------------------------------


async def test_offset_does_not_pass_a_message_that_is_not_durable(
    server: TelegramServer, tmp_path: Path
) -> None:
    let_go = threading.Event()

    def slowed(instance: AgentInstance) -> None:
        write = instance.store.add_full_message

        def slow(key: str, message: Any, **named: Any) -> Any:
            if key == KEY:
                let_go.wait()
            return write(key, message, **named)

        instance.store.add_full_message = slow  # type: ignore[method-assign]

    options: dict[str, Any] = {"settings": {"allow": ("1001", "1002")}, "opened": slowed}
    async with bot(tmp_path, server, ScriptedModel(_echo), **options), in_the_end(let_go.set):
        first = server.say("slow to store")
        second = server.say("quick", user=1002, name="bob")
        await until(server, lambda: server.texts(1002) == ["You said: quick"])
        asked = len(server.offsets)
        await until(server, lambda: len(server.offsets) > asked + 2)
        assert server.unconfirmed == [first, second]
        third = server.say("also quick", user=1002, name="bob")
        await until(server, lambda: len(server.texts(1002)) == 2)
        let_go.set()
        await until(server, confirmed(server, third))
    assert all(offset is None or offset <= first for offset in server.offsets[: asked + 2])
    assert server.texts(ALICE) == ["You said: slow to store"]


async def test_message_that_could_not_be_stored_is_fetched_again(
    server: TelegramServer, tmp_path: Path
) -> None:
    broken = threading.Event()
    broken.set()

    def failing(instance: AgentInstance) -> None:
        store = instance.store
        assert store is not None
        write = store.add_full_message

        def fails(*given: Any, **named: Any) -> int:
            if broken.is_set():
                raise NotStored("the disk is full")
            return write(*given, **named)

        store.add_full_message = fails  # type: ignore[method-assign]

    model = ScriptedModel(_echo)

    async with bot(tmp_path, server, model, opened=failing) as loop:
        number = server.say("hello")
        await until(server, lambda: len(server.offsets) > 5)
        assert server.unconfirmed == [number]
        assert server.texts(ALICE) == [
            "I could not answer: storage is not available right now. Your message is not saved yet."
        ]
        assert model.asked == []
        broken.clear()
        await until(server, confirmed(server, number))
        await until(server, lambda: server.texts(ALICE)[-1] == "You said: hello")
        assert [body["content"] for body in bodies(loop, KEY)] == ["hello", "You said: hello"]


async def test_unexpected_error_for_a_message_does_not_stop_the_bot(
    server: TelegramServer, tmp_path: Path
) -> None:
    def answer(messages: Sequence[Mapping[str, Any]], tools: object) -> str:
        if messages[-1]["content"] == "boom":
            raise ZeroDivisionError
        return _echo(messages, tools)

    settings = {"allow": ("1001", "1002")}
    async with bot(tmp_path, server, ScriptedModel(answer), settings=settings):
        server.say("boom")
        await until(server, lambda: len(server.texts(ALICE)) == 1)
        number = server.say("hello", user=1002, name="bob")
        await until(server, lambda: server.texts(1002) == ["You said: hello"])
        await until(server, confirmed(server, number))
    assert server.texts(ALICE) == [
        "Your message could not be answered because of an internal error."
    ]


async def test_message_that_always_fails_is_given_up_and_few_are_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stenolog.channels.inbox._MAX_REMEMBERED_IDS", 10)

    def broken(key: str) -> str:
        raise ZeroDivisionError(key)

    async with agent_loop("jsonl", tmp_path, []) as loop:
        loop.registry.agent().resolve_key = broken  # type: ignore[method-assign]
        inbox = Inbox(loop, channel="telegram", claims=Claims())
        for number in range(30):
            arrival = IncomingMessage(sender="1001", text="boom", id=str(number))
            assert await inbox.accept(arrival).durable is False
        assert len(inbox._crashes) == 10
        last = IncomingMessage(sender="1001", text="boom", id="29")
        found = [await inbox.accept(last).durable for _ in range(2)]
        assert found == [False, True]


async def test_new_command_works_during_shutdown(server: TelegramServer, tmp_path: Path) -> None:
    let_go, asked = threading.Event(), threading.Event()

    def slowed(instance: AgentInstance) -> None:
        resolve_key, calls = instance.resolve_key, 0

        def slow(key: str) -> str:
            nonlocal calls
            calls += 1
            if calls == 2:  # the agent has received the command but not executed it
                asked.set()
                let_go.wait()
            return resolve_key(key)

        instance.resolve_key = slow  # type: ignore[method-assign]

    with open_store(str(tmp_path)) as store:
        store.add_full_message(KEY, {"role": "user", "content": "hello"})
    claims = Claims(open_store(str(tmp_path), namespace="channels"))
    settings = telegram_settings(server)
    opened = agent_and_channels(tmp_path, settings, [], opened=slowed)
    async with opened as (loop, channels), in_the_end(let_go.set), asyncio.timeout(30):
        await channels.start()
        server.say("/new")
        assert await asyncio.to_thread(asked.wait, 20)
        draining = asyncio.create_task(channels.drain(wait_seconds=20))
        # The polling has stopped.
        async with claims.hold_claim(f"telegram-{TOKEN.partition(':')[0]}"):
            let_go.set()
            await draining
        found = loop.registry.agent().store
        assert found is not None
        assert "continued_in" in found.info(KEY).meta
    await claims.close()
    assert "Started a new session" in server.texts(ALICE)[0]


# --- restarts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["/edit Count.", "/retry"])
async def test_command_whose_gateway_stopped_during_its_answer_does_not_run_again(
    server: TelegramServer, tmp_path: Path, command: str
) -> None:
    loop = asyncio.get_running_loop()
    started, hold = asyncio.Event(), asyncio.Event()

    class Held(ScriptedModel):
        async def stream(self, *arguments: Any, **options: Any) -> AsyncGenerator[Delta, None]:
            if self.asked:
                started.set()
                await hold.wait()
            async for delta in super().stream(*arguments, **options):
                yield delta

    async with bot(tmp_path, server, Held(["first", "second", "third"])):
        server.say("Count.")
        await until(server, lambda: len(server.texts(ALICE)) == 1)
        number = server.say(command)
        await asyncio.wait_for(started.wait(), 30)
        loop.call_later(0.1, hold.set)  # the gateway stops while the command is answered
    assert server.texts(ALICE) == ["first", "second"]
    async with bot(tmp_path, server, ScriptedModel(["again"])):
        await until(server, confirmed(server, number))
    assert server.texts(ALICE) == ["first", "second"]


async def test_the_next_message_of_an_imported_picoclaw_session_sees_its_old_turns(
    server: TelegramServer, tmp_path: Path
) -> None:
    (tmp_path / "sessions").mkdir()
    for path in (SAMPLES / "picoclaw").glob("telegram_1001.*"):
        shutil.copy(path, tmp_path / "sessions" / path.name)

    model = ScriptedModel(_echo)
    async with bot(tmp_path, server, model):
        server.say("And which level was it?")
        await until(server, lambda: bool(server.sent))
        shown = [body["content"] for body in model.asked[0].messages]
        assert "Where did I park? <b>&" in shown
        assert "Level 3, near the lift." in shown
    # The old turns are never sent.
    assert server.texts(ALICE) == ["You said: And which level was it?"]


async def test_the_next_message_of_an_imported_zeroclaw_session_sees_its_old_turns(
    server: TelegramServer, tmp_path: Path
) -> None:
    with open_store(str(tmp_path)) as store:
        import_folder(
            SAMPLES / "zeroclaw",
            store,
            rename_files=False,
            layouts=ALL_LAYOUTS,
            map_key=lambda key: KEY if key == "telegram_1001_alice" else key,
        )

    model = ScriptedModel(_echo)
    async with bot(tmp_path, server, model):
        server.say("what was it?")
        await until(server, lambda: bool(server.sent))
    assert "forty-two" in [body["content"] for body in model.asked[0].messages]
    assert len(server.sent) == 1


# --- faults of Telegram --------------------------------------------------------------------------


async def test_answer_is_sent_after_a_busy_response(server: TelegramServer, tmp_path: Path) -> None:
    server.play("sendMessage", "busy")
    async with bot(tmp_path, server, ["Hello."]) as loop:
        server.say("hello")
        await until(server, lambda: server.texts(ALICE) == ["Hello."])
        await until_it_holds(lambda: bool(mark(loop)["mark"] == "sent"))


@pytest.mark.parametrize("fault", ["lost before", "lost after", "broken"])
async def test_uncertain_delivery_is_not_repeated_and_the_user_gets_a_notice(
    fault: Any, server: TelegramServer, tmp_path: Path
) -> None:
    server.play("sendMessage", fault)
    async with bot(tmp_path, server, ["Hello."]) as loop:
        server.say("hello")
        await until(server, lambda: any("may not have" in one for one in server.texts(ALICE)))
        assert mark(loop)["mark"] == "unsure"
    arrived = ["Hello."] if fault == "lost after" else []
    assert server.texts(ALICE)[:-1] == arrived


class _Moving(TelegramServer):
    """A Telegram server on which every group has just got another id."""

    def call(self, token: str, method: str, given: dict[str, str]) -> tuple[int, Any] | None:
        """Reject messages to the old group."""
        if method != "sendMessage":
            return super().call(token, method, given)
        return 400, {
            "ok": False,
            "error_code": 400,
            "description": "Bad Request: group chat was upgraded to a supergroup chat",
            "parameters": {"migrate_to_chat_id": -88},
        }


async def test_endless_chat_migration_is_undeliverable() -> None:
    with _Moving() as moving:
        claims = Claims()
        settings = telegram_settings(moving).channels.telegram
        telegram = Telegram(settings, TOKEN, claims=claims)
        with pytest.raises(Undeliverable):
            await telegram.send({"channel": "telegram", "chat": -77}, "Hello.")
        await telegram.close()
        await claims.close()


async def test_polling_continues_after_conflicts_and_connection_errors(
    server: TelegramServer, tmp_path: Path
) -> None:
    server.play("getMe", "lost before")
    server.play("getUpdates", "conflict", "lost before", "broken", "busy", "lost after")
    async with bot(tmp_path, server, ["Hello."]):
        server.say("hello")
        await until(server, lambda: server.texts(ALICE) == ["Hello."])
    assert server.played("getUpdates")


@pytest.mark.parametrize("method", ["getMe", "getUpdates"])
async def test_rejected_token_stops_the_channel_and_is_not_logged(
    method: str, server: TelegramServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    server.play(method, "unauthorized")
    async with bot(tmp_path, server, ["Hello."]):
        await until(server, lambda: server.played(method))
        async with asyncio.timeout(20):
            while not caplog.records:  # noqa: ASYNC110 - polls a condition
                await asyncio.sleep(0.01)
    [record] = caplog.records
    assert record.levelname == "ERROR"
    assert "token" in record.getMessage()
    assert TOKEN not in caplog.text


async def test_log_does_not_contain_the_token(
    server: TelegramServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)

    server.play("getUpdates", "lost before", "broken")
    server.play("sendMessage", "lost after")
    async with bot(tmp_path, server, ["Hello."]):
        server.say("hello")
        await until(server, lambda: len(server.texts(ALICE)) == 2)
    assert caplog.records
    assert TOKEN not in caplog.text
    assert "AAH-a-token" not in caplog.text


# --- several gateways ----------------------------------------------------------------------------


@pytest.mark.parametrize("store", ["jsonl", "sqlite"])
async def test_one_of_two_gateways_polls_and_the_other_takes_over(
    store: str, server: TelegramServer, tmp_path: Path
) -> None:
    gateway = partial(bot, tmp_path, server, ScriptedModel(_echo), store=store)
    async with gateway():
        await until(server, lambda: bool(server.offsets))
        async with gateway():
            for count, text in enumerate(("one", "two", "three")):
                server.say(text)
                await until(server, partial(_have_come, server, count + 1))
        assert server.most_polls == 1
    async with gateway():
        server.say("four")
        await until(server, lambda: "You said: four" in server.texts(ALICE))
    assert len(server.sent) == 4
