"""A process that appends to two sessions until its input ends; run by its path.

With idempotency keys, it resends a message whose outcome is unknown; without, only a message that
was certainly not stored. The outcome of each message is printed.
"""

import json
import os
import select
import sys
import time

import stenolog
from stenolog import MaybeStored, StoreUnavailable
from stenolog.stores.postgres import PostgresStore


def write(where: str, name: str, *, tokens: bool) -> None:
    """Append until told to stop."""
    with stenolog.open_store(where) as store:
        number = 0
        while not select.select([sys.stdin], [], [], 0)[0]:
            text = f"{name}.{number}"
            key = "everybody" if number % 2 else f"own {name}"
            try:
                seq = store.add_message(key, "user", text, once=text if tokens else None)
            except StoreUnavailable as error:
                kind = type(error).__name__
                _say(kind, text, str(error))
                time.sleep(0.02)
                # Only the log shows whether it is stored.
                number += isinstance(error, MaybeStored) and not tokens
            else:
                _say("stored", text, seq)
                number += 1


def open_at_once(where: str, name: str) -> None:
    """Wait for a line on standard input, open the store, and append."""
    _say("ready", name, 0)
    sys.stdin.readline()
    with PostgresStore(where) as store:
        _say("stored", name, store.add_message("everybody", "user", name))


def _say(*words: object) -> None:
    os.write(1, json.dumps(words).encode() + b"\n")


if __name__ == "__main__":
    if sys.argv[1] == "open":
        open_at_once(sys.argv[2], sys.argv[3])
    else:
        write(sys.argv[2], sys.argv[3], tokens=sys.argv[1] == "tokens")
