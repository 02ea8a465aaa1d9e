"""`steno view` in its own process, and digests of the folders that it shows."""

import os
import re
import signal
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx2


def state_of(place: Path) -> dict[str, tuple[int, int, int, str]]:
    """Return mode, time, size and digest of every file and folder."""
    found = {}
    for path in [place, *sorted(place.rglob("*"))]:
        status = path.lstat()
        content = path.read_bytes() if path.is_file() else b""
        found[str(path.relative_to(place))] = (
            status.st_mode,
            status.st_mtime_ns,
            status.st_size if path.is_file() else 0,
            sha256(content).hexdigest(),
        )
    return found


class Viewing:
    """A command that serves the viewer, with its own home folder."""

    def __init__(self, home: Path, *arguments: str) -> None:
        self.home = home
        home.mkdir(exist_ok=True)
        self._command = [sys.executable, "-m", "stenolog", *arguments]
        self.url = ""
        self.link = ""

    def __enter__(self) -> Self:
        kept = {"PATH", "PYTHONPATH", "TMPDIR", "COVERAGE_PROCESS_START"}
        environment = {name: value for name, value in os.environ.items() if name in kept}
        environment |= {"HOME": str(self.home)}
        self._errors = (self.home / "stderr").open("w+")
        self._process = subprocess.Popen(
            self._command,
            env=environment,
            cwd=self.home,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if found := re.match(r"Listening at (http://\S+)", line):
                self.url = found[1]
                if self._command[3] != "view":
                    break
            elif found := re.search(r"(http://\S+/login\?code=\S+)", line):
                self.link = found[1]
                break
        assert self.url, (self.home / "stderr").read_text()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.send_signal(signal.SIGINT)
        code = self._process.wait(60)
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._errors.close()
        if error is None:
            assert code == 0, (self.home / "stderr").read_text()

    @property
    def cache(self) -> Path:
        """Folder of the search index."""
        return self.home / ".cache" / "stenolog" / "view"

    @property
    def token(self) -> str:
        """The access token."""
        return (self.home / ".config" / "stenolog" / "gateway.token").read_text().strip()

    def client(self) -> httpx2.Client:
        """Return a client that has the token."""
        headers = {"Authorization": f"Bearer {self.token}"}
        return httpx2.Client(base_url=self.url, headers=headers, timeout=60)
