"""Rows about the PostgreSQL store, beside the bare driver and two peers, all on one server.

Each repetition has a server of its own, on the disk that is measured, with the settings that
PostgreSQL comes with: `fsync` and `synchronous_commit` are on.
"""

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from itertools import count, cycle
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self
from uuid import uuid4

import stenolog
from measure import Figure, NotRun, Place, Rate, in_threads, in_turn, percentiles, timed
from messages import payload, sample
from reads import Peer

if TYPE_CHECKING:
    from psycopg import Connection

    from support.postgres_server import Server

PostgresPeer = Literal["langgraph_saver", "agents_sqlalchemy"]

_MESSAGES = sample(997)
_BODIES = [payload(message).decode() for message in _MESSAGES]
_BLOCK = 50
# What the tests change for their own sake is here as PostgreSQL comes.
_SETTINGS = {
    "max_connections": "100",
    "shared_buffers": "128MB",
    "max_wal_size": "1GB",
    "min_wal_size": "80MB",
    "jit": "on",
    "timezone": "UTC",
    "datestyle": "ISO, MDY",
    "bytea_output": "hex",
    # Nobody comes that way, and the path may be too long for one.
    "unix_socket_directories": "",
}
_CREATE = """
CREATE TABLE IF NOT EXISTS bare (
    session int8 NOT NULL, seq int8 NOT NULL, body text NOT NULL, PRIMARY KEY (session, seq)
)
"""


@contextmanager
def server(place: Place) -> Iterator["Server"]:
    """A server that nobody else uses, with its files below the run's folder. Raises NotRun.

    As root it runs under another uid: where that one cannot enter the run's folder, the files are
    in a temporary folder, if that is on the same disk.
    """
    _with_tests()
    try:
        from support.postgres_server import Installation, Unavailable
    except ImportError as error:
        raise NotRun(f"{error}: pip install -e '.[dev]'") from error
    try:
        with Installation(places=_on_the_same_disk(place.folder)) as installation:
            yield installation.server(**_SETTINGS).start()
    except Unavailable as error:
        raise NotRun(f"PostgreSQL: {' '.join(str(error).split())}") from error


def about() -> str:
    """Which server and driver these rows are measured with; empty where they cannot be."""
    _with_tests()
    try:
        from support.postgres_server import Unavailable, carried_programs

        program = carried_programs() / "bin" / "postgres"
    except (ImportError, Unavailable):
        return ""
    said = subprocess.run([program, "--version"], check=True, capture_output=True, text=True)
    return f"PostgreSQL {said.stdout.split()[-1]}, psycopg {version('psycopg')}"


def _with_tests() -> None:
    """Let what the tests start servers with be imported."""
    tests = str(Path(__file__).resolve().parent.parent / "tests")
    if tests not in sys.path:
        sys.path.append(tests)


def _on_the_same_disk(folder: Path) -> list[Path]:
    disk = folder.stat().st_dev
    others = [Path(tempfile.gettempdir()), Path("/var/tmp")]
    return [folder, *(other for other in others if other.is_dir() and other.stat().st_dev == disk)]


def driver(url: str) -> "Connection[tuple[Any, ...]]":
    """A connection of the bare driver."""
    import psycopg

    return psycopg.connect(url, autocommit=True)


class BareDriver:
    """The limit: one prepared INSERT through the same driver, a commit by itself."""

    def __init__(self, url: str, session: int) -> None:
        self._connection = driver(url)
        self._cursor = self._connection.cursor()
        self._session = session
        self._seqs = count(1)
        self._bodies = cycle(_BODIES)

    def append(self) -> None:
        """One row, durable."""
        self._cursor.execute(
            "INSERT INTO bare (session, seq, body) VALUES (%s, %s, %s)",
            (self._session, next(self._seqs), next(self._bodies)),
            prepare=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._connection.close()


def appender(store: stenolog.Store) -> Callable[[], int]:
    """Appends to a session of its own, which has its first message."""
    messages = cycle(_MESSAGES)
    key = f"append-{uuid4().hex[:12]}"
    store.add_full_message(key, next(messages))
    return lambda: store.add_full_message(key, next(messages))


def postgres_append(place: Place, *, clients: int) -> Figure:
    """The rate of so many clients, each on a session of its own, as a share of the bare driver's.

    Of one client, the p50 of a call.
    """
    with ExitStack() as opened:
        running = opened.enter_context(server(place))
        running.execute(_CREATE)
        bares = [
            opened.enter_context(BareDriver(running.url(), session)) for session in range(clients)
        ]
        store = opened.enter_context(_opened(running))
        appends = [appender(store) for _ in bares]
        for action in (*(bare.append for bare in bares), *appends):
            timed(10, action)
        bare_actions = [bare.append for bare in bares]
        if clients == 1:
            bare_times, times = in_turn(
                place.times(40),
                lambda: timed(_BLOCK, bare_actions[0]),
                lambda: timed(_BLOCK, appends[0]),
            )
            raw, ours = percentiles(bare_times), percentiles(times)
            return Figure(measured=raw["p50_us"] / ours["p50_us"], ours=ours, raw=raw)
        raw_rate, our_rate = Rate(), Rate()
        for _ in range(4):
            in_threads(bare_actions, place.seconds(1.2), raw_rate)
            in_threads(appends, place.seconds(1.2), our_rate)
    return _against(our_rate, raw_rate)


def postgres_peer(place: Place, *, peer: PostgresPeer, clients: int, peer_python: Path) -> Figure:
    """How many times as fast as a peer so many clients append."""
    with (
        server(place) as running,
        _opened(running) as store,
        Peer(
            place,
            peer_python,
            _MESSAGES,
            program=f"{peer}.py",
            arguments=(running.url(), str(clients)),
        ) as other,
    ):
        appends = [appender(store) for _ in range(clients)]
        for append in appends:
            timed(10, append)
        other.ask("append", times=10)
        if clients == 1:
            peer_times, times = in_turn(
                place.times(20),
                lambda: _asked(other, _BLOCK),
                lambda: timed(_BLOCK, appends[0]),
            )
            raw, ours = percentiles(peer_times), percentiles(times)
            return Figure(measured=raw["p50_us"] / ours["p50_us"], ours=ours, raw=raw)
        peer_rate, our_rate = Rate(), Rate()
        for _ in range(3):
            answer = other.ask("rate", seconds=place.seconds(1.2))
            peer_rate.add(answer["seconds"], answer["each"])
            in_threads(appends, place.seconds(1.2), our_rate)
    return _against(our_rate, peer_rate)


def _opened(running: "Server") -> stenolog.Store:
    return stenolog.open_store(f"{running.url()}?connections=32")


def _asked(peer: Peer, times: int) -> list[float]:
    found: Sequence[Any] = peer.ask("append", times=times)
    return list(found)


def _against(ours: Rate, raw: Rate) -> Figure:
    return Figure(measured=ours.per_second / raw.per_second, ours=ours.side(), raw=raw.side())
