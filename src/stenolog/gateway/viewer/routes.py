"""Routes of the viewer, and its small pages: notes, export and Markdown."""

import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from threading import Timer
from typing import Annotated, Final, Literal

from msgspec import Meta, Struct
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from stenolog.agent.instance import AgentInstance
from stenolog.errors import NoSuchSession, NothingToUndo, UsageError
from stenolog.gateway.api_types import MAX_SEQ, AgentQuery, EmptyBody, json_response
from stenolog.gateway.requests import body_of, parse_query
from stenolog.gateway.viewer.conversation_navigation import find, outline
from stenolog.gateway.viewer.conversation_page import conversation, fragment, message_at
from stenolog.gateway.viewer.export_page import export_pieces
from stenolog.gateway.viewer.inspector_page import context
from stenolog.gateway.viewer.list_page import home, trash
from stenolog.gateway.viewer.markdown_html import MAX_RENDERED, to_html
from stenolog.gateway.viewer.message_views import one_line
from stenolog.gateway.viewer.pages import (
    compile_templates,
    page,
    static,
    with_error_pages,
)
from stenolog.gateway.viewer.turns_page import turns
from stenolog.memory.facade import Memory
from stenolog.memory.notes import Draft, Note
from stenolog.memory.scopes import Scope, parse_scope_name
from stenolog.records import Message, SessionInfo
from stenolog.redaction.redact import SharingRedactor, redact
from stenolog.transfer.export.formats import DOCUMENT_FORMATS, ExportFormat

# --- notebook -------------------------------------------------------------------------------------
# Page of the notes: who they are about, their sources, and actions to edit or forget them.


_MAX_NOTES: Final = 500
_MAX_SCOPES: Final = 200


class NotesQuery(AgentQuery, frozen=True, kw_only=True):
    """Query of the notes page."""

    who: Annotated[str, Meta(max_length=2_000)] = ""
    q: Annotated[str, Meta(max_length=1_000)] = ""
    full: bool = False
    """Include superseded and forgotten notes."""


class NoteChange(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Change of a note."""

    act: Literal["add", "edit", "forget", "undo"]
    who: Annotated[str, Meta(min_length=1, max_length=2_000)]
    id: str = ""
    text: Annotated[str, Meta(max_length=10_000)] = ""


class NotesPage(Struct, frozen=True, kw_only=True):
    """The data of the notes page."""

    scopes: dict[str, str]
    """Label of each scope by its name."""
    who: str
    notes: list[Note]
    count: int
    can_undo: bool
    """Whether a deleted note can be restored."""


async def notes(request: Request) -> Response:
    """Serve the notes page."""
    call = parse_query(request, NotesQuery)
    found = None
    if call.agent.memory is not None:
        found = await call.gateway.loop.run(_load_notes, call.agent, call.agent.memory, call.query)
    return page("notes.html", found=found, query=call.query, agent=call.query.agent)


async def change_notes(request: Request) -> Response:
    """Add a note, edit or forget one, or undo the last forgetting."""
    call = parse_query(request, AgentQuery)
    wanted = await body_of(request, NoteChange)
    if call.agent.memory is None:
        raise UsageError("memory is off, so there are no notes to change")
    await call.gateway.loop.run(_change_note, call.agent.memory, wanted)
    return json_response(EmptyBody())


def _load_notes(agent: AgentInstance, memory: Memory, query: NotesQuery) -> NotesPage:
    scopes = memory.notes.scopes(agent=memory.agent)[:_MAX_SCOPES]
    who = query.who or (scopes[0].name if scopes else "")
    found: list[Note] = []
    can_undo = False
    if who:
        scope = parse_scope_name(who, agent=memory.agent)
        if query.q:
            found = memory.notes.search(query.q, scope=scope)
        else:
            found = memory.notes.list(scope, full=query.full)[::-1]
        try:
            can_undo = memory.notes.store.info(scope.key).undoable > 0
        except NoSuchSession:
            can_undo = False  # no note yet
    return NotesPage(
        scopes={one.name: _scope_label(agent, one) for one in scopes},
        who=who,
        notes=found[:_MAX_NOTES],
        count=len(found),
        can_undo=can_undo,
    )


def _scope_label(agent: AgentInstance, scope: Scope) -> str:
    """Return a name for people: a sender as `ada (telegram)`, a session by its title."""
    channel, _, name = scope.who.partition(":")
    if scope.of == "sender" and name:
        return f"{name} ({channel})"
    entry = agent.catalog.entry(scope.who)
    return one_line(entry.title if entry is not None and entry.title else scope.name)


def _change_note(memory: Memory, wanted: NoteChange) -> None:
    scope = parse_scope_name(wanted.who, agent=memory.agent)
    match wanted.act:
        case "add":
            memory.remember(wanted.text.strip(), scope=scope)
        case "forget":
            memory.notes.forget(scope, wanted.id)
        case "undo":
            try:
                memory.notes.undo(scope)
            except NothingToUndo:
                raise UsageError("no deleted note can be restored") from None
        case "edit":
            before = memory.notes.get(scope, wanted.id)
            # The old note stays in the log, marked as superseded.
            draft = Draft(
                kind=before.kind,
                text=redact(wanted.text).text.strip(),
                about=before.about,
                quote=before.quote,
                session=before.session,
                uid=before.uid,
                seqs=before.seqs,
                supersedes=(before.id,),
            )
            memory.notes.add(scope, [draft])


# --- exporting ------------------------------------------------------------------------------------
# Download of a session: as stored, or as a document to share.


EXPORT_FORMATS: Final[dict[str, tuple[ExportFormat, str]]] = {
    "jsonl": ("jsonl", "application/x-ndjson"),
    "md": ("markdown", "text/markdown"),
    "html": ("html", "text/html"),
}
"""Format and media type of an export by the suffix of its file name."""


_CHUNK: Final = 256 * 1024
"""Size in bytes of a chunk of an export; each chunk is one call in a thread."""


class ExportQuery(AgentQuery, frozen=True, kw_only=True):
    """Query of an export."""

    full: bool = False
    """Include hidden messages."""


async def export(request: Request) -> Response:
    """Return the messages as a file. Secrets are redacted in all formats but jsonl."""
    call = parse_query(request, ExportQuery)
    suffix = request.path_params["form"]
    if suffix not in EXPORT_FORMATS:
        raise HTTPException(404)
    form, kind = EXPORT_FORMATS[suffix]

    def read() -> tuple[SessionInfo, Sequence[Message]]:
        store = call.agent.store
        own = call.agent.resolve_key(call.key)
        return store.info(own), store.get_history(own, full=call.query.full)

    info, history = await call.gateway.loop.run(read)
    name = "".join(char if char.isascii() and char.isalnum() else "-" for char in call.key)[:80]
    return StreamingResponse(  # guard: viewer-export-redacted
        _chunks(
            export_pieces(form, info, history, SharingRedactor(enabled=form in DOCUMENT_FORMATS))
        ),
        media_type=kind,
        headers={"Content-Disposition": f'attachment; filename="{name}.{suffix}"'},
    )


def _chunks(parts: Iterable[bytes]) -> Iterator[bytes]:
    chunk = bytearray()
    for part in parts:
        chunk += part
        if len(chunk) >= _CHUNK:
            yield bytes(chunk)
            chunk.clear()
    yield bytes(chunk)


async def message_json(request: Request) -> Response:
    """Return one message as stored, for people who read JSON."""
    call = parse_query(request, AgentQuery)
    seq = request.path_params["seq"]
    message = None
    if 0 < seq <= MAX_SEQ:
        message = await call.gateway.loop.run(message_at, call.agent, call.key, seq)
    if message is None:
        raise HTTPException(404, f"there is no message {seq}")
    stored = {"seq": seq, "at": message.at.isoformat(), "hidden": message.hidden}
    text = json.dumps({**stored, "message": message.to_dict()}, indent=2, ensure_ascii=False)
    # Lone surrogates cannot be encoded as UTF-8; their escape is valid JSON.
    return Response(text.encode(errors="backslashreplace"), media_type="application/json")


# --- warming --------------------------------------------------------------------------------------
# Preparation for the first page: compile templates, load lexers.
#
# Compiling the templates takes longer than reading and rendering a session of any length. Loading
# the lexers takes as long again, so it happens later, when no request waits.


_LEXER_DELAY: Final = 5.0
"""Seconds before the lexers are loaded, so that the first request has the processor."""
_LANGUAGES: Final = ("python", "json", "bash", "javascript", "html", "sql", "yaml", "diff")

_logger = logging.getLogger("stenolog")


@cache
def warm_up() -> None:
    """Compile the templates now and load the lexers later in a thread, once per process."""
    compile_templates()
    later = Timer(_LEXER_DELAY, _load_lexers)
    later.name, later.daemon = "viewer-languages", True
    later.start()


def _load_lexers() -> None:
    try:
        for language in _LANGUAGES:
            to_html(f"```{language}\nx\n```")
    except Exception:
        # A page that shows such code reports the error.
        _logger.exception("loading the viewer's code highlighting failed")


# --- rendering ------------------------------------------------------------------------------------
# Rendering of text that is not stored, such as the answers of commands, for an open page.


class RenderRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Markdown to render."""

    text: Annotated[str, Meta(max_length=2 * MAX_RENDERED)]


async def render_markdown(request: Request) -> Response:
    """Return Markdown as safe HTML. Pages render the answers of commands with it."""
    wanted = await body_of(request, RenderRequest)
    return page("words.html", text=wanted.text)


# --- routes ---------------------------------------------------------------------------------------


def viewer_routes() -> list[BaseRoute]:
    """Return the routes. They only read sessions; changes go through /v1/."""
    warm_up()
    pages = {
        "/": home,
        "/notes": notes,
        "/trash": trash,
        "/s/{key}": conversation,
        "/s/{key}/fragment": fragment,
        "/s/{key}/outline": outline,
        "/s/{key}/find": find,
        "/s/{key}/turns": turns,
        "/s/{key}/context": context,
        "/s/{key}/messages/{seq:int}.json": message_json,
        "/s/{key}/export.{form}": export,
    }
    return [
        Route("/static/{name}", static),
        Route("/notes", change_notes, methods=["POST"]),
        Route("/rendered", render_markdown, methods=["POST"]),
        *(Route(path, with_error_pages(answer), name=path) for path, answer in pages.items()),
    ]
