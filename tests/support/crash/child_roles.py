"""Roles of child processes: the scripted run, or concurrent writers, readers and compactors.

Each role gets the channel it talks over, and reports every acknowledged message with its seq.
"""

import contextlib
import os
import random
import select
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Final

import stenolog
from stenolog.errors import MaybeStored, NoSuchSession, NothingToUndo, SessionExists
from stenolog.stores.base import Store
from support.crash.workload import Line, Run, encode_line, message

_PATIENCE: Final = 120.0
"""Seconds to wait for a lock; a longer wait counts as a deadlock."""
_PACE: Final = 0.002
"""Seconds that readers and compactors sleep, so that writers get CPU time."""


def run(
    channel: socket.socket,
    *,
    where: str,
    first: int = 0,
    passes: int | None = 1,
    size: int = 40,
    patience: float = 5.0,
) -> None:
    """Run all operations once."""

    def report(line: Line) -> None:
        channel.sendall(encode_line(line))

    Run(Path(where), report, size=size, patience=patience).go(first=first, passes=passes)


def write_patiently(channel: socket.socket, *, where: str, key: str, name: str, count: int) -> None:
    """Append at least `count` messages to a log that others replace, until told to stop."""
    with stenolog.JSONLStore(where, busy_timeout=_PATIENCE) as store:
        _append(channel, store, key, name, count)
        more = 0
        while not _told(channel, wait=_PACE):
            _append(channel, store, key, f"{name}-more{more}", 1)
            more += 1
    _say(channel, "END")


def _open_patient_store(where: str) -> stenolog.Store:
    """Open a store; a folder waits long for its locks, because the machine may be busy."""
    if where.startswith(("sqlite:", "postgresql:")):
        return stenolog.open_store(where)
    return stenolog.JSONLStore(where, busy_timeout=_PATIENCE)


def write(channel: socket.socket, *, where: str, key: str, name: str, count: int) -> None:
    """Append `count` messages one after the other."""
    with _open_patient_store(where) as store:
        _append(channel, store, key, name, count)
    _say(channel, "END")


def write_by_threads(
    channel: socket.socket, *, where: str, key: str, name: str, threads: int, count: int
) -> None:
    """Append from many threads of one process, on one store."""
    with _open_patient_store(where) as store:
        writers = [
            threading.Thread(target=_append, args=(channel, store, key, f"{name}t{number}", count))
            for number in range(threads)
        ]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join()
    _say(channel, "END")


def compact(channel: socket.socket, *, where: str, key: str, seed: int) -> None:
    """Checkpoint, compact and undo repeatedly until told to stop."""
    moves = random.Random(seed)
    rounds = archived = undone = 0
    with _open_patient_store(where) as store:
        while not _told(channel, wait=_PACE):
            visible = store.get_history(key)
            if len(visible) > 1:
                upto = moves.choice(visible[: len(visible) * 3 // 4 + 1]).seq
                store.checkpoint(key, summary=f"up to {upto}", upto=upto)
                if moves.random() < 0.5:
                    archived += store.compact(key).archived
                if moves.random() < 0.7:
                    with contextlib.suppress(NothingToUndo):
                        store.undo(key)
                        undone += 1
                rounds += 1
    _say(channel, "ACK", [rounds, archived, undone])
    _say(channel, "END")


def come_and_go(channel: socket.socket, *, where: str, key: str, seed: int) -> None:
    """Delete, restore, fork and compact until told to stop; report EVERY when each was done."""
    moves = random.Random(seed)
    made: Counter[str] = Counter()
    with stenolog.JSONLStore(where, busy_timeout=_PATIENCE) as store:
        while not _told(channel, wait=_PACE):
            move = moves.choice(["delete", "restore", "restore", "fork", "compact"])
            with contextlib.suppress(NoSuchSession, SessionExists):
                match move:
                    case "delete":
                        store.delete(key)
                    case "restore":
                        deleted = [
                            found.uid for found in store.admin.list_trash() if found.key == key
                        ]
                        uid = moves.choice(deleted) if deleted else None
                        other = f"back {seed}.{made['restore']}" if moves.random() < 0.5 else None
                        store.admin.restore(key, uid=uid, as_key=other)
                    case "fork":
                        store.fork(key, f"fork {seed}.{made['fork']}")
                    case _:
                        store.truncate_history(key, 3)
                        store.compact(key)
                made[move] += 1
                if made[move] == 1 and len(made) == 4:
                    _say(channel, "EVERY")
    _say(channel, "ACK", dict(made))
    _say(channel, "END")


def read(channel: socket.socket, *, where: str, key: str) -> None:
    """Read everything repeatedly until told to stop; report histories with gaps."""
    reads = longest = 0
    with stenolog.open_store(where, read_only=True) as store:
        while not _told(channel, wait=_PACE):
            seqs = [found.seq for found in store.get_history(key, full=True)]
            if seqs != list(range(1, len(seqs) + 1)) or len(seqs) < longest:
                _say(channel, "BUG", f"a read gave {seqs} after one of {longest}")
                return
            visible = [found.seq for found in store.get_history(key)]
            if visible != list(range(visible[0], visible[-1] + 1) if visible else ()):
                _say(channel, "BUG", f"a read of what is visible gave {visible}")
                return
            longest = max(longest, len(seqs))
            reads += 1
    _say(channel, "ACK", [reads, longest])
    _say(channel, "END")


def fork_while_writing(
    channel: socket.socket, *, where: str, key: str, forks: int, count: int
) -> None:
    """Append from threads while the process forks repeatedly; every child appends as well."""
    with stenolog.open_store(where) as store:
        _append(channel, store, key, "before", 1)
        busy = threading.Event()

        def keep_writing(name: str) -> None:
            for number in range(1_000_000):
                _append(channel, store, key, f"{name}-{number}-", 1)
                if busy.is_set():
                    return

        threads = [threading.Thread(target=keep_writing, args=(f"p{n}",)) for n in range(4)]
        for thread in threads:
            thread.start()
        children: list[int] = []
        for number in range(forks):
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    _append(channel, store, key, f"f{number}", count)
                    code = 0
                finally:
                    os._exit(code)
            children.append(pid)
            _append(channel, store, key, f"main{number}", 2)
        failed = [pid for pid in children if os.waitpid(pid, 0)[1]]
        busy.set()
        for thread in threads:
            thread.join()
        if failed:
            _say(channel, "BUG", f"{len(failed)} of {forks} forked children could not append")
    _say(channel, "END")


def write_interrupted(
    channel: socket.socket, *, where: str, key: str, threads: int, seed: int
) -> None:
    """Append from many threads until told to stop, and interrupt appends of the main thread.

    A timer raises KeyboardInterrupt, as Ctrl-C does, at a random moment of such an append, or soon
    after an append that takes no longer than the last uninterrupted one.
    """
    moments = random.Random(seed)
    usual = 0.01
    stop = threading.Event()
    inside = False

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        if inside:
            raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, interrupt)
    with stenolog.open_store(where) as store:

        def keep_writing(name: str) -> None:
            number = 0
            while not stop.is_set():
                label = f"{name}-{number}.30"
                try:
                    seq = store.add_full_message(key, message(label))
                except MaybeStored:
                    # The thread that wrote for a group of threads was interrupted.
                    _say(channel, "CUT", [label, None])
                else:
                    _say(channel, "ACK", [label, seq])
                number += 1

        others = [threading.Thread(target=keep_writing, args=(f"t{n}",)) for n in range(threads)]
        for thread in others:
            thread.start()
        number = 0
        while not _told(channel):
            label = f"main-{number}.30"
            number += 1
            answer: int | None = None
            try:
                inside = True
                began = time.monotonic()
                signal.setitimer(signal.ITIMER_REAL, moments.uniform(0.00001, 1.5 * usual))
                answer = store.add_full_message(key, message(label))
                inside = False
                usual = time.monotonic() - began
            except KeyboardInterrupt:
                inside = False
            _say(channel, "CUT" if answer is None else "ACK", [label, answer])
        stop.set()
        for thread in others:
            thread.join()
    _say(channel, "END")


def _append(channel: socket.socket, store: Store, key: str, name: str, count: int) -> None:
    for number in range(count):
        label = f"{name}-{number}.{20 + number % 7 * 30}"
        _say(channel, "ACK", [label, store.add_full_message(key, message(label))])


def _told(channel: socket.socket, *, wait: float = 0) -> bool:
    return bool(select.select([channel], [], [], wait)[0])


def _say(channel: socket.socket, word: str, result: Any = None) -> None:
    # Send each line in one call: threads and forked children share the channel.
    channel.sendall(encode_line(Line(word, result=result)))


ROLES: Final[dict[str, Callable[..., None]]] = {
    role.__name__: role
    for role in (
        run,
        write,
        write_patiently,
        write_by_threads,
        compact,
        come_and_go,
        read,
        fork_while_writing,
        write_interrupted,
    )
}
