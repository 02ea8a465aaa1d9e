"""Tests that unsaved messages are kept in order until they can be stored."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from stenolog.agent.turn_events import SaveFailed, SaveRecovered
from stenolog.agent.unsaved import SeenMessages, UnsavedMessages
from stenolog.errors import NotStored, OnceConflict
from stenolog.records import Message
from stenolog.sessions.session_store import JSONLBackend
from stenolog.stores.in_memory import InMemoryStore
from support.agents import KEY, Heard, agent_loop, roles, say


class RejectingStore(InMemoryStore):
    """A store that rejects some messages until told otherwise."""

    refused: tuple[str, ...] = ()

    def add_full_message(
        self, key: str, message: Message | Mapping[str, Any], *, once: str | None = None
    ) -> int:
        """Store a message, unless it is rejected."""
        body = message.to_dict() if isinstance(message, Message) else message
        if body.get("content") in self.refused:
            raise NotStored("the disk is full; free some space")
        return super().add_full_message(key, message, once=once)


async def _run(function: Any, *values: Any, **named: Any) -> Any:
    return function(*values, **named)


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _answer(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def test_an_answer_is_not_stored_before_its_question() -> None:
    async def main() -> None:
        store = RejectingStore()
        sessions, heard, hand = JSONLBackend(store), Heard(), UnsavedMessages(KEY, _run)
        store.refused = ("?",)
        assert await hand.store_user_message(sessions, _user("?"), on_event=heard, once="1") is None
        seen = SeenMessages(upto=0, once=hand.newest_idempotency_key)
        assert (
            await hand.store_turn_message(sessions, _answer("!"), on_event=heard, seen=seen) is None
        )
        assert store.get_history(KEY) == []
        assert hand.find_answer_text("1") == "!"
        assert [one.count for one in heard.of(SaveFailed)] == [1, 2]
        assert heard.of(SaveFailed)[0].text == "the disk is full; free some space"
        store.refused = ()
        assert await hand.flush(sessions, on_event=heard)
        assert [one.count for one in heard.of(SaveRecovered)] == [2]
        stored = [message.to_dict() for message in store.get_history(KEY)]
        assert [body["content"] for body in stored] == ["?", "!"]
        # The seq of the question that the answer has seen is known by then.
        assert stored[1]["stenolog"] == {"seen": 1, "answers": []}
        assert hand.seq_of("1") == 1

    asyncio.run(main())


def test_redelivered_message_is_unsaved_once() -> None:
    async def main() -> None:
        store = RejectingStore()
        sessions, heard, hand = JSONLBackend(store), Heard(), UnsavedMessages(KEY, _run)
        store.refused = ("?",)
        for _ in range(2):
            assert (
                await hand.store_user_message(sessions, _user("?"), on_event=heard, once="1")
                is None
            )
        assert len(hand.bodies) == 1

    asyncio.run(main())


def test_unstorable_message_does_not_block_later_ones() -> None:
    async def main() -> None:
        store = RejectingStore()
        sessions, heard, hand = JSONLBackend(store), Heard(), UnsavedMessages(KEY, _run)
        store.add_full_message(KEY, _user("before"), once="1")
        store.refused = ("other", "next")
        with pytest.raises(OnceConflict):
            store.add_full_message(KEY, _user("another"), once="1")
        assert (
            await hand.store_user_message(sessions, _user("other"), on_event=heard, once="1")
            is None
        )
        assert (
            await hand.store_user_message(sessions, _user("next"), on_event=heard, once="2") is None
        )
        store.refused = ()
        assert await hand.flush(sessions, on_event=heard)
        assert "is lost" in heard.of(SaveFailed)[-1].text
        assert [message.content for message in store.get_history(KEY)] == ["before", "next"]

    asyncio.run(main())


def test_stale_unsaved_answer_is_dropped() -> None:
    async def main() -> None:
        store = RejectingStore()
        sessions, heard, hand = JSONLBackend(store), Heard(), UnsavedMessages(KEY, _run)
        assert await hand.store_user_message(sessions, _user("?"), on_event=heard, once="1") == 1
        store.refused = ("mine",)
        seen = SeenMessages(upto=1)
        assert (
            await hand.store_turn_message(sessions, _answer("mine"), on_event=heard, seen=seen)
            is None
        )
        store.refused = ()
        store.add_full_message(KEY, _answer("theirs"))
        # A new user message does not write the messages of a turn.
        assert (
            await hand.store_user_message(sessions, _user("next"), on_event=heard, once="2") is None
        )
        assert await hand.flush(sessions, on_event=heard)
        contents = [message.content for message in store.get_history(KEY)]
        assert contents == ["?", "theirs", "next"]

    asyncio.run(main())


def test_stale_answer_is_dropped_despite_a_new_unanswered_message() -> None:
    async def main() -> None:
        store = RejectingStore()
        sessions, heard, hand = JSONLBackend(store), Heard(), UnsavedMessages(KEY, _run)
        await hand.store_user_message(sessions, _user("?"), on_event=heard, once="1")
        store.refused = ("mine",)
        await hand.store_turn_message(
            sessions, _answer("mine"), on_event=heard, seen=SeenMessages(upto=1)
        )
        store.refused = ()
        store.add_full_message(KEY, _answer("theirs"))
        store.add_full_message(KEY, _user("and?"))
        assert await hand.flush(sessions, on_event=heard)
        assert [message.content for message in store.get_history(KEY)] == ["?", "theirs", "and?"]

    asyncio.run(main())


def test_question_stored_by_a_failed_write_is_not_answered_again() -> None:
    async def main() -> None:
        store = RejectingStore()
        sessions, heard, hand = JSONLBackend(store), Heard(), UnsavedMessages(KEY, _run)
        store.refused = ("?", "mine")
        await hand.store_user_message(sessions, _user("?"), on_event=heard, once="1")
        await hand.store_turn_message(
            sessions,
            _answer("mine"),
            on_event=heard,
            seen=SeenMessages(upto=0, once=hand.newest_idempotency_key),
        )
        store.refused = ()
        # The failed write had reached the store, and another process has answered it.
        store.add_full_message(KEY, _user("?"), once="1")
        store.add_full_message(KEY, _answer("theirs"))
        assert await hand.flush(sessions, on_event=heard)
        assert [message.content for message in store.get_history(KEY)] == ["?", "theirs"]

    asyncio.run(main())


@pytest.mark.parametrize("content", ["Hello.", "Other."])
def test_redelivered_message_is_compared_without_the_marks_of_other_versions(
    content: str, tmp_path: Path
) -> None:
    async def main() -> None:
        async with agent_loop("jsonl", tmp_path, ["Hi."]) as loop:
            store = loop.registry.agent().store
            assert store is not None
            marks = {"of another version": True}
            stored = {"role": "user", "content": "Hello.", "stenolog": marks}
            store.add_full_message(KEY, stored, once="update-1")
            if content == "Hello.":
                assert (await say(loop, content, id="update-1")).text == "Hi."
                assert roles(loop) == ["user", "assistant"]
            else:
                refused = await say(loop, content, id="update-1")
                assert isinstance(refused.error, OnceConflict)

    asyncio.run(main())
