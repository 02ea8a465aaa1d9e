"""Context inspector: page that shows the next request to the model and its size in tokens."""

from collections.abc import Mapping
from typing import Any, Final

from markupsafe import Markup, escape
from starlette.requests import Request
from starlette.responses import Response

from stenolog.agent.instance import AgentInstance
from stenolog.catalog.entries import Entry
from stenolog.errors import ContextTooSmall, UnsupportedFormat
from stenolog.gateway.requests import AgentQuery, parse_query
from stenolog.gateway.viewer.message_views import pretty_json
from stenolog.gateway.viewer.pages import entry_of, page, session_header
from stenolog.gateway.viewer.safe_html import MAX_COLOURED_ON_PAGE, SecretMask
from stenolog.messages import has_text, role_of, text_parts_of
from stenolog.sessions.fork_source import fork_source
from stenolog.transfer.export.code_blocks import ColourBudget

BAR_WIDTH: Final = 1_000.0
"""Width of the bar, in the units of its SVG drawing."""


async def context(request: Request) -> Response:
    """Serve the inspector page."""
    call = parse_query(request, AgentQuery)
    entry = await entry_of(call)
    view = await call.gateway.loop.run(load_inspector_page, call.agent, call.key, entry)
    return page("context.html", view=view, agent=call.query.agent)


def load_inspector_page(
    agent: AgentInstance, key: str, entry: Entry | None = None
) -> dict[str, Any]:
    """Return the values of the template: the request that the session's model would receive now.

    Raises NoSuchSession.
    """
    session_key = agent.resolve_key(key)
    info = agent.store.info(session_key)
    model = agent.model_of(session_key)
    context = agent.context(model)
    tokens = context.tokens
    limits = context.limits
    header = session_header(info, entry, fork_source(info))
    bodies = [message.to_dict() for message in agent.sessions.get_history(session_key)]
    prompt = next((text_parts_of(body) for body in reversed(bodies) if has_text(body)), "")
    recalled = agent.recall(prompt, session_key, sender=None)
    try:
        window = context.window(session_key, memory=recalled.block)
    except (ContextTooSmall, UnsupportedFormat) as error:
        return {**header, "problem": str(error)}
    counts = [tokens.message(body) for body in window.messages]
    has_system = bool(window.messages) and role_of(window.messages[0]) == "system"
    system_tokens = counts[0] if has_system else 0
    part_tokens = divide_system_tokens(
        system_tokens,
        memory=0 if window.memory_left_out else tokens.text(recalled.block),
        system=tokens.text(agent.spec.system),
        has_summary=bool(agent.sessions.get_summary(session_key)),
    )
    part_tokens["tools"] = window.tokens - sum(counts)
    part_tokens["history"] = sum(counts) - system_tokens
    request_bar = bar_segments(part_tokens)
    part_tokens["free"] = limits.room - window.tokens
    part_tokens["reserve"] = limits.answer
    budget = ColourBudget(MAX_COLOURED_ON_PAGE)
    mask = SecretMask()
    return {
        **header,
        "problem": "",
        "model": model.name,
        "max_tokens": limits.room,
        "context_tokens": limits.max_context_tokens,
        "tokens": window.tokens,
        "left_out": window.left_out,
        "elided": window.elided,
        "request_bar": request_bar,
        "context_bar": bar_segments(part_tokens),
        "messages": [
            {
                "role": role_of(body) or "?",
                "line": mask.preview(text_parts_of(body)),
                "tokens": count,
                "content": _message_html(body, budget, mask),
            }
            for body, count in zip(window.messages, counts, strict=True)
        ],
        "tools": pretty_json(agent.tool_definitions, budget, mask)
        if agent.tool_definitions
        else None,
        "tools_tokens": part_tokens["tools"],
        "recalled": [
            mask.with_buttons(escape(mask.with_placeholders(result.text)))
            for result in recalled.found
        ],
    }


def divide_system_tokens(
    total: int, *, system: int, memory: int, has_summary: bool
) -> dict[str, int]:
    """Divide the tokens of the system message by source. The sum of the result is `total`.

    Joined texts take more or fewer tokens than separate ones, and a long summary is cut. Therefore
    the remainder counts as summary, or as system prompt if the session has no summary.
    """
    memory = min(memory, total)
    system = min(system, total - memory) if has_summary else total - memory
    return {"system": system, "tools": 0, "memory": memory, "summary": total - memory - system}


def _message_html(body: Mapping[str, Any], budget: ColourBudget, mask: SecretMask) -> Markup:
    """Return a message as HTML: its text if it has only role and text, otherwise its JSON."""
    if set(body) == {"role", "content"} and isinstance(body["content"], str):
        return mask.with_buttons(escape(mask.with_placeholders(body["content"])))
    return pretty_json(body, budget, mask)


_SEGMENT_LABELS: Final = {
    "system": "system prompt",
    "tools": "tools",
    "memory": "memory",
    "summary": "summary",
    "history": "messages",
    "free": "free",
    "reserve": "reserved for the answer",
}


def bar_segments(part_tokens: dict[str, int]) -> list[dict[str, Any]]:
    """Return the segments of the bar from left to right, with a total width of BAR_WIDTH."""
    total = sum(part_tokens.values()) or 1
    segments: list[dict[str, Any]] = []
    x = 0.0
    for kind, tokens in part_tokens.items():
        width = tokens / total * BAR_WIDTH
        name = _SEGMENT_LABELS[kind]
        segments.append({"name": name, "kind": kind, "tokens": tokens, "x": x, "width": width})
        x += width
    return segments
