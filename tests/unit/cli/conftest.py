"""A workspace to look at from the shell, and `steno` as a function and as a process."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from stenolog.cli import main
from stenolog.stores.open_store import open_store
from support.cli import InTerminal, Steno


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to stand in, with a workspace of three sessions in it."""
    monkeypatch.chdir(tmp_path)
    with open_store("workspace") as store:
        for number in range(1, 5):
            role = "user" if number % 2 else "assistant"
            store.add_message("telegram:123", role, f"message {number}")
        store.checkpoint("telegram:123", summary="They counted to two.", upto=2)
        call = {"id": "1", "function": {"name": "ls", "arguments": "{}"}}
        store.add_full_message("cli:default", {"role": "assistant", "tool_calls": [call]})
        parts = [{"type": "text", "text": "a.txt"}, {"type": "image", "url": "b"}]
        store.add_full_message("cli:default", {"role": "tool", "content": parts, "id": "1"})
        store.add_message("日本:\n語", "user", "こんにちは")
    return tmp_path


@pytest.fixture
def steno() -> Steno:
    """Run a command in this process."""

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(main, arguments, prog_name="steno")

    return run


@pytest.fixture
def in_terminal() -> InTerminal:
    """Run a command whose stdout and stderr are a terminal; its exit code and what it showed."""

    def run(*arguments: str, **environment: str) -> tuple[int, str]:
        master, slave = pty.openpty()
        # On a busy machine the catalog takes long enough for its progress bar to appear.
        program = (
            "from stenolog.cli import list_search, main;"
            "list_search._PROGRESS_DELAY_SECONDS = float('inf');"
            "main(prog_name='steno')"
        )
        with subprocess.Popen(
            [sys.executable, "-c", program, *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", **environment},
        ) as process:
            os.close(slave)
            shown = b""
            while True:
                try:
                    part = os.read(master, 65536)
                except OSError:  # how a terminal says that its last writer is gone
                    break
                if not part:
                    break
                shown += part
            os.close(master)
        return process.returncode, shown.decode().replace("\r\n", "\n")

    return run
