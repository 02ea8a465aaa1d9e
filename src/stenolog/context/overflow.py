"""Recognition of provider errors that mean that the request was too long.

There is no common error code, so this module knows the error texts of many servers. Similar errors
must not match: summarizing a conversation because of a rate limit would not help.
"""

import re
from collections.abc import Iterator
from typing import Any, Final

from msgspec import Struct

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
