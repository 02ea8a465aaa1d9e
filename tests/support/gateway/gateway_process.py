"""`steno serve` as a process: started, asked, killed, and started again at the same port."""

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
    """One gateway. The same object can be started again after its end."""

    def __init__(self, place: Path, *, sessions: str, model: str, config: str = "") -> None:
        """`place`: a folder for its token, its settings and its words."""
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
        """What it tells people."""
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """The number of the process."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> "Process":
        """Start it, and wait until it listens."""
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
        """Send it a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    def ended(self) -> int:
        """Wait for its end; the exit code."""
        assert self._process is not None
        assert self._process.stdout is not None
        code = self._process.wait(_PATIENCE)
        self._process.stdout.close()
        self._process = None
        return code

    def kill(self) -> None:
        """Kill it with -9."""
        self.signal(signal.SIGKILL)
        assert self.ended() == -signal.SIGKILL

    def stop(self) -> int:
        """Ask it to end; the exit code."""
        self.signal(signal.SIGTERM)
        return self.ended()

    def close(self) -> None:
        """Leave nothing of it behind."""
        if self._process is not None and self._process.stdout is not None:
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()
            self._process = None


def free_port() -> int:
    """A port that nobody listens at, below those that the system gives out by itself."""
    with socket.socket() as probing:
        probing.bind(("127.0.0.1", 0))
        port: int = probing.getsockname()[1]
        return port
