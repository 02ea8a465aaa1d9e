"""Scripted behaviour of the model server: faults by name, and its default answers."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from msgspec import Struct

from stenolog.testing.scripted_model import (
    ScriptedMessage,
    content_text,
    last_user_text,
    parse_calls,
    tool_call,
)

Calls = Literal["parts", "whole", "no_index", "no_id", "zero_index"]


class ScriptedResponse(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The behaviour of the model server for one request. The fields can be combined.

    Times are in seconds; pieces are the chunks of a streamed answer.
    """

    status: int = 200
    """HTTP status; any status other than 200 is sent as an error."""
    body: str | None = None
    """Body to send instead of the default error; with status 200, instead of the answer."""
    content_type: str = "application/json"
    """Content type of `body`."""
    retry_after: str = ""
    """Header `Retry-After`."""
    overflow: str = ""
    """Key of OVERFLOWS: reject the request as too long, with the error of this kind of server."""
    first_byte: float = 0.0
    """Delay before the first byte."""
    first_piece: float = 0.0
    """Delay between the headers and the first piece."""
    pause: float = 0.0
    """Delay between two pieces."""
    stall_after: int | None = None
    """Stop sending after this many pieces, and keep the connection open."""
    cut_after: int | None = None
    """Close the connection after this many pieces, as in a crash."""
    end_after: int | None = None
    """End the response cleanly after this many pieces, without a finish reason or `[DONE]`."""
    reset_after: int | None = None
    """Reset the connection after this many pieces."""
    error_after: int | None = None
    """Send an error instead of a chunk after this many pieces."""
    error: str = '{"message":"The server had an error","type":"server_error","code":500}'
    """JSON of the error that `error_after` sends."""
    malformed_after: int | None = None
    """Send a malformed chunk after this many pieces."""
    malformed: str = '{"choices":[{"delta":{"content":"half'
    """Content of the malformed chunk."""
    reset: bool = False
    """Reset the connection before sending anything."""
    usage: bool = True
    """Whether the usage is sent."""
    done: bool = True
    """Whether `[DONE]` is sent."""
    finish: bool = True
    """Whether the finish reason is sent."""
    whole: bool = False
    """Send the answer as one JSON body even if a stream was requested."""
    calls: Calls = "parts"
    """How tool calls are sent: in parts, complete with an index, complete without an index,
    complete without index and id, or complete with index 0 for all."""
    reasoning_field: str = "reasoning_content"
    """Name of the field that contains the model's reasoning."""
    answer: dict[str, Any] | str | None = None
    """Answer to send; None: the `answer` function of the server makes the answer."""


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
    "ollama": (400, '{"error":"prompt too long; exceeded max context length by %(over)d tokens"}'),
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
"""Status and body of each server's error for a request that is too long."""


def overflow_error(dialect: str, *, limit: int, asked: int) -> tuple[int, str]:
    """Return the status and the body with which a server rejects a request that is too long."""
    status, body = OVERFLOWS[dialect]
    return status, body % {"limit": limit, "asked": asked, "over": asked - limit}


def answer_by_rule(request: Mapping[str, Any]) -> ScriptedMessage:
    """Return the default answer of the scripted model, which a test can predict.

    A user message `call NAME {json}` calls the tool NAME, and `call A {…} and B {…}` calls two
    tools at once. Tool results are quoted. Any other text is repeated: `You said: …`.
    """
    messages: Sequence[Mapping[str, Any]] = request.get("messages") or []
    tool_results = []
    for message in reversed(messages):
        if message.get("role") != "tool":
            break
        tool_results.append(content_text(message))
    if tool_results:
        return "The tools said: " + " | ".join(reversed(tool_results))
    user_text = last_user_text(messages)
    calls = parse_calls(user_text)
    if not calls:
        return f"You said: {user_text}"
    earlier_calls = sum(len(message.get("tool_calls") or ()) for message in messages)
    numbered_calls = enumerate(calls, start=earlier_calls + 1)
    tool_calls = [tool_call(*call, id=f"call_{number}") for number, call in numbered_calls]
    return {"content": None, "tool_calls": tool_calls}
