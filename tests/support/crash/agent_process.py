"""Client of `agent_worker`: starts an agent process, sends messages, reads its lines, kills it."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

TTL: Final = 5.0
"""Seconds until the lease of a killed agent expires on PostgreSQL.

Longer than a busy machine pauses a process; otherwise a running agent would lose its lease.
"""
SESSION_MANAGER: Final = "manager:"
"""Prefix of the address of a folder that a SessionManager uses."""
_PATIENCE: Final = 120.0


class Agent:
    """A process with an agent."""

    def __init__(
        self,
        where: str,
        url: str,
        journal: Path,
        *,
        resume_within: float = 86_400.0,
        ttl: float = TTL,
    ) -> None:
        worker = Path(__file__).with_name("agent_worker.py")
        wanted = [where, url, str(journal), str(ttl), str(resume_within)]
        self._process = subprocess.Popen(
            [sys.executable, str(worker), *wanted], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self._heard = b""

    def send(self, **wanted: str) -> None:
        """Send a command."""
        self._stdin.write(json.dumps(wanted).encode() + b"\n")
        self._stdin.flush()

    def lines(self) -> list[list[Any]]:
        """Return the lines received so far, without a line that a kill cut off."""
        return [json.loads(line) for line in self._heard.splitlines(True) if line.endswith(b"\n")]

    def until(self, word: str, times: int) -> None:
        """Read until the word was received `times` times."""
        while sum(line[0] == word for line in self.lines()) < times:
            assert self._listen(), f"it ended before it said {word!r}: {self.lines()}"

    def pause(self) -> None:
        """Pause the process, as a busy machine does."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Continue the process after a pause."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> list[list[Any]]:
        """Kill the process with SIGKILL and return all its lines."""
        self._process.send_signal(signal.SIGKILL)
        return self._ended(-signal.SIGKILL)

    def end(self) -> list[list[Any]]:
        """Let the process end by itself and return all its lines."""
        self._stdin.close()
        return self._ended(0)

    def close(self) -> None:
        """Kill the process and close its pipes."""
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()
        self._stdout.close()

    def _ended(self, code: int) -> list[list[Any]]:
        while self._listen():
            pass
        assert self._process.wait() == code
        return self.lines()

    def _listen(self) -> bool:
        ready, _, _ = select.select([self._stdout], [], [], _PATIENCE)
        assert ready, f"silent for {_PATIENCE:g} s, its last words: {self.lines()[-5:]}"
        heard = os.read(self._stdout.fileno(), 1 << 16)
        self._heard += heard
        return bool(heard)
