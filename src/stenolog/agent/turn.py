"""A turn, from what the log says is unanswered to a finished answer in the log.

It may begin anywhere: after a new message, or where a killed process left off. Everything that is
said is stored as it happens, so that the next one to look at the log knows where to go on.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any, Final, Literal

from msgspec.structs import asdict

from stenolog.agent.blocking import Closing
from stenolog.agent.calling import STOPPED, not_made
from stenolog.agent.events import Answer, Asked, Counted, Noticed, Said, Tell, Thought
from stenolog.agent.in_hand import InHand, Seen
from stenolog.agent.instance import AgentInstance
from stenolog.agent.manner import AS_USUAL, Manner
from stenolog.agent.threads import Threads
from stenolog.agent.waiting import settled
from stenolog.catalog.answers import for_client, made_by
from stenolog.context.context import Attempt
from stenolog.context.shapes import Call, calls_of, words_of
from stenolog.context.standing import Standing, standing
from stenolog.errors import LeaseLost, ModelRefused, ModelUnavailable, StenologError
from stenolog.memory.recall import Recalled
from stenolog.providers.base import ChatModel, Reply
from stenolog.records import Message
from stenolog.sessions.session_store import SessionStore

INTERRUPTED: Final = "[interrupted]"
CUT_OFF: Final = "[interrupted: the program ended while this ran; what it did is not known]"
GONE_ON: Final = "[no result: the user went on without it]"
REPEATED: Final = "I stopped here: the same tools were called again and again, to no effect."
TOO_MANY: Final = "I stopped here: after {count} steps there was still no answer."

_SAME: Final = 3
"""So many times in a row the same calls with the same results, and the turn is ended."""
_LOOKED_BACK: Final = 50
_LATELY: Final = 8
TRIES: Final = "tries"
"""The field of a session's meta that counts how often a killed turn was gone on with."""
_MOST_TRIES: Final = 3

Fate = Literal["", "left", "lost"]
"""Why it was cancelled: the program ends, and the next start goes on; somebody else has the turn.
Empty: nobody wants the answer any more."""


class Turn:
    """One turn of one session. Only who has the lease runs it."""

    def __init__(
        self,
        instance: AgentInstance,
        key: str,
        sessions: SessionStore,
        in_hand: InHand,
        *,
        threads: Threads,
        tell: Tell,
        asked_for: int | None = None,
        manner: Manner = AS_USUAL,
    ) -> None:
        """`asked_for`: the seq of the message that it is run for."""
        self._manner = manner
        self._instance = instance
        self._key = key
        self._sessions = sessions
        self._in_hand = in_hand
        self._threads = threads
        self._run = threads.run
        self._tell = tell
        self._asked_for = asked_for or 0
        self._reply = Reply()
        self._seen = Seen(upto=0)
        self._asked = ("", 0.0)
        """Who answered last, and how many seconds that took."""
        self._ending = ""
        """The answer that is being stored."""
        self._recalled: tuple[str, Recalled] = ("", Recalled())
        self._results: dict[str, str] = {}
        self.fate: Fate = ""
        self.begun = False

    async def run(self) -> Answer:
        """Go on until the model has answered. Raises what the model and the store raise.

        Cancelled, it does as its fate says: it stores what was said so far with a mark, and
        answers with that; or it raises, and leaves the log as it is.
        """
        self.begun = True
        try:
            return await self._answer()
        except (asyncio.CancelledError, Closing):
            if self.fate == "lost":
                raise LeaseLost(self._key, 0) from None
            if self.fate == "left":
                raise
            return await self._outlasting("stopped")
        except (ModelUnavailable, ModelRefused) as error:
            if not self._reply.text:
                raise
            broken = await self._outlasting("broken off")
            self._tell(Noticed(words=f"{error}; what was said is kept, /retry asks again"))
            return broken

    async def close(self, why: str) -> Answer:
        """Close a turn that is not gone on with: with a mark that the user sees."""
        await self._finish_calls(await self._where(), again=False)
        return await self._interrupt(why, everything=True)

    async def _answer(self) -> Answer:
        model = await self._model()
        if await self._in_hand.flush(self._sessions, tell=self._tell):
            # With something in hand, the log alone does not say what is left open.
            history: list[Message] = await self._run(self._sessions.get_history, self._key)
            where = standing(history)
            if not where.waits and history and not where.unfinished:
                return _given(self._key, history)
            await self._finish_calls(where, again=await self._run(self._may_try_again, where))
            if where.of_client:
                return self._handed_over(history, [_as_made(call) for call in where.of_client])
        rounds: list[object] = []
        for _ in range(self._instance.spec.max_iterations):
            await self._ask(model)
            reply = self._reply
            if not reply.calls:
                return await self._end(reply)
            own, of_client = self._shared_out(reply)
            body = for_client(self._signed(reply), [call["id"] for call in of_client])
            seq = await self._keep(body, seen=self._seen)
            self._reply = Reply()
            self._results = {}
            await self._call(own, cut=reply.finish == "length" and not of_client)
            if of_client:
                return self._made(reply.text, seq, calls=of_client)
            rounds.append(_round(reply.calls, self._results))
            if len(rounds) >= _SAME and all(one == rounds[-1] for one in rounds[-_SAME:]):
                return await self._give_up(REPEATED)
        return await self._give_up(TOO_MANY.format(count=self._instance.spec.max_iterations))

    async def _model(self) -> ChatModel:
        """The model that answers: what the client names, else the session's."""
        if self._manner.model:
            return await self._run(self._instance.model_for, self._manner.model)
        return await self._run(self._instance.model_of, self._key, self._tell_from_thread)

    def _shared_out(self, reply: Reply) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """The calls of an answer: those that are carried out here, and those by the client.

        Of an answer that was cut off, the last call is not whole, and nobody carries it out.
        """
        names = self._manner.client_tools
        of_client = [call for call in reply.calls if call["function"]["name"] in names]
        if of_client and reply.finish == "length":
            return reply.calls, []
        return [call for call in reply.calls if call not in of_client], of_client

    def _handed_over(self, history: Sequence[Message], calls: list[dict[str, Any]]) -> Answer:
        """The calls of a turn that waits for its client, once more."""
        last = next(message for message in reversed(history) if calls_of(message.to_dict()))
        return self._made(words_of(last.to_dict()), last.seq, calls=calls)

    # --- the model ---------------------------------------------------------------------------

    async def _ask(self, model: ChatModel) -> None:
        """One answer of the model to all that is in the log, into `_reply`."""
        await self._in_hand.flush(self._sessions, tell=self._tell)
        recalled = await self._recall()
        # What waits must not be stored while the log is read: it would be sent twice.
        async with self._in_hand.standing_still():
            unsaved, token = self._in_hand.bodies, self._in_hand.newest
            attempt = await self._threads.ask(self._begin, model, recalled.block, unsaved)
        while True:
            window = attempt.window
            told = 0 if window.memory_left_out else len(recalled.found)
            self._tell(
                Asked(model=model.name, tokens=window.tokens, budget=window.budget, recalled=told)
            )
            self._seen = Seen(upto=window.upto, token=token)
            began = time.monotonic()
            try:
                await self._listen(model, window.messages)
            except (ModelUnavailable, ModelRefused) as error:
                if self._reply.text or not await self._threads.ask(attempt.shorten, error):
                    raise
            else:
                break
        self._asked = (model.name, time.monotonic() - began)
        usage = self._reply.usage
        if usage is not None:
            self._tell(Counted(usage=usage))
        await self._run(attempt.answered, lambda: None if usage is None else usage.prompt)

    def _begin(
        self, model: ChatModel, memory: str, unsaved: Sequence[Mapping[str, Any]]
    ) -> Attempt:
        context = self._instance.context(model, self._manner)
        return context.begin(self._key, memory=memory, unsaved=unsaved)

    async def _listen(self, model: ChatModel, messages: Sequence[Mapping[str, Any]]) -> None:
        self._reply = Reply()
        stream = model.stream(
            messages,
            tools=self._instance.offered(self._manner),
            schema=self._manner.schema,
            max_tokens=self._manner.max_tokens,
        )
        async with aclosing(stream) as deltas:
            async for delta in deltas:
                self._reply.add(delta)
                if delta.notice:
                    self._tell(Noticed(words=delta.notice))
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

    async def _call(self, calls: Sequence[Mapping[str, Any]], *, cut: bool = False) -> None:
        """Carry calls out. `cut`: the answer was cut off in the last of them, which is not made."""

        async def keep(result: dict[str, Any]) -> None:
            self._results[result["tool_call_id"]] = result["content"]
            await self._keep(result)

        if cut:
            *calls, last = calls
            await keep(not_made(last, self._tell))
        here = self._instance.here(self._key)
        await self._instance.calling.run(calls, here, tell=self._tell, keep=keep)

    async def _finish_calls(self, where: Standing, *, again: bool) -> None:
        """Give the calls that a killed process left open their results.

        Those that may be made twice are made again; of the others nobody knows what they did.
        """
        repeated = []
        for call in where.open_calls:
            tool = self._instance.tool(call.name)
            is_whole = call.id and isinstance(call.arguments, str)
            if again and is_whole and tool is not None and tool.repeatable:
                repeated.append(_as_made(call))
            else:
                words = GONE_ON if call.id in where.given_up else CUT_OFF
                await self._keep({"role": "tool", "tool_call_id": call.id or "", "content": words})
        if repeated:
            await self._call(repeated)

    def _may_try_again(self, where: Standing) -> bool:
        """Whether calls left open may be repeated: a tool that ends the program, not for ever."""
        store = self._sessions.store
        if store is None or not where.open_calls:
            return True
        with suppress(StenologError):
            info = store.info(self._key)
            kept = info.meta.get(TRIES)
            seq, tries = kept if isinstance(kept, list) and len(kept) == 2 else (0, 0)
            tries = tries + 1 if seq == info.last_seq else 1
            if tries > _MOST_TRIES:
                return False
            store.set_meta(self._key, **{TRIES: [info.last_seq, tries]})
        return True

    # --- the end -----------------------------------------------------------------------------

    async def _end(self, reply: Reply) -> Answer:
        if reply.finish == "length":
            self._tell(Noticed(words="the answer was cut off at the model's limit"))
        if not reply.text.strip():
            self._tell(Noticed(words="the model answered without a word"))
        self._ending = reply.text
        seq = await self._keep(self._signed(reply), seen=self._seen)
        return self._made(reply.text, seq, finish=reply.finish)

    def _signed(self, reply: Reply) -> dict[str, Any]:
        """The answer with who gave it, and what it took."""
        model, seconds = self._asked
        counted = None if reply.usage is None else asdict(reply.usage)
        return made_by(reply.message(), model=model, seconds=seconds, usage=counted)

    async def _give_up(self, words: str) -> Answer:
        self._tell(Said(text=words))
        body = {"role": "assistant", "content": words}
        seen = Seen(upto=self._seen.upto, token=self._seen.token, interrupted="given up")
        return self._made(words, await self._keep(body, seen=seen))

    async def _outlasting(self, why: str) -> Answer:
        """Store what was said, however often this is cancelled meanwhile."""
        writing = asyncio.create_task(self._interrupt(why))
        await settled(writing)
        return writing.result()

    async def _interrupt(self, why: str, *, everything: bool = False) -> Answer:
        """Store what was said, with a mark; open calls get a result that says what happened.

        What arrived meanwhile is still to be answered; `everything`: that is not, either.
        """
        history: list[Message] = await self._run(self._sessions.get_history, self._key)
        for message in history[-_LATELY:]:
            if self._ending and message.seq > self._seen.upto and message.content == self._ending:
                return self._made(self._ending, message.seq)  # it was stopped too late
        where = standing(history)
        for call in where.open_calls:
            await self._keep({"role": "tool", "tool_call_id": call.id or "", "content": STOPPED})
        said = self._reply.text.rstrip()
        text = f"{said} {INTERRUPTED}" if said else INTERRUPTED
        upto = max(self._seen.upto, self._asked_for)
        token = self._seen.token
        if everything:
            upto = max((upto, *where.unanswered))
            token = self._in_hand.newest or token
        body = {"role": "assistant", "content": text}
        seq = await self._keep(body, seen=Seen(upto=upto, token=token, interrupted=why))
        return Answer(key=self._key, text=text, outcome="interrupted", seq=seq, saved=self._saved)

    def _made(
        self,
        text: str,
        seq: int | None,
        *,
        calls: Sequence[Mapping[str, Any]] = (),
        finish: str = "",
    ) -> Answer:
        return Answer(
            key=self._key,
            text=text,
            outcome="calls" if calls else "answered",
            seq=seq,
            saved=self._saved,
            calls=tuple(calls),
            finish=finish,
        )

    @property
    def _saved(self) -> bool:
        return not self._in_hand.bodies

    async def _where(self) -> Standing:
        return standing(await self._run(self._sessions.get_history, self._key))

    async def _keep(self, body: dict[str, Any], *, seen: Seen | None = None) -> int | None:
        return await self._in_hand.keep(self._sessions, body, tell=self._tell, seen=seen)

    def _tell_from_thread(self, words: str) -> None:
        self._threads.event_loop.call_soon_threadsafe(self._tell, Noticed(words=words))


def _given(key: str, history: Sequence[Message]) -> Answer:
    """The answer that stands in the log already."""
    last = next(
        (message for message in reversed(history) if message.role == "assistant"), history[-1]
    )
    text = words_of(last.to_dict()) if last.role == "assistant" else ""
    return Answer(key=key, text=text, outcome="elsewhere", seq=last.seq)


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
