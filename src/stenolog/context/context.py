"""`Context`, the facade of this package, for programs with their own agent loop."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, TypeVar

from msgspec import Struct

from stenolog.catalog import Catalog
from stenolog.context.request_messages import ProviderRequirements
from stenolog.context.summarize import (
    SummaryPlan,
    SummaryReport,
    Trigger,
    apply_plan,
    is_undone,
    plan_summary,
)
from stenolog.context.turn_state import turn_state
from stenolog.context.window import Limits, Window, build_window
from stenolog.errors import ContextTooSmall, UnsupportedFormat, UsageError
from stenolog.messages import Body
from stenolog.providers.chat_model import (
    CompletionFunction,
    check_answer,
    check_completion_function,
    check_not_async,
)
from stenolog.providers.request_errors import ContextOverflow, read_overflow
from stenolog.records import Message
from stenolog.sessions.session_store import SessionStore
from stenolog.stores import log_reports
from stenolog.stores.arguments import check_store
from stenolog.stores.base import SessionView, Store, find_view
from stenolog.tokens import Calibration, Tokens

T = TypeVar("T")

_MODEL_SIGNATURE: Final = "model is called as model(messages)"

MAX_RETRIES: Final = 2
"""Maximum number of retries with a shorter request after a request was too long."""
_SHORTEN_FACTOR: Final = 0.6
"""Share of the rejected request's tokens for the next request, if no smaller limit is stated."""
_STATED_LIMIT_SHARE: Final = 0.9
"""Share of a provider's stated limit that is used, because our token counts are estimates."""


class Context:
    """Builds model requests for the sessions of a store, and summarizes the sessions.

    `store`: a store, or the result of `open_sessions`. `complete`: the model that writes summaries;
    without a model, summaries quote the messages. `on_event` is called after each summary; its
    errors are logged. `catalog`: stores the calibration of the token counts of `model` for the next
    run. Thread-safe. Raises UsageError if `store` is not a store or `complete` cannot be called.
    """

    def __init__(
        self,
        store: Store | SessionStore,
        complete: CompletionFunction | None = None,
        *,
        limits: Limits | None = None,
        needs: ProviderRequirements | None = None,
        tokens: Tokens | None = None,
        model: str = "",
        catalog: Catalog | None = None,
        system: str = "",
        tools: Sequence[Mapping[str, Any]] = (),
        on_event: Callable[[SummaryReport], None] | None = None,
    ) -> None:
        if complete is not None:
            check_completion_function(complete)
        if not isinstance(model, str):
            raise UsageError(
                "model must be the name of a model; the writer of summaries is `complete`"
            )
        self.store: Store = store.store if isinstance(store, SessionStore) else store
        check_store(self.store, "Context")
        self.limits = limits or Limits()
        """Current limits, reduced when a provider reports a smaller context."""
        self.calibration = Calibration() if catalog is None else catalog.calibration(model)
        """Ratio of reported to estimated tokens of the model."""
        self._model = model
        self._catalog = catalog
        self._complete = complete
        self._calibration_mutex = threading.Lock()
        self._needs = needs or ProviderRequirements()
        self._tokens = tokens or Tokens()
        self._system = system
        self._tools = tools
        self._on_event = on_event

    @property
    def tokens(self) -> Tokens:
        """The calibrated token counter."""
        return Tokens(count=self._tokens.count, ratio=self._tokens.ratio * self.calibration.ratio)

    def window(self, key: str, *, memory: str = "") -> Window:
        """Return the messages to send now, without writing to the store.

        The result has `messages`, their `tokens`, the `budget`, and how many messages were left
        out (`left_out`) or shortened (`elided`).

        `memory`: the text that recall produced. Raises ContextTooSmall, and UnsupportedFormat if a
        message cannot be sent.
        """
        return self._build_window(find_view(self.store, key), memory, self.limits)

    def call(
        self,
        key: str,
        model: Callable[[list[Body]], T],
        *,
        memory: str = "",
        usage: Callable[[T], int | None] | None = None,
    ) -> T:
        """Call the model with the window and return its answer. The caller stores the answer.

        Summarizes first if a summary is due. If the provider rejects the request as too long,
        summarizes and retries, at most twice. `usage` is called with the answer and returns the
        request tokens that the provider counted; its errors are logged. Raises UsageError for an
        async model, ContextTooSmall if no request fits, UnsupportedFormat if a message cannot be
        sent, and all other errors of the model.
        """
        check_not_async(model, _MODEL_SIGNATURE)
        attempt = self.start_request(key, memory=memory)
        while True:
            try:
                answer = check_answer(model(attempt.window.messages), _MODEL_SIGNATURE)
            except Exception as error:
                if not attempt.shorten(error):
                    raise
            else:
                attempt.record_answer(None if usage is None else partial(usage, answer))
                return answer

    def start_request(
        self,
        key: str,
        *,
        memory: str = "",
        view: SessionView | None = None,
    ) -> "Attempt":
        """Start a request for a caller that calls the model itself.

        Summarizes first if a summary is due. Raises ContextTooSmall, UnsupportedFormat. `view`:
        view of the session, if the caller has just read it.
        """
        limits = self.limits
        view = view or find_view(self.store, key)
        window = self._build_window(view, memory, limits)
        overfull = bool(window.left_out)
        is_complete = not (overfull or window.elided or window.memory_left_out)
        is_long = view is not None and len(view.messages) > limits.max_history_messages
        # A summary may hide messages, so the window is built again.
        if (is_long or not is_complete) and self._summarize(
            key, view, "auto", limits, memory, overfull=overfull
        ):
            view = find_view(self.store, key)
            window = self._build_window(view, memory, limits)
        return Attempt(self, key, memory, limits, window, view)

    def summarize_if_needed(
        self, key: str, *, memory: str = "", view: SessionView | None = None
    ) -> SummaryReport | None:
        """Summarize after a turn, if a summary is due. Return None if nothing was hidden.

        `view`: view of the session, if the caller has just read it. Raises UnsupportedFormat if a
        message cannot be summarized.
        """
        view = view or find_view(self.store, key)
        return self._summarize(key, view, "auto", self.limits, memory)

    def has_room(self, window: Window, history: Sequence[Message]) -> bool:
        """Return whether a session is far below the limits, so that no summary is due.

        `window`: the last request. `history`: the visible messages, which must include all messages
        of the request. This check is cheap. False means that the tokens of the session must be
        counted.
        """
        is_long = len(history) > self.limits.max_history_messages
        if is_long or window.left_out or window.elided or window.summary_cut:
            return False
        newer_messages = (message for message in history if message.seq > window.upto)
        used_tokens = window.tokens + sum(map(self.tokens.message, newer_messages))
        # Half of the tokens stay free, because a new provider count may double the estimates.
        return used_tokens <= self.limits.room // 2

    def summarize(self, key: str) -> SummaryReport | None:
        """Summarize on request, so that at most half of the tokens remain.

        Returns None if no message can be hidden. Raises UnsupportedFormat.
        """
        return self._summarize(key, find_view(self.store, key), "manual", self.limits, "")

    def record_usage(self, *, estimated: int, reported: int) -> Calibration:
        """Update the calibration with a provider's token count for a window; return the result."""
        with self._calibration_mutex:
            update_calibration = self.calibration.after
            if self._catalog is not None:
                update_calibration = partial(self._catalog.calibrate, self._model)
            uncalibrated_tokens = round(estimated / self.calibration.ratio)
            self.calibration = update_calibration(estimated=uncalibrated_tokens, reported=reported)
            return self.calibration

    def _build_window(
        self,
        view: SessionView | None,
        memory: str,
        limits: Limits,
    ) -> Window:
        with _named_session(view):
            return build_window(
                () if view is None else view.messages,
                "" if view is None else view.info.summary,
                system=self._system,
                tools=self._tools,
                memory=memory,
                limits=limits,
                needs=self._needs,
                tokens=self.tokens,
            )

    def _summarize(
        self,
        key: str,
        view: SessionView | None,
        trigger: Trigger,
        limits: Limits,
        memory: str,
        *,
        overfull: bool = False,
    ) -> SummaryReport | None:
        plan = self._make_plan(view, trigger, limits, memory, overfull=overfull)
        if plan is None:
            return None
        report = apply_plan(
            self.store, key, plan, complete=self._complete, limits=limits, tokens=self.tokens
        )
        if report is not None and self._on_event is not None:
            try:
                self._on_event(report)
            except Exception as error:  # noqa: BLE001 - the summary is stored; report it
                log_reports.warning("on_event failed after a summary of %r: %r", key, error)
        return report

    def _make_plan(
        self,
        view: SessionView | None,
        trigger: Trigger,
        limits: Limits,
        memory: str,
        *,
        overfull: bool = False,
    ) -> SummaryPlan | None:
        if view is None:
            return None
        tokens, info = self.tokens, view.info
        system_message = {"role": "system", "content": f"{self._system}\n\n{memory}"}
        with _named_session(view):
            return plan_summary(
                view.messages,
                summary=info.summary,
                floor=info.floor,
                uid=info.uid,
                fixed=tokens.tools(self._tools) + tokens.message(system_message),
                limits=limits,
                needs=self._needs,
                tokens=tokens,
                trigger=trigger,
                undone=is_undone(info),
                overfull=overfull,
                keep_from=min(turn_state(view.messages).unanswered, default=None),
            )


@contextmanager
def _named_session(view: SessionView | None) -> Iterator[None]:
    """Add the key of the session to UnsupportedFormat."""
    try:
        yield
    except UnsupportedFormat as error:
        key = "" if view is None else view.info.key
        raise UnsupportedFormat(error.reason, key=key, seq=error.seq) from None


class Attempt(Struct, eq=False):
    """A request to the model that is shortened when the provider rejects it as too long.

    `window` has the messages to send now, and `view` is the view that it was built from: a summary
    reads the session again, with messages that have arrived meanwhile.
    """

    _context: Context
    _key: str
    _memory: str
    _limits: Limits
    window: Window
    view: SessionView | None
    _stated_limit: int | None = None
    _retries_left: int = MAX_RETRIES

    def shorten(self, error: Exception) -> bool:
        """Replace `window` by a shorter window if the request was too long; otherwise return False.

        Raises ContextTooSmall if nothing shorter can be sent, or after the last retry.
        """
        overflow = read_overflow(error)
        if overflow is None:
            return False
        if self._retries_left == 0:
            raise _retries_exhausted_error(self.window, overflow) from error
        self._retries_left -= 1
        self._limits = _reduce_limits(self._limits, self.window, overflow)
        if overflow.limit is not None:
            usable_tokens = int(overflow.limit * _STATED_LIMIT_SHARE)
            self._stated_limit = min(usable_tokens, self._stated_limit or usable_tokens)
        context, limits = self._context, self._limits
        view = find_view(context.store, self._key)
        context._summarize(self._key, view, "overflow", limits, self._memory)
        try:
            view = find_view(context.store, self._key)
            self.window, self.view = context._build_window(view, self._memory, limits), view
        except ContextTooSmall as too_small_error:
            raise _cannot_shorten_error(self.window, overflow, too_small_error) from error
        return True

    def record_answer(self, usage: Callable[[], int | None] | None = None) -> None:
        """Record the model's limit and the token count after an answer. Errors are only logged.

        `usage` returns the request tokens that the provider counted, or None.
        """
        context = self._context
        if self._stated_limit is not None:
            # The model answered a request within the stated limit, so later requests use the limit.
            with context._calibration_mutex:
                context.limits = context.limits.at_most(self._stated_limit)
        try:
            reported_tokens = usage() if usage is not None else None
            if reported_tokens:
                context.record_usage(estimated=self.window.tokens, reported=reported_tokens)
        except Exception as error:  # noqa: BLE001 - the caller must get the answer
            log_reports.warning("the reported token count could not be stored: %r", error)


def _retries_exhausted_error(window: Window, overflow: ContextOverflow) -> ContextTooSmall:
    """Return the error for a last attempt that was still too long."""
    limit = min(overflow.limit or window.tokens, window.tokens)
    return ContextTooSmall(
        f"{_describe_rejection(window, overflow)}, after {MAX_RETRIES} shorter attempts; "
        f"set max_context_tokens to less than {limit:,}, or give the model a larger context",
        needed=window.tokens,
        limit=limit,
    )


def _cannot_shorten_error(
    window: Window, overflow: ContextOverflow, too_small_error: ContextTooSmall
) -> ContextTooSmall:
    """Return the error for a request that cannot be shortened; a smaller limit would not help."""
    return ContextTooSmall(
        f"{_describe_rejection(window, overflow)}, and the request cannot be shortened; "
        f"give the model a context of at least {too_small_error.needed:,}, "
        "or shorten the system prompt, the tools or the newest message",
        needed=too_small_error.needed,
        limit=overflow.limit or window.tokens,
    )


def _describe_rejection(window: Window, overflow: ContextOverflow) -> str:
    limit_text = "" if overflow.limit is None else f" (its limit is {overflow.limit:,})"
    return f"the model rejected about {window.tokens:,} tokens as too long{limit_text}"


def _reduce_limits(limits: Limits, window: Window, overflow: ContextOverflow) -> Limits:
    """Return the limits for the next attempt."""
    if overflow.limit is not None and overflow.limit < limits.max_context_tokens:
        return limits.at_most(int(overflow.limit * _STATED_LIMIT_SHARE))
    # Start at the size of the rejected request, which may be far below `max_context_tokens`.
    sent_tokens = window.tokens + limits.answer
    return limits.at_most(int(min(sent_tokens, limits.max_context_tokens) * _SHORTEN_FACTOR))
