"""One of many processes that write to a SQLite store; run by its path, started by a line of input.

Half of its messages go to its own session, half to a shared one. It prints its longest wait.
"""

import json
import sys
import time

import stenolog


def write(file: str, count: int, number: int) -> None:
    """Append `count` messages and print the result."""
    worst, failed = 0.0, None
    with stenolog.SQLiteStore(file) as store:
        print("ready", flush=True)
        sys.stdin.readline()
        for turn in range(count):
            began = time.perf_counter()
            try:
                key = "everybody" if turn % 2 else f"own {number}"
                store.add_message(key, "user", f"{number}.{turn}")
            except stenolog.StenologError as error:
                failed = repr(error)
                break
            worst = max(worst, time.perf_counter() - began)
        waits = store.database._writer.lock_waits
    print(json.dumps({"worst": worst, "failed": failed, "waits": waits}))


if __name__ == "__main__":
    write(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
