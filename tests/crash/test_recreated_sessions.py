"""Tests sessions that are deleted and restored under writers: each message is stored once."""

import time
from collections import Counter
from pathlib import Path

import pytest

import stenolog
from stenolog.maintenance.log_damage import Kind
from stenolog.maintenance.workspace_check import examine
from support.crash.child_processes import Child, Nursery
from support.crash.reporting import Say
from support.crash.workload import label_of

KEY = "everybody"


def test_p7_concurrent_delete_restore_and_fork_lose_no_message(
    tmp_path: Path, say: Say, seed: int
) -> None:
    _come_and_go(tmp_path, say, seed, writers=4, count=100)


@pytest.mark.full
def test_p7_concurrent_delete_restore_and_fork_lose_no_message_in_a_long_run(
    tmp_path: Path, say: Say, seed: int
) -> None:
    _come_and_go(tmp_path, say, seed, writers=4, count=1500)


def _come_and_go(place: Path, say: Say, seed: int, *, writers: int, count: int) -> None:
    where = place / "store"
    with Nursery() as nursery:
        writing = [
            nursery.child("write_patiently", where=where, key=KEY, name=f"w{number}", count=count)
            for number in range(writers)
        ]
        beside = [
            nursery.child("come_and_go", where=where, key=KEY, seed=seed + number)
            for number in range(2)
        ]
        for child in [*writing, *beside]:
            child.go()
        _wait_for_every_move(writing, beside)
        for child in writing:
            child.go()
            _ended_well(child)
        for child in beside:
            child.go()
            _ended_well(child)
    told = [line.result for child in writing for line in child.lines() if line.word == "ACK"]
    made = sum((Counter(child.lines()[-2].result) for child in beside), Counter[str]())
    sessions = _messages_by_session(where)
    say(f"seed {seed}, {len(told)} messages in {len(sessions)} sessions; {dict(made)}")
    assert set(made) == {"delete", "restore", "fork", "compact"}
    found = [pair for messages in sessions for pair in messages]
    assert Counter(label for label, _ in found) == Counter(label for label, _ in told)
    assert sorted(found) == sorted((label, seq) for label, seq in told)
    # A compaction gives up if the session is deleted during it, and leaves what it had written.
    assert {f.kind for f in examine(where).findings} <= {Kind.UNREFERENCED_ARCHIVE}


def _wait_for_every_move(writing: list[Child], beside: list[Child]) -> None:
    """Wait until each other process has made every kind of call, or one has ended."""
    waiting = list(beside)
    while waiting and all(child.poll() for child in [*writing, *beside]):
        waiting = [child for child in waiting if not child.said("EVERY")]
        time.sleep(0.005)


def _messages_by_session(where: Path) -> list[list[tuple[str, int]]]:
    """Return label and seq of every message, by session; forks add no messages."""
    with stenolog.open_store(str(where)) as store:
        keys = [key for key in store.list_sessions() if not key.startswith("fork")]
        for number, trashed in enumerate(store.admin.list_trash()):
            keys.append(f"session {number}")
            store.admin.restore(KEY, uid=trashed.uid, as_key=keys[-1])
        assert store.admin.list_trash() == []
        sessions = {
            key: [(label_of(m.to_dict()), m.seq) for m in store.get_history(key, full=True)]
            for key in store.list_sessions()
        }
        for key in sessions:
            info = store.info(key)
            assert (info.lost, info.damaged) == (0, 0)
        every = {pair for key in keys for pair in sessions[key]}
        for key, messages in sessions.items():
            assert key in keys or set(messages) <= every, key
    return [sessions[key] for key in keys]


def _ended_well(child: Child) -> None:
    status = child.finish(seconds=120)
    bugs = [line.result for line in child.lines() if line.word == "BUG"]
    assert not bugs, bugs[0]
    assert status == 0
