"""Notifications between processes about changed sessions (LISTEN and NOTIFY).

A notification inside the storing transaction would serialize all commits of the database. Therefore
a thread sends it afterwards, on another connection, for many commits at once. A lost notification
only costs time: followers also poll.
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
from stenolog.stores import log_reports
from stenolog.stores.postgres.connections import (
    Connection,
    Connections,
    Settings,
    close,
)
from stenolog.stores.postgres.queries import quoted
from stenolog.stores.postgres.transactions import Transaction

LOOK_AGAIN: Final = 2.0
"""Poll interval of a follower that receives notifications, in seconds."""
LOOK_OFTEN: Final = 0.1
"""Poll interval of a follower that cannot receive notifications, in seconds."""
_GATHER: Final = 0.01
_PATIENCE: Final = 2.0
_REST: Final = 5.0
"""Seconds without notifications after which the sending thread ends; the next one starts another.
"""


class ChangeSignal:
    """A wake-up signal for a waiting thread.

    Like `threading.Event`, but all of its locks are inside the interpreter: an interrupt (Ctrl-C)
    in `Event.set` can leave the event locked, and then every later `set` hangs.
    """

    __slots__ = ("_rings",)

    def __init__(self) -> None:
        self._rings: SimpleQueue[None] = SimpleQueue()

    def ring(self) -> None:
        """Wake the waiting thread, or the next one that waits."""
        if self._rings.empty():
            self._rings.put(None)

    def wait(self, seconds: float) -> bool:
        """Wait for a signal and reset it; return False if none arrived in time."""
        try:
            self._rings.get(timeout=max(0.0, seconds))
        except Empty:
            return False
        with suppress(Empty):
            while True:
                self._rings.get_nowait()
        return True


class Notifications:
    """Notifications that this process sends and receives."""

    def __init__(self, connections: Connections, settings: Settings) -> None:
        self.channel = "stenolog:" + hashlib.blake2b(settings.schema.encode()).hexdigest()[:16]
        self._connections = connections
        self._mutex = threading.Lock()
        self._bells: dict[str, list[ChangeSignal]] = {}
        self._untold: deque[str] = deque()
        self._mouth: Transaction | None = None
        """Connection for sending, outside the pool, whose connections may all be in use."""
        self._gathering = False
        """Whether the thread will collect the names that are queued now."""
        self._telling: threading.Thread | None = None
        self._work = ChangeSignal()
        self._ear: _Ear | None = None
        self._closed = False

    # --- sending -----------------------------------------------------------------------------

    def tell(self, name: str) -> None:
        """Notify followers of a commit in this session: here now, in other processes soon."""
        if name in self._bells:
            self._ring(name)
        # The thread does these two steps in reverse order, so that no name stays unsent.
        self._untold.append(name)
        if not self._gathering:
            self._begin_to_tell()

    def _begin_to_tell(self) -> None:
        try:
            self._gathering = True
            if self._telling is None and not self._closed:
                # An interrupt here may start two threads; the second one ends immediately.
                thread = threading.Thread(target=self._tell, name="stenolog-news", daemon=True)
                thread.start()
                self._register(thread)
        except BaseException as error:
            # The next append starts a thread.
            self._gathering = False
            if not isinstance(error, RuntimeError):
                raise
            # The messages are committed, so this is not an error for the caller that stored them.
            log_reports.info("other processes are not told of what is new: %s", error)
        self._work.ring()

    def _register(self, thread: threading.Thread) -> bool:
        """Return whether the thread is, or has now become, the sending thread."""
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
            log_reports.info("other processes were not told of what is new: %s", error)

    def _hush(self) -> None:
        if self._mouth is not None:
            close(self._mouth.connection)
            self._mouth = None

    # --- receiving ---------------------------------------------------------------------------

    def bell(self, name: str) -> ChangeSignal:
        """Return a bell that rings after changes of this session, as far as they are received."""
        bell = ChangeSignal()
        with self._mutex:
            self._bells.setdefault(name, []).append(bell)
            if self._ear is None and not self._closed and not self._connections.peer.pooled:
                self._ear = _Ear(self, self._connections)
        return bell

    def forget(self, name: str, bell: ChangeSignal) -> None:
        """Remove a bell."""
        with self._mutex:
            bells = [one for one in self._bells.get(name, ()) if one is not bell]
            if bells:
                self._bells[name] = bells
            else:
                self._bells.pop(name, None)

    @property
    def patience(self) -> float:
        """Maximum time that a follower waits for its bell before it polls, in seconds."""
        ear = self._ear
        return LOOK_AGAIN if ear is not None and ear.hears else LOOK_OFTEN

    longest = LOOK_AGAIN
    """Upper bound of `patience`."""

    def _ring(self, name: str) -> None:
        with self._mutex:
            for bell in self._bells.get(name, ()):
                bell.ring()

    def heard(self, name: str | None) -> None:
        """Ring for one session, or for all if notifications may have been missed."""
        if name is not None:
            self._ring(name)
            return
        with self._mutex:
            for bells in self._bells.values():
                for bell in bells:
                    bell.ring()

    def close(self) -> None:
        """Send the queued names, stop listening, and wake all waiting followers."""
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
        """In a forked child: return the connections of the parent."""
        return [] if self._mouth is None else [self._mouth]


class _Ear:
    """The listening connection of a process, and its thread."""

    def __init__(self, news: Notifications, connections: Connections) -> None:
        self._news = news
        self._connections = connections
        self._awake, self._wake = os.pipe()
        self._closed = False
        self.hears = False
        """Whether notifications are received now."""
        self._thread = threading.Thread(target=self._run, name="stenolog-listens", daemon=True)
        try:
            self._thread.start()
        except BaseException:
            # The thread may run anyway, although no caller has this object.
            self._closed = True
            os.close(self._wake)
            raise

    def _run(self) -> None:
        try:
            while not self._closed:
                try:
                    self._listen()
                except (psycopg.Error, OSError, StenologError) as error:
                    log_reports.info("nothing is heard of other processes: %s", error)
                self.hears = False
                # From now on, followers poll more often.
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
            # Notifications that were sent before LISTEN are lost.
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
    """Wait until one of the files is readable. `select` is limited to 1,024 descriptors."""
    poll = select.poll()
    for file in files:
        poll.register(file, select.POLLIN)
    poll.poll(None if seconds is None else 1000 * seconds)
