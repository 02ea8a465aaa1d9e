"""Tools: Python functions with type hints that a model can call.

The type hints become the JSON schema for the model, and arguments are checked against the schema.
The docstring describes the function, and `Annotated[str, "…"]` describes an argument. A parameter
of type `ToolContext` is hidden from the model and tells the function its session.
"""

import asyncio
import concurrent.futures
import contextvars
import inspect
import json
import re
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime, tzinfo
from typing import Annotated, Any, Final, get_args, get_origin, get_type_hints, overload

import msgspec
from msgspec import Struct
from msgspec.structs import asdict

from stenolog.agent.spec import AgentSpec
from stenolog.agent.threads import cancel_and_wait
from stenolog.agent.turn_events import EventHandler, ToolFinished, ToolStarted
from stenolog.catalog.message_metadata import mark_tool_outcome
from stenolog.errors import UsageError
from stenolog.memory.recall import RecallResult

_VALID_TOOL_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""Tool names that every provider accepts."""
_REF_PREFIX: Final = "#/$defs/"


class ToolContext(Struct, frozen=True, kw_only=True):
    """The session in which a tool is called."""

    key: str
    agent: str | None
    recall: Callable[[str], RecallResult] | None = None
    """Function that searches the memory of the session's user; None for an agent without memory."""
    zone: tzinfo = UTC


class Tool(Struct, frozen=True, kw_only=True):
    """A function that a model may call."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of the arguments."""
    call: Callable[[Mapping[str, Any], ToolContext], Any]
    """Function that calls the tool. Raises ValidationError for wrong arguments."""
    is_async: bool = False
    repeatable: bool = False
    """Whether an interrupted call may run again, because a repeated call is harmless."""
    alone: bool = False
    """Whether the tool must not run concurrently with other tools."""
    timeout: float | None = None
    """Timeout in seconds; None for the agent's timeout."""

    def definition(self) -> dict[str, Any]:
        """Return the definition for the model, in OpenAI's chat format."""
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": dict(self.parameters),
            },
        }


@overload
def tool(function: Callable[..., Any]) -> Tool: ...


@overload
def tool(
    *,
    name: str = "",
    description: str = "",
    repeatable: bool = False,
    alone: bool = False,
    timeout: float | None = None,
) -> Callable[[Callable[..., Any]], Tool]: ...


def tool(
    function: Callable[..., Any] | None = None,
    *,
    name: str = "",
    description: str = "",
    repeatable: bool = False,
    alone: bool = False,
    timeout: float | None = None,
) -> Tool | Callable[[Callable[..., Any]], Tool]:
    """Create a tool from a function. Without a function, return a decorator.

    Raises UsageError if the name is invalid, or a type hint is missing or has no JSON schema.
    """

    def make_tool(function: Callable[..., Any]) -> Tool:
        tool_name = name or getattr(function, "__name__", "")
        if not _VALID_TOOL_NAME.fullmatch(tool_name):
            raise UsageError(
                f"tool {tool_name!r}: the name must have 1 to 64 letters, digits, _ or -"
            )
        fields, context_name = _split_parameters(function, tool_name)
        arguments_type = msgspec.defstruct(
            f"{tool_name}_arguments", fields, forbid_unknown_fields=True, kw_only=True
        )

        def call(raw_arguments: Mapping[str, Any], context: ToolContext) -> Any:
            values = asdict(msgspec.convert(raw_arguments, arguments_type, strict=False))
            return function(**values, **({context_name: context} if context_name else {}))

        return Tool(
            name=tool_name,
            description=description or inspect.getdoc(function) or "",
            parameters=_make_parameter_schema(arguments_type, tool_name),
            call=call,
            is_async=inspect.iscoroutinefunction(function),
            repeatable=repeatable,
            alone=alone,
            timeout=timeout,
        )

    return make_tool if function is None else make_tool(function)


def collect_tools(tools: Sequence[Tool | Callable[..., Any]]) -> dict[str, Tool]:
    """Return the tools by name; functions become tools. Raises UsageError for a duplicate name."""
    tools_by_name: dict[str, Tool] = {}
    for item in tools:
        new_tool = item if isinstance(item, Tool) else tool(item)
        if new_tool.name in tools_by_name:
            raise UsageError(f"there are two tools called {new_tool.name!r}; give one another name")
        tools_by_name[new_tool.name] = new_tool
    return tools_by_name


def parse_arguments(arguments_json: str) -> dict[str, Any]:
    """Parse the arguments that a model wrote. Raises ValueError if they are no JSON object."""
    if not arguments_json.strip():
        return {}
    try:
        arguments = json.loads(arguments_json)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the arguments are no JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise ValueError("the arguments are no JSON object")  # noqa: TRY004 - the model's error
    return arguments


def result_as_text(result: object, *, limit: int) -> str:
    """Return the result of a tool as text for the model, cut off at `limit` characters."""
    if isinstance(result, str):
        text = result
    elif result is None:
        text = "done"
    else:
        try:
            text = msgspec.json.encode(result).decode()
        except (TypeError, ValueError, msgspec.MsgspecError):
            text = str(result)
    # Join each surrogate pair into one character, because stores reject surrogate pairs.
    text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
    if len(text) <= limit:
        return text
    return f"{text[:limit]}\n[… {len(text) - limit:,} more characters were cut off]"


def _split_parameters(function: Callable[..., Any], tool_name: str) -> tuple[list[Any], str]:
    """Return the parameters for the model, and the name of the ToolContext parameter, if any."""
    try:
        hints = get_type_hints(function, include_extras=True)
        signature = inspect.signature(function)
    except (TypeError, ValueError, NameError) as error:
        raise UsageError(f"tool {tool_name!r}: its type hints cannot be read: {error}") from error
    fields: list[Any] = []
    context_name = ""
    for parameter in signature.parameters.values():
        name = parameter.name
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise UsageError(
                f"tool {tool_name!r}: {name} accepts any number of arguments; name each argument"
            )
        if name not in hints:
            raise UsageError(f"tool {tool_name!r}: {name} has no type hint; add one")
        if hints[name] is ToolContext:
            context_name = name
            continue
        hint = _convert_descriptions(hints[name])
        default = parameter.default
        if isinstance(default, list | dict | set):
            # Each tool call gets its own copy of a mutable default.
            default = msgspec.field(default_factory=default.copy)
        fields.append((name, hint) if default is parameter.empty else (name, hint, default))
    return fields, context_name


def _convert_descriptions(hint: Any) -> Any:
    """Convert the strings in an `Annotated` hint to msgspec descriptions."""
    if get_origin(hint) is not Annotated:
        return hint
    base_type, *annotations = get_args(hint)
    new_annotations = [
        msgspec.Meta(description=item) if isinstance(item, str) else item for item in annotations
    ]
    return Annotated[(base_type, *new_annotations)]


def _make_parameter_schema(arguments_type: type[Struct], tool_name: str) -> dict[str, Any]:
    try:
        (root,), definitions = msgspec.json.schema_components(
            [arguments_type], ref_template=_REF_PREFIX + "{name}"
        )
    except (TypeError, ValueError, msgspec.MsgspecError) as error:
        raise UsageError(f"tool {tool_name!r}: a type hint has no JSON schema: {error}") from error
    schema = dict(definitions.pop(root["$ref"].removeprefix(_REF_PREFIX)))
    schema.pop("title", None)
    if definitions:
        schema["$defs"] = definitions
    return schema


@tool(repeatable=True)
def recall(
    question: Annotated[str, "what to look for, in plain words; names and dates help"],
    context: ToolContext,
) -> str:
    """Search your notes about this user and your past conversations with them."""
    if context.recall is None:
        return "There is no memory to search in."
    return context.recall(question).block or "Nothing was found."


@tool(repeatable=True)
def now(context: ToolContext) -> str:
    """The date and the time, with the weekday and the zone."""
    return datetime.now(context.zone).strftime("%A, %Y-%m-%d %H:%M:%S %Z (UTC%z)")


BUILT_IN_TOOLS: tuple[Tool, ...] = (recall, now)


STOPPED_TEXT: Final = "[stopped by the user before it ended; it may have done its work, or a part]"


def tool_message(call_id: str, text: str) -> dict[str, Any]:
    """Return the message with the result of a tool call, in OpenAI's chat format."""
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def result_for_cut_off_call(call: Mapping[str, Any], on_event: EventHandler) -> dict[str, Any]:
    """Return the error result of a tool call that does not run because the answer was cut off.

    Also emits the events of the call.
    """
    name = call["function"]["name"]
    text = "Error: the answer was cut off at the model's limit, and so this call was not made"
    on_event(ToolStarted(id=call["id"], name=name, arguments=call["function"]["arguments"]))
    on_event(ToolFinished(id=call["id"], name=name, text=text, failed=True, seconds=0.0))
    return tool_message(call["id"], text)


class ToolRunner(Struct, frozen=True):
    """Runs the calls of an agent's tools, with a timeout and a maximum length of results."""

    tools: Mapping[str, Tool]
    spec: AgentSpec

    async def run(
        self,
        calls: Sequence[Mapping[str, Any]],
        context: ToolContext,
        *,
        on_event: EventHandler,
        store_result: Callable[[dict[str, Any]], Awaitable[object]],
    ) -> None:
        """Run the calls, and pass each result to `store_result` as soon as the call ends.

        Tools marked `alone` run one at a time, after the other tools.
        """

        async def run_call(call: Mapping[str, Any]) -> None:
            await store_result(await self._run_call(call, context, on_event))

        exclusive_names = {name for name, tool in self.tools.items() if tool.alone}
        exclusive_calls = [call for call in calls if call["function"]["name"] in exclusive_names]
        tasks = [
            asyncio.create_task(run_call(call)) for call in calls if call not in exclusive_calls
        ]
        try:
            await asyncio.gather(*tasks)
        finally:
            if await cancel_and_wait(tasks):
                raise asyncio.CancelledError
        for call in exclusive_calls:
            await run_call(call)

    async def _run_call(
        self, call: Mapping[str, Any], context: ToolContext, on_event: EventHandler
    ) -> dict[str, Any]:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        on_event(ToolStarted(id=call["id"], name=name, arguments=arguments))
        start_time = time.monotonic()
        failed, text = await self._call_tool(name, arguments, context)
        seconds = time.monotonic() - start_time
        on_event(ToolFinished(id=call["id"], name=name, text=text, failed=failed, seconds=seconds))
        return mark_tool_outcome(tool_message(call["id"], text), seconds=seconds, failed=failed)

    async def _call_tool(self, name: str, arguments: str, context: ToolContext) -> tuple[bool, str]:
        """Call a tool; return whether the call failed, and the text for the model."""
        tool = self.tools.get(name)
        if tool is None:
            tool_names = ", ".join(sorted(self.tools)) or "none"
            return True, f"Error: there is no tool {name!r}; there are: {tool_names}"
        max_seconds = self.spec.tool_timeout if tool.timeout is None else tool.timeout
        timeout = asyncio.timeout(max_seconds)
        try:
            parsed_arguments = parse_arguments(arguments)
            async with timeout:
                result = await _run_function(tool, parsed_arguments, context)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            return True, f"Error: {name} was cancelled from inside"
        except Exception as error:  # noqa: BLE001 - a tool may raise anything
            if timeout.expired():
                return True, f"Error: {name} did not end within {max_seconds:g} s and was given up"
            error_name = type(error).__name__
            failed, result = True, f"Error: {error_name}: {str(error) or error_name}"
        else:
            failed = False
        return failed, result_as_text(result, limit=self.spec.tool_output_limit)


async def _run_function(tool: Tool, arguments: Mapping[str, Any], tool_context: ToolContext) -> Any:
    if tool.is_async:
        return await tool.call(arguments, tool_context)
    # Run in a daemon thread: a hanging tool cannot be stopped, and must not block the exit.
    result_future: concurrent.futures.Future[Any] = concurrent.futures.Future()
    result_future.set_running_or_notify_cancel()  # a cancelled caller no longer cancels the call
    context = contextvars.copy_context()

    def call_tool() -> None:
        try:
            result_future.set_result(context.run(tool.call, arguments, tool_context))
        except BaseException as error:  # noqa: BLE001 - raised in the waiting coroutine
            # SystemExit of a tool must not end the agent, and asyncio cannot raise StopIteration.
            if isinstance(error, StopIteration) or not isinstance(error, Exception):
                error = RuntimeError(f"{type(error).__name__}: {error}")
            result_future.set_exception(error)

    threading.Thread(target=call_tool, name=f"stenolog-tool-{tool.name}", daemon=True).start()
    return await asyncio.wrap_future(result_future)
