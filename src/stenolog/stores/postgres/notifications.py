"""Notifications between processes about changed sessions (LISTEN and NOTIFY).

A NOTIFY in the transaction that stores a message would serialize all commits of the database.
Therefore a thread sends the notifications of many commits later, on another connection. A lost
notification only costs time: followers also poll.
"""

import hashlib
import os
import select
import threading
import time
from collections import deque
from contextlib import suppress
from itertools import chain
from queue import Empty, SimpleQueue
from typing import Final

import psycopg

from stenolog.errors import StenologError
from stenolog.stores import log_reports
from stenolog.stores.postgres.connections import ConnectionPool, Settings, close
from stenolog.stores.postgres.schema import quote_name
from stenolog.stores.postgres.transactions import Transaction

SLOW_POLL_SECONDS: Final = 2.0
"""Poll interval of a follower that receives notifications, in seconds."""
FAST_POLL_SECONDS: Final = 0.1
"""Poll interval of a follower that cannot receive notifications, in seconds."""
_COLLECT_SECONDS: Final = 0.01
"""Seconds for which the names of changed sessions are collected before they are sent."""
_TIMEOUT_SECONDS: Final = 2.0
"""Maximum number of seconds to wait for a connection, or on close for a thread."""
_IDLE_SECONDS: Final = 5.0
"""Seconds after which an idle sending thread ends; the next notification starts a new thread."""


class ChangeSignal:
    """A wake-up signal for a waiting thread.

    This class is like `threading.Event`, but all of its locks are inside the interpreter. An
    interrupt (Ctrl-C) in `Event.set` can leave an Event locked, so that every later `set` hangs.
    """

    __slots__ = ("_queue",)

    def __init__(self) -> None:
        self._queue: SimpleQueue[None] = SimpleQueue()

    def set(self) -> None:
        """Wake the waiting thread, or the next thread that waits."""
        if self._queue.empty():
            self._queue.put(None)

    def wait(self, seconds: float) -> bool:
        """Wait for the signal and reset it; return False after a timeout."""
        try:
            self._queue.get(timeout=max(0.0, seconds))
        except Empty:
            return False
        with suppress(Empty):
            while True:
                self._queue.get_nowait()
        return True


class Notifications:
    """Notifications that this process sends and receives."""

    def __init__(self, connections: ConnectionPool, settings: Settings) -> None:
        self.channel = "stenolog:" + hashlib.blake2b(settings.schema.encode()).hexdigest()[:16]
        self._connections = connections
        self._mutex = threading.Lock()
        self._signals: dict[str, list[ChangeSignal]] = {}
        self._unsent: deque[str] = deque()
        self._sender: Transaction | None = None
        """Connection for sending, outside the pool, because the pool may have none free."""
        self._will_collect = False
        """Whether the sending thread will collect the session names that are queued now."""
        self._sender_thread: threading.Thread | None = None
        self._work = ChangeSignal()
        self._listener: _Listener | None = None
        self._closed = False

    # --- sending -----------------------------------------------------------------------------

    def notify(self, name: str) -> None:
        """Notify followers of a commit: in this process now, in other processes soon."""
        if name in self._signals:
            self.wake(name)
        # The sending thread does these two steps in reverse order, so that no name stays unsent.
        self._unsent.append(name)
        if not self._will_collect:
            self._start_sending()

    def _start_sending(self) -> None:
        try:
            self._will_collect = True
            if self._sender_thread is None and not self._closed:
                # An interrupt here may start two threads; the second thread ends immediately.
                thread = threading.Thread(
                    target=self._send_loop, name="stenolog-notify", daemon=True
                )
                thread.start()
                self._register_sender(thread)
        except BaseException as error:
            # The next call of `notify` tries again to start the thread.
            self._will_collect = False
            if not isinstance(error, RuntimeError):
                raise
            # The messages are committed, so the caller that stored them gets no error.
            log_reports.info("other processes are not notified of changes: %s", error)
        self._work.set()

    def _register_sender(self, thread: threading.Thread) -> bool:
        """Make `thread` the sending thread if there is none; return whether it is the sender."""
        with self._mutex:
            if self._sender_thread is None:
                self._sender_thread = thread
            return self._sender_thread is thread

    def _send_loop(self) -> None:
        if not self._register_sender(threading.current_thread()):
            return
        while True:
            is_idle = not self._work.wait(_IDLE_SECONDS)
            with self._mutex:
                if is_idle and not self._unsent:
                    self._sender_thread, self._will_collect = None, False
                    self._close_sender()
                    return
            if not self._closed:
                time.sleep(_COLLECT_SECONDS)
            self._will_collect = False
            names = {self._unsent.popleft() for _ in range(len(self._unsent))}
            if names:
                self._send_names(sorted(names))
            if self._closed:
                self._close_sender()
                return

    def _send_names(self, names: list[str]) -> None:
        try:
            if self._sender is None or not self._sender.is_usable:
                self._close_sender()
                self._sender = self._connections.connect(time.monotonic() + _TIMEOUT_SECONDS)
            self._sender.run("notify", self.channel, names)
        except (psycopg.Error, StenologError) as error:
            log_reports.info("other processes were not notified of changes: %s", error)

    def _close_sender(self) -> None:
        if self._sender is not None:
            close(self._sender.connection)
            self._sender = None

    # --- receiving ---------------------------------------------------------------------------

    def subscribe(self, name: str) -> ChangeSignal:
        """Return a signal that is set after each notified change of this session."""
        signal = ChangeSignal()
        with self._mutex:
            self._signals.setdefault(name, []).append(signal)
            if (
                self._listener is None
                and not self._closed
                and not self._connections.server.has_pooler
            ):
                self._listener = _Listener(self, self._connections)
        return signal

    def unsubscribe(self, name: str, signal: ChangeSignal) -> None:
        """Stop signalling changes of this session to `signal`."""
        with self._mutex:
            signals = [other for other in self._signals.get(name, ()) if other is not signal]
            if signals:
                self._signals[name] = signals
            else:
                self._signals.pop(name, None)

    @property
    def poll_interval(self) -> float:
        """Maximum time that a follower waits for its signal before it polls, in seconds."""
        listener = self._listener
        return (
            SLOW_POLL_SECONDS
            if listener is not None and listener.is_listening
            else FAST_POLL_SECONDS
        )

    max_poll_interval = SLOW_POLL_SECONDS
    """Upper bound of `poll_interval`."""

    def wake(self, name: str | None) -> None:
        """Set the signals of one session, or of all sessions if `name` is None."""
        with self._mutex:
            names = self._signals.keys() if name is None else [name]
            for signal in chain.from_iterable(self._signals.get(name, ()) for name in names):
                signal.set()

    def close(self) -> None:
        """Send the queued names, stop listening, and wake all waiting followers."""
        with self._mutex:
            self._closed = True
            listener, self._listener = self._listener, None
            sender_thread = self._sender_thread
        self._work.set()
        if sender_thread is not None and sender_thread is not threading.current_thread():
            sender_thread.join(_TIMEOUT_SECONDS)
        if listener is not None:
            listener.close()
        self.wake(None)

    def abandon_in_child(self) -> list[Transaction]:
        """In a forked child: return the parent's connections, which must stay open."""
        return [] if self._sender is None else [self._sender]


class _Listener:
    """The listening connection of a process, and its thread."""

    def __init__(self, notifications: Notifications, connections: ConnectionPool) -> None:
        self._notifications = notifications
        self._connections = connections
        self._wake_reader, self._wake_writer = os.pipe()
        self._closed = False
        self.is_listening = False
        """Whether the process receives notifications now."""
        self._thread = threading.Thread(target=self._run, name="stenolog-listen", daemon=True)
        try:
            self._thread.start()
        except BaseException:
            # End the thread, which may be running although no caller has this object.
            self._closed = True
            os.close(self._wake_writer)
            raise

    def _run(self) -> None:
        try:
            while not self._closed:
                try:
                    self._listen()
                except (psycopg.Error, OSError, StenologError) as error:
                    log_reports.info("no notifications from other processes: %s", error)
                self.is_listening = False
                # Wake the followers, so that they poll more often from now on.
                self._notifications.wake(None)
                if not self._closed:
                    _wait_readable([self._wake_reader], FAST_POLL_SECONDS)
        finally:
            os.close(self._wake_reader)

    def _listen(self) -> None:
        connection = self._connections.connect(time.monotonic() + _TIMEOUT_SECONDS).connection
        try:
            connection.execute(f"LISTEN {quote_name(self._notifications.channel)}".encode())
            self.is_listening = True
            # Notifications that were sent before LISTEN are lost, so wake all followers.
            self._notifications.wake(None)
            while not self._closed:
                _wait_readable([connection.fileno(), self._wake_reader], None)
                for notification in connection.notifies(timeout=0):
                    self._notifications.wake(notification.payload)
        finally:
            with suppress(psycopg.Error):
                connection.close()

    def close(self) -> None:
        """End the thread."""
        self._closed = True
        with suppress(OSError):
            os.close(self._wake_writer)
        if threading.current_thread() is not self._thread:
            self._thread.join(_TIMEOUT_SECONDS)


def _wait_readable(descriptors: list[int], seconds: float | None) -> None:
    """Wait until a file is readable, with `poll`: `select` is limited to 1,024 descriptors."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    poll.poll(None if seconds is None else 1000 * seconds)
