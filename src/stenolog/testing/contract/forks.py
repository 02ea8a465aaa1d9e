"""How a session begins as a copy of another."""
# ruff: noqa: D102 - the name of a test is its sentence

from datetime import UTC, datetime, timedelta
from threading import Barrier, Thread

import pytest

from stenolog.errors import InvalidKey, NoSuchSession, NothingToUndo, SessionExists, UsageError
from stenolog.stores.base import FORKED_AT, Store
from stenolog.testing.calls import picture
from stenolog.testing.contract.opened import Opened, everything, say, shown, talk, user


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
        assert (info.summary, info.floor) == ("so far", 2)
        assert info.meta == {**source.meta, FORKED_AT: source.last_seq}
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
        assert store.info("c").meta == {"title": "x", FORKED_AT: 0}
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
