"""PgBouncer in front of a test server: each transaction may run on any of its connections."""

import socket
import time
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit, urlunsplit

from support.postgres_server import USER, Installation, Server, Unavailable, free_port

CONNECTIONS: Final = 4
"""Number of server connections that all clients of a database share."""
_PATIENCE: Final = 120.0


class Bouncer:
    """A PgBouncer that runs until the installation is closed."""

    def __init__(self, installation: Installation, server: Server) -> None:
        """Start PgBouncer and wait until it listens. Raises Unavailable."""
        folder = installation.new_folder("b")
        users, settings = folder / "users", folder / "settings"
        users.write_text(f'"{USER}" "{installation.password}"\n')
        self.port = free_port()
        settings.write_text(
            "[databases]\n"
            f"* = host=127.0.0.1 port={server.port}\n"
            "[pgbouncer]\n"
            "pool_mode = transaction\n"
            "listen_addr = 127.0.0.1\n"
            f"listen_port = {self.port}\n"
            "unix_socket_dir =\n"
            "auth_type = plain\n"
            f"auth_file = {users}\n"
            f"default_pool_size = {CONNECTIONS}\n"
            "max_client_conn = 200\n"
            # Tests drop their databases while PgBouncer has connections to them.
            "server_idle_timeout = 5\n"
        )
        for file in (users, settings):
            file.chmod(0o600)
            if installation.account is not None:
                installation.account.owns(file)
        self._log = folder / "log"
        self._process = installation.start("pgbouncer", str(settings), log=self._log)
        self._wait()

    def _wait(self) -> None:
        limit = time.monotonic() + _PATIENCE
        while time.monotonic() < limit and self._process.runs():
            with socket.socket() as trial:
                if trial.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.01)
        raise Unavailable(f"PgBouncer does not start: {self.said()}")

    def said(self) -> str:
        """Return its log."""
        return Path(self._log).read_text(errors="replace")

    def url(self, url: str) -> str:
        """Return the URL of a database through PgBouncer."""
        parts = urlsplit(url)
        return urlunsplit(parts._replace(netloc=f"{parts.netloc.rpartition(':')[0]}:{self.port}"))
