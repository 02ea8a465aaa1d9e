"""Routes of the viewer, its notes page, its context page, and exports."""

import logging
from collections.abc import Mapping
from functools import cache
from threading import Timer
from typing import Annotated, Any, Final

from markupsafe import Markup, escape
from msgspec import Meta
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from stenolog.agent.instance import AgentInstance
from stenolog.catalog.entries import Entry
from stenolog.errors import ContextTooSmall, UnsupportedFormat
from stenolog.gateway.requests import AgentQuery, parse_query
from stenolog.gateway.viewer.conversation_page import (
    conversation,
    find_messages,
    fragment,
)
from stenolog.gateway.viewer.export_page import export_pieces
from stenolog.gateway.viewer.hidden_messages import read_shared_messages
from stenolog.gateway.viewer.list_page import home, trash
from stenolog.gateway.viewer.message_views import pretty_json
from stenolog.gateway.viewer.pages import (
    compile_templates,
    entry_of,
    page,
    session_header,
    static,
)
from stenolog.gateway.viewer.safe_html import (
    MAX_COLOURED_ON_PAGE,
    SecretMask,
    masked_html,
    to_html,
)
from stenolog.gateway.viewer.session_outline import outline, turns
from stenolog.memory.facade import Memory
from stenolog.memory.notes import Note
from stenolog.memory.scopes import Scope, parse_scope_name
from stenolog.messages import has_text, role_of, text_parts_of
from stenolog.redaction.patterns import SECRET_PATTERNS
from stenolog.redaction.redact import SharingRedactor
from stenolog.sessions.fork_source import fork_source
from stenolog.transfer.export.code_blocks import ColourBudget
from stenolog.transfer.export.formats import (
    DOCUMENT_FORMATS,
    ExportFormat,
    exports_hidden_messages,
)
from stenolog.transfer.export.tool_views import one_line

# --- notes ----------------------------------------------------------------------------------------
# The notes page shows the notes of each scope and their sources.


_MAX_NOTES: Final = 500
_MAX_SCOPES: Final = 200


class NotesQuery(AgentQuery, frozen=True, kw_only=True):
    """Query of the notes page."""

    who: Annotated[str, Meta(max_length=2_000)] = ""
    q: Annotated[str, Meta(max_length=1_000)] = ""
    full: bool = False
    """Include superseded and forgotten notes."""


async def notes(request: Request) -> Response:
    """Serve the notes page."""
    call = parse_query(request, NotesQuery)
    view = None
    if call.agent.memory is not None:
        view = await call.gateway.loop.run(_load_notes, call.agent, call.agent.memory, call.query)
    return page("notes.html", view=view, query=call.query, agent=call.query.agent)


def _load_notes(agent: AgentInstance, memory: Memory, query: NotesQuery) -> dict[str, Any]:
    scopes = memory.notes.scopes(agent=memory.agent)[:_MAX_SCOPES]
    who = query.who or (scopes[0].name if scopes else "")
    notes: list[Note] = []
    if who:
        scope = parse_scope_name(who, agent=memory.agent)
        if query.q:
            notes = memory.notes.search(query.q, scope=scope)
        else:
            notes = memory.notes.list(scope, full=query.full)[::-1]
    labels = {scope.name: _scope_label(agent, scope) for scope in scopes}
    return {"scopes": labels, "who": who, "notes": notes[:_MAX_NOTES]}


def _scope_label(agent: AgentInstance, scope: Scope) -> str:
    """Return a readable name: `ada (telegram)` for a sender, the title for a session."""
    channel, _, name = scope.who.partition(":")
    if scope.of == "sender" and name:
        return f"{name} ({channel})"
    entry = agent.catalog.entry(scope.who)
    return one_line(entry.title if entry is not None and entry.title else scope.name)


# --- context --------------------------------------------------------------------------------------
# The context page shows the next request to the model and its size in tokens.


BAR_WIDTH: Final = 1_000.0
"""Width of the bar, in the units of its SVG drawing."""


async def context(request: Request) -> Response:
    """Serve the context page."""
    call = parse_query(request, AgentQuery)
    entry = await entry_of(call)
    view = await call.gateway.loop.run(load_context_page, call.agent, call.key, entry)
    return page("context.html", view=view, agent=call.query.agent)


def load_context_page(agent: AgentInstance, key: str, entry: Entry | None = None) -> dict[str, Any]:
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


# --- exporting ------------------------------------------------------------------------------------
# A session can be downloaded as stored, or as a document to share.


EXPORT_FORMATS: Final[dict[str, tuple[ExportFormat, str]]] = {
    "jsonl": ("jsonl", "application/x-ndjson"),
    "md": ("markdown", "text/markdown"),
    "html": ("html", "text/html"),
}
"""Format and media type of an export by the suffix of its file name."""


class ExportQuery(AgentQuery, frozen=True, kw_only=True):
    """Query of an export."""

    full: bool | None = None
    """Whether to include hidden messages.

    By default, HTML includes summarized messages. HTML and Markdown of a session of another program
    include everything that happened.
    """


async def export(request: Request) -> Response:
    """Return the messages as a file. Secrets are redacted in all formats but jsonl."""
    call = parse_query(request, ExportQuery)
    suffix = request.path_params["form"]
    if suffix not in EXPORT_FORMATS:
        raise HTTPException(404)
    export_format, media_type = EXPORT_FORMATS[suffix]

    def make_export() -> bytes:
        store = call.agent.store
        session_key = call.agent.resolve_key(call.key)
        info, full = store.info(session_key), call.query.full
        if full is None and exports_hidden_messages(export_format, info):
            history = read_shared_messages(store, info)
        else:
            history = store.get_history(session_key, full=bool(full))
        redactor = SharingRedactor(enabled=export_format in DOCUMENT_FORMATS)
        return b"".join(export_pieces(export_format, info, history, redactor))

    content = await call.gateway.loop.run(make_export)
    name = "".join(char if char.isascii() and char.isalnum() else "-" for char in call.key)[:80]
    return Response(
        content,
        media_type=media_type,
        headers={"Content-Disposition": f'attachment; filename="{name}.{suffix}"'},
    )


# --- warming --------------------------------------------------------------------------------------
# Before the first page, templates are compiled, and the Markdown parser is loaded.
#
# Compiling the templates takes longer than reading and rendering a session of any length.
# Loading the lexers takes equally long, so they are loaded a little later, in a thread.
# `steno view` first shows a list, which needs few templates and no Markdown.
# So `steno view` prepares templates, Markdown and lexers later.


_WARM_UP_SECONDS: Final = 2.0
"""Seconds to wait before loading the lexers, so that loading does not delay the first request."""
_WARM_LANGUAGES: Final = ("python", "json", "bash", "javascript", "html", "sql", "yaml", "diff")

_logger = logging.getLogger("stenolog")


@cache
def warm_up(*, list_first: bool) -> None:
    """Prepare the first page, once per process. The lexers are loaded later in a thread.

    With `list_first`, everything is prepared later in the thread.
    """
    if not list_first:
        _prepare_pages()
    timer = Timer(_WARM_UP_SECONDS, _prepare_pages_and_lexers)
    timer.name, timer.daemon = "viewer-languages", True
    timer.start()


def _prepare_pages() -> None:
    compile_templates()
    # Load the Markdown parser, and compile the patterns of secrets.
    masked_html('```json\n{"name": "välue"}\n```')
    for secret in SECRET_PATTERNS:
        secret.pattern.search("")


def _prepare_pages_and_lexers() -> None:
    try:
        _prepare_pages()
        for language in _WARM_LANGUAGES:
            to_html(f"```{language}\nx\n```")
    except Exception:
        # Only log the error: a page that needs the same template or lexer reports it.
        _logger.exception("preparing the viewer's pages failed")


# --- routes ---------------------------------------------------------------------------------------


def viewer_routes(*, list_first: bool = False) -> list[BaseRoute]:
    """Return the routes of the viewer. They change nothing; sessions change through /v1/.

    `list_first`: the first page that a user opens is probably the list of sessions, so the other
    pages are prepared later, in a thread.
    """
    warm_up(list_first=list_first)
    pages = {
        "/": home,
        "/notes": notes,
        "/trash": trash,
        "/s/{key}": conversation,
        "/s/{key}/fragment": fragment,
        "/s/{key}/outline": outline,
        "/s/{key}/find": find_messages,
        "/s/{key}/turns": turns,
        "/s/{key}/context": context,
        "/s/{key}/export.{form}": export,
    }
    return [
        Route("/static/{name}", static),
        *(Route(path, handler, name=path) for path, handler in pages.items()),
    ]
