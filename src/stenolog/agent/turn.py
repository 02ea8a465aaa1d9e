"""A turn: from the unanswered messages in the log to a stored answer.

A turn repeats three steps: prepare the request, ask the model, store its message and the results of
its tool calls. It can start after a new message or resume where a killed process stopped. Every
message is stored as soon as it is complete, so that any process can resume the turn from the log.
If a message cannot be stored, the turn fails.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

from msgspec import Struct, field

from stenolog.agent.instance import AgentInstance, ModelClosing
from stenolog.agent.model_exchange import ModelExchange, ModelRequest
from stenolog.agent.session_history import last_user_message
from stenolog.agent.stored_answers import (
    HIDDEN_UNANSWERED_TEXT,
    answer_from_log,
    find_answer,
)
from stenolog.agent.threads import Threads, wait_shielded
from stenolog.agent.tools import STOPPED_TEXT, result_for_cut_off_call, tool_message
from stenolog.agent.turn_events import (
    RETRY_HINT,
    TEXT_KEPT,
    Answer,
    EventHandler,
    Notice,
    Outcome,
    TextDelta,
    TurnOptions,
)
from stenolog.agent.turn_log import HistoryChanged, TurnLog, state_of
from stenolog.catalog.message_metadata import mark_client_calls, mark_seen
from stenolog.context.turn_state import TurnState
from stenolog.errors import (
    LeaseLost,
    ModelRefused,
    ModelUnavailable,
)
from stenolog.messages import ToolCall, calls_of, text_parts_of
from stenolog.providers.chat_model import StreamedAnswer
from stenolog.stores.base import SessionView

INTERRUPTED_MARK: Final = "[interrupted]"
CUT_OFF_TEXT: Final = "[interrupted: the program stopped during this call; its effect is unknown]"
ABANDONED_TEXT: Final = "[no result: the user continued without waiting for it]"
SAME_CALLS_TEXT: Final = "I stopped here: the last rounds repeated the same tool calls."
STEP_LIMIT_TEXT: Final = "I stopped here: after {count} steps there was still no answer."

_MAX_SAME_ROUNDS: Final = 3
"""Number of rounds in a row with the same tool calls and results after which the turn ends."""
HISTORY_CHANGED_TEXT: Final = (
    "the conversation was cleared or changed by another process, so this answer is not kept"
)

CancelReason = Literal["", "left", "lost"]
"""Reason for the cancellation of a turn.

`left` means that the program ends, and the next start resumes the turn. `lost` means that another
process has the lease. An empty reason means that the user or client stopped the answer.
"""


class _Start(NamedTuple):
    """What the log says at the start of a turn."""

    state: TurnState
    answer: Answer | None
    """The answer, if the log already has one."""
    request: ModelRequest | None
    """None if there is an answer, or if tool calls have no result yet."""


class Turn(Struct, eq=False):
    """One turn of a session. Only the lease holder may run a turn.

    `user_seq`: seq of the user message that started the turn, or 0. `release_lease`: a function
    that releases the lease, called in the thread that stores the final answer.
    """

    instance: AgentInstance
    log: TurnLog
    exchange: ModelExchange
    threads: Threads
    on_event: EventHandler
    user_seq: int
    options: TurnOptions
    release_lease: Callable[[], None] | None
    final_text: str = ""
    final_seq: int | None = None
    """Seq of the final answer, when it is stored."""
    result_texts: dict[str, str] = {}
    """Tool results of the current round, by call id."""
    store_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Lock that makes tools that run at the same time store their results one after the other."""
    has_dropped_message: bool = False
    cancel_reason: CancelReason = ""

    async def run(self) -> Answer:
        """Run until the model has answered. Raises the errors of the model and the store.

        If the user stops the turn, or the model fails in the middle of its text, store and return
        the text so far with the mark "[interrupted]". If the turn is cancelled with a
        `cancel_reason`, an error is raised and the log stays unchanged.
        """
        try:
            return await self._answer_messages()
        except (asyncio.CancelledError, ModelClosing):
            if self.cancel_reason == "lost":
                raise LeaseLost(self.log.key, 0) from None
            if self.cancel_reason == "left":
                raise
            return await self._interrupt_shielded("stopped")
        except HistoryChanged:
            self._drop_answer()
            self.on_event(TextDelta(text=HIDDEN_UNANSWERED_TEXT))
            return self._make_answer(HIDDEN_UNANSWERED_TEXT, None)
        except (ModelUnavailable, ModelRefused) as error:
            if not self.exchange.streamed.text:
                raise
            interrupted_answer = await self._interrupt_shielded("broken off")
            self.on_event(Notice(text=f"{error}; {TEXT_KEPT}{RETRY_HINT}"))
            return interrupted_answer

    async def close(self, reason: str) -> Answer:
        """End a turn that will not be resumed: store the answer "[interrupted]" with `reason`."""
        view = await self.threads.run(self.log.leased_store.view, self.log.key)
        await self._finish_calls(state_of(view), repeat=False)
        return await self._interrupt(reason, all_answered=True)

    async def _answer_messages(self) -> Answer:
        start = await self.threads.run_model(self._prepare_start)
        if start.answer is not None:
            return start.answer
        if start.request is None:
            may_repeat = await self.threads.run(self.log.may_repeat_calls, start.state)
            await self._finish_calls(start.state, repeat=may_repeat)
            if start.state.client_calls:
                return self._answer_with_calls(start.state.client_calls)
        request = start.request
        rounds: list[object] = []
        for _ in range(self.instance.spec.max_iterations):
            if request is None:
                request = await self.threads.run_model(self._prepare)
            reply = await self.exchange.ask(request)
            request = None
            if not reply.calls:
                return await self._finish_turn(reply)
            answer = await self._store_and_run_calls(reply)
            if answer is not None:
                return answer
            # Ids are left out, because they differ between rounds with the same calls.
            rounds.append(
                [(call["function"], self.result_texts.get(call["id"])) for call in reply.calls]
            )
            if rounds[-_MAX_SAME_ROUNDS:].count(rounds[-1]) == _MAX_SAME_ROUNDS:
                return await self._give_up(SAME_CALLS_TEXT)
        return await self._give_up(STEP_LIMIT_TEXT.format(count=self.instance.spec.max_iterations))

    # --- prepare (in a thread) ---------------------------------------------------------------

    def _prepare_start(self) -> _Start:
        """Read the log, and build the first request if the model has to be asked now.

        Raises HistoryChanged if the user message is hidden.
        """
        view, state = self.log.read_questions()
        answer = self._find_stored_answer(view, state)
        is_ready = answer is None and not (state.open_calls or state.client_calls)
        request = self.exchange.build_request(view, state) if is_ready else None
        return _Start(state, answer, request)

    def _find_stored_answer(self, view: SessionView, state: TurnState) -> Answer | None:
        """Return the answer in the log; None if the model has to be asked, or tools have to run."""
        is_pending = state.waits_for_client or state.is_unfinished
        question_seq = self.user_seq
        if not question_seq and not is_pending:
            question = last_user_message(view.messages)
            question_seq = 0 if question is None else question.seq
        if question_seq:
            key = self.log.key
            found = find_answer(self.instance.store, key, question_seq, view)
            answer = answer_from_log(key, found, "elsewhere")
            if answer is not None:
                return answer
            if question_seq not in state.unanswered:
                raise HistoryChanged  # the message was hidden while later ones were answered
        elif not is_pending:
            return self._make_answer("", None, outcome="elsewhere")
        return None

    def _prepare(self) -> ModelRequest:
        """Read the messages that are new in the log, and build the next request.

        Raises HistoryChanged if the user message is hidden.
        """
        self.exchange.store_usage()
        return self.exchange.build_request(*self.log.read_questions())

    # --- tool calls --------------------------------------------------------------------------

    async def _store_and_run_calls(self, reply: StreamedAnswer) -> Answer | None:
        """Store the model's calls, run the agent's tools, and store their results.

        Returns the Answer if the turn ends here: the client has to run tools, or the history was
        changed.
        """
        client_names = self.options.client_tool_names
        client_calls = [call for call in reply.calls if call["function"]["name"] in client_names]
        # Also marked in a cut-off answer: after a crash, no agent tool may run in their place.
        body = mark_client_calls(self.exchange.make_body(), [call["id"] for call in client_calls])
        seq = await self._store_message(self._mark_seen(body))
        if self.has_dropped_message:
            return self._make_answer(reply.text, None)
        self.exchange.streamed = StreamedAnswer()
        self.result_texts = {}
        if reply.finish == "length":  # the last call is incomplete, so no call runs
            client_calls = []
            for call in reply.calls:
                await self._store_result(result_for_cut_off_call(call, self.on_event))
        else:
            await self._run_calls([call for call in reply.calls if call not in client_calls])
        if client_calls or self.has_dropped_message:
            return self._make_answer(reply.text, seq, calls=client_calls)
        return None

    def _answer_with_calls(self, calls: Sequence[ToolCall]) -> Answer:
        """Return an Answer with the tool calls whose results the client has not stored yet."""
        history = () if self.log.view is None else self.log.view.messages
        message = next(message for message in reversed(history) if calls_of(message.to_dict()))
        call_bodies = [_make_call_body(call) for call in calls]
        return self._make_answer(text_parts_of(message.to_dict()), message.seq, calls=call_bodies)

    async def _run_calls(self, calls: Sequence[Mapping[str, Any]]) -> None:
        context = self.instance.tool_context(self.log.key, sender=self.options.sender)
        await self.instance.tool_runner.run(
            calls, context, on_event=self.on_event, store_result=self._store_result
        )

    async def _store_result(self, result: dict[str, Any]) -> None:
        self.result_texts[result["tool_call_id"]] = result["content"]
        await self._store_message(result)

    async def _finish_calls(self, state: TurnState, *, repeat: bool) -> None:
        """Store results for the tool calls that a killed process left without a result.

        With `repeat`, repeatable calls run again. For other calls, the stored result says that
        the effect is unknown, or that the user continued without the result.
        """
        calls_to_repeat = []
        for call in state.open_calls:
            tool = self.instance.tool(call.name)
            is_complete = call.id and isinstance(call.arguments, str)
            if repeat and is_complete and tool is not None and tool.repeatable:
                calls_to_repeat.append(_make_call_body(call))
            else:
                text = ABANDONED_TEXT if call.id in state.abandoned else CUT_OFF_TEXT
                await self._store_message(tool_message(call.id or "", text))
        if calls_to_repeat:
            await self._run_calls(calls_to_repeat)

    # --- ending ------------------------------------------------------------------------------

    async def _finish_turn(self, reply: StreamedAnswer) -> Answer:
        if reply.finish == "length":
            self.on_event(Notice(text="the answer was cut off at the model's limit"))
        if not reply.text.strip():
            self.on_event(Notice(text="the model returned an empty answer"))
        self.final_text = reply.text
        body = self._mark_seen(self.exchange.make_body())
        seq = await self._store_message(body, is_final=True)
        return self._make_answer(reply.text, seq, finish=reply.finish)

    async def _give_up(self, text: str) -> Answer:
        self.on_event(TextDelta(text=text))
        body = self._mark_seen({"role": "assistant", "content": text}, interrupted="given up")
        return self._make_answer(text, await self._store_message(body))

    async def _interrupt_shielded(self, reason: str) -> Answer:
        """Store the text so far, even if this task is cancelled again."""
        task = asyncio.create_task(self._interrupt(reason))
        await wait_shielded(task)
        return task.result()

    async def _interrupt(self, reason: str, *, all_answered: bool = False) -> Answer:
        """Store the text so far with "[interrupted]"; tool calls without a result get STOPPED_TEXT.

        Messages that arrived during the turn stay unanswered. With `all_answered`, all messages of
        users and results of clients count as answered.
        """
        if self.final_seq is not None:
            return self._make_answer(self.final_text, self.final_seq)
        view = await self.threads.run(self.log.leased_store.view, self.log.key)
        self.log.check_uid(view)  # guard: stopped-turn-own-session
        if self.user_seq and not self.exchange.seen_upto:
            # Stopped before the first request: another turn may have answered the message.
            store, key = self.instance.store, self.log.key
            found = await self.threads.run(find_answer, store, key, self.user_seq, view)
            answer = answer_from_log(key, found, "elsewhere")
            if answer is not None:
                return answer
        state = state_of(view)
        for call in state.open_calls:
            await self._store_message(tool_message(call.id or "", STOPPED_TEXT))
        partial_text = self.exchange.streamed.text.rstrip()
        text = f"{partial_text} {INTERRUPTED_MARK}" if partial_text else INTERRUPTED_MARK
        exchange = self.exchange
        exchange.seen_upto = max(exchange.seen_upto, self.user_seq)
        if not exchange.seen_upto:  # stopped before the first request
            seqs = (*self.log.question_seqs, *state.client_results)
            exchange.seen_upto = max(seqs, default=0)
        if all_answered:
            exchange.seen_upto = max((exchange.seen_upto, *state.questions))
        exchange.answers = state.questions
        body = self._mark_seen({"role": "assistant", "content": text}, interrupted=reason)
        seq = await self._store_message(body)
        return self._make_answer(text, seq, outcome="interrupted")

    def _make_answer(
        self,
        text: str,
        seq: int | None,
        *,
        outcome: Outcome = "answered",
        calls: Sequence[Mapping[str, Any]] = (),
        finish: str = "",
    ) -> Answer:
        return Answer(
            key=self.log.key,
            text=text,
            outcome="calls" if calls else outcome,
            seq=seq,
            saved=not self.has_dropped_message,
            calls=tuple(calls),
            finish=finish,
        )

    # --- store -------------------------------------------------------------------------------

    def _mark_seen(self, body: Mapping[str, Any], *, interrupted: str = "") -> dict[str, Any]:
        """Return an answer with the seqs of the messages that it is based on and answers."""
        # Only the answer after the tool results answers the messages.
        upto, answers = self.exchange.seen_upto, None
        if not calls_of(body):
            answers = sorted(seq for seq in self.exchange.answers if seq <= upto)
        return mark_seen(body, seen=upto, answers=answers, interrupted=interrupted)

    async def _store_message(
        self, body: Mapping[str, Any], *, is_final: bool = False
    ) -> int | None:
        """Store a message of this turn; return None if the user message is hidden now.

        `is_final`: the message is the last message of the turn, so the lease is released in the
        worker-thread call that appends the message.
        """
        async with self.store_lock:
            if self.has_dropped_message:
                return None
            try:
                return await self.threads.run(self._append_message, body, is_final=is_final)
            except HistoryChanged:
                self._drop_answer()
                return None

    def _drop_answer(self) -> None:
        self.has_dropped_message = True
        self.on_event(Notice(text=HISTORY_CHANGED_TEXT))

    def _append_message(self, body: Mapping[str, Any], *, is_final: bool) -> int:
        """Append a message. After the final message, release the lease. This call blocks."""
        seq = self.log.append(body)
        if is_final:
            self.final_seq = seq
            if self.release_lease is not None:
                self.release_lease()
        return seq

    # --- after the answer (in a thread) ------------------------------------------------------

    def summarize_if_needed(self) -> bool:
        """Finish the turn after its answer: summarize the session if a summary is due.

        Also stores the provider's token counts, and hides the messages of this turn if its user
        messages were hidden meanwhile. Returns whether a summary was written. This call blocks.
        """
        self.exchange.store_usage()
        view = self.log.hide_late_messages()
        context = self.instance.context(self.instance.chosen_model(view.info.meta))
        options, request = self.options, self.exchange.last_request
        if (
            request is not None
            and options.is_default
            and not options.model
            and request.view.matches(view.uid, view.generation, view.change)
            and context.has_room(request.attempt.window, view.messages)
        ):
            return False
        return context.summarize_if_needed(self.log.key, view=view) is not None


def _make_call_body(call: ToolCall) -> dict[str, Any]:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
