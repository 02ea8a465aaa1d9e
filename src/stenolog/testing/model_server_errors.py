"""Errors with which a model server rejects a request: a fault, or too many tokens.

The check for faults is like that of a strict provider, with error texts like OpenAI's: it accepts
only requests that all known servers accept.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

_FIELDS_BY_ROLE: Final = {
    "system": {"role", "content", "name"},
    "developer": {"role", "content", "name"},
    "user": {"role", "content", "name"},
    "assistant": {"role", "content", "name", "tool_calls", "refusal", "audio"},
    "tool": {"role", "content", "tool_call_id", "name"},
}
_PART_TYPES_BY_ROLE: Final = {
    "system": {"text"},
    "developer": {"text"},
    "user": {"text", "image_url", "input_audio", "file"},
    "assistant": {"text", "refusal"},
    "tool": {"text"},
}
_REQUEST_FIELD_TYPES: Final = {
    "model": str,
    "messages": list,
    "stream": bool,
    "stream_options": dict,
    "tools": list,
    "tool_choice": (str, dict),
    "parallel_tool_calls": bool,
    "response_format": dict,
    "max_tokens": int,
    "max_completion_tokens": int,
    "temperature": (int, float),
    "top_p": (int, float),
    "seed": int,
    "stop": (str, list),
    "user": str,
    "metadata": dict,
    "reasoning_effort": str,
}


def find_fault(request: Any) -> str | None:
    """Return the first fault of a request to `/chat/completions`, or None."""
    return next(_request_faults(request), None)


def _request_faults(request: Any) -> Iterator[str]:
    if not isinstance(request, Mapping):
        yield "We could not parse the JSON body of your request."
        return
    for name, value in request.items():
        allowed_types: Any = _REQUEST_FIELD_TYPES.get(name)
        if allowed_types is None:
            yield f"Unrecognized request argument supplied: {name}"
        elif not isinstance(value, allowed_types):
            yield f"Invalid type for '{name}': got {type(value).__name__}."
    for name in ("model", "messages"):
        if not request.get(name):
            yield f"Missing required parameter: '{name}'."
    if request.get("stream_options") and not request.get("stream"):
        yield "The 'stream_options' parameter is only allowed when 'stream' is enabled."
    if request.get("tools") == []:
        yield "Invalid 'tools': empty array. Expected an array with minimum length 1."
    yield from _tool_faults(request.get("tools") or [])
    messages = request.get("messages")
    if isinstance(messages, list):
        for index, message in enumerate(messages):
            yield from _message_faults(message, f"messages.[{index}]")
        yield from _tool_result_faults([m for m in messages if isinstance(m, Mapping)])


def _tool_faults(tools: Any) -> Iterator[str]:
    tool_names = set()
    for index, tool in enumerate(tools if isinstance(tools, list) else ()):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or tool.get("type") != "function":
            yield f"Invalid value: 'tools[{index}]' must be of type 'function'."
            continue
        name = function.get("name")
        if not isinstance(name, str) or not name.replace("_", "").replace("-", "").isalnum():
            yield f"Invalid 'tools[{index}].function.name': string does not match pattern."
        elif len(name) > 64 or not name.isascii():
            yield f"Invalid 'tools[{index}].function.name': at most 64 letters, digits, _ or -."
        if name in tool_names:
            yield f"Tool names must be unique: {name!r} is there twice."
        tool_names.add(name)
        if not isinstance(function.get("parameters", {}), Mapping):
            yield f"Invalid type for 'tools[{index}].function.parameters': expected an object."


def _message_faults(message: Any, path: str) -> Iterator[str]:
    if not isinstance(message, Mapping):
        yield f"Invalid type for '{path}': expected an object."
        return
    role = message.get("role")
    if not isinstance(role, str) or role not in _FIELDS_BY_ROLE:
        known_roles = ", ".join(f"'{name}'" for name in _FIELDS_BY_ROLE)
        yield f"Invalid value: {role!r}. Supported values are: {known_roles}. ({path}.role)"
        return
    for name in message:
        if name not in _FIELDS_BY_ROLE[role]:
            yield f"Additional properties are not allowed ('{name}' was unexpected) - '{path}'"
    content = message.get("content")
    calls = message.get("tool_calls")
    if content is None or content == "":
        # Only an assistant message with tool calls may be empty.
        if role != "assistant" or not calls:
            yield f"Invalid value for 'content' of {role} message: must not be empty. ({path})"
    elif isinstance(content, list):
        yield from _content_part_faults(content, _PART_TYPES_BY_ROLE[role], f"{path}.content")
    elif not isinstance(content, str):
        yield f"Invalid type for '{path}.content': expected one of a string or array of objects."
    elif not content.strip() and not calls:
        yield f"Invalid value for '{path}.content': text must contain non-whitespace characters."
    if "tool_calls" in message:
        yield from _tool_call_faults(calls, f"{path}.tool_calls")
    if role == "tool" and not (isinstance(message.get("tool_call_id"), str)):
        yield f"Missing required parameter: '{path}.tool_call_id'."


def _content_part_faults(parts: Sequence[Any], allowed_types: set[str], path: str) -> Iterator[str]:
    if not parts:
        yield f"Invalid '{path}': empty array. Expected an array with minimum length 1."
    for index, part in enumerate(parts):
        part_type = part.get("type") if isinstance(part, Mapping) else None
        if part_type not in allowed_types:
            yield (
                f"Invalid value: {part_type!r}. Supported values are: {sorted(allowed_types)}. "
                f"({path}[{index}])"
            )
        elif part_type == "text":
            text = part.get("text")
            if not isinstance(text, str) or not text.strip():
                yield f"Invalid '{path}[{index}].text': text content blocks must be non-empty."


def _tool_call_faults(calls: Any, path: str) -> Iterator[str]:
    if not isinstance(calls, list) or not calls:
        yield f"Invalid '{path}': empty array. Expected an array with minimum length 1."
        return
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or call.get("type") != "function":
            yield f"Invalid value: '{path}[{index}]' must be of type 'function'."
            continue
        if not isinstance(call.get("id"), str) or not call["id"]:
            yield f"Missing required parameter: '{path}[{index}].id'."
        if extra := call.keys() - {"id", "type", "function"}:
            yield f"Additional properties are not allowed ({sorted(extra)}) - '{path}[{index}]'"
        if extra := function.keys() - {"name", "arguments"}:
            yield f"Additional properties are not allowed ({sorted(extra)}) - '{path}[{index}]'"
        if not isinstance(function.get("name"), str) or not function["name"]:
            yield f"Missing required parameter: '{path}[{index}].function.name'."
        if not isinstance(function.get("arguments"), str):
            yield f"Invalid type for '{path}[{index}].function.arguments': expected a string."


def _tool_result_faults(messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield faults: missing, repeated or unexpected tool results, and repeated call ids."""
    open_ids: list[str] = []
    answered_ids: set[str] = set()
    used_ids: set[str] = set()
    for index, message in enumerate(messages):
        if message.get("role") == "tool":
            id = str(message.get("tool_call_id"))
            if id in open_ids:
                open_ids.remove(id)
                answered_ids.add(id)
            elif id in answered_ids:
                yield f"Duplicate tool result: tool_call_id {id!r} was answered before. ({index})"
            else:
                yield (
                    "messages with role 'tool' must be a response to a preceeding message with "
                    f"'tool_calls': tool_call_id {id!r} of messages.[{index}] was not found."
                )
            continue
        if open_ids:
            yield _unanswered_calls_error(open_ids)
        calls = message.get("tool_calls")
        calls = calls if message.get("role") == "assistant" and isinstance(calls, list) else []
        open_ids = [str(call.get("id")) for call in calls if isinstance(call, Mapping)]
        for id in open_ids:
            if id in used_ids:
                yield f"Duplicate tool call id: {id!r} in messages.[{index}] was used before."
            used_ids.add(id)
    if open_ids:
        yield _unanswered_calls_error(open_ids)


def _unanswered_calls_error(call_ids: Sequence[str]) -> str:
    """Return the error text for tool calls without a result."""
    return (
        "An assistant message with 'tool_calls' must be followed by tool messages responding to "
        "each 'tool_call_id'. The following tool_call_ids did not have response messages: "
        + ", ".join(call_ids)
    )


# --- too many tokens ------------------------------------------------------------------------------


OVERFLOW_ERRORS: Final[Mapping[str, tuple[int, str]]] = {
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
"""Status and body of the error for a request that is too long, by kind of server."""


def overflow_error(dialect: str, *, limit: int, request_tokens: int) -> tuple[int, str]:
    """Return the status and the body with which a server rejects a request that is too long."""
    status, body = OVERFLOW_ERRORS[dialect]
    return status, body % {
        "limit": limit,
        "asked": request_tokens,
        "over": request_tokens - limit,
    }
