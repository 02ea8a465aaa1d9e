"""One of many processes that write to a SQLite store; run by its path, told to go by a line.

Half of its messages go to a session of its own, half to one of all. It tells its longest wait.
"""

import json
import sys
import time

import stenolog


def write(file: str, count: int, number: int) -> None:
    """Append so many messages and tell how it went."""
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
        waits = store.database.lock_waits
    print(json.dumps({"worst": worst, "failed": failed, "waits": waits}))


if __name__ == "__main__":
    write(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
