"""Outline of a session: its turns and the kinds of its messages, from one pass over all messages.

Outlines are cached by session. A later request reads only the messages that were added since. The
conversation page shows the prompts of the turns, and the turns page shows their tokens and cost.
"""

from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import compress
from threading import Lock
from typing import Any, Final, Literal
from weakref import WeakKeyDictionary

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from stenolog.agent.instance import AgentInstance
from stenolog.catalog.entries import Entry
from stenolog.catalog.message_metadata import FIELD, has_failed, model_of, seconds_of, usage_of
from stenolog.gateway.requests import AgentQuery, Seq, parse_query
from stenolog.gateway.viewer.message_views import prompt_text
from stenolog.gateway.viewer.pages import entry_of, page, session_header
from stenolog.gateway.viewer.safe_html import preview
from stenolog.gateway.viewer.templating import dollars, path_segment
from stenolog.memory.consolidation import ConsolidationProgress
from stenolog.messages import ThinkingPart, ToolCall, ToolResult, calls_of, read_message
from stenolog.records import Message, SessionInfo, Span
from stenolog.redaction.redact import line_start
from stenolog.sessions.fork_source import fork_source
from stenolog.sessions.usage import (
    Counts,
    Price,
    add_usage,
    cost_of,
    load_prices,
    read_side_usage,
    side_counts,
)
from stenolog.stores import spans
from stenolog.stores.base import Store, fork_seq_of
from stenolog.stores.snapshots import iterate_messages
from stenolog.transfer.export.tool_views import one_line
from stenolog.transfer.transcripts.program_messages import is_prompt

# Kinds of messages, as bits of one number.
PROMPT: Final = 1
TEXT: Final = 2
TOOLS: Final = 4
FAILED: Final = 8
THINKING: Final = 16

_MAX_OUTLINES_PER_STORE: Final = 4
_MAX_FAILED_TOOLS: Final = 5
"""Maximum number of names of failed tools per turn."""
_MAX_PROMPT_LENGTH: Final = 500
"""Number of characters of a prompt that are kept. A page shows fewer, with secrets covered."""
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


class MessageFilter(AgentQuery, frozen=True, kw_only=True):
    """Query parameters that select the messages on a page."""

    full: bool | None = None
    """Include hidden messages. [default: true if read-only or imported, otherwise false]"""
    only: Literal["", "prompts", "failed"] = ""
    """Show only prompts, or only failed tool calls."""
    tools: bool = True
    """Show tool calls and results."""
    thinking: bool = True

    @property
    def filter_text(self) -> str:
        """Query parameters that leave out messages; empty if all kinds of messages are shown."""
        fields = [f"only={self.only}"] if self.only else []
        fields += [] if self.tools else ["tools=false"]
        fields += [] if self.thinking else ["thinking=false"]
        return "&".join(fields)

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
        """Counts of the messages before the first prompt."""
        self._kinds = bytearray()
        self.price = price
        """Function that returns the price of an answer; None if there is no price list."""
        self._fork_seq = fork_seq
        """Last seq that a fork copied. Tokens of copied messages count in the source session."""
        self._calls: dict[str | None, tuple[str, list[int]]] = {}
        """Tool name of each call, and indexes of the messages with the call or its results."""

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
            # With only the plain fields, a tool message has no call id, so its tool is unknown.
            kinds = TOOLS if body["role"] in ("tool", "function") else TEXT
            failures = ("",) if kinds == TOOLS and has_failed(body) else ()
        else:
            kinds, failures = self._read_parts(body, index)
        self._kinds[index] |= kinds | (PROMPT if starts_turn else 0) | (FAILED if failures else 0)
        if starts_turn:
            content = body.get("content")
            text = content if isinstance(content, str) else prompt_text(body)
            prompt = line_start(text, _MAX_PROMPT_LENGTH)  # guard: prompt-cut
            self.turns.append(
                Turn(seq=message.seq, at=message.at, prompt=prompt, hidden=message.hidden)
            )
        self._count_message(self.turns[-1] if self.turns else self._start, body, failures)

    def _read_parts(self, body: Mapping[str, Any], index: int) -> tuple[int, Sequence[str]]:
        """Return the kinds of a message, and the tool name of each failed result (may be empty)."""
        kinds = 0
        failures: list[str] = []
        new_indexes: list[int] | None = None
        is_message_failed = has_failed(body)
        for part in read_message(body):
            if isinstance(part, ToolCall):
                kinds |= TOOLS
                if new_indexes is None:
                    new_indexes = [index]
                    if "role" in body:
                        self._calls = {}
                self._calls[part.id] = part.name, new_indexes
            elif isinstance(part, ToolResult):
                kinds |= TOOLS
                name, call_indexes = self._calls.get(part.id, ("", []))
                failed = is_message_failed or part.is_error
                if failed:
                    failures.append(name)
                self._add_result(call_indexes, index, failed=failed)
            elif isinstance(part, ThinkingPart):
                kinds |= THINKING
            else:
                kinds |= TEXT
        return kinds or TEXT, failures

    def _add_result(self, call_indexes: list[int], index: int, *, failed: bool) -> None:
        """Add a tool result. If the call failed, mark all messages with the call or its results."""
        if not call_indexes:
            return
        was_failed = self._kinds[call_indexes[0]] & FAILED
        call_indexes.append(index)
        if was_failed:
            self._kinds[index] |= FAILED
        elif failed:
            for failed_index in call_indexes:
                self._kinds[failed_index] |= FAILED

    def _count_message(self, turn: Turn, body: Mapping[str, Any], failures: Sequence[str]) -> None:
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
            model = model_of(body) or ""
            counts = turn.models.setdefault(model, Counts())
            cost = self.price(model, usage) if self.price is not None else None
            counts.add_answer(usage, cost)

    def selected_spans(self, message_filter: MessageFilter) -> list[Span]:
        """Return the seqs of the messages that pass the filter."""
        # `translate` needs one value for each possible byte.
        accepted = bytes(message_filter.accepts(kinds) for kinds in range(256))
        return spans.from_seqs(compress(self.seqs, self._kinds.translate(accepted)))

    def totals(self) -> Totals:
        """Return the sums over all turns."""
        totals = Totals(failed=sum(turn.failed > 0 for turn in self.turns))
        for turn in (self._start, *self.turns):
            for name, counts in turn.models.items():
                totals.models.setdefault(name, Counts()).add(counts)
        return totals

    def turns_between(self, start: int, end: int, info: SessionInfo) -> list[Turn]:
        """Return the turns from index `start` to `end`, after updating which prompts are hidden."""
        turns = self.turns[start:end]
        for turn in turns:
            turn.hidden = not spans.contains(info.visible_spans, turn.seq)
        return turns

    def turn_index_at(self, seq: int) -> int:
        """Return the index of the turn that contains `seq`; 0 if `seq` is before the first turn."""
        return max(0, bisect_right(self.turns, seq, key=lambda turn: turn.seq) - 1)


# --- reading ---------------------------------------------------------------------------------


class _CachedOutline:
    """Outline of a session, which grows with the session."""

    def __init__(self, info: SessionInfo) -> None:
        self.lock = Lock()
        self.outline = Outline(load_prices(), fork_seq=fork_seq_of(info))
        self.count = 0
        """Number of messages of the session when they were read last."""


_outline_caches: WeakKeyDictionary[Store, OrderedDict[str, _CachedOutline]] = WeakKeyDictionary()
_outline_caches_lock = Lock()


def read_outline(store: Store, info: SessionInfo) -> Outline:
    """Return the outline of a session, reading only the messages that were added since."""
    cached = _cached_outline(store, info)
    with cached.lock:
        outline = cached.outline
        new_count = info.last_seq - outline.last_seq
        if new_count < 0 or cached.count + new_count != info.count:
            # Messages were purged, or the session was replaced.
            outline = cached.outline = Outline(load_prices(), fork_seq=fork_seq_of(info))
        if outline.last_seq < info.last_seq:
            for message in iterate_messages(store, info, outline.last_seq):
                if message.seq > info.last_seq:
                    break  # It has arrived since, and the next call reads it.
                outline.add(message)
            outline.last_seq = info.last_seq
        cached.count = info.count
        return outline


def _cached_outline(store: Store, info: SessionInfo) -> _CachedOutline:
    with _outline_caches_lock:
        cache = _outline_caches.setdefault(store, OrderedDict())
        cached = cache.setdefault(info.uid, _CachedOutline(info))
        cache.move_to_end(info.uid)
        while len(cache) > _MAX_OUTLINES_PER_STORE:
            cache.popitem(last=False)
        return cached


# --- the outline on an open page --------------------------------------------------------------


TURNS_PER_PART: Final = 100


class OutlineQuery(AgentQuery, frozen=True, kw_only=True):
    """Query of a part of the outline. Without a position, the end of the outline is returned."""

    at: Seq = 0
    """Seq of a message."""
    start: Seq | None = None
    """Index of the first turn of the part."""


async def outline(request: Request) -> Response:
    """Serve a part of the outline."""
    call = parse_query(request, OutlineQuery)
    template_values = await call.gateway.loop.run(_load_outline, call.agent, call.key, call.query)
    return page("outline.html", **template_values, agent=call.query.agent)


def _load_outline(agent: AgentInstance, key: str, query: OutlineQuery) -> dict[str, Any]:
    """Return the values of the template: consecutive turns of a session."""
    store = agent.store
    info = store.info(agent.resolve_key(key))
    outline = read_outline(store, info)
    count, start = len(outline.turns), query.start
    if start is None:
        index = outline.turn_index_at(query.at) if query.at else count - 1
        start = max(0, min(index - TURNS_PER_PART // 2, count - TURNS_PER_PART))
    return {
        "info": info,
        "turns": outline.turns_between(start, start + TURNS_PER_PART, info),
        "start": start,
        "count": count,
        "totals": outline.totals(),
    }


# --- the page of the turns --------------------------------------------------------------------


TURNS_PER_PAGE: Final = 200


class TurnsQuery(AgentQuery, frozen=True, kw_only=True):
    """Query of the turns page."""

    page: Seq = 0
    """Page number from 1, oldest turns first. 0 is the last page."""


async def turns(request: Request) -> Response:
    """Serve the page of the turns."""
    call = parse_query(request, TurnsQuery)
    entry = await entry_of(call)
    view = await call.gateway.loop.run(_load_turns, call.agent, call.key, entry, call.query.page)
    bars = _chart_bars(view["turns"], view["first"], view["info"].key, call.query.agent)
    return page(
        "turns.html",
        view=view,
        agent=call.query.agent,
        chart_bars=bars,
    )


def _load_turns(
    agent: AgentInstance, key: str, entry: Entry | None, page_number: int
) -> dict[str, Any]:
    """Return the values of the template: the turns of one page."""
    store = agent.store
    info = store.info(agent.resolve_key(key))
    outline = read_outline(store, info)
    count = len(outline.turns)
    price = load_prices()
    page_count = max(1, -(-count // TURNS_PER_PAGE))
    page_number = min(page_number or page_count, page_count)
    # The last page is full, so that it shows many of the newest turns.
    # The first page may be shorter.
    end = count - (page_count - page_number) * TURNS_PER_PAGE
    start = max(0, end - TURNS_PER_PAGE)
    turns = outline.turns_between(start, end, info)
    return {
        **session_header(info, entry, fork_source(info)),
        "turns": turns,
        "has_cost": any(turn.cost is not None for turn in turns),
        # `first` is the number of the first turn on this page; `count` counts all turns.
        "first": start + 1,
        "count": count,
        "totals": outline.totals(),
        "page_number": page_number,
        "page_count": page_count,
        # `side_usage` is the usage of the model calls that made notes and summaries.
        "side_usage": _side_usage(agent, info, price),
    }


def _side_usage(agent: AgentInstance, info: SessionInfo, price: Price | None) -> TokenUsage:
    usage = read_side_usage(info.meta, info.uid)
    if agent.memory is not None:
        progress = ConsolidationProgress(agent.memory.notes.store, agent=agent.memory.agent)
        add_usage(usage, progress.usage(info.uid))
    return TokenUsage(models=side_counts(usage, price))


def _chart_bars(turns: Sequence[Turn], first: int, key: str, agent: str) -> list[dict[str, Any]]:
    """Return one bar per turn for the chart: its numbers, label and address, oldest turn first.

    The list is empty if no turn has token counts.
    """
    if not any(turn.input_tokens or turn.output_tokens for turn in turns):
        return []
    agent_parameter = "" if agent == "main" else f"&agent={path_segment(agent)}"
    bars = []
    for number, turn in enumerate(turns, first):
        cost = turn.cost
        token_text = f"{turn.input_tokens:,} input tokens · {turn.output_tokens:,} output tokens"
        cost_text = "" if cost is None else f" · {dollars(cost)}"
        bars.append(
            {
                "number": number,
                "input_tokens": turn.input_tokens,
                "output_tokens": turn.output_tokens,
                "cost": cost,
                "label": f"{token_text}{cost_text} — {preview(turn.prompt) or '(no text)'}",
                "address": f"/s/{path_segment(key)}?at={turn.seq}{agent_parameter}#m{turn.seq}",
            }
        )
    return bars
