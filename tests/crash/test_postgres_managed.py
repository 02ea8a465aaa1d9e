"""Tests failovers that Patroni manages, while processes write.

The leader is killed, the leader is paused and continues later, and etcd is down for a while. No
acknowledged message is lost or stored twice, and the writers continue by themselves.
"""

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Final

import pytest

import stenolog
from support.crash.patroni_cluster import PatroniCluster, patroni_cluster
from support.crash.postgres_processes import Writer, judge, store_more
from support.crash.reporting import Say

WRITERS: Final = 4
ENOUGH: Final = 100
"""Number of messages that each writer stores before a fault, and after it."""


def _kill_the_leader(cluster: PatroniCluster) -> Callable[[], None]:
    leader = cluster.leader()
    cluster.kill_node(leader)
    cluster.wait_for_another_leader(leader)
    return lambda: cluster.start_node(leader)


def _pause_the_leader(cluster: PatroniCluster) -> Callable[[], None]:
    leader = cluster.leader()
    cluster.pause_node(leader)
    cluster.wait_for_another_leader(leader)
    return lambda: cluster.continue_node(leader)


def _take_etcd_away(cluster: PatroniCluster) -> Callable[[], None]:
    leader = cluster.leader()
    cluster.kill_etcd()
    # Without etcd a leader cannot keep its lock, and accepts no more writes.
    cluster.wait_for_no_leader(leader)
    cluster.start_etcd()
    cluster.leader()
    return lambda: None


@pytest.mark.full
def test_p1_p7_managed_failover_neither_loses_nor_duplicates_acknowledged_messages(
    say: Say,
) -> None:
    with patroni_cluster() as cluster, ExitStack() as stack:
        where = f"{cluster.url}&busy_timeout=5&answer_timeout=5"
        writers = [
            stack.enter_context(Writer("tokens" if n % 2 else "plain", where, f"w{n}"))
            for n in range(WRITERS)
        ]
        for fault in (_kill_the_leader, _pause_the_leader, _take_etcd_away):
            store_more(writers, ENOUGH)
            began = time.monotonic()
            repair = fault(cluster)
            elected = time.monotonic() - began
            store_more(writers, ENOUGH)
            gap = time.monotonic() - began
            repair()
            cluster.wait_until_complete()
            say(
                f"{fault.__name__.strip('_')}: a leader after {elected:.1f} s, "
                f"all writers went on within {gap:.1f} s"
            )
        store_more(writers, ENOUGH)
        for writer in writers:
            writer.stop()
        with stenolog.open_store(where) as store:
            say(f"managed failover: {dict(judge(store, writers))}")
