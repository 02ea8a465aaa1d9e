"""The seqs of answers that are added to another session."""

from typing import Any

import pytest

from stenolog.codec import MAX_MESSAGE_BYTES, encode_object
from stenolog.records import decode_object
from stenolog.transfer.merge import AnswerSeqs, names_seqs, without_answer_seqs


def _answer(**metadata: Any) -> bytes:
    return encode_object({"role": "assistant", "content": "!", "stenolog": metadata})


@pytest.mark.parametrize(
    ("marks", "unseen", "expected"),
    [
        ({"seen": 1, "answers": [1]}, None, {"seen": 5, "answers": [5]}),
        ({"seen": 3, "answers": [1, 3]}, None, {"seen": 8, "answers": [5, 8]}),
        ({"seen": 2, "answers": [1, 2]}, None, {"seen": 5, "answers": [5]}),  # 2 is not stored
        ({"seen": 3, "answers": [3]}, 4, {"seen": 3, "answers": [8]}),
        ({"seen": 3}, None, {"seen": 8}),
        ({"answers": [3], "model": "m"}, None, {"answers": [8], "model": "m", "seen": 8}),
        ({"seen": 0, "answers": []}, None, {"seen": 0, "answers": []}),
        ({"seen": 9, "answers": ["x"]}, None, {"seen": 8, "answers": []}),  # of another program
        ({"seen": "x", "answers": "y"}, None, {"seen": 8, "answers": "y"}),
    ],
)
def test_answer_gets_the_seqs_of_its_new_session(
    marks: dict[str, Any], unseen: int | None, expected: dict[str, Any]
) -> None:
    seqs = AnswerSeqs(seqs={1: 5, 3: 8}, upto=8, unseen=unseen)
    payload = seqs.payload_for(_answer(**marks), 4)
    assert decode_object(payload)["stenolog"] == expected
    assert without_answer_seqs(payload) == without_answer_seqs(_answer(**marks))


def test_message_that_names_no_seqs_stays_the_same() -> None:
    seqs = AnswerSeqs(seqs={1: 5}, upto=5, unseen=2)
    for payload in (
        b'{"role":"assistant","content":"\\ud800"}',
        b'{ "role": "user", "stenolog": {"received": {}} }',
        b'{"stenolog":7}',
    ):
        assert seqs.payload_for(payload, 2) is payload
        assert without_answer_seqs(payload) is payload
        assert not names_seqs(payload)


def test_message_of_another_process_is_not_seen_by_answers_that_were_added_around_it() -> None:
    seqs = AnswerSeqs(upto=2)
    seqs.add([1], [3])
    assert seqs == AnswerSeqs(seqs={1: 3}, upto=3)
    seqs.add([2], [5])
    seqs.add([3], [9])
    assert seqs == AnswerSeqs(seqs={1: 3, 2: 5, 3: 9}, upto=9, unseen=4)
    seqs.add([4], [7])  # it was stored before
    assert seqs == AnswerSeqs(seqs={1: 3, 2: 5, 3: 9, 4: 7}, upto=9, unseen=4)


def test_answer_that_new_seqs_make_too_large_is_stored_without_them() -> None:
    body = {"role": "assistant", "content": "", "stenolog": {"seen": 1, "answers": [1]}}
    body["content"] = "x" * (MAX_MESSAGE_BYTES - len(encode_object(body)))
    payload = AnswerSeqs(seqs={1: 1000}, upto=1000).payload_for(encode_object(body), 2)
    assert decode_object(payload) == {**body, "stenolog": {}}
