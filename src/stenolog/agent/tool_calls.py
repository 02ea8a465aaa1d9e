"""Runs the tool calls of one answer, concurrently if the tools allow it, each with a timeout.

Every failure becomes the result of the call, so that the model can correct its arguments or report
the problem. Only a cancellation is raised.
"""

import asyncio
import contextvars
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

from msgspec import Struct

from stenolog.agent.shielded_wait import cancel_and_wait
from stenolog.agent.tools import Tool, ToolContext, read_arguments, result_as_text
from stenolog.agent.turn_events import EventHandler, ToolFinished, ToolStarted
from stenolog.catalog.message_metadata import mark_tool_outcome

STOPPED: Final = "[stopped by the user before it ended; it may have done its work, or a part]"


def cut_off_result(call: Mapping[str, Any], on_event: EventHandler) -> dict[str, Any]:
    """Return an error result for a call that was cut off at the model's limit."""
    name = call["function"]["name"]
    words = "Error: the answer was cut off at the model's limit, and so this call was not made"
    on_event(ToolStarted(id=call["id"], name=name, arguments=call["function"]["arguments"]))
    on_event(ToolFinished(id=call["id"], name=name, text=words, failed=True, seconds=0.0))
    return {"role": "tool", "tool_call_id": call["id"], "content": words}


class ToolRunner(Struct, frozen=True, kw_only=True):
    """The available tools, with the limits of their time and output."""

    tools: Mapping[str, Tool]
    timeout: float
    """Timeout in seconds for tools that define none."""
    limit: int
    """Maximum number of characters of a result that the model gets."""

    async def run(
        self,
        calls: Sequence[Mapping[str, Any]],
        here: ToolContext,
        *,
        on_event: EventHandler,
        keep: Callable[[dict[str, Any]], Awaitable[object]],
    ) -> None:
        """Run the calls and pass each result to `keep` immediately.

        Tools marked `alone` run one at a time, after the others.
        """

        async def one(call: Mapping[str, Any]) -> None:
            await keep(await self._result(call, here, on_event))

        alone = [call for call in calls if self._is_alone(call)]
        together = [asyncio.create_task(one(call)) for call in calls if call not in alone]
        try:
            await asyncio.gather(*together)
        finally:
            if await cancel_and_wait(together):
                raise asyncio.CancelledError
        for call in alone:
            await one(call)

    def _is_alone(self, call: Mapping[str, Any]) -> bool:
        found = self.tools.get(call["function"]["name"])
        return found is not None and found.alone

    async def _result(
        self, call: Mapping[str, Any], here: ToolContext, on_event: EventHandler
    ) -> dict[str, Any]:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        on_event(ToolStarted(id=call["id"], name=name, arguments=arguments))
        began = time.monotonic()
        failed, text = await self._outcome(name, arguments, here)
        took = time.monotonic() - began
        on_event(ToolFinished(id=call["id"], name=name, text=text, failed=failed, seconds=took))
        body = {"role": "tool", "tool_call_id": call["id"], "content": text}
        return mark_tool_outcome(body, seconds=took, failed=failed)

    async def _outcome(self, name: str, arguments: str, here: ToolContext) -> tuple[bool, str]:
        """Return whether the call failed, and the text for the model."""
        tool = self.tools.get(name)
        if tool is None:
            known = ", ".join(sorted(self.tools)) or "none"
            return True, f"Error: there is no tool {name!r}; there are: {known}"
        allowed = self.timeout if tool.timeout is None else tool.timeout
        timeout = asyncio.timeout(allowed)
        try:
            given = read_arguments(arguments)
            async with timeout:
                result = await _call(tool, given, here)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            return True, f"Error: {name} was cancelled from inside"
        except Exception as error:  # noqa: BLE001 - a tool may raise anything; goes to the model
            if timeout.expired():
                return True, f"Error: {name} did not end within {allowed:g} s and was given up"
            words = str(error) or type(error).__name__
            return True, result_as_text(f"Error: {type(error).__name__}: {words}", limit=self.limit)
        return False, result_as_text(result, limit=self.limit)


async def _call(tool: Tool, given: Mapping[str, Any], here: ToolContext) -> Any:
    if tool.is_async:
        return await tool.call(given, here)
    # A daemon thread, not a pool: a tool that hangs cannot be stopped and must not keep the program
    # from exiting.
    running = asyncio.get_running_loop()
    done: asyncio.Future[Any] = running.create_future()
    context = contextvars.copy_context()

    def settle(result: Any, error: BaseException | None) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)

    def work() -> None:
        result, failed = None, None
        try:
            result = context.run(tool.call, given, here)
        except Exception as error:  # noqa: BLE001 - raised in the waiting coroutine
            failed = error
        except BaseException as error:  # noqa: BLE001 - SystemExit of a tool must not end the agent
            failed = RuntimeError(f"{type(error).__name__}: {error}")
        try:
            running.call_soon_threadsafe(settle, result, failed)
        except RuntimeError:
            return  # the event loop is closed

    threading.Thread(target=work, name=f"stenolog-tool-{tool.name}", daemon=True).start()
    return await done
