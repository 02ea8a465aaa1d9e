"""How a session ends and comes back: P4."""
# ruff: noqa: D102 - the name of a test is its sentence

from datetime import UTC, datetime, timedelta
from threading import Barrier, Thread

import pytest

from stenolog.errors import InvalidKey, NoSuchSession, OnceConflict, SessionDeleted, SessionExists
from stenolog.stores.base import Store
from stenolog.testing.calls import Call, picture, trash
from stenolog.testing.contract.opened import Opened, everything, say, shown, talk, user


class Trash(Opened):
    """`delete`, `restore` and `list_trash`."""

    def test_a_deleted_session_is_gone_from_sight(self, store: Store) -> None:
        talk(store, "a")
        say(store, "b", "1")
        store.delete("a")
        assert store.list_sessions() == ["b"]
        assert store.get_history("a") == store.get_history("a", full=True) == []
        assert store.get_summary("a") == ""
        with pytest.raises(NoSuchSession):
            store.info("a")
        assert shown(store, "b") == ["1"]

    def test_delete_tells_what_it_put_into_the_trash(self, store: Store) -> None:
        talk(store, "a")
        uid, before = store.info("a").uid, datetime.now(UTC) - timedelta(seconds=1)
        trashed = store.delete("a")
        assert (trashed.key, trashed.uid, trashed.count) == ("a", uid, 7)
        assert before <= trashed.deleted <= datetime.now(UTC) + timedelta(seconds=1)
        assert trashed.deleted.utcoffset() == timedelta(0)
        assert store.list_trash() == [trashed]

    def test_the_trash_lists_the_last_deleted_first(self, store: Store) -> None:
        assert store.list_trash() == []
        for key in ("b", "a", "c"):
            say(store, key, key)
        deleted = [store.delete(key) for key in ("c", "b", "a")]
        assert store.list_trash() == deleted[::-1]

    def test_p4_restore_brings_everything_back(self, store: Store) -> None:
        talk(store, "a")
        before, info, whole = picture(store, "a"), store.info("a"), everything(store, "a")
        times = [message.at for message in store.get_history("a", full=True)]
        store.delete("a")
        store.restore("a")
        again = store.info("a")
        assert picture(store, "a") == before
        assert everything(store, "a") == whole
        assert (again.uid, again.created, again.archived) == (
            info.uid,
            info.created,
            info.archived,
        )
        assert [message.at for message in store.get_history("a", full=True)] == times
        assert store.list_trash() == []
        # Undo steps, tokens and the next seq as well.
        assert store.add_message("a", "user", "6", once="six") == 6
        assert store.add_messages("a", [*map(user, "345")], once="batch") == [3, 4, 5]
        with pytest.raises(OnceConflict):
            store.add_message("a", "user", "other", once="six")
        assert store.undo("a").op == "hide"
        assert store.undo("a").op == "checkpoint"
        assert shown(store, "a") == [*"1234567"]
        assert say(store, "a", "8") == [8]

    def test_a_key_can_be_deleted_and_restored_again_and_again(self, store: Store) -> None:
        talk(store, "a")
        before = picture(store, "a")
        for _ in range(3):
            store.delete("a")
            assert picture(store, "a") is None
            assert trash(store) == [("a", 7)]
            store.restore("a")
            assert picture(store, "a") == before
            assert trash(store) == []

    def test_a_deleted_key_made_anew_is_another_session(self, store: Store) -> None:
        talk(store, "a")
        first = store.delete("a")
        assert store.add_message("a", "user", "new", once="six") == 1
        info = store.info("a")
        assert info.uid != first.uid
        assert (info.count, info.summary, info.meta, info.undoable) == (1, "", {}, 0)
        second = store.delete("a")
        assert second.uid == info.uid
        assert [t.uid for t in store.list_trash()] == [second.uid, first.uid]

    def test_restore_takes_the_last_deleted_or_the_one_of_this_uid(self, store: Store) -> None:
        trashed = []
        for text in ("first", "second", "third"):
            say(store, "a", text)
            trashed.append(store.delete("a"))
        store.restore("a")
        assert shown(store, "a") == ["third"]
        store.delete("a")
        store.restore("a", uid=trashed[0].uid)
        assert shown(store, "a") == ["first"]
        assert store.info("a").uid == trashed[0].uid
        assert [t.uid for t in store.list_trash()] == [trashed[2].uid, trashed[1].uid]

    def test_p8_restore_onto_a_living_key_is_refused(self, store: Store) -> None:
        say(store, "a", "old")
        store.delete("a")
        say(store, "a", "new")
        with pytest.raises(SessionExists) as raised:
            store.restore("a")
        assert raised.value.key == "a"
        assert shown(store, "a") == ["new"]
        assert trash(store) == [("a", 1)]
        say(store, "b", "taken")
        with pytest.raises(SessionExists):
            store.restore("a", as_key="b")
        assert (shown(store, "b"), trash(store)) == (["taken"], [("a", 1)])

    def test_restore_under_another_key(self, store: Store) -> None:
        talk(store, "a")
        before, uid = picture(store, "a"), store.info("a").uid
        store.delete("a")
        say(store, "a", "new")
        store.restore("a", as_key="b")
        assert picture(store, "b") == before
        info = store.info("b")
        assert (info.key, info.uid) == ("b", uid)
        assert store.list_sessions() == ["a", "b"]
        assert shown(store, "a") == ["new"]
        assert store.list_trash() == []
        store.undo("b")
        store.undo("b")
        assert shown(store, "b") == [*"1234567"]
        assert store.add_message("b", "user", "6", once="six") == 6
        assert store.delete("b").key == "b"
        assert [t.key for t in store.list_trash()] == ["b"]
        store.restore("b")
        assert store.info("b").uid == uid

    def test_p8_what_is_not_in_the_trash_cannot_be_restored(self, store: Store) -> None:
        say(store, "a", "1")
        say(store, "b", "1")
        uid = store.delete("b").uid
        for call in (
            Call("delete", ()),
            Call("restore", ()),
            Call("restore", (), {"as_key": "c"}),
        ):
            with pytest.raises(NoSuchSession):
                call.make(store, "nobody")
        with pytest.raises(NoSuchSession):
            store.restore("a")
        with pytest.raises(NoSuchSession):
            store.restore("b", uid="0" * 16)
        with pytest.raises(NoSuchSession):
            store.restore("a", uid=uid, as_key="c")
        with pytest.raises(InvalidKey):
            store.restore("b", as_key="")
        assert store.list_sessions() == ["a"]
        assert trash(store) == [("b", 1)]

    def test_a_deleted_session_cannot_be_deleted_or_forked(self, store: Store) -> None:
        talk(store, "a")
        store.delete("a")
        for call in (Call("delete"), Call("fork", ("b",)), Call("purge", (), {"before": 3})):
            with pytest.raises(NoSuchSession):
                call.make(store, "a")
        assert (store.list_sessions(), trash(store)) == ([], [("a", 7)])

    def test_a_session_without_messages_can_be_deleted_and_restored(self, store: Store) -> None:
        store.set_summary("a", "nothing was said yet")
        assert store.delete("a").count == 0
        store.restore("a")
        assert store.get_summary("a") == "nothing was said yet"

    def test_a_deleted_fork_comes_back_as_one(self, store: Store) -> None:
        talk(store, "a")
        store.fork("a", "b", at=6)
        before = picture(store, "b")
        store.delete("b")
        store.restore("b")
        assert picture(store, "b") == before
        assert store.info("b").lost == 0

    def test_who_follows_a_session_is_told_when_it_is_deleted(self, store: Store) -> None:
        say(store, "a", "1", "2")
        following = store.follow("a", after=1)
        assert next(following).content == "2"
        store.delete("a")
        with pytest.raises(SessionDeleted) as raised:
            next(following)
        assert raised.value.key == "a"

    def test_who_follows_a_session_does_not_get_its_next_life(self, store: Store) -> None:
        say(store, "a", "1")
        following = store.follow("a")
        assert next(following).content == "1"
        store.delete("a")
        say(store, "a", "new 1", "new 2")
        with pytest.raises(SessionDeleted):
            next(following)

    def test_p7_messages_beside_a_delete_are_in_one_life_or_the_other(self, store: Store) -> None:
        say(store, "a", "first")
        start, told = Barrier(3), list[str]()

        def write(name: str) -> None:
            start.wait()
            for number in range(20):
                say(store, "a", f"{name}{number}")
                told.append(f"{name}{number}")

        threads = [Thread(target=write, args=[name]) for name in "xy"]
        for thread in threads:
            thread.start()
        start.wait()
        lives = 0
        for _ in range(5):
            try:
                store.delete("a")
            except NoSuchSession:
                continue
            lives += 1
        for thread in threads:
            thread.join()
        found = shown(store, "a")
        for trashed in store.list_trash():
            store.restore("a", uid=trashed.uid, as_key=f"life {trashed.uid}")
            found += shown(store, f"life {trashed.uid}")
        assert sorted(found) == sorted([*told, "first"])
        assert lives >= 1
