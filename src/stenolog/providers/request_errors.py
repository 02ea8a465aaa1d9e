"""Failures of requests to a model: the server's message, and whether and when to retry.

The decisions are pure functions of status, message, `Retry-After` and the number of attempts.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Final

from msgspec import Struct

_MAX_CHARACTERS: Final = 2_000
_MAX_DEPTH: Final = 4
_ECHOES: Final = frozenset({"input", "body", "request", "messages", "prompt"})
"""Fields in which servers repeat the request. Text of the user must not be mistaken for a server
message, for example that the request was too long."""
_ECHO: Final = re.compile(r"(['\"]input['\"]: ?)['\"\[{(].*", re.DOTALL)
"""The same inside of a Python list as text, as one server sends it."""
_RETRIED: Final = frozenset({408, 409, 425, 429})
_NOT_RETRIED: Final = frozenset({501, 505})


class Failure(Struct, frozen=True):
    """The reason why an attempt gave no answer, or only a part of it."""

    what: str
    """What the server did or said, as the rest of a sentence after its name: `answered 500:
    overloaded`."""
    status: int = 0
    """HTTP status, or the status that an error inside of a stream contains; 0 if there is none."""
    retry_after: str = ""
    """Header `Retry-After` of the response."""
    silent: bool = False
    """Whether the server accepted the request and then sent nothing for too long."""


class RequestError(Exception):
    """An exception that carries a failure to the code that decides about retries."""

    def __init__(self, failure: Failure) -> None:
        self.failure = failure
        super().__init__(failure.what)


class RetryLimits(Struct, frozen=True, kw_only=True):
    """Number of retries and delays between them."""

    retries: int = 4
    after_silence: int = 1
    """Maximum number of retries after silence: the server may still be processing a long prompt,
    and each retry makes it start over."""
    backoff: float = 0.5
    """Seconds before the first retry. Each later delay is twice as long."""
    longest: float = 60.0
    """Maximum delay in seconds, whatever the server asks for."""


def seconds_to_wait(
    failure: Failure, patience: RetryLimits, *, tried: int, now: datetime, chance: float
) -> float | None:
    """Return the seconds to wait before the next attempt, or None if there should be none.

    `tried`: number of attempts so far. `chance`: between 0 and 1, so that many clients do not retry
    at the same moment. If the server asks for a longer delay than the maximum, there is no retry:
    it would be rejected.
    """
    retries = patience.retries
    if failure.silent:
        retries = min(retries, patience.after_silence)
    if tried > retries or not is_temporary(failure):
        return None
    asked = read_retry_after(failure.retry_after, now)
    if asked is not None:
        return asked if asked <= patience.longest else None
    doubled = patience.backoff * 2.0 ** min(tried - 1, 30)
    return min(doubled * (0.5 + chance / 2), patience.longest)


def is_temporary(failure: Failure) -> bool:
    """Whether the same request may succeed later: the server was busy, broken or cut off."""
    if _PERMANENT.search(failure.what):
        return False
    status = failure.status
    return status < 400 or status in _RETRIED or (status >= 500 and status not in _NOT_RETRIED)


# Some servers report with status 500, or inside of the stream, that a request is too long. One
# reports with 429 that the account is empty, or that one request exceeds the limit per minute.
# Retrying never helps.
_PERMANENT: Final = re.compile(
    r"context.{0,20}\b(?:length|size|window|limit)\b|context_length|(?:prompt|input).{0,20}too long"
    r"|insufficient_quota|request too large",
    re.IGNORECASE | re.DOTALL,
)


def read_retry_after(value: str, now: datetime) -> float | None:
    """Return the seconds of a `Retry-After`, given as a number or a date, or None."""
    value = value.strip()
    try:
        seconds = float(value)
    except ValueError:
        try:
            until = parsedate_to_datetime(value)
        except (ValueError, TypeError, IndexError, OverflowError):
            return None
        # Dates in HTTP are in UTC.
        until = until if until.tzinfo else until.replace(tzinfo=UTC)
        seconds = (until - now).total_seconds()
    return max(seconds, 0.0) if math.isfinite(seconds) else None


def failure_of(answer: Any) -> Failure | None:
    """Return the error that a body or a chunk contains, or None."""
    if isinstance(answer, list) and answer:
        answer = answer[0]
    if not isinstance(answer, Mapping):
        return None
    error = answer.get("error")
    if not error and answer.get("object") == "error":
        error = {name: value for name, value in answer.items() if name != "object"}
    if not error:
        return None
    status = _status(error)
    named = f"answered with an error ({status})" if status else "answered with an error"
    return Failure(f"{named}: {_describe_error(error)}", status)


def failure_of_response(status: int, body: str) -> Failure:
    """Return the failure for a response with this status and body, with the server's message."""
    words = error_message(body)
    # `no body`: the wording of most clients, which `read_overflow` looks for.
    said = f"answered {status}: {words}" if words else f"answered {status} (no body)"
    return Failure(said, status)


def error_message(body: str) -> str:
    """Return the message of an error body in one line; JSON fields are listed with their names."""
    try:
        told = json.loads(body)
    except (ValueError, RecursionError):
        return _short(_without_tags(body))
    if isinstance(told, list) and len(told) == 1:
        told = told[0]
    if isinstance(told, Mapping) and told.get("error"):
        told = told["error"]
    return _describe_error(told)


# ASCII: otherwise "\u017f" counts as a form of "s".
_SKIPPED: Final = re.compile(r"<(script|style)\b", re.IGNORECASE | re.ASCII)
_CLOSING: Final = {
    name: re.compile(f"</{name}>", re.IGNORECASE | re.ASCII) for name in ("script", "style")
}


def _without_tags(html: str) -> str:
    """Replace tags, scripts and styles by spaces, in linear time."""
    pieces, at = list[str](), 0
    never_closed: set[str] = set()
    while (start := html.find("<", at)) >= 0:
        pieces += [html[at:start], " "]
        end = -1
        skipped = _SKIPPED.match(html, start)
        name = "" if skipped is None else skipped[1].lower()
        if name and name not in never_closed:
            closing = _CLOSING[name].search(html, start)
            if closing is not None:
                end = closing.end() - 1
            else:
                never_closed.add(name)
        if end < 0:
            end = html.find(">", start)
        if end < 0:
            at = start
            break
        at = end + 1
    return "".join([*pieces, html[at:]])


def _describe_error(error: Any) -> str:
    """Return an error's message, with its other fields in brackets."""
    if not isinstance(error, Mapping):
        return _short(error if isinstance(error, str) else json.dumps(error, ensure_ascii=False))
    message = error.get("message")
    others = {name: value for name, value in error.items() if name != "message" or not message}
    further = ", ".join(_fields(others, depth=0))
    said = message if isinstance(message, str) else json.dumps(message) if message else ""
    return _short(f"{said} ({further})" if said and further else said or further)


def _fields(value: Any, *, depth: int, name: str = "") -> Iterator[str]:
    if value is None or value == "" or depth > _MAX_DEPTH or name in _ECHOES:
        return
    if isinstance(value, Mapping):
        for inner, held in value.items():
            yield from _fields(held, depth=depth + 1, name=str(inner))
    elif isinstance(value, list) and any(isinstance(held, Mapping) for held in value):
        for held in value:
            yield from _fields(held, depth=depth + 1, name=name)
    else:
        told = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        yield f"{name}: {told}" if name else told


def _short(text: str) -> str:
    text = " ".join(_ECHO.sub(r"\1…", text[: 4 * _MAX_CHARACTERS]).split())
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}…"


def _status(error: Any) -> int:
    """Return the status of an error, from a number or a common word; 0 if there is none."""
    if not isinstance(error, Mapping):
        return 0
    for name in ("code", "status", "status_code", "http_code"):
        value = error.get(name)
        if isinstance(value, str) and value.isascii() and value.isdigit():
            value = int(value[:4])
        if isinstance(value, int) and not isinstance(value, bool) and 400 <= value < 600:
            return value
    words = f"{error.get('type')} {error.get('code')}".lower()
    return next((status for word, status in _STATUS_BY_WORD.items() if word in words), 0)


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


_NUMBER: Final = r"(\d[\d,_]*)"


class Overflow(Struct, frozen=True, kw_only=True):
    """A rejection because the request was too long for the model."""

    limit: int | None
    """Context size of the model in tokens, if the error contains it."""


# Each pattern includes the words around the limit, if the server states it. By server: OpenAI and
# compatible APIs (vLLM, OpenRouter, DeepSeek, Azure), Anthropic, llama.cpp, Ollama, Gemini, LM
# Studio, Mistral, Text Generation Inference, SGLang, xAI, Bedrock, Cohere, Moonshot, Copilot.
_TOO_LONG: Final = [
    re.compile(pattern.replace("#", _NUMBER), re.IGNORECASE)
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
        r"input length(?: #)? exceeds (?:the |maximum )?context length(?: #)?",
        r"cannot truncate prompt with n_keep",
        r"longer than the maximum model length of #",
        r"exceeds the max_model_len(?: of)? #",
        r"longer than the model's context length \(# tokens\)",
        r"input token count(?: \(#\))? exceeds the maximum number of tokens allowed(?: \(#\))?",
        r"loaded with context length of only # tokens",
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
_OTHER_ERRORS: Final = [
    re.compile(pattern, re.IGNORECASE)
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


def is_overflow(error: BaseException) -> bool:
    """Whether a provider rejected the request because it is too long."""
    return read_overflow(error) is not None


def read_overflow(error: BaseException) -> Overflow | None:
    """Return the overflow that an error reports, or None if the error has another cause."""
    text = "\n".join(_texts(error))
    if any(pattern.search(text) for pattern in _OTHER_ERRORS):
        return None
    found = [match for pattern in _TOO_LONG if (match := pattern.search(text))]
    if not found:
        return None
    named = re.search(r"n_ctx['\"]?\s*[:=(]\s*(\d+)", text)
    numbers = [match.group(match.lastindex) for match in found if match.lastindex]
    limit = named[1] if named else next(iter(numbers), None)
    return Overflow(limit=_parse_number(limit))


def _parse_number(number: str | None) -> int | None:
    digits = re.sub(r"\D", "", number or "")
    return int(digits) if 0 < len(digits) < 12 and int(digits) > 0 else None


def _texts(error: BaseException) -> Iterator[str]:
    """Yield the texts of an error and its causes, from all fields that clients use for them."""
    seen: BaseException | None = error
    for _ in range(5):
        if seen is None:
            return
        yield str(seen)
        for name in ("message", "code", "body"):
            value: Any = getattr(seen, name, None)
            if isinstance(value, str | dict):
                yield str(value)
        text = getattr(getattr(seen, "response", None), "text", None)
        if isinstance(text, str):
            yield text
        seen = seen.__cause__
