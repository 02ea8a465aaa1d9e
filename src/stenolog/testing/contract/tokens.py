"""P12: a message that is sent again with the same token is stored once."""
# ruff: noqa: D102 - the name of a test is its sentence

import pytest

from stenolog.errors import OnceConflict, RefusedMessage, UsageError
from stenolog.stores.base import Store
from stenolog.testing.contract.opened import Opened, everything, say, shown, user
from stenolog.testing.strategies import NASTY_TEXTS


class Tokens(Opened):
    """`once=`."""

    def test_p12_a_repeated_token_gives_the_first_seq_and_stores_nothing(
        self, store: Store
    ) -> None:
        assert store.add_message("a", "user", "x", once="t1") == 1
        say(store, "a", "between")
        assert store.add_message("a", "user", "x", once="t1") == 1
        assert store.add_full_message("a", user("x"), once="t1") == 1
        assert store.add_messages("a", [user("x")], once="t1") == [1]
        assert store.add_message("a", "user", "x", once="t2") == 3
        assert shown(store, "a") == ["x", "between", "x"]

    def test_p12_the_token_is_no_field_of_the_message(self, store: Store) -> None:
        store.add_full_message("a", {"role": "user", "content": "x", "once": "mine"}, once="t1")
        [message] = store.get_history("a")
        assert message.to_dict() == {"role": "user", "content": "x", "once": "mine"}

    def test_p12_a_repeated_batch_gives_the_first_seqs(self, store: Store) -> None:
        say(store, "a", "before")
        batch = [user("x"), user("y"), user("z")]
        assert store.add_messages("a", batch, once="t1") == [2, 3, 4]
        assert store.add_messages("a", batch, once="t1") == [2, 3, 4]
        assert store.add_messages("a", batch) == [5, 6, 7]

    def test_p12_the_same_token_with_other_content_is_a_conflict(self, store: Store) -> None:
        say(store, "a", "before")
        store.add_messages("a", [user("x"), user("y")], once="t1")
        others = [[user("x")], [user("y"), user("x")], [user("x"), user("y"), user("z")]]
        for other in others:
            with pytest.raises(OnceConflict) as raised:
                store.add_messages("a", other, once="t1")
            conflict = raised.value
            assert (conflict.key, conflict.token, conflict.seq) == ("a", "t1", 2)
        assert shown(store, "a") == ["before", "x", "y"]

    def test_p12_content_is_compared_as_it_stands_in_the_store(self, store: Store) -> None:
        store.add_message("a", "user", 1, once="t1")
        with pytest.raises(OnceConflict):
            store.add_message("a", "user", True, once="t1")
        with pytest.raises(OnceConflict):
            store.add_message("a", "user", 1.0, once="t1")

    def test_p12_each_session_has_its_own_tokens(self, store: Store) -> None:
        assert store.add_message("a", "user", "x", once="t1") == 1
        assert store.add_message("b", "user", "y", once="t1") == 1
        assert shown(store, "b") == ["y"]

    def test_p12_a_token_outlives_hiding_undo_and_compaction(self, store: Store) -> None:
        store.add_message("a", "user", "x", once="t1")
        store.add_messages("a", [user("y"), user("z")], once="t2")
        store.clear("a")
        assert store.add_message("a", "user", "x", once="t1") == 1
        store.compact("a")
        assert store.add_message("a", "user", "x", once="t1") == 1
        assert store.add_messages("a", [user("y"), user("z")], once="t2") == [2, 3]
        with pytest.raises(OnceConflict):
            store.add_message("a", "user", "other", once="t1")
        say(store, "a", "later")
        store.clear("a")
        store.compact("a")
        assert store.add_message("a", "user", "x", once="t1") == 1
        assert len(everything(store, "a")) == 4

    def test_p12_the_tokens_of_the_last_thousand_messages_are_remembered(
        self, store: Store
    ) -> None:
        for number in range(1000):
            store.add_message("a", "user", f"x{number}", once=f"t{number}")
        store.clear("a")
        store.compact("a")
        for number in (0, 1, 499, 998, 999):
            assert store.add_message("a", "user", f"x{number}", once=f"t{number}") == number + 1
        assert store.info("a").last_seq == 1000

    def test_p12_a_refused_message_does_not_use_up_its_token(self, store: Store) -> None:
        with pytest.raises(RefusedMessage):
            store.add_message("a", "user", float("nan"), once="t1")
        assert store.add_messages("a", [], once="t1") == []
        assert store.add_message("a", "user", "x", once="t1") == 1

    def test_p8_what_is_no_token_is_refused(self, store: Store) -> None:
        for wrong in ("", "x" * 257, "\u00e9" * 129, 7, b"t"):
            with pytest.raises(UsageError):
                store.add_message("a", "user", "x", once=wrong)  # type: ignore[arg-type]
        assert store.list_sessions() == []
        assert store.add_message("a", "user", "x", once="x" * 256) == 1
        assert store.add_message("a", "user", "x", once="\u00e9" * 128) == 2

    def test_p10_any_text_is_a_token(self, store: Store) -> None:
        tokens = [text for text in NASTY_TEXTS if text]
        for seq, token in enumerate(tokens, start=1):
            assert store.add_message("a", "user", "x", once=token) == seq
        store.clear("a")
        store.compact("a")
        for seq, token in enumerate(tokens, start=1):
            assert store.add_message("a", "user", "x", once=token) == seq
