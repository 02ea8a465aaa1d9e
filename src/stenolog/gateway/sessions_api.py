"""The sessions API: list, search, change, delete and talk to sessions.

A request that changes a session needs its lease, like a chat command. Only titles and tags can be
changed without the lease. Blocking calls run in the thread pools of the agent loop.
"""

from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeVar

import msgspec
from msgspec import UNSET, Raw
from starlette.exceptions import HTTPException

from stenolog.agent.blocking_model import ModelClosing
from stenolog.agent.instance import AgentInstance
from stenolog.agent.turn_events import InboundMessage
from stenolog.catalog import Catalog
from stenolog.catalog.entries import Hits, Page, State
from stenolog.catalog.searchable_text import state_from, tags_from, title_from
from stenolog.codec import encode_object
from stenolog.context.summarize import SummaryReport
from stenolog.errors import ModelUnavailable, StenologError, StoreClosed, StoreUnavailable
from stenolog.gateway.api_types import (
    MAX_SESSIONS_PER_PAGE,
    AgentQuery,
    EmptyBody,
    ForkRequest,
    GroupStats,
    ListQuery,
    MessagePage,
    MessageRequest,
    MessageResponse,
    MessagesQuery,
    RestoreRequest,
    SearchQuery,
    SessionDetails,
    SessionPatch,
    Stats,
    StopResponse,
    SummaryResponse,
    TrashResponse,
    given_parameters,
    message_item,
    value_or_none,
)
from stenolog.gateway.chat_turns import resolve_session
from stenolog.gateway.openapi import Endpoint, endpoint
from stenolog.gateway.requests import ApiCall
from stenolog.records import Compacted, Message, SessionInfo, Trashed, Undone
from stenolog.sessions import undoing
from stenolog.sessions.session_store import SessionStore
from stenolog.stores.base import Store, leased_keys

T = TypeVar("T")

_MAX_COUNTED_SESSIONS: Final = 50_000
_PAGE_BYTES: Final = 8 * 1024 * 1024
"""Size in bytes after which a page of messages ends."""
_STATE_MESSAGES: Final = 32
"""Number of last messages that are read first to find the state of a session."""
_SESSION_PATH: Final = "/v1/sessions/{key}"
_INFO_FIELDS: Final = (
    *("key", "uid", "summary", "forked_from", "created", "updated", "last_seq", "floor"),
    *("visible", "count", "lost", "damaged", "archived", "undoable"),
)
"""Fields of SessionDetails that are copied from SessionInfo."""

SESSIONS: Final[list[Endpoint]] = []
_endpoint: Final = partial(endpoint, SESSIONS)

# --- reading ---------------------------------------------------------------------------------


@_endpoint("GET", "/v1/sessions", "listSessions")
async def list_sessions(call: ApiCall[ListQuery, EmptyBody]) -> Page:
    """List sessions, most recently changed first unless `sort` says otherwise."""
    return await call.gateway.loop.run(call.agent.catalog.list, **given_parameters(call.query))


@_endpoint("GET", _SESSION_PATH, "getSession")
async def show_session(call: ApiCall[AgentQuery, EmptyBody]) -> SessionDetails:
    """Return one session, without its messages."""
    return await call.gateway.loop.run(_session_details, call.agent, call.key)


@_endpoint("GET", f"{_SESSION_PATH}/messages", "listMessages")
async def list_messages(call: ApiCall[MessagesQuery, EmptyBody]) -> MessagePage:
    """List the messages of a session, sorted by seq."""
    return await call.gateway.loop.run(_read_page, call.agent, call.key, call.query)


@_endpoint("GET", "/v1/search", "search")
async def search(call: ApiCall[SearchQuery, EmptyBody]) -> Hits:
    """Search messages, including hidden and archived ones."""
    fields = given_parameters(call.query)
    return await call.gateway.loop.run(call.agent.catalog.search, fields.pop("q"), **fields)


@_endpoint("GET", "/v1/stats", "stats")
async def stats(call: ApiCall[AgentQuery, EmptyBody]) -> Stats:
    """Return the number of sessions, messages and tokens."""
    return await call.gateway.loop.run(_count_sessions, call.agent.catalog)


def _session_details(agent: AgentInstance, key: str) -> SessionDetails:
    store = agent.store
    session_key = agent.resolve_key(key)
    info = store.info(session_key)
    return SessionDetails(
        **{name: getattr(info, name) for name in _INFO_FIELDS},
        title=_session_title(agent, info),
        tags=tags_from(info.meta),
        state=_session_state(store, session_key),
        meta=Raw(encode_object(dict(info.meta))),
    )


def _session_title(agent: AgentInstance, info: SessionInfo) -> str:
    """Return the title in the session's meta, otherwise the title in the catalog, or empty text."""
    title = title_from(info.meta, "")
    if not title:
        with suppress(StenologError):
            entry = agent.catalog.entry(info.key)
            title = "" if entry is None else entry.title
    return title


def _session_state(store: Store, key: str) -> State:
    """Return the state of the last turn. Reads only as many messages as needed."""
    if leased_keys(store, [key]):
        return "running"
    tail_length = _STATE_MESSAGES
    while True:
        tail = store.get_history(key, last=tail_length)
        state = state_from(tail, whole=len(tail) < tail_length)
        if state is not None:
            return state
        tail_length *= 8


def _read_page(agent: AgentInstance, key: str, query: MessagesQuery) -> MessagePage:
    store = agent.store
    session_key = agent.resolve_key(key)
    store.info(session_key)  # `info` raises NoSuchSession; `get_history` returns an empty list
    history = store.get_history(
        session_key, last=value_or_none(query.last), after=query.after, full=query.full
    )
    page = _limit_page(history, query.limit)
    return MessagePage(
        messages=[message_item(message) for message in page],
        after=page[-1].seq if len(page) < len(history) else None,
    )


def _limit_page(history: list[Message], limit: int) -> list[Message]:
    """Return the messages of one page. A page has at least one message."""
    size = 0
    for number, message in enumerate(history[:limit], start=1):
        size += len(message.to_json())
        if size > _PAGE_BYTES:
            return history[:number]
    return history[:limit]


def _count_sessions(catalog: Catalog) -> Stats:
    seen_keys: set[str] = set()
    channels: defaultdict[str, GroupStats] = defaultdict(GroupStats)
    states: defaultdict[str, GroupStats] = defaultdict(GroupStats)
    total = GroupStats()
    after: str | None = None
    while True:
        page = catalog.list(limit=MAX_SESSIONS_PER_PAGE, after=after)
        # A session that changes during the count may be listed twice. Count it once.
        new_entries = [entry for entry in page.entries if entry.key not in seen_keys]
        seen_keys.update(entry.key for entry in new_entries)
        for entry in new_entries:
            for group in (total, channels[entry.channel or ""], states[entry.state]):
                group.sessions += 1
                group.messages += entry.count
                group.tokens += entry.tokens
        after = page.after
        if after is None or len(seen_keys) >= _MAX_COUNTED_SESSIONS:
            break
    counts = msgspec.structs.asdict(total)
    return Stats(**counts, channels=channels, states=states, complete=after is None)


# --- talking ---------------------------------------------------------------------------------


@_endpoint("POST", f"{_SESSION_PATH}/messages", "say", statuses=(409, 410, 502))
async def send_message(call: ApiCall[AgentQuery, MessageRequest]) -> MessageResponse:
    """Send a message and wait for the answer. Creates the session if there is none.

    The status of a failed turn is 502 or 503.
    """
    key, view = await call.gateway.loop.run(
        resolve_session, call.agent, call.key, new_session=call.body.new_session
    )
    inbound = InboundMessage(key=key, content=call.body.content, id=call.body.id)
    answer = await call.gateway.loop.handle(inbound, agent=call.agent.id, view=view)
    if answer.outcome == "failed":
        storage_text = "the message is stored" if answer.saved else "the message is not stored yet"
        # The status is 503 if a retry may help, and 502 if the model failed.
        is_temporary = isinstance(answer.error, StoreUnavailable | StoreClosed | ModelUnavailable)
        status = 503 if is_temporary or not answer.saved else 502
        raise HTTPException(status, f"{answer.text} ({storage_text})")
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
async def change_session(call: ApiCall[AgentQuery, SessionPatch]) -> SessionDetails:
    """Change the title or the tags of a session."""
    return await call.gateway.loop.run(_change_meta, call.agent, call.key, call.body)


@_endpoint("DELETE", _SESSION_PATH, "deleteSession", statuses=(409,))
async def delete_session(call: ApiCall[AgentQuery, EmptyBody]) -> Trashed:
    """Move a session to the trash, from which it can be restored."""
    return await _change_with_lease(call, lambda store, key: store.delete(key))


@_endpoint("POST", f"{_SESSION_PATH}/restore", "restoreSession", statuses=(409,))
async def restore_session(call: ApiCall[AgentQuery, RestoreRequest]) -> SessionDetails:
    """Restore a session from the trash."""
    return await call.gateway.loop.run(_restore, call.agent, call.key, call.body)


@_endpoint("GET", "/v1/trash", "listTrash")
async def list_trash(call: ApiCall[AgentQuery, EmptyBody]) -> TrashResponse:
    """List the deleted sessions, the last deleted first."""
    deleted = await call.gateway.loop.run(call.agent.store.list_trash)
    newest_first = sorted(deleted, key=lambda session: session.deleted, reverse=True)
    return TrashResponse(sessions=newest_first[:MAX_SESSIONS_PER_PAGE], count=len(newest_first))


@_endpoint("POST", f"{_SESSION_PATH}/archive", "archiveSession", statuses=(409,))
async def archive_session(call: ApiCall[AgentQuery, EmptyBody]) -> Compacted:
    """Archive the messages that a summary has hidden. Archived messages stay readable."""
    return await _change_with_lease(call, lambda store, key: store.compact(key))


@_endpoint("POST", f"{_SESSION_PATH}/fork", "forkSession", status=201, statuses=(409,))
async def fork_session(call: ApiCall[AgentQuery, ForkRequest]) -> SessionDetails:
    """Copy the visible messages to a new session."""
    new_key, at = call.body.new_key, value_or_none(call.body.at)
    await _change_with_lease(call, lambda store, key: store.fork(key, new_key, at=at))
    return await call.gateway.loop.run(_session_details, call.agent, new_key)


@_endpoint("POST", f"{_SESSION_PATH}/undo", "undo", statuses=(409,))
async def undo(call: ApiCall[AgentQuery, EmptyBody]) -> Undone:
    """Undo the newest operation that hid messages."""
    return await _change_with_lease(call, undoing.undo_last)


@_endpoint("POST", f"{_SESSION_PATH}/compact", "compactSession", statuses=(409,))
async def compact(call: ApiCall[AgentQuery, EmptyBody]) -> SummaryResponse:
    """Summarize all turns except the newest ones."""
    key = await call.gateway.loop.run(_existing_key, call.agent, call.key)

    async def change(sessions: SessionStore) -> SummaryReport | None:
        del sessions  # `summarize` detects concurrent summaries itself
        model = await call.gateway.loop.run(call.agent.model_of, key)
        try:
            return await call.gateway.loop.run_model(call.agent.context(model).summarize, key)
        except ModelClosing:
            raise StoreClosed("the agent is shutting down; nothing was summarized") from None

    report = await call.gateway.loop.change(key, change, agent=call.agent.id)
    if report is None:
        return SummaryResponse(compacted=0, words="there is nothing to summarize")
    return SummaryResponse(
        compacted=report.count,
        first=report.first,
        last=report.last,
        tokens_before=report.tokens_before,
        tokens_after=report.tokens_after,
        words=str(report),
    )


async def _change_with_lease(call: ApiCall[Any, Any], change: Callable[[Store, str], T]) -> T:
    """Run a change of the store while holding the lease. Raise SessionBusy."""
    loop = call.gateway.loop
    key = await loop.run(_existing_key, call.agent, call.key)

    async def run_change(sessions: SessionStore) -> T:
        return await loop.run(change, sessions.store, key)

    return await loop.change(key, run_change, agent=call.agent.id)


def _existing_key(agent: AgentInstance, key: str) -> str:
    """Return the key of the session with this key or alias. Raise NoSuchSession."""
    session_key = agent.resolve_key(key)
    return agent.store.info(session_key).key


def _change_meta(agent: AgentInstance, key: str, body: SessionPatch) -> SessionDetails:
    session_key = _existing_key(agent, key)
    fields: dict[str, Any] = {}
    if body.title is not UNSET:
        fields["title"] = body.title
    if body.tags is not UNSET:
        fields["tags"] = list(dict.fromkeys(body.tags)) or None
    if fields:
        agent.store.set_meta(session_key, **fields)
    return _session_details(agent, session_key)


def _restore(agent: AgentInstance, key: str, body: RestoreRequest) -> SessionDetails:
    as_key = value_or_none(body.as_key)
    agent.store.restore(key, uid=value_or_none(body.uid), as_key=as_key)
    return _session_details(agent, as_key or key)
