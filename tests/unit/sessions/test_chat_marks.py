"""Delivery marks of two sessions whose messages are merged."""

from typing import Any

import pytest

from stenolog.sessions.chat_marks import DeliveryMark, merge_marks

SEQS = {1: 11, 2: 12, 3: 13, 4: 14}


def _mark(seq: int, *owed: int, state: Any = "sent", chat: int = 0) -> DeliveryMark:
    return DeliveryMark(seq=seq, state=state, origin={"chat": chat}, owed=list(owed))


@pytest.mark.parametrize(
    ("mark", "added", "before", "answers", "expected"),
    [
        (None, _mark(4), None, [12, 14], _mark(14)),
        (None, _mark(2), None, [12, 14], _mark(12)),
        (_mark(6), _mark(4, 2), None, [2, 6, 12, 14], _mark(14, 12)),
        (_mark(6, 2), _mark(2), None, [2, 6, 12, 14], _mark(12, 2)),
        # Answers that no process started to send.
        (_mark(2), _mark(4), None, [2, 6, 8, 12, 14], _mark(14, 6, 8)),
        (None, _mark(4), None, [2, 12, 14], _mark(14, 2)),
        # Another process has delivered a newer answer meanwhile.
        (_mark(20, 14), _mark(2), None, [12, 14, 20], _mark(20, 14)),
        # The mark was merged before.
        (_mark(12), _mark(4, 2), _mark(2, 2), [12, 14], _mark(14)),
        (_mark(12, 12), _mark(4), _mark(2, 2), [12, 14], _mark(14)),
        (_mark(12, 6, 12), _mark(4, 4), _mark(2, 2), [6, 12, 14], _mark(14, 6, 14)),
        # A message that could not be read was added last.
        (
            _mark(13, state="owed", chat=1),
            _mark(4),
            _mark(4),
            [14],
            _mark(14, state="owed", chat=1),
        ),
        # The messages were deleted.
        (_mark(6), _mark(9, 8), None, [], _mark(14)),
        # The user must be told about an answer that may have arrived.
        (
            _mark(6, state="sending", chat=1),
            _mark(4, chat=2),
            None,
            [6, 14],
            _mark(14, state="sending", chat=1),
        ),
        (_mark(6, chat=1), _mark(4, state="sending"), None, [6, 14], _mark(14, state="sending")),
    ],
)
def test_merged_mark_keeps_what_was_sent_and_what_is_owed(
    mark: DeliveryMark | None,
    added: DeliveryMark,
    before: DeliveryMark | None,
    answers: list[int],
    expected: DeliveryMark,
) -> None:
    found = merge_marks(mark, added, merged_before=before, seqs=SEQS, answers=answers)
    assert found == expected


def test_seqs_of_another_session_are_not_merged() -> None:
    found = merge_marks(None, _mark(4, 2), merged_before=None, seqs={}, answers=[2, 4])
    assert (found.seq, found.owed) == (0, [])
