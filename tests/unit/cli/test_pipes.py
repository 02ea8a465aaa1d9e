"""Whoever reads the output may have enough of it: `steno show KEY | head -1`."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from stenolog.stores.open_store import open_store

_PAGE: Final = 4096


@pytest.mark.parametrize(
    "arguments",
    [["list"], ["show", "k"], ["export", "k"], ["search", "word", "--limit", "999"]],
    ids=lambda arguments: str(arguments[0]),
)
def test_closed_pipe_ends_the_command_silently(tmp_path: Path, arguments: list[str]) -> None:
    with open_store(tmp_path / "workspace") as store:
        messages = [{"role": "user", "content": "word " * 200} for _ in range(300)]
        store.add_messages("k", messages)
        for number in range(1, 200):
            store.add_message(f"{number}{'x' * 900}", "user", "hello")
    program = "from stenolog.cli import main; main(prog_name='steno')"
    reading, writing = os.pipe()
    # The pipe holds one page, so the program still waits to write when the reader goes away.
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, _PAGE)
    with subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        cwd=tmp_path,
        stdout=writing,
        stderr=subprocess.PIPE,
    ) as process:
        os.close(writing)
        first = os.read(reading, 1)
        os.close(reading)
        assert process.stderr is not None
        said = process.stderr.read()
    assert first != b""
    assert (process.returncode, said) == (141, b"")


@pytest.mark.parametrize("closed", [1, 2])
@pytest.mark.parametrize(
    "arguments", [["list"], ["ask", "hi", "--model", "scripted"], ["nonsense"]]
)
def test_closed_standard_streams_are_tolerated(
    tmp_path: Path, arguments: list[str], closed: int
) -> None:
    with open_store(tmp_path / "workspace") as store:
        store.add_message("k", "user", "hello")
    program = "from stenolog.cli import main; main(prog_name='steno')"
    ended = subprocess.run(
        ["sh", "-c", f'exec "$0" "$@" {closed}>&-', sys.executable, "-c", program, *arguments],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == (2 if arguments == ["nonsense"] else 0), ended.stderr
    assert "Traceback" not in ended.stderr
    wrong = "No such command" in ended.stdout + ended.stderr
    assert wrong == (arguments == ["nonsense"] and closed == 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["config", "show"], "Cannot write the output: No space left on device."),
        (["view", "n" * 300], f"{'n' * 300}: File name too long."),
    ],
    ids=["output", "file"],
)
def test_error_of_a_file_is_not_reported_as_an_error_of_the_output(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    command = [sys.executable, "-m", "stenolog", *arguments]
    # Unbuffered output has nothing left to write when Python ends.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with Path("/dev/full").open("wb") as full:
        ended = subprocess.run(
            command, cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, env=environment
        )
    assert ended.returncode == 1
    assert ended.stderr.decode().removeprefix("Error: ").replace(f"{tmp_path}/", "") == (
        f"{message}\n"
    )
