"""A session by its turns: what was asked, and what each answer took."""

from collections.abc import Sequence
from datetime import datetime
from typing import Final

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from stenolog.agent.instance import AgentInstance
from stenolog.catalog.answers import seconds_of, usage_of
from stenolog.catalog.entries import Entry
from stenolog.catalog.texts import tags_from
from stenolog.context.shapes import calls_of, speaks
from stenolog.gateway.requests import key_of, query_of
from stenolog.gateway.shapes import OfAgent
from stenolog.gateway.state import gateway_of
from stenolog.gateway.viewer.conversation import entry_of, title_of
from stenolog.gateway.viewer.messages import prompt_line
from stenolog.gateway.viewer.serving import agent_of, page, store_of
from stenolog.records import Message, SessionInfo

MOST: Final = 200
"""So many of the last turns are drawn and listed."""
_READ: Final = 4_000
"""So many messages are read for them."""
HEIGHT: Final = 120.0
WIDTH: Final = 1_000.0


class Turn(Struct, kw_only=True):
    """A prompt and all that came of it."""

    seq: int
    at: datetime
    prompt: str
    hidden: bool
    messages: int = 0
    calls: int = 0
    sent: int = 0
    """Tokens that were sent to the model, in all requests of the turn."""
    answered: int = 0
    seconds: float = 0.0
    counted: bool = False
    """Whether any provider told what it counted."""


class Bar(Struct, frozen=True, kw_only=True):
    """A turn in the drawing."""

    turn: Turn
    x: float
    width: float
    sent: float
    """How high it stands."""
    answered: float


class ByTurns(Struct, frozen=True, kw_only=True):
    """What the page shows."""

    info: SessionInfo
    title: str
    tags: tuple[str, ...]
    entry: Entry | None
    turns: Sequence[Turn]
    bars: Sequence[Bar]
    whole: bool
    """Whether these are all turns."""

    @property
    def sent(self) -> int:
        """Tokens that were sent, in all of them."""
        return sum(one.sent for one in self.turns)

    @property
    def answered(self) -> int:
        """Tokens of the answers."""
        return sum(one.answered for one in self.turns)

    @property
    def highest(self) -> int:
        """The most tokens of one turn."""
        return max((one.sent + one.answered for one in self.turns), default=0)


async def turns(request: Request) -> Response:
    """The page of the turns."""
    gateway = gateway_of(request)
    query = query_of(request, OfAgent)
    agent = agent_of(gateway, query.agent)
    found = await gateway.loop.run(_by_turns, agent, key_of(request))
    return page("turns.html", found=found, agent=query.agent)


def _by_turns(agent: AgentInstance, key: str) -> ByTurns:
    store = store_of(agent)
    own = agent.own_key(key)
    info = store.info(own)
    entry = entry_of(agent, own)
    history = store.get_history(own, last=_READ, full=True)
    made = turns_of(history)
    shown = made[-MOST:]
    return ByTurns(
        info=info,
        title=title_of(entry, info),
        tags=tags_from(info.meta),
        entry=entry,
        turns=shown,
        bars=bars(shown),
        whole=len(shown) == len(made) and len(history) == info.count,
    )


def turns_of(history: Sequence[Message]) -> list[Turn]:
    """The turns in these messages; what stands before the first prompt is a part of none."""
    made: list[Turn] = []
    for message in history:
        body = message.to_dict()
        if speaks(body):
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
            turn.counted = True
            turn.sent += usage.get("prompt", 0)
            turn.answered += usage.get("answer", 0)
    return made


def bars(turns: Sequence[Turn]) -> list[Bar]:
    """The turns as bars, the highest as high as the drawing; none where nothing was counted."""
    highest = max((one.sent + one.answered for one in turns), default=0)
    if not highest:
        return []
    step = WIDTH / max(len(turns), 12)
    return [
        Bar(
            turn=one,
            x=number * step + step * 0.1,
            width=step * 0.8,
            sent=one.sent / highest * HEIGHT,
            answered=one.answered / highest * HEIGHT,
        )
        for number, one in enumerate(turns)
    ]
