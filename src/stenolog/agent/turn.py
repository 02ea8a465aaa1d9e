"""A turn, from what the log says is unanswered to a finished answer in the log.

It may begin anywhere: after a new message, or where a killed process left off. Everything that is
said is stored as it happens, so that the next one to look at the log knows where to go on.
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import Any, Final

from stenolog.agent.blocking import Closing
from stenolog.agent.calling import STOPPED
from stenolog.agent.events import (
    Answer,
    Asked,
    Counted,
    Noticed,
    Said,
    Tell,
    Thought,
)
from stenolog.agent.in_hand import InHand, Run
from stenolog.agent.instance import AgentInstance
from stenolog.context.standing import Standing, standing
from stenolog.catalog.answers import marked
from stenolog.context.context import Attempt
from stenolog.context.shapes import Call, words_of
from stenolog.errors import ModelRefused, ModelUnavailable
from stenolog.memory.recall import Recalled
from stenolog.providers.base import ChatModel, Reply
from stenolog.records import Message
from stenolog.sessions.session_store import SessionStore

INTERRUPTED: Final = "[interrupted]"
CUT_OFF: Final = "[interrupted: the program ended while this ran; what it did is not known]"
REPEATED: Final = "I stopped here: the same tools were called again and again, to no effect."
TOO_MANY: Final = "I stopped here: after {count} steps there was still no answer."

_LATELY: Final = 8
_LOOKED_BACK: Final = 50
_SAME: Final = 3
"""So many times in a row the same calls with the same results, and the turn is ended."""


class Turn:
    """One turn of one session. Only who has the lease runs it."""

    def __init__(
        self,
        instance: AgentInstance,
        key: str,
        sessions: SessionStore,
        in_hand: InHand,
        *,
        run: Run,
        tell: Tell,
    ) -> None:
        self._instance = instance
        self._key = key
        self._sessions = sessions
        self._in_hand = in_hand
        self._run = run
        self._tell = tell
        self._reply = Reply()
        self._seen: int | None = 0
        """Up to which seq the model has seen the log; None: all of it, and what is in hand."""
        self._ending: dict[str, Any] | None = None
        """The answer that is being stored."""
        self.abandoned = False
        """Set where a cancellation is to leave the log as it is: the next start goes on with it."""
        self._recalled: tuple[str, Recalled] = ("", Recalled())
        self._results: dict[str, str] = {}

    async def run(self) -> Answer:
        """Go on until the model has answered. Raises what the model and the store raise.

        Cancelled, it stores what was said so far with a mark, and answers with that.
        """
        try:
            return await self._answer()
        except (asyncio.CancelledError, Closing):
            if self.abandoned:
                raise
            return await asyncio.shield(self._interrupt("stopped"))
        except (ModelUnavailable, ModelRefused) as error:
            if not self._reply.text:
                raise
            broken = await self._interrupt("broken off")
            self._tell(Noticed(words=f"{error}; what was said is kept, /retry asks again"))
            return broken

    async def close(self, why: str) -> Answer:
        """Close a turn that is not gone on with: with a mark that the user sees."""
        await self._finish_calls(await self._where())
        return await self._interrupt(why)

    async def _answer(self) -> Answer:
        model = await self._run(self._instance.model_of, self._key)
        await self._finish_calls(await self._where())
        rounds: list[object] = []
        for _ in range(self._instance.spec.max_iterations):
            await self._ask(model)
            reply = self._reply
            if not reply.calls:
                return await self._end(reply)
            await self._keep(marked(reply.message(), seen=self._seen))
            self._reply = Reply()
            self._results = {}
            await self._call(reply.calls)
            rounds.append(_round(reply.calls, self._results))
            if len(rounds) >= _SAME and all(one == rounds[-1] for one in rounds[-_SAME:]):
                return await self._give_up(REPEATED)
        return await self._give_up(TOO_MANY.format(count=self._instance.spec.max_iterations))

    # --- the model ---------------------------------------------------------------------------

    async def _ask(self, model: ChatModel) -> None:
        """One answer of the model to all that is in the log, into `_reply`."""
        await self._in_hand.flush(self._sessions, tell=self._tell)
        recalled = await self._recall()
        attempt: Attempt = await self._run(
            self._instance.context(model).begin,
            self._key,
            memory=recalled.block,
            unsaved=self._in_hand.bodies,
        )
        while True:
            window = attempt.window
            told = 0 if window.memory_left_out else len(recalled.found)
            self._tell(
                Asked(model=model.name, tokens=window.tokens, budget=window.budget, recalled=told)
            )
            # What is in hand has no seq yet; the answer will stand behind it.
            self._seen = None if self._in_hand.bodies else window.upto
            try:
                await self._listen(model, window.messages)
            except (ModelUnavailable, ModelRefused) as error:
                if self._reply.text or not await self._run(attempt.shorten, error):
                    raise
            else:
                break
        usage = self._reply.usage
        if usage is not None:
            self._tell(Counted(usage=usage))
        await self._run(attempt.answered, lambda: None if usage is None else usage.prompt)

    async def _listen(self, model: ChatModel, messages: Sequence[Mapping[str, Any]]) -> None:
        self._reply = Reply()
        stream = model.stream(messages, tools=self._instance.definitions)
        async with aclosing(stream) as deltas:
            async for delta in deltas:
                self._reply.add(delta)
                if delta.reasoning:
                    self._tell(Thought(text=delta.reasoning))
                if delta.text:
                    self._tell(Said(text=delta.text))

    async def _recall(self) -> Recalled:
        """What is remembered for the newest words of the user, looked up once for them."""
        history: list[Message] = await self._run(
            self._sessions.get_history, self._key, last=_LOOKED_BACK
        )
        said = [*(message.to_dict() for message in history), *self._in_hand.bodies]
        question = next(
            (words for body in reversed(said) if (words := _question(body))), self._recalled[0]
        )
        if question != self._recalled[0]:
            found = await self._run(self._instance.recall, question, self._key)
            self._recalled = (question, found)
        return self._recalled[1]

    # --- tools -------------------------------------------------------------------------------

    async def _call(self, calls: Sequence[Mapping[str, Any]]) -> None:
        async def keep(result: dict[str, Any]) -> None:
            self._results[result["tool_call_id"]] = result["content"]
            await self._keep(result)

        here = self._instance.here(self._key)
        await self._instance.calling.run(calls, here, tell=self._tell, keep=keep)

    async def _finish_calls(self, where: Standing) -> None:
        """Give the calls that a killed process left open their results.

        Those that may be made twice are made again; of the others nobody knows what they did.
        """
        again = []
        for call in where.open_calls:
            tool = self._instance.tool(call.name)
            if tool is not None and tool.repeatable and call.id and isinstance(call.arguments, str):
                again.append(_as_made(call))
            else:
                await self._keep(
                    {"role": "tool", "tool_call_id": call.id or "", "content": CUT_OFF}
                )
        if again:
            await self._call(again)

    # --- the end -----------------------------------------------------------------------------

    async def _end(self, reply: Reply) -> Answer:
        if reply.finish == "length":
            self._tell(Noticed(words="the answer was cut off at the model's limit"))
        if not reply.text.strip():
            self._tell(Noticed(words="the model answered without a word"))
        self._ending = marked(reply.message(), seen=self._seen)
        return self._made(reply.text, await self._keep(self._ending))

    async def _give_up(self, words: str) -> Answer:
        self._tell(Said(text=words))
        body = {"role": "assistant", "content": words}
        seq = await self._keep(marked(body, seen=self._seen, interrupted="given up"))
        return self._made(words, seq)

    async def _interrupt(self, why: str) -> Answer:
        """Store what was said, with a mark; open calls get a result that says what happened."""
        history: list[Message] = await self._run(self._sessions.get_history, self._key)
        for message in history[-_LATELY:]:
            if self._ending is not None and message.to_dict() == self._ending:
                return self._made(self._reply.text, message.seq)  # it was stopped too late
        where = standing(history)
        for call in where.open_calls:
            await self._keep({"role": "tool", "tool_call_id": call.id or "", "content": STOPPED})
        said = self._reply.text.rstrip()
        text = f"{said} {INTERRUPTED}" if said else INTERRUPTED
        # Whoever stops an answer has no answer to wait for, whatever arrived meanwhile.
        body = {"role": "assistant", "content": text}
        seq = await self._keep(marked(body, seen=None, interrupted=why))
        return Answer(key=self._key, text=text, outcome="interrupted", seq=seq, saved=self._saved)

    def _made(self, text: str, seq: int | None) -> Answer:
        return Answer(key=self._key, text=text, outcome="answered", seq=seq, saved=self._saved)

    @property
    def _saved(self) -> bool:
        return not self._in_hand.bodies

    async def _where(self) -> Standing:
        history = await self._run(self._sessions.get_history, self._key)
        return standing(history)

    async def _keep(self, body: dict[str, Any]) -> int | None:
        return await self._in_hand.keep(self._sessions, body, tell=self._tell)


def _question(body: Mapping[str, Any]) -> str:
    return words_of(body).strip() if body.get("role") == "user" else ""


def _round(calls: Sequence[Mapping[str, Any]], results: Mapping[str, str]) -> object:
    """What was called and what came of it, without the ids, to be compared."""
    return [(call["function"], results.get(call["id"])) for call in calls]


def _as_made(call: Call) -> dict[str, Any]:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
