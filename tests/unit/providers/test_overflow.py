"""Tests the detection of errors about too long requests, by server, and of similar errors."""

import pytest

from stenolog.providers.request_errors import read_overflow

TOO_LONG = [
    (
        "This model's maximum context length is 8192 tokens. However, your messages resulted in "
        "9001 tokens. Please reduce the length of the messages.",
        8_192,
    ),
    ("Error code: 400 - {'error': {'code': 'context_length_exceeded'}}", None),
    ("Your input exceeds the context window of this model. Please adjust your input.", None),
    ("prompt is too long: 210000 tokens > 200000 maximum", 200_000),
    ("input length and `max_tokens` exceed context limit: 188240 + 21333 > 200000", 200_000),
    ("prompt too long; exceeded max context length by 123 tokens", None),
    ("the input length exceeds the context length", None),
    (
        "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens "
        "(4500 in the messages, 500 in the completion).",
        4_096,
    ),
    ("The decoder prompt (length 5000) is longer than the maximum model length of 4096.", 4_096),
    ("The engine prompt length 5000 exceeds the max_model_len 4096. Please reduce prompt.", 4_096),
    (
        "request (5000 tokens) exceeds the available context size (4096 tokens), try increasing it",
        4_096,
    ),
    ("the request exceeds the available context size. try increasing the context size", None),
    (
        '{"error":{"code":400,"message":"the request exceeds the available context size",'
        '"type":"exceed_context_size_error","n_prompt_tokens":5000,"n_ctx":4096}}',
        4_096,
    ),
    ("Requested tokens (5000) exceed context window of 4096", 4_096),
    ("Context size has been exceeded.", None),
    ("Cannot truncate prompt with n_keep (15028) >= n_ctx (7424)", 7_424),
    (
        "The number of tokens to keep from the initial prompt is greater than the context length "
        "(n_keep: 10247 >= n_ctx: 4096). Try to load the model with a larger context length.",
        4_096,
    ),
    ("Input length 6491 exceeds context length 1500", 1_500),
    ("Input tokens exceed the configured limit of 272000 tokens", None),
    ("413 status code (no body)", None),
    (
        "The input token count (1200000) exceeds the maximum number of tokens allowed (1048576).",
        1_048_576,
    ),
    (
        "This endpoint's maximum context length is 131072 tokens. However, you requested about "
        "140000 tokens (130000 of text input, 10000 in the output).",
        131_072,
    ),
    (
        "Trying to keep the first 5000 tokens when context the overflows. However, the model is "
        "loaded with context length of only 4096 tokens, which is not enough.",
        4_096,
    ),
    ("Prompt contains 40000 tokens, too large for model with 32768 maximum context length", 32_768),
    ("`inputs` tokens + `max_new_tokens` must be <= 4096. Given: 5000 `inputs` tokens", 4_096),
    ("The input (5000 tokens) is longer than the model's context length (4096 tokens).", 4_096),
    ("This model's maximum prompt length is 131072 but the request contains 140000", 131_072),
    ("Input is too long for requested model.", None),
    ("Invalid request: Your request exceeded model token limit: 8192", 8_192),
    ("Input length (5000) exceeds model's maximum context length (4096).", 4_096),
    ("Input length 6491 exceeds the context length", None),
    ("The input token count (1200000) exceeds the maximum number of tokens allowed.", None),
    ("The input token count exceeds the maximum number of tokens allowed 1048576.", 1_048_576),
    (
        "Unable to submit request because the input token count is 32825 but model only supports "
        "up to 32768. Reduce the input token count and try again.",
        32_768,
    ),
    (
        "You passed 99073 input tokens and requested 32000 output tokens. However, the model's "
        "context length is only 131072 tokens, resulting in a maximum input length of 99072 "
        "tokens. Please reduce the length of the input prompt.",
        131_072,
    ),
    (
        "The prompt (total length 25938) is too long to fit into the model (context length 4096).",
        4_096,
    ),
]

SOMETHING_ELSE = [
    "Rate limit reached for gpt-4o on tokens per min (TPM): Limit 30000, Requested 45000",
    "Request too large for gpt-4o in organization org-x on tokens per min (TPM): Limit 30000",
    "max_tokens: 100000 > 64000, which is the maximum allowed number of output tokens",
    "'max_tokens' or 'max_completion_tokens' is too large: 5000. This model's maximum context "
    "length is 4096 tokens and your request has 200 input tokens",
    "max_tokens is too large: 100000. This model supports at most 16384 completion tokens",
    "Incorrect API key provided. invalid_api_key",
    "You exceeded your current quota, please check your plan",
    "Connection error.",
    "tool_calls must be followed by tool messages",
    "",
]


@pytest.mark.quick(8)
@pytest.mark.parametrize(("text", "limit"), TOO_LONG)
def test_overflow_errors_and_their_limits_are_recognized(text: str, limit: int | None) -> None:
    found = read_overflow(RuntimeError(text))
    assert found is not None
    assert found.limit == limit


@pytest.mark.parametrize("text", SOMETHING_ELSE)
def test_similar_errors_are_not_overflows(text: str) -> None:
    assert read_overflow(RuntimeError(text)) is None


def test_overflow_text_is_found_in_all_error_fields() -> None:
    error = RuntimeError("Error code: 400")
    error.body = {"error": {"message": "prompt is too long: 9 tokens > 8 maximum"}}  # type: ignore[attr-defined]
    assert read_overflow(error) is not None
    wrapped = ValueError("the call failed")
    wrapped.__cause__ = error
    assert read_overflow(wrapped) is not None
