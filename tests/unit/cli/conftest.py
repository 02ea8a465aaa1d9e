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


@pytest.fixture(params=["./workspace", "sqlite:some.db", "postgresql"])
def where(request: pytest.FixtureRequest) -> str:
    """A place of each kind, with a session of four messages, of which two are a summary."""
    place: str = request.param
    if place == "postgresql":
        place = request.getfixturevalue("own_url")
    with open_store(place, namespace="sessions") as store:
        if not store.list_sessions():
            for number in range(1, 5):
                role = "user" if number % 2 else "assistant"
                store.add_message("telegram:123", role, f"message {number}")
            store.checkpoint("telegram:123", summary="They counted to two.", upto=2)
            store.add_message("cli:default", "user", "hello")
    return place


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to stand in, with folders of the user in it, and without any model."""
    for name in list(os.environ):
        if name.endswith("_API_KEY") or name.startswith(("STENO_", "OLLAMA_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    # No Ollama of this machine: a port that nobody listens on.
    monkeypatch.setenv("OLLAMA_HOST", "http://127.0.0.1:1")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def steno() -> Steno:
    """Run a command in this process."""

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(main, arguments, prog_name="steno")

    return run


@pytest.fixture
def in_terminal() -> InTerminal:
    """Run a command in a terminal, where something is typed; its exit code and what it showed."""

    def run(*arguments: str, typed: str = "", **environment: str) -> tuple[int, str]:
        master, slave = pty.openpty()
        os.write(master, typed.encode())
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
