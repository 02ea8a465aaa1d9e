"""Tests of appends, unknown keys (promises P1, P2, P8) and idempotency keys (P12)."""

# ruff: noqa: D102 - tests have names instead of docstrings

from datetime import UTC, datetime, timedelta, timezone
from types import MappingProxyType
from typing import Any

import pytest

from stenolog.errors import NoSuchSession, NothingToUndo, OnceConflict, RefusedMessage, UsageError
from stenolog.stores.base import Store
from stenolog.testing.contract.open_store_base import (
    ContractPart,
    all_messages,
    append,
    assert_raises,
    user_message,
    user_messages,
    visible_texts,
)
from stenolog.testing.store_calls import Call
from stenolog.testing.strategies import NASTY_TEXTS


class Appends(ContractPart):
    """Appending messages."""

    def test_p1_seqs_count_up_from_one_in_each_session(self, store: Store) -> None:
        assert append(store, "a", "one", "two") == [1, 2]
        assert store.add_messages("a", user_messages("three", "four")) == [3, 4]
        assert store.add_full_message("a", user_message("five")) == 5
        assert append(store, "b", "another session") == [1]
        assert visible_texts(store, "a") == ["one", "two", "three", "four", "five"]

    def test_p1_stored_message_has_the_given_fields_with_seq_and_time(self, store: Store) -> None:
        call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        fields = {"role": "assistant", "content": None, "tool_calls": [call], "seq": "mine"}
        before = datetime.now(UTC) - timedelta(seconds=1)
        store.add_full_message("a", fields)
        [message] = store.get_history("a")
        assert message.to_dict() == fields
        assert (message.seq, message.hidden, message.role) == (1, False, "assistant")
        assert message.content is None
        assert message.tool_calls == [call]
        assert message.at.utcoffset() == timedelta(0)
        assert before <= message.at <= datetime.now(UTC) + timedelta(seconds=1)
        with pytest.raises(AttributeError, match="name"):
            _ = message.name

    def test_a_message_cannot_be_changed_and_its_dict_is_a_fresh_copy(self, store: Store) -> None:
        store.add_full_message("a", {"role": "user", "content": ["x"]})
        [message] = store.get_history("a")
        message.to_dict()["content"].append("y")
        assert message.to_dict() == {"role": "user", "content": ["x"]}
        with pytest.raises(AttributeError):
            message.seq = 2  # type: ignore[misc]
        [second_read] = store.get_history("a")
        assert second_read.to_dict() == {"role": "user", "content": ["x"]}

    def test_later_changes_to_the_given_object_do_not_affect_the_store(self, store: Store) -> None:
        fields: dict[str, Any] = {"role": "user", "content": ["x"]}
        store.add_full_message("a", fields)
        fields["content"].append("y")
        assert visible_texts(store, "a") == [["x"]]

    def test_any_mapping_and_any_message_of_a_store_can_be_added(self, store: Store) -> None:
        store.add_full_message("a", MappingProxyType(user_message("x")))
        [message] = store.get_history("a")
        store.add_full_message("b", message)
        store.add_messages("b", [message, user_message("y")])
        assert visible_texts(store, "b") == ["x", "x", "y"]
        assert [m.seq for m in store.get_history("b")] == [1, 2, 3]

    def test_p2_batch_with_one_invalid_message_is_rejected_completely(self, store: Store) -> None:
        append(store, "a", "before")
        with pytest.raises(RefusedMessage):
            store.add_messages("a", [user_message("x"), {"role": "user", "content": float("nan")}])
        with pytest.raises(RefusedMessage):
            store.set_history("a", [user_message("x"), {"role": "user", "content": b"bytes"}])
        assert all_messages(store, "a") == [(1, "before", False)]
        assert append(store, "a", "after") == [2]

    def test_empty_batch_stores_nothing(self, store: Store) -> None:
        assert store.add_messages("a", []) == []
        assert store.list_sessions() == []
        append(store, "a", "x")
        assert store.add_messages("a", []) == []
        assert visible_texts(store, "a") == ["x"]

    def test_messages_keep_the_given_times(self, store: Store) -> None:
        early = datetime(2019, 12, 31, 23, 59, 59, 123456, tzinfo=timezone(timedelta(hours=-7)))
        times = [early, datetime(1, 2, 3, tzinfo=UTC), datetime(9999, 12, 31, 23, tzinfo=UTC)]
        assert store.add_messages("a", user_messages("x", "y", "z"), at=times) == [1, 2, 3]
        stored_times = [message.at for message in store.get_history("a")]
        assert stored_times == times
        assert {moment.utcoffset() for moment in stored_times} == {timedelta(0)}
        before = datetime.now(UTC) - timedelta(seconds=1)
        store.add_messages("a", user_messages("now"))
        [newest] = store.get_history("a", last=1)
        assert before <= newest.at <= datetime.now(UTC) + timedelta(seconds=1)
        info = store.info("a")
        assert info.created <= info.updated

    def test_idempotency_key_ignores_the_time_of_a_message(self, store: Store) -> None:
        [first_time, second_time] = [datetime(2020, 1, day, tzinfo=UTC) for day in (1, 2)]
        assert store.add_messages("a", user_messages("x"), once="t", at=[first_time]) == [1]
        assert store.add_messages("a", user_messages("x"), once="t", at=[second_time]) == [1]
        assert [message.at for message in store.get_history("a")] == [first_time]

    @pytest.mark.parametrize(
        "times",
        [
            [],
            [datetime(2020, 1, 1, tzinfo=UTC)],
            [datetime(2020, 1, 1, tzinfo=UTC)] * 3,
            [datetime(2020, 1, 1, tzinfo=UTC), datetime(2020, 1, 1)],  # noqa: DTZ001 - rejected
            [datetime(2020, 1, 1, tzinfo=UTC), "2020-01-01T00:00:00Z"],
            [datetime(2020, 1, 1, tzinfo=UTC), None],
            [
                datetime(2020, 1, 1, tzinfo=UTC),
                datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=1))),
            ],
        ],
        ids=str,
    )
    def test_p8_number_and_type_of_given_times_are_checked(self, store: Store, times: Any) -> None:
        with pytest.raises(UsageError):
            store.add_messages("a", user_messages("x", "y"), at=times)
        assert store.list_sessions() == []


_CALLS_WITHOUT_EFFECT = [
    Call("get_history"),
    Call("get_history", full=True, last=3, after=1),
    Call("get_summary"),
    Call("truncate_history", 3),
    Call("truncate_history", 0),
    Call("clear"),
    Call("hide", 1, 3),
    Call("pop"),
    Call("compact"),
    Call("add_messages", []),
]

_CREATING_CALLS = [
    Call("add_message", "user", "x"),
    Call("add_full_message", user_message("x")),
    Call("add_messages", user_messages("x", "y")),
    Call("set_summary", "text"),
    Call("set_history", user_messages("x")),
    Call("set_meta", title="x"),
    Call("checkpoint", summary="text", upto=0),
]


class UnknownKeys(ContractPart):
    """Calls on a key that was never used."""

    def test_reads_of_an_unknown_key_return_empty_results(self, store: Store) -> None:
        assert store.get_history("nobody") == []
        assert store.get_history("nobody", full=True) == []
        assert store.get_summary("nobody") == ""
        assert store.pop("nobody") is None
        assert store.compact("nobody").archived == 0

    @pytest.mark.parametrize(
        "call",
        [
            Call("delete"),
            Call("restore"),
            Call("fork", "new"),
            Call("purge"),
            Call("purge", before=2),
            Call("lease", ttl=60),
        ],
        ids=str,
    )
    def test_p8_lifecycle_calls_on_an_unknown_key_raise_no_such_session(
        self, store: Store, call: Call
    ) -> None:
        with pytest.raises(NoSuchSession) as raised:
            call.make(store, "nobody")
        assert raised.value.key == "nobody"
        assert (store.list_sessions(), store.list_trash(), store.stamps()) == ([], [], {})

    def test_p8_info_and_undo_of_an_unknown_key_raise(self, store: Store) -> None:
        with pytest.raises(NoSuchSession) as raised:
            store.info("nobody")
        assert raised.value.key == "nobody"
        assert_raises(NothingToUndo, store.undo, "nobody")
        assert store.list_sessions() == []

    @pytest.mark.parametrize("call", _CALLS_WITHOUT_EFFECT, ids=str)
    def test_calls_without_effect_create_no_session(self, store: Store, call: Call) -> None:
        call.make(store, "nobody")
        assert list(store.follow("nobody", timeout=0)) == []
        assert store.list_sessions() == []
        assert_raises(NoSuchSession, store.info, "nobody")

    @pytest.mark.parametrize("call", _CREATING_CALLS, ids=str)
    def test_first_write_creates_the_session(self, store: Store, call: Call) -> None:
        call.make(store, "new")
        assert store.list_sessions() == ["new"]
        assert store.info("new").key == "new"

    def test_rejected_call_creates_no_session(self, store: Store) -> None:
        assert_raises(RefusedMessage, store.add_message, "new", "user", float("inf"))
        assert_raises(RefusedMessage, store.set_history, "new", [{"content": {1, 2}}])
        assert_raises(UsageError, store.checkpoint, "new", summary="x", upto=1)
        assert_raises(UsageError, store.set_meta, "new", blob=b"bytes")
        assert store.list_sessions() == []


class IdempotencyKeys(ContractPart):
    """`once=`."""

    def test_p12_repeated_idempotency_key_returns_the_first_seq(self, store: Store) -> None:
        assert store.add_message("a", "user", "x", once="t1") == 1
        append(store, "a", "between")
        assert store.add_message("a", "user", "x", once="t1") == 1
        assert store.add_full_message("a", user_message("x"), once="t1") == 1
        assert store.add_messages("a", user_messages("x"), once="t1") == [1]
        assert store.add_message("a", "user", "x", once="t2") == 3
        assert visible_texts(store, "a") == ["x", "between", "x"]

    def test_p12_idempotency_key_is_not_a_field_of_the_message(self, store: Store) -> None:
        store.add_full_message("a", {"role": "user", "content": "x", "once": "mine"}, once="t1")
        [message] = store.get_history("a")
        assert message.to_dict() == {"role": "user", "content": "x", "once": "mine"}

    def test_p12_repeated_batch_returns_the_first_seqs(self, store: Store) -> None:
        append(store, "a", "before")
        batch = user_messages("x", "y", "z")
        assert store.add_messages("a", batch, once="t1") == [2, 3, 4]
        assert store.add_messages("a", batch, once="t1") == [2, 3, 4]
        assert store.add_messages("a", batch) == [5, 6, 7]

    def test_p12_idempotency_key_with_other_content_is_a_conflict(self, store: Store) -> None:
        append(store, "a", "before")
        store.add_messages("a", user_messages("x", "y"), once="t1")
        other_batches = [user_messages("x"), user_messages("y", "x"), user_messages("x", "y", "z")]
        for other in other_batches:
            with pytest.raises(OnceConflict) as raised:
                store.add_messages("a", other, once="t1")
            error = raised.value
            assert (error.key, error.token, error.seq) == ("a", "t1", 2)
        assert visible_texts(store, "a") == ["before", "x", "y"]

    def test_p12_content_is_compared_in_its_encoded_form(self, store: Store) -> None:
        store.add_message("a", "user", 1, once="t1")
        assert_raises(OnceConflict, store.add_message, "a", "user", True, once="t1")
        assert_raises(OnceConflict, store.add_message, "a", "user", 1.0, once="t1")

    def test_p12_each_session_has_its_own_idempotency_keys(self, store: Store) -> None:
        assert store.add_message("a", "user", "x", once="t1") == 1
        assert store.add_message("b", "user", "y", once="t1") == 1
        assert visible_texts(store, "b") == ["y"]

    def test_p12_idempotency_keys_survive_hiding_undo_and_compaction(self, store: Store) -> None:
        store.add_message("a", "user", "x", once="t1")
        store.add_messages("a", user_messages("y", "z"), once="t2")
        store.clear("a")
        assert store.add_message("a", "user", "x", once="t1") == 1
        store.compact("a")
        assert store.add_message("a", "user", "x", once="t1") == 1
        assert store.add_messages("a", user_messages("y", "z"), once="t2") == [2, 3]
        assert_raises(OnceConflict, store.add_message, "a", "user", "other", once="t1")
        append(store, "a", "later")
        store.clear("a")
        store.compact("a")
        assert store.add_message("a", "user", "x", once="t1") == 1
        assert len(all_messages(store, "a")) == 4

    def test_p12_idempotency_keys_of_the_last_thousand_messages_are_known(
        self, store: Store
    ) -> None:
        for number in range(1000):
            store.add_message("a", "user", f"x{number}", once=f"t{number}")
        store.clear("a")
        store.compact("a")
        for number in (0, 1, 499, 998, 999):
            assert store.add_message("a", "user", f"x{number}", once=f"t{number}") == number + 1
        assert store.info("a").last_seq == 1000

    def test_p12_rejected_message_does_not_use_its_idempotency_key(self, store: Store) -> None:
        assert_raises(RefusedMessage, store.add_message, "a", "user", float("nan"), once="t1")
        assert store.add_messages("a", [], once="t1") == []
        assert store.add_message("a", "user", "x", once="t1") == 1

    def test_p8_invalid_idempotency_key_is_rejected(self, store: Store) -> None:
        for wrong in ("", "x" * 257, "\u00e9" * 129, 7, b"t"):
            with pytest.raises(UsageError):
                store.add_message("a", "user", "x", once=wrong)  # type: ignore[arg-type]
        assert store.list_sessions() == []
        assert store.add_message("a", "user", "x", once="x" * 256) == 1
        assert store.add_message("a", "user", "x", once="\u00e9" * 128) == 2

    def test_p10_any_text_can_be_an_idempotency_key(self, store: Store) -> None:
        tokens = [text for text in NASTY_TEXTS if text]
        for seq, token in enumerate(tokens, start=1):
            assert store.add_message("a", "user", "x", once=token) == seq
        store.clear("a")
        store.compact("a")
        for seq, token in enumerate(tokens, start=1):
            assert store.add_message("a", "user", "x", once=token) == seq
