"""Rows about memory and start-up.

They measure the resident memory of a process that used many sessions, and the run time of a new
process.
"""

import os
import sys
from pathlib import Path
from uuid import uuid4

import stenolog
from appends import workspace
from measure import Context, Measurement, NotRun, alternate, percentiles, run_process, time_calls
from stenolog.codec import correct_checksum

_MB = 1024 * 1024


def resident_mb() -> float:
    """Return the resident memory of this process in MB."""
    return resident_mb_of(os.getpid())


def resident_mb_of(pid: int) -> float:
    """Return the resident memory of a process in MB."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / _MB


def touched_sessions(context: Context, *, count: int) -> Measurement:
    """Measure the MB of a process that appended to `count` sessions and read each."""
    count = context.times(count)
    before = resident_mb()
    half = before
    with stenolog.open_store(workspace(context)) as store:
        for index in range(count):
            key = f"touched-{index:06d}"
            store.add_message(key, "user", "Good morning. What is on my list for today?")
            store.get_history(key)
            if index == count // 2:
                half = resident_mb()
        after = resident_mb()
    return Measurement(
        measured=after,
        ours={"mb": round(after, 1), "n": count},
        raw={"mb": round(before, 1)},
        others={"half_way_mb": round(half, 1)},
    )


def touched_keys(context: Context, *, count: int) -> Measurement:
    """Measure by how many MB a process grows between reading a fifth of the keys and all keys."""
    count = context.times(count)
    keys = _copy_sessions(context, count)
    with stenolog.open_store(workspace(context), namespace="keys") as store:
        before = resident_mb()
        for key in keys[: count // 5]:
            store.get_history(key)
        fifth = resident_mb()
        for key in keys[count // 5 :]:
            store.get_history(key)
        after = resident_mb()
    return Measurement(
        measured=after - fifth,
        ours={"mb": round(after, 1), "n": count},
        raw={"mb": round(fifth, 1), "n": count // 5},
        others={"before_mb": round(before, 1)},
    )


def _copy_sessions(context: Context, count: int) -> list[str]:
    """Create `count` sessions by copying one file, because each append would wait for the disk."""
    keys = [f"keys-{index:06d}" for index in range(count)]
    with stenolog.open_store(workspace(context), namespace="keys") as store:
        store.add_message(keys[0], "user", "Good morning. What is on my list for today?")
        uid = store.info(keys[0]).uid.encode()
    folder = Path(workspace(context)) / "keys"
    lines = (folder / f"{keys[0]}.jsonl").read_bytes().splitlines()
    for key in keys[1:]:
        new_uid = uuid4().hex[: len(uid)].encode()
        signed = [
            correct_checksum(line.replace(keys[0].encode(), key.encode()).replace(uid, new_uid))
            for line in lines
        ]
        file = os.open(folder / f"{key}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        os.write(file, b"".join(line + b"\n" for line in signed if line is not None))
        os.close(file)
    return keys


def start_up(context: Context, *, command: str) -> Measurement:
    """Measure how many ms a new process takes, compared with a Python that does nothing."""
    nothing = [sys.executable, "-c", "pass"]
    ours = [sys.executable, "-c", "import stenolog"]
    if command == "steno":
        script = Path(sys.executable).with_name("steno")
        if not script.exists():
            raise NotRun("the `steno` command is not installed in this environment")
        ours = [str(script), "--version"]
    run_process(ours)
    bare_times, times = alternate(
        context.times(5),
        lambda: time_calls(5, lambda: run_process(nothing)),
        lambda: time_calls(5, lambda: run_process(ours)),
    )
    raw, took = percentiles(bare_times), percentiles(times)
    return Measurement(measured=took["p50_us"] / 1000, ours=took, raw=raw)
