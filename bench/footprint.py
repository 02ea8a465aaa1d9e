"""Rows about memory and start-up.

What a process weighs after touching many sessions, and how long a fresh one takes to be ready.
"""

import os
import sys
from pathlib import Path
from uuid import uuid4

import stenolog
from appends import workspace
from measure import Figure, NotRun, Place, in_turn, percentiles, run_process, timed
from stenolog.codec import re_sign

_MB = 1024 * 1024


def resident() -> float:
    """What this process holds in memory now, in MB."""
    return resident_of(os.getpid())


def resident_of(pid: int) -> float:
    """The same of another process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / _MB


def touched_sessions(place: Place, *, count: int) -> Figure:
    """The MB of a process that appended to so many sessions and read each."""
    count = place.times(count)
    before = resident()
    half = before
    with stenolog.open_store(workspace(place)) as store:
        for index in range(count):
            key = f"touched-{index:06d}"
            store.add_message(key, "user", "Good morning. What is on my list for today?")
            store.get_history(key)
            if index == count // 2:
                half = resident()
        after = resident()
    return Figure(
        measured=after,
        ours={"mb": round(after, 1), "n": count},
        raw={"mb": round(before, 1)},
        others={"half_way_mb": round(half, 1)},
    )


def touched_keys(place: Place, *, count: int) -> Figure:
    """The MB by which a process grows from a fifth of so many sessions read to all of them."""
    count = place.times(count)
    keys = _copies(place, count)
    with stenolog.open_store(workspace(place), namespace="keys") as store:
        before = resident()
        for key in keys[: count // 5]:
            store.get_history(key)
        fifth = resident()
        for key in keys[count // 5 :]:
            store.get_history(key)
        after = resident()
    return Figure(
        measured=after - fifth,
        ours={"mb": round(after, 1), "n": count},
        raw={"mb": round(fifth, 1), "n": count // 5},
        others={"before_mb": round(before, 1)},
    )


def _copies(place: Place, count: int) -> list[str]:
    """So many sessions, made from the bytes of one: by appends each would wait for the disk."""
    keys = [f"keys-{index:06d}" for index in range(count)]
    with stenolog.open_store(workspace(place), namespace="keys") as store:
        store.add_message(keys[0], "user", "Good morning. What is on my list for today?")
        uid = store.info(keys[0]).uid.encode()
    folder = Path(workspace(place)) / "keys"
    lines = (folder / f"{keys[0]}.jsonl").read_bytes().splitlines()
    for key in keys[1:]:
        own = uuid4().hex[: len(uid)].encode()
        signed = [
            re_sign(line.replace(keys[0].encode(), key.encode()).replace(uid, own))
            for line in lines
        ]
        file = os.open(folder / f"{key}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        os.write(file, b"".join(line + b"\n" for line in signed if line is not None))
        os.close(file)
    return keys


def start_up(place: Place, *, command: str) -> Figure:
    """How many ms a fresh process takes, beside a Python that does nothing."""
    nothing = [sys.executable, "-c", "pass"]
    ours = [sys.executable, "-c", "import stenolog"]
    if command == "steno":
        script = Path(sys.executable).with_name("steno")
        if not script.exists():
            raise NotRun("the `steno` command is not installed in this environment")
        ours = [str(script), "--version"]
    run_process(ours)
    bare_times, times = in_turn(
        place.times(5),
        lambda: timed(5, lambda: run_process(nothing)),
        lambda: timed(5, lambda: run_process(ours)),
    )
    raw, took = percentiles(bare_times), percentiles(times)
    return Figure(measured=took["p50_us"] / 1000, ours=took, raw=raw)
