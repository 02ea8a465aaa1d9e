"""Tests at-most-once delivery: answers of a killed process are sent once, or reported once."""

import asyncio
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from stenolog.agent.loop import AgentLoop
from stenolog.agent.turn_events import Answer, InboundMessage
from stenolog.catalog.message_metadata import mark_received, mark_seen
from stenolog.channels.channel import MaybeSent, NotSent, Undeliverable
from stenolog.channels.claims import Claims, delivery_claim_name
from stenolog.channels.delivery import UNSURE_NOTICE, Delivery, split_text
from stenolog.errors import NotStored, StoreClosed, StoreUnavailable
from stenolog.sessions.chat_marks import DELIVERY_FIELD
from stenolog.stores.base import Store
from stenolog.stores.open_store import open_store
from stenolog.testing.scripted_model import ScriptedModel
from support.agents import agent_loop
from support.agents import until as until_it_holds
from support.bots import (
    ALICE,
    KEY,
    FakeApp,
    agent_and_channels,
    bot,
    mark,
    recovered,
    telegram_settings,
    until,
)
from support.telegram_server import TelegramServer

ORIGIN: Mapping[str, Any] = {"channel": "telegram", "chat": ALICE}


async def _answered(folder: Path, *, origin: Mapping[str, Any] | None = ORIGIN) -> None:
    """Store an answer in a process that ends before sending it."""
    async with agent_loop("jsonl", folder, ["The answer."]) as loop:
        await loop.handle(InboundMessage(key=KEY, content="the question", id="q", origin=origin))


def _change(folder: Path, change: Callable[[Store], object]) -> None:
    with open_store(str(folder)) as store:
        change(store)


def _delivery(folder: Path) -> Any:
    with open_store(str(folder)) as store:
        return store.info(KEY).meta.get(DELIVERY_FIELD)


# --- restarts ------------------------------------------------------------------------------------


async def test_unsent_answer_is_delivered_once_at_the_next_start(
    server: TelegramServer, tmp_path: Path
) -> None:
    await _answered(tmp_path)
    async with bot(tmp_path, server, []):
        await until(server, lambda: server.texts(ALICE) == ["The answer."])
    assert await recovered(tmp_path) == []
    assert server.texts(ALICE) == ["The answer."]
    assert _delivery(tmp_path) == {"seq": 2, "mark": "sent", "origin": dict(ORIGIN)}


async def test_answer_of_a_killed_process_is_delivered_after_a_newer_answer(
    server: TelegramServer, tmp_path: Path
) -> None:
    async with bot(tmp_path, server, ["First.", "Second."]):
        server.say("one")
        await until(server, lambda: server.texts(ALICE) == ["First."])
        # Another process stores an answer and ends before it sends the answer.
        question = mark_received({"role": "user", "content": "q"}, origin=ORIGIN)
        answer = {"role": "assistant", "content": "The answer.", "stenolog": {"answers": [3]}}
        _change(tmp_path, lambda store: store.add_messages(KEY, [question, answer]))
        server.say("two")
        await until(
            server, lambda: sorted(server.texts(ALICE)) == ["First.", "Second.", "The answer."]
        )
    assert await recovered(tmp_path) == []
    assert _delivery(tmp_path) == {"seq": 6, "mark": "sent", "origin": dict(ORIGIN)}


async def test_interrupted_delivery_is_not_repeated_and_the_user_gets_one_notice(
    server: TelegramServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await _answered(tmp_path)
    sending = {"seq": 2, "mark": "sending", "origin": dict(ORIGIN)}
    _change(tmp_path, lambda store: store.set_meta(KEY, **{DELIVERY_FIELD: sending}))
    async with bot(tmp_path, server, []):
        await until(server, lambda: server.texts(ALICE) == [UNSURE_NOTICE])
    assert await recovered(tmp_path) == []
    assert server.texts(ALICE) == [UNSURE_NOTICE]
    assert _delivery(tmp_path)["mark"] == "unsure"
    assert sum("it is unknown whether" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize(("minutes", "sent"), [(5, []), (-5, ["The answer."])])
async def test_answers_older_than_a_day_are_not_delivered(
    minutes: int, sent: list[str], tmp_path: Path
) -> None:
    def old(store: Store) -> None:
        long_ago = datetime.now(UTC) - timedelta(days=1, minutes=minutes)
        question = mark_received({"role": "user", "content": "q"}, origin=ORIGIN)
        answer = {"role": "assistant", "content": "The answer.", "stenolog": {"answers": [1]}}
        store.add_messages(KEY, [question, answer], at=[long_ago, long_ago])

    _change(tmp_path, old)
    assert await recovered(tmp_path) == sent


@pytest.mark.parametrize("chat", [ALICE, 666], ids=["allowed", "a stranger"])
async def test_origin_without_a_mark_gets_no_answer(
    server: TelegramServer, tmp_path: Path, chat: int
) -> None:
    origin = {"channel": "telegram", "chat": chat}
    question = {"role": "user", "content": "q", "stenolog": {"origin": origin}}
    answer = {"role": "assistant", "content": "The answer.", "stenolog": {"answers": [1]}}
    _change(tmp_path, lambda store: store.add_messages(KEY, [question, answer]))

    async with bot(tmp_path, server, ["Hello."]):
        server.say("hello")
        await until(server, lambda: "Hello." in server.texts(ALICE))
    assert server.texts(ALICE) == ["Hello."]
    assert chat == ALICE or server.texts(chat) == []
    assert await recovered(tmp_path) == []


@pytest.mark.parametrize("origin", [None, {"channel": "webhook-ci", "sender": "alice"}])
async def test_answer_without_an_origin_in_this_channel_is_not_sent(
    origin: Mapping[str, Any] | None, tmp_path: Path
) -> None:
    await _answered(tmp_path, origin=origin)
    assert await recovered(tmp_path) == []


async def test_turn_of_a_killed_process_is_resumed_and_delivered_once(
    server: TelegramServer, tmp_path: Path
) -> None:
    question = mark_received({"role": "user", "content": "q"}, origin=ORIGIN)
    _change(tmp_path, lambda store: store.add_full_message(KEY, question))

    settings = telegram_settings(server)
    async with agent_and_channels(tmp_path, settings, ["After all."]) as (loop, channels):
        await channels.start()
        [answer] = await loop.resume()
        await channels.deliver(answer)
        await channels.deliver(answer)
        assert server.texts(ALICE) == ["After all."]
        assert mark(loop)["mark"] == "sent"


async def test_a_session_manager_delivers_each_answer_once(
    server: TelegramServer, tmp_path: Path
) -> None:
    async with bot(tmp_path, server, ["one", "two"], store="legacy"):
        server.say("hello", message=50)
        await until(server, lambda: server.texts(ALICE) == ["one"])
        server.say("hello", message=50)
        server.say("more", message=51)
        await until(server, lambda: len(server.texts(ALICE)) == 2)
    assert server.texts(ALICE) == ["one", "two"]


# --- one answer and the app's responses ----------------------------------------------------------


async def _deliver(
    folder: Path, app: FakeApp, *, text: str = "The answer.", before: Callable[[Any], object] = repr
) -> Any:
    """Deliver an answer and return the delivery mark."""
    async with agent_loop("jsonl", folder, ScriptedModel(lambda *_: text)) as loop:
        answer = await loop.handle(InboundMessage(key=KEY, content="q", origin=ORIGIN))
        instance = loop.registry.agent()
        before(instance)
        claims = Claims()
        delivery = Delivery(loop, app, claims, pause=0.001)
        try:
            await delivery.deliver(instance, answer, answer.text, ORIGIN)
            await delivery.deliver(instance, answer, answer.text, ORIGIN)
        finally:
            await claims.close()
        return mark(loop)


async def test_delivery_state_is_stored_before_the_first_and_after_the_last_piece(
    tmp_path: Path,
) -> None:
    seen: list[str] = []

    def look() -> None:
        seen.append(_delivery(tmp_path)["mark"])

    text = " ".join(f"word{number:03}" for number in range(20))
    app = FakeApp(look, look, look, look)
    assert (await _deliver(tmp_path, app, text=text))["mark"] == "sent"
    assert seen == ["sending"] * len(app.sent)
    assert len(app.sent) > 1
    assert " ".join(app.sent) == text


async def test_message_that_was_not_sent_is_retried(tmp_path: Path) -> None:
    app = FakeApp(NotSent("refused"), NotSent("busy", pause=0.01))
    assert (await _deliver(tmp_path, app))["mark"] == "sent"
    assert app.sent == ["The answer."]


async def test_message_that_may_have_arrived_is_not_retried(tmp_path: Path) -> None:
    app = FakeApp(MaybeSent("timeout"))
    assert (await _deliver(tmp_path, app))["mark"] == "unsure"
    assert app.sent == [*_pieces(UNSURE_NOTICE)]


async def test_unknown_error_counts_as_possibly_sent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    app = FakeApp(ValueError("with the token"))
    assert (await _deliver(tmp_path, app))["mark"] == "unsure"
    assert app.sent == _pieces(UNSURE_NOTICE)
    assert "with the token" not in caplog.text


async def test_message_rejected_by_the_app_is_not_retried(tmp_path: Path) -> None:
    app = FakeApp(Undeliverable("blocked"))
    assert (await _deliver(tmp_path, app))["mark"] == "refused"
    assert app.sent == []


async def test_answer_is_not_sent_if_its_delivery_state_cannot_be_stored(tmp_path: Path) -> None:
    def broken(instance: Any) -> None:
        def fails(*given: Any, **named: Any) -> None:
            raise NotStored(f"the disk is full: {given}, {named}")

        instance.store.set_meta = fails

    app = FakeApp()
    assert await _deliver(tmp_path, app, before=broken) is None
    assert app.sent == []


async def test_delivery_cancelled_before_sending_is_left_to_the_next_start(
    tmp_path: Path,
) -> None:
    async def scenario(loop: AgentLoop, app: FakeApp) -> None:
        answer = await loop.handle(InboundMessage(key=KEY, content="q", origin=ORIGIN))
        claims = Claims()
        delivery = Delivery(loop, app, claims, pause=0.001)
        instance = loop.registry.agent()
        delivering = asyncio.create_task(delivery.deliver(instance, answer, answer.text, ORIGIN))
        while app.plays:  # noqa: ASYNC110 - polls a condition
            await asyncio.sleep(0.001)
        delivering.cancel()
        await asyncio.wait([delivering])
        assert delivering.cancelled()
        assert mark(loop)["owed"] == [2]
        await delivery.recover_answers()
        await claims.close()
        assert app.sent == ["The answer."]

    async with agent_loop("jsonl", tmp_path, ["The answer."]) as loop:
        await scenario(loop, FakeApp(NotSent("busy", pause=60)))


async def test_delivery_cancelled_during_a_retry_leaves_the_answer_owed(
    tmp_path: Path,
) -> None:
    app, claims = FakeApp(NotSent("busy", pause=600)), Claims()
    async with agent_loop("jsonl", tmp_path, ["one", "two"]) as loop, asyncio.timeout(20):
        instance = loop.registry.agent()
        delivery = Delivery(loop, app, claims)
        answer = await loop.handle(InboundMessage(key=KEY, content="q", origin=ORIGIN))
        delivering = asyncio.create_task(delivery.deliver(instance, answer, "one", ORIGIN))
        await until_it_holds(lambda: not app.plays)
        await delivery.stop_sending()
        await asyncio.wait([delivering])
        assert mark(loop)["owed"] == [2]
        answer = await loop.handle(InboundMessage(key=KEY, content="r", origin=ORIGIN))
        await delivery.deliver(instance, answer, "two", ORIGIN)
        assert mark(loop)["seq"] == 2
    await claims.close()
    assert app.sent == []
    assert await recovered(tmp_path) == ["one", "two"]


async def test_cancelled_delivery_ends_even_if_its_state_cannot_be_stored(tmp_path: Path) -> None:
    app, claims = FakeApp(NotSent("busy", pause=600)), Claims()
    async with agent_loop("jsonl", tmp_path, ["one"]) as loop, asyncio.timeout(20):
        instance = loop.registry.agent()
        answer = await loop.handle(InboundMessage(key=KEY, content="q", origin=ORIGIN))
        delivery = Delivery(loop, app, claims)
        delivering = asyncio.create_task(delivery.deliver(instance, answer, "one", ORIGIN))
        await until_it_holds(lambda: not app.plays)
        await loop.close()
        delivering.cancel()
        await asyncio.wait([delivering])
        assert delivering.cancelled()
    await claims.close()


async def _hear(loop: AgentLoop, delivery: Delivery, text: str) -> None:
    answer = await loop.handle(InboundMessage(key=KEY, content=text, origin=ORIGIN))
    await delivery.deliver(loop.registry.agent(), answer, answer.text, ORIGIN)


_AT_ONCE = 121.0
"""A pause that is longer than the time limit of retries."""


async def test_failed_read_of_the_history_does_not_lose_an_earlier_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = FakeApp()

    claims = Claims()
    await _answered(tmp_path)
    async with agent_loop("jsonl", tmp_path, ["second"]) as loop:
        answer = await loop.handle(InboundMessage(key=KEY, content="b", origin=ORIGIN))
        store = loop.registry.agent().store
        read = store.get_history
        failures = [StoreUnavailable("the disk does not answer")]

        def fail_once(*args: Any, **kwargs: Any) -> Any:
            if failures:
                raise failures.pop()
            return read(*args, **kwargs)

        monkeypatch.setattr(store, "get_history", fail_once)
        delivery = Delivery(loop, app, claims, pause=0.0)
        await delivery.deliver(loop.registry.agent(), answer, answer.text, ORIGIN)
    await claims.close()
    assert sorted(app.sent) == ["The answer.", "second"]


async def test_unsent_answer_stays_owed_after_a_later_one_is_sent(tmp_path: Path) -> None:
    app, claims = FakeApp(NotSent("away")), Claims()
    async with agent_loop("jsonl", tmp_path, ["first", "second", "third"]) as loop:
        delivery = Delivery(loop, app, claims, pause=_AT_ONCE)
        await _hear(loop, delivery, "a")
        assert (app.sent, mark(loop)["owed"]) == ([], [2])
        app.plays = [None, NotSent("away")]
        await _hear(loop, delivery, "b")
        assert (app.sent, mark(loop)["seq"], mark(loop)["owed"]) == (["second"], 4, [2])
        await _hear(loop, delivery, "c")
        assert app.sent == ["second", "third", "first"]
        assert mark(loop) == {"seq": 6, "mark": "sent", "origin": dict(ORIGIN)}
    await claims.close()
    assert await recovered(tmp_path) == []


@pytest.mark.parametrize("is_owed", [False, True], ids=["killed", "owed"])
async def test_answer_that_a_summary_hid_before_it_was_sent_is_sent(
    is_owed: bool, tmp_path: Path
) -> None:
    app, claims = FakeApp(NotSent("away"), NotSent("away")), Claims()
    async with agent_loop("jsonl", tmp_path, ["first", "second"]) as loop:
        delivery = Delivery(loop, app, claims, pause=_AT_ONCE)
        for text in ("a", "b"):
            if is_owed:
                await _hear(loop, delivery, text)
            else:
                await loop.handle(InboundMessage(key=KEY, content=text, origin=ORIGIN))
    await claims.close()
    _change(tmp_path, lambda store: store.checkpoint(KEY, summary="They talked.", upto=2))
    assert await recovered(tmp_path) == ["first", "second"]
    assert await recovered(tmp_path) == []


@pytest.mark.parametrize("is_recovered", [False, True], ids=["at once", "at the next start"])
@pytest.mark.parametrize("play", [None, Undeliverable("the chat is gone"), MaybeSent("timeout")])
async def test_answer_to_messages_of_two_chats_is_sent_to_both(
    play: Exception | None, is_recovered: bool, tmp_path: Path
) -> None:
    group = {"channel": "telegram", "chat": -5}

    app, claims = FakeApp(play), Claims()
    async with agent_loop("jsonl", tmp_path, []) as loop:
        instance = loop.registry.agent()
        for origin in (ORIGIN, group, ORIGIN):
            question = {"role": "user", "content": "q"}
            instance.store.add_full_message(KEY, mark_received(question, origin=origin))
        body = mark_seen({"role": "assistant", "content": "a"}, seen=3, answers=[1, 2, 3])
        seq = instance.store.add_full_message(KEY, body)
        delivery = Delivery(loop, app, claims)
        if not is_recovered:
            answer = Answer(key=KEY, text="a", outcome="answered", seq=seq)
            await delivery.deliver(instance, answer, "a", ORIGIN)
            await delivery.deliver(instance, answer, "a", group)
        await delivery.recover_answers()
    await claims.close()
    assert [origin["chat"] for origin in app.origins].count(-5) == 1
    assert app.origins[0] == ORIGIN
    assert app.sent.count("a") == 1 + (play is None)


async def test_owed_answers_are_sent_first_and_in_order_at_the_next_start(tmp_path: Path) -> None:
    app, claims = FakeApp(NotSent("away"), NotSent("away")), Claims()
    async with agent_loop("jsonl", tmp_path, ["first", "second", "third"]) as loop:
        delivery = Delivery(loop, app, claims, pause=_AT_ONCE)
        await _hear(loop, delivery, "a")
        await _hear(loop, delivery, "b")
        await loop.handle(InboundMessage(key=KEY, content="c", origin=ORIGIN))
    await claims.close()
    assert _delivery(tmp_path)["owed"] == [2, 4]
    assert await recovered(tmp_path) == ["first", "second", "third"]
    assert await recovered(tmp_path) == []


async def test_next_answer_does_not_hide_an_earlier_uncertain_delivery(
    tmp_path: Path,
) -> None:
    await _answered(tmp_path)
    sending = {"seq": 2, "mark": "sending", "origin": dict(ORIGIN)}
    _change(tmp_path, lambda store: store.set_meta(KEY, **{DELIVERY_FIELD: sending}))
    app, claims = FakeApp(), Claims()
    async with agent_loop("jsonl", tmp_path, ["second"]) as loop:
        await _hear(loop, Delivery(loop, app, claims), "b")
    await claims.close()
    assert app.sent == [*_pieces(UNSURE_NOTICE), "second"]


async def test_closed_claims_raise_store_closed(tmp_path: Path) -> None:
    for claims in (Claims(), _claims(tmp_path, ttl=5.0)):
        await claims.close()
        with pytest.raises(StoreClosed):
            async with claims.hold_claim("poll"):
                pass
        with pytest.raises(StoreClosed):
            await claims.save("poll", next=1)
        with pytest.raises(StoreClosed):
            await claims.read_saved("poll")


@pytest.mark.parametrize("store", ["jsonl", "sqlite"])
async def test_answer_delivered_by_two_gateways_is_sent_once(store: str, tmp_path: Path) -> None:
    where = f"sqlite:{tmp_path / 'steno.db'}" if store == "sqlite" else str(tmp_path)

    app = FakeApp()
    async with (
        agent_loop(store, tmp_path, ["The answer."]) as one,
        agent_loop(store, tmp_path, []) as two,
    ):
        answer = await one.handle(InboundMessage(key=KEY, content="q", origin=ORIGIN))
        await one.wait_until_idle()
        # Both read before either writes, unless one waits for the other.
        barrier = threading.Barrier(2)
        for loop in (one, two):
            _meet(loop.registry.agent().store, barrier)
        claims = [Claims(open_store(where, namespace="channels")) for _ in range(2)]
        both = [
            Delivery(loop, app, claim).deliver(loop.registry.agent(), answer, answer.text, ORIGIN)
            for loop, claim in zip((one, two), claims, strict=True)
        ]
        await asyncio.gather(*both)
        for claim in claims:
            await claim.close()
    assert app.sent == ["The answer."]


class _Looking(Claims):
    """Claims that count how often one is requested."""

    looks = 0

    def hold_claim(self, *given: Any, **named: Any) -> Any:
        """Count the call and return the claim."""
        self.looks += 1
        return super().hold_claim(*given, **named)


def _claims(folder: Path, *, ttl: float) -> _Looking:
    return _Looking(open_store(str(folder), namespace="channels"), ttl=ttl)


async def test_delivery_in_progress_in_another_gateway_is_left_to_it(
    tmp_path: Path,
) -> None:
    await _answered(tmp_path)
    sending = {"seq": 2, "mark": "sending", "origin": dict(ORIGIN)}
    _change(tmp_path, lambda store: store.set_meta(KEY, **{DELIVERY_FIELD: sending}))
    app = FakeApp()
    another, own = _claims(tmp_path, ttl=20.0), _claims(tmp_path, ttl=0.05)
    async with agent_loop("jsonl", tmp_path, []) as loop, asyncio.timeout(20):
        async with another.hold_claim(delivery_claim_name(None, KEY)):
            recovering = asyncio.create_task(Delivery(loop, app, own).recover_answers())
            await until_it_holds(lambda: own.looks > 1 or recovering.done())
            assert mark(loop) == sending
            assert app.sent == []
        await recovering
        assert mark(loop)["mark"] == "unsure"
    for claims in (another, own):
        await claims.close()
    assert app.sent == _pieces(UNSURE_NOTICE)


async def test_cancelled_delivery_does_not_wait_for_another_gateway(tmp_path: Path) -> None:
    await _answered(tmp_path)
    sending = {"seq": 2, "mark": "sending", "origin": dict(ORIGIN)}
    _change(tmp_path, lambda store: store.set_meta(KEY, **{DELIVERY_FIELD: sending}))
    another, own = _claims(tmp_path, ttl=600.0), _claims(tmp_path, ttl=600.0)
    async with (
        agent_loop("jsonl", tmp_path, []) as loop,
        another.hold_claim(delivery_claim_name(None, KEY)),
        asyncio.timeout(20),
    ):
        delivery = Delivery(loop, FakeApp(), own)
        recovering = asyncio.create_task(delivery.recover_answers())
        await until_it_holds(lambda: own.looks > 0)
        delivery.stop_recovering()
        await recovering
    for claims in (another, own):
        await claims.close()


async def test_delivery_waits_for_a_store_that_is_briefly_unavailable(tmp_path: Path) -> None:
    def away(instance: Any) -> None:
        set_meta, left = instance.store.set_meta, [1, 2]

        def fails(*given: Any, **named: Any) -> None:
            if left:
                left.pop()
                raise StoreUnavailable("no connection")
            set_meta(*given, **named)

        instance.store.set_meta = fails

    app = FakeApp()
    assert (await _deliver(tmp_path, app, before=away))["mark"] == "sent"
    assert app.sent == ["The answer."]


def _meet(store: Any, barrier: threading.Barrier) -> None:
    """Let the readers of a session wait for each other for a moment."""
    info = store.info

    def meeting(key: str) -> Any:
        found = info(key)
        with suppress(threading.BrokenBarrierError):
            barrier.wait(0.2)
        return found

    store.info = meeting


def _pieces(text: str) -> list[str]:
    return split_text(text, FakeApp.max_length)
