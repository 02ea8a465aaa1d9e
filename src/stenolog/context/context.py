"""Everything of this room behind one object: for who has a loop of their own."""

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeVar

from stenolog.catalog import Catalog
from stenolog.context.arranging import Needs
from stenolog.context.budget import Limits
from stenolog.context.compaction import Compaction, Seen, compact_context, look, seen_in
from stenolog.context.overflow import Overflow, read_overflow
from stenolog.context.plan import Asked, plan_compaction
from stenolog.context.shapes import Body
from stenolog.context.window import Window, build_window
from stenolog.errors import ContextTooSmall, UsageError
from stenolog.providers.base import Ask, check_answer, check_ask, check_not_async
from stenolog.sessions.session_store import SessionStore
from stenolog.stores import reports
from stenolog.stores.base import SessionView, Store
from stenolog.tokens import Calibration, Tokens

T = TypeVar("T")

_CALLED: Final = "model is called as model(messages)"

RETRIES: Final = 2
"""How often a request that was too long is made again, shorter."""
_SHORTER: Final = 0.6
"""By how much, where the provider does not say what it takes."""
_NAMED: Final = 0.9
"""What is used of a limit that a provider named: our count of tokens is not its own."""

Event = Callable[[Compaction], None]


class Context:
    """What a model is sent of the sessions in a store, and their compaction.

    Over a store, or over what `open_sessions` returns. `ask`: the model that writes summaries, and
    `ask_limits` what it takes, where that is not what the other model does; without one they are
    made of the messages' own words. `on_event` is called after each compaction; what it raises is
    logged. With a `catalog`, what a provider reports of the `model` of this name is kept there, for
    the next run. Several threads may use it at once. Raises UsageError where `ask` cannot be asked.
    """

    def __init__(
        self,
        store: Store | SessionStore,
        ask: Ask | None = None,
        *,
        ask_limits: Limits | None = None,
        limits: Limits | None = None,
        needs: Needs | None = None,
        tokens: Tokens | None = None,
        model: str = "",
        catalog: Catalog | None = None,
        system: str = "",
        tools: Sequence[Mapping[str, Any]] = (),
        on_event: Event | None = None,
    ) -> None:
        if ask is not None:
            check_ask(ask)
        if not isinstance(model, str):
            raise UsageError("model is the name of the model; who is asked for summaries is `ask`")
        self.store: Store = store.store if isinstance(store, SessionStore) else store
        self.limits = limits or Limits()
        """Made smaller when a provider says that it takes less."""
        self.calibration = Calibration() if catalog is None else catalog.calibration(model)
        """What the model's reports say of our estimates."""
        self._model = model
        self._catalog = catalog
        self._ask = ask
        self._ask_limits = ask_limits
        self._learning = threading.Lock()
        self._needs = needs or Needs()
        self._tokens = tokens or Tokens()
        self._system = system
        self._tools = tools
        self._on_event = on_event

    @property
    def tokens(self) -> Tokens:
        """The counter in use, calibrated."""
        return Tokens(count=self._tokens.count, ratio=self._tokens.ratio * self.calibration.ratio)

    def window(
        self, key: str, *, memory: str = "", unsaved: Sequence[Mapping[str, Any]] = ()
    ) -> Window:
        """What to send now; nothing is written. Raises ContextTooSmall.

        `memory`: the block that recall made. `unsaved`: newest messages that are not in the store.
        """
        return self._window(look(self.store, key), memory, unsaved, self.limits)

    def call(
        self,
        key: str,
        model: Callable[[list[Body]], T],
        *,
        memory: str = "",
        unsaved: Sequence[Mapping[str, Any]] = (),
        usage: Callable[[T], int | None] | None = None,
    ) -> T:
        """What the model answers to the window; the answer is yours to store.

        Compacts before the call where that is due, and where the provider says that the request is
        too long; then it asks again, at most twice. `usage`: from an answer, the tokens that the
        provider counted in the request; what it raises is logged. Raises UsageError for an async
        model, ContextTooSmall, and all else that the model raises.
        """
        check_not_async(model, _CALLED)
        attempt = self.begin(key, memory=memory, unsaved=unsaved)
        while True:
            try:
                answer = check_answer(model(attempt.window.messages), _CALLED)
            except Exception as error:
                if not attempt.shorten(error):
                    raise
            else:
                attempt.answered(None if usage is None else partial(usage, answer))
                return answer

    def begin(
        self,
        key: str,
        *,
        memory: str = "",
        unsaved: Sequence[Mapping[str, Any]] = (),
        view: SessionView | None = None,
    ) -> "Attempt":
        """The same in steps, for who asks the model in another way. Raises ContextTooSmall.

        `view`: the session, if the caller has just read it; otherwise it is read here.
        """
        return Attempt(self, key, memory, unsaved, view)

    def settle(
        self, key: str, *, memory: str = "", view: SessionView | None = None
    ) -> Compaction | None:
        """Compact after a turn, where that is due; None where nothing was hidden.

        `view` as for `begin`.
        """
        seen = None if view is None else seen_in(view)
        return self._compact(key, "auto", self.limits, memory, seen=seen)

    def compact(self, key: str) -> Compaction | None:
        """Compact by hand, to half of what there is; None where nothing can be hidden."""
        return self._compact(key, "manual", self.limits, "")

    def reported(self, *, estimated: int, reported: int) -> Calibration:
        """Take in what a provider counted for a window that was estimated; the new calibration."""
        with self._learning:
            plain = round(estimated / self.calibration.ratio)
            if self._catalog is None:
                self.calibration = self.calibration.after(estimated=plain, reported=reported)
            else:
                kept = self._catalog.calibrate(self._model, estimated=plain, reported=reported)
                self.calibration = kept
            return self.calibration

    def _prepared(
        self,
        key: str,
        memory: str,
        unsaved: Sequence[Mapping[str, Any]],
        limits: Limits,
        view: SessionView | None,
    ) -> Window:
        """The window before a call, after the compaction that it may need."""
        seen = look(self.store, key) if view is None else seen_in(view)
        window = self._window(seen, memory, unsaved, limits)
        overfull = bool(window.left_out)
        cramped = overfull or window.elided or window.memory_left_out
        if not cramped and len(seen.history) <= limits.max_history_messages:
            return window
        if self._compact(key, "auto", limits, memory, overfull=overfull, seen=seen) is None:
            return window
        return self._window(look(self.store, key), memory, unsaved, limits)

    def _window(
        self, seen: Seen, memory: str, unsaved: Sequence[Mapping[str, Any]], limits: Limits
    ) -> Window:
        return build_window(
            [*seen.history, *unsaved],
            seen.summary,
            system=self._system,
            tools=self._tools,
            memory=memory,
            limits=limits,
            needs=self._needs,
            tokens=self.tokens,
        )

    def _compact(
        self,
        key: str,
        asked: Asked,
        limits: Limits,
        memory: str,
        *,
        overfull: bool = False,
        seen: Seen | None = None,
    ) -> Compaction | None:
        seen = seen or look(self.store, key)
        tokens = self.tokens
        plan = plan_compaction(
            seen.history,
            summary=seen.summary,
            floor=seen.floor,
            uid=seen.uid,
            fixed=self._fixed(memory, tokens),
            limits=limits,
            needs=self._needs,
            tokens=tokens,
            asked=asked,
            undone=seen.undone,
            overfull=overfull,
            keep_from=seen.unanswered_from,
        )
        if plan is None:
            return None
        takes = self._ask_limits or limits
        done = compact_context(self.store, key, plan, ask=self._ask, limits=takes, tokens=tokens)
        if done is not None and self._on_event is not None:
            try:
                self._on_event(done)
            except Exception as error:  # noqa: BLE001 - it is stored, and the caller is to know it
                reports.warning("on_event failed after a compaction of %r: %r", key, error)
        return done

    def _fixed(self, memory: str, tokens: Tokens) -> int:
        head = {"role": "system", "content": f"{self._system}\n\n{memory}"}
        return tokens.tools(self._tools) + tokens.message(head)


class Attempt:
    """One request to the model, made shorter as often as the provider finds it too long."""

    def __init__(
        self,
        context: Context,
        key: str,
        memory: str,
        unsaved: Sequence[Mapping[str, Any]],
        view: SessionView | None,
    ) -> None:
        self._context = context
        self._key = key
        self._memory = memory
        self._unsaved = unsaved
        self._limits = context.limits
        self._named: int | None = None
        self._tries_left = RETRIES
        self.window = context._prepared(key, memory, unsaved, self._limits, view)
        """What to send now."""

    def shorten(self, error: Exception) -> bool:
        """Whether the request was too long, and `window` is a shorter one now.

        Raises ContextTooSmall where nothing shorter can be sent, or that was tried often enough.
        """
        overflow = read_overflow(error)
        if overflow is None:
            return False
        if self._tries_left == 0:
            raise _given_up(self.window, overflow, RETRIES) from error
        self._tries_left -= 1
        self._limits = _shorter(self._limits, self.window, overflow)
        if overflow.limit is not None:
            self._named = min(int(overflow.limit * _NAMED), self._named or overflow.limit)
        context, limits = self._context, self._limits
        context._compact(self._key, "overflow", limits, self._memory)
        try:
            seen = look(context.store, self._key)
            self.window = context._window(seen, self._memory, self._unsaved, limits)
        except ContextTooSmall as least:
            raise _cannot_be_less(self.window, overflow, least) from error
        return True

    def answered(self, usage: Callable[[], int | None] | None = None) -> None:
        """Take in what an answer says of the model; it is paid for, so nothing is raised.

        `usage`: how many tokens the provider counted in the request, where it tells.
        """
        context = self._context
        if self._named is not None:
            # A limit that was named and that helped is true of the next request, too.
            with context._learning:
                context.limits = context.limits.at_most(self._named)
        try:
            reported = usage() if usage is not None else None
            if reported:
                context.reported(estimated=self.window.tokens, reported=reported)
        except Exception as error:  # noqa: BLE001 - the answer is worth more
            reports.warning("what the model counted could not be taken in: %r", error)


def _given_up(window: Window, overflow: Overflow, tries: int) -> ContextTooSmall:
    """The error where the last try was too long for the provider, too."""
    takes = min(overflow.limit or window.tokens, window.tokens)
    return ContextTooSmall(
        f"the model found about {window.tokens:,} tokens too long{_says(overflow)}, after "
        f"{tries} shorter tries; set max_context_tokens to less than {takes:,}, or give the model "
        "a larger context",
        needed=window.tokens,
        limit=takes,
    )


def _cannot_be_less(window: Window, overflow: Overflow, least: ContextTooSmall) -> ContextTooSmall:
    """The error where nothing shorter can be sent: a smaller limit would be of no use."""
    return ContextTooSmall(
        f"the model found about {window.tokens:,} tokens too long{_says(overflow)}, and not less "
        f"can be sent; give the model a context of at least {least.needed:,}, or shorten the "
        "system prompt, the tools or the newest message",
        needed=least.needed,
        limit=overflow.limit or window.tokens,
    )


def _says(overflow: Overflow) -> str:
    return "" if overflow.limit is None else f" (it says that it takes {overflow.limit:,})"


def _shorter(limits: Limits, window: Window, overflow: Overflow) -> Limits:
    """The limits for the next try."""
    if overflow.limit is not None and overflow.limit < limits.max_context_tokens:
        return limits.at_most(int(overflow.limit * _NAMED))
    # What was sent may have been far below the limit that it was made for.
    sent = window.tokens + limits.answer
    return limits.at_most(int(min(sent, limits.max_context_tokens) * _SHORTER))
