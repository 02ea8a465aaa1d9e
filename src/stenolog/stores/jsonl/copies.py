"""Lives that come from another store, written as logs: stores/whole.py → files.

Each is written to a file of its own, synced, and only then put under its name, under the lock of
what it takes the place of. What lay in archives goes into one archive. The last line of a copy is a
change that changes nothing: as long as nothing but states follows it, nobody wrote to it since.
"""

import errno
import fcntl
import os
import re
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from typing import Final

import msgspec
from msgspec import Struct

from stenolog.codec import control_line, digest, message_line, plain_line
from stenolog.errors import DamagedStore, NoSuchSession, SessionExists, StoreBusy
from stenolog.records import Archive, Change, Message, State, Token, Void, timestamp
from stenolog.stores import state as states
from stenolog.stores.disk import replace_file, sync_file, sync_folder, write_all
from stenolog.stores.jsonl import archive, names, remains, trash, whole
from stenolog.stores.jsonl.directory import Directory, create_anew
from stenolog.stores.jsonl.lives import Lives, check_vacant, failure
from stenolog.stores.jsonl.log import Log
from stenolog.stores.jsonl.table import AT_ONCE, Logs, flock
from stenolog.stores.jsonl.tokens import REMEMBERED
from stenolog.stores.jsonl.turns import Turns
from stenolog.stores.jsonl.writer import Outcome
from stenolog.stores.whole import Life, LifeMark, state_of, token_of

_BLOCK: Final = 1024 * 1024
_MOST_WAITING: Final = 64
"""So many files at the most are open at once."""
_SYNCS: Final = 16
"""Disks make one of many syncs that come together."""
_GZIP: Final = 31
_LEVEL: Final = 1
"""A copy is to be quick; whoever compacts later has more time."""
Check = Callable[[Log], None]
"""Looks at what is to be replaced, under its lock."""
_NOTE: Final = re.compile(r"\.[0-9a-f]{1,64}-archives\.copy")
_TEMPORARY: Final = re.compile(r"\.[0-9a-f]{1,64}-[0-9a-f]{8}\.copy")


class Copies:
    """Puts lives into one folder."""

    def __init__(
        self, logs: Logs, turns: Turns, lives: Lives, memory: whole.Memory, *, busy_timeout: float
    ) -> None:
        self._logs = logs
        self._turns = turns
        self._lives = lives
        self._directory = logs.directory
        self._memory = memory
        self._busy_timeout = busy_timeout
        self._waiting: list[tuple[Life, _Made]] = []
        """New lives that are written, and not yet synced nor under their names."""
        self._deleted: set[str] = set()

    @contextmanager
    def writing(self) -> Iterator["Copies"]:
        """What is written meanwhile is durable afterwards. Raises NotStored, MaybeStored."""
        try:
            self._directory.settle()
            _sweep(self._directory)
            self._sweep_archives()
            self._deleted = {entry.uid for entry in trash.entries(self._directory)}
        except OSError as error:
            raise Outcome(0, error).failure(f"writing to {self._directory.path}") from error
        try:
            yield self
            self._place()
        finally:
            while self._waiting:
                self._waiting.pop()[1].close()
            try:
                self._directory.sync()
            except OSError as error:
                doing = f"syncing {self._directory.path}"
                raise Outcome(0, error, unknown=True).failure(doing) from error

    def _place(self) -> None:
        """Sync what was written, many at a time, and let each have its name."""
        try:
            # Slow to import, and only a copy needs it.
            from concurrent.futures import ThreadPoolExecutor

            with ThreadPoolExecutor(_SYNCS) as pool:
                list(pool.map(sync_file, [made.descriptor for _, made in self._waiting]))
            while self._waiting:
                life, made = self._waiting[-1]
                self._begin(life, made)
                self._memory.synced.add(made.stamp(names.file_name(life.key)))
                self._waiting.pop()[1].close()
        except OSError as error:
            raise Outcome(0, error).failure(f"writing to {self._directory.path}") from error

    def write(
        self, life: Life, messages: Iterable[Message], *, after: int = 0, instead_of: str = ""
    ) -> None:
        """Make this life stand exactly so. Raises as LifeWriter.write."""
        doing = f"copying {life.key!r}"
        try:
            with self._archives(life) as folder:
                self._write(life, messages, after, instead_of, folder)
        except OSError as error:
            raise Outcome(0, error).failure(doing) from error

    def _write(
        self,
        life: Life,
        messages: Iterable[Message],
        after: int,
        instead_of: str,
        folder: int | None,
    ) -> None:
        self._check(life, instead_of)
        if not instead_of and life.deleted is None and folder is None:
            made = _Made(self._directory, life.uid)
            try:
                _write_life(made.descriptor, life, messages, 0, None, None)
            except BaseException:
                made.close()
                raise
            self._waiting.append((life, made))
            if len(self._waiting) >= _MOST_WAITING:
                self._place()
            return
        with self._written(life, messages, after, instead_of, folder) as made:
            if not instead_of:
                self._begin(life, made)
                return
            outdated = folder is not None and made.archives is not None
            if outdated:
                self._note(life)
            self._replace(life, made, instead_of)
        if folder is not None and made.archives is not None:
            remains.sweep(folder, made.archives)
            self._forget(life.uid)

    # --- archives that nothing leads to any more ---------------------------------------------

    def _note(self, life: Life) -> None:
        """Say that there will be some: what was purged must not live on in them."""
        told = msgspec.json.encode({"key": life.key, "uid": life.uid})
        replace_file(self._directory.descriptor, _note_name(life.uid), told)

    def _forget(self, uid: str) -> None:
        with suppress(FileNotFoundError):
            os.unlink(_note_name(uid), dir_fd=self._directory.descriptor)

    def _sweep_archives(self) -> None:
        """Remove those that a copy which was killed had no more time for. Raises OSError."""
        until = time.monotonic() + self._busy_timeout
        for name in filter(_NOTE.fullmatch, self._directory.names()):
            text = (self._directory.path / name).read_bytes()
            try:
                mark = msgspec.json.decode(text, type=_Noted).mark()
            except msgspec.DecodeError as error:
                raise DamagedStore(
                    f"{self._directory.path / name} is damaged ({error}); remove it, and look for "
                    "archives that nothing leads to with `steno doctor`"
                ) from error
            folder = self._directory.subfolder(archive.FOLDER, mark.uid, create=False)
            try:
                if folder is not None:
                    flock(folder, until, f"the folder of the archives of {mark.key!r}")
                    with (
                        suppress(NoSuchSession),
                        whole.opened(self._directory, mark, until=until, hold=True) as log,
                    ):
                        remains.sweep(folder, frozenset(_archives_of(log)))
            finally:
                if folder is not None:
                    os.close(folder)
            self._forget(mark.uid)

    # --- what it takes the place of ----------------------------------------------------------

    def _check(self, life: Life, instead_of: str) -> None:
        """Raise SessionExists, StoreBusy, as far as that can be seen from outside."""
        if instead_of:
            if whole.stamp_of(self._directory, _path_in(instead_of)) != instead_of:
                raise _changed(life)
            return
        if life.uid in self._deleted:
            raise SessionExists(life.key, f"the trash has a session with its uid, {life.uid}")
        if any(waiting.key == life.key for waiting, _ in self._waiting):
            raise SessionExists(life.key)
        if life.deleted is None:
            self._check_key(life)

    def _check_key(self, life: Life) -> None:
        """Raise SessionExists where another session lives under the key."""
        uid = self._logs.read(life.key, lambda log: log.known_state().uid)
        if uid is not None and uid != life.uid:
            raise SessionExists(life.key)

    def _begin(self, life: Life, made: "_Made") -> None:
        """Put a new life where there is none."""
        if life.deleted is not None:
            with _trash_folder(self._directory) as folder:
                if not made.link(_deleted_name(life), folder):
                    made.rename(_deleted_name(life), folder)
                sync_folder(folder)
            return
        name = names.file_name(life.key)
        if self._directory.stat(name) is None:
            self._logs.refuse_beside_foreign(life.key)
            if made.link(name, self._directory.descriptor):
                return
        # Perhaps no more than an empty file is in the way.
        self._under_lock(life, made, check_vacant, create=True)

    def _replace(self, life: Life, made: "_Made", instead_of: str) -> None:
        """Let it take the place of an earlier copy, which is moved to its new place first."""
        if life.deleted is None:
            self._check_key(life)
        path = self._moved(life, instead_of)
        stays = path == _path_in(instead_of)

        def check(log: Log) -> None:
            if stays and whole.stamp_of(self._directory, path) != instead_of:
                raise _changed(life)
            _check_uid(log, life)
            if not stays and not whole.copied_to(log):
                raise _changed(life)

        if life.deleted is None:
            self._under_lock(life, made, check)
            return
        with self._open(life, path, hold=True) as log, _trash_folder(self._directory) as folder:
            check(log)
            made.rename(_deleted_name(life), folder)
            sync_folder(folder)

    def _moved(self, life: Life, instead_of: str) -> str:
        """Have the earlier copy where the life is to be; its path then.

        By way of the trash, if it has another key. Whoever is killed in between leaves a copy that
        says where it may be, and is known by that.
        """
        path = _path_in(instead_of)
        target = _path_of(life)
        if path == target:
            return path
        key, deleted = self._announce(life, instead_of)
        if deleted is None:
            deleted = life.deleted or life.updated
            self._delete(life, key, at=deleted)
        if life.deleted is None:
            self._lives.restore(key, life.uid, life.key)
        elif life.deleted != deleted:
            with _trash_folder(self._directory) as folder:
                entry = whole.find_deleted(self._directory, life.uid)
                if entry is None:
                    raise _changed(life)
                name = _deleted_name(life)
                os.rename(entry.name, name, src_dir_fd=folder, dst_dir_fd=folder)
        return target

    def _announce(self, life: Life, instead_of: str) -> tuple[str, str | None]:
        """Say in the earlier copy where it is going to be; which key it has, and when deleted."""
        path = _path_in(instead_of)
        key, entry = self._key_at(path), trash.entry_of(path.removeprefix(f"{trash.FOLDER}/"))
        deleted = None if entry is None else timestamp(entry.deleted)
        places = [
            whole.place_of(key, deleted),
            whole.place_of(life.key, life.deleted),
            # On its way there.
            whole.place_of(key, life.deleted or life.updated),
        ]
        with self._open(life, path, hold=True) as log:
            if whole.stamp_of(self._directory, path) != instead_of:
                raise _changed(life)
            _check_uid(log, life)
            state, end = log.settled()
            told = _copied(state, places)
            line = control_line("change", end + 1, log.updated or state.created, told)
            flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(path, flags, dir_fd=self._directory.descriptor)
            try:
                write_all(descriptor, line)
                sync_file(descriptor)
            finally:
                os.close(descriptor)
        return key, deleted

    @contextmanager
    def _open(self, life: Life, path: str, *, hold: bool) -> Iterator[Log]:
        """An earlier copy; with `hold`, with its lock."""
        until = time.monotonic() + self._busy_timeout
        entry = trash.entry_of(path.removeprefix(f"{trash.FOLDER}/"))
        deleted = None if entry is None else timestamp(entry.deleted)
        mark = LifeMark(key=self._key_at(path), uid=life.uid, deleted=deleted, stamp="")
        try:
            with whole.opened(self._directory, mark, until=until, hold=hold) as log:
                if log.name != path:
                    raise _changed(life)
                yield log
        except NoSuchSession as error:
            raise _changed(life) from error

    def _key_at(self, path: str) -> str:
        """The key of the life in a file."""
        if path.startswith(f"{trash.FOLDER}/"):
            for entry, key in trash.keys(self._directory):
                if path == whole.trash_path(entry):
                    return key
            return ""
        spelled = names.key_of(path)
        if spelled is not None:
            return spelled
        head = trash.head_at(self._directory, self._directory.descriptor, path, path)
        return "" if head is None else head.key

    def _delete(self, life: Life, key: str, *, at: str) -> None:
        """Move a live log into the trash, as of this time."""

        def work() -> None:
            log = self._logs.lock(key, create=False)
            if log is None:
                raise _changed(life)
            try:
                _check_uid(log, life)
                if not whole.copied_to(log):
                    raise _changed(life)
                trash.put(log, at)
            finally:
                self._logs.discard(log)

        self._turns.alone(key, work)

    def _under_lock(
        self, life: Life, made: "_Made", check: "Check", *, create: bool = False
    ) -> None:
        """Let the new file have the name of the log, if what stands there is as expected."""

        def work() -> None:
            log = self._logs.lock(life.key, create=create)
            if log is None:
                raise _changed(life)
            try:
                check(log)
                # Under its lock nobody is at it: somebody was killed there.
                with suppress(FileNotFoundError):
                    os.unlink(f".{log.name}.new", dir_fd=self._directory.descriptor)
                made.rename(log.name, self._directory.descriptor)
            except OSError as error:
                raise failure(error, log, f"copying {life.key!r}") from error
            finally:
                self._logs.discard(log)

        self._turns.alone(life.key, work)

    # --- the files ---------------------------------------------------------------------------

    @contextmanager
    def _archives(self, life: Life) -> Iterator[int | None]:
        """The folder of its archives, while nobody else changes what is in it."""
        folder = self._directory.subfolder(archive.FOLDER, life.uid, create=life.archived > 0)
        if folder is None:
            yield None
            return
        try:
            until = time.monotonic() + self._busy_timeout
            flock(folder, until, f"the folder of the archives of {life.key!r}")
            yield folder
        finally:
            with suppress(OSError):
                fcntl.flock(folder, fcntl.LOCK_UN)
            os.close(folder)

    @contextmanager
    def _written(
        self,
        life: Life,
        messages: Iterable[Message],
        after: int,
        instead_of: str,
        folder: int | None,
    ) -> Iterator["_Made"]:
        """A file with all of it, synced, under a name that means nothing."""
        with self._old(life, instead_of) as old:
            made = _Made(self._directory, life.uid)
            try:
                made.archives = _write_life(made.descriptor, life, messages, after, old, folder)
                sync_file(made.descriptor)
                yield made
            finally:
                made.close()

    @contextmanager
    def _old(self, life: Life, instead_of: str) -> Iterator[Log | None]:
        """The log of which it is a continuation."""
        if not instead_of:
            yield None
            return
        with self._open(life, _path_in(instead_of), hold=False) as log:
            yield log


class _Made:
    """A new file, which is gone if it did not get a name."""

    def __init__(self, directory: Directory, uid: str) -> None:
        self._folder = directory.descriptor
        self._name = f".{uid}-{os.urandom(4).hex()}.copy"
        self.archives: frozenset[str] | None = None
        """The names of all archives that belong to it; None: those that there are."""
        self.descriptor = create_anew(self._folder, self._name)
        # Nobody takes it for a leftover; nor appends to it before its name is on the disk.
        fcntl.flock(self.descriptor, AT_ONCE)

    def link(self, name: str, folder: int) -> bool:
        """Give it a name that is free; False where it is not, or this disk has no links."""
        try:
            os.link(self._name, name, src_dir_fd=self._folder, dst_dir_fd=folder)
        except OSError as error:
            if error.errno in (errno.EEXIST, errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
                return False
            raise
        return True

    def rename(self, name: str, folder: int) -> None:
        """Give it a name, whatever has that now. Raises OSError."""
        os.rename(self._name, name, src_dir_fd=self._folder, dst_dir_fd=folder)

    def stamp(self, path: str) -> str:
        """The stamp that it has under a name."""
        return whole.stamp(path, os.fstat(self.descriptor))

    def close(self) -> None:
        """Let go of it."""
        with suppress(FileNotFoundError):
            os.unlink(self._name, dir_fd=self._folder)
        # By name, because a child forked meanwhile has the same descriptor.
        fcntl.flock(self.descriptor, fcntl.LOCK_UN)
        os.close(self.descriptor)


class _Noted(Struct, frozen=True):
    """Whose archives are to be looked through."""

    key: str
    uid: str

    def mark(self) -> LifeMark:
        return LifeMark(key=self.key, uid=self.uid, stamp="")


def _note_name(uid: str) -> str:
    return f".{uid}-archives.copy"


def _archives_of(log: Log) -> Iterator[str]:
    """The names of the archives that a log leads to."""
    with log.mutex:
        state = states.copy(log.known_state())
    named = state.archive
    for opened in archive.chain(log.directory, state, 1):
        if named is not None:
            yield named.name
        named = opened.before


def _sweep(directory: Directory) -> None:
    """Remove what a copy that was killed left. Raises OSError."""
    for name in filter(_TEMPORARY.fullmatch, directory.names()):
        descriptor = directory.open(name)
        if descriptor is not None:
            try:
                fcntl.flock(descriptor, AT_ONCE)
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=directory.descriptor)
            except BlockingIOError:
                pass  # somebody is at it
            finally:
                os.close(descriptor)


class _Kept(Struct, frozen=True):
    """What stays of an earlier copy."""

    archive: Archive | None
    tokens: list[Token]
    messages: Iterator[Message]


def _write_life(
    descriptor: int,
    life: Life,
    messages: Iterable[Message],
    after: int,
    old: Log | None,
    folder: int | None,
) -> frozenset[str] | None:
    """Write a whole log; the names of the archives that belong to it. Raises OSError."""
    generation = 1 if old is None else old.known_state().generation + 1
    state, changes = state_of(life, generation=generation)
    kept = _kept(life, old, after)
    stream = _Stream(chain(kept.messages, messages))
    written: frozenset[str] | None = frozenset()
    if kept.archive is not None:
        state.archive, state.tokens, written = kept.archive, kept.tokens, None
    elif life.archived and folder is not None:
        named, state.tokens = _write_archive(folder, state, stream, life.archived)
        state.archive = named
        written = frozenset() if named is None else frozenset([named.name])
    _write_log(descriptor, life, state, changes, stream)
    return written


def _kept(life: Life, old: Log | None, after: int) -> _Kept:
    if old is None or not after:
        return _Kept(None, [], iter(()))
    with old.mutex:
        state, end = states.copy(old.known_state()), old.next_seq - 1
        same = states.archived_upto(state) == life.archived and 0 < life.archived <= after
        tokens = old.tokens_upto(life.archived) if same else []
    above = life.archived if same else 0
    return _Kept(
        state.archive if same else None,
        tokens,
        whole.messages(old, state, min(end, after), above),
    )


class _Stream:
    """Messages one after the other, and the next one looked at before it is taken."""

    def __init__(self, messages: Iterable[Message]) -> None:
        self._messages = iter(messages)
        self._next: Message | None = None

    def upto(self, seq: int) -> Iterator[Message]:
        """Those up to this seq."""
        while (message := self._peek()) is not None and message.seq <= seq:
            self._next = None
            yield message

    def rest(self) -> Iterator[Message]:
        """All the others."""
        first = self._peek()
        if first is not None:
            yield first
            yield from self._messages

    @property
    def first(self) -> int | None:
        """The seq of the next one; None where there is none."""
        message = self._peek()
        return None if message is None else message.seq

    def _peek(self) -> Message | None:
        if self._next is None:
            self._next = next(self._messages, None)
        return self._next


def _write_archive(
    folder: int, state: State, stream: _Stream, upto: int
) -> tuple[Archive | None, list[Token]]:
    """Put the messages up to this seq into an archive, durably; and which tokens are theirs."""
    first = stream.first
    if first is None or first > upto:
        # Nothing of it is left, but that it was archived is still to be told.
        first = upto
    mark = "" if state.generation == 1 else f".{state.generation}"
    named = Archive(name=f"{first}-{upto}{mark}.jsonl.gz", first=first, last=upto)
    head = states.blank(state.key, state.uid, state.generation, state.created)
    head.purged = state.purged
    packer = zlib.compressobj(_LEVEL, wbits=_GZIP)
    temporary = f".{named.name}.new"
    tokens = _TokensSeen()
    descriptor = create_anew(folder, temporary)
    try:
        lines = _lines(tokens.watch(stream.upto(upto)))
        for block in _blocks(chain([control_line("state", first, state.created, head)], lines)):
            write_all(descriptor, packer.compress(block))
        write_all(descriptor, packer.flush())
        sync_file(descriptor)
        os.rename(temporary, named.name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise
    finally:
        os.close(descriptor)
    sync_folder(folder)
    return named, tokens.found()


def _write_log(
    descriptor: int, life: Life, state: State, changes: list[Change], stream: _Stream
) -> None:
    first = stream.first or life.last_seq + 1
    at, end = life.created, life.last_seq + 1
    # Tokens whose message is missing stand in the states alone.
    state.tokens = [*state.tokens, *life.tokens]
    head = control_line("state", first, at, state)
    lines = [head, control_line("state", first, at, state, joined=True)]
    if life.void:
        lines.append(control_line("void", first, at, Void(0, life.void), joined=True))
    for change in changes:
        told = Change(
            op=change.op,
            number=change.number,
            floor=state.floor,
            hidden=state.hidden,
            newly=change.newly,
            added=change.added,
            was=change.was,
        )
        lines.append(control_line("change", first, at, told, joined=True))
    copied = _copied(state, [whole.place_of(life.key, life.deleted)])
    last = [
        control_line("state", end, life.updated, state),
        control_line("change", end, life.updated, copied, joined=True),
    ]
    for block in _blocks(chain(lines, _lines(stream.rest()), last)):
        write_all(descriptor, block)


def _copied(state: State, places: Iterable[str]) -> Change:
    """What a copy ends with: a change that changes nothing."""
    op = " ".join([whole.COPIED, *places])
    return Change(op=op, number=0, floor=state.floor, hidden=state.hidden)


def _blocks(lines: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes in few pieces."""
    held: list[bytes] = []
    size = 0
    for line in lines:
        held.append(line)
        size += len(line)
        if size >= _BLOCK:
            yield b"".join(held)
            held, size = [], 0
    yield b"".join(held)


def _lines(messages: Iterable[Message]) -> Iterator[bytes]:
    """The line of each message: on its own, but for those that a token stands for together."""
    batch = (0, 0)
    for message in messages:
        seq, body = message.seq, message.to_json()
        found = token_of(message) if message._once is not None else None
        if found is not None:
            batch = (seq, found[1])
        place = seq - batch[0] + 1
        if found is None and place > batch[1]:
            yield plain_line(seq, message._at, body)
        else:
            part = (place, batch[1]) if batch[1] > 1 else None
            yield message_line(seq, message._at, body, part=part, once=message._once)


class _TokensSeen:
    """The tokens of messages that go by, as a state carries them."""

    def __init__(self) -> None:
        self._seen: deque[tuple[str, int, int, list[bytes]]] = deque(maxlen=REMEMBERED)

    def watch(self, messages: Iterable[Message]) -> Iterator[Message]:
        """The same messages."""
        for message in messages:
            if message._once is not None and (found := token_of(message)) is not None:
                self._seen.append((*found, message.seq, []))
            if self._seen:
                _, count, first, bodies = self._seen[-1]
                if message.seq < first + count:
                    bodies.append(message.to_json())
            yield message

    def found(self) -> list[Token]:
        """What a state says of them; the digest is empty where not all of them went by."""
        return [
            Token(token, first, count, digest(bodies) if len(bodies) == count else "")
            for token, count, first, bodies in self._seen
        ]


# --- names -----------------------------------------------------------------------------------


def _path_in(stamp: str) -> str:
    """Where the life of a stamp stands, seen from the folder."""
    return stamp.rsplit(":", 3)[0]


def _path_of(life: Life) -> str:
    """Where a life is to stand, seen from the folder."""
    if life.deleted is None:
        return names.file_name(life.key)
    return f"{trash.FOLDER}/{_deleted_name(life)}"


def _deleted_name(life: Life) -> str:
    stamp = (life.deleted or "").replace("-", "").replace(":", "")
    return f"{life.uid}.{stamp}{names.SUFFIX}"


@contextmanager
def _trash_folder(directory: Directory) -> Iterator[int]:
    folder = directory.subfolder(trash.FOLDER, create=True)
    if folder is None:
        raise FileNotFoundError(os.fspath(directory.path / trash.FOLDER))
    try:
        yield folder
    finally:
        os.close(folder)


def _changed(life: Life) -> StoreBusy:
    return StoreBusy(f"{life.key!r}: what it was to take the place of has changed; try again")


def _check_uid(log: Log, life: Life) -> None:
    if log.state is None or log.state.uid != life.uid:
        raise _changed(life)
