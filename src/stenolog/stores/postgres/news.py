"""Telling other processes that something was stored, and hearing it from them.

A notification inside the transaction that stores would make all commits of the database wait for
each other. So it is sent afterwards, by a thread, on another connection, for many commits at once;
lost, it costs time: whoever follows a session looks again by itself after a while.
"""

import hashlib
import os
import select
import threading
import time
from collections import deque
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Final

import psycopg

from stenolog.errors import StenologError
from stenolog.stores import reports
from stenolog.stores.postgres.connections import (
    Connection,
    Connections,
    Settings,
    close,
)
from stenolog.stores.postgres.queries import quoted
from stenolog.stores.postgres.transactions import Transaction

LOOK_AGAIN: Final = 2.0
"""So often a follower looks by itself, in seconds, though nobody told it anything."""
LOOK_OFTEN: Final = 0.1
"""So often where nobody can tell it anything."""
_GATHER: Final = 0.01
_PATIENCE: Final = 2.0
_REST: Final = 5.0
"""A thread that had nothing to tell for so long ends; the next one to tell begins another."""


class Bell:
    """Wakes a thread that waits.

    Like `threading.Event`, but all of its locks are inside the interpreter: an interrupt (Ctrl-C)
    that strikes in `Event.set` can leave the event locked, and then every later `set` hangs.
    """

    __slots__ = ("_rings",)

    def __init__(self) -> None:
        self._rings: SimpleQueue[None] = SimpleQueue()

    def ring(self) -> None:
        """Wake the thread that waits, or the next one that does."""
        if self._rings.empty():
            self._rings.put(None)

    def wait(self, seconds: float) -> bool:
        """Wait for a ring, and forget it; False where none came in time."""
        try:
            self._rings.get(timeout=max(0.0, seconds))
        except Empty:
            return False
        with suppress(Empty):
            while True:
                self._rings.get_nowait()
        return True


class News:
    """What is told and heard of sessions, by this process."""

    def __init__(self, connections: Connections, settings: Settings) -> None:
        self.channel = "stenolog:" + hashlib.blake2b(settings.schema.encode()).hexdigest()[:16]
        self._connections = connections
        self._mutex = threading.Lock()
        self._bells: dict[str, list[Bell]] = {}
        self._untold: deque[str] = deque()
        self._mouth: Transaction | None = None
        """A connection beyond those of the writers, who may all be at work."""
        self._gathering = False
        """Whether what is untold now will be looked at."""
        self._telling: threading.Thread | None = None
        self._work = Bell()
        self._ear: _Ear | None = None
        self._closed = False

    # --- telling -----------------------------------------------------------------------------

    def tell(self, name: str) -> None:
        """Something was committed in this session: ring here, and soon everywhere."""
        if name in self._bells:
            self._ring(name)
        # In this order, and the other one where they are gathered: so nothing is left untold.
        self._untold.append(name)
        if not self._gathering:
            self._begin_to_tell()

    def _begin_to_tell(self) -> None:
        try:
            self._gathering = True
            if self._telling is None and not self._closed:
                # An interrupt here may start two; the second one ends at once.
                thread = threading.Thread(target=self._tell, name="stenolog-news", daemon=True)
                thread.start()
                self._register(thread)
        except BaseException as error:
            # The next append starts a thread.
            self._gathering = False
            if not isinstance(error, RuntimeError):
                raise
            # The messages are committed, so this is no error for the caller that stored them.
            reports.info("other processes are not told of what is new: %s", error)
        self._work.ring()

    def _register(self, thread: threading.Thread) -> bool:
        """Return whether this is the thread that tells, or from now on is."""
        with self._mutex:
            if self._telling is None:
                self._telling = thread
            return self._telling is thread

    def _tell(self) -> None:
        if not self._register(threading.current_thread()):
            return
        while True:
            idle = not self._work.wait(_REST)
            with self._mutex:
                if idle and not self._untold:
                    self._telling, self._gathering = None, False
                    self._hush()
                    return
            if not self._closed:
                time.sleep(_GATHER)
            self._gathering = False
            names = {self._untold.popleft() for _ in range(len(self._untold))}
            if names:
                self._send(sorted(names))
            if self._closed:
                self._hush()
                return

    def _send(self, names: list[str]) -> None:
        try:
            if self._mouth is None or not self._mouth.is_usable:
                self._hush()
                self._mouth = self._connections.connect(time.monotonic() + _PATIENCE)
            self._mouth.run("tell", self.channel, names)
        except (psycopg.Error, StenologError) as error:
            reports.info("other processes were not told of what is new: %s", error)

    def _hush(self) -> None:
        if self._mouth is not None:
            close(self._mouth.connection)
            self._mouth = None

    # --- hearing -----------------------------------------------------------------------------

    def bell(self, name: str) -> Bell:
        """Rings whenever something was stored in this session, as far as that is heard."""
        bell = Bell()
        with self._mutex:
            self._bells.setdefault(name, []).append(bell)
            if self._ear is None and not self._closed and not self._connections.peer.pooled:
                self._ear = _Ear(self, self._connections)
        return bell

    def forget(self, name: str, bell: Bell) -> None:
        """It is not waited for any more."""
        with self._mutex:
            bells = [one for one in self._bells.get(name, ()) if one is not bell]
            if bells:
                self._bells[name] = bells
            else:
                self._bells.pop(name, None)

    @property
    def patience(self) -> float:
        """How long a follower may wait for its bell before it looks by itself."""
        ear = self._ear
        return LOOK_AGAIN if ear is not None and ear.hears else LOOK_OFTEN

    longest = LOOK_AGAIN
    """The most that `patience` is."""

    def _ring(self, name: str) -> None:
        with self._mutex:
            for bell in self._bells.get(name, ()):
                bell.ring()

    def heard(self, name: str | None) -> None:
        """Ring for one session, or for all where nobody knows what was missed."""
        if name is not None:
            self._ring(name)
            return
        with self._mutex:
            for bells in self._bells.values():
                for bell in bells:
                    bell.ring()

    def close(self) -> None:
        """Tell what is untold, and hear no more; everybody who waits looks again."""
        with self._mutex:
            self._closed = True
            ear, self._ear = self._ear, None
            telling = self._telling
        self._work.ring()
        if telling is not None and telling is not threading.current_thread():
            telling.join(_PATIENCE)
        if ear is not None:
            ear.close()
        self.heard(None)

    def abandon(self) -> list[Transaction]:
        """In a forked child: what belongs to the parent."""
        return [] if self._mouth is None else [self._mouth]


class _Ear:
    """The one connection of a process that listens, and its thread."""

    def __init__(self, news: News, connections: Connections) -> None:
        self._news = news
        self._connections = connections
        self._awake, self._wake = os.pipe()
        self._closed = False
        self.hears = False
        """Whether what others tell arrives at this moment."""
        self._thread = threading.Thread(target=self._run, name="stenolog-listens", daemon=True)
        try:
            self._thread.start()
        except BaseException:
            # It may run all the same, although no caller has the object.
            self._closed = True
            os.close(self._wake)
            raise

    def _run(self) -> None:
        try:
            while not self._closed:
                try:
                    self._listen()
                except (psycopg.Error, OSError, StenologError) as error:
                    reports.info("nothing is heard of other processes: %s", error)
                self.hears = False
                # From now on they look by themselves, and more often.
                self._news.heard(None)
                if not self._closed:
                    _wait([self._awake], LOOK_OFTEN)
        finally:
            os.close(self._awake)

    def _listen(self) -> None:
        connection = self._connections.connect(time.monotonic() + _PATIENCE).connection
        try:
            connection.execute(f"LISTEN {quoted(self._news.channel)}".encode())
            self.hears = True
            # What was told before is not told again.
            self._news.heard(None)
            while not self._closed:
                _wait([connection.fileno(), self._awake], None)
                self._take(connection)
        finally:
            with suppress(psycopg.Error):
                connection.close()

    def _take(self, connection: Connection) -> None:
        for told in connection.notifies(timeout=0):
            self._news.heard(told.payload)

    def close(self) -> None:
        """End the thread."""
        self._closed = True
        with suppress(OSError):
            os.close(self._wake)
        if threading.current_thread() is not self._thread:
            self._thread.join(_PATIENCE)


def _wait(files: list[int], seconds: float | None) -> None:
    """Until there is something to read in one of them. Not by select: that knows 1,024 files."""
    poll = select.poll()
    for file in files:
        poll.register(file, select.POLLIN)
    poll.poll(None if seconds is None else 1000 * seconds)
