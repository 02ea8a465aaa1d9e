"""Tests that a catalog equals a full scan after its processes were killed.

Some processes write, others refresh or delete the catalog; some of both are killed with SIGKILL at
random moments. At the end the catalog is compared with the store.
"""

import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Self

import pytest

import stenolog
from stenolog.catalog import Catalog, open_catalog, steps
from stenolog.stores.base import Store
from stenolog.stores.catalog_file import CATALOG_NAME
from support.catalog_scan import catalogued, differences, found_words, full_scan, words_said
from support.crash.reporting import Say
from support.random_operations import WORDS, operate

_OPERATIONS = 30


class Child:
    """A forked process that works, and reports each part that it starts."""

    def __init__(self, work: Callable[[Callable[[], None]], None]) -> None:
        self._status: int | None = None
        self._told, told = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                os.close(self._told)
                work(lambda: _write_byte(told))
                code = 0
            except BaseException:  # noqa: BLE001 - told, before the child ends here
                traceback.print_exc(file=sys.__stderr__)
            finally:
                os._exit(code)
        os.close(told)

    def wait_until_it_begins(self) -> None:
        """Wait until the process has started a part of its work, or ended."""
        os.read(self._told, 1)

    def kill(self) -> None:
        """Kill the process with SIGKILL if it still runs."""
        if self._status is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def status(self) -> int:
        """Wait for the end and return the exit status."""
        if self._status is None:
            self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            os.close(self._told)
        return self._status


class Family:
    """Children that all end with the block."""

    def __init__(self) -> None:
        self._children: list[Child] = []

    def child(self, work: Callable[[Callable[[], None]], None]) -> Child:
        """Fork one more child."""
        self._children.append(Child(work))
        return self._children[-1]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for child in self._children:
            child.kill()
            child.status()


def _write_byte(pipe: int) -> None:
    os.write(pipe, b".")


def _write(where: str, seed: int, begin: Callable[[], None]) -> None:
    chance = random.Random(seed)
    with stenolog.open_store(where) as store:
        for _ in range(_OPERATIONS):
            begin()
            operate(store, chance)


def _refresh(where: str, seed: int, begin: Callable[[], None]) -> None:
    chance = random.Random(seed)
    # Many small transactions, so that kills often hit between two.
    steps.MAX_MESSAGES = chance.choice([3, 50, 2_000])  # type: ignore[misc]
    with stenolog.open_store(where) as store, open_catalog(store) as catalog:
        while True:
            begin()
            if isinstance(store, stenolog.JSONLStore) and chance.random() < 0.2:
                (store.folder / CATALOG_NAME).unlink(missing_ok=True)
            catalog.refresh()
            if catalog.problems:
                raise AssertionError(catalog.problems)


def _talk(where: str, name: str, turns: int, begin: Callable[[], None]) -> None:
    """Write, and check that the catalog contains it immediately."""
    key = f"talk:{name}"
    with stenolog.open_store(where) as store, open_catalog(store) as catalog:
        for turn in range(1, turns + 1):
            begin()
            store.add_message(key, "user", f"allmessages turn{turn} of {name}")
            counts = {entry.key: entry.count for entry in catalog.list().entries}
            assert counts.get(key) == turn, counts
            hits = catalog.search(f"turn{turn} {name}")
            assert [(hit.key, hit.seq) for hit in hits.hits] == [(key, turn)]
        assert catalog.problems == ()


def _check_catalog(store: Store, catalog: Catalog) -> None:
    assert differences(catalogued(catalog), full_scan(store)) == {}
    for word in WORDS:
        assert found_words(catalog, word) == words_said(store, word)
    assert catalog.problems == ()


def _run_and_kill(where: str, say: Say, *, seed: int, rounds: int) -> None:
    chance = random.Random(seed)
    killed = survived = 0
    with stenolog.open_store(where) as store, open_catalog(store) as catalog:
        for _ in range(rounds):
            seeds = [chance.randrange(10**9) for _ in range(8)]
            with Family() as family:
                writers = [family.child(partial(_write, where, seeds.pop())) for _ in range(2)]
                for _ in range(3):
                    refreshers = [
                        family.child(partial(_refresh, where, seeds.pop())) for _ in range(2)
                    ]
                    for child in refreshers:
                        child.wait_until_it_begins()
                    moment = time.perf_counter() + chance.uniform(0, 0.06)
                    while time.perf_counter() < moment:
                        pass
                    for child in refreshers:
                        child.kill()
                        assert child.status() == -signal.SIGKILL, "a refresher ended by itself"
                        killed += 1
                if chance.random() < 0.5:
                    writers[0].kill()
                survived += [child.status() for child in writers].count(0)
            _check_catalog(store, catalog)
            with stenolog.open_store(where) as other, open_catalog(other) as fresh:
                _check_catalog(other, fresh)
        sessions, messages = len(full_scan(store)), len(words_said(store, "allmessages"))
    say(
        f"seed {seed}: {killed} refreshers killed, {survived} of {2 * rounds} writers went to "
        f"their end; {sessions} sessions, {messages} messages"
    )


@pytest.mark.parametrize("where", ["{0}", "sqlite:{0}/s.db"])
def test_catalog_equals_a_full_scan_after_killed_refreshes(
    tmp_path: Path, say: Say, seed: int, where: str
) -> None:
    _run_and_kill(where.format(tmp_path / "w"), say, seed=seed, rounds=4)


@pytest.mark.parametrize("where", ["{0}", "sqlite:{0}/s.db"])
def test_each_of_many_processes_finds_its_own_writes_immediately(
    tmp_path: Path, where: str
) -> None:
    place = where.format(tmp_path / "w")
    stenolog.open_store(place).close()
    with Family() as family:
        talking = [family.child(partial(_talk, place, f"n{number}", 12)) for number in range(6)]
        assert [child.status() for child in talking] == [0] * 6
    with stenolog.open_store(place) as store, open_catalog(store) as catalog:
        _check_catalog(store, catalog)


@pytest.mark.full
@pytest.mark.parametrize("where", ["{0}", "sqlite:{0}/s.db"])
def test_catalog_equals_a_full_scan_after_a_thousand_killed_refreshes(
    tmp_path: Path, say: Say, seed: int, where: str
) -> None:
    for part in range(8):
        _run_and_kill(where.format(tmp_path / str(part)), say, seed=seed + part, rounds=21)
