"""Another process that uses the store of a gateway; run by its path.

It makes the store calls from its standard input, one JSON list of name and arguments per line, and
prints the name of each when it is done. The first call is `open`.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from stenolog.stores.base import Store
from stenolog.stores.open_store import open_store


class OtherProcess:
    """A process with its own store, as seen from the test."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def call(self, name: str, *values: object, **named: object) -> None:
        """Make a store call in the process and wait until it is done."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([name, values, named]) + "\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == f"{name}\n"


@contextmanager
def other_process() -> Iterator[OtherProcess]:
    """Yield a process that has not opened a store yet."""
    command = [sys.executable, __file__]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield OtherProcess(process)
        finally:
            process.kill()


def _work() -> None:
    store: Store | None = None
    for line in sys.stdin:
        name, values, named = json.loads(line)
        if name == "open":
            store = open_store(*values)
        else:
            assert store is not None, "the first line opens the store"
            calls = store if hasattr(store, name) else store.admin
            getattr(calls, name)(*values, **named)
        print(name, flush=True)


if __name__ == "__main__":
    _work()
