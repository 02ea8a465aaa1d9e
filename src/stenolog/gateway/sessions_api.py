"""The sessions API: list, search, change, delete and talk to sessions.

A request that changes a session needs the lease of the session, like a chat command. Only changing
titles or tags and restoring a deleted session need no lease. Handlers that are not coroutine
functions run in a thread of the agent loop, because they block.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from itertools import accumulate
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType
from starlette.exceptions import HTTPException

from stenolog.agent.instance import AgentInstance, ModelClosing
from stenolog.agent.turn_events import InboundMessage
from stenolog.catalog.entries import Hits, Page, Sort, State
from stenolog.catalog.indexing import read_state
from stenolog.catalog.searchable_text import tags_from, title_from
from stenolog.codec import MAX_KEY_BYTES, MAX_TOKEN_BYTES, encode_object
from stenolog.context.summarize import SummaryReport
from stenolog.errors import (
    AnswerUnknown,
    ModelUnavailable,
    OnceConflict,
    StenologError,
    StoreClosed,
    StoreUnavailable,
)
from stenolog.gateway.chat_turns import resolve_session
from stenolog.gateway.openapi import Endpoint, endpoint
from stenolog.gateway.requests import MAX_SEQ, AgentQuery, ApiCall, EmptyBody, Seq
from stenolog.gateway.responses import MessageItem, message_item
from stenolog.maintenance.retention_rules import restore_for_user
from stenolog.records import CompactionResult, Message, SessionInfo, TrashedSession, UndoResult
from stenolog.sessions.session_store import undo_last
from stenolog.stores.base import Store

T = TypeVar("T")

MAX_SESSIONS_PER_PAGE: Final = 500
_MAX_MESSAGES_PER_PAGE: Final = 1_000
_MAX_HITS_PER_PAGE: Final = 100
_PAGE_BYTES: Final = 8 * 1024 * 1024
"""Size in bytes after which a page of messages ends."""
_SESSION_PATH: Final = "/v1/sessions/{key}"

# --- queries ----------------------------------------------------------------------------------
# The docstring of a field is its description in the OpenAPI document.


Key = Annotated[str, Meta(min_length=1, max_length=MAX_KEY_BYTES)]
Moment = Annotated[datetime, Meta(tz=True)]
ShortText = Annotated[str, Meta(min_length=1, max_length=200)]


class PageQuery(AgentQuery, frozen=True, kw_only=True):
    """Query parameters of the list of sessions and of the search."""

    after: str | UnsetType = UNSET
    """Start of this page: the value of `after` in the response with the previous page."""
    prefix: str = ""
    """Only sessions whose key starts with this text."""
    tag: str | UnsetType = UNSET
    """Only sessions with this tag."""
    since: Moment | UnsetType = UNSET
    """Earliest time of a hit, or of the last message of a listed session, with a time zone, such as
    `2026-01-31T08:00:00Z`."""
    until: Moment | UnsetType = UNSET
    """Time before which a hit, or the last message of a listed session, was stored. Written as in
    `since`."""


class ListQuery(PageQuery, frozen=True, kw_only=True):
    """Query parameters of the list of sessions."""

    limit: Annotated[int, Meta(ge=1, le=MAX_SESSIONS_PER_PAGE)] = 50
    """Maximum number of sessions."""
    channel: str | UnsetType = UNSET
    """Only sessions of this channel: the part of a key before `:`."""
    state: State | UnsetType = UNSET
    """Only sessions in this state. `interrupted`: the last turn was not fully answered."""
    program: str | UnsetType = UNSET
    """Only sessions imported from this program, for example `claude-code`. An empty value selects
    sessions without a program. `project` and `model` work in the same way."""
    project: str | UnsetType = UNSET
    """Only sessions with this working directory."""
    model: str | UnsetType = UNSET
    """Only sessions whose last answer is of this model."""
    failed: bool | UnsetType = UNSET
    """true: only sessions with a failed tool call. false: only sessions without one."""
    sort: Sort = "changed"
    """changed: last change first. newest, oldest: by the last message. cost, tokens, length:
    highest first."""


class MessagesQuery(AgentQuery, frozen=True, kw_only=True):
    """Query parameters of the messages of a session."""

    last: Annotated[int, Meta(ge=1, le=MAX_SEQ)] | UnsetType = UNSET
    """Only the newest messages, at most this many."""
    after: Seq = 0
    """Only messages with a seq greater than this."""
    full: bool = False
    """Include hidden, replaced and archived messages."""
    limit: Annotated[int, Meta(ge=1, le=_MAX_MESSAGES_PER_PAGE)] = 100
    """Maximum number of messages."""


class SearchQuery(PageQuery, frozen=True, kw_only=True):
    """Query parameters of a search."""

    q: str
    """Words that a message must contain. `"in quotes"`: a phrase; `-word`: no message with
    `word`; `wor*`: words that start with `wor`."""
    role: str | UnsetType = UNSET
    """Only messages with this role."""
    limit: Annotated[int, Meta(ge=1, le=_MAX_HITS_PER_PAGE)] = 20
    """Maximum number of hits."""
    newest: bool = False
    """Sort by time, newest first, instead of by relevance."""


def given_parameters(query: AgentQuery) -> dict[str, Any]:
    """Return the query parameters that are set, without the agent."""
    fields = msgspec.structs.asdict(query)
    return {name: value for name, value in fields.items() if name != "agent" and value is not UNSET}


def value_or_none(value: T | UnsetType) -> T | None:
    """Return the value; None if it is unset."""
    return None if isinstance(value, UnsetType) else value


# --- bodies -----------------------------------------------------------------------------------


class SessionPatch(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """New title and tags of a session. Omitted fields stay unchanged."""

    title: Annotated[str, Meta(max_length=1_000)] | UnsetType | None = UNSET
    tags: Annotated[list[ShortText], Meta(max_length=100)] | UnsetType = UNSET


class RestoreRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The deleted session to restore, and its new key."""

    uid: (
        Annotated[ShortText, Meta(description="Default: the session deleted last.")] | UnsetType
    ) = UNSET
    as_key: Key | UnsetType = UNSET


class MessageRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A message of the user."""

    content: (
        Annotated[str, Meta(min_length=1)] | Annotated[list[dict[str, Any]], Meta(min_length=1)]
    )
    id: Annotated[
        str,
        Meta(
            max_length=MAX_TOKEN_BYTES,
            description="Id of the message. A message with a known id is not stored again.",
        ),
    ] = ""
    new_session: Annotated[
        bool, Meta(description="Start a new session if the session with this key was deleted.")
    ] = False


class ForkRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Key of the copy of a session, and the last message to copy."""

    new_key: Key
    at: Annotated[Seq, Meta(description="Seq of the last message to copy.")] | UnsetType = UNSET


# --- responses --------------------------------------------------------------------------------


class SessionDetails(Struct, frozen=True, kw_only=True):
    """One session."""

    key: str
    uid: str
    """Unique id of the session. A session created again under the same key has another uid."""
    title: str
    """The title that was set, or else the start of the first prompt, as in the list."""
    tags: tuple[str, ...]
    state: State
    summary: str
    """Summary of the hidden messages."""
    forked_from: str | None
    created: datetime
    updated: datetime
    last_seq: int
    floor: int
    visible: int
    count: int
    lost: int
    damaged: int
    archived: int
    undoable: int
    meta: Annotated[Raw, Meta(extra_json_schema={"type": "object"})]
    """All fields of the session's meta, including title and tags."""


class MessagePage(Struct, frozen=True, kw_only=True):
    """A page of messages, sorted by seq."""

    messages: Sequence[MessageItem]
    after: int | None
    """Seq after which the next page starts; None for the last page."""


class MessageResponse(Struct, frozen=True, kw_only=True):
    """The answer to a message."""

    answer: str
    outcome: str
    """Outcome of the turn: answered, interrupted, again, elsewhere or command."""
    seq: int | None
    """Seq of the answer; None if the answer is not stored."""
    saved: bool
    """Whether all messages of the turn are stored."""
    session: str
    """Key for the next message. The commands /new, /fork and /resume change the session."""


class SummaryResponse(Struct, frozen=True, kw_only=True):
    """Result of summarizing a session. The endpoint `undo` can undo the summary."""

    compacted: int
    """Number of summarized messages; 0 if there was nothing to summarize."""
    first: int | None = None
    last: int | None = None
    tokens_before: int | None = None
    tokens_after: int | None = None
    message: str


class TrashResponse(Struct, frozen=True, kw_only=True):
    """Deleted sessions."""

    sessions: Sequence[TrashedSession]
    count: int
    """Number of all deleted sessions."""


class StopResponse(Struct, frozen=True, kw_only=True):
    """Whether an answer was in progress."""

    stopped: bool


# --- endpoints --------------------------------------------------------------------------------


SESSION_ENDPOINTS: Final[list[Endpoint]] = []
_endpoint: Final = partial(endpoint, SESSION_ENDPOINTS)

# --- reading ---------------------------------------------------------------------------------


@_endpoint("GET", "/v1/sessions", "listSessions")
def list_sessions(call: ApiCall[ListQuery, EmptyBody]) -> Page:
    """List sessions, most recently changed first unless `sort` says otherwise."""
    return call.agent.catalog.list(**given_parameters(call.query))


@_endpoint("GET", _SESSION_PATH, "getSession")
def show_session(call: ApiCall[AgentQuery, EmptyBody]) -> SessionDetails:
    """Return one session, without its messages."""
    return _read_details(call.agent, call.key)


@_endpoint("GET", f"{_SESSION_PATH}/messages", "listMessages")
def list_messages(call: ApiCall[MessagesQuery, EmptyBody]) -> MessagePage:
    """List the messages of a session, sorted by seq."""
    store, query = call.agent.store, call.query
    # For an unknown key, `get_history` would return an empty list instead of raising an error.
    history = store.get_history(
        _find_existing_key(call.agent, call.key),
        last=value_or_none(query.last),
        after=query.after,
        full=query.full,
    )
    page = _limit_page(history, query.limit)
    return MessagePage(
        messages=[message_item(message) for message in page],
        after=page[-1].seq if len(page) < len(history) else None,
    )


@_endpoint("GET", "/v1/search", "search")
def search(call: ApiCall[SearchQuery, EmptyBody]) -> Hits:
    """Search messages, including hidden and archived ones."""
    fields = given_parameters(call.query)
    return call.agent.catalog.search(fields.pop("q"), **fields)


def _read_details(agent: AgentInstance, key: str) -> SessionDetails:
    info = agent.store.info(agent.resolve_key(key))
    other_fields = {
        "title": _read_title(agent, info),
        "tags": tags_from(info.meta),
        "state": _read_state(agent.store, info),
        "lost": info.lost,
        "meta": Raw(encode_object(dict(info.meta))),
    }
    return msgspec.convert({**msgspec.structs.asdict(info), **other_fields}, SessionDetails)


def _read_title(agent: AgentInstance, info: SessionInfo) -> str:
    """Return the title in the session's meta, otherwise the title in the catalog, or empty text."""
    title = title_from(info.meta, "")
    if not title:
        with suppress(StenologError):
            entry = agent.catalog.entry(info.key)
            title = "" if entry is None else entry.title
    return title


def _read_state(store: Store, info: SessionInfo) -> State:
    """Return the state of the last turn."""
    return "running" if store.admin.leased([info.key]) else read_state(store, info)[0]


def _limit_page(history: list[Message], limit: int) -> list[Message]:
    """Return up to `limit` messages, ending early with the message that exceeds _PAGE_BYTES."""
    sizes = accumulate(len(message.to_json()) for message in history[:limit])
    count = next((count for count, size in enumerate(sizes, 1) if size > _PAGE_BYTES), limit)
    return history[:count]


# --- talking ---------------------------------------------------------------------------------


@_endpoint("POST", f"{_SESSION_PATH}/messages", "say", error_statuses=(409, 410, 502))
async def send_message(call: ApiCall[AgentQuery, MessageRequest]) -> MessageResponse:
    """Send a message and wait for the answer. Creates the session if there is none.

    The status of a failed turn is 502 or 503.
    """
    key, view = await call.gateway.loop.run(
        resolve_session, call.agent, call.key, new_session=call.body.new_session
    )
    inbound = InboundMessage(key=key, content=call.body.content, id=call.body.id)
    answer = await call.gateway.loop.handle(inbound, agent=call.agent.id, view=view)
    if isinstance(answer.error, OnceConflict | AnswerUnknown):
        raise answer.error
    if answer.outcome == "failed" or answer.error is not None:
        storage_text = "the message is stored" if answer.saved else "the message is not stored"
        if answer.outcome == "command":
            storage_text = "the command failed"
        # The status is 503 if a retry may help, and 502 if the model failed.
        is_temporary = isinstance(answer.error, StoreUnavailable | StoreClosed | ModelUnavailable)
        raise HTTPException(
            503 if is_temporary or not answer.saved else 502,
            f"{answer.text} ({storage_text})",
            headers={"Retry-After": "1"} if isinstance(answer.error, StoreUnavailable) else None,
        )
    return MessageResponse(
        answer=answer.text,
        outcome=answer.outcome,
        seq=answer.seq,
        saved=answer.saved,
        session=answer.key,
    )


@_endpoint("POST", f"{_SESSION_PATH}/stop", "stop", unlimited=True)
async def stop(call: ApiCall[AgentQuery, EmptyBody]) -> StopResponse:
    """Stop the answer that is being written. The text so far is kept."""
    return StopResponse(stopped=await call.gateway.loop.stop(call.key, agent=call.agent.id))


# --- changing --------------------------------------------------------------------------------


@_endpoint("PATCH", _SESSION_PATH, "changeSession")
def change_session(call: ApiCall[AgentQuery, SessionPatch]) -> SessionDetails:
    """Change the title or the tags of a session."""
    key = _find_existing_key(call.agent, call.key)
    fields: dict[str, Any] = {}
    if call.body.title is not UNSET:
        fields["title"] = call.body.title
    if call.body.tags is not UNSET:
        fields["tags"] = list(dict.fromkeys(call.body.tags)) or None
    if fields:
        call.agent.store.set_meta(key, **fields)
    return _read_details(call.agent, key)


@_endpoint("DELETE", _SESSION_PATH, "deleteSession", error_statuses=(409,))
async def delete_session(call: ApiCall[AgentQuery, EmptyBody]) -> TrashedSession:
    """Move a session to the trash, from which it can be restored."""
    return await _change_with_lease(call, lambda store, key: store.delete(key))


@_endpoint("POST", f"{_SESSION_PATH}/restore", "restoreSession", error_statuses=(409,))
def restore_session(call: ApiCall[AgentQuery, RestoreRequest]) -> SessionDetails:
    """Restore a session from the trash."""
    as_key = value_or_none(call.body.as_key)
    uid = value_or_none(call.body.uid)
    restore_for_user(call.agent.store, call.key, uid=uid, as_key=as_key)
    return _read_details(call.agent, as_key or call.key)


@_endpoint("GET", "/v1/trash", "listTrash")
def list_trash(call: ApiCall[AgentQuery, EmptyBody]) -> TrashResponse:
    """List the deleted sessions, the last deleted first."""
    deleted = call.agent.store.admin.list_trash()
    newest_first = sorted(deleted, key=lambda session: session.deleted, reverse=True)
    return TrashResponse(sessions=newest_first[:MAX_SESSIONS_PER_PAGE], count=len(newest_first))


@_endpoint("POST", f"{_SESSION_PATH}/archive", "archiveSession", error_statuses=(409,))
async def archive_session(call: ApiCall[AgentQuery, EmptyBody]) -> CompactionResult:
    """Archive the messages that a summary has hidden. Archived messages stay readable."""
    return await _change_with_lease(call, lambda store, key: store.compact(key))


@_endpoint("POST", f"{_SESSION_PATH}/fork", "forkSession", status=201, error_statuses=(409,))
async def fork_session(call: ApiCall[AgentQuery, ForkRequest]) -> SessionDetails:
    """Copy the visible messages to a new session."""
    new_key, at = call.body.new_key, value_or_none(call.body.at)
    await _change_with_lease(call, lambda store, key: store.fork(key, new_key, at=at))
    return await call.gateway.loop.run(_read_details, call.agent, new_key)


@_endpoint("POST", f"{_SESSION_PATH}/undo", "undo", error_statuses=(409,))
async def undo(call: ApiCall[AgentQuery, EmptyBody]) -> UndoResult:
    """Undo the newest operation that hid messages."""
    return await _change_with_lease(call, undo_last)


@_endpoint("POST", f"{_SESSION_PATH}/compact", "compactSession", error_statuses=(409,))
async def summarize_session(call: ApiCall[AgentQuery, EmptyBody]) -> SummaryResponse:
    """Summarize all turns except the newest ones."""
    key = await call.gateway.loop.run(_find_existing_key, call.agent, call.key)

    async def change(store: Store) -> SummaryReport | None:
        del store  # not needed, because `summarize` detects concurrent summaries itself
        model = await call.gateway.loop.run(call.agent.model_of, key)
        try:
            return await call.gateway.loop.run_model(call.agent.context(model).summarize, key)
        except ModelClosing:
            raise StoreClosed("the agent is shutting down; nothing was summarized") from None

    report = await call.gateway.loop.change(key, change, agent=call.agent.id)
    if report is None:
        return SummaryResponse(compacted=0, message="there is nothing to summarize")
    return SummaryResponse(
        compacted=report.count,
        first=report.first,
        last=report.last,
        tokens_before=report.tokens_before,
        tokens_after=report.tokens_after,
        message=str(report),
    )


async def _change_with_lease(call: ApiCall[Any, Any], change: Callable[[Store, str], T]) -> T:
    """Run a change of the store while holding the session's lease. Raises SessionBusy."""
    loop = call.gateway.loop
    key = await loop.run(_find_existing_key, call.agent, call.key)

    async def run_change(store: Store) -> T:
        return await loop.run(change, store, key)

    return await loop.change(key, run_change, agent=call.agent.id)


def _find_existing_key(agent: AgentInstance, key: str) -> str:
    """Return the key of the session with this key or alias. Raises NoSuchSession."""
    return agent.store.info(agent.resolve_key(key)).key
