"""Shows that an acknowledged message survives `kill -9`: one process writes, another kills it.

Exits with 1 and says what is missing if a promise did not hold.
"""

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import stenolog

KEY = "demo:chat"
ROUNDS = 3


def main() -> None:
    """Kill a writer a few times over and compare what it was promised with what is there."""
    with tempfile.TemporaryDirectory(prefix="steno-demo-") as folder:
        workspace = Path(folder) / "workspace"
        print("A process appends messages to one conversation. An append that returned is")
        print("acknowledged. At a random moment the process is killed with signal 9.")
        acknowledged: dict[int, str] = {}
        for number in range(1, ROUNDS + 1):
            promised = _write_until_killed(workspace, number)
            acknowledged |= promised
            print(f"\nRound {number}: {len(promised)} messages acknowledged, then came the kill.")
            _compare(workspace, acknowledged)
        _append_again(workspace, acknowledged)
        _show_file(workspace)
    print(f"\nAll {len(acknowledged)} acknowledged messages are there, after {ROUNDS} kills.")


def write(workspace: Path, number: int) -> None:
    """Append until killed; after each append that returned, say so on standard output."""
    with stenolog.open_store(workspace) as store:
        count = 0
        while True:
            count += 1
            seq = store.add_message(KEY, "user", _content(number, count))
            os.write(1, f"{seq} {count}\n".encode())


def _content(number: int, count: int) -> str:
    # Lengths vary, so that the kill may also fall into the middle of a long line.
    return f"round {number}, message {count}" + ", and so on" * (count * 37 % 100)


def _write_until_killed(workspace: Path, number: int) -> dict[int, str]:
    """What the writer was promised: by seq, the content of every append that returned."""
    writer = subprocess.Popen(
        [sys.executable, __file__, "write", str(workspace), str(number)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    )
    assert writer.stdout is not None
    with writer.stdout as pipe:
        # The first line says that it is up; from there on any moment is as good as another.
        lines = [pipe.readline()]
        if not lines[0]:
            _fail("the writer ended before its first message was stored")
        time.sleep(random.uniform(0.1, 0.6))
        writer.send_signal(signal.SIGKILL)
        lines += pipe.read().splitlines(keepends=True)
    if writer.wait() != -signal.SIGKILL:
        _fail(f"the writer ended by itself, with code {writer.returncode}")
    promised = {}
    for line in lines:
        # The kill may have cut the last word on the pipe: that one was never heard.
        if line.endswith(b"\n"):
            seq, count = map(int, line.split())
            promised[seq] = _content(number, count)
    return promised


def _compare(workspace: Path, acknowledged: dict[int, str]) -> None:
    raw = _log(workspace).read_bytes()
    torn = len(raw) - (raw.rfind(b"\n") + 1)
    with stenolog.open_store(workspace) as store:
        history = store.get_history(KEY)
    found = {message.seq: message.content for message in history}
    lost = [seq for seq, content in acknowledged.items() if found.get(seq) != content]
    if lost:
        _fail(f"{len(lost)} acknowledged messages are missing or changed, first seq {lost[0]}")
    if len(found) != len(history) or list(found) != sorted(found):
        _fail("the messages are not in order, or one is there twice")
    print(f"  opened again: {len(acknowledged)} acknowledged so far, {len(acknowledged)} found.")
    unheard = len(found) - len(acknowledged)
    if unheard:
        print(f"  {unheard} more reached the disk, but the kill came before the writer said so.")
    if torn:
        print(f"  the kill left half a line of {torn} bytes: it stays in the file, marked as void.")


def _append_again(workspace: Path, acknowledged: dict[int, str]) -> None:
    content = "And the talk goes on."
    with stenolog.open_store(workspace) as store:
        acknowledged[store.add_message(KEY, "assistant", content)] = content
    print("\nOne more message, after all that:")
    _compare(workspace, acknowledged)


def _show_file(workspace: Path) -> None:
    log = _log(workspace)
    print(f"\nThe log is plain text. The last lines of {log.relative_to(workspace.parent)}:")
    for line in log.read_text(errors="replace").splitlines()[-3:]:
        print(f"  {line}" if len(line) <= 160 else f"  {line[:120]} ... {line[-35:]}")


def _log(workspace: Path) -> Path:
    logs = list((workspace / "sessions").glob("*.jsonl"))
    if len(logs) != 1:
        _fail(f"one conversation should be one file, and there are {len(logs)}")
    return logs[0]


def _fail(what: str) -> NoReturn:
    sys.exit(f"\nTHE DEMO FAILED: {what}.")


def _start(arguments: Sequence[str]) -> None:
    if arguments[:1] == ["write"]:
        write(Path(arguments[1]), int(arguments[2]))
    else:
        main()


if __name__ == "__main__":
    _start(sys.argv[1:])
