"""Page with the turns of a session: prompt, tokens, duration and cost of each turn."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Final

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from stenolog.agent.instance import AgentInstance
from stenolog.catalog.entries import Entry
from stenolog.catalog.searchable_text import tags_from
from stenolog.errors import install_command
from stenolog.gateway.api_types import MAX_SEQ, AgentQuery
from stenolog.gateway.requests import parse_query
from stenolog.gateway.viewer.formatting import dollars, segment
from stenolog.gateway.viewer.pages import entry_of, page, title_of
from stenolog.gateway.viewer.secret_masks import covered
from stenolog.gateway.viewer.session_outline import Totals, Turn, read_outline
from stenolog.memory.consolidation import ConsolidationProgress
from stenolog.records import SessionInfo
from stenolog.sessions.side_usage import add_usage, read_field, side_counts
from stenolog.sessions.usage import Counts, Price, cost_of, prices
from stenolog.stores import spans

MAX_TURNS: Final = 200
"""Maximum number of turns that one page draws and lists."""


class TurnsQuery(AgentQuery, frozen=True, kw_only=True):
    """Query of the turns page."""

    page: Annotated[int, Meta(ge=0, le=MAX_SEQ)] = 0
    """Page number from 1, oldest turns first. 0 is the last page."""


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
    first: int
    """Number of the first of these turns, from 1."""
    count: int
    """Number of turns of the session."""
    totals: Totals
    """Sums over all turns of the session."""
    number: int
    """Number of this page, from 1."""
    pages: int
    side: Mapping[str, Counts] = {}
    """Calls of the whole session that made notes and summaries, by model."""

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
    def rows(self) -> list[tuple[int, Turn, float | None]]:
        """Return the turns with their numbers and costs, newest first."""
        costs = [None] * len(self.turns) if self.costs is None else self.costs.turns
        numbers = range(self.first, self.first + len(self.turns))
        return list(zip(numbers, self.turns, costs, strict=True))[::-1]


async def turns(request: Request) -> Response:
    """Serve the page of the turns."""
    call = parse_query(request, TurnsQuery)
    entry = await entry_of(call)
    found = await call.gateway.loop.run(_load_turns, call.agent, call.key, entry, call.query.page)
    return page(
        "turns.html",
        found=found,
        agent=call.query.agent,
        drawn=chart_data(found, call.query.agent) if found.counted else [],
        how_to_get=install_command("prices"),
    )


def _load_turns(agent: AgentInstance, key: str, entry: Entry | None, number: int) -> TurnsPage:
    store = agent.store
    info = store.info(agent.resolve_key(key))
    outline = read_outline(store, info)
    every = outline.turns
    price = prices()
    pages = max(1, -(-len(every) // MAX_TURNS))
    number = min(number or pages, pages)
    # The last page is full, so that it shows the newest turns: the first one may be shorter.
    end = len(every) - (pages - number) * MAX_TURNS
    start = max(0, end - MAX_TURNS)
    shown = every[start:end]
    for one in shown:
        one.hidden = not spans.contains(info.in_sight, one.seq)
    return TurnsPage(
        info=info,
        title=title_of(entry, info),
        tags=tags_from(info.meta),
        entry=entry,
        turns=shown,
        costs=None if price is None else costs_of(shown),
        first=start + 1,
        count=len(every),
        totals=outline.totals(),
        number=number,
        pages=pages,
        side=_side_calls(agent, info, price),
    )


def _side_calls(agent: AgentInstance, info: SessionInfo, price: Price | None) -> dict[str, Counts]:
    used = read_field(info.meta, info.uid)
    if agent.memory is not None:
        marks = ConsolidationProgress(agent.memory.notes.store, agent=agent.memory.agent)
        add_usage(used, marks.usage(info.uid))
    return side_counts(used, price)


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
    for number, turn, cost in reversed(found.rows):
        words = [f"{turn.input_tokens:,} input tokens", f"{turn.output_tokens:,} output tokens"]
        words += [] if cost is None else [dollars(cost)]
        made.append(
            {
                "number": number,
                "input_tokens": turn.input_tokens,
                "output_tokens": turn.output_tokens,
                "cost": cost,
                "label": f"{' · '.join(words)} — {covered(turn.prompt) or '(no text)'}",
                "address": f"/s/{segment(found.info.key)}?at={turn.seq}{extra}#m{turn.seq}",
            }
        )
    return made
