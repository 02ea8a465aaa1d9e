"""Context inspector: page that shows the next request to the model and its size in tokens."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from markupsafe import Markup
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from stenolog.agent.instance import AgentInstance
from stenolog.catalog.entries import Entry
from stenolog.catalog.searchable_text import tags_from
from stenolog.errors import ContextTooSmall
from stenolog.gateway.api_types import AgentQuery
from stenolog.gateway.requests import parse_query
from stenolog.gateway.viewer.markdown_html import MAX_COLOURED_ON_PAGE
from stenolog.gateway.viewer.message_views import one_line, pretty
from stenolog.gateway.viewer.pages import entry_of, page, title_of
from stenolog.messages import Body, has_text, role_of, text_parts_of
from stenolog.records import Message, SessionInfo
from stenolog.tokens import Tokens
from stenolog.transfer.export.code_blocks import ColourBudget

_SYSTEM_ROLES: Final = ("system", "developer")
WIDTH: Final = 1_000.0
"""Width of the bar, in the units of its SVG drawing."""


class BarSegment(Struct, frozen=True, kw_only=True):
    """One segment of the bar that shows how the model's context is used."""

    name: str
    kind: str
    tokens: int
    x: float
    width: float


class RequestMessage(Struct, frozen=True, kw_only=True):
    """One message of the request to the model."""

    role: str
    line: str
    tokens: int
    exact: Markup


class InspectorPage(Struct, frozen=True, kw_only=True):
    """The data of the inspector page: the next request to the model, and its parts in tokens."""

    info: SessionInfo
    title: str
    tags: tuple[str, ...]
    entry: Entry | None
    model: str
    room: int
    """Maximum number of tokens of the request."""
    total: int
    """Maximum number of tokens of request and answer together."""
    tokens: int = 0
    left_out: int = 0
    elided: int = 0
    turn_left_out: tuple[int, int] | None = None
    """First seq and tokens of the newest turn that is left out as a whole."""
    own_system: str = ""
    """`sent` or `left out` if the session has a system message of its own, otherwise empty."""
    sent: Sequence[BarSegment] = ()
    """Segments of the request alone."""
    shares: Sequence[BarSegment] = ()
    """Segments of the whole context: request, free tokens, and tokens reserved for the answer."""
    messages: Sequence[RequestMessage] = ()
    tools: Markup | None = None
    tools_tokens: int = 0
    recalled: Sequence[str] = ()
    problem: str = ""


async def context(request: Request) -> Response:
    """Serve the inspector page."""
    call = parse_query(request, AgentQuery)
    entry = await entry_of(call)
    found = await call.gateway.loop.run(inspect, call.agent, call.key, entry)
    return page("context.html", found=found, agent=call.query.agent)


def inspect(agent: AgentInstance, key: str, entry: Entry | None = None) -> InspectorPage:
    """Return the request that the session's model would receive now. Raises NoSuchSession."""
    own = agent.resolve_key(key)
    info = agent.store.info(own)
    model = agent.model_of(own)
    context = agent.context(model)
    tokens = context.tokens
    limits = context.limits
    plain: dict[str, Any] = {
        "info": info,
        "title": title_of(entry, info),
        "tags": tags_from(info.meta),
        "entry": entry,
        "model": model.name,
        "room": limits.room,
        "total": limits.max_context_tokens,
    }
    history = agent.sessions.get_history(own)
    bodies = [message.to_dict() for message in history]
    said = next((text_parts_of(body) for body in reversed(bodies) if has_text(body)), "")
    recalled = agent.recall(said, own, sender=None)
    try:
        window = context.window(own, memory=recalled.block)
    except ContextTooSmall as error:
        return InspectorPage(**plain, problem=str(error))
    counts = [tokens.message(body) for body in window.messages]
    has_head = bool(window.messages) and role_of(window.messages[0]) == "system"
    head = counts[0] if has_head else 0
    parts = divide_system_tokens(
        head,
        memory=0 if window.memory_left_out else tokens.text(recalled.block),
        system=tokens.text(agent.spec.system),
        summary=bool(agent.sessions.get_summary(own)),
    )
    parts["tools"] = window.tokens - sum(counts)
    parts["history"] = sum(counts) - head
    sent = bar_segments(parts)
    parts["free"] = limits.room - window.tokens
    parts["reserve"] = limits.answer
    budget = ColourBudget(MAX_COLOURED_ON_PAGE)
    return InspectorPage(
        **plain,
        tokens=window.tokens,
        left_out=window.left_out,
        elided=window.elided,
        turn_left_out=_turn_left_out(history, bodies, window.left_out, tokens)
        if window.left_out and not window.elided
        else None,
        own_system=_own_system(bodies, window.messages),
        sent=sent,
        shares=bar_segments(parts),
        messages=[
            RequestMessage(
                role=role_of(body) or "?",
                line=one_line(text_parts_of(body)),
                tokens=count,
                exact=_exact(body, budget),
            )
            for body, count in zip(window.messages, counts, strict=True)
        ],
        tools=pretty(agent.tool_definitions, budget) if agent.tool_definitions else None,
        tools_tokens=parts["tools"],
        recalled=[one.text for one in recalled.found],
    )


def _turn_left_out(
    history: Sequence[Message], bodies: Sequence[Body], left_out: int, tokens: Tokens
) -> tuple[int, int]:
    """Return first seq and tokens of the newest turn that is left out."""
    last = min(left_out, len(bodies)) - 1
    first = next((at for at in range(last, -1, -1) if has_text(bodies[at])), 0)
    return history[first].seq, sum(tokens.message(body) for body in bodies[first : last + 1])


def _own_system(bodies: Sequence[Body], sent: Sequence[Body]) -> str:
    """Return what happens to a system message of the session: sent, left out, or none."""
    own = {text_parts_of(body) for body in bodies if role_of(body) in _SYSTEM_ROLES}
    if not own:
        return ""
    return "sent" if own.intersection(text_parts_of(body) for body in sent) else "left out"


def divide_system_tokens(head: int, *, system: int, memory: int, summary: bool) -> dict[str, int]:
    """Divide the tokens of the system message by source; the parts add up to `head`.

    Joined texts take more or fewer tokens than separate ones, and a long summary is cut. Therefore
    the remainder counts as summary, or as system prompt if the session has no summary.
    """
    memory = min(memory, head)
    own = min(system, head - memory) if summary else head - memory
    return {"system": own, "tools": 0, "memory": memory, "summary": head - memory - own}


def _exact(body: Mapping[str, Any], budget: ColourBudget) -> Markup:
    """Return the content of a message with only role and text, and any other message as JSON."""
    if set(body) == {"role", "content"} and isinstance(body["content"], str):
        return Markup("{}").format(body["content"])
    return pretty(body, budget)


_NAMES: Final = {
    "system": "system prompt",
    "tools": "tools",
    "memory": "memory",
    "summary": "summary",
    "history": "messages",
    "free": "free",
    "reserve": "reserved for the answer",
}


def bar_segments(parts: dict[str, int]) -> list[BarSegment]:
    """Return the segments of the bar, side by side; together they have the width WIDTH."""
    whole = sum(parts.values()) or 1
    made: list[BarSegment] = []
    x = 0.0
    for kind, tokens in parts.items():
        width = tokens / whole * WIDTH
        made.append(BarSegment(name=_NAMES[kind], kind=kind, tokens=tokens, x=x, width=width))
        x += width
    return made
