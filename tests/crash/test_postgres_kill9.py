"""Tests that acknowledged messages survive kill -9 of the only PostgreSQL server under writers.

Also tests a database that is configured not to wait for its disk.
"""

from contextlib import ExitStack

import pytest

import stenolog
from support import needs
from support.contract.open_store_base import visible_texts
from support.crash.postgres_processes import Writer, judge, store_more
from support.crash.reporting import Say
from support.pgbouncer import Bouncer
from support.postgres_server import Installation


@pytest.mark.parametrize("kills", [1, pytest.param(15, marks=pytest.mark.full)])
def test_p1_p7_killed_server_neither_loses_nor_duplicates_acknowledged_messages(
    postgres_installation: Installation, say: Say, kills: int
) -> None:
    server = postgres_installation.server().start()
    where = server.url()
    with ExitStack() as stack:
        writers = [
            stack.enter_context(Writer("tokens" if n % 2 else "plain", where, f"w{n}"))
            for n in range(3)
        ]
        for _ in range(kills):
            store_more(writers, 20)
            server.kill9()
            server.start()
        store_more(writers, 20)
        for writer in writers:
            writer.stop()
        with stenolog.open_store(where) as store:
            told = judge(store, writers)
    say(f"server killed {kills} times under 3 writers; told: {dict(told)}")
    server.stop("immediate")


@pytest.mark.parametrize("way", ["directly", "through PgBouncer"])
def test_p1_synchronous_commit_is_enabled_if_the_database_has_it_off(
    postgres_installation: Installation, way: str
) -> None:
    # Data that no commit waits for stays in memory for ten seconds.
    server = postgres_installation.server(wal_writer_delay="10000").start()
    server.execute("create database hasty")
    server.execute("alter database hasty set synchronous_commit = off")
    where = server.url("hasty")
    if way != "directly":
        needs.tool("pgbouncer")
        where = Bouncer(postgres_installation, server).url(where)
    with stenolog.open_store(where) as store:
        store.add_message("a", "user", "1")
        store.add_message("a", "user", "2")
        store.add_message("a", "user", "3", once="t3")
        store.set_summary("a", "so far")
        server.kill9()
    server.start()
    with stenolog.open_store(server.url("hasty")) as store:
        assert visible_texts(store, "a") == ["1", "2", "3"]
        assert store.get_summary("a") == "so far"
    server.stop("immediate")
