"""A proxy in front of a PostgreSQL server, which fails on request.

It parses the framing of the protocol, so that it can drop a statement before the server receives
it, or the response after the server has committed. An exchange is everything that a client sends up
to a Sync (or one simple query), with all responses.
"""

import contextlib
import itertools
import re
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, Literal

from support.postgres_server import free_port

Moment = Literal["before", "during", "after", "unanswered"]
"""When an exchange is cut: before the server receives it, in the middle, or after the response.

`unanswered`: the server executes it, its response is dropped, and the connection stays open.
"""

_NO_ENCRYPTION: Final = {80877103, 80877104}
_CANCEL: Final = 80877102
_WRITES: Final = re.compile(r"\b(insert|update|delete|merge|commit)\b", re.IGNORECASE)
_PATIENCE: Final = 120.0
_numbers = itertools.count(1)


@dataclass(slots=True)
class Exchange:
    """Statements that were sent together, and the tags of their responses."""

    statements: list[str] = field(default_factory=list)
    tags: list[str] = field(default_factory=list)
    status: str = ""
    """`I` if the server is in no transaction afterwards, so everything is committed."""
    cut: Moment | None = None
    line: int = 0
    """Number of the connection."""

    @property
    def text(self) -> str:
        return "; ".join(self.statements)


def writes(exchange: Exchange) -> bool:
    """Return whether the exchange changes or commits something, judging by its text."""
    return _WRITES.search(exchange.text) is not None


@dataclass(slots=True)
class _Cut:
    moment: Moment
    which: Callable[[Exchange], bool]
    left: int


class Proxy:
    """Listens on a loopback port and forwards everything until told otherwise."""

    def __init__(self, port: int) -> None:
        """Forward to the server on this loopback port."""
        self._server = port
        self._mutex = threading.Lock()
        self._told = threading.Condition(self._mutex)
        self._cuts: list[_Cut] = []
        self._links: set[_Link] = set()
        self._refusing = False
        self._closed = False
        self._open = threading.Event()
        self._open.set()
        self.delay = 0.0
        """Delay of each exchange, in seconds."""
        self.seen: list[Exchange] = []
        """Every exchange that was answered or cut, in order."""
        self._listener, self.port = _listening()
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def __enter__(self) -> "Proxy":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Cut all connections and stop listening."""
        self._closed = True
        self._open.set()
        # Closing alone does not wake a thread that waits in accept.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut_all()
        self._thread.join(_PATIENCE)

    # --- control -----------------------------------------------------------------------------

    def cut(
        self, moment: Moment, which: Callable[[Exchange], bool] = writes, *, times: int = 1
    ) -> None:
        """Cut the next exchanges of this kind, and their connections."""
        with self._mutex:
            self._cuts.append(_Cut(moment, which, times))

    def forget_cuts(self) -> None:
        """Cancel all requested cuts."""
        with self._mutex:
            self._cuts.clear()

    def cut_all(self) -> None:
        """Cut all connections."""
        with self._mutex:
            links = list(self._links)
        for link in links:
            link.cut()

    def refuse(self, refusing: bool = True) -> None:
        """Refuse new connections, or accept them again."""
        self._refusing = refusing

    def hold(self) -> None:
        """Hold all traffic without closing connections."""
        self._open.clear()

    def release(self) -> None:
        """Forward everything again, including held traffic."""
        self._open.set()

    def connections(self) -> int:
        """Return the number of open connections."""
        with self._mutex:
            return len(self._links)

    def cuts(self) -> int:
        """Return how many exchanges were cut."""
        with self._mutex:
            return sum(exchange.cut is not None for exchange in self.seen)

    def wait_until(self, holds: Callable[[list[Exchange]], bool]) -> bool:
        """Wait until the condition on the exchanges holds; return False after a timeout."""
        with self._told:
            return self._told.wait_for(lambda: holds(self.seen), _PATIENCE)

    # --- forwarding --------------------------------------------------------------------------

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self._refusing:
                _reset(client)
                continue
            try:
                server = socket.create_connection(("127.0.0.1", self._server), timeout=_PATIENCE)
            except OSError:
                _reset(client)
                continue
            for end in (client, server):
                end.settimeout(None)
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link = _Link(self, client, server)
            with self._mutex:
                self._links.add(link)
            link.start()

    def wait_open(self) -> None:
        """Wait while traffic is held."""
        self._open.wait()

    def judge(self, exchange: Exchange) -> None:
        """Decide whether to cut an exchange."""
        with self._mutex:
            for wanted in self._cuts:
                if wanted.left and wanted.which(exchange):
                    wanted.left -= 1
                    exchange.cut = wanted.moment
                    return

    def note(self, exchange: Exchange) -> None:
        """Record a finished exchange."""
        with self._told:
            self.seen.append(exchange)
            self._told.notify_all()

    def forget(self, link: "_Link") -> None:
        """Remove a closed connection."""
        with self._mutex:
            self._links.discard(link)


class _Link:
    """The connections to one client and to the server, with a thread for each direction."""

    def __init__(self, proxy: Proxy, client: socket.socket, server: socket.socket) -> None:
        self._proxy = proxy
        self._client = client
        self._server = server
        self._number = next(_numbers)
        self._asked: deque[Exchange] = deque()
        self._prepared: dict[bytes, str] = {}
        self._portals: dict[bytes, str] = {}

    def start(self) -> None:
        for pump in (self._ask, self._answer):
            threading.Thread(target=self._carefully, args=(pump,), daemon=True).start()

    def cut(self) -> None:
        """Close both connections with a reset."""
        for end in (self._client, self._server):
            _reset(end)
        self._proxy.forget(self)

    def _carefully(self, pump: Callable[[], None]) -> None:
        # If one side closes in any way, close the other too.
        with contextlib.suppress(OSError, EOFError):
            pump()
        self.cut()

    # --- from the client to the server -------------------------------------------------------

    def _ask(self) -> None:
        self._greet()
        waiting = bytearray()
        exchange = Exchange(line=self._number)
        for kind, body in _messages(self._client):
            waiting += kind + _length(body) + body
            statement = self._statement(kind, body)
            if statement is not None:
                exchange.statements.append(statement)
            if kind in b"QS":
                self._proxy.wait_open()
                time.sleep(self._proxy.delay)
                self._proxy.judge(exchange)
                if exchange.cut in ("before", "during"):
                    if exchange.cut == "during":
                        self._server.sendall(waiting[: len(waiting) // 2])
                    self._proxy.note(exchange)
                    return
                self._asked.append(exchange)
                exchange = Exchange(line=self._number)
            if kind not in b"PBDEC":
                self._server.sendall(waiting)
                waiting.clear()

    def _greet(self) -> None:
        """Forward the first message; decline encryption, so that the proxy can read the rest."""
        while True:
            head = _exactly(self._client, 8)
            length, code = struct.unpack(">ii", head)
            if code in _NO_ENCRYPTION:
                self._client.sendall(b"N")
                continue
            self._server.sendall(head + _exactly(self._client, length - 8))
            if code == _CANCEL:
                raise EOFError
            return

    def _statement(self, kind: bytes, body: bytes) -> str | None:
        """Return the statement that this message executes; record statement and portal names."""
        if kind == b"Q":
            return body.rstrip(b"\0").decode(errors="replace")
        if kind == b"P":
            name, text, _ = body.split(b"\0", 2)
            self._prepared[name] = text.decode(errors="replace")
        elif kind == b"B":
            portal, name, _ = body.split(b"\0", 2)
            self._portals[portal] = self._prepared.get(name, "")
        elif kind == b"E":
            return self._portals.get(body.split(b"\0", 1)[0], "")
        return None

    # --- from the server to the client -------------------------------------------------------

    def _answer(self) -> None:
        for kind, body in _messages(self._server):
            asked = self._asked[0] if self._asked else None
            if asked is not None and kind == b"C":
                asked.tags.append(body.rstrip(b"\0").decode())
            lost = asked is not None and asked.cut in ("after", "unanswered")
            if not lost:
                self._proxy.wait_open()
                self._client.sendall(kind + _length(body) + body)
            if asked is not None and kind == b"Z":
                self._asked.popleft()
                asked.status = body.decode()
                self._proxy.note(asked)
                if asked.cut == "after":
                    return


def _messages(end: socket.socket) -> Iterator[tuple[bytes, bytes]]:
    """Yield the messages that arrive, as kind and body."""
    with end.makefile("rb") as arriving:
        while len(head := arriving.read(5)) == 5:
            length = struct.unpack(">i", head[1:])[0] - 4
            body = arriving.read(length)
            if len(body) < length:
                return
            yield head[:1], body


def _length(body: bytes) -> bytes:
    return struct.pack(">i", len(body) + 4)


def _exactly(end: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        more = end.recv(size - len(found))
        if not more:
            raise EOFError
        found += more
    return found


def _listening() -> tuple[socket.socket, int]:
    while True:
        listener, port = socket.socket(), free_port()
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            listener.close()
        else:
            listener.listen(200)
            return listener, port


def _reset(end: socket.socket) -> None:
    """Reset a connection, as a machine does after a power cycle."""
    with contextlib.suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    # Shut down first: a thread that reads from the socket would keep it open.
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()
