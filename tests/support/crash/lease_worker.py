"""One of many processes that take turns in sessions until it is killed; run by its path.

A turn writes `begin`, a few steps and `end` through the lease, with pauses between them as long as
a model may take. The outcome of each turn is printed.
"""

import json
import random
import sys
import time

import stenolog
from stenolog import LeaseLost, StoreBusy


def work(where: str, name: str, sessions: int, ttl: float) -> None:
    """Take turns until killed."""
    chance = random.Random(name)
    with stenolog.open_store(where) as store:
        for number in range(1_000_000):
            key = f"session {chance.randrange(sessions)}"
            try:
                with store.lease(key, ttl=ttl, wait=0.02) as lease:
                    _take_turn(lease, f"{name}.{number}", chance)
            except StoreBusy:
                continue
            except LeaseLost as error:
                _say("lost", key, number, error.epoch)
            else:
                _say("done", key, number, lease.epoch)


def hold(where: str, key: str, ttl: float) -> None:
    """Acquire a lease, report it, and write on request."""
    with stenolog.open_store(where) as store:
        lease = store.lease(key, ttl=ttl)
        _say("held", key, 0, lease.epoch)
        sys.stdin.readline()
        try:
            lease.store.add_message(key, "user", "late")
        except LeaseLost as error:
            _say("lost", key, 0, error.epoch)
        else:
            _say("stored", key, 0, lease.epoch)


def _take_turn(lease: stenolog.Lease, name: str, chance: random.Random) -> None:
    for step in ("begin", *map(str, range(chance.randrange(4))), "end"):
        lease.store.add_message(lease.key, "user", f"{name} {step}")
        time.sleep(chance.random() * 0.004)


def _say(word: str, key: str, number: int, epoch: int) -> None:
    print(json.dumps([word, key, number, epoch]), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "work":
        work(sys.argv[2], sys.argv[3], int(sys.argv[4]), float(sys.argv[5]))
    else:
        hold(sys.argv[2], sys.argv[3], float(sys.argv[4]))
