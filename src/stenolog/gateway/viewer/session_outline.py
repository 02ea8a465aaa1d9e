"""Outline of a session: its turns and the kinds of its messages, from one pass over all messages.

Outlines are cached by session. A later request reads only the messages that were added since.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import islice
from threading import Lock
from time import sleep
from typing import Any, Final
from weakref import WeakKeyDictionary

from msgspec import Struct

from stenolog.catalog.message_metadata import FIELD, has_failed, model_of, seconds_of, usage_of
from stenolog.errors import StenologError
from stenolog.gateway.viewer.message_views import is_prompt, one_line, prompt_line
from stenolog.messages import ThinkingPart, ToolCall, ToolResult, calls_of, read_message
from stenolog.records import Message, SessionInfo, Span
from stenolog.sessions.usage import Counts, Price, cost_of, load_prices
from stenolog.stores import spans
from stenolog.stores.base import Store, forked_at
from stenolog.stores.snapshots import SnapshotMark, SnapshotStore

PROMPT: Final = 1
TEXT: Final = 2
TOOLS: Final = 4
FAILED: Final = 8
THINKING: Final = 16

MAX_MESSAGES: Final = 25_000
"""Maximum number of messages that one outline request of a page reads."""
_BURST_MESSAGES: Final = 100
"""Number of messages to read between two pauses, if `read_outline` has a limit."""
_PAUSE_SECONDS: Final = 0.001
_MAX_OUTLINES_PER_STORE: Final = 4
_MAX_FAILED_TOOLS: Final = 5
"""Maximum number of names of failed tools per turn."""
_PLAIN_FIELDS: Final = frozenset(("role", "content", FIELD))
"""A message with only these fields has no content besides its text."""


class TokenUsage(Struct, kw_only=True):
    """Token counts reported by the providers, by model."""

    models: dict[str, Counts] = {}

    @property
    def has_counts(self) -> bool:
        """Whether any provider reported token counts."""
        return bool(self.models)

    @property
    def input_tokens(self) -> int:
        """Input tokens of all requests."""
        return sum(counts.prompt for counts in self.models.values())

    @property
    def output_tokens(self) -> int:
        """Output tokens of all answers."""
        return sum(counts.answer for counts in self.models.values())

    @property
    def cost(self) -> float | None:
        """Cost in US dollars; None if no model has a known price."""
        cost = cost_of(self.models)
        return cost.total if cost.models else None

    @property
    def unpriced_models(self) -> Sequence[str]:
        """Models without a known price."""
        return cost_of(self.models).unknown


class Turn(TokenUsage, kw_only=True):
    """A prompt and all messages up to the next prompt."""

    seq: int
    at: datetime
    prompt: str
    hidden: bool
    messages: int = 0
    calls: int = 0
    failed: int = 0
    """Number of failed tool calls."""
    failed_tools: list[str] = []
    """Names of the tools that failed first, each once."""
    seconds: float = 0.0


class Totals(TokenUsage, kw_only=True):
    """Sums over all turns of a session, and over the messages before the first prompt."""

    failed: int
    """Number of turns with a failed tool call."""


class MessageFilter(Struct, frozen=True, kw_only=True):
    """Kinds of messages to show."""

    only: str = ""
    """`prompts` or `failed`; empty for all messages."""
    tools: bool = True
    thinking: bool = True

    @property
    def is_active(self) -> bool:
        """Whether any message can be left out."""
        return bool(self.only) or not self.tools or not self.thinking

    def accepts(self, kinds: int) -> bool:
        """Return whether a message of these kinds is shown."""
        if self.only and not kinds & (PROMPT if self.only == "prompts" else FAILED):
            return False
        selected = TEXT | (TOOLS if self.tools else 0) | (THINKING if self.thinking else 0)
        return bool(kinds & selected)


class Outline:
    """Turns of a session, and the kinds of each of its messages."""

    def __init__(self, price: Price | None = None, *, fork_seq: int = 0) -> None:
        self.turns: list[Turn] = []
        self.seqs = array("Q")
        self.last_seq = 0
        """The last seq that was read."""
        self._start = Turn(seq=0, at=datetime.now(UTC), prompt="", hidden=False)
        """Messages before the first prompt."""
        self._kinds = bytearray()
        self.price = price
        """Function that returns the price of an answer; None if there is no price list."""
        self._fork_seq = fork_seq
        """Last seq that a fork copied. Tokens of copied messages count in the source session."""
        self._totals: tuple[int, Totals] | None = None
        """Cached sums over all turns, and the number of messages that they include."""
        self._groups: dict[str | None, list[int]] = {}
        """Indexes of the message with a call and of the messages with its results, by call id."""
        self._tool_names: dict[str | None, str] = {}
        """Names of the tools by call id, for the calls in `_groups`."""

    def add(self, message: Message) -> None:
        """Add the next message."""
        body = message.to_dict()
        index = len(self._kinds)
        self.seqs.append(message.seq)
        self._kinds.append(0)
        self.last_seq = message.seq
        failures: Sequence[str] = ()
        starts_turn = is_prompt(body)
        if isinstance(body.get("content"), str) and body.keys() <= _PLAIN_FIELDS and "role" in body:
            # A tool message with only the plain fields lacks the id of its call.
            kinds = TOOLS if body["role"] in ("tool", "function") else TEXT
            failures = ("",) if kinds == TOOLS and has_failed(body) else ()
        else:
            kinds, failures = self._read_parts(body, index)
        self._kinds[index] |= kinds | (PROMPT if starts_turn else 0) | (FAILED if failures else 0)
        if starts_turn:
            content = body.get("content")
            prompt = one_line(content) if isinstance(content, str) else prompt_line(body)
            self.turns.append(
                Turn(seq=message.seq, at=message.at, prompt=prompt, hidden=message.hidden)
            )
        self._count_message(self.turns[-1] if self.turns else self._start, body, failures)

    def _read_parts(self, body: Mapping[str, Any], index: int) -> tuple[int, Sequence[str]]:
        """Return the kinds of a message, and the tool of each failed result; empty if unknown."""
        kinds = 0
        failures: list[str] = []
        group: list[int] | None = None
        is_failed = has_failed(body)
        for part in read_message(body):
            if isinstance(part, ToolCall):
                kinds |= TOOLS
                if group is None:
                    group = [index]
                    if "role" in body:
                        self._groups, self._tool_names = {}, {}
                self._groups[part.id] = group
                self._tool_names[part.id] = part.name
            elif isinstance(part, ToolResult):
                kinds |= TOOLS
                failed = is_failed or part.is_error
                if failed:
                    failures.append(self._tool_names.get(part.id, ""))
                self._add_result(part.id, index, failed=failed)
            elif isinstance(part, ThinkingPart):
                kinds |= THINKING
            else:
                kinds |= TEXT
        return kinds or TEXT, failures

    def _add_result(self, id: str | None, index: int, *, failed: bool) -> None:
        """Add a tool result. If the call failed, mark all messages with the call or its results."""
        group = self._groups.get(id)
        if group is None:
            return
        was_failed = self._kinds[group[0]] & FAILED
        group.append(index)
        if was_failed:
            self._kinds[index] |= FAILED
        elif failed:
            for member in group:
                self._kinds[member] |= FAILED

    def _count_message(self, turn: Turn, body: Mapping[str, Any], failures: Sequence[str]) -> None:
        turn.messages += 1
        turn.failed += len(failures)
        for name in map(one_line, failures):
            if name and name not in turn.failed_tools:
                turn.failed_tools = [*turn.failed_tools, name][:_MAX_FAILED_TOOLS]
        turn.calls += len(calls_of(body))
        if FIELD not in body:
            return
        turn.seconds += seconds_of(body) or 0.0
        usage = usage_of(body)
        if usage is not None and self.last_seq > self._fork_seq:
            name = model_of(body) or ""
            counts = turn.models.setdefault(name, Counts())
            cost = self.price(name, usage) if self.price is not None else None
            counts.add_answer(usage, cost)

    def selected_spans(self, message_filter: MessageFilter) -> list[Span]:
        """Return the seqs of the messages that pass the filter."""
        accepted = bytes(message_filter.accepts(kinds) for kinds in range(32))
        selected_spans: list[Span] = []
        for seq, kinds in zip(self.seqs, self._kinds, strict=True):
            if not accepted[kinds]:
                continue
            if selected_spans and selected_spans[-1][1] == seq - 1:
                selected_spans[-1] = (selected_spans[-1][0], seq)
            else:
                selected_spans.append((seq, seq))
        return selected_spans

    def totals(self) -> Totals:
        """Return the sums over all turns, which are cached until messages are added."""
        if self._totals is None or self._totals[0] != len(self.seqs):
            totals = Totals(failed=sum(turn.failed > 0 for turn in self.turns))
            for turn in (self._start, *self.turns):
                for name, counts in turn.models.items():
                    totals.models.setdefault(name, Counts()).add(counts)
            self._totals = (len(self.seqs), totals)
        return self._totals[1]

    def turns_between(self, start: int, end: int, info: SessionInfo) -> list[Turn]:
        """Return the turns from index `start` to `end`, after updating which prompts are hidden."""
        turns = self.turns[start:end]
        for turn in turns:
            turn.hidden = not spans.contains(info.in_sight, turn.seq)
        return turns

    def turn_at(self, seq: int) -> int:
        """Return the index of the turn that contains `seq`; 0 if `seq` is before the first turn."""
        return max(0, bisect_right(self.turns, seq, key=lambda turn: turn.seq) - 1)

    def turn_since(self, moment: datetime) -> int:
        """Return the index of the first turn at this time or later, otherwise of the last turn."""
        index = bisect_left(self.turns, moment, key=lambda turn: turn.at)
        return min(index, max(0, len(self.turns) - 1))


# --- reading ---------------------------------------------------------------------------------


class _CachedOutline:
    """Outline of a session that may still be incomplete."""

    def __init__(self, info: SessionInfo) -> None:
        self.lock = Lock()
        self.outline = Outline(load_prices(), fork_seq=forked_at(info))
        self.count = 0
        """Number of messages of the session when the outline was complete."""


_outline_caches: WeakKeyDictionary[Store, OrderedDict[str, _CachedOutline]] = WeakKeyDictionary()
_outline_caches_lock = Lock()


def read_outline(store: Store, info: SessionInfo, *, limit: int | None = None) -> Outline:
    """Return the outline of a session, incomplete if `limit` is reached before the end.

    `limit` is the maximum number of messages to read. The next call continues after the last
    message that this call read.
    """
    cached = _cached_outline(store, info)
    with cached.lock:
        outline = cached.outline
        known_count = len(outline.seqs)
        if known_count and (
            outline.last_seq > info.last_seq
            or (load_prices() is None) != (outline.price is None)
            or (outline.last_seq == info.last_seq and cached.count not in (0, info.count))
        ):
            # Messages were purged, the session was replaced, or a price list was installed.
            outline = cached.outline = Outline(load_prices(), fork_seq=forked_at(info))
            known_count = 0
        if outline.last_seq < info.last_seq:
            messages = islice(all_messages(store, info, outline.last_seq), limit)
            for number, message in enumerate(messages):
                outline.add(message)
                if limit is not None and number % _BURST_MESSAGES == 0:
                    # No page waits for the outline, so leave the processor to other requests.
                    sleep(_PAUSE_SECONDS)
            if limit is None or len(outline.seqs) - known_count < limit:
                outline.last_seq = info.last_seq
        cached.count = info.count if outline.last_seq >= info.last_seq else 0
        return outline


def _cached_outline(store: Store, info: SessionInfo) -> _CachedOutline:
    with _outline_caches_lock:
        cache = _outline_caches.setdefault(store, OrderedDict())
        outline = cache.setdefault(info.uid, _CachedOutline(info))
        cache.move_to_end(info.uid)
        while len(cache) > _MAX_OUTLINES_PER_STORE:
            cache.popitem(last=False)
        return outline


def all_messages(store: Store, info: SessionInfo, after: int = 0) -> Iterator[Message]:
    """Yield all messages after a seq, visible or hidden, if possible without building a list."""
    last = after
    if isinstance(store, SnapshotStore):
        mark = SnapshotMark(key=info.key, uid=info.uid, stamp="")
        try:
            with store.read_snapshot(mark, after=after) as reading:
                for message in reading.messages:
                    last = message.seq
                    yield message
                return
        except StenologError:
            pass  # The session is damaged or was replaced: read it with `get_history`.
    yield from store.get_history(info.key, after=last, full=True)
