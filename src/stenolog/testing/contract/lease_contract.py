"""Leases of sessions: one holder at a time, and no damage by a holder that stalled."""
# ruff: noqa: D102 - the name of a test describes it

import os
import time
from contextlib import suppress
from threading import Event, Thread
from typing import ClassVar

import pytest

from stenolog.errors import (
    InvalidKey,
    LeaseLost,
    NoSuchSession,
    StenologError,
    StoreBusy,
    StoreClosed,
    UsageError,
)
from stenolog.stores.base import Lease, Store
from stenolog.testing.contract.open_store_base import Opened, clock_set, say, shown, user
from stenolog.testing.store_calls import Call

PATIENCE = 20.0
"""Seconds after which a lease that is not granted counts as stuck."""

_WRITES = [
    Call("add_message", ("user", "late")),
    Call("add_full_message", (user("late"),)),
    Call("add_messages", ([user("late"), user("later")],)),
    Call("set_summary", ("late",)),
    Call("truncate_history", (1,)),
    Call("clear"),
    Call("set_history", ([user("late")],)),
    Call("hide", (1, 1)),
    Call("pop"),
    Call("checkpoint", (), {"summary": "late", "upto": 1}),
    Call("undo"),
    Call("set_meta", (), {"title": "late"}),
    Call("delete"),
    Call("purge"),
    Call("fork", ("late",)),
]


def ran_out(lease: Lease) -> bool:
    """Wait until a lease has expired; return whether it did."""
    limit = time.monotonic() + PATIENCE
    while not lease.lost and time.monotonic() < limit:
        time.sleep(0.002)
    return lease.lost


class RunningOut(Opened):
    """Leases whose holder stalled."""

    def test_expired_lease_can_be_acquired_by_another_caller(self, store: Store) -> None:
        say(store, "a", "1")
        first = store.lease("a", ttl=0.01)
        with store.lease("a", ttl=60, wait=PATIENCE) as second:
            assert second.epoch > first.epoch
            assert (first.lost, second.lost) == (True, False)

    @pytest.mark.parametrize("call", _WRITES, ids=str)
    def test_p8_writes_through_a_lost_lease_are_rejected(self, store: Store, call: Call) -> None:
        say(store, "a", "1")
        store.set_summary("a", "so far")
        first = store.lease("a", ttl=0.01)
        with store.lease("a", ttl=60, wait=PATIENCE) as second:
            with pytest.raises(LeaseLost) as raised:
                call.make(first.store, "a")
            assert (raised.value.key, raised.value.epoch) == ("a", first.epoch)
            assert shown(store, "a") == shown(first.store, "a") == ["1"]
            assert (store.get_summary("a"), store.list_sessions()) == ("so far", ["a"])
            assert second.store.add_message("a", "user", "2") == 2
        assert say(store, "a", "3") == [3]

    def test_p8_lost_lease_rejects_writes_to_other_sessions_too(self, store: Store) -> None:
        say(store, "a", "1")
        first = store.lease("a", ttl=0.01)
        with store.lease("a", ttl=60, wait=PATIENCE), pytest.raises(LeaseLost):
            first.store.add_message("b", "user", "late")
        with pytest.raises(LeaseLost):
            first.store.add_message("b", "user", "still late")
        assert store.list_sessions() == ["a"]

    def test_expired_lease_works_until_another_caller_acquires_it(self, store: Store) -> None:
        say(store, "a", "1")
        lease = store.lease("a", ttl=0.01)
        assert ran_out(lease)
        assert lease.store.add_message("a", "user", "2") == 2
        lease.renew()
        assert lease.store.add_message("a", "user", "3") == 3

    def test_renewed_lease_stays_held(self, store: Store) -> None:
        say(store, "a", "1")
        first = store.lease("a", ttl=0.01)
        with store.lease("a", ttl=60, wait=PATIENCE) as second:
            second.renew()
            with pytest.raises(LeaseLost):
                first.renew()
            first.release()
            assert (first.lost, second.lost) == (True, False)
            with pytest.raises(StoreBusy):
                store.lease("a", ttl=60, wait=0)


class Leases(RunningOut):
    """`lease`."""

    leases_expire: ClassVar[bool] = True
    """Whether a lease expires while its holder lives. False: the process holds it until it ends."""

    @pytest.mark.parametrize("seconds", [-3600, -3, 61, 3600])
    def test_p7_setting_the_system_clock_does_not_end_a_lease(
        self, store: Store, seconds: int
    ) -> None:
        say(store, "a", "1")
        with store.lease("a", ttl=60) as lease:
            with clock_set(seconds):
                assert not lease.lost
                with pytest.raises(StoreBusy):
                    store.lease("a", ttl=60, wait=0)
                lease.renew()
                assert not lease.lost
            assert not lease.lost
            with pytest.raises(StoreBusy):
                store.lease("a", ttl=60, wait=0)

    def __init_subclass__(cls) -> None:
        """Remove the tests of expiry for engines whose leases do not expire."""
        if not cls.leases_expire:
            for name in vars(RunningOut):
                if name.startswith("test_"):
                    setattr(cls, name, None)

    def test_a_lease_is_held_until_it_is_released(self, store: Store) -> None:
        say(store, "a", "1")
        lease = store.lease("a", ttl=60)
        assert isinstance(lease, Lease)
        assert (lease.key, lease.lost) == ("a", False)
        with pytest.raises(StoreBusy):
            store.lease("a", ttl=60, wait=0)
        lease.release()
        assert lease.lost
        with store.lease("a", ttl=60, wait=0) as again:
            assert not again.lost

    def test_p8_store_busy_error_names_the_lease_holder(self, store: Store) -> None:
        say(store, "a", "1")
        with store.lease("a", ttl=60), pytest.raises(StoreBusy, match=str(os.getpid())):
            store.lease("a", ttl=60, wait=0.01)

    def test_with_block_releases_the_lease_after_an_error(self, store: Store) -> None:
        say(store, "a", "1")
        with pytest.raises(ZeroDivisionError), store.lease("a", ttl=60) as lease:
            raise ZeroDivisionError
        assert lease.lost
        store.lease("a", ttl=60, wait=0).release()

    def test_releasing_twice_does_nothing(self, store: Store) -> None:
        say(store, "a", "1")
        first = store.lease("a", ttl=60)
        first.release()
        first.release()
        with store.lease("a", ttl=60, wait=0) as second:
            first.release()
            assert not second.lost
            with pytest.raises(StoreBusy):
                store.lease("a", ttl=60, wait=0)

    def test_epoch_increases_with_each_lease(self, store: Store) -> None:
        say(store, "a", "1")
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
            say(store, "a", "1")
            for _ in range(3):
                with store.lease("a", ttl=60) as lease:
                    epochs.append(lease.epoch)
            store.purge("a")
        assert epochs == sorted(set(epochs))

    @pytest.mark.parametrize("write", _WRITES, ids=str)
    def test_p8_writes_through_a_released_lease_are_rejected(
        self, store: Store, write: Call
    ) -> None:
        say(store, "a", "1")
        store.set_summary("a", "so far")
        lease = store.lease("a", ttl=60)
        behind = lease.store
        assert behind.add_message("a", "user", "2") == 2
        lease.release()
        with pytest.raises(LeaseLost) as raised:
            write.make(behind, "a")
        assert (raised.value.key, raised.value.epoch) == ("a", lease.epoch)
        assert shown(store, "a") == shown(behind, "a") == ["1", "2"]
        assert (store.get_summary("a"), store.list_sessions()) == ("so far", ["a"])

    def test_leases_of_different_sessions_are_independent(self, store: Store) -> None:
        say(store, "a", "1")
        say(store, "b", "1")
        with store.lease("a", ttl=60), store.lease("b", ttl=60, wait=0) as other:
            assert other.key == "b"

    def test_calls_without_a_lease_work_while_a_lease_is_held(self, store: Store) -> None:
        say(store, "a", "1")
        with store.lease("a", ttl=60):
            assert say(store, "a", "2") == [2]
            store.set_summary("a", "x")
            store.compact("a")
            store.fork("a", "b")
            assert shown(store, "a") == ["1", "2"]

    def test_store_of_a_lease_reads_and_writes_the_same_sessions(self, store: Store) -> None:
        say(store, "a", "1")
        with store.lease("a", ttl=60) as lease:
            assert isinstance(lease.store, Store)
            assert lease.store.add_message("a", "user", "2") == 2
            assert lease.store.add_message("b", "user", "another session") == 1
            assert shown(lease.store, "a") == shown(store, "a") == ["1", "2"]
            lease.store.set_meta("a", title="x")
            assert store.info("a").meta == {"title": "x"}

    def test_p8_lease_requires_a_session_and_valid_times(self, store: Store) -> None:
        with pytest.raises(NoSuchSession) as raised:
            store.lease("nobody", ttl=60)
        assert raised.value.key == "nobody"
        assert store.list_sessions() == []
        say(store, "a", "1")
        for ttl, wait in ((0, None), (-1, None), (float("inf"), None), (60, -1)):
            with pytest.raises(UsageError):
                store.lease("a", ttl=ttl, wait=wait)
        with pytest.raises(InvalidKey):
            store.lease("", ttl=60)
        store.delete("a")
        with pytest.raises(NoSuchSession):
            store.lease("a", ttl=60)

    def test_renewing_a_released_lease_raises_lease_lost(self, store: Store) -> None:
        say(store, "a", "1")
        lease = store.lease("a", ttl=60)
        lease.renew()
        lease.release()
        with pytest.raises(LeaseLost) as raised:
            lease.renew()
        assert (raised.value.key, raised.value.epoch) == ("a", lease.epoch)

    def test_waiting_caller_gets_the_lease_after_its_release(self, store: Store) -> None:
        say(store, "a", "1")
        first, got = store.lease("a", ttl=60), list[int]()

        def wait() -> None:
            with store.lease("a", ttl=60, wait=PATIENCE) as second:
                got.append(second.epoch)

        thread = Thread(target=wait)
        thread.start()
        assert not got
        first.release()
        thread.join(PATIENCE)
        assert got
        assert got[0] > first.epoch

    def test_p7_one_thread_at_a_time_holds_the_lease(self, store: Store) -> None:
        say(store, "a", "0")
        inside, overlaps, epochs = list[str](), list[str](), list[int]()

        def take_turns(name: str) -> None:
            for _ in range(5):
                with store.lease("a", ttl=60, wait=PATIENCE) as lease:
                    inside.append(name)
                    before = shown(store, "a")
                    lease.store.add_message("a", "user", str(int(before[-1]) + 1))
                    overlaps.extend(inside[1:])
                    epochs.append(lease.epoch)
                    inside.remove(name)

        threads = [Thread(target=take_turns, args=[name]) for name in "wxyz"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert overlaps == []
        assert shown(store, "a") == [str(number) for number in range(21)]
        assert len(epochs) == 20
        assert epochs == sorted(set(epochs))

    def test_a_lease_may_be_released_by_another_thread(self, store: Store) -> None:
        say(store, "a", "1")
        lease = store.lease("a", ttl=60)
        thread = Thread(target=lease.release)
        thread.start()
        thread.join()
        store.lease("a", ttl=60, wait=0).release()

    @pytest.mark.parametrize("write", _WRITES, ids=str)
    def test_write_through_a_lease_does_not_recreate_a_purged_session(
        self, store: Store, write: Call
    ) -> None:
        say(store, "a", "1", "2")
        lease = store.lease("a", ttl=60)
        behind = lease.store
        assert store.purge("a").messages == 2
        with pytest.raises(LeaseLost):
            write.make(behind, "a")
        with pytest.raises(LeaseLost):
            lease.renew()
        assert lease.lost
        lease.release()
        assert (store.list_sessions(), store.list_trash()) == ([], [])

    def test_lease_ends_if_the_session_is_deleted_and_then_purged(self, store: Store) -> None:
        say(store, "a", "1")
        lease = store.lease("a", ttl=60)
        store.delete("a")
        assert not lease.lost
        store.purge("a")
        with pytest.raises(LeaseLost):
            lease.store.add_message("a", "user", "2")
        say(store, "a", "another life")
        with pytest.raises(LeaseLost):
            lease.store.add_message("a", "user", "2")
        store.lease("a", ttl=60, wait=0).release()
        assert shown(store, "a") == ["another life"]

    def test_p8_purge_ends_the_wait_for_a_lease_with_no_such_session(self, store: Store) -> None:
        say(store, "a", "1")
        lease, told = store.lease("a", ttl=60), list[Exception]()

        def wait() -> None:
            try:
                store.lease("a", ttl=60, wait=PATIENCE).store.add_message("a", "user", "2")
            except StenologError as error:
                told.append(error)

        thread = Thread(target=wait)
        thread.start()
        time.sleep(0.03)
        store.purge("a")
        thread.join(PATIENCE / 2)
        assert [type(error) for error in told] == [NoSuchSession]
        lease.release()
        assert (store.list_sessions(), store.list_trash()) == ([], [])

    def test_p7_concurrent_leases_do_not_recreate_a_purged_session(self, store: Store) -> None:
        stop, back = Event(), list[str]()

        def take_turns() -> None:
            while not stop.is_set():
                with suppress(NoSuchSession, LeaseLost), store.lease("a", ttl=60) as lease:
                    for _ in range(3):
                        lease.store.add_message("a", "assistant", "late")

        threads = [Thread(target=take_turns) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            for number in range(12):
                say(store, "a", str(number))
                time.sleep(0.001 * (number % 4))
                store.purge("a")
                time.sleep(0.002)
                back += store.list_sessions()
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert back == []

    def test_lease_survives_delete_and_restore(self, store: Store) -> None:
        say(store, "a", "1")
        with store.lease("a", ttl=60) as lease:
            store.delete("a")
            store.restore("a")
            assert not lease.lost
            assert lease.store.add_message("a", "user", "2") == 2
            store.delete("a")
            assert lease.store.add_message("a", "user", "another life") == 1
        assert shown(store, "a") == ["another life"]

    def test_p8_close_releases_leases_and_rejects_new_ones(self, store: Store) -> None:
        say(store, "a", "1")
        lease = store.lease("a", ttl=60)
        store.close()
        with pytest.raises(StoreClosed):
            store.lease("a", ttl=60)
        assert lease.lost
        with pytest.raises((StoreClosed, LeaseLost)):
            lease.renew()
        with pytest.raises(StoreClosed):
            lease.store.add_message("a", "user", "2")
        lease.release()

    def test_closed_store_ends_the_wait_for_a_lease(self, store: Store) -> None:
        say(store, "a", "1")
        lease, waiting, closed = store.lease("a", ttl=3600), Event(), list[type[Exception]]()

        def wait() -> None:
            waiting.set()
            try:
                store.lease("a", ttl=60, wait=10 * PATIENCE)
            except (StoreClosed, StoreBusy) as error:
                closed.append(type(error))

        thread = Thread(target=wait, daemon=True)
        thread.start()
        assert waiting.wait(PATIENCE)
        assert not lease.lost
        store.close()
        thread.join(PATIENCE)
        assert closed == [StoreClosed]
