"""Three PostgreSQL servers under Patroni and etcd, on loopback, with synchronous replication.

They use Debian's packages patroni, etcd-server, python3-etcd and postgresql.
"""

import contextlib
import json
import os
import signal
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import psycopg

from support import needs
from support.packaged_postgres import PACKAGED, check_packaged
from support.postgres_server import Installation, Unavailable, attempts, descendants, free_port

NODES: Final = 3
_PASSWORD: Final = "patroni-test"
_TTL: Final = 10
"""Seconds until a leader that does not renew its lock is replaced."""


class PatroniCluster:
    """A cluster that runs from `start` to `close`."""

    def __init__(self, installation: Installation) -> None:
        self._installation = installation
        self._folder = installation.new_folder("patroni")
        self._etcd_ports = free_port(), free_port()
        self._etcd: Any = None
        self._rest = [free_port() for _ in range(NODES)]
        self._ports = [free_port() for _ in range(NODES)]
        self._nodes: list[Any] = [None] * NODES

    def __enter__(self) -> "PatroniCluster":
        try:
            self.start_etcd()
            for number in range(NODES):
                self._configure(number)
            self.start_node(0)
            # The first node creates the database, and the others copy it.
            self._wait(lambda members: any(_is_leader(one) for one in members), "a first leader")
            for number in range(1, NODES):
                self.start_node(number)
            self.wait_until_complete()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def url(self) -> str:
        """URL with all servers; the store finds the one that accepts writes."""
        hosts = ",".join(f"127.0.0.1:{port}" for port in self._ports)
        return f"postgresql://postgres:{_PASSWORD}@{hosts}/postgres?connect_timeout=2"

    # --- etcd --------------------------------------------------------------------------------

    def start_etcd(self) -> None:
        """Start etcd with its existing data."""
        client, peer = (f"http://127.0.0.1:{port}" for port in self._etcd_ports)
        self._etcd = self._installation.start(
            "etcd",
            *("--enable-v2", "--data-dir", f"{self._folder}/etcd"),
            *("--listen-client-urls", client, "--advertise-client-urls", client),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
            *("--initial-cluster", f"default={peer}"),
            log=self._folder / "etcd.log",
        )

    def kill_etcd(self) -> None:
        """Kill etcd with SIGKILL."""
        self._etcd.signal(signal.SIGKILL)
        self._etcd.wait()

    # --- nodes -------------------------------------------------------------------------------

    def start_node(self, number: int) -> None:
        """Start Patroni, which starts its server and rewinds it if necessary."""
        self._nodes[number] = self._installation.start(
            "patroni",
            str(self._folder / f"{number}.json"),
            log=self._folder / f"{number}.log",
        )

    def kill_node(self, number: int) -> int:
        """Kill Patroni and its server with SIGKILL; return the number of processes."""
        # Pause it first, so that Patroni starts no new process.
        self.pause_node(number)
        killed = self._signal(number, signal.SIGKILL)
        self._nodes[number].wait()
        return killed

    def pause_node(self, number: int) -> int:
        """Stop all processes of a node with SIGSTOP, as a paused virtual machine."""
        return self._signal(number, signal.SIGSTOP)

    def continue_node(self, number: int) -> None:
        """Continue all processes of a node."""
        self._signal(number, signal.SIGCONT)

    def _signal(self, number: int, which: signal.Signals) -> int:
        roots = [self._nodes[number].pid]
        with contextlib.suppress(OSError, ValueError, IndexError):
            lines = (self._data(number) / "postmaster.pid").read_text().splitlines()
            roots.append(int(lines[0]))
        found = [pid for root in roots for pid in (root, *descendants(root))]
        sent = 0
        for pid in dict.fromkeys(found):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, which)
                sent += 1
        return sent

    # --- state reported by Patroni -----------------------------------------------------------

    def leader(self) -> int:
        """Wait for a leader and return its number."""
        members = self._wait(lambda all_: any(_is_leader(one) for one in all_), "a leader")
        [leader] = [one for one in members if _is_leader(one)]
        return int(leader["name"].removeprefix("n"))

    def wait_for_another_leader(self, old: int) -> int:
        """Wait until another node is the leader."""
        self._wait(
            lambda all_: any(_is_leader(one) and one["name"] != f"n{old}" for one in all_),
            "another leader",
            but=old,
        )
        return self.leader_besides(old)

    def wait_for_no_leader(self, old: int) -> None:
        """Wait until the server of this node no longer accepts writes."""
        for _ in (one for _ in range(3) for one in attempts()):
            if not self._takes_writes(old):
                return
        raise Unavailable(f"n{old} takes writes without etcd\n{self.said()}")

    def _takes_writes(self, number: int) -> bool:
        url = f"postgresql://postgres:{_PASSWORD}@127.0.0.1:{self._ports[number]}/postgres"
        try:
            with psycopg.connect(url, connect_timeout=2, autocommit=True) as connection:
                found = connection.execute("SELECT pg_is_in_recovery()").fetchone()
        except psycopg.Error:
            return False
        return found == (False,)

    def leader_besides(self, old: int) -> int:
        """Return the leader as the other nodes see it."""
        [leader] = [one for one in self._members(but=old) if _is_leader(one)]
        return int(leader["name"].removeprefix("n"))

    def wait_until_complete(self) -> None:
        """Wait until all nodes run and one of them replicates synchronously."""

        def complete(members: list[dict[str, Any]]) -> bool:
            roles = sorted(one.get("role", "") for one in members)
            runs = all(one.get("state") in ("running", "streaming") for one in members)
            return runs and roles == ["leader", "replica", "sync_standby"]

        self._wait(complete, "all nodes")

    def _wait(
        self, holds: Callable[[list[dict[str, Any]]], bool], what: str, *, but: int | None = None
    ) -> list[dict[str, Any]]:
        members: list[dict[str, Any]] = []
        # Three times as long: a cluster is slower than a server.
        for _ in (one for _ in range(3) for one in attempts()):
            members = self._members(but=but)
            if holds(members):
                return members
        raise Unavailable(f"waited in vain for {what}: {members}\n{self.said()}")

    def _members(self, *, but: int | None = None) -> list[dict[str, Any]]:
        """Return all nodes as reported by the first node that answers."""
        for number, port in enumerate(self._rest):
            if number != but:
                with contextlib.suppress(OSError, ValueError):
                    url = f"http://127.0.0.1:{port}/cluster"
                    with urllib.request.urlopen(url, timeout=2) as answer:
                        return list(json.load(answer)["members"])
        return []

    def said(self) -> str:
        """Return the last lines of all logs."""
        logs = sorted(self._folder.glob("*.log"))
        return "\n".join(f"{log.name}: {log.read_text(errors='replace')[-1500:]}" for log in logs)

    def close(self) -> None:
        """Kill all processes."""
        for number in range(NODES):
            if self._nodes[number] is not None:
                self._signal(number, signal.SIGKILL)
        for process in (*self._nodes, self._etcd):
            if process is not None:
                process.signal(signal.SIGKILL)
                process.wait()

    def _data(self, number: int) -> Path:
        return self._folder / f"data{number}"

    def _configure(self, number: int) -> None:
        here = "127.0.0.1"
        rest, port = f"{here}:{self._rest[number]}", f"{here}:{self._ports[number]}"
        file = self._folder / f"{number}.json"
        settings = {
            "scope": "steno",
            "name": f"n{number}",
            "restapi": {"listen": rest, "connect_address": rest},
            # Use etcd's older API: with the newer one, Patroni 3.0 cannot name another synchronous
            # standby after a failover ("Synchronous replication key updated by someone else").
            "etcd": {"hosts": f"{here}:{self._etcd_ports[0]}"},
            "bootstrap": {
                "dcs": {
                    "ttl": _TTL,
                    "loop_wait": 2,
                    "retry_timeout": 4,
                    "synchronous_mode": True,
                    "postgresql": {
                        "use_pg_rewind": True,
                        "parameters": {"max_connections": 100, "synchronous_commit": "on"},
                    },
                },
                "initdb": [{"encoding": "UTF8"}, "data-checksums", "no-locale"],
                "pg_hba": [f"host {what} all {here}/32 md5" for what in ("replication", "all")],
            },
            "postgresql": {
                "listen": port,
                "connect_address": port,
                "data_dir": str(self._data(number)),
                "bin_dir": str(PACKAGED / "bin"),
                "authentication": {
                    "replication": {"username": "replicator", "password": _PASSWORD},
                    "superuser": {"username": "postgres", "password": _PASSWORD},
                    "rewind": {"username": "rewind", "password": _PASSWORD},
                },
                "parameters": {"unix_socket_directories": str(self._folder)},
                "pgpass": str(self._folder / f"pgpass{number}"),
            },
        }
        # Patroni reads YAML, which includes JSON.
        file.write_text(json.dumps(settings))
        if self._installation.account is not None:
            self._installation.account.owns(file)


@contextlib.contextmanager
def patroni_cluster() -> Iterator[PatroniCluster]:
    """Run a cluster. The test is NOT RUN if a package is missing."""
    needs.tool("patroni", "etcd")
    check_packaged()
    probe = ["/usr/bin/python3", "-c", "import etcd, patroni"]
    if subprocess.run(probe, check=False, capture_output=True).returncode != 0:
        needs.lacking("not installed: python3-etcd")
    with Installation(PACKAGED) as installation, PatroniCluster(installation) as cluster:
        yield cluster


def _is_leader(member: dict[str, Any]) -> bool:
    return member.get("role") == "leader" and member.get("state") == "running"
