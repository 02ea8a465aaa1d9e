"""Rows about the PostgreSQL store, compared with the bare driver and two peers on one server.

Each repetition starts its own server on the measured disk, with PostgreSQL's default settings:
`fsync` and `synchronous_commit` are on.
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
from measure import (
    Context,
    Measurement,
    NotRun,
    Rate,
    alternate,
    percentiles,
    run_threads,
    time_calls,
)
from messages import payload, sample
from reads import Peer

if TYPE_CHECKING:
    from psycopg import Connection

    from support.postgres_server import Server

PostgresPeer = Literal["langgraph_saver", "agents_sqlalchemy"]

_MESSAGES = sample(997)
_BODIES = [payload(message).decode() for message in _MESSAGES]
_BLOCK = 50
# The tests change these settings. The benchmarks use PostgreSQL's defaults.
_SETTINGS = {
    "max_connections": "100",
    "shared_buffers": "128MB",
    "max_wal_size": "1GB",
    "min_wal_size": "80MB",
    "jit": "on",
    "timezone": "UTC",
    "datestyle": "ISO, MDY",
    "bytea_output": "hex",
    # No client uses a Unix socket, and the path of the folder may be too long for a socket.
    "unix_socket_directories": "",
}
_CREATE = """
CREATE TABLE IF NOT EXISTS bare (
    session int8 NOT NULL, seq int8 NOT NULL, body text NOT NULL, PRIMARY KEY (session, seq)
)
"""


@contextmanager
def server(context: Context) -> Iterator["Server"]:
    """Run a PostgreSQL server with its files in the run's folder. Raises NotRun.

    If the benchmark runs as root, the server runs as another user. If this user cannot enter the
    run's folder, the files are in a temporary folder on the same disk.
    """
    _add_tests_to_path()
    try:
        from support.postgres_server import Installation, Unavailable
    except ImportError as error:
        raise NotRun(f"{error}: pip install -e '.[dev]'") from error
    try:
        with Installation(places=_folders_on_same_disk(context.folder)) as installation:
            yield installation.server(**_SETTINGS).start()
    except Unavailable as error:
        raise NotRun(f"PostgreSQL: {' '.join(str(error).split())}") from error


def describe() -> str:
    """Return the versions of the server and the driver, or "" if these rows cannot run."""
    _add_tests_to_path()
    try:
        from support.postgres_server import Unavailable, carried_programs

        program = carried_programs() / "bin" / "postgres"
    except (ImportError, Unavailable):
        return ""
    output = subprocess.run([program, "--version"], check=True, capture_output=True, text=True)
    return f"PostgreSQL {output.stdout.split()[-1]}, psycopg {version('psycopg')}"


def _add_tests_to_path() -> None:
    """Make the server helpers of the tests importable."""
    tests = str(Path(__file__).resolve().parent.parent / "tests")
    if tests not in sys.path:
        sys.path.append(tests)


def _folders_on_same_disk(folder: Path) -> list[Path]:
    disk = folder.stat().st_dev
    others = [Path(tempfile.gettempdir()), Path("/var/tmp")]
    return [
        folder,
        *(other for other in others if other.is_dir() and other.stat().st_dev == disk),
    ]


def connect(url: str) -> "Connection[tuple[Any, ...]]":
    """Connect with the bare driver."""
    import psycopg

    return psycopg.connect(url, autocommit=True)


class BareDriver:
    """The lower limit: one prepared INSERT with autocommit through the same driver."""

    def __init__(self, url: str, session: int) -> None:
        self._connection = connect(url)
        self._cursor = self._connection.cursor()
        self._session = session
        self._seqs = count(1)
        self._bodies = cycle(_BODIES)

    def append(self) -> None:
        """Insert one row and commit."""
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
    """Create a session with one message and return a function that appends to it."""
    messages = cycle(_MESSAGES)
    key = f"append-{uuid4().hex[:12]}"
    store.add_full_message(key, next(messages))
    return lambda: store.add_full_message(key, next(messages))


def postgres_append(context: Context, *, clients: int) -> Measurement:
    """Measure the rate of `clients` clients with a session each, as a share of the bare driver's.

    For one client, compare the p50 of a call.
    """
    with ExitStack() as stack:
        postgres = stack.enter_context(server(context))
        postgres.execute(_CREATE)
        drivers = [
            stack.enter_context(BareDriver(postgres.url(), session)) for session in range(clients)
        ]
        store = stack.enter_context(_open_store(postgres))
        appends = [appender(store) for _ in drivers]
        for action in (*(bare.append for bare in drivers), *appends):
            time_calls(10, action)
        bare_actions = [bare.append for bare in drivers]
        if clients == 1:
            bare_times, times = alternate(
                context.times(40),
                lambda: time_calls(_BLOCK, bare_actions[0]),
                lambda: time_calls(_BLOCK, appends[0]),
            )
            raw, ours = percentiles(bare_times), percentiles(times)
            return Measurement(measured=raw["p50_us"] / ours["p50_us"], ours=ours, raw=raw)
        raw_rate, our_rate = Rate(), Rate()
        for _ in range(4):
            run_threads(bare_actions, context.seconds(1.2), raw_rate)
            run_threads(appends, context.seconds(1.2), our_rate)
    return _compare_rates(our_rate, raw_rate)


def postgres_peer(
    context: Context, *, peer: PostgresPeer, clients: int, peer_python: Path
) -> Measurement:
    """Measure how many times faster than with the peer `clients` clients append."""
    with (
        server(context) as postgres,
        _open_store(postgres) as store,
        Peer(
            context,
            peer_python,
            _MESSAGES,
            program=f"{peer}.py",
            arguments=(postgres.url(), str(clients)),
        ) as peer_process,
    ):
        appends = [appender(store) for _ in range(clients)]
        for append in appends:
            time_calls(10, append)
        peer_process.ask("append", times=10)
        if clients == 1:
            peer_times, times = alternate(
                context.times(20),
                lambda: _peer_times(peer_process, _BLOCK),
                lambda: time_calls(_BLOCK, appends[0]),
            )
            raw, ours = percentiles(peer_times), percentiles(times)
            return Measurement(measured=raw["p50_us"] / ours["p50_us"], ours=ours, raw=raw)
        peer_rate, our_rate = Rate(), Rate()
        for _ in range(3):
            answer = peer_process.ask("rate", seconds=context.seconds(1.2))
            peer_rate.add(answer["seconds"], answer["durations"])
            run_threads(appends, context.seconds(1.2), our_rate)
    return _compare_rates(our_rate, peer_rate)


def _open_store(postgres: "Server") -> stenolog.Store:
    return stenolog.open_store(f"{postgres.url()}?connections=32")


def _peer_times(peer: Peer, times: int) -> list[float]:
    durations: Sequence[Any] = peer.ask("append", times=times)
    return list(durations)


def _compare_rates(ours: Rate, raw: Rate) -> Measurement:
    return Measurement(
        measured=ours.per_second / raw.per_second, ours=ours.stats(), raw=raw.stats()
    )
