"""Tests of leases: one holder at a time, and no writes by a holder that lost its lease."""
# ruff: noqa: D102 - tests have names instead of docstrings

import os
import time
from contextlib import suppress
from functools import partial
from threading import Event
from typing import ClassVar

import pytest

from stenolog.errors import InvalidKey, LeaseLost, NoSuchSession, StoreBusy, StoreClosed, UsageError
from stenolog.stores.base import Lease, Store
from stenolog.testing.contract.open_store_base import (
    WRITE_CALLS,
    ContractPart,
    append,
    assert_raises,
    repeat_in_threads,
    run_at_once,
    shifted_clock,
    thread_pool,
    visible_texts,
)
from stenolog.testing.store_calls import Call

STUCK_SECONDS = 20.0
"""Maximum seconds that a test waits until it acquires a lease, or until a lease expires."""


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

    def test_epoch_increases_with_each_lease(self, store: Store) -> None:
        append(store, "a", "1")
        epochs = []
        for _ in range(4):
            with store.lease("a", ttl=60) as lease:
                epochs.append(lease.epoch)
                lease.renew()
                assert lease.epoch == epochs[-1]
        assert epochs[0] > 0
        assert epochs == sorted(set(epochs))

    def test_epoch_increases_across_a_purge(self, store: Store) -> None:
        epochs = []
        for _ in range(3):
            append(store, "a", "1")
            for _ in range(3):
                with store.lease("a", ttl=60) as lease:
                    epochs.append(lease.epoch)
            store.purge("a")
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
        error = assert_raises(NoSuchSession, store.lease, "nobody", ttl=60)
        assert error.key == "nobody"
        assert store.list_sessions() == []
        append(store, "a", "1")
        for ttl, wait in ((0, None), (-1, None), (float("inf"), None), (60, -1)):
            assert_raises(UsageError, store.lease, "a", ttl=ttl, wait=wait)
        assert_raises(InvalidKey, store.lease, "", ttl=60)
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
        assert store.purge("a").messages == 2
        assert_raises(LeaseLost, write.make, leased_store, "a")
        assert_raises(LeaseLost, lease.renew)
        assert lease.lost
        lease.release()
        assert (store.list_sessions(), store.list_trash()) == ([], [])

    def test_lease_ends_if_the_session_is_deleted_and_then_purged(self, store: Store) -> None:
        lease = create_and_lease(store)
        store.delete("a")
        assert not lease.lost
        store.purge("a")
        assert_raises(LeaseLost, lease.store.add_message, "a", "user", "2")
        append(store, "a", "another life")
        assert_raises(LeaseLost, lease.store.add_message, "a", "user", "2")
        store.lease("a", ttl=60, wait=0).release()
        assert visible_texts(store, "a") == ["another life"]

    def test_p8_purge_ends_the_wait_for_a_lease_with_no_such_session(self, store: Store) -> None:
        lease = create_and_lease(store)
        with thread_pool(1) as pool:
            pending_lease = pool.submit(store.lease, "a", ttl=60, wait=STUCK_SECONDS)
            time.sleep(0.03)
            store.purge("a")
            assert_raises(NoSuchSession, pending_lease.result, STUCK_SECONDS / 2)
        lease.release()
        assert (store.list_sessions(), store.list_trash()) == ([], [])

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
                store.purge("a")
                time.sleep(0.002)
                recreated_keys += store.list_sessions()
        assert recreated_keys == []

    def test_lease_survives_delete_and_restore(self, store: Store) -> None:
        with create_and_lease(store) as lease:
            store.delete("a")
            store.restore("a")
            assert not lease.lost
            assert lease.store.add_message("a", "user", "2") == 2
            store.delete("a")
            assert lease.store.add_message("a", "user", "another life") == 1
        assert visible_texts(store, "a") == ["another life"]

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
