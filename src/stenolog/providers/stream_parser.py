"""Parser for the stream of an OpenAI-compatible server. Does no I/O.

Servers differ in how they send tool calls, reasoning and usage. All known differences are handled
here, so that readers of deltas see one format.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from stenolog.providers.chat_model import Delta, TextBuffer, ToolCallDelta, Usage
from stenolog.providers.request_errors import Failure, RequestError, failure_of

DONE_MARKER: Final = "[DONE]"
# The excerpt is short, so that a part of an answer is not mistaken for a server's message.
_MAX_EXCERPT_LENGTH: Final = 12
"""Maximum number of characters of malformed data that an error shows."""
_REASONING_FIELDS: Final = ("reasoning_content", "reasoning", "thinking")
_CALL_FIELDS: Final = ("index", "id", "type", "function")
_HIGH_SURROGATES: Final = ("\ud800", "\udbff")


class ChunkReader:
    """The parser of one streamed answer.

    `new_id` makes an id for each call without an id. Raises RequestError for a malformed chunk, and
    for an error that the server sends instead of a chunk.
    """

    def __init__(self, *, new_id: Callable[[], str]) -> None:
        self.done = False
        """Whether the server sent `[DONE]` or a complete answer."""
        self.finished = False
        """Whether the server sent a finish reason."""
        self._usage: Usage | None = None
        self._calls = _CallParser(new_id)
        self._half_character = ""

    def read_event(self, data: str) -> Delta | None:
        """Parse one event; return None if it adds nothing to the answer."""
        if data.strip() == DONE_MARKER:
            self.done = True
            return None
        if not data.strip():
            return None
        chunk = decode_json(data, "chunk")
        if (failure := failure_of(chunk)) is not None:
            raise RequestError(failure)
        return self._parse_chunk(chunk, "delta", data)

    def read_complete(self, body: str) -> Delta | None:
        """Parse a complete answer that a server sent although a stream was requested."""
        answer = decode_json(body, "answer")
        if (failure := failure_of(answer)) is not None:
            raise RequestError(failure)
        if not isinstance(answer, dict) or not answer.get("choices"):
            raise _malformed_error("answer", body)
        self.done = True
        return self._parse_chunk(answer, "message", body)

    def read_rest(self) -> Delta | None:
        """Return the parts known only at the end: the usage, and an incomplete last character."""
        text = "\ufffd" if self._half_character else ""
        self._half_character = ""
        return Delta(text=text, usage=self._usage) if text or self._usage else None

    def _parse_chunk(self, chunk: Any, field: str, data: str) -> Delta | None:
        if not isinstance(chunk, dict):
            raise _malformed_error("chunk", data)
        # Some servers send running totals in every chunk; the last total is valid.
        self._usage = _parse_usage(chunk.get("usage")) or self._usage
        choices = chunk.get("choices") or []
        if not isinstance(choices, list):
            raise _malformed_error("chunk", data)
        for choice in choices:
            if not isinstance(choice, dict):
                raise _malformed_error("chunk", data)
            if choice.get("index") in (0, None):
                return self._parse_choice(choice, field, data)
        return None

    def _parse_choice(self, choice: Mapping[str, Any], field: str, data: str) -> Delta | None:
        message = choice.get(field) or {}
        if not isinstance(message, dict):
            raise _malformed_error("chunk", data)
        deltas = message.get("tool_calls") or []
        if not isinstance(deltas, list) or not all(isinstance(call, dict) for call in deltas):
            raise _malformed_error("chunk", data)
        text, thinking = _text_and_reasoning(message.get("content"))
        text += _text_or_empty(message.get("refusal"))
        reasonings = filter(None, (_text_or_empty(message.get(name)) for name in _REASONING_FIELDS))
        finish = "" if self.finished else _text_or_empty(choice.get("finish_reason"))
        self.finished = self.finished or bool(finish)
        delta = Delta(
            text=self._complete_characters(text),
            reasoning=_fix_surrogates(next(reasonings, thinking)),
            details=_reasoning_details(message.get("reasoning_details")),
            calls=tuple(self._calls.parse_part(call) for call in deltas),
            finish=finish,
        )
        return delta if delta != _EMPTY_DELTA else None

    def _complete_characters(self, text: str) -> str:
        """Return the text. Half a surrogate pair at its end is kept for the next piece."""
        if not text:
            return ""
        text = self._half_character + text
        self._half_character = (
            text[-1] if _HIGH_SURROGATES[0] <= text[-1] <= _HIGH_SURROGATES[1] else ""
        )
        return _fix_surrogates(text[:-1] if self._half_character else text)


_EMPTY_DELTA: Final = Delta()


class _CallParser:
    """Parser of parts of tool calls. Servers identify a call by an index, an id, or not at all."""

    def __init__(self, new_id: Callable[[], str]) -> None:
        self._new_id = new_id
        self._ids: list[str] = []
        """The server's id of each call, in the order of our indexes; empty if it sent no id."""
        self._arguments: list[TextBuffer] = []
        self._index_by_id: dict[str, int] = {}
        """Our index by the server's id."""
        self._index_by_number: dict[int, int] = {}
        """Our index by the server's index."""

    def parse_part(self, call: Mapping[str, Any]) -> ToolCallDelta:
        function = call.get("function")
        function = function if isinstance(function, dict) else {}
        id, name = _text_or_empty(call.get("id")), _text_or_empty(function.get("name"))
        value = function.get("arguments")
        arguments = value if isinstance(value, str) else "" if value is None else json.dumps(value)
        number = call.get("index")
        number = number if isinstance(number, int) and not isinstance(number, bool) else None
        index = self._find_index(number, id=id, name=name, arguments=arguments)
        if index is None:
            index = len(self._ids)
            self._ids.append(id)
            self._index_by_id.setdefault(id, index)
            self._arguments.append(TextBuffer())
            if number is not None:
                self._index_by_number[number] = index
            id = id or self._new_id()
        self._arguments[index].add(arguments)
        extra = {
            field: value
            for field, value in call.items()
            if field not in _CALL_FIELDS and value is not None
        }
        return ToolCallDelta(
            index=index,
            id=id,
            name=name,
            arguments=_fix_surrogates(arguments),
            extra=_make_storable(extra),
        )

    def _find_index(self, number: int | None, *, id: str, name: str, arguments: str) -> int | None:
        """Return the index of the call that a part belongs to, or None if it starts a new call."""
        if number is None:
            if id:
                return self._index_by_id.get(id)
            return None if name or not self._ids else len(self._ids) - 1
        index = self._index_by_number.get(number)
        if index is None or not id or not self._ids[index]:
            # Some servers send all calls with index 0 and without an id.
            # A new call starts when the arguments of the previous call are complete JSON.
            is_second_call = index is not None and name and not id and arguments.startswith("{")
            return None if is_second_call and _is_json(self._arguments[index or 0].text) else index
        # Some servers use index 0 for every call.
        return index if self._ids[index] == id else None


def decode_json(data: str, source: str) -> Any:
    """Decode the JSON of a chunk or an answer. Raises RequestError with the start of the text."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise _malformed_error(source, data) from None


def _malformed_error(source: str, data: str) -> RequestError:
    excerpt = data if len(data) <= _MAX_EXCERPT_LENGTH else f"{data[:_MAX_EXCERPT_LENGTH]}…"
    return RequestError(
        Failure(f"sent a malformed {source} of {len(data):,} characters: {excerpt!r}")
    )


def _text_and_reasoning(content: Any) -> tuple[str, str]:
    """Return the text and the reasoning of a content, which may be a list of parts."""
    if isinstance(content, str):
        return content, ""
    text = thinking = ""
    for part in content if isinstance(content, list) else ():
        if not isinstance(part, dict):
            continue
        if part.get("type") == "thinking":
            thinking += _text_and_reasoning(part.get("thinking"))[0]
        else:
            text += _text_or_empty(part.get("text"))
    return text, thinking


def _reasoning_details(value: Any) -> tuple[dict[str, Any], ...]:
    details = value if isinstance(value, list) else ()
    return tuple(_make_storable(detail) for detail in details if isinstance(detail, dict))


def _parse_usage(value: Any) -> Usage | None:
    if not isinstance(value, dict):
        return None
    details = value.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    usage = Usage(
        prompt=_plausible_count(value.get("prompt_tokens")),
        answer=_plausible_count(value.get("completion_tokens")),
        cached=_plausible_count(cached) or _plausible_count(value.get("prompt_cache_hit_tokens")),
    )
    return usage if usage != Usage() else None


def _plausible_count(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def _text_or_empty(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _is_json(arguments: str) -> bool:
    try:
        json.loads(arguments)
    except (ValueError, RecursionError):
        return False
    return True


def _fix_surrogates(text: str) -> str:
    """Join surrogate pairs and replace lone surrogates, which stores reject."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _make_storable(value: dict[str, Any]) -> dict[str, Any]:
    """Return the value without parts that stores reject; empty if it cannot be encoded."""
    try:
        encoded = json.dumps(value, ensure_ascii=False)
        decoded = json.loads(_fix_surrogates(encoded), parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        return {}
    return decoded if isinstance(decoded, dict) else {}
