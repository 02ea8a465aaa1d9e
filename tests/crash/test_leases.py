"""Tests processes that contend for leases in many sessions while they are killed and paused.

Two processes never run a turn at once: their writes through leases never interleave. When all have
ended, no session is stuck.
"""

import json
import os
import random
import signal
import threading
import time
from collections import Counter
from itertools import count
from pathlib import Path
from typing import Final

import psycopg
import pytest

import stenolog
from stenolog.stores.base import Store
from stenolog.stores.sqlite import lease_holders
from support.crash.lease_contention import (
    HOLD_TTL,
    LONG,
    MOST_MORE_BLOWS,
    SESSIONS,
    SLACK,
    TTL,
    LeaseWorkers,
    contention,
    lease_holder,
)
from support.crash.reporting import Say
from support.postgres_server import attempts, execute

_WAITING: Final = (
    "select from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
)
FENCED: Final = ("sqlite", "postgres")
"""Engines on which a paused holder loses its lease; on JSONL a lease belongs to its process."""
OF_PROCESSES: Final = ("sqlite", "jsonl")
"""Engines on which the lease of an ended process is free immediately."""


@pytest.fixture(params=["sqlite", "jsonl", "postgres"])
def engine(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def where(engine: str, tmp_path: Path, request: pytest.FixtureRequest) -> str:
    """Return the address of a new store of the engine."""
    if engine == "postgres":
        url: str = request.getfixturevalue("own_url")
        return url
    folder = tmp_path / "store"
    folder.mkdir(mode=0o700)
    return f"sqlite:{folder}/sessions.db" if engine == "sqlite" else str(folder)


def test_p7_leases_are_exclusive_among_eight_processes(
    tmp_path: Path, where: str, say: Say, seed: int, engine: str
) -> None:
    _contend(tmp_path, where, say, seed, engine, blows=16)


@pytest.mark.full
def test_p7_leases_are_exclusive_among_eight_processes_in_a_long_run(
    tmp_path: Path, where: str, say: Say, seed: int, engine: str
) -> None:
    _contend(tmp_path, where, say, seed, engine, blows=300)


def _contend(place: Path, where: str, say: Say, seed: int, engine: str, *, blows: int) -> None:
    chance = random.Random(seed)
    keys = [f"session {number}" for number in range(SESSIONS)]
    with stenolog.open_store(where) as store:
        for key in keys:
            store.add_message(key, "user", "before begin")
        with LeaseWorkers(where, place) as workers:
            for blow in count(1):
                time.sleep(chance.random() * 0.1)
                if engine in FENCED and chance.random() < 0.4:
                    workers.stall(chance)
                else:
                    workers.kill(chance)
                # A kill or pause that hits no turn proves nothing.
                if blow >= blows and contention(store, keys, workers).proves(engine):
                    break
                assert blow < blows + MOST_MORE_BLOWS, f"no holder was hit: {workers.said()}"
        found = contention(store, keys, workers)
        for key in keys:
            store.lease(key, ttl=TTL, wait=TTL + SLACK).release()
    workers.check_ends()
    said = workers.said()
    say(
        f"{engine} leases: seed {seed}, {workers.killed} killed, {found.hit} of them in a turn, "
        f"{found.taken_over} such turns followed by another's, {workers.stalled} stalled, "
        f"{found.refused} refused when they went on, {found.turns} turns begun, {said['done']} "
        f"ended, {said['lost']} lost to others"
    )
    assert found.proves(engine)
    assert found.turns >= said["done"] > 0


# --- one paused holder -----------------------------------------------------------------------


@pytest.mark.parametrize("engine", FENCED, indirect=True)
def test_p8_stalled_holder_has_lost_its_expired_lease(where: str) -> None:
    with stenolog.open_store(where) as store:
        store.add_message("a", "user", "1")
        with lease_holder(where, "a", HOLD_TTL) as holder:
            os.kill(holder.pid, signal.SIGSTOP)
            with store.lease("a", ttl=60, wait=HOLD_TTL + SLACK) as lease:
                lease.store.add_message("a", "user", "2")
                os.kill(holder.pid, signal.SIGCONT)
                said, _ = holder.communicate("write\n")
                word, _, _, epoch = json.loads(said)
                assert (word, epoch < lease.epoch) == ("lost", True)
                lease.store.add_message("a", "user", "3")
        assert [message.content for message in store.get_history("a")] == ["1", "2", "3"]


def test_p7_lease_of_a_killed_holder_can_be_acquired(where: str) -> None:
    with stenolog.open_store(where) as store:
        store.add_message("a", "user", "1")
        with lease_holder(where, "a", HOLD_TTL) as holder:
            with pytest.raises(stenolog.StoreBusy, match=str(holder.pid)):
                store.lease("a", ttl=60, wait=0)
            holder.kill()
            with store.lease("a", ttl=60, wait=HOLD_TTL + SLACK) as lease:
                assert lease.store.add_message("a", "user", "2") == 2


@pytest.mark.parametrize("engine", OF_PROCESSES, indirect=True)
@pytest.mark.parametrize("heard", [True, False], ids=["waited for", "not waited for"])
def test_p7_lease_of_a_killed_holder_is_free_before_it_expires(
    where: str, engine: str, heard: bool
) -> None:
    if engine == "sqlite" and lease_holders.current_process() is None:
        pytest.skip("NOT RUN: the start times of processes are unknown here")
    with stenolog.open_store(where) as store:
        store.add_message("a", "user", "1")
        with lease_holder(where, "a", LONG) as holder:
            holder.kill()
            if heard:
                holder.wait()
            with store.lease("a", ttl=60, wait=SLACK) as lease:
                assert lease.store.add_message("a", "user", "2") == 2


@pytest.mark.parametrize("stalled", [True, False], ids=["stalled", "at work"])
def test_p8_running_holder_keeps_the_lease_until_it_expires(where: str, stalled: bool) -> None:
    with stenolog.open_store(where) as store:
        store.add_message("a", "user", "1")
        with lease_holder(where, "a", LONG) as holder:
            if stalled:
                os.kill(holder.pid, signal.SIGSTOP)
            with pytest.raises(stenolog.StoreBusy, match=str(holder.pid)):
                store.lease("a", ttl=60, wait=0.2)
            os.kill(holder.pid, signal.SIGCONT)
            said, _ = holder.communicate("write\n")
            assert json.loads(said)[0] == "stored"


def test_p7_one_of_two_concurrent_callers_gets_a_free_lease(postgres_url: str) -> None:
    ends: Counter[str] = Counter()

    def take(store: Store) -> None:
        try:
            store.lease("a", ttl=60, wait=0)
        except stenolog.StoreBusy:
            ends["refused"] += 1
        else:
            ends["given"] += 1

    with (
        stenolog.open_store(postgres_url) as one,
        stenolog.open_store(f"{postgres_url}?application_name=other") as other,
    ):
        one.add_message("a", "user", "1")
        one.lease("a", ttl=60).release()
        takers = [threading.Thread(target=take, args=(store,)) for store in (one, other)]
        with psycopg.connect(postgres_url) as locking:
            locking.execute("select from stenolog.lease for update")
            for taker in takers:
                taker.start()
            # Both have read, and wait for the row.
            assert any(len(execute(postgres_url, _WAITING)) == 2 for _ in attempts())
        for taker in takers:
            taker.join()
    assert ends == {"given": 1, "refused": 1}
