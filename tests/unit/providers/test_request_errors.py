"""Tests which errors are retried, and the text of a server's error."""

import json
from typing import Any

import pytest

from stenolog.providers.request_errors import (
    Failure,
    RetryLimits,
    error_message,
    failure_of_response,
    find_failure,
    is_temporary,
    seconds_to_wait,
)

PATIENCE = RetryLimits(retries=4, backoff=0.5, max_delay=60.0)


def waits(failure: Failure, *, tried: int = 1, chance: float = 1.0) -> float | None:
    return seconds_to_wait(failure, PATIENCE, attempts=tried, random_fraction=chance)


@pytest.mark.parametrize("status", [0, 408, 409, 425, 429, 500, 502, 503, 504, 529])
def test_temporary_failure_is_retried(status: int) -> None:
    assert waits(Failure("was busy", status)) == 0.5


@pytest.mark.parametrize("status", [400, 401, 402, 403, 404, 413, 422, 501, 505])
def test_rejection_is_not_retried(status: int) -> None:
    assert waits(Failure("said no", status)) is None
    assert not is_temporary(Failure("said no", status))


@pytest.mark.parametrize(
    "words",
    [
        "context size has been exceeded",
        "code: context_length_exceeded",
        "The prompt is too long",
        "code: insufficient_quota",
        "exceeds the context window",
        "Request too large for gpt-4o on tokens per min (TPM): Limit 30000, Requested 45000",
    ],
)
def test_permanent_failure_is_not_retried_whatever_its_status(words: str) -> None:
    assert waits(Failure(words, 500)) is None
    assert waits(Failure(words, 429)) is None


def test_after_silence_there_is_at_most_one_retry() -> None:
    silent = Failure("was silent", silent=True)
    assert [waits(silent, tried=tried) for tried in (1, 2)] == [0.5, None]
    for patience in (RetryLimits(retries=0), RetryLimits(retries_after_silence=0)):
        assert seconds_to_wait(silent, patience, attempts=1, random_fraction=1) is None
    assert waits(Failure("cannot be reached"), tried=4) == 4


def test_delays_double_up_to_a_limit_with_jitter() -> None:
    failure = Failure("was busy", 503)
    assert [waits(failure, tried=tried) for tried in (1, 2, 3, 4, 5)] == [0.5, 1, 2, 4, None]
    assert waits(failure, tried=3, chance=0) == 1.0
    patience = RetryLimits(retries=100, backoff=1, max_delay=30)
    waited = seconds_to_wait(failure, patience, attempts=99, random_fraction=1)
    assert waited == 30


@pytest.mark.parametrize(
    ("asked", "seconds"),
    [
        ("3", 3.0),
        (" 0.5 ", 0.5),
        ("-4", 0.0),
        ("60", 60.0),
        ("61", None),
        ("1e9", None),
        ("Sun, 15 Nov 2026 12:00:20 GMT", 0.5),
        ("nan", 0.5),
        ("inf", 0.5),
        ("", 0.5),
    ],
)
def test_retry_after_within_the_limit_is_used(asked: str, seconds: float | None) -> None:
    assert waits(Failure("was busy", 429, asked)) == seconds


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ('{"error":{"message":"No.","type":"t","param":null,"code":""}}', "No. (type: t)"),
        ('{"error":"plain words"}', "plain words"),
        ('{"error":{"code":400,"n_ctx":4096}}', "code: 400, n_ctx: 4096"),
        ('{"message":"No.","object":"error"}', "No. (object: error)"),
        ('[{"error":{"message":"No."}}]', "No."),
        (
            '{"detail":[{"loc":["body","stream_options"],"msg":"Extra inputs"}]}',
            'loc: ["body", "stream_options"], msg: Extra inputs',
        ),
        ("<html><style>a{}</style><title>Bad\n gateway</title></html>", "Bad gateway"),
        (
            '{"detail":[{"msg":"Extra inputs","input":{"a":"mine"},"ctx":{"e":"its"}}]}',
            "msg: Extra inputs, e: its",
        ),
        ("[{'msg': 'Extra inputs', 'input': 'mine'}]", "[{'msg': 'Extra inputs', 'input': …"),
        ('{"messages":[{"content":"mine"}],"reason":"its"}', "reason: its"),
        ("plain\nwords", "plain words"),
        ("", ""),
        ("null", "null"),
    ],
)
def test_server_message_is_found_in_every_format(body: str, words: str) -> None:
    assert error_message(body) == words
    shown = f"answered 400: {words}" if words else "answered 400 (no body)"
    failure = failure_of_response(400, body)
    assert (failure.description, failure.status) == (shown, 400)


def test_long_message_is_truncated() -> None:
    assert len(error_message("x " * 1_000_000)) == 2_001
    assert len(error_message(json.dumps({"error": {"message": "x" * 1_000_000}}))) == 2_001


@pytest.mark.parametrize(
    ("error", "status"),
    [
        ({"code": 429}, 429),
        ({"code": "503"}, 503),
        ({"status": 404}, 404),
        ({"code": "context_length_exceeded"}, 400),
        ({"type": "rate_limit_error"}, 429),
        ({"type": "overloaded_error"}, 529),
        ({"type": "invalid_request_error"}, 400),
        ({"code": 3051}, 0),
        ({"code": True}, 0),
        ("words", 0),
    ],
)
def test_error_inside_a_stream_has_its_status(error: Any, status: int) -> None:
    found = find_failure({"error": error})
    assert found is not None
    assert found.status == status


def test_answer_without_an_error_gives_none() -> None:
    fine: Any
    for fine in ({}, {"error": None}, {"choices": []}, [], "error", None, 7):
        assert find_failure(fine) is None
