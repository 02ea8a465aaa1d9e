"""Routes of the viewer, and its small pages: notes, export and Markdown."""

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

from stenolog.errors import NothingToUndo, UsageError
from stenolog.gateway.api_types import Nothing, OfAgent, answered
from stenolog.gateway.requests import body_of, key_of, query_of
from stenolog.gateway.shared_state import gateway_of
from stenolog.gateway.viewer.conversation_page import conversation, fragment
from stenolog.gateway.viewer.inspector_page import context
from stenolog.gateway.viewer.list_page import home
from stenolog.gateway.viewer.markdown_html import LONGEST, to_html
from stenolog.gateway.viewer.pages import agent_of, compile_templates, page, static, told_as_page
from stenolog.gateway.viewer.turns_page import turns
from stenolog.memory.facade import Memory
from stenolog.memory.notes import Draft, Note
from stenolog.memory.scopes import parse_scope_name
from stenolog.records import Message, SessionInfo
from stenolog.redaction.redact import SharingRedactor, redact
from stenolog.transfer.export.formats import DOCUMENT_FORMATS, ExportFormat, export_pieces

# --- notebook -------------------------------------------------------------------------------------
# Page of the notes: who they are about, their sources, and actions to edit or forget them.


_MOST: Final = 500
_SCOPES: Final = 200


class NotesQuery(OfAgent, frozen=True, kw_only=True):
    """Query of the notes page."""

    who: Annotated[str, Meta(max_length=2_000)] = ""
    q: Annotated[str, Meta(max_length=1_000)] = ""
    full: bool = False
    """Include superseded and forgotten notes."""


class NoteAct(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Change of a note."""

    act: Literal["edit", "forget", "undo"]
    who: Annotated[str, Meta(min_length=1, max_length=2_000)]
    id: str = ""
    text: Annotated[str, Meta(max_length=10_000)] = ""


class Notebook(Struct, frozen=True, kw_only=True):
    """The data of the notes page."""

    scopes: list[str]
    who: str
    notes: list[Note]
    count: int


async def notes(request: Request) -> Response:
    """Serve the notes page."""
    gateway = gateway_of(request)
    query = query_of(request, NotesQuery)
    agent = agent_of(gateway, query.agent)
    found = None
    if agent.memory is not None:
        found = await gateway.loop.run(_read, agent.memory, query)
    return page("notes.html", found=found, query=query, agent=query.agent)


async def change_notes(request: Request) -> Response:
    """Edit a note, forget one, or undo the last forgetting."""
    gateway = gateway_of(request)
    query = query_of(request, OfAgent)
    agent = agent_of(gateway, query.agent)
    wanted = await body_of(request, NoteAct)
    if agent.memory is None:
        raise UsageError("there is no memory in this run")
    await gateway.loop.run(_change, agent.memory, wanted)
    return answered(Nothing())


def _read(memory: Memory, query: NotesQuery) -> Notebook:
    scopes = [one.name for one in memory.notes.scopes(agent=memory.agent)][:_SCOPES]
    who = query.who or (scopes[0] if scopes else "")
    found: list[Note] = []
    if who:
        scope = parse_scope_name(who, agent=memory.agent)
        if query.q:
            found = memory.notes.search(query.q, scope=scope)
        else:
            found = memory.notes.list(scope, full=query.full)[::-1]
    return Notebook(scopes=scopes, who=who, notes=found[:_MOST], count=len(found))


def _change(memory: Memory, wanted: NoteAct) -> None:
    scope = parse_scope_name(wanted.who, agent=memory.agent)
    match wanted.act:
        case "forget":
            memory.notes.forget(scope, wanted.id)
        case "undo":
            try:
                memory.notes.undo(scope)
            except NothingToUndo:
                raise UsageError("no note was forgotten that could come back") from None
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


FORMS: Final[dict[str, tuple[ExportFormat, str]]] = {
    "jsonl": ("jsonl", "application/x-ndjson"),
    "md": ("markdown", "text/markdown"),
    "html": ("html", "text/html"),
}
"""Format and media type of an export by the suffix of its file name."""


_CHUNK: Final = 256 * 1024
"""Size in bytes of a chunk of an export; each chunk is one call in a thread."""


class ExportQuery(OfAgent, frozen=True, kw_only=True):
    """Query of an export."""

    full: bool = False
    """Include hidden messages."""


async def export(request: Request) -> Response:
    """Return the messages as a file. Secrets are redacted in all formats but jsonl."""
    gateway = gateway_of(request)
    query = query_of(request, ExportQuery)
    agent = agent_of(gateway, query.agent)
    key = key_of(request)
    suffix = request.path_params["form"]
    if suffix not in FORMS:
        raise HTTPException(404)
    form, kind = FORMS[suffix]

    def read() -> tuple[SessionInfo, Sequence[Message]]:
        store = agent.store
        own = agent.own_key(key)
        return store.info(own), store.get_history(own, full=query.full)

    info, history = await gateway.loop.run(read)
    name = "".join(char if char.isascii() and char.isalnum() else "-" for char in key)[:80]
    return StreamingResponse(  # guard: viewer-export-redacted
        _gathered(
            export_pieces(form, info, history, SharingRedactor(enabled=form in DOCUMENT_FORMATS))
        ),
        media_type=kind,
        headers={"Content-Disposition": f'attachment; filename="{name}.{suffix}"'},
    )


def _gathered(parts: Iterable[bytes]) -> Iterator[bytes]:
    chunk = bytearray()
    for part in parts:
        chunk += part
        if len(chunk) >= _CHUNK:
            yield bytes(chunk)
            chunk.clear()
    yield bytes(chunk)


# --- warming --------------------------------------------------------------------------------------
# Preparation for the first page: compile templates, load lexers.
#
# Compiling the templates takes longer than reading and rendering a session of any length. Loading
# the lexers takes as long again, so it happens later, when no request waits.


_LATER: Final = 5.0
"""Seconds before the lexers are loaded, so that the first request has the processor."""
_LANGUAGES: Final = ("python", "json", "bash", "javascript", "html", "sql", "yaml", "diff")

_logger = logging.getLogger("stenolog")


@cache
def warm() -> None:
    """Compile the templates now and load the lexers later in a thread, once per process."""
    compile_templates()
    later = Timer(_LATER, _learn)
    later.name, later.daemon = "viewer-languages", True
    later.start()


def _learn() -> None:
    try:
        for language in _LANGUAGES:
            to_html(f"```{language}\nx\n```")
    except Exception:
        # A page that shows such code reports the error.
        _logger.exception("the viewer could not be prepared")


# --- rendering ------------------------------------------------------------------------------------
# Rendering of text that is not stored, such as the answers of commands, for an open page.


class Words(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Markdown to render."""

    text: Annotated[str, Meta(max_length=2 * LONGEST)]


async def rendered(request: Request) -> Response:
    """Return Markdown as safe HTML. Pages render the answers of commands with it."""
    wanted = await body_of(request, Words)
    return page("words.html", text=wanted.text)


# --- routes ---------------------------------------------------------------------------------------


def viewer_routes() -> list[BaseRoute]:
    """Return the routes. They only read sessions; changes go through /v1/."""
    warm()
    pages = {
        "/": home,
        "/notes": notes,
        "/s/{key}": conversation,
        "/s/{key}/fragment": fragment,
        "/s/{key}/turns": turns,
        "/s/{key}/context": context,
        "/s/{key}/export.{form}": export,
    }
    return [
        Route("/static/{name}", static),
        Route("/notes", change_notes, methods=["POST"]),
        Route("/rendered", rendered, methods=["POST"]),
        *(Route(path, told_as_page(answer), name=path) for path, answer in pages.items()),
    ]
