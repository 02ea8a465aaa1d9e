"""Page with the turns of a session: prompt, tokens, duration and cost of each turn."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from stenolog.agent.instance import AgentInstance
from stenolog.catalog.entries import Entry
from stenolog.catalog.message_metadata import model_of, seconds_of, usage_of
from stenolog.catalog.searchable_text import tags_from
from stenolog.errors import install_command
from stenolog.gateway.api_types import AgentQuery
from stenolog.gateway.requests import parse_query
from stenolog.gateway.viewer.formatting import dollars, segment
from stenolog.gateway.viewer.message_views import prompt_line
from stenolog.gateway.viewer.pages import entry_of, page, title_of
from stenolog.memory.consolidation import ConsolidationProgress
from stenolog.messages import calls_of, has_text
from stenolog.records import Message, SessionInfo
from stenolog.sessions.side_usage import add_usage, read_field, side_counts
from stenolog.sessions.usage import Counts, Price, cost_of, prices

MAX_TURNS: Final = 200
"""Maximum number of turns that are drawn and listed, counted from the end."""
_MAX_READ: Final = 4_000
"""Maximum number of messages that are read for them."""


class Turn(Struct, kw_only=True):
    """A prompt and all messages up to the next prompt."""

    seq: int
    at: datetime
    prompt: str
    hidden: bool
    messages: int = 0
    calls: int = 0
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


class Costs(Struct, frozen=True, kw_only=True):
    """Costs of turns, in US dollars."""

    turns: Sequence[float | None]
    """Cost of each turn; None if none of its models has a known price."""
    unknown: Sequence[str]
    """Models without a known price."""

    @property
    def known(self) -> bool:
        """Whether any turn has a known cost."""
        return any(one is not None for one in self.turns)

    @property
    def total(self) -> float:
        """Return the sum of all known costs."""
        return sum(one for one in self.turns if one is not None)


class TurnsPage(Struct, frozen=True, kw_only=True):
    """The data of the turns page."""

    info: SessionInfo
    title: str
    tags: tuple[str, ...]
    entry: Entry | None
    turns: Sequence[Turn]
    costs: Costs | None
    """None if no price list is installed."""
    complete: bool
    """Whether these are all turns of the session."""
    side: Mapping[str, Counts] = {}
    """Calls of the whole session that made notes and summaries, by model."""

    @property
    def input_tokens(self) -> int:
        """Input tokens of all these turns."""
        return sum(one.input_tokens for one in self.turns)

    @property
    def output_tokens(self) -> int:
        """Output tokens of all these turns."""
        return sum(one.output_tokens for one in self.turns)

    @property
    def side_tokens(self) -> int:
        """Tokens of the calls that made notes and summaries."""
        return sum(one.prompt + one.answer for one in self.side.values())

    @property
    def side_cost(self) -> float:
        """Known cost of the calls that made notes and summaries, in US dollars."""
        return cost_of(self.side).total

    @property
    def counted(self) -> bool:
        """Whether there are token counts to draw."""
        return any(one.input_tokens or one.output_tokens for one in self.turns)

    @property
    def rows(self) -> list[tuple[Turn, float | None]]:
        """Return the turns with their costs, newest first."""
        costs = [None] * len(self.turns) if self.costs is None else self.costs.turns
        return list(zip(self.turns, costs, strict=True))[::-1]


async def turns(request: Request) -> Response:
    """Serve the page of the turns."""
    call = parse_query(request, AgentQuery)
    entry = await entry_of(call)
    found = await call.gateway.loop.run(_load_turns, call.agent, call.key, entry)
    return page(
        "turns.html",
        found=found,
        agent=call.query.agent,
        drawn=chart_data(found, call.query.agent) if found.counted else [],
        how_to_get=install_command("prices"),
    )


def _load_turns(agent: AgentInstance, key: str, entry: Entry | None) -> TurnsPage:
    store = agent.store
    own = agent.own_key(key)
    info = store.info(own)
    history = store.get_history(own, last=_MAX_READ, full=True)
    price = prices()
    made = turns_of(history, price)
    shown = made[-MAX_TURNS:]
    return TurnsPage(
        info=info,
        title=title_of(entry, info),
        tags=tags_from(info.meta),
        entry=entry,
        turns=shown,
        costs=None if price is None else costs_of(shown),
        complete=len(shown) == len(made) and len(history) == info.count,
        side=_side_calls(agent, info, price),
    )


def _side_calls(agent: AgentInstance, info: SessionInfo, price: Price | None) -> dict[str, Counts]:
    used = read_field(info.meta, info.uid)
    if agent.memory is not None:
        marks = ConsolidationProgress(agent.memory.notes.store, agent=agent.memory.agent)
        add_usage(used, marks.usage(info.uid))
    return side_counts(used, price)


def turns_of(history: Sequence[Message], price: Price | None = None) -> list[Turn]:
    """Return the turns in these messages. Messages before the first prompt belong to no turn."""
    made: list[Turn] = []
    for message in history:
        body = message.to_dict()
        if has_text(body):
            prompt = prompt_line(body)
            made.append(Turn(seq=message.seq, at=message.at, prompt=prompt, hidden=message.hidden))
        if not made:
            continue
        turn = made[-1]
        turn.messages += 1
        turn.calls += len(calls_of(body))
        turn.seconds += seconds_of(body) or 0.0
        usage = usage_of(body)
        if usage is not None:
            name = model_of(body) or ""
            counts = turn.models.setdefault(name, Counts())
            counts.add_answer(usage, price(name, usage) if price is not None else None)
    return made


def costs_of(turns: Iterable[Turn]) -> Costs:
    """Return the cost of each turn."""
    told: list[float | None] = []
    unknown: dict[str, None] = {}
    for turn in turns:
        cost = cost_of(turn.models)
        told.append(cost.total if cost.models else None)
        unknown.update(dict.fromkeys(cost.unknown))
    return Costs(turns=told, unknown=list(unknown))


def chart_data(found: TurnsPage, agent: str) -> list[dict[str, Any]]:
    """Return the data of the chart, oldest turn first: numbers, label and address of each turn."""
    extra = "" if agent == "main" else f"&agent={segment(agent)}"
    made = []
    for turn, cost in reversed(found.rows):
        words = [f"{turn.input_tokens:,} input tokens", f"{turn.output_tokens:,} output tokens"]
        words += [] if cost is None else [dollars(cost)]
        made.append(
            {
                "input_tokens": turn.input_tokens,
                "output_tokens": turn.output_tokens,
                "cost": cost,
                "label": f"{' · '.join(words)} — {turn.prompt or '(no text)'}",
                "address": f"/s/{segment(found.info.key)}?at={turn.seq}{extra}#m{turn.seq}",
            }
        )
    return made
