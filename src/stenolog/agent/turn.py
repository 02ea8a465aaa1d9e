"""A turn: from the unanswered messages in the log to a stored answer.

A turn can start after a new message or resume where a killed process stopped. Every message is
stored as soon as it is complete, so that any process can resume the turn from the log.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any, Final, Literal, NamedTuple

from msgspec import Struct, field
from msgspec.structs import asdict

from stenolog.agent.instance import AgentInstance, ModelClosing
from stenolog.agent.session_history import (
    append_once,
    has_own_last_calls,
    hide_late_message,
    last_user_message,
    missing_session_error,
    refresh_view,
    withdraw_message,
)
from stenolog.agent.stored_answers import StoredAnswer, find_answer
from stenolog.agent.threads import Threads, wait_shielded
from stenolog.agent.tools import STOPPED_TEXT, result_for_cut_off_call, tool_message
from stenolog.agent.turn_events import (
    RETRY_HINT,
    TEXT_KEPT,
    Answer,
    EventHandler,
    ModelCalled,
    Notice,
    Outcome,
    TextDelta,
    ThinkingDelta,
    TurnOptions,
    UsageReported,
)
from stenolog.catalog.message_metadata import mark_client_calls, mark_model, mark_seen
from stenolog.context.context import Attempt
from stenolog.context.turn_state import TurnState, turn_state
from stenolog.errors import (
    LeaseLost,
    ModelRefused,
    ModelUnavailable,
    NoSuchSession,
    SessionDeleted,
    StenologError,
)
from stenolog.memory.recall import RecallResult
from stenolog.messages import ToolCall, calls_of, text_parts_of
from stenolog.providers.chat_model import ChatModel, StreamedAnswer
from stenolog.stores.base import SessionView, Store, fork_seq_of

INTERRUPTED_MARK: Final = "[interrupted]"
CUT_OFF_TEXT: Final = "[interrupted: the program ended while this ran; what it did is not known]"
ABANDONED_TEXT: Final = "[no result: the user went on without it]"
SAME_CALLS_TEXT: Final = "I stopped here: the same tools were called again and again, to no effect."
STEP_LIMIT_TEXT: Final = "I stopped here: after {count} steps there was still no answer."

_MAX_SAME_ROUNDS: Final = 3
"""Number of rounds in a row with the same tool calls and results after which the turn ends."""
_MAX_MESSAGES_FOR_RECALL: Final = 50
"""Number of newest messages that are searched for the user's newest text."""
_MAX_CHECKED_MESSAGES: Final = 8
"""Number of newest messages in which an interrupted turn looks for its stored final answer."""
_MAX_MEMORY_SEARCHES: Final = 3
"""Maximum number of searches for one text.

A search is repeated if a session that it found is gone. If the last search has the same problem,
the turn continues without memories.
"""
TRIES_FIELD: Final = "tries"
"""Meta field of a session that counts how often tool calls without a result were run again."""
_MAX_CALL_TRIES: Final = 3
HIDDEN_UNANSWERED_TEXT: Final = (
    "This message was hidden (by /clear, /retry, /edit or a changed history) before it was "
    "answered. Send it again to have it answered."
)
HISTORY_CHANGED_TEXT: Final = (
    "the conversation was cleared or changed by another process, so this answer is not kept"
)

CancelReason = Literal["", "left", "lost"]
"""Reason for the cancellation of a turn.

`left` means that the program ends, and the next start resumes the turn. `lost` means that another
process has the lease. An empty reason means that the user or client stopped the answer.
"""


class _HistoryChanged(Exception):
    """The messages that an answer belongs to are no longer visible."""


class _Request(NamedTuple):
    """The next request to the model."""

    model: ChatModel
    recall_result: RecallResult
    attempt: Attempt
    answers: tuple[int, ...]
    """Seqs of the messages that the model is to answer."""


class Turn(Struct, eq=False):
    """One turn of a session. Only the lease holder may run a turn.

    `store`: the store, with writes that are fenced by the lease. `user_seq`: seq of the user
    message that started the turn, or 0. `release_lease`: a function that releases the lease, called
    in the thread that stores the final answer.
    """

    instance: AgentInstance
    key: str
    store: Store
    threads: Threads
    on_event: EventHandler
    user_seq: int
    options: TurnOptions
    view: SessionView | None
    """Last view that was read; None before the first read."""
    release_lease: Callable[[], None] | None
    streamed: StreamedAnswer = field(default_factory=StreamedAnswer)
    seen_upto: int = 0
    """Seq of the last message that the model received."""
    answers: tuple[int, ...] = ()
    """Seqs of the messages that the model had to answer."""
    model_and_seconds: tuple[str, float] = ("", 0.0)
    """Name of the model that answered last, and the duration of its answer in seconds."""
    final_text: str = ""
    final_seq: int | None = None
    """Seq of the final answer; set when the answer is stored and the lease is released."""
    last_recall: tuple[str, RecallResult] = ("", RecallResult())
    """User text of the last memory search, and the result."""
    source_sessions: dict[str, tuple[str, int] | None] = {}
    """Sessions that contain the recalled messages, as returned by `_find_source_sessions`."""
    result_texts: dict[str, str] = {}
    """Tool results of the current round, by call id."""
    asked_seqs: frozenset[int] = frozenset()
    """Seqs of the user messages that this turn answers."""
    unstored_usage: tuple[Attempt, int | None] | None = None
    """Last answered request and the provider's count of its tokens, until they are stored."""
    last_request: tuple[SessionView, Attempt] | None = None
    """Last request to the model, and the view that it was built from."""
    written_seqs: list[int] = []
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
                raise LeaseLost(self.key, 0) from None
            if self.cancel_reason == "left":
                raise
            return await self._interrupt_shielded("stopped")
        except _HistoryChanged:
            self._drop_answer()
            self.on_event(TextDelta(text=HIDDEN_UNANSWERED_TEXT))
            return self._make_answer(HIDDEN_UNANSWERED_TEXT, None)
        except (ModelUnavailable, ModelRefused) as error:
            if not self.streamed.text:
                raise
            interrupted_answer = await self._interrupt_shielded("broken off")
            self.on_event(Notice(text=f"{error}; {TEXT_KEPT}{RETRY_HINT}"))
            return interrupted_answer

    async def close(self, reason: str) -> Answer:
        """End a turn that will not be resumed: store the answer "[interrupted]" with `reason`."""
        view = await self.threads.run(self.store.view, self.key)
        await self._finish_calls(turn_state(view.messages, view.info.lost_spans), repeat=False)
        return await self._interrupt(reason, all_answered=True)

    async def _answer_messages(self) -> Answer:
        prepared = await self.threads.run_model(self._build_request, check_log=True)
        if isinstance(prepared, Answer):
            return prepared
        request = None if isinstance(prepared, TurnState) else prepared
        if isinstance(prepared, TurnState):
            may_repeat = await self.threads.run(self._may_repeat_calls, prepared)
            await self._finish_calls(prepared, repeat=may_repeat)
            if prepared.client_calls:
                return self._answer_with_calls(prepared.client_calls)
        rounds: list[object] = []
        for _ in range(self.instance.spec.max_iterations):
            await self._ask_model(request or await self._prepare_next_request())
            request, reply = None, self.streamed
            if not reply.calls:
                return await self._finish_turn(reply)
            client_names = self.options.client_tool_names
            client_calls = [c for c in reply.calls if c["function"]["name"] in client_names]
            # Also marked in a cut-off answer: after a crash, no agent tool may run in their place.
            body = mark_client_calls(self._reply_body(reply), [call["id"] for call in client_calls])
            if is_cut_off := reply.finish == "length":
                client_calls = []  # the last call is incomplete, so the client gets no calls
            seq = await self._store_message(self._mark_seen(body))
            if self.has_dropped_message:
                return self._make_answer(reply.text, None)
            self.streamed = StreamedAnswer()
            self.result_texts = {}
            agent_calls = [call for call in reply.calls if call not in client_calls]
            await self._run_calls(agent_calls, is_cut_off=is_cut_off)
            if client_calls or self.has_dropped_message:
                return self._make_answer(reply.text, seq, calls=client_calls)
            # Ids are left out, because they differ between rounds with the same calls.
            rounds.append(
                [(call["function"], self.result_texts.get(call["id"])) for call in reply.calls]
            )
            if rounds[-_MAX_SAME_ROUNDS:].count(rounds[-1]) == _MAX_SAME_ROUNDS:
                return await self._give_up(SAME_CALLS_TEXT)
        return await self._give_up(STEP_LIMIT_TEXT.format(count=self.instance.spec.max_iterations))

    def _answer_with_calls(self, calls: Sequence[ToolCall]) -> Answer:
        """Return an Answer with the tool calls whose results the client has not stored yet."""
        history = () if self.view is None else self.view.messages
        message = next(message for message in reversed(history) if calls_of(message.to_dict()))
        call_bodies = [_make_call_body(call) for call in calls]
        return self._make_answer(text_parts_of(message.to_dict()), message.seq, calls=call_bodies)

    # --- the request -------------------------------------------------------------------------

    async def _prepare_next_request(self) -> "_Request":
        request = await self.threads.run_model(self._build_request, check_log=False)
        assert isinstance(request, _Request)
        return request

    def _build_request(self, *, check_log: bool) -> "_Request | TurnState | Answer":
        """Read the session and build the next request. This call blocks.

        With `check_log`, return the answer if the log already has one, or the TurnState if tool
        calls have no result. Raises _HistoryChanged if the user message is hidden now.
        """
        self._store_usage()
        if check_log and self.view is not None:
            # A killed turn may have left an answer whose user message was hidden.
            hide_late_message(self.store, self.view)
        view = self._read_answerable_view()
        state = _state_of(view)
        self.asked_seqs |= frozenset(state.unanswered)
        if check_log:
            answer_or_calls = self._find_answer_or_calls(view, state)
            if answer_or_calls is not None:
                return answer_or_calls
        model = self._find_model(view)
        previous_recall = self.last_recall
        recall_result = self._recall(view)
        if self.last_recall is not previous_recall and self.instance.memory is not None:
            view = self._read_answerable_view()  # it may have changed during the search
            state = _state_of(view)
        context = self.instance.context(model, self.options)
        attempt = context.start_request(self.key, memory=recall_result.block, view=view)
        self.last_request = (view, attempt)
        return _Request(model, recall_result, attempt, state.questions)

    def _read_answerable_view(self) -> SessionView:
        """Update and return `self.view`. Raises _HistoryChanged if the user messages are hidden."""
        view = self._read_view()
        if not view.messages or self._is_question_hidden(view):
            raise _HistoryChanged
        return view

    def _is_question_hidden(self, view: SessionView) -> bool:
        """Return whether all user messages that this turn answers are hidden in `view`."""
        asked_seqs = self.asked_seqs
        return bool(asked_seqs) and asked_seqs.isdisjoint(message.seq for message in view.messages)

    def _read_view(self) -> SessionView:
        """Update and return `self.view`. Raises NoSuchSession if the session is gone."""
        old_view = self.view
        try:
            view = refresh_view(self.store, self.key, old_view)
        except NoSuchSession:
            raise missing_session_error(self.store, self.key) from None
        if old_view is not None and view.uid != old_view.uid:
            raise SessionDeleted(self.key, recreated=True)
        self.view = view
        return view

    def _find_answer_or_calls(
        self, view: SessionView, state: TurnState
    ) -> TurnState | Answer | None:
        """Return the answer in the log, otherwise the pending calls; None if there is neither."""
        is_pending = state.waits_for_client or state.is_unfinished
        question_seq = self.user_seq
        if not question_seq and not is_pending:
            question = last_user_message(view.messages)
            question_seq = 0 if question is None else question.seq
        if question_seq:
            found = find_answer(self.instance.store, self.key, question_seq, view)
            answer = answer_from_log(self.key, found, "elsewhere")
            if answer is not None:
                return answer
            if question_seq not in state.unanswered:
                raise _HistoryChanged  # the message was hidden while later ones were answered
        elif not is_pending:
            return self._make_answer("", None, outcome="elsewhere")
        return state if state.open_calls or state.client_calls else None

    def _find_model(self, view: SessionView) -> ChatModel:
        """Return the model that the client names, otherwise the session's model."""
        if self.options.model:
            return self.instance.model_for(self.options.model)
        return self.instance.chosen_model(view.info.meta, self._emit_notice_from_thread)

    def _recall(self, view: SessionView) -> RecallResult:
        """Search the memory for the user's newest text, or return the last result.

        The search is repeated if the text changes, or if a session with recalled messages is
        deleted or purged.
        """
        history = view.messages[-_MAX_MESSAGES_FOR_RECALL:]
        last_text, last_result = self.last_recall
        user_texts = (
            text for message in reversed(history) if (text := _user_text(message.to_dict()))
        )
        user_text = next(user_texts, last_text)
        if user_text == last_text and (
            self.source_sessions == self._find_source_sessions(last_result)
        ):
            return last_result
        self.last_recall, self.source_sessions = (user_text, RecallResult()), {}
        for _ in range(_MAX_MEMORY_SEARCHES):
            recall_result = self.instance.recall(
                user_text, self.key, sender=self.options.sender, info=view.info
            )
            source_sessions = self._find_source_sessions(recall_result)
            if None not in source_sessions.values():
                self.last_recall = (user_text, recall_result)
                self.source_sessions = source_sessions
                break
        return self.last_recall[1]

    def _find_source_sessions(
        self, recall_result: RecallResult
    ) -> dict[str, tuple[str, int] | None]:
        """Return uid and generation of each session that contains recalled messages, by key.

        The generation increases when messages are purged. The value is None for a session that is
        gone or unreadable.
        """
        source_sessions: dict[str, tuple[str, int] | None] = {}
        for hit in recall_result.found:
            key = hit.source.rpartition(":")[0]
            if hit.kind == "message" and key not in source_sessions:
                source_sessions[key] = None
                with suppress(StenologError):
                    info = self.instance.store.info(key)
                    source_sessions[key] = info.uid, info.generation
        return source_sessions

    # --- the model ---------------------------------------------------------------------------

    async def _ask_model(self, request: "_Request") -> None:
        """Send a request to the model and collect the answer in `streamed`."""
        model, attempt = request.model, request.attempt
        while True:
            window = attempt.window
            hit_count = 0 if window.memory_left_out else len(request.recall_result.found)
            self.on_event(
                ModelCalled(
                    model=model.name, tokens=window.tokens, budget=window.budget, recalled=hit_count
                )
            )
            self.seen_upto, self.answers = window.upto, request.answers
            start_time = time.monotonic()
            try:
                await self._stream_answer(model, window.messages)
            except (ModelUnavailable, ModelRefused) as error:
                if self.streamed.text or not await self.threads.run_model(attempt.shorten, error):
                    raise
            else:
                break
        self.model_and_seconds = (model.name, time.monotonic() - start_time)
        usage = self.streamed.usage
        if usage is not None:
            self.on_event(UsageReported(usage=usage))
        self.unstored_usage = (attempt, None if usage is None else usage.prompt)

    def _store_usage(self) -> None:
        """Store the provider's token count of the last request. Blocks; raises nothing."""
        if self.unstored_usage is not None:
            (attempt, prompt_tokens), self.unstored_usage = self.unstored_usage, None
            attempt.record_answer(lambda: prompt_tokens)

    def summarize_if_needed(self) -> bool:
        """Finish the turn after its answer: summarize the session if a summary is due.

        Also stores the provider's token counts, and hides the messages of this turn if its user
        messages were hidden meanwhile. Returns whether a summary was written. This call blocks.
        """
        self._store_usage()
        view = refresh_view(self.instance.store, self.key, self.view)
        self._hide_late_messages(view)
        context = self.instance.context(self.instance.chosen_model(view.info.meta))
        options = self.options
        if self.last_request is not None and options.is_default and not options.model:
            request_view, attempt = self.last_request
            if request_view.matches(view.uid, view.generation, view.change) and context.has_room(
                attempt.window, view.messages
            ):
                return False
        return context.summarize_if_needed(self.key, view=view) is not None

    async def _stream_answer(self, model: ChatModel, messages: Sequence[Mapping[str, Any]]) -> None:
        self.streamed = StreamedAnswer()
        stream = model.stream(
            messages,
            tools=self.instance.offered_tools(self.options),
            schema=self.options.schema,
            max_tokens=self.options.max_tokens,
        )
        async with aclosing(stream) as deltas:
            async for delta in deltas:
                self.streamed.add(delta)
                if delta.notice:
                    self.on_event(Notice(text=delta.notice))
                if delta.reasoning:
                    self.on_event(ThinkingDelta(text=delta.reasoning))
                if delta.text:
                    self.on_event(TextDelta(text=delta.text))

    # --- tools -------------------------------------------------------------------------------

    async def _run_calls(
        self, calls: Sequence[Mapping[str, Any]], *, is_cut_off: bool = False
    ) -> None:
        """Run tool calls.

        `is_cut_off`: the model's answer was cut off in the last call. Then the last call and the
        calls of client tools do not run.
        """

        async def store_result(result: dict[str, Any]) -> None:
            self.result_texts[result["tool_call_id"]] = result["content"]
            await self._store_message(result)

        if is_cut_off:
            client_names = self.options.client_tool_names
            runnable = [call for call in calls[:-1] if call["function"]["name"] not in client_names]
            for call in calls:
                if call not in runnable:
                    await store_result(result_for_cut_off_call(call, self.on_event))
            calls = runnable
        context = self.instance.tool_context(self.key, sender=self.options.sender)
        await self.instance.tool_runner.run(
            calls, context, on_event=self.on_event, store_result=store_result
        )

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

    def _may_repeat_calls(self, state: TurnState) -> bool:
        """Return whether tool calls without a result may run again, and count this attempt.

        The number of repeats is limited, because a tool may kill the program each time. Calls that
        another program stored, or that a fork copied, must not run here.
        """
        if not state.open_calls or self.view is None:
            return True
        info = self.view.info
        # guard: repeat-own-calls
        if not has_own_last_calls(self.view.messages, after=fork_seq_of(info)):
            return False
        stored_tries = info.meta.get(TRIES_FIELD)
        seq, tries = (
            stored_tries if isinstance(stored_tries, list) and len(stored_tries) == 2 else (0, 0)
        )
        tries = tries + 1 if seq == info.last_seq else 1
        if tries > _MAX_CALL_TRIES:
            return False
        self.store.set_meta(self.key, **{TRIES_FIELD: [info.last_seq, tries]})
        return True

    # --- ending ------------------------------------------------------------------------------

    async def _finish_turn(self, reply: StreamedAnswer) -> Answer:
        if reply.finish == "length":
            self.on_event(Notice(text="the answer was cut off at the model's limit"))
        if not reply.text.strip():
            self.on_event(Notice(text="the model returned an empty answer"))
        self.final_text = reply.text
        body = self._mark_seen(self._reply_body(reply))
        seq = await self._store_message(body, is_final=True)
        return self._make_answer(reply.text, seq, finish=reply.finish)

    def _reply_body(self, reply: StreamedAnswer) -> dict[str, Any]:
        """Return the answer with its model, duration and token counts."""
        model, seconds = self.model_and_seconds
        usage = None if reply.usage is None else asdict(reply.usage)
        return mark_model(reply.message(), model=model, seconds=seconds, usage=usage)

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

        Messages that arrived during the turn stay unanswered. With `all_answered`, all user
        messages count as answered.
        """
        if self.final_seq is not None:
            return self._make_answer(self.final_text, self.final_seq)
        view = await self.threads.run(self.store.view, self.key)
        for message in view.messages[-_MAX_CHECKED_MESSAGES:]:
            content = getattr(message, "content", None)
            if self.final_text and message.seq > self.seen_upto and content == self.final_text:
                return self._make_answer(self.final_text, message.seq)  # the answer is complete
        state = _state_of(view)
        for call in state.open_calls:
            await self._store_message(tool_message(call.id or "", STOPPED_TEXT))
        partial_text = self.streamed.text.rstrip()
        text = f"{partial_text} {INTERRUPTED_MARK}" if partial_text else INTERRUPTED_MARK
        self.seen_upto = max(self.seen_upto, self.user_seq)
        if not self.seen_upto:  # stopped before the first request
            self.seen_upto = max(self.asked_seqs, default=0)
        if all_answered:
            self.seen_upto = max((self.seen_upto, *state.unanswered))
        self.answers = state.questions
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
            key=self.key,
            text=text,
            outcome="calls" if calls else outcome,
            seq=seq,
            saved=not self.has_dropped_message,
            calls=tuple(calls),
            finish=finish,
        )

    # --- storing -----------------------------------------------------------------------------

    def _mark_seen(self, body: Mapping[str, Any], *, interrupted: str = "") -> dict[str, Any]:
        """Return an answer with the seqs of the messages that it is based on and answers."""
        # Only the answer after the tool results answers the messages.
        answers = None
        if not calls_of(body):
            answers = sorted(seq for seq in self.answers if seq <= self.seen_upto)
        return mark_seen(body, seen=self.seen_upto, answers=answers, interrupted=interrupted)

    async def _store_message(
        self, body: Mapping[str, Any], *, is_final: bool = False
    ) -> int | None:
        """Store a message of this turn; return None if the user message is hidden now.

        `is_final`: the message is the last message of the turn, so the lease is released in the
        worker-thread call that appends the message.
        """
        if self.has_dropped_message:
            return None
        try:
            return await self.threads.run(self._append_message, body, is_final=is_final)
        except _HistoryChanged:
            self._drop_answer()
            return None

    def _drop_answer(self) -> None:
        self.has_dropped_message = True
        self.on_event(Notice(text=HISTORY_CHANGED_TEXT))

    def _append_message(self, body: Mapping[str, Any], *, is_final: bool) -> int:
        """Append a message if the session still needs the message. This call blocks.

        After the final message, release the lease. Raises NoSuchSession if the session is gone,
        _HistoryChanged if the message is no longer needed (see `_is_needed`).
        """
        old_view = self.view
        if old_view is not None:
            view = self._read_view()
            is_unchanged = old_view.matches(view.uid, view.generation, view.change)
            if not is_unchanged and not self._is_needed(view, body):
                raise _HistoryChanged  # guard: no-answer-after-clear
        seq = append_once(self.store, self.key, body)
        if self.view is not None and seq <= self.view.upto:
            # The session was deleted since the last read, so the append has created a new session.
            withdraw_message(self.instance.store, self.view, seq, body)
            raise SessionDeleted(self.key)
        self.written_seqs.append(seq)
        if is_final and self.release_lease is not None:
            self.final_seq = seq
            self.release_lease()
        return seq

    def _hide_late_messages(self, view: SessionView) -> None:
        """Hide the messages that this turn stored if its user messages are hidden in `view`."""
        if self.view is None or self.view.uid != view.uid or not self._is_question_hidden(view):
            return
        visible_seqs = {message.seq for message in view.messages}
        for seq in self.written_seqs:
            if seq in visible_seqs:
                self.instance.store.hide(self.key, seq, seq)

    def _is_needed(self, view: SessionView, body: Mapping[str, Any]) -> bool:
        """Return whether the visible messages still need the message `body`."""
        if body.get("role") == "tool":
            calls = _state_of(view).open_calls
            return body.get("tool_call_id") in {call.id or "" for call in calls}
        return not self._is_question_hidden(view)

    def _emit_notice_from_thread(self, text: str) -> None:
        self.threads.event_loop.call_soon_threadsafe(self.on_event, Notice(text=text))


def answer_from_log(key: str, found: StoredAnswer, outcome: Outcome) -> Answer | None:
    """Return the Answer to a message that needs no turn; None if a turn must answer it."""
    if found.message is None:
        return None
    text = HIDDEN_UNANSWERED_TEXT
    if found.state == "answered":
        text = text_parts_of(found.message.to_dict())
    return Answer(key=key, text=text, outcome=outcome, seq=found.message.seq)


def _state_of(view: SessionView) -> TurnState:
    return turn_state(view.messages, view.info.lost_spans)


def _user_text(body: Mapping[str, Any]) -> str:
    return text_parts_of(body).strip() if body.get("role") == "user" else ""


def _make_call_body(call: ToolCall) -> dict[str, Any]:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
