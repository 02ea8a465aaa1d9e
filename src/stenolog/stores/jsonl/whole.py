"""Lives of sessions as they are read to be carried to another store: logs → stores/whole.py.

A life is read through a descriptor of its own, so that nobody waits for it. Who holds it has the
lock of its log: no writer of any process gets past that.
"""

import fcntl
import os
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Final

from stenolog.codec import parse_line
from stenolog.errors import DamagedStore, ForeignLog, NoSuchSession, StenologError, StoreBusy
from stenolog.records import (
    ChangeRecord,
    Message,
    State,
    StateRecord,
    Token,
    Undo,
    timestamp,
)
from stenolog.stores import spans
from stenolog.stores import state as states
from stenolog.stores.disk import sync_file
from stenolog.stores.jsonl import archive, names, trash
from stenolog.stores.jsonl.directory import Directory, explained
from stenolog.stores.jsonl.log import Log
from stenolog.stores.jsonl.scan import gather, lines_of
from stenolog.stores.jsonl.table import flock
from stenolog.stores.whole import LifeMark, Reading, life_of

COPIED: Final = "copied"
"""The operation of a change that changes nothing: what stands before it was written by a copy.
Behind it are the places that the copy may be found in: elsewhere somebody else has put it."""

_MOVES: Final = 100
"""How often a life is looked for again that is deleted and restored all the time."""
_BLOCK: Final = 4 * 1024 * 1024
_TAIL: Final = 64 * 1024
_CHANGE: Final = re.compile(rb'(?m)^\{"kind":"change",.*$')


# --- which there are -------------------------------------------------------------------------


class Memory:
    """What a store need not find out again about files that did not change."""

    def __init__(self) -> None:
        self.marks: dict[str, tuple[str, LifeMark | None]] = {}
        """By the name of a live log: its stamp, and what was found in it."""
        self.synced: set[str] = set()
        """Stamps of logs that are known to be on the disk."""


def lives(directory: Directory, memory: Memory) -> list[LifeMark]:
    """Every life in the folder: those in the trash, then the living ones, each by key.

    Files of other programs, and what a creator that was killed left, are none.
    """
    deleted = []
    for entry, key in trash.keys(directory):
        if (stood := stamp_of(directory, trash_path(entry))) is not None:
            at = timestamp(entry.deleted)
            deleted.append(LifeMark(key=key, uid=entry.uid, deleted=at, stamp=stood))
    found: dict[str, tuple[str, LifeMark | None]] = {}
    for name in directory.names():
        stood = stamp_of(directory, name) if name.endswith(names.SUFFIX) else None
        if stood is not None:
            before = memory.marks.get(name)
            if before is None or before[0] != stood:
                before = stood, _living(directory, name)
            found[name] = before
    memory.marks = found
    living = [mark for _, mark in found.values() if mark is not None]
    return sorted(deleted, key=_place_of) + sorted(living, key=_place_of)


def _place_of(mark: LifeMark) -> tuple[str, str]:
    return mark.key, mark.uid


def _living(directory: Directory, name: str) -> LifeMark | None:
    """The life in a file of this name; None where there is none."""
    with suppress(ForeignLog):
        try:
            key = names.key_of(name) or _long_key(directory, name)
            descriptor = None if key is None else directory.open(name)
            if key is None or descriptor is None:
                return None
            log = Log(directory, name, key, descriptor)
            stood = stamp(name, os.fstat(descriptor))
            with log.mutex:
                log.load(os.fstat(descriptor).st_size)
            if log.exists:
                return LifeMark(key=key, uid=log.known_state().uid, stamp=stood)
        except ForeignLog:
            raise
        except (DamagedStore, OSError):
            return LifeMark(key=names.key_of(name) or name, uid="", stamp="")
    return None


def _long_key(directory: Directory, name: str) -> str | None:
    if not names.is_long(name):
        return None
    head = trash.head_at(directory, directory.descriptor, name, name)
    return head.key if head is not None and names.file_name(head.key) == name else None


def trash_path(entry: trash.Entry) -> str:
    """Where a deleted log is, seen from the folder."""
    return f"{trash.FOLDER}/{entry.name}"


def stamp_of(directory: Directory, path: str) -> str | None:
    """The stamp of what stands there now; None where nothing does."""
    found = directory.stat(path)
    return None if found is None else stamp(path, found)


def stamp(path: str, found: os.stat_result) -> str:
    """The stamp of a file that stands there."""
    return f"{path}:{found.st_ino}:{found.st_size}:{found.st_mtime_ns}"


# --- one of them -----------------------------------------------------------------------------


@contextmanager
def read(
    directory: Directory,
    mark: LifeMark,
    memory: Memory,
    *,
    after: int,
    until: float,
    hold: bool,
) -> Iterator[Reading]:
    """A look at one life; with `hold` its lock is had meanwhile.

    Raises NoSuchSession, StoreBusy, DamagedStore, StoreUnavailable.
    """
    with opened(directory, mark, until=until, hold=hold) as log:
        try:
            _sync(log, memory)
            yield look(log, after=after, settled=hold or directory.read_only)
        except OSError as error:
            raise explained(error, f"reading {mark.key!r}") from error


@contextmanager
def opened(directory: Directory, mark: LifeMark, *, until: float, hold: bool) -> Iterator[Log]:
    """The log of a life, read up to its end; with `hold`, locked.

    Under its key or in the trash, wherever it is by now. Raises NoSuchSession.
    """
    with ExitStack() as stack:
        for _ in range(_MOVES):
            log = _open_live(directory, mark, until=until, hold=hold)
            if log is not None:
                stack.callback(_let_go, log, held=hold)
                break
            entry = find_deleted(directory, mark.uid)
            if entry is not None:
                deleted = trash.opened(directory, entry, until=until if hold else None)
                log = stack.enter_context(deleted)
                if log is not None:
                    break
        if log is None:
            raise NoSuchSession(mark.key, "it was purged, or restored under another key")
        yield log


def _let_go(log: Log, *, held: bool) -> None:
    if held:
        # By name, because a child forked meanwhile has the same descriptor.
        with suppress(OSError):
            fcntl.flock(log.descriptor, fcntl.LOCK_UN)
    log.close()


def find_deleted(directory: Directory, uid: str) -> trash.Entry | None:
    """The entry of the trash with this uid."""
    for entry in trash.entries(directory):
        if entry.uid == uid:
            return entry
    return None


def _open_live(directory: Directory, mark: LifeMark, *, until: float, hold: bool) -> Log | None:
    """The log under the key, if that is this life."""
    name = names.file_name(mark.key)
    while True:
        descriptor = directory.open(name)
        if descriptor is None:
            return None
        log = Log(directory, name, mark.key, descriptor)
        try:
            if hold:
                flock(descriptor, until, f"the log of {mark.key!r}")
            if log.is_at(directory.stat(name)):
                with log.mutex:
                    log.load(os.fstat(descriptor).st_size)
                if log.exists and log.known_state().uid == mark.uid:
                    return log
                log.close()
                return None
        except OSError as error:
            log.close()
            raise explained(error, f"reading {mark.key!r}") from error
        except BaseException:
            log.close()
            raise
        log.close()
        if time.monotonic() > until:
            raise StoreBusy(f"the log of {mark.key!r} is replaced all the time; try again")


def _sync(log: Log, memory: Memory) -> None:
    """What a power cut may take back is not passed on. Raises OSError."""
    stood = stamp(log.name, os.fstat(log.descriptor))
    if not log.directory.read_only and stood not in memory.synced:
        sync_file(log.descriptor)
        memory.synced.add(stood)


def look(log: Log, *, after: int, settled: bool) -> Reading:
    """What there is to say of a life whose log is open. Raises OSError, DamagedStore."""
    at = os.fstat(log.descriptor)
    with log.mutex:
        if settled:
            state, end = log.settled()
        else:
            # What looks torn may be a write that is under way.
            state, end = states.copy(log.known_state()), log.next_seq - 1
        whole = at.st_size == log.size and (settled or log.tail is None)
        strays = [
            Token(token.token, token.first, token.count, "")
            for token in (log.tokens_upto(end) if state.lost else ())
            if spans.contains(state.lost, token.first)
        ]
        updated = max(log.updated, state.created)
    state.key = log.key
    entry = trash.entry_of(log.name.removeprefix(f"{trash.FOLDER}/"))
    deleted = None if entry is None else timestamp(entry.deleted)
    return Reading(
        life=life_of(
            state,
            last_seq=end,
            updated=updated,
            undo=_steps(log, state),
            deleted=deleted,
            tokens=strays,
        ),
        messages=messages(log, state, end, after),
        stamp=stamp(log.name, at) if whole else "",
        untouched=place_of(log.key, deleted) in copied_to(log),
    )


def place_of(key: str, deleted: str | None) -> str:
    """A short name for a place that a life may be in: under a key, or in the trash."""
    # Only who copies waits for it.
    from hashlib import sha256

    return sha256(f"{deleted}\n{key}".encode()).hexdigest()[:16]


def copied_to(log: Log) -> list[str]:
    """Where a copy put this life; empty where something was written behind it, but for states."""
    length = _TAIL
    while log.tail is None:
        start = max(0, log.end - length)
        text = log.read(start, log.end)
        lines = lines_of(text)[0 if start == 0 else 1 :]
        for line in reversed(lines):
            record = parse_line(line.removesuffix(b"\n"))
            if not isinstance(record, StateRecord):
                words = record.body.op.split() if isinstance(record, ChangeRecord) else []
                return words[1:] if words[:1] == [COPIED] else []
        if start == 0:
            break
        length *= 4
    return []


def _steps(log: Log, state: State) -> list[Undo]:
    """The undo steps, each with all it needs; those behind one that is damaged lead nowhere."""
    wanted = {entry.number for entry in state.undo if entry.elsewhere}
    if not wanted:
        return list(state.undo)
    found: dict[int, Undo] = {}
    for line in _CHANGE.finditer(log.read(0, log.end)):
        record = parse_line(line[0])
        if isinstance(record, ChangeRecord) and record.body.number in wanted:
            found.setdefault(record.body.number, states.entry_of(record.body))
    if wanted - found.keys():
        for older in archive.chain(log.directory, state, 1):
            for change in older.changes:
                if change.number in wanted:
                    found.setdefault(change.number, states.entry_of(change))
    steps: list[Undo] = []
    for entry in state.undo:
        if entry.elsewhere and entry.number not in found:
            steps = []
        else:
            steps.append(found.get(entry.number, entry) if entry.elsewhere else entry)
    return steps


# --- its messages ----------------------------------------------------------------------------


def messages(log: Log, state: State, end: int, after: int) -> Iterator[Message]:
    """Every message past a seq that can be read, archived ones included, by seq."""
    gone = states.missing(state)
    newest = after
    for message in _stored(log, state, after):
        if newest < message.seq <= end and not (gone and spans.contains(gone, message.seq)):
            newest = message.seq
            yield message


def _stored(log: Log, state: State, after: int) -> Iterator[Message]:
    if state.archive is not None and after < state.archive.last:
        yield from _archived(log, state, after)
    for start, block in _blocks(log, after):
        records, _ = gather(block, offset=start)
        for record in records:
            if type(record) is Message:
                yield record


def _archived(log: Log, state: State, after: int) -> Iterator[Message]:
    """The messages of the archives, the oldest first; one archive at a time is in memory."""
    chain = archive.chain(log.directory, state, after + 1)
    newest = next(chain)
    others = []
    named = newest.before
    for older in chain:
        others.append(named)
        named = older.before
        _check_standing(log, older)
    _check_standing(log, newest)
    for other in reversed(others):
        if other is not None:
            yield from archive.read(log.directory, state.uid, other).messages
    yield from newest.messages


def _check_standing(log: Log, opened: archive.Opened) -> None:
    """Raise StoreBusy where an archive is missing because the log is another one by now."""
    if not opened.bad or log.name.startswith(f"{trash.FOLDER}/"):
        return
    with suppress(StenologError):
        if log.is_at(log.directory.stat(log.name)):
            return
    raise StoreBusy(f"the log of {log.key!r} was replaced while it was read; try again")


def _blocks(log: Log, after: int) -> Iterator[tuple[int, bytes]]:
    """The live log in pieces of whole lines, from the one that has the message past a seq on."""
    start = _start_of(log, after) if after else 0
    while start < log.end:
        length = _BLOCK
        while True:
            block = log.read(start, min(start + length, log.end))
            if start + len(block) >= log.end:
                break
            cut = block.rfind(b"\n") + 1
            if cut:
                block = block[:cut]
                break
            length *= 4
        if not block:
            return
        yield start, block
        start += len(block)


def _start_of(log: Log, after: int) -> int:
    """An offset at which a line begins, before the message past this seq: near it, if that may be.

    Seqs only grow in a log, so it is looked for from the end.
    """
    length = _TAIL
    while True:
        start = max(0, log.end - length)
        if start == 0:
            return 0
        text = log.read(start, log.end)
        cut = text.find(b"\n") + 1
        newline = text.find(b"\n", cut)
        record = parse_line(text[cut:newline]) if 0 < cut < newline else None
        if record is not None and record.seq <= after:
            return start + cut
        length *= 4
