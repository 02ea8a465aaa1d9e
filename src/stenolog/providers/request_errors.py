"""Failures of requests to a model: the server's message, and whether and when to retry.

The decisions are pure functions of status, message, `Retry-After` and the number of attempts.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from msgspec import Struct

from stenolog.lazy_loading import lazy_pattern

_MAX_MESSAGE_LENGTH: Final = 2_000
"""Maximum number of characters of a server's message in an error."""
_MAX_FIELD_DEPTH: Final = 4
"""Maximum depth of the fields that an error shows."""
_ECHO_FIELDS: Final = frozenset({"input", "body", "request", "messages", "prompt"})
"""Fields in which servers repeat the request; error texts leave these fields out."""
_ECHOED_INPUT: Final = lazy_pattern(r"(['\"]input['\"]: ?)['\"\[{(].*", re.DOTALL)
"""Pattern of the request that one server repeats, inside a Python list printed as text."""
_RETRIED_STATUSES: Final = frozenset({408, 409, 425, 429})
_NOT_RETRIED_STATUSES: Final = frozenset({501, 505})


class Failure(Exception):
    """The reason why an attempt gave no answer, or only a part of an answer."""

    def __init__(
        self, description: str, status: int = 0, retry_after: str = "", *, silent: bool = False
    ) -> None:
        super().__init__(description)
        self.description = description
        """End of a sentence that starts with the server's name, such as `answered 500: busy`."""
        self.status = status
        """HTTP status, or the status in an error inside a stream; 0 if there is none."""
        self.retry_after = retry_after
        """Header `Retry-After` of the response."""
        self.silent = silent
        """Whether the server accepted the request and then sent nothing for too long."""


class RetryLimits(Struct, frozen=True, kw_only=True):
    """Number of retries and delays between them."""

    retries: int = 4
    retries_after_silence: int = 1
    """Maximum number of retries after silence: each retry makes a slow server start over."""
    backoff: float = 0.5
    """Seconds before the first retry. Each later delay is twice as long."""
    max_delay: float = 60.0
    """Maximum delay in seconds. If the server asks for a longer delay, there is no retry."""


def seconds_to_wait(
    failure: Failure, limits: RetryLimits, *, attempts: int, random_fraction: float
) -> float | None:
    """Return the seconds to wait before the next attempt, or None if there is no next attempt.

    `attempts`: number of attempts so far. `random_fraction`: between 0 and 1, so that many clients
    do not retry at the same moment. If the server asks for a longer delay than the maximum, there
    is no retry, because a request before that time would be rejected.
    """
    retries = limits.retries
    if failure.silent:
        retries = min(retries, limits.retries_after_silence)
    if attempts > retries or not is_temporary(failure):
        return None
    requested_delay = _parse_retry_after(failure.retry_after)
    if requested_delay is not None:
        return requested_delay if requested_delay <= limits.max_delay else None
    doubled_delay = limits.backoff * 2.0 ** min(attempts - 1, 30)
    return min(doubled_delay * (0.5 + random_fraction / 2), limits.max_delay)


def is_temporary(failure: Failure) -> bool:
    """Whether the same request may succeed later: the server was busy, unreachable or broken."""
    if _PERMANENT_ERROR_PATTERN.search(failure.description):
        return False
    status = failure.status
    return (
        status < 400
        or status in _RETRIED_STATUSES
        or (status >= 500 and status not in _NOT_RETRIED_STATUSES)
    )


# Some servers report with status 500, or inside the stream, that a request is too long.
# One server uses 429 for an empty account, and for a single request above the limit per minute.
# Retrying after one of these errors never helps.
_PERMANENT_ERROR_PATTERN: Final = lazy_pattern(
    r"context.{0,20}\b(?:length|size|window|limit)\b|context_length|(?:prompt|input).{0,20}too long"
    r"|insufficient_quota|request too large",
    re.IGNORECASE | re.DOTALL,
)


def _parse_retry_after(header: str) -> float | None:
    """Return the seconds in `Retry-After`; None for other text. No known provider sends dates."""
    try:
        seconds = float(header)
    except ValueError:
        return None
    return max(seconds, 0.0) if math.isfinite(seconds) else None


def find_failure(answer: Any) -> Failure | None:
    """Return the failure that a response body or a stream chunk reports, or None."""
    if isinstance(answer, list) and answer:
        answer = answer[0]
    if not isinstance(answer, Mapping):
        return None
    error = answer.get("error")
    if not error and answer.get("object") == "error":
        error = {name: value for name, value in answer.items() if name != "object"}
    if not error:
        return None
    status = _find_status(error)
    prefix = f"answered with an error ({status})" if status else "answered with an error"
    return Failure(f"{prefix}: {_describe_error(error)}", status)


def failure_of_response(status: int, body: str) -> Failure:
    """Return the failure for a response with this status and body, with the server's message."""
    message = error_message(body)
    # `read_overflow` looks for `no body`, the wording of most clients.
    text = f"answered {status}: {message}" if message else f"answered {status} (no body)"
    return Failure(text, status)


def error_message(body: str) -> str:
    """Return the message of an error body in one line; JSON fields are listed with their names."""
    try:
        error = json.loads(body)
    except (ValueError, RecursionError):
        return _shorten_message(_page_text(body))
    if isinstance(error, list) and len(error) == 1:
        error = error[0]
    if isinstance(error, Mapping) and error.get("error"):
        error = error["error"]
    return _describe_error(error)


def _page_text(html: str) -> str:
    """Return the text of an error page outside of tags, styles and scripts without tags."""
    return re.sub(r"<(?:(?:script|style)\b[^<]*</)?[^<>]*>", " ", html, flags=re.IGNORECASE)


def _describe_error(error: Any) -> str:
    """Return an error's message, with its other fields in brackets."""
    if not isinstance(error, Mapping):
        return _shorten_message(
            error if isinstance(error, str) else json.dumps(error, ensure_ascii=False)
        )
    message = error.get("message")
    fields = {name: value for name, value in error.items() if name != "message" or not message}
    details = ", ".join(_list_fields(fields, depth=0))
    text = message if isinstance(message, str) else json.dumps(message) if message else ""
    return _shorten_message(f"{text} ({details})" if text and details else text or details)


def _list_fields(value: Any, *, depth: int, name: str = "") -> Iterator[str]:
    if value is None or value == "" or depth > _MAX_FIELD_DEPTH or name in _ECHO_FIELDS:
        return
    if isinstance(value, Mapping):
        for inner_name, item in value.items():
            yield from _list_fields(item, depth=depth + 1, name=str(inner_name))
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        for item in value:
            yield from _list_fields(item, depth=depth + 1, name=name)
    else:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        yield f"{name}: {text}" if name else text


def _shorten_message(text: str) -> str:
    text = " ".join(_ECHOED_INPUT.sub(r"\1…", text[: 4 * _MAX_MESSAGE_LENGTH]).split())
    return text if len(text) <= _MAX_MESSAGE_LENGTH else f"{text[:_MAX_MESSAGE_LENGTH]}…"


def _find_status(error: Any) -> int:
    """Return the status of an error, from a number or a common word; 0 if there is none."""
    if not isinstance(error, Mapping):
        return 0
    for name in ("code", "status", "status_code", "http_code"):
        value = error.get(name)
        if isinstance(value, str) and value.isascii() and value.isdigit():
            value = int(value[:4])
        if isinstance(value, int) and not isinstance(value, bool) and 400 <= value < 600:
            return value
    type_and_code = f"{error.get('type')} {error.get('code')}".lower()
    return next((status for word, status in _STATUS_BY_WORD.items() if word in type_and_code), 0)


_STATUS_BY_WORD: Final = {
    "rate_limit": 429,
    "overloaded": 529,
    "invalid_request": 400,
    "badrequest": 400,
    "context_length": 400,
    "context_size": 400,
    "authentication": 401,
    "permission": 403,
    "not_found": 404,
}


_NUMBER_PATTERN: Final = r"(\d[\d,_]*)"


class ContextOverflow(Struct, frozen=True, kw_only=True):
    """A rejection because the request was too long for the model."""

    limit: int | None
    """Context size of the model in tokens, if the error contains it."""


# `#` stands for a number. The last number that matches is the limit.
# The messages are from OpenAI and compatible APIs (vLLM, OpenRouter, DeepSeek, Azure), Anthropic,
# llama.cpp, Ollama, Gemini, LM Studio, Mistral, SGLang, Text Generation Inference, xAI, Bedrock,
# Cohere, Moonshot and Copilot.
_OVERFLOW_PATTERNS: Final = [
    lazy_pattern(pattern.replace("#", _NUMBER_PATTERN), re.IGNORECASE)
    for pattern in (
        r"maximum context length(?: of| is|\s*\(|:)?\s*# ?tokens",
        r"maximum context length(?: of| is|\s*\(|:)?\s*\(?#",
        r"# maximum context length",
        r"context[_ ]length[_ ]exceeded",
        r"model_context_window_exceeded",
        r"exceeds? (?:the |model )?context window",
        r"input tokens exceed the configured limit",
        r"request_too_large",
        r"\b413\b.{0,40}\bno body\b",
        r"exceed context window of #",
        r"prompt is too long: # tokens > # maximum",
        r"prompt is too long",
        r"exceed context limit: # \+ # > #",
        r"exceeds? (?:the )?available context size \(# tokens\)",
        r"exceeds? (?:the )?available context size",
        r"exceed_context_size_error",
        r"context size has been exceeded",
        r"prompt too long; exceeded (?:max )?context length",
        r"input length(?: \S+)? exceeds (?:the |maximum )?context length(?: #)?",
        r"cannot truncate prompt with n_keep",
        r"longer than the maximum model length of #",
        r"exceeds the max_model_len(?: of)? #",
        r"longer than the model's context length \(# tokens\)",
        r"too long to fit into the model \(context length #\)",
        r"input token count(?: \S+)? exceeds the maximum number of tokens allowed(?: \(?#)?",
        r"input token count is # but model only supports up to #",
        r"context length (?:is|of) only # tokens",
        r"reached context length of # tokens",
        r"tokens to keep from the initial prompt is greater than the context length",
        r"`?max_new_tokens`? must be <= #",
        r"`?inputs`? must have less than # tokens",
        r"maximum prompt length is #",
        r"input is too long for requested model",
        r"tokens in the prompt cannot exceed #",
        r"exceeded model token limit: #",
        r"prompt token count of # exceeds the limit of #",
        r"range of input length should be \[1, #\]",
        r"prompt exceeds max(?:imum)? length",
        r"reduce the length of the (?:messages|prompt|input)",
        r"context window exceeds limit",
    )
]
# Errors that may match a pattern above but have another cause.
_NO_OVERFLOW_PATTERNS: Final = [
    lazy_pattern(pattern, re.IGNORECASE)
    for pattern in (
        r"rate.?limit",
        r"tokens per (?:min|day|hour)",
        r"\bTP[MD]\b",
        r"quota",
        r"maximum allowed number of output tokens",
        r"max_(?:completion_|output_)?tokens['\"`]? is too (?:large|high)",
        r"max_(?:completion_|output_)?tokens['\"`]? or ['\"`]?max_\w+['\"`]? is too (?:large|high)",
        r"invalid.api.?key|unauthori[sz]ed|authentication",
    )
]


def read_overflow(error: BaseException) -> ContextOverflow | None:
    """Return the overflow that an error reports, or None if the error has another cause."""
    text = "\n".join(_collect_error_texts(error))
    if any(pattern.search(text) for pattern in _NO_OVERFLOW_PATTERNS):
        return None
    matches = [match for pattern in _OVERFLOW_PATTERNS if (match := pattern.search(text))]
    if not matches:
        return None
    llama_cpp_limit = re.search(r"n_ctx['\"]?\s*[:=(]\s*(\d+)", text)
    stated_limits = [match.group(match.lastindex) for match in matches if match.lastindex]
    limit = llama_cpp_limit[1] if llama_cpp_limit else next(iter(stated_limits), None)
    return ContextOverflow(limit=_parse_limit(limit))


def _parse_limit(limit_text: str | None) -> int | None:
    digits = re.sub(r"\D", "", limit_text or "")
    return int(digits) if 0 < len(digits) < 12 and int(digits) > 0 else None


def _collect_error_texts(error: BaseException) -> Iterator[str]:
    """Yield the texts of an error and its causes, from all fields in which clients put texts."""
    cause: BaseException | None = error
    for _ in range(5):
        if cause is None:
            return
        yield str(cause)
        for name in ("message", "code", "body"):
            value: Any = getattr(cause, name, None)
            if isinstance(value, str | dict):
                yield str(value)
        text = getattr(getattr(cause, "response", None), "text", None)
        if isinstance(text, str):
            yield text
        cause = cause.__cause__
