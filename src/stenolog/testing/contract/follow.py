"""P7: `follow` gives each message once, in order, as it arrives."""
# ruff: noqa: D102 - the name of a test is its sentence

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from threading import Event

from stenolog.records import Message
from stenolog.stores.base import Store
from stenolog.testing.contract.opened import Opened, say, user

PATIENCE = 60
"""Seconds until a follower that gives nothing is taken for hanging."""


@contextmanager
def _following(store: Store, key: str, count: int, after: int = 0) -> Iterator[Future[list[int]]]:
    """A thread that takes this many messages; it has started to wait where there are none."""
    started = Event()

    def take() -> list[int]:
        messages = store.follow(key, after=after, timeout=PATIENCE)
        started.set()
        return [message.seq for message in islice(messages, count)]

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(take)
        assert started.wait(PATIENCE)
        yield future


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
        with _following(store, "a", 4, after=1) as following:
            say(store, "a", "2")
            store.add_messages("a", [user("3"), user("4")])
            store.set_history("a", [user("5")])
            assert following.result(PATIENCE) == [2, 3, 4, 5]

    def test_a_missing_session_is_waited_for(self, store: Store) -> None:
        with _following(store, "later", 1) as following:
            say(store, "other", "not this one")
            say(store, "later", "1")
            assert following.result(PATIENCE) == [1]

    def test_a_session_without_messages_is_waited_for(self, store: Store) -> None:
        store.set_summary("a", "nothing was said yet")
        with _following(store, "a", 1) as following:
            say(store, "a", "1")
            assert following.result(PATIENCE) == [1]

    def test_several_followers_get_everything(self, store: Store) -> None:
        with _following(store, "a", 3) as one, _following(store, "a", 3) as two:
            say(store, "a", "1", "2", "3")
            assert one.result(PATIENCE) == two.result(PATIENCE) == [1, 2, 3]

    def test_p7_each_message_comes_once_across_compaction(self, store: Store) -> None:
        def write() -> None:
            for number in range(100):
                seq = store.add_message("a", "user", number)
                if seq % 9 == 0:
                    store.truncate_history("a", 2)
                    store.compact("a")
                if seq % 25 == 0:
                    store.undo("a")

        with _following(store, "a", 100) as following, ThreadPoolExecutor(1) as pool:
            pool.submit(write).result(PATIENCE)
            assert following.result(PATIENCE) == list(range(1, 101))

    def test_close_ends_it(self, store: Store) -> None:
        say(store, "a", "1")
        with _following(store, "a", 2) as following:
            store.close()
            assert following.result(PATIENCE) in ([], [1])

    def test_close_ends_one_that_waits_without_limit(self, store: Store) -> None:
        waiting = Event()

        def take() -> list[Message]:
            messages = store.follow("nobody")
            waiting.set()
            return list(messages)

        with ThreadPoolExecutor(1) as pool:
            following = pool.submit(take)
            assert waiting.wait(PATIENCE)
            store.close()
            assert following.result(PATIENCE) == []

    def test_nothing_is_lost_by_a_reader_that_stops_half_way(self, store: Store) -> None:
        say(store, "a", "1", "2", "3", "4")
        first = [m.seq for m in islice(store.follow("a", timeout=0), 2)]
        rest = [m.seq for m in store.follow("a", after=first[-1], timeout=0)]
        assert first + rest == [1, 2, 3, 4]
