"""P6: any text is a key, no two share anything, and all are listed back."""
# ruff: noqa: D102 - the name of a test is its sentence

from pathlib import Path

import pytest

from stenolog.errors import InvalidKey, UsageError
from stenolog.stores.base import Store
from stenolog.testing.contract.opened import Opened, say, shown
from stenolog.testing.strategies import hostile_keys


class Keys(Opened):
    """Keys, and `list_sessions`."""

    def test_p6_three_hundred_hostile_keys_share_nothing(
        self, store: Store, tmp_path: Path
    ) -> None:
        keys = hostile_keys()
        assert len(set(keys)) == 300
        for key in keys:
            assert store.add_message(key, "user", f"to {key}") == 1
            store.set_summary(key, f"about {key}")
        for key in keys:
            assert shown(store, key) == [f"to {key}"]
            assert store.get_summary(key) == f"about {key}"
            assert store.info(key).key == key
        assert store.list_sessions() == sorted(keys, key=str.encode)
        assert len({store.info(key).uid for key in keys}) == 300
        store.clear(keys[0])
        assert all(shown(store, key) for key in keys[1:])
        assert [path.name for path in tmp_path.iterdir()] == ["workspace"]

    @pytest.mark.parametrize(
        "key", ["", "x" * 1025, "\u00e9" * 513, "\ud800", "a\udfff", None, 7, b"a"]
    )
    def test_p6_what_is_no_key_is_refused(self, store: Store, key: str) -> None:
        for call in (
            lambda: store.add_message(key, "user", "x"),
            lambda: store.get_history(key),
            lambda: store.get_summary(key),
            lambda: store.set_summary(key, "x"),
            lambda: store.truncate_history(key, 1),
            lambda: store.info(key),
            lambda: store.compact(key),
            lambda: next(store.follow(key, timeout=0)),
        ):
            with pytest.raises(InvalidKey):
                call()
        assert store.list_sessions() == []

    def test_sessions_are_listed_in_the_order_of_their_bytes(self, store: Store) -> None:
        keys = ["b", "a", "B", "a:b", "a_b", "\u00e9", "e\u0301", "\uffff", "\U0001f600", "10", "9"]
        for key in keys:
            say(store, key, "x")
        assert store.list_sessions() == sorted(keys, key=str.encode)

    def test_pages_of_sessions_join_without_gap_or_repeat(self, store: Store) -> None:
        keys = sorted((f"user:{number}" for number in range(25)), key=str.encode)
        for key in reversed(keys):
            say(store, key, "x")
        found: list[str] = []
        while page := store.list_sessions(limit=7, after=found[-1] if found else None):
            found += page
        assert found == keys
        assert store.list_sessions(limit=0) == []
        assert store.list_sessions(limit=99) == keys
        assert store.list_sessions(after="user:9") == []
        assert store.list_sessions(after="user:1x", limit=2) == ["user:2", "user:20"]
        assert store.list_sessions(after="") == keys

    def test_a_prefix_is_taken_literally(self, store: Store) -> None:
        keys = ["a:1", "a:2", "a_1", "A:1", "a%1", "%", "a", "ab", "b:1"]
        for key in keys:
            say(store, key, "x")
        assert store.list_sessions(prefix="a:") == ["a:1", "a:2"]
        assert store.list_sessions(prefix="a_") == ["a_1"]
        assert store.list_sessions(prefix="%") == ["%"]
        assert store.list_sessions(prefix="a") == ["a", "a%1", "a:1", "a:2", "a_1", "ab"]
        assert store.list_sessions(prefix="a", after="a%1", limit=2) == ["a:1", "a:2"]
        assert store.list_sessions(prefix="zz") == []

    def test_p8_a_negative_limit_is_refused(self, store: Store) -> None:
        with pytest.raises(UsageError):
            store.list_sessions(limit=-1)
