"""What a scripted model server plays: faults by name, and the answers that it gives by itself."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from msgspec import Struct

from stenolog.providers.scripted import Said, calls_in, tool_call

Calls = Literal["parts", "whole", "no_index", "no_id", "zero_index"]


class Play(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one request is answered; each field by itself, or several at once.

    Times are in seconds, and pieces those of a streamed answer.
    """

    status: int = 200
    """An error of this status."""
    body: str | None = None
    """What the error says, in place of the usual words; for 200, the whole body."""
    content_type: str = "application/json"
    """Of a body that is given."""
    retry_after: str = ""
    """The header `Retry-After`."""
    overflow: str = ""
    """The request is said to be too long, in this dialect: one of OVERFLOWS."""
    first_byte: float = 0.0
    """How long nothing comes at all."""
    first_piece: float = 0.0
    """How long nothing comes behind the headers."""
    pause: float = 0.0
    """How long nothing comes between two pieces."""
    stall_after: int | None = None
    """After so many pieces nothing comes any more, and the connection stays."""
    cut_after: int | None = None
    """The connection ends after so many pieces, as if the server had crashed."""
    end_after: int | None = None
    """The response ends well after so many pieces, without a reason or `[DONE]`."""
    reset_after: int | None = None
    """The connection is reset after so many pieces."""
    error_after: int | None = None
    """After so many pieces comes an error in place of a chunk."""
    error: str = '{"message":"The server had an error","type":"server_error","code":500}'
    """The JSON of that error."""
    malformed_after: int | None = None
    """After so many pieces comes a chunk that is none."""
    malformed: str = '{"choices":[{"delta":{"content":"half'
    """What stands in it."""
    reset: bool = False
    """The connection is reset before anything is said."""
    usage: bool = True
    """Whether the usage is told."""
    done: bool = True
    """Whether `[DONE]` is said."""
    finish: bool = True
    """Whether it is told why the answer ended."""
    whole: bool = False
    """The answer is one JSON body, though a stream was asked for."""
    calls: Calls = "parts"
    """How tool calls are sent: in parts, or whole: numbered, without a number, without an id, or
    all with the number 0."""
    reasoning_field: str = "reasoning_content"
    """Under which name thoughts are sent."""
    answer: dict[str, Any] | str | None = None
    """What is answered, whatever was asked."""


OVERFLOWS: Final[Mapping[str, tuple[int, str]]] = {
    "openai": (
        400,
        '{"error":{"message":"This model\'s maximum context length is %(limit)d tokens. However, '
        "your messages resulted in %(asked)d tokens. Please reduce the length of the messages."
        '","type":"invalid_request_error","param":"messages","code":"context_length_exceeded"}}',
    ),
    "vllm": (
        400,
        '{"object":"error","message":"This model\'s maximum context length is %(limit)d tokens. '
        "However, you requested %(asked)d tokens in the messages, Please reduce the length of the "
        'messages.","type":"BadRequestError","param":null,"code":400}',
    ),
    "llama.cpp": (
        400,
        '{"error":{"code":400,"message":"the request exceeds the available context size, try '
        'increasing it","type":"exceed_context_size_error","n_prompt_tokens":%(asked)d,'
        '"n_ctx":%(limit)d}}',
    ),
    "llama.cpp-older": (
        500,
        '{"error":{"code":500,"message":"context size has been exceeded","type":"server_error"}}',
    ),
    "ollama": (
        400,
        '{"error":"prompt too long; exceeded max context length by %(over)d tokens"}',
    ),
    "openrouter": (
        400,
        '{"error":{"message":"Provider returned error","code":400,"metadata":{"raw":"{\\"error\\":'
        '{\\"message\\":\\"This endpoint\'s maximum context length is %(limit)d tokens. However, '
        'you requested about %(asked)d tokens.\\"}}","provider_name":"X"}}}',
    ),
    "anthropic": (
        400,
        '{"type":"error","error":{"type":"invalid_request_error","message":"prompt is too long: '
        '%(asked)d tokens > %(limit)d maximum"}}',
    ),
    "gemini": (
        400,
        '[{"error":{"code":400,"message":"The input token count (%(asked)d) exceeds the maximum '
        'number of tokens allowed (%(limit)d).","status":"INVALID_ARGUMENT"}}]',
    ),
    "mistral": (
        400,
        '{"object":"error","message":"Prompt contains %(asked)d tokens, too large for model with '
        '%(limit)d maximum context length","type":"invalid_request_error","code":"3051"}',
    ),
    "lm-studio": (
        400,
        '{"error":"Trying to keep the first %(asked)d tokens when context the overflows. However, '
        "the model is loaded with context length of only %(limit)d tokens, which is not "
        'enough."}',
    ),
    "xai": (
        400,
        '{"code":"Client specified an invalid argument","error":"This model\'s maximum prompt '
        'length is %(limit)d but the request contains %(asked)d tokens."}',
    ),
    "tgi": (
        422,
        '{"error":"Input validation error: `inputs` tokens + `max_new_tokens` must be <= '
        '%(limit)d. Given: %(asked)d `inputs` tokens","error_type":"validation"}',
    ),
    "413": (413, ""),
}
"""By server: the status and the body of its error for a request that is too long."""


def overflow_error(dialect: str, *, limit: int, asked: int) -> tuple[int, str]:
    """The status and the body with which that server refuses a request that is too long."""
    status, body = OVERFLOWS[dialect]
    return status, body % {"limit": limit, "asked": asked, "over": asked - limit}


def answer_by_rule(request: Mapping[str, Any]) -> Said:
    """The answer of the scripted model, which a test can foresee.

    `call NAME {json}` of a user calls that tool, `call A {…} and B {…}` two at once; results of
    tools are quoted; any other text is told back: `You said: …`.
    """
    messages: Sequence[Mapping[str, Any]] = request.get("messages") or []
    results = []
    for message in reversed(messages):
        if message.get("role") != "tool":
            break
        results.append(_text(message.get("content")))
    if results:
        return "The tools said: " + " | ".join(reversed(results))
    said = next(
        (_text(m.get("content")) for m in reversed(messages) if m.get("role") == "user"), ""
    )
    wanted = calls_in(said)
    if not wanted:
        return f"You said: {said}"
    made = sum(len(message.get("tool_calls") or ()) for message in messages)
    return {
        "content": None,
        "tool_calls": [
            tool_call(name, arguments, id=f"call_{made + number}")
            for number, (name, arguments) in enumerate(wanted, start=1)
        ],
    }


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else ()
    return " ".join(str(part.get("text", "")) for part in parts if isinstance(part, Mapping))
