"""Outline of a session: its turns and the kinds of its messages, from one pass over all messages.

Outlines are cached by session. A later request reads only the messages that were added since.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from itertools import islice
from threading import Lock
from time import sleep
from typing import Any, Final
from weakref import WeakKeyDictionary

from msgspec import Struct

from stenolog.catalog.message_metadata import (
    FIELD,
    has_failed,
    model_of,
    seconds_of,
    usage_of,
)
from stenolog.errors import StenologError
from stenolog.gateway.viewer.message_views import one_line, prompt_line
from stenolog.messages import (
    ThinkingPart,
    ToolCall,
    ToolResult,
    calls_of,
    has_text,
    read_message,
)
from stenolog.records import Message, SessionInfo, Span
from stenolog.sessions.usage import Counts, Price, cost_of, prices
from stenolog.stores.base import Store
from stenolog.stores.snapshots import SnapshotMark, SnapshotStore

PROMPT: Final = 1
WORDS: Final = 2
TOOLS: Final = 4
FAILED: Final = 8
THINKING: Final = 16

MAX_STEP: Final = 25_000
"""Maximum number of messages that one request for the outline of a page reads."""
_BURST: Final = 100
"""Number of messages between two pauses of a reading with a limit."""
_PAUSE: Final = 0.001
"""Seconds of each pause."""
_MAX_CACHED: Final = 4
"""Maximum number of cached outlines per store."""
_PLAIN: Final = frozenset(("role", "content", FIELD))
"""Fields of a message whose only content is its text."""


class Turn(Struct, kw_only=True):
    """A prompt and all messages up to the next prompt."""

    seq: int
    at: datetime
    prompt: str
    hidden: bool
    messages: int = 0
    calls: int = 0
    failed: int = 0
    """Number of failed tool calls."""
    seconds: float = 0.0
    models: dict[str, Counts] = {}
    """Token counts reported by the providers, by model."""

    @property
    def counted(self) -> bool:
        """Whether any provider reported token counts."""
        return bool(self.models)

    @property
    def input_tokens(self) -> int:
        """Input tokens of all requests of the turn."""
        return sum(one.prompt for one in self.models.values())

    @property
    def output_tokens(self) -> int:
        """Output tokens of all answers of the turn."""
        return sum(one.answer for one in self.models.values())

    @property
    def cost(self) -> float | None:
        """Cost in US dollars; None if no model of the turn has a known price."""
        if not self.models:
            return None
        cost = cost_of(self.models)
        return cost.total if cost.models else None


class Totals(Struct, frozen=True, kw_only=True):
    """Sums over all turns of a session."""

    input_tokens: int
    output_tokens: int
    counted: bool
    """Whether any provider reported token counts."""
    cost: float | None
    """Cost in US dollars; None if no model has a known price."""
    unpriced: Sequence[str]
    """Models without a known price."""
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
        """Whether a message of these kinds is shown."""
        if self.only and not kinds & (PROMPT if self.only == "prompts" else FAILED):
            return False
        shown = WORDS | (TOOLS if self.tools else 0) | (THINKING if self.thinking else 0)
        return bool(kinds & shown)


class Outline:
    """Turns of a session, and the kinds of each of its messages."""

    def __init__(self, price: Price | None = None) -> None:
        self.turns: list[Turn] = []
        self.seqs = array("Q")
        self.last_seq = 0
        """The last seq that was read."""
        self._kinds = bytearray()
        self._price = price
        self._totals: tuple[int, Totals] | None = None
        """Number of messages, and the sums over their turns."""
        self._groups: dict[str | None, list[int]] = {}
        """Places of the message with a call and of its results, by id of the call."""

    @property
    def unpriced(self) -> bool:
        """Whether there was no price list when the outline was made."""
        return self._price is None

    def add(self, message: Message) -> None:
        """Add the next message."""
        body = message.to_dict()
        place = len(self._kinds)
        self.seqs.append(message.seq)
        self._kinds.append(0)
        self.last_seq = message.seq
        failures = 0
        if isinstance(body.get("content"), str) and body.keys() <= _PLAIN and "role" in body:
            is_prompt = body["role"] == "user"
            # Role `tool` without the id of its call.
            kinds = TOOLS if body["role"] in ("tool", "function") else WORDS
            failures = int(kinds == TOOLS and has_failed(body))
        else:
            is_prompt = has_text(body)
            kinds, failures = self._read_parts(body, place)
        self._kinds[place] |= kinds | (PROMPT if is_prompt else 0) | (FAILED if failures else 0)
        if is_prompt:
            content = body.get("content")
            prompt = one_line(content) if isinstance(content, str) else prompt_line(body)
            self.turns.append(
                Turn(seq=message.seq, at=message.at, prompt=prompt, hidden=message.hidden)
            )
        if self.turns:
            self._count(self.turns[-1], body, failures)

    def _read_parts(self, body: Mapping[str, Any], place: int) -> tuple[int, int]:
        """Return the kinds of a message, and the number of failed results in it."""
        kinds = failures = 0
        group: list[int] | None = None
        marked = has_failed(body)
        for part in read_message(body):
            if isinstance(part, ToolCall):
                kinds |= TOOLS
                if group is None:
                    group = [place]
                    if "role" in body:
                        self._groups = {}
                self._groups[part.id] = group
            elif isinstance(part, ToolResult):
                kinds |= TOOLS
                failed = marked or part.is_error
                failures += failed
                self._add_result(part.id, place, failed=failed)
            elif isinstance(part, ThinkingPart):
                kinds |= THINKING
            else:
                kinds |= WORDS
        return kinds or WORDS, failures

    def _add_result(self, id: str | None, place: int, *, failed: bool) -> None:
        """Mark the message with the call, and all its results, if one of them failed."""
        group = self._groups.get(id)
        if group is None:
            return
        was_failed = self._kinds[group[0]] & FAILED
        group.append(place)
        if was_failed:
            self._kinds[place] |= FAILED
        elif failed:
            for one in group:
                self._kinds[one] |= FAILED

    def _count(self, turn: Turn, body: Mapping[str, Any], failures: int) -> None:
        turn.messages += 1
        turn.failed += failures
        turn.calls += len(calls_of(body))
        if FIELD not in body:
            return
        turn.seconds += seconds_of(body) or 0.0
        usage = usage_of(body)
        if usage is not None:
            name = model_of(body) or ""
            counts = turn.models.setdefault(name, Counts())
            cost = self._price(name, usage) if self._price is not None else None
            counts.add_answer(usage, cost)

    def selected(self, chosen: MessageFilter) -> list[Span]:
        """Return the seqs of the messages that pass the filter."""
        accepted = bytes(chosen.accepts(kinds) for kinds in range(32))
        found: list[Span] = []
        for seq, kinds in zip(self.seqs, self._kinds, strict=True):
            if not accepted[kinds]:
                continue
            if found and found[-1][1] == seq - 1:
                found[-1] = (found[-1][0], seq)
            else:
                found.append((seq, seq))
        return found

    def totals(self) -> Totals:
        """Return the sums over all turns. They are kept until messages are added."""
        if self._totals is None or self._totals[0] != len(self.seqs):
            sums: dict[str, Counts] = {}
            for turn in self.turns:
                for name, counts in turn.models.items():
                    _add(sums.setdefault(name, Counts()), counts)
            cost = cost_of(sums)
            made = Totals(
                input_tokens=sum(one.prompt for one in sums.values()),
                output_tokens=sum(one.answer for one in sums.values()),
                counted=bool(sums),
                cost=cost.total if cost.models else None,
                unpriced=cost.unknown,
                failed=sum(turn.failed > 0 for turn in self.turns),
            )
            self._totals = (len(self.seqs), made)
        return self._totals[1]

    def turn_at(self, seq: int) -> int:
        """Return the index of the turn that contains `seq`; the first one if it is before it."""
        return max(0, bisect_right(self.turns, seq, key=lambda one: one.seq) - 1)

    def turn_since(self, moment: datetime) -> int:
        """Return the index of the first turn at this time or later, otherwise of the last turn."""
        place = bisect_left(self.turns, moment, key=lambda one: one.at)
        return min(place, max(0, len(self.turns) - 1))


def _add(total: Counts, more: Counts) -> None:
    total.answers += more.answers
    total.prompt += more.prompt
    total.answer += more.answer
    total.cached += more.cached
    total.priced += more.priced
    total.dollars += more.dollars


# --- reading ---------------------------------------------------------------------------------


class _Cached:
    """Outline of a session that may still be incomplete."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.outline = Outline(prices())
        self.count = 0
        """Number of messages of the session when the outline was complete."""


_caches: WeakKeyDictionary[Store, OrderedDict[str, _Cached]] = WeakKeyDictionary()
_caches_lock = Lock()


def read_outline(store: Store, info: SessionInfo, *, limit: int | None = None) -> Outline:
    """Return the outline of a session, complete unless `limit` ends the reading before.

    `limit` is the maximum number of messages to read. The next call continues there.
    """
    cached = _cached(store, info.uid)
    with cached.lock:
        outline = cached.outline
        known = len(outline.seqs)
        if known and (
            outline.last_seq > info.last_seq
            or (prices() is None) != outline.unpriced
            or (outline.last_seq == info.last_seq and cached.count not in (0, info.count))
        ):
            # Messages were purged, the session was replaced, or a price list was installed.
            outline = cached.outline = Outline(prices())
            known = 0
        if outline.last_seq < info.last_seq:
            messages = islice(all_messages(store, info, outline.last_seq), limit)
            for number, message in enumerate(messages):
                outline.add(message)
                if limit is not None and number % _BURST == 0:
                    # Nothing waits for this: leave the processor to requests for pages.
                    sleep(_PAUSE)
            if limit is None or len(outline.seqs) - known < limit:
                outline.last_seq = info.last_seq
        cached.count = info.count if outline.last_seq >= info.last_seq else 0
        return outline


def _cached(store: Store, uid: str) -> _Cached:
    with _caches_lock:
        cache = _caches.setdefault(store, OrderedDict())
        found = cache.setdefault(uid, _Cached())
        cache.move_to_end(uid)
        while len(cache) > _MAX_CACHED:
            cache.popitem(last=False)
        return found


def all_messages(store: Store, info: SessionInfo, after: int = 0) -> Iterator[Message]:
    """Yield all messages after a seq, visible or hidden, one at a time if the store can."""
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
            pass  # The session is damaged or was replaced: use the ordinary read.
    yield from store.get_history(info.key, after=last, full=True)


def turns_of(history: Sequence[Message], price: Price | None = None) -> list[Turn]:
    """Return the turns in these messages. Messages before the first prompt belong to no turn."""
    outline = Outline(price)
    for message in history:
        outline.add(message)
    return outline.turns
