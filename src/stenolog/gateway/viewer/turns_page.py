"""Page with the turns of a session: prompt, tokens, duration and cost of each turn."""

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, Final

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from stenolog.agent.instance import AgentInstance
from stenolog.catalog.entries import Entry
from stenolog.catalog.message_metadata import model_of, seconds_of, usage_of
from stenolog.catalog.searchable_text import tags_from
from stenolog.context.message_parts import calls_of, has_text
from stenolog.gateway.api_types import OfAgent
from stenolog.gateway.requests import key_of, query_of
from stenolog.gateway.shared_state import gateway_of
from stenolog.gateway.viewer.formatting import dollars, segment
from stenolog.gateway.viewer.message_views import prompt_line
from stenolog.gateway.viewer.pages import agent_of, entry_of, page, title_of
from stenolog.records import Message, SessionInfo
from stenolog.sessions.usage import INSTALL_COMMAND, Counts, Price, cost_of, prices

MOST: Final = 200
"""Maximum number of turns that are drawn and listed, counted from the end."""
_READ: Final = 4_000
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
    def sent(self) -> int:
        """Return the number of tokens sent to the model in all requests of the turn."""
        return sum(one.prompt for one in self.models.values())

    @property
    def answered(self) -> int:
        """Return the number of tokens of the answers."""
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


class ByTurns(Struct, frozen=True, kw_only=True):
    """The data of the turns page."""

    info: SessionInfo
    title: str
    tags: tuple[str, ...]
    entry: Entry | None
    turns: Sequence[Turn]
    costs: Costs | None
    """None if no price list is installed."""
    whole: bool
    """Whether these are all turns of the session."""

    @property
    def sent(self) -> int:
        """Return the number of tokens sent in all these turns."""
        return sum(one.sent for one in self.turns)

    @property
    def answered(self) -> int:
        """Return the number of tokens of all answers."""
        return sum(one.answered for one in self.turns)

    @property
    def counted(self) -> bool:
        """Whether there are token counts to draw."""
        return any(one.sent or one.answered for one in self.turns)

    @property
    def rows(self) -> list[tuple[Turn, float | None]]:
        """Return the turns with their costs, newest first."""
        costs = [None] * len(self.turns) if self.costs is None else self.costs.turns
        return list(zip(self.turns, costs, strict=True))[::-1]


async def turns(request: Request) -> Response:
    """Serve the page of the turns."""
    gateway = gateway_of(request)
    query = query_of(request, OfAgent)
    agent = agent_of(gateway, query.agent)
    key = key_of(request)
    entry = await entry_of(gateway, agent, key)
    found = await gateway.loop.run(_by_turns, agent, key, entry)
    return page(
        "turns.html",
        found=found,
        agent=query.agent,
        drawn=drawn(found, query.agent) if found.counted else [],
        how_to_get=INSTALL_COMMAND,
    )


def _by_turns(agent: AgentInstance, key: str, entry: Entry | None) -> ByTurns:
    store = agent.store
    own = agent.own_key(key)
    info = store.info(own)
    history = store.get_history(own, last=_READ, full=True)
    price = prices()
    made = turns_of(history, price)
    shown = made[-MOST:]
    return ByTurns(
        info=info,
        title=title_of(entry, info),
        tags=tags_from(info.meta),
        entry=entry,
        turns=shown,
        costs=None if price is None else costs_of(shown),
        whole=len(shown) == len(made) and len(history) == info.count,
    )


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


def drawn(found: ByTurns, agent: str) -> list[dict[str, Any]]:
    """Return the data of the chart, oldest turn first: numbers, label and address of each turn."""
    extra = "" if agent == "main" else f"&agent={segment(agent)}"
    made = []
    for turn, cost in reversed(found.rows):
        words = [f"{turn.sent:,} sent", f"{turn.answered:,} answered"]
        words += [] if cost is None else [dollars(cost)]
        made.append(
            {
                "sent": turn.sent,
                "answered": turn.answered,
                "cost": cost,
                "words": f"{', '.join(words)} — {turn.prompt or '(no words)'}",
                "address": f"/s/{segment(found.info.key)}?at={turn.seq}{extra}#m{turn.seq}",
            }
        )
    return made
