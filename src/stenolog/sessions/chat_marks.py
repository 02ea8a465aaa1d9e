"""Marks that channels write into the meta of a session: delivered answers, and the chat's move."""

from collections.abc import Collection, Mapping
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

DELIVERY_FIELD: Final = "delivery"
"""Meta field of a session that contains its delivery mark."""
MOVE_FIELD: Final = "continued_in"
"""Meta field of a chat's first session that records the chat's last move to another session."""
MAX_OWED: Final = 20
"""Maximum number of owed answers per session. Only the newest owed answers are kept."""


class DeliveryMark(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Progress of delivery in a session, with the result of the last attempt."""

    seq: int
    """Seq of the newest answer that a process started to send."""
    state: Literal["sending", "sent", "unsure", "refused", "owed"] = field(name="mark")
    """State of the answer that was tried last, which may be an owed answer older than `seq`.

    `owed` means that the answer was certainly not sent. `unsure` means that the answer may have
    arrived, and that the user was notified.
    """
    origin: Mapping[str, Any]
    owed: list[int] = []
    """Seqs of the answers up to `seq` that were certainly not sent, in order."""


def read_mark(meta: Mapping[str, Any]) -> DeliveryMark | None:
    """Return the delivery mark in a session's meta, or None."""
    stored_mark = meta.get(DELIVERY_FIELD)
    if not isinstance(stored_mark, Mapping):
        return None
    stored_seqs = stored_mark.get("owed")
    # A damaged list must not lose the mark: without the mark, answers would be sent twice.
    seqs = stored_seqs if isinstance(stored_seqs, list) else []
    owed_seqs = sorted(seq for seq in seqs if type(seq) is int)
    try:
        return msgspec.convert({**stored_mark, "owed": owed_seqs}, DeliveryMark)
    except msgspec.ValidationError:
        return None


def merge_marks(
    mark: DeliveryMark | None,
    added: DeliveryMark,
    *,
    merged_before: DeliveryMark | None,
    seqs: Mapping[int, int],
    answers: Collection[int],
) -> DeliveryMark:
    """Return the mark of a session after the messages of another session were added to it.

    `added`: the mark of the other session. `merged_before`: the same mark when it was last merged.
    `seqs`: seqs in the session, by the seqs in the other session. `answers`: seqs of all answers in
    the session.
    """
    sent_upto = 0 if mark is None else mark.seq
    upto = max((seqs[seq] for seq in seqs if seq <= added.seq), default=0)
    started = {seqs[seq] for seq in seqs if seq <= added.seq}
    # Answers that no process started to send must stay due below the new `seq`.
    owed = {seq for seq in answers if sent_upto < seq < upto and seq not in started}
    owed_before = set(merged_before.owed if merged_before else ())
    owed_then = {seqs[seq] for seq in owed_before if seq in seqs}
    owed_now = {seqs[seq] for seq in added.owed if seq in seqs}
    owed |= (set(mark.owed if mark else ()) - (owed_then - owed_now)) | (owed_now - owed_then)
    newest = added
    # The user must still be told about an answer that may have arrived.
    if mark is not None and (mark.state == "sending" or added == merged_before):
        newest = mark
    return replace(newest, seq=max(sent_upto, upto), owed=sorted(owed)[-MAX_OWED:])
