"""P7: many threads at one session, readers and compaction beside them."""
# ruff: noqa: D102 - the name of a test is its sentence

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Barrier, Event

from stenolog.errors import StaleCheckpoint
from stenolog.stores.base import Store
from stenolog.testing.contract.opened import Opened, hidden, shown, user

THREADS = 64
EACH = 40


@contextmanager
def threads(count: int) -> Iterator[ThreadPoolExecutor]:
    """A pool whose threads take turns far more often than Python would let them."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(count) as pool:
            yield pool
    finally:
        sys.setswitchinterval(before)


class Writers(Opened):
    """Many callers at once."""

    def test_p7_64_threads_lose_nothing_and_keep_their_order(self, store: Store) -> None:
        start = Barrier(THREADS)

        def write(writer: int) -> list[int]:
            start.wait()
            return [store.add_message("a", "user", [writer, number]) for number in range(EACH)]

        with threads(THREADS) as pool:
            seqs = list(pool.map(write, range(THREADS)))

        by_seq = {message.seq: message.content for message in store.get_history("a")}
        assert sorted(by_seq) == list(range(1, THREADS * EACH + 1))
        for writer, own in enumerate(seqs):
            assert own == sorted(own)
            assert [by_seq[seq] for seq in own] == [[writer, number] for number in range(EACH)]

    def test_p7_readers_see_whole_batches_in_order_while_others_write_and_compact(
        self, store: Store
    ) -> None:
        done = Event()
        writers = 8

        def write(writer: int) -> None:
            for number in range(20):
                store.add_messages("a", [user(f"{writer}.{number}.{part}") for part in "abc"])

        def read() -> int:
            rounds = 0
            while not done.is_set() or not rounds:
                seqs = [message.seq for message in store.get_history("a", full=True)]
                assert seqs == list(range(1, len(seqs) + 1))
                assert len(seqs) % 3 == 0
                rounds += 1
            return rounds

        def tidy() -> int:
            rounds = 0
            while not done.is_set() or not rounds:
                end = len(store.get_history("a", full=True))
                store.checkpoint("a", summary=f"up to {end}", upto=end)
                store.compact("a")
                rounds += 1
            return rounds

        with threads(writers + 3) as pool:
            beside = [pool.submit(read), pool.submit(read), pool.submit(tidy)]
            try:
                list(pool.map(write, range(writers)))
            finally:
                done.set()
            assert all(future.result() for future in beside)

        found = [message.content for message in store.get_history("a", full=True)]
        assert len(found) == writers * 20 * 3
        for writer in range(writers):
            own = [text for text in found if text.startswith(f"{writer}.")]
            assert own == [f"{writer}.{number}.{part}" for number in range(20) for part in "abc"]

    def test_p5_checkpoints_beside_writers_hide_only_what_they_name(self, store: Store) -> None:
        done = Event()

        def write(writer: int) -> None:
            for number in range(25):
                store.add_message("a", "user", f"{writer}.{number}")

        def summarise() -> int:
            floor = 0
            while not done.is_set():
                read = store.get_history("a")
                if len(read) > 3:
                    upto = read[-3].seq
                    store.checkpoint("a", summary=f"to {upto}", upto=upto, expect_floor=floor)
                    floor = upto
                    assert store.get_history("a")[:2] == read[-2:]
            return floor

        with threads(5) as pool:
            summariser = pool.submit(summarise)
            try:
                list(pool.map(write, range(4)))
            finally:
                done.set()
            floor = summariser.result()

        assert hidden(store, "a") == list(range(1, floor + 1))
        assert store.info("a").count == 100
        assert store.get_summary("a") == (f"to {floor}" if floor else "")

    def test_p7_of_two_checkpoints_on_the_same_floor_one_wins(self, store: Store) -> None:
        store.add_messages("a", [user(str(number)) for number in range(10)])
        start = Barrier(8)

        def checkpoint(upto: int) -> bool:
            start.wait()
            try:
                store.checkpoint("a", summary=f"to {upto}", upto=upto, expect_floor=0)
            except StaleCheckpoint:
                return False
            return True

        with threads(8) as pool:
            won = list(pool.map(checkpoint, range(1, 9)))
        assert won.count(True) == 1
        floor = won.index(True) + 1
        assert store.info("a").floor == floor
        assert store.get_summary("a") == f"to {floor}"

    def test_p12_one_token_from_many_threads_is_stored_once(self, store: Store) -> None:
        store.add_message("a", "user", "before")
        start = Barrier(16)

        def write(_: int) -> int:
            start.wait()
            return store.add_message("a", "user", "x", once="t")

        with threads(16) as pool:
            assert list(pool.map(write, range(16))) == [2] * 16
        assert shown(store, "a") == ["before", "x"]

    def test_p6_threads_on_different_sessions_do_not_meet(self, store: Store) -> None:
        def write(number: int) -> None:
            key = f"user:{number}"
            for text in "abc":
                store.add_message(key, "user", f"{text}{number}")
            store.set_summary(key, f"about {number}")

        with threads(32) as pool:
            list(pool.map(write, range(64)))
        for number in range(64):
            assert shown(store, f"user:{number}") == [f"{text}{number}" for text in "abc"]
            assert store.get_summary(f"user:{number}") == f"about {number}"
        assert len(store.list_sessions(prefix="user:")) == 64
