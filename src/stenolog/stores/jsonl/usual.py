"""The usual append, in its fewest steps: an open log that is as it was left, and nobody waiting.

One function on purpose. Right after a sync the processor's caches are cold, and each call of a
Python function then costs several times what it costs in a loop.
"""

import fcntl
import os
from collections.abc import Callable

from msgspec import Raw

from stenolog.codec import plain_line
from stenolog.records import Message
from stenolog.stores.jsonl.log import STATE_EVERY_LINES, Log
from stenolog.stores.jsonl.table import AT_ONCE, Logs
from stenolog.stores.jsonl.writer import STATE_EVERY_BYTES, Outcome, now, put


def append_at_once(
    logs: Logs, log: Log, payload: bytes, check: Callable[[], None] | None = None
) -> tuple[int, Outcome | None]:
    """Append one message; its seq, or 0, and what became of the write.

    None: it is not that simple, and nothing was done. The gate of the session must be held.
    `check` raises StenologError where it may not be written any more.
    """
    descriptor = log.descriptor
    try:
        fcntl.flock(descriptor, AT_ONCE)
        found = os.stat(log.name, dir_fd=logs.directory.descriptor, follow_symlinks=False)
        at = now()
        with log.mutex:
            before, seq, identity = log.size, log.next_seq, (log.inode, log.device)
            if (
                found.st_size != before
                or (found.st_ino, found.st_dev) != identity
                or logs.entries.get(log.name) != identity
                or logs.suspects
                or log.synced != before
                or log.end != before
                or log.tail is not None
                or not log.terminated
                or log.unknown is not None
                or log.lines_since_state >= STATE_EVERY_LINES
                or log.bytes_since_state >= STATE_EVERY_BYTES
            ):
                return 0, None
        if check is not None:
            check()
        line = plain_line(seq, at, payload)
        outcome = put(log, before, line)
        if outcome.error is not None:
            return (seq if outcome.holds(len(line)) else 0), outcome
        try:
            with log.mutex:
                if log.warm or not before == log.end == log.size or log.tail is not None:
                    # To be kept, or a reader of this process has looked while it was written.
                    log.grew(before, [Message(seq=seq, _at=at, _body=Raw(payload))], len(line))
                else:
                    log.passed(seq, at, before + len(line), len(line))
        except BaseException as error:  # noqa: BLE001  it is stored; the caller raises it
            return seq, Outcome(len(line), error)
    except (BlockingIOError, FileNotFoundError):
        return 0, None
    except OSError as error:
        return 0, Outcome(0, error)
    finally:
        # Here and not in a function of its own: Ctrl-C may strike on the way into one.
        if log.suspect:
            logs.discard(log)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        except OSError:
            # The lock goes with the descriptor, and that with the last use of the log.
            logs.discard(log)
    return seq, outcome
