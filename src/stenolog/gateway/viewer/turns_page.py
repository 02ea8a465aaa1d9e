"""Page with the turns of a session: prompt, tokens, duration and cost of each turn."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from stenolog.agent.instance import AgentInstance
from stenolog.catalog.entries import Entry
from stenolog.errors import install_command
from stenolog.gateway.api_types import MAX_SEQ, AgentQuery
from stenolog.gateway.requests import parse_query
from stenolog.gateway.viewer.formatting import dollars, path_segment
from stenolog.gateway.viewer.pages import SessionPage, entry_of, page
from stenolog.gateway.viewer.secret_masks import cover_secrets
from stenolog.gateway.viewer.session_outline import Totals, Turn, read_outline
from stenolog.memory.consolidation import ConsolidationProgress
from stenolog.records import SessionInfo
from stenolog.sessions.side_usage import add_usage, read_field, side_counts
from stenolog.sessions.usage import Counts, Price, cost_of, load_prices

TURNS_PER_PAGE: Final = 200


class TurnsQuery(AgentQuery, frozen=True, kw_only=True):
    """Query of the turns page."""

    page: Annotated[int, Meta(ge=0, le=MAX_SEQ)] = 0
    """Page number from 1, oldest turns first. 0 is the last page."""


class TurnsPage(SessionPage, frozen=True, kw_only=True):
    """The data of the turns page."""

    turns: Sequence[Turn]
    has_prices: bool
    """Whether a price list is installed."""
    first: int
    """Number of the first turn on this page, from 1."""
    count: int
    """Number of turns of the session."""
    totals: Totals
    page_number: int
    """Number of this page, from 1."""
    page_count: int
    side_calls: Mapping[str, Counts] = {}
    """Model calls of the whole session that made notes and summaries, by model."""

    @property
    def side_tokens(self) -> int:
        """Tokens of the calls that made notes and summaries."""
        return sum(counts.prompt + counts.answer for counts in self.side_calls.values())

    @property
    def side_cost(self) -> float:
        """Known cost of the calls that made notes and summaries, in US dollars."""
        return cost_of(self.side_calls).total

    @property
    def has_counts(self) -> bool:
        """Whether any turn on this page has token counts for the chart."""
        return any(turn.input_tokens or turn.output_tokens for turn in self.turns)

    @property
    def has_cost(self) -> bool:
        """Whether any turn on this page has a known cost."""
        return any(turn.cost is not None for turn in self.turns)


async def turns(request: Request) -> Response:
    """Serve the page of the turns."""
    call = parse_query(request, TurnsQuery)
    entry = await entry_of(call)
    view = await call.gateway.loop.run(_load_turns, call.agent, call.key, entry, call.query.page)
    return page(
        "turns.html",
        view=view,
        agent=call.query.agent,
        drawn=chart_data(view, call.query.agent) if view.has_counts else [],
        how_to_get=install_command("prices"),
    )


def _load_turns(agent: AgentInstance, key: str, entry: Entry | None, page_number: int) -> TurnsPage:
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
    return TurnsPage(
        info=info,
        entry=entry,
        turns=outline.turns_between(start, end, info),
        has_prices=price is not None,
        first=start + 1,
        count=count,
        totals=outline.totals(),
        page_number=page_number,
        page_count=page_count,
        side_calls=_side_calls(agent, info, price),
    )


def _side_calls(agent: AgentInstance, info: SessionInfo, price: Price | None) -> dict[str, Counts]:
    usage = read_field(info.meta, info.uid)
    if agent.memory is not None:
        progress = ConsolidationProgress(agent.memory.notes.store, agent=agent.memory.agent)
        add_usage(usage, progress.usage(info.uid))
    return side_counts(usage, price)


def chart_data(view: TurnsPage, agent: str) -> list[dict[str, Any]]:
    """Return the data of the chart, oldest turn first: numbers, label and address of each turn."""
    and_agent = "" if agent == "main" else f"&agent={path_segment(agent)}"
    bars = []
    for number, turn in enumerate(view.turns, view.first):
        cost = turn.cost
        numbers = [f"{turn.input_tokens:,} input tokens", f"{turn.output_tokens:,} output tokens"]
        numbers += [] if cost is None else [dollars(cost)]
        bars.append(
            {
                "number": number,
                "input_tokens": turn.input_tokens,
                "output_tokens": turn.output_tokens,
                "cost": cost,
                "label": f"{' · '.join(numbers)} — {cover_secrets(turn.prompt) or '(no text)'}",
                "address": f"/s/{path_segment(view.info.key)}?at={turn.seq}{and_agent}#m{turn.seq}",
            }
        )
    return bars
