"""Tests of promise P7: many threads write, read, archive and follow one session.

Further tests check that a lease has one holder at a time, and that a holder that lost its lease
cannot write.
"""

import os
import time
from contextlib import suppress
from functools import partial
from itertools import islice
from threading import Event, Semaphore, Thread
from typing import Any, ClassVar

import pytest

from stenolog.errors import (
    Conflict,
    LeaseLost,
    NoSuchSession,
    SessionDeleted,
    StoreBusy,
    StoreClosed,
    UsageError,
)
from stenolog.stores.base import Lease, Store
from support.contract.call_table import WRITE_CALLS
from support.contract.open_store_base import (
    ContractPart,
    append,
    assert_raises,
    assert_session,
    hidden_seqs,
    repeat_in_threads,
    run_at_once,
    shifted_clock,
    thread_pool,
    user_message,
    user_messages,
    visible_texts,
)
from support.store_calls import Call

THREAD_COUNT = 64
MESSAGES_PER_THREAD = 40
STUCK_SECONDS = 20.0
"""Maximum seconds that a test waits for a follower, for a lease, or until a lease expires."""


class Writers(ContractPart):
    """Tests with many concurrent callers."""

    def test_p7_messages_of_64_threads_are_stored_in_order(self, store: Store) -> None:
        def write(writer_index: int) -> list[int]:
            return [
                store.add_message("a", "user", [writer_index, number])
                for number in range(MESSAGES_PER_THREAD)
            ]

        seqs_by_writer = run_at_once(*(partial(write, index) for index in range(THREAD_COUNT)))
        contents_by_seq = {message.seq: message.content for message in store.get_history("a")}
        assert sorted(contents_by_seq) == list(range(1, THREAD_COUNT * MESSAGES_PER_THREAD + 1))
        for writer_index, writer_seqs in enumerate(seqs_by_writer):
            assert writer_seqs == sorted(writer_seqs)
            assert [contents_by_seq[seq] for seq in writer_seqs] == [
                [writer_index, number] for number in range(MESSAGES_PER_THREAD)
            ]

    def test_p7_readers_see_complete_batches_in_order_during_writes_and_compaction(
        self, store: Store
    ) -> None:
        writer_count = 8

        def write(writer_index: int) -> None:
            for number in range(20):
                store.add_messages(
                    "a", [user_message(f"{writer_index}.{number}.{part}") for part in "abc"]
                )

        def check_batches() -> None:
            seqs = [message.seq for message in store.get_history("a", full=True)]
            assert seqs == list(range(1, len(seqs) + 1))
            assert len(seqs) % 3 == 0

        def summarize_and_compact() -> None:
            last_seq = len(store.get_history("a", full=True))
            store.checkpoint("a", summary=f"up to {last_seq}", upto=last_seq)
            store.compact("a")

        with repeat_in_threads(check_batches, check_batches, summarize_and_compact):
            run_at_once(*(partial(write, index) for index in range(writer_count)))

        texts = [message.content for message in store.get_history("a", full=True)]
        assert len(texts) == writer_count * 20 * 3
        for writer_index in range(writer_count):
            assert [text for text in texts if text.startswith(f"{writer_index}.")] == [
                f"{writer_index}.{number}.{part}" for number in range(20) for part in "abc"
            ]

    def test_p5_checkpoints_during_writes_hide_only_messages_up_to_their_seq(
        self, store: Store
    ) -> None:
        floor = 0

        def write(writer_index: int) -> None:
            for number in range(25):
                store.add_message("a", "user", f"{writer_index}.{number}")

        def summarize() -> None:
            nonlocal floor
            visible_messages = store.get_history("a")
            if len(visible_messages) > 3:
                upto = visible_messages[-3].seq
                store.checkpoint("a", summary=f"to {upto}", upto=upto, expect_floor=floor)
                floor = upto
                assert store.get_history("a")[:2] == visible_messages[-2:]

        with repeat_in_threads(summarize):
            run_at_once(*(partial(write, index) for index in range(4)))

        assert hidden_seqs(store, "a") == list(range(1, floor + 1))
        assert store.info("a").count == 100
        assert store.get_summary("a") == (f"to {floor}" if floor else "")

    def test_p7_one_of_several_checkpoints_on_the_same_floor_succeeds(self, store: Store) -> None:
        store.add_messages("a", [user_message(str(number)) for number in range(10)])

        def try_checkpoint(upto: int) -> bool:
            try:
                store.checkpoint("a", summary=f"to {upto}", upto=upto, expect_floor=0)
            except Conflict:
                return False
            return True

        successes = run_at_once(*(partial(try_checkpoint, upto) for upto in range(1, 9)))
        assert successes.count(True) == 1
        floor = successes.index(True) + 1
        assert_session(store, "a", floor=floor, summary=f"to {floor}")

    def test_p12_message_with_one_idempotency_key_from_many_threads_is_stored_once(
        self, store: Store
    ) -> None:
        store.add_message("a", "user", "before")
        add_message = partial(store.add_message, "a", "user", "x", once="t")
        assert run_at_once(*[add_message] * 16) == [2] * 16
        assert visible_texts(store, "a") == ["before", "x"]

    def test_p6_threads_on_different_sessions_do_not_affect_each_other(self, store: Store) -> None:
        def write_session(number: int) -> None:
            key = f"user:{number}"
            for text in "abc":
                store.add_message(key, "user", f"{text}{number}")
            store.set_summary(key, f"about {number}")

        run_at_once(*(partial(write_session, number) for number in range(64)))
        for number in range(64):
            assert visible_texts(store, f"user:{number}") == [f"{text}{number}" for text in "abc"]
            assert store.get_summary(f"user:{number}") == f"about {number}"
        assert len(store.list_sessions(prefix="user:")) == 64


class _Follower:
    """A thread that follows a session until `count` messages were received.

    The thread is a daemon: a hanging thread fails the test, but does not block the test run.
    """

    def __init__(self, store: Store, key: str, count: int | None = None, *, after: int = 0) -> None:
        self._messages = store.follow(key, after=after)
        self._seqs: list[int] = []
        self._received = Semaphore(0)
        self._thread = Thread(target=self._receive, args=[count], daemon=True)
        self._thread.start()

    def _receive(self, count: int | None) -> None:
        for message in islice(self._messages, count):
            self._seqs.append(message.seq)
            self._received.release()

    def wait_for_messages(self, count: int) -> None:
        """Wait until the thread has received `count` messages."""
        for _ in range(count):
            assert self._received.acquire(timeout=STUCK_SECONDS), "no message arrived"

    def wait_for_seqs(self) -> list[int]:
        """Wait for the end of the thread, and return the received seqs."""
        self._thread.join(STUCK_SECONDS)
        assert not self._thread.is_alive(), "the follower is still waiting"
        return self._seqs


class Following(ContractPart):
    """Tests of `follow`."""

    def test_follow_starts_with_stored_messages_after_the_given_seq(self, store: Store) -> None:
        append(store, "a", "1", "2", "3")
        messages = [(m.seq, m.content) for m in store.follow("a", timeout=0)]
        assert messages == [(1, "1"), (2, "2"), (3, "3")]
        assert [m.seq for m in islice(store.follow("a", timeout=0), 2)] == [1, 2]
        assert [m.seq for m in store.follow("a", after=2, timeout=0)] == [3]
        assert list(store.follow("a", after=3, timeout=0)) == []

    def test_follow_includes_hidden_and_archived_messages(self, store: Store) -> None:
        append(store, "a", "1", "2", "3", "4", "5")
        store.truncate_history("a", 3)
        store.compact("a")
        store.admin.hide("a", 4, 4)
        messages = [(m.seq, m.content) for m in store.follow("a", timeout=0)]
        assert messages == [(seq, str(seq)) for seq in range(1, 6)]
        assert [m.seq for m in store.follow("a", after=1, timeout=0)] == [2, 3, 4, 5]

    def test_follow_ends_after_the_timeout_without_new_messages(self, store: Store) -> None:
        append(store, "a", "1")
        assert [m.seq for m in store.follow("a", timeout=0.05)] == [1]
        assert list(store.follow("nobody", timeout=0.05)) == []

    def test_follow_returns_messages_appended_while_it_waits(self, store: Store) -> None:
        append(store, "a", "1")
        follower = _Follower(store, "a", 4, after=1)
        append(store, "a", "2")
        store.add_messages("a", user_messages("3", "4"))
        store.set_history("a", user_messages("5"))
        assert follower.wait_for_seqs() == [2, 3, 4, 5]

    def test_follow_waits_for_a_missing_and_for_an_empty_session(self, store: Store) -> None:
        store.set_summary("empty", "nothing was said yet")
        followers = [_Follower(store, "later", 1), _Follower(store, "empty", 1)]
        append(store, "other", "not this one")
        append(store, "later", "1")
        append(store, "empty", "1")
        assert [follower.wait_for_seqs() for follower in followers] == [[1], [1]]

    def test_follow_with_a_uid_follows_only_that_session(self, store: Store) -> None:
        append(store, "a", "1", "2")
        uid = store.info("a").uid
        assert [m.seq for m in store.follow("a", after=1, uid=uid, timeout=0)] == [2]
        store.delete("a")
        with pytest.raises(SessionDeleted, match=r"was deleted$"):
            next(store.follow("a", after=1, uid=uid, timeout=0))
        append(store, "a", "new 1", "new 2", "new 3")
        with pytest.raises(SessionDeleted, match="another one has its key"):
            next(store.follow("a", after=2, uid=uid, timeout=0))
        assert [m.content for m in store.follow("a", timeout=0)] == ["new 1", "new 2", "new 3"]

    def test_several_followers_receive_all_messages(self, store: Store) -> None:
        followers = [_Follower(store, "a", 3) for _ in range(3)]
        append(store, "a", "1", "2", "3")
        assert [follower.wait_for_seqs() for follower in followers] == [[1, 2, 3]] * 3

    def test_p7_follow_returns_each_message_once_across_compaction(self, store: Store) -> None:
        follower = _Follower(store, "a", 100)
        for number in range(1, 101):
            store.add_message("a", "user", number)
            if number % 9 == 0:
                store.truncate_history("a", 2)
                store.compact("a")
            if number % 25 == 0:
                store.undo("a")
        assert follower.wait_for_seqs() == list(range(1, 101))

    def test_close_ends_every_follow(self, store: Store) -> None:
        append(store, "a", "1")
        followers = [_Follower(store, "a", after=1), _Follower(store, "nobody")]
        reader = _Follower(store, "a")
        reader.wait_for_messages(1)
        store.close()
        assert [follower.wait_for_seqs() for follower in followers] == [[], []]
        assert reader.wait_for_seqs() == [1]


def create_and_lease(store: Store, *, ttl: float = 60) -> Lease:
    """Append a message to the session `a`, and return a lease of the session."""
    append(store, "a", "1")
    return store.lease("a", ttl=ttl)


def wait_for_expiry(lease: Lease) -> bool:
    """Wait for a lease to expire; return False if the lease has not expired in time."""
    deadline = time.monotonic() + STUCK_SECONDS
    while not lease.lost and time.monotonic() < deadline:
        time.sleep(0.002)
    return lease.lost


class ExpiredLeases(ContractPart):
    """Tests of leases whose holder stalled."""

    def test_expired_lease_can_be_acquired_by_another_caller(self, store: Store) -> None:
        first_lease = create_and_lease(store, ttl=0.01)
        with store.lease("a", ttl=60, wait=STUCK_SECONDS) as second_lease:
            assert second_lease.epoch > first_lease.epoch
            assert (first_lease.lost, second_lease.lost) == (True, False)

    @pytest.mark.parametrize("call", WRITE_CALLS, ids=str)
    def test_p8_writes_through_a_lost_lease_are_rejected(self, store: Store, call: Call) -> None:
        append(store, "a", "1")
        store.set_summary("a", "so far")
        first_lease = store.lease("a", ttl=0.01)
        with store.lease("a", ttl=60, wait=STUCK_SECONDS) as second:
            error = assert_raises(LeaseLost, call.make, first_lease.store, "a")
            assert (error.key, error.epoch) == ("a", first_lease.epoch)
            assert visible_texts(store, "a") == visible_texts(first_lease.store, "a") == ["1"]
            assert (store.get_summary("a"), store.list_sessions()) == ("so far", ["a"])
            assert second.store.add_message("a", "user", "2") == 2
        assert append(store, "a", "3") == [3]

    def test_p8_lost_lease_rejects_writes_to_other_sessions_too(self, store: Store) -> None:
        first_lease = create_and_lease(store, ttl=0.01)
        with store.lease("a", ttl=60, wait=STUCK_SECONDS), pytest.raises(LeaseLost):
            first_lease.store.add_message("b", "user", "late")
        assert_raises(LeaseLost, first_lease.store.add_message, "b", "user", "still late")
        assert store.list_sessions() == ["a"]

    def test_expired_lease_works_until_another_caller_acquires_it(self, store: Store) -> None:
        lease = create_and_lease(store, ttl=0.01)
        assert wait_for_expiry(lease)
        assert lease.store.add_message("a", "user", "2") == 2
        lease.renew()
        assert lease.store.add_message("a", "user", "3") == 3

    def test_renewed_lease_stays_held(self, store: Store) -> None:
        first_lease = create_and_lease(store, ttl=0.01)
        with store.lease("a", ttl=60, wait=STUCK_SECONDS) as second_lease:
            second_lease.renew()
            assert_raises(LeaseLost, first_lease.renew)
            first_lease.release()
            assert (first_lease.lost, second_lease.lost) == (True, False)
            assert_raises(StoreBusy, store.lease, "a", ttl=60, wait=0)


class Leases(ExpiredLeases):
    """Tests of `lease`."""

    leases_expire: ClassVar[bool] = True
    """Whether leases expire; otherwise a lease ends with the process that holds it."""

    @pytest.mark.parametrize("seconds", [-3600, -3, 61, 3600])
    def test_p7_setting_the_system_clock_does_not_end_a_lease(
        self, store: Store, seconds: int
    ) -> None:
        with create_and_lease(store) as lease:
            with shifted_clock(seconds):
                assert not lease.lost
                assert_raises(StoreBusy, store.lease, "a", ttl=60, wait=0)
                lease.renew()
                assert not lease.lost
            assert not lease.lost
            assert_raises(StoreBusy, store.lease, "a", ttl=60, wait=0)

    def __init_subclass__(cls) -> None:
        """Remove the tests of expiry for engines whose leases do not expire."""
        if not cls.leases_expire:
            for name in vars(ExpiredLeases):
                if name.startswith("test_"):
                    setattr(cls, name, None)

    def test_a_lease_is_held_until_it_is_released(self, store: Store) -> None:
        lease = create_and_lease(store)
        assert isinstance(lease, Lease)
        assert (lease.key, lease.lost) == ("a", False)
        assert_raises(StoreBusy, store.lease, "a", ttl=60, wait=0)
        lease.renew()
        lease.release()
        assert lease.lost
        error = assert_raises(LeaseLost, lease.renew)
        assert (error.key, error.epoch) == ("a", lease.epoch)
        with store.lease("a", ttl=60, wait=0) as second:
            assert not second.lost

    def test_p8_store_busy_error_names_the_lease_holder(self, store: Store) -> None:
        with create_and_lease(store), pytest.raises(StoreBusy, match=str(os.getpid())):
            store.lease("a", ttl=60, wait=0.01)

    def test_with_block_releases_the_lease_after_an_error(self, store: Store) -> None:
        append(store, "a", "1")
        with pytest.raises(ZeroDivisionError), store.lease("a", ttl=60) as lease:
            raise ZeroDivisionError
        assert lease.lost
        store.lease("a", ttl=60, wait=0).release()

    def test_releasing_twice_does_nothing(self, store: Store) -> None:
        first_lease = create_and_lease(store)
        first_lease.release()
        first_lease.release()
        with store.lease("a", ttl=60, wait=0) as second:
            first_lease.release()
            assert not second.lost
            assert_raises(StoreBusy, store.lease, "a", ttl=60, wait=0)

    def test_epoch_increases_with_each_lease_and_across_a_purge(self, store: Store) -> None:
        epochs = []
        for _ in range(3):
            append(store, "a", "1")
            for _ in range(4):
                with store.lease("a", ttl=60) as lease:
                    epochs.append(lease.epoch)
                    lease.renew()
                    assert lease.epoch == epochs[-1]
            store.admin.purge("a")
        assert epochs[0] > 0
        assert epochs == sorted(set(epochs))

    @pytest.mark.parametrize("write", WRITE_CALLS, ids=str)
    def test_p8_writes_through_a_released_lease_are_rejected(
        self, store: Store, write: Call
    ) -> None:
        append(store, "a", "1")
        store.set_summary("a", "so far")
        lease = store.lease("a", ttl=60)
        leased_store = lease.store
        assert leased_store.add_message("a", "user", "2") == 2
        lease.release()
        error = assert_raises(LeaseLost, write.make, leased_store, "a")
        assert (error.key, error.epoch) == ("a", lease.epoch)
        assert visible_texts(store, "a") == visible_texts(leased_store, "a") == ["1", "2"]
        assert (store.get_summary("a"), store.list_sessions()) == ("so far", ["a"])

    def test_leases_of_different_sessions_are_independent(self, store: Store) -> None:
        append(store, "a", "1")
        append(store, "b", "1")
        with store.lease("a", ttl=60), store.lease("b", ttl=60, wait=0) as other:
            assert other.key == "b"

    def test_calls_without_a_lease_work_while_a_lease_is_held(self, store: Store) -> None:
        with create_and_lease(store):
            assert append(store, "a", "2") == [2]
            store.set_summary("a", "x")
            store.compact("a")
            store.fork("a", "b")
            assert visible_texts(store, "a") == ["1", "2"]

    def test_store_of_a_lease_reads_and_writes_the_same_sessions(self, store: Store) -> None:
        with create_and_lease(store) as lease:
            assert isinstance(lease.store, Store)
            assert lease.store.add_message("a", "user", "2") == 2
            assert lease.store.add_message("b", "user", "another session") == 1
            assert visible_texts(lease.store, "a") == visible_texts(store, "a") == ["1", "2"]
            lease.store.set_meta("a", title="x")
            assert store.info("a").meta == {"title": "x"}

    def test_p8_lease_requires_a_session_and_valid_times(self, store: Store) -> None:
        append(store, "a", "1")
        invalid_times: list[Any] = [-1, True, "1"]
        for seconds in invalid_times:
            assert_raises(UsageError, store.lease, "a", ttl=seconds)
            assert_raises(UsageError, store.lease, "a", ttl=60, wait=seconds)
        for ttl in (0, float("inf")):
            assert_raises(UsageError, store.lease, "a", ttl=ttl)
        assert_raises(UsageError, store.lease, "", ttl=60)
        store.delete("a")
        assert_raises(NoSuchSession, store.lease, "a", ttl=60)

    def test_waiting_caller_gets_the_lease_after_its_release(self, store: Store) -> None:
        first_lease = create_and_lease(store)
        with thread_pool(1) as pool:
            pending_lease = pool.submit(store.lease, "a", ttl=60, wait=STUCK_SECONDS)
            assert not pending_lease.done()
            first_lease.release()
            with pending_lease.result() as second_lease:
                assert second_lease.epoch > first_lease.epoch

    def test_p7_one_thread_at_a_time_holds_the_lease(self, store: Store) -> None:
        append(store, "a", "0")
        lease_holders, other_holders, epochs = list[str](), list[str](), list[int]()

        def take_leases(name: str) -> None:
            for _ in range(5):
                with store.lease("a", ttl=60, wait=STUCK_SECONDS) as lease:
                    lease_holders.append(name)
                    texts = visible_texts(store, "a")
                    lease.store.add_message("a", "user", str(int(texts[-1]) + 1))
                    other_holders.extend(lease_holders[1:])
                    epochs.append(lease.epoch)
                    lease_holders.remove(name)

        run_at_once(*(partial(take_leases, name) for name in "wxyz"))
        assert other_holders == []
        assert visible_texts(store, "a") == [str(number) for number in range(21)]
        assert len(epochs) == 20
        assert epochs == sorted(set(epochs))

    def test_a_lease_may_be_released_by_another_thread(self, store: Store) -> None:
        lease = create_and_lease(store)
        with thread_pool(1) as pool:
            pool.submit(lease.release).result()
        store.lease("a", ttl=60, wait=0).release()

    @pytest.mark.parametrize("write", WRITE_CALLS, ids=str)
    def test_write_through_a_lease_does_not_recreate_a_purged_session(
        self, store: Store, write: Call
    ) -> None:
        append(store, "a", "1", "2")
        lease = store.lease("a", ttl=60)
        leased_store = lease.store
        assert store.admin.purge("a").messages == 2
        assert_raises(LeaseLost, write.make, leased_store, "a")
        assert_raises(LeaseLost, lease.renew)
        assert lease.lost
        lease.release()
        assert (store.list_sessions(), store.admin.list_trash()) == ([], [])

    def test_lease_ends_if_the_session_is_deleted_and_then_purged(self, store: Store) -> None:
        lease = create_and_lease(store)
        store.delete("a")
        assert not lease.lost
        store.admin.purge("a")
        assert_raises(LeaseLost, lease.store.add_message, "a", "user", "2")
        append(store, "a", "another session")
        assert_raises(LeaseLost, lease.store.add_message, "a", "user", "2")
        store.lease("a", ttl=60, wait=0).release()
        assert visible_texts(store, "a") == ["another session"]

    def test_p8_purge_ends_the_wait_for_a_lease_with_no_such_session(self, store: Store) -> None:
        lease = create_and_lease(store)
        with thread_pool(1) as pool:
            pending_lease = pool.submit(store.lease, "a", ttl=60, wait=STUCK_SECONDS)
            time.sleep(0.03)
            store.admin.purge("a")
            assert_raises(NoSuchSession, pending_lease.result, STUCK_SECONDS / 2)
        lease.release()
        assert (store.list_sessions(), store.admin.list_trash()) == ([], [])

    def test_p7_concurrent_leases_do_not_recreate_a_purged_session(self, store: Store) -> None:
        recreated_keys: list[str] = []

        def write_with_lease() -> None:
            with suppress(NoSuchSession, LeaseLost), store.lease("a", ttl=60) as lease:
                for _ in range(3):
                    lease.store.add_message("a", "assistant", "late")

        with repeat_in_threads(write_with_lease, write_with_lease):
            for number in range(12):
                append(store, "a", str(number))
                time.sleep(0.001 * (number % 4))
                store.admin.purge("a")
                time.sleep(0.002)
                recreated_keys += store.list_sessions()
        assert recreated_keys == []

    def test_lease_survives_delete_and_restore(self, store: Store) -> None:
        with create_and_lease(store) as lease:
            store.delete("a")
            store.admin.restore("a")
            assert not lease.lost
            assert lease.store.add_message("a", "user", "2") == 2
            store.delete("a")
            assert lease.store.add_message("a", "user", "another session") == 1
        assert visible_texts(store, "a") == ["another session"]

    def test_p8_close_releases_leases_and_rejects_new_ones(self, store: Store) -> None:
        lease = create_and_lease(store)
        store.close()
        assert_raises(StoreClosed, store.lease, "a", ttl=60)
        assert lease.lost
        assert_raises((StoreClosed, LeaseLost), lease.renew)
        assert_raises(StoreClosed, lease.store.add_message, "a", "user", "2")
        lease.release()

    def test_closed_store_ends_the_wait_for_a_lease(self, store: Store) -> None:
        append(store, "a", "1")
        lease, started = store.lease("a", ttl=3600), Event()

        def wait_for_lease() -> Lease:
            started.set()
            return store.lease("a", ttl=60, wait=STUCK_SECONDS)

        with thread_pool(1) as pool:
            pending_lease = pool.submit(wait_for_lease)
            assert started.wait(STUCK_SECONDS)
            assert not lease.lost
            store.close()
            assert_raises(StoreClosed, pending_lease.result, STUCK_SECONDS)
