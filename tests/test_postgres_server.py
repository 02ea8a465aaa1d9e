"""Tests the PostgreSQL servers of the tests: their account, their folder, and their cleanup."""

import os
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest

from support import needs
from support.pgbouncer import Bouncer
from support.postgres_keeper import is_gone
from support.postgres_proxy import Exchange, Moment, Proxy
from support.postgres_server import (
    Databases,
    Installation,
    Server,
    Unavailable,
    attempts,
    carried_programs,
    execute,
    two_hosts,
)

STARTED_BY_A_RUN = """
import sys, time
from support.postgres_server import Installation
installation = Installation()
server = installation.server().start()
print(installation.folder, server.pid, flush=True)
time.sleep(600)
"""


def _around(folder: Path) -> dict[Path, tuple[int, int, int]]:
    """Return mode and owner of a folder and of all its parents."""
    found = [(place, place.stat()) for place in (folder, *folder.parents)]
    return {place: (status.st_mode, status.st_uid, status.st_gid) for place, status in found}


def _users() -> list[bytes]:
    names = ("/etc/passwd", "/etc/group", "/etc/shadow")
    return [Path(name).read_bytes() for name in names if os.access(name, os.R_OK)]


@pytest.fixture
def programs() -> Path:
    try:
        return carried_programs()
    except Unavailable as error:
        needs.lacking(str(error))


def test_no_user_is_added_and_no_mode_outside_changes(programs: Path) -> None:
    users, around = _users(), _around(programs / "bin")
    with Installation() as installation:
        outside = _around(installation.folder.parent)
        installation.server().start().execute("select 1")
        own = installation.folder.stat()
        assert stat.S_IMODE(own.st_mode) == 0o700
        assert own.st_uid != 0
        assert _around(installation.folder.parent) == outside
    assert (_users(), _around(programs / "bin")) == (users, around)
    assert not installation.folder.exists()


def test_programs_that_the_account_cannot_reach_are_copied(programs: Path, tmp_path: Path) -> None:
    needs.root()
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o700)
    hidden = locked / programs.parent.name / programs.name
    shutil.copytree(programs, hidden, symlinks=True)
    libraries = programs.parent.with_name(f"{programs.parent.name}.libs")
    shutil.copytree(libraries, locked / libraries.name)
    around = _around(hidden)
    with Installation(hidden) as installation:
        assert not installation.programs.is_relative_to(locked)
        primary = installation.server().start()
        assert primary.standby().execute("select pg_is_in_recovery()") == [(True,)]
    assert _around(hidden) == around
    assert not installation.programs.exists()


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGINT], ids=["kill -9", "Ctrl-C"])
def test_processes_and_folders_are_removed_when_the_run_is_ended(programs: Path, blow: int) -> None:
    assert programs.exists()
    search = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    with subprocess.Popen(
        [sys.executable, "-c", STARTED_BY_A_RUN],
        env={**os.environ, "PYTHONPATH": search},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as run:
        assert run.stdout is not None
        folder, pid = run.stdout.readline().split()
        assert Path(folder).is_dir()
        os.killpg(run.pid, blow)
    for _ in attempts():
        if is_gone(int(pid)) and not Path(folder).exists():
            break
    assert is_gone(int(pid))
    assert not Path(folder).exists()


def test_killed_server_recovers_its_data(
    postgres_installation: Installation,
) -> None:
    server = postgres_installation.server(fsync="on").start()
    server.execute("create table kept (n int)")
    server.execute("insert into kept values (1)")
    left = psycopg.connect(server.url())
    left.execute("insert into kept values (2)")
    assert server.kill9() > 2
    assert not server.runs()
    with pytest.raises(psycopg.OperationalError, match="closed the connection"):
        left.commit()
    left.close()
    server.start()
    assert server.execute("select n from kept") == [(1,)]
    assert execute(server.socket_url(), "select n from kept") == [(1,)]
    server.stop()


def test_a_promoted_standby_is_reached_by_the_same_url(postgres_installation: Installation) -> None:
    primary = postgres_installation.server().start()
    standby = primary.standby()
    url = two_hosts(primary, standby, "postgres")
    execute(url, "create table kept (n int)")
    assert standby.execute("select count(*) from kept") == [(0,)]
    primary.kill9()
    standby.promote()
    execute(url, "insert into kept values (1)")
    assert standby.execute("select count(*) from kept") == [(1,)]
    standby.stop("immediate")


def test_each_database_is_new_and_is_dropped(postgres: Server) -> None:
    databases = Databases(postgres.url())
    one, other = databases.new(), databases.new()
    execute(one, "create table t ()")
    with pytest.raises(psycopg.errors.UndefinedTable):
        execute(other, "select * from t")
    left = psycopg.connect(one)
    databases.close()
    named = "select datname from pg_database where datname like 'steno_test%'"
    assert not {(one.rpartition("/")[2],), (other.rpartition("/")[2],)} & set(
        postgres.execute(named)
    )
    left.close()


def test_pgbouncer_gives_each_transaction_any_connection(bouncer: Bouncer, own_url: str) -> None:
    url = bouncer.url(own_url)
    with (
        psycopg.connect(url, autocommit=True) as one,
        psycopg.connect(url, autocommit=True) as other,
    ):
        backends = {c.execute("select pg_backend_pid()").fetchone() for c in (one, other)}
        assert len(backends) == 1


# --- the proxy ----------------------------------------------------------------------------------


@pytest.fixture
def table(own_url: str) -> str:
    execute(own_url, "create table t (n int)")
    return own_url


def _through(url: str, proxy: Proxy) -> str:
    head, _, database = url.rpartition("/")
    return f"{head.rpartition(':')[0]}:{proxy.port}/{database}"


@pytest.mark.parametrize(("moment", "stored"), [("before", 0), ("during", 0), ("after", 1)])
@pytest.mark.parametrize("prepare", [False, True], ids=["unnamed", "prepared"])
def test_exchange_is_cut_at_the_given_moment(
    postgres: Server, table: str, moment: Moment, stored: int, prepare: bool
) -> None:
    with (
        Proxy(postgres.port) as proxy,
        psycopg.connect(_through(table, proxy), autocommit=True) as client,
    ):
        client.execute("insert into t values (%s)", (1,), prepare=prepare)
        proxy.cut(moment)
        client.execute("select %s", (1,), prepare=prepare)
        with pytest.raises(psycopg.OperationalError):
            client.execute("insert into t values (%s)", (1,), prepare=prepare)
        assert execute(table, "select count(*) from t") == [(1 + stored,)]
        [cut] = [exchange for exchange in proxy.seen if exchange.cut]
        assert (cut.text, cut.tags) == ("insert into t values ($1)", ["INSERT 0 1"] * stored)
        with psycopg.connect(_through(table, proxy), autocommit=True) as again:
            again.execute("insert into t values (2)")


@pytest.mark.parametrize(("moment", "stored"), [("before", 0), ("after", 1)])
def test_the_commit_of_a_transaction_is_cut(
    postgres: Server, table: str, moment: Moment, stored: int
) -> None:
    def commits(exchange: Exchange) -> bool:
        return exchange.text.lower() == "commit"

    with (
        Proxy(postgres.port) as proxy,
        psycopg.connect(_through(table, proxy)) as client,
    ):
        proxy.cut(moment, commits)
        client.execute("insert into t values (1)")
        assert execute(table, "select count(*) from t") == [(0,)]
        with pytest.raises(psycopg.OperationalError):
            client.commit()
    assert execute(table, "select count(*) from t") == [(stored,)]


def test_paused_exchange_continues_when_released(postgres: Server, table: str) -> None:
    with (
        Proxy(postgres.port) as proxy,
        psycopg.connect(_through(table, proxy), autocommit=True) as client,
    ):
        proxy.hold()
        with pytest.raises(psycopg.OperationalError, match="timeout"):
            psycopg.connect(_through(table, proxy), connect_timeout=2)
        proxy.release()
        client.execute("insert into t values (1)")
        proxy.refuse()
        with pytest.raises(psycopg.OperationalError):
            psycopg.connect(_through(table, proxy))
        client.execute("insert into t values (2)")
        proxy.cut_all()
        with pytest.raises(psycopg.OperationalError):
            client.execute("insert into t values (3)")
    assert execute(table, "select n from t order by n") == [(1,), (2,)]
