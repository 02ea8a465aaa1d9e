"""A fork: what is in sight of one session, as the whole log of another."""

from collections.abc import Sequence

from msgspec import Struct

from stenolog.codec import message_line
from stenolog.records import Message
from stenolog.stores import spans
from stenolog.stores.jsonl.log import Found, Log
from stenolog.stores.jsonl.rewrite import composed
from stenolog.stores.state import Fork, copy, decide_fork, left_out


class Seen(Struct, frozen=True):
    """A session at the moment when it is forked."""

    log: Log
    fork: Fork
    uid: str
    generation: int


def look(log: Log, *, new_key: str, at: int | None, uid: str, now: str) -> tuple[Seen, Found]:
    """What a fork takes over. Raises UsageError. The log's mutex is held."""
    state, end = log.settled()
    fork = decide_fork(state, end, new_key=new_key, at=at, uid=uid, now=now)
    return Seen(log, fork, state.uid, state.generation), log.in_sight(last=None, after=None)


def whole_log(fork: Fork, messages: Sequence[Message], now: str) -> bytes:
    """The log of a fork with these messages: the source's, as far as they can be read."""
    taken = [message for message in messages if spans.contains(fork.taken, message.seq)]
    head = copy(fork.state)
    head.purged = left_out([(m.seq, m.seq) for m in taken], fork.next_seq - 1)
    # One is added to it by `composed`, and a new log is of the first.
    head.generation = 0
    # Without tokens, and each on its own: the file counts as a whole or not at all.
    lines = b"".join(message_line(m.seq, m._at, m.to_json()) for m in taken)
    return composed(
        head,
        head,
        lines,
        now,
        first_seq=taken[0].seq if taken else fork.next_seq,
        next_seq=fork.next_seq,
        tail=None,
    )
