"""The notes: what is remembered of whom, where it came from, and how to change or forget it."""

from typing import Annotated, Final, Literal

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from stenolog.errors import NothingToUndo, UsageError
from stenolog.gateway.requests import body_of, query_of
from stenolog.gateway.shapes import Nothing, OfAgent, answered
from stenolog.gateway.state import gateway_of
from stenolog.gateway.viewer.serving import agent_of, page
from stenolog.memory.memory import Memory
from stenolog.memory.notes import Draft, Note
from stenolog.memory.redaction import redact
from stenolog.memory.scopes import Scope

_MOST: Final = 500
_SCOPES: Final = 200


class NotesQuery(OfAgent, frozen=True, kw_only=True):
    """Whose notes are shown."""

    who: Annotated[str, Meta(max_length=2_000)] = ""
    q: Annotated[str, Meta(max_length=1_000)] = ""
    full: bool = False
    """Superseded and forgotten ones, too."""


class NoteAct(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is to become of a note."""

    act: Literal["edit", "forget", "undo"]
    who: Annotated[str, Meta(min_length=1, max_length=2_000)]
    id: str = ""
    text: Annotated[str, Meta(max_length=10_000)] = ""


class Notebook(Struct, frozen=True, kw_only=True):
    """What the page shows."""

    scopes: list[str]
    who: str
    notes: list[Note]
    count: int


async def notes(request: Request) -> Response:
    """The page of the notes."""
    gateway = gateway_of(request)
    query = query_of(request, NotesQuery)
    agent = agent_of(gateway, query.agent)
    found = None
    if agent.memory is not None:
        found = await gateway.loop.run(_read, agent.memory, query)
    return page("notes.html", found=found, query=query, agent=query.agent)


async def change_notes(request: Request) -> Response:
    """Change a note, forget one, or take the last forgetting back."""
    gateway = gateway_of(request)
    query = query_of(request, OfAgent)
    agent = agent_of(gateway, query.agent)
    wanted = await body_of(request, NoteAct)
    if agent.memory is None:
        raise UsageError("there is no memory in this run")
    await gateway.loop.run(_change, agent.memory, wanted)
    return answered(Nothing())


def _read(memory: Memory, query: NotesQuery) -> Notebook:
    scopes = [one.who for one in memory.notes.scopes(agent=memory.agent)][:_SCOPES]
    who = query.who or (scopes[0] if scopes else "")
    found: list[Note] = []
    if who:
        scope = Scope(agent=memory.agent, who=who)
        if query.q:
            found = memory.notes.search(query.q, scope=scope)
        else:
            found = memory.notes.list(scope, full=query.full)[::-1]
    return Notebook(scopes=scopes, who=who, notes=found[:_MOST], count=len(found))


def _change(memory: Memory, wanted: NoteAct) -> None:
    scope = Scope(agent=memory.agent, who=wanted.who)
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
            # The note before stays in the log, and says what took its place.
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
