"""`steno serve` as a process that can be killed and restarted on the same port."""

import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Final

TOKEN: Final = "p" * 43
_PATIENCE: Final = 120.0


class Process:
    """One gateway. It can be started again after its end."""

    def __init__(self, place: Path, *, sessions: str, model: str, config: str = "") -> None:
        """Create a gateway. `place` is a folder for its token, settings and output."""
        place.mkdir(parents=True, exist_ok=True)
        self._token = place / "token"
        self._token.write_text(TOKEN)
        self._token.chmod(0o600)
        self._config = place / "config.toml"
        self._config.write_text(
            f"[agent]\nsessions = '{sessions}'\nmodel = 'served'\n"
            f"[models.served]\nbase_url = '{model}'\nmodel = 'scripted'\nretries = 0\n"
            "[memory]\nconsolidation = false\n"
            f"[gateway]\ntoken_file = '{self._token}'\n{config}"
        )
        self._config.chmod(0o600)
        self._place = place
        self.words = place / "stderr"
        """File with the standard error of the process."""
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Address of the gateway."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Pid of the process."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> "Process":
        """Start the process and wait until it listens."""
        command = ["serve", "--port", str(self.port), "--config", str(self._config)]
        with self.words.open("ab") as words:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "stenolog", *command],
                stdout=subprocess.PIPE,
                stderr=words,
                cwd=self._place,
                env={**os.environ, "HOME": str(self._place)},
            )
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], _PATIENCE)
        assert ready, self.words.read_text()
        assert b"Listening" in self._process.stdout.readline(), self.words.read_text()
        return self

    def signal(self, number: int) -> None:
        """Send a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    def ended(self) -> int:
        """Wait for the end and return the exit code."""
        assert self._process is not None
        assert self._process.stdout is not None
        code = self._process.wait(_PATIENCE)
        self._process.stdout.close()
        self._process = None
        return code

    def kill(self) -> None:
        """Kill the process with SIGKILL."""
        self.signal(signal.SIGKILL)
        assert self.ended() == -signal.SIGKILL

    def stop(self) -> int:
        """Terminate the process and return the exit code."""
        self.signal(signal.SIGTERM)
        return self.ended()

    def close(self) -> None:
        """Kill the process and close its pipes."""
        if self._process is not None and self._process.stdout is not None:
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()
            self._process = None


def free_port() -> int:
    """Return a free port below the range that the system assigns."""
    with socket.socket() as probing:
        probing.bind(("127.0.0.1", 0))
        port: int = probing.getsockname()[1]
        return port
