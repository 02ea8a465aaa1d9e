"""How a session begins and ends: P4 for what can be taken back, and the one call that destroys."""
# ruff: noqa: D102 - the name of a test is its sentence

from datetime import UTC, datetime, timedelta
from threading import Barrier, Thread

import pytest

from stenolog.errors import (
    InvalidKey,
    NoSuchSession,
    NothingToUndo,
    OnceConflict,
    SessionDeleted,
    SessionExists,
    StenologError,
    UsageError,
)
from stenolog.stores.base import Store
from stenolog.testing.calls import Call, picture, trash
from stenolog.testing.contract.opened import Opened, everything, hidden, say, shown, user


def talk(store: Store, key: str) -> None:
    """Seven messages: two archived, one hidden, a batch; a summary, meta, tokens, undo steps."""
    say(store, key, "1", "2")
    store.add_messages(key, [user("3"), user("4"), user("5")], once="batch")
    store.checkpoint(key, summary="so far", upto=2)
    store.compact(key)
    store.hide(key, 4, 4)
    store.add_message(key, "user", "6", once="six")
    store.add_message(key, "user", "7")
    store.set_meta(key, title="A talk", tags=["x"])


class Forks(Opened):
    """`fork`."""

    def test_a_fork_has_what_is_in_sight_with_the_same_seqs_and_times(self, store: Store) -> None:
        talk(store, "a")
        store.fork("a", "b")
        assert [(m.seq, m.content, m.at) for m in store.get_history("b")] == [
            (m.seq, m.content, m.at) for m in store.get_history("a")
        ]
        assert [m.seq for m in store.get_history("b")] == [3, 5, 6, 7]
        assert store.list_sessions() == ["a", "b"]

    def test_a_fork_has_the_summary_the_meta_and_the_name_of_its_source(self, store: Store) -> None:
        talk(store, "a")
        before = datetime.now(UTC) - timedelta(seconds=1)
        store.fork("a", "b")
        source, info = store.info("a"), store.info("b")
        assert (info.summary, info.meta, info.floor) == ("so far", source.meta, 2)
        assert (info.key, info.forked_from) == ("b", "a")
        assert source.forked_from is None
        assert info.uid != source.uid
        assert before <= info.created <= info.updated

    def test_p4_what_a_fork_leaves_out_is_no_damage(self, store: Store) -> None:
        talk(store, "a")
        store.fork("a", "b")
        info = store.info("b")
        assert (info.count, info.visible, info.last_seq) == (4, 4, 7)
        assert (info.lost, info.damaged, info.void_bytes) == (0, 0, 0)
        assert everything(store, "b") == [(n, str(n), False) for n in (3, 5, 6, 7)]
        assert [m.seq for m in store.follow("b", timeout=0)] == [3, 5, 6, 7]
        assert [m.seq for m in store.get_history("b", full=True, after=3, last=2)] == [6, 7]
        assert [m.seq for m in store.get_history("b", after=4)] == [5, 6, 7]

    def test_the_next_seq_is_the_one_of_the_source(self, store: Store) -> None:
        talk(store, "a")
        store.fork("a", "b")
        assert say(store, "b", "8") == [8]
        assert say(store, "a", "another 8") == [8]

    @pytest.mark.parametrize("at", [2, 3, 4, 5, 7])
    def test_a_fork_at_a_seq_ends_there_and_goes_on_behind_it(self, store: Store, at: int) -> None:
        talk(store, "a")
        store.fork("a", "b", at=at)
        kept = [seq for seq in (3, 5, 6, 7) if seq <= at]
        assert everything(store, "b") == [(seq, str(seq), False) for seq in kept]
        info = store.info("b")
        assert (info.last_seq, info.count, info.lost, info.floor) == (at, len(kept), 0, 2)
        assert store.get_summary("b") == "so far"
        assert say(store, "b", "next") == [at + 1]

    @pytest.mark.parametrize("at", [-1, 0, 1, 8, 99])
    def test_a_fork_below_the_floor_or_beyond_the_end_is_refused(
        self, store: Store, at: int
    ) -> None:
        talk(store, "a")
        with pytest.raises(UsageError, match=str(at)):
            store.fork("a", "b", at=at)
        assert store.list_sessions() == ["a"]
        with pytest.raises(NoSuchSession):
            store.info("b")

    def test_a_fork_of_nothing_said_is_a_session(self, store: Store) -> None:
        say(store, "a", "1", "2")
        store.fork("a", "b", at=0)
        assert store.list_sessions() == ["a", "b"]
        assert everything(store, "b") == []
        assert store.info("b").forked_from == "a"
        store.set_meta("empty", title="x")
        store.fork("empty", "c")
        assert store.info("c").meta == {"title": "x"}
        assert say(store, "b", "one") == [1]
        assert say(store, "c", "one") == [1]

    def test_a_fork_shares_nothing_with_its_source(self, store: Store) -> None:
        talk(store, "a")
        store.fork("a", "b")
        forked = picture(store, "b")
        say(store, "a", "more")
        store.clear("a")
        store.set_meta("a", title="changed")
        store.compact("a")
        assert picture(store, "b") == forked
        source = picture(store, "a")
        store.set_history("b", [user("other")])
        store.set_summary("b", "changed")
        store.set_meta("b", title=None)
        store.compact("b")
        assert picture(store, "a") == source
        store.purge("a")
        assert shown(store, "b") == ["other"]

    def test_a_fork_has_no_tokens_and_no_undo_steps(self, store: Store) -> None:
        talk(store, "a")
        store.fork("a", "b")
        assert store.info("b").undoable == 0
        with pytest.raises(NothingToUndo):
            store.undo("b")
        assert store.add_message("b", "user", "6", once="six") == 8
        assert store.add_messages("b", [user("other")], once="batch") == [9]
        assert store.add_message("a", "user", "6", once="six") == 6

    def test_a_fork_can_be_changed_taken_back_and_compacted(self, store: Store) -> None:
        talk(store, "a")
        store.fork("a", "b")
        store.truncate_history("b", 1)
        assert shown(store, "b") == ["7"]
        store.compact("b")
        assert everything(store, "b") == [(n, str(n), n < 7) for n in (3, 5, 6, 7)]
        assert store.undo("b").shown == 3
        assert shown(store, "b") == ["3", "5", "6", "7"]
        store.hide("b", 1, 6)
        assert (shown(store, "b"), store.info("b").floor) == (["7"], 6)
        store.clear("b")
        assert store.undo("b").shown == 1
        assert store.info("b").lost == 0

    def test_a_fork_of_what_undo_brought_back_from_an_archive(self, store: Store) -> None:
        say(store, "a", *"12345")
        store.truncate_history("a", 1)
        store.compact("a")
        store.undo("a")
        store.fork("a", "b", at=4)
        assert shown(store, "b") == ["1", "2", "3", "4"]

    def test_a_fork_of_a_fork(self, store: Store) -> None:
        talk(store, "a")
        store.fork("a", "b", at=6)
        store.hide("b", 5, 5)
        store.fork("b", "c")
        assert everything(store, "c") == [(3, "3", False), (6, "6", False)]
        info = store.info("c")
        assert (info.forked_from, info.last_seq, info.lost) == ("b", 6, 0)

    def test_p8_a_fork_needs_a_source_and_a_free_key(self, store: Store) -> None:
        say(store, "a", "1")
        say(store, "b", "taken")
        with pytest.raises(NoSuchSession) as raised:
            store.fork("nobody", "c")
        assert raised.value.key == "nobody"
        with pytest.raises(SessionExists) as taken:
            store.fork("a", "b")
        assert taken.value.key == "b"
        with pytest.raises(SessionExists):
            store.fork("a", "a")
        with pytest.raises(InvalidKey):
            store.fork("a", "")
        assert (shown(store, "a"), shown(store, "b")) == (["1"], ["taken"])
        assert store.list_sessions() == ["a", "b"]

    def test_p7_of_many_who_fork_to_one_key_one_succeeds(self, store: Store) -> None:
        for number in range(8):
            say(store, f"a{number}", f"from {number}")
        start, forked = Barrier(8), list[int]()

        def fork(number: int) -> None:
            start.wait()
            try:
                store.fork(f"a{number}", "b")
            except SessionExists:
                return
            forked.append(number)

        threads = [Thread(target=fork, args=[number]) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        [winner] = forked
        assert shown(store, "b") == [f"from {winner}"]


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


class Purging(Opened):
    """`purge`, the only call that destroys."""

    def test_a_purged_session_is_gone_with_all_its_lives(self, store: Store) -> None:
        talk(store, "a")
        store.delete("a")
        say(store, "a", "8", "9")
        store.compact("a")
        say(store, "b", "stays")
        purged = store.purge("a")
        assert (purged.messages, purged.first, purged.last) == (9, 1, 7)
        assert purged.not_reached == ()
        assert (store.list_sessions(), store.list_trash()) == (["b"], [])
        assert store.get_history("a", full=True) == []
        with pytest.raises(NoSuchSession):
            store.restore("a")
        with pytest.raises(NoSuchSession):
            store.info("a")

    def test_a_purged_key_begins_anew_and_knows_no_token(self, store: Store) -> None:
        talk(store, "a")
        uid = store.info("a").uid
        store.purge("a")
        assert store.add_message("a", "user", "other", once="six") == 1
        info = store.info("a")
        assert info.uid != uid
        assert (info.count, info.summary, info.meta, info.archived) == (1, "", {}, 0)
        assert everything(store, "a") == [(1, "other", False)]

    def test_what_is_only_in_the_trash_can_be_purged(self, store: Store) -> None:
        talk(store, "a")
        say(store, "b", "1")
        store.delete("a")
        store.delete("b")
        assert store.purge("a").messages == 7
        assert trash(store) == [("b", 1)]
        store.restore("b")
        assert shown(store, "b") == ["1"]

    def test_p8_there_must_be_something_to_purge(self, store: Store) -> None:
        for options in ({}, {"before": 3}):
            with pytest.raises(NoSuchSession) as raised:
                Call("purge", (), options).make(store, "nobody")
            assert raised.value.key == "nobody"
        talk(store, "a")
        store.purge("a")
        with pytest.raises(NoSuchSession):
            store.purge("a")
        assert store.list_sessions() == []

    def test_who_follows_a_session_is_told_when_it_is_purged(self, store: Store) -> None:
        say(store, "a", "1")
        following = store.follow("a")
        assert next(following).content == "1"
        store.purge("a")
        with pytest.raises(SessionDeleted):
            next(following)

    def test_a_purge_names_the_forks_it_does_not_reach(self, store: Store) -> None:
        talk(store, "a")
        store.fork("a", "fork one")
        store.fork("a", "fork two")
        store.delete("fork two")
        store.fork("fork one", "of the fork")
        told = store.purge("a", before=3).not_reached
        assert sum("fork one" in sentence for sentence in told) == 1
        assert sum("fork two" in sentence for sentence in told) == 1
        told = store.purge("a").not_reached
        assert sorted(word for word in ("fork one", "fork two") for s in told if word in s) == [
            "fork one",
            "fork two",
        ]
        assert shown(store, "fork one") == ["3", "5", "6", "7"]

    @pytest.mark.parametrize("before", [2, 3, 4, 5, 6, 7, 8])
    def test_purge_before_a_seq_takes_what_is_below_it_and_nothing_else(
        self, store: Store, before: int
    ) -> None:
        talk(store, "a")
        whole = everything(store, "a")
        purged = store.purge("a", before=before)
        assert (purged.messages, purged.first, purged.last) == (before - 1, 1, before - 1)
        assert everything(store, "a") == [found for found in whole if found[0] >= before]
        info = store.info("a")
        assert (info.count, info.last_seq) == (8 - before, 7)
        assert (info.lost, info.damaged, info.void_bytes) == (0, 0, 0)
        assert info.floor >= max(2, before - 1)
        assert info.meta == {"title": "A talk", "tags": ["x"]}
        assert shown(store, "a") == [str(seq) for seq in (3, 5, 6, 7) if seq >= before]
        assert [m.seq for m in store.follow("a", timeout=0)] == list(range(before, 8))
        assert say(store, "a", "8") == [8]

    @pytest.mark.parametrize("before", [-1, 0, 1])
    def test_purge_before_the_beginning_takes_nothing(self, store: Store, before: int) -> None:
        talk(store, "a")
        now = picture(store, "a")
        purged = store.purge("a", before=before)
        assert (purged.messages, purged.first, purged.last) == (0, 0, 0)
        assert picture(store, "a") == now

    def test_purge_before_a_seq_beyond_the_end_takes_all_messages(self, store: Store) -> None:
        talk(store, "a")
        assert store.purge("a", before=99).messages == 7
        assert store.list_sessions() == ["a"]
        info = store.info("a")
        assert (info.count, info.visible, info.last_seq, info.floor) == (0, 0, 7, 7)
        assert everything(store, "a") == []
        assert say(store, "a", "8") == [8]
        assert shown(store, "a") == ["8"]

    def test_purging_again_takes_what_came_since(self, store: Store) -> None:
        talk(store, "a")
        assert store.purge("a", before=4).messages == 3
        assert store.purge("a", before=4).messages == 0
        purged = store.purge("a", before=6)
        assert (purged.messages, purged.first, purged.last) == (2, 4, 5)
        assert everything(store, "a") == [(6, "6", False), (7, "7", False)]
        store.clear("a")
        store.compact("a")
        assert store.purge("a", before=7).messages == 1
        assert everything(store, "a") == [(7, "7", True)]

    def test_undo_never_goes_below_a_purge(self, store: Store) -> None:
        say(store, "a", *"123456")
        store.truncate_history("a", 4)
        store.hide("a", 5, 5)
        store.purge("a", before=2)
        assert store.info("a").undoable == 1
        assert store.undo("a").op == "hide"
        with pytest.raises(NothingToUndo):
            store.undo("a")
        assert everything(store, "a") == [
            (2, "2", True),
            *((n, str(n), False) for n in (3, 4, 5, 6)),
        ]
        assert store.info("a").floor == 2

    def test_steps_above_a_purge_can_still_be_taken_back(self, store: Store) -> None:
        say(store, "a", *"123456")
        store.clear("a")
        store.undo("a")
        store.hide("a", 4, 4)
        store.set_history("a", [*store.get_history("a")[:4], user("x")])
        store.purge("a", before=3)
        assert shown(store, "a") == ["3", "5", "x"]
        assert store.undo("a").op == "replace"
        assert store.undo("a").op == "hide"
        assert shown(store, "a") == ["3", "4", "5", "6"]
        assert hidden(store, "a") == [7]

    def test_steps_before_one_that_a_purge_took_are_gone_as_well(self, store: Store) -> None:
        say(store, "a", *"123456")
        store.hide("a", 5, 5)
        store.truncate_history("a", 3)
        store.hide("a", 6, 6)
        store.purge("a", before=2)
        assert store.info("a").undoable == 1
        assert store.undo("a").shown == 1
        with pytest.raises(NothingToUndo):
            store.undo("a")
        assert shown(store, "a") == ["3", "4", "6"]

    def test_an_older_summary_does_not_come_back_after_a_purge(self, store: Store) -> None:
        say(store, "a", "1", "2", "3")
        store.checkpoint("a", summary="the first told a secret", upto=1)
        store.set_summary("a", "something else")
        told = store.purge("a", before=2).not_reached
        assert [sentence for sentence in told if "summary" in sentence]
        assert store.get_summary("a") == "something else"
        with pytest.raises(NothingToUndo):
            store.undo("a")

    def test_without_a_summary_nothing_is_said_of_one(self, store: Store) -> None:
        say(store, "a", "1", "2", "3")
        assert store.purge("a", before=2).not_reached == ()

    def test_deleted_sessions_of_the_key_are_named_by_purge_before(self, store: Store) -> None:
        say(store, "a", "1", "2")
        store.delete("a")
        say(store, "a", "1", "2")
        told = store.purge("a", before=2).not_reached
        assert [sentence for sentence in told if "trash" in sentence]
        assert trash(store) == [("a", 2)]

    def test_p12_tokens_of_kept_messages_are_known_after_a_purge(self, store: Store) -> None:
        talk(store, "a")
        store.purge("a", before=3)
        assert store.add_messages("a", [*map(user, "345")], once="batch") == [3, 4, 5]
        assert store.add_message("a", "user", "6", once="six") == 6
        store.purge("a", before=6)
        assert store.add_message("a", "user", "6", once="six") == 6
        with pytest.raises(OnceConflict):
            store.add_message("a", "user", "other", once="six")
        # The token of a message that is gone is gone as well.
        assert store.add_messages("a", [user("new")], once="batch") == [8]

    def test_p12_tokens_of_kept_archived_messages_are_known_after_a_purge(
        self, store: Store
    ) -> None:
        for number in range(1, 7):
            store.add_message("a", "user", str(number), once=f"t{number}")
        store.truncate_history("a", 1)
        store.compact("a")
        store.purge("a", before=4)
        assert store.add_message("a", "user", "5", once="t5") == 5
        assert store.add_message("a", "user", "2", once="t2") == 7

    def test_p2_a_batch_across_a_purge_keeps_its_rest(self, store: Store) -> None:
        say(store, "a", "1")
        store.add_messages("a", [*map(user, "2345")])
        store.purge("a", before=4)
        assert shown(store, "a") == ["4", "5"]
        say(store, "a", "6")
        store.truncate_history("a", 1)
        store.compact("a")
        store.undo("a")
        assert shown(store, "a") == ["4", "5", "6"]
        assert store.info("a").lost == 0

    def test_purge_reaches_into_archives(self, store: Store) -> None:
        for number in range(1, 13):
            say(store, "a", str(number))
            if number % 4 == 0:
                store.truncate_history("a", 1)
                store.compact("a")
        assert store.purge("a", before=6).messages == 5
        assert everything(store, "a") == [(n, str(n), n < 12) for n in range(6, 13)]
        store.purge("a", before=12)
        assert everything(store, "a") == [(12, "12", False)]
        say(store, "a", "13")
        store.truncate_history("a", 1)
        assert store.compact("a").archived == 1
        assert everything(store, "a") == [(12, "12", True), (13, "13", False)]
        assert store.info("a").lost == 0

    def test_a_purged_session_can_be_forked_deleted_and_restored(self, store: Store) -> None:
        talk(store, "a")
        store.purge("a", before=4)
        now = picture(store, "a")
        store.delete("a")
        assert trash(store) == [("a", 4)]
        store.restore("a")
        assert picture(store, "a") == now
        store.fork("a", "b")
        assert shown(store, "b") == ["5", "6", "7"]
        with pytest.raises(UsageError):
            store.fork("a", "c", at=2)

    def test_p7_a_purge_beside_writers_loses_nothing_of_theirs(self, store: Store) -> None:
        say(store, "a", *"12345")
        start, failed = Barrier(3), list[StenologError]()

        def write(name: str) -> None:
            start.wait()
            try:
                for number in range(25):
                    say(store, "a", f"{name}{number}")
            except StenologError as error:
                failed.append(error)

        threads = [Thread(target=write, args=[name]) for name in "xy"]
        for thread in threads:
            thread.start()
        start.wait()
        for before in range(2, 7):
            store.purge("a", before=before)
        for thread in threads:
            thread.join()
        assert not failed
        found = shown(store, "a")
        for name in "xy":
            assert [text for text in found if text[0] == name] == [f"{name}{n}" for n in range(25)]
        assert [m.seq for m in store.get_history("a", full=True)] == list(range(6, 56))
