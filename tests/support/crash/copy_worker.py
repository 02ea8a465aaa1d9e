"""Processes that copy a workspace and are killed at the n-th step, and concurrent writers.

`python -m support.crash.copy_worker` serves the requests of `migration_worker.Runner`.
`python -m support.crash.copy_worker WHERE NAME` writes to a few sessions, deletes and restores
them, until its standard input is closed.
"""

import os
import random
import select
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from stenolog import StoreBusy, UsageError
from stenolog.stores.open_store import open_store
from stenolog.transfer import copy as transfer
from stenolog.transfer.copy import copy_place
from support.crash.migration_worker import serve

MOST = 1_500
"""Number of operations of each writer; then it waits."""


def copy(where: str) -> None:
    """Copy from one store to another: `SRC|DST`."""
    source, target = where.split("|")
    copied = copy_place(source, target)
    assert copied.problems == 0, [found.problems for found in copied.namespaces.values()]


PROGRAMS = {"copy": copy}


def write(where: str, name: str) -> None:
    """Append numbers to own sessions and a shared one until told to stop."""
    chance = random.Random(name)
    said = 0
    with open_store(where) as store:
        print("writing", flush=True)
        for _ in range(MOST):
            if select.select([sys.stdin], [], [], 0)[0]:
                break
            key = f"{name}:{chance.randrange(3)}" if chance.random() < 0.7 else "all"
            # Sessions may be missing or too short, and a copy may hold one for long.
            with suppress(UsageError, StoreBusy):
                dice = chance.random()
                if dice < 0.85 or key == "all":
                    store.add_full_message(key, {"by": name, "n": said}, once=f"{name}{said}")
                    said += 1
                elif dice < 0.9:
                    store.truncate_history(key, 5)
                elif dice < 0.93:
                    store.checkpoint(key, summary=f"up to {said}" * 900, upto=3)
                elif dice < 0.96:
                    store.compact(key)
                elif dice < 0.98:
                    store.delete(key)
                else:
                    store.admin.restore(key)
        sys.stdin.read()


def _warm_up() -> None:
    """Do everything that is imported or read on first use, so that children do not repeat it."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        with open_store(place / "x") as store:
            store.add_message("a", "user", "b")
            store.delete("a")
            store.add_message("a", "user", "b")
        copy_place(f"jsonl:{place}/x", f"sqlite:{place}/x.db")
        copy_place(f"sqlite:{place}/x.db", f"jsonl:{place}/y")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        write(*sys.argv[1:])
        # Open files are closed with the process.
        os._exit(0)
    _warm_up()
    # So that a few sessions need several groups.
    transfer.GROUP_SNAPSHOTS = 3  # type: ignore[misc]
    serve(PROGRAMS)
