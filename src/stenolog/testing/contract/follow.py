"""P7: `follow` gives each message once, in order, as it arrives."""
# ruff: noqa: D102 - the name of a test is its sentence

from itertools import islice
from threading import Semaphore, Thread

from stenolog.stores.base import Store
from stenolog.testing.contract.opened import Opened, say, user

PATIENCE = 20
"""Seconds until a follower that gives nothing is taken for hanging."""


class _Follower:
    """A thread that takes messages until there are enough of them, or no more.

    A daemon, so that one that hangs fails its test and not the whole run.
    """

    def __init__(self, store: Store, key: str, count: int | None = None, *, after: int = 0) -> None:
        self._messages = store.follow(key, after=after)
        self._seqs: list[int] = []
        self._got = Semaphore(0)
        self._thread = Thread(target=self._take, args=[count], daemon=True)
        self._thread.start()

    def _take(self, count: int | None) -> None:
        for message in islice(self._messages, count):
            self._seqs.append(message.seq)
            self._got.release()

    def has_got(self, count: int) -> None:
        """Wait until it got so many."""
        for _ in range(count):
            assert self._got.acquire(timeout=PATIENCE), "nothing came"

    def seqs(self) -> list[int]:
        """What it got, when it is done."""
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), "it is still waiting"
        return self._seqs


class Following(Opened):
    """`follow`."""

    def test_it_begins_with_what_is_there_past_after(self, store: Store) -> None:
        say(store, "a", "1", "2", "3")
        found = list(store.follow("a", timeout=0))
        assert [(m.seq, m.content) for m in found] == [(1, "1"), (2, "2"), (3, "3")]
        assert [m.seq for m in store.follow("a", after=2, timeout=0)] == [3]
        assert list(store.follow("a", after=3, timeout=0)) == []

    def test_hidden_and_archived_messages_are_included(self, store: Store) -> None:
        say(store, "a", "1", "2", "3", "4", "5")
        store.truncate_history("a", 3)
        store.compact("a")
        store.hide("a", 4, 4)
        found = list(store.follow("a", timeout=0))
        assert [(m.seq, m.content) for m in found] == [(n, str(n)) for n in range(1, 6)]
        assert [m.seq for m in store.follow("a", after=1, timeout=0)] == [2, 3, 4, 5]

    def test_it_ends_when_nothing_came_for_as_long_as_allowed(self, store: Store) -> None:
        say(store, "a", "1")
        assert [m.seq for m in store.follow("a", timeout=0.05)] == [1]
        assert list(store.follow("nobody", timeout=0.05)) == []

    def test_it_gives_what_others_append_while_it_waits(self, store: Store) -> None:
        say(store, "a", "1")
        follower = _Follower(store, "a", 4, after=1)
        say(store, "a", "2")
        store.add_messages("a", [user("3"), user("4")])
        store.set_history("a", [user("5")])
        assert follower.seqs() == [2, 3, 4, 5]

    def test_a_missing_session_is_waited_for(self, store: Store) -> None:
        follower = _Follower(store, "later", 1)
        say(store, "other", "not this one")
        say(store, "later", "1")
        assert follower.seqs() == [1]

    def test_a_session_without_messages_is_waited_for(self, store: Store) -> None:
        store.set_summary("a", "nothing was said yet")
        follower = _Follower(store, "a", 1)
        say(store, "a", "1")
        assert follower.seqs() == [1]

    def test_several_followers_get_everything(self, store: Store) -> None:
        followers = [_Follower(store, "a", 3) for _ in range(3)]
        say(store, "a", "1", "2", "3")
        assert [follower.seqs() for follower in followers] == [[1, 2, 3]] * 3

    def test_p7_each_message_comes_once_across_compaction(self, store: Store) -> None:
        follower = _Follower(store, "a", 100)
        for number in range(1, 101):
            store.add_message("a", "user", number)
            if number % 9 == 0:
                store.truncate_history("a", 2)
                store.compact("a")
            if number % 25 == 0:
                store.undo("a")
        assert follower.seqs() == list(range(1, 101))

    def test_close_ends_every_follow(self, store: Store) -> None:
        say(store, "a", "1")
        followers = [_Follower(store, "a", after=1), _Follower(store, "nobody")]
        listening = _Follower(store, "a")
        listening.has_got(1)
        store.close()
        assert [follower.seqs() for follower in followers] == [[], []]
        assert listening.seqs() == [1]

    def test_nothing_is_lost_by_a_reader_that_stops_half_way(self, store: Store) -> None:
        say(store, "a", "1", "2", "3", "4")
        first = [m.seq for m in islice(store.follow("a", timeout=0), 2)]
        rest = [m.seq for m in store.follow("a", after=first[-1], timeout=0)]
        assert first + rest == [1, 2, 3, 4]
