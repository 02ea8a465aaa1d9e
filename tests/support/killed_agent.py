"""Work of an agent in a process that kills itself; run by its path.

    python killed_agent.py FOLDER STORE KILLS

Replaces a history while a message arrives, once in each folder `FOLDER/N`, and is killed before the
N-th of KILLS evenly spaced lines of our code.
"""

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # the folder of the tests

from stenolog.agent.session_history import replace_history
from stenolog.records import Message
from stenolog.stores.open_store import open_store
from support.agents import KEY

_OURS = f"{os.sep}stenolog{os.sep}"


def place(store: str, folder: Path) -> str:
    """Return the address of a store in this folder."""
    return f"sqlite:{folder / 'steno.db'}" if store == "sqlite" else str(folder)


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class _Lines:
    """Counts the executed lines of our code, and kills the process before one of them."""

    def __init__(self, fatal: int = 0) -> None:
        self.count = 0
        self._fatal = fatal

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        del argument
        if _OURS not in frame.f_code.co_filename:
            return None
        if event == "line":
            self.count += 1
            if self.count == self._fatal:
                _kill()
        return self


def _rewrite(store: str, folder: Path, lines: _Lines) -> None:
    where = place(store, folder)
    with open_store(where) as written, open_store(where) as other:
        written.add_message(KEY, "user", "first")
        written.add_message(KEY, "assistant", "answer")

        def make(history: Sequence[Message]) -> Sequence[Message]:
            other.add_message(KEY, "user", "late", once="late")
            (folder / "arrived").touch()
            return history[:1]

        sys.settrace(lines)
        try:
            replace_history(written, KEY, make)
        finally:
            sys.settrace(None)


def _rewrite_often(store: str, folder: Path, kills: int) -> None:
    """Rewrite a few times to count the lines, then in child processes that are killed."""
    # A run may execute more lines than another, for example if the clock reaches a new second.
    counts = []
    for name in ("0", "count-1", "count-2"):
        (folder / name).mkdir(mode=0o700)
        lines = _Lines()
        _rewrite(store, folder / name, lines)
        counts.append(lines.count)
    for number in range(1, kills + 1):
        there = folder / str(number)
        there.mkdir(mode=0o700)
        child = os.fork()
        if not child:
            _rewrite(store, there, _Lines(max(1, min(counts) * number // kills)))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    in_folder, on_store, count = sys.argv[1:]
    _rewrite_often(on_store, Path(in_folder), int(count))
