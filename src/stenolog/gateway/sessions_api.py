"""The sessions API: list, search, change, delete and talk to sessions.

Changes of a session need its lease, like chat commands; only titles and tags change at any time.
Blocking calls run in the thread pools of the agent loop.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeVar

from msgspec import UNSET, Raw
from starlette.exceptions import HTTPException

from stenolog.agent.blocking_model import ModelClosing
from stenolog.agent.instance import AgentInstance
from stenolog.agent.turn_events import Answer, InboundMessage
from stenolog.catalog import Catalog
from stenolog.catalog.entries import Entry, Hits, Page, State
from stenolog.catalog.searchable_text import state_from, tags_from, title_from
from stenolog.codec import encode_object
from stenolog.context.summarize import SummaryReport
from stenolog.errors import ModelUnavailable, StenologError, StoreClosed, StoreUnavailable
from stenolog.gateway.api_types import (
    MAX_SESSIONS,
    AgentQuery,
    EmptyBody,
    ForkRequest,
    GroupStats,
    ListQuery,
    MessageItem,
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

MOST_COUNTED: Final = 50_000
"""Maximum number of sessions that the statistics count."""
_PAGE_BYTES: Final = 8 * 1024 * 1024
"""Size in bytes after which a page of messages ends."""
_TAIL: Final = 32
_SESSION: Final = "/v1/sessions/{key}"

SESSIONS: Final[list[Endpoint]] = []
"""The endpoints of the sessions API."""
_endpoint: Final = partial(endpoint, SESSIONS)

# --- reading ---------------------------------------------------------------------------------


@_endpoint("GET", "/v1/sessions", "listSessions")
async def list_sessions(call: ApiCall[ListQuery, EmptyBody]) -> Page:
    """List sessions, most recently changed first unless `sort` says otherwise."""
    query = call.query
    return await call.gateway.loop.run(
        call.agent.catalog.list,
        prefix=query.prefix,
        tag=value_or_none(query.tag),
        state=value_or_none(query.state),
        channel=value_or_none(query.channel),
        program=value_or_none(query.program),
        project=value_or_none(query.project),
        model=value_or_none(query.model),
        failed=value_or_none(query.failed),
        since=value_or_none(query.since),
        until=value_or_none(query.until),
        sort=query.sort,
        limit=query.limit,
        after=value_or_none(query.after),
    )


@_endpoint("GET", _SESSION, "getSession")
async def show_session(call: ApiCall[AgentQuery, EmptyBody]) -> SessionDetails:
    """Return one session, without its messages."""
    return await call.gateway.loop.run(_shown, call.agent, call.key)


@_endpoint("GET", f"{_SESSION}/messages", "listMessages")
async def list_messages(call: ApiCall[MessagesQuery, EmptyBody]) -> MessagePage:
    """List the messages of a session, by seq."""
    return await call.gateway.loop.run(_page, call.agent, call.key, call.query)


@_endpoint("GET", "/v1/search", "search")
async def search(call: ApiCall[SearchQuery, EmptyBody]) -> Hits:
    """Search messages, including hidden and archived ones."""
    query = call.query
    return await call.gateway.loop.run(
        call.agent.catalog.search,
        query.q,
        role=value_or_none(query.role),
        prefix=query.prefix,
        tag=value_or_none(query.tag),
        since=value_or_none(query.since),
        until=value_or_none(query.until),
        limit=query.limit,
        newest=query.newest,
        after=value_or_none(query.after),
    )


@_endpoint("GET", "/v1/stats", "stats")
async def stats(call: ApiCall[AgentQuery, EmptyBody]) -> Stats:
    """Return the number of sessions, messages and tokens."""
    return await call.gateway.loop.run(_stats, call.agent.catalog)


def _shown(agent: AgentInstance, key: str) -> SessionDetails:
    store = agent.store
    own = agent.resolve_key(key)
    info = store.info(own)
    return SessionDetails(
        key=info.key,
        uid=info.uid,
        title=_title(agent, info),
        tags=tags_from(info.meta),
        state="running" if leased_keys(store, [own]) else _state(store, own),
        summary=info.summary,
        forked_from=info.forked_from,
        created=info.created,
        updated=info.updated,
        last_seq=info.last_seq,
        floor=info.floor,
        visible=info.visible,
        count=info.count,
        lost=info.lost,
        damaged=info.damaged,
        archived=info.archived,
        undoable=info.undoable,
        meta=Raw(encode_object(dict(info.meta))),
    )


def _title(agent: AgentInstance, info: SessionInfo) -> str:
    """Return the title as in the list of sessions; that in meta if the catalog cannot be read."""
    title = title_from(info.meta, "")
    if not title:
        with suppress(StenologError):
            entry = agent.catalog.entry(info.key)
            title = "" if entry is None else entry.title
    return title


def _state(store: Store, key: str) -> State:
    """Return whether the last turn is complete; read only as many messages as needed."""
    last = _TAIL
    while True:
        tail = store.get_history(key, last=last)
        state = state_from(tail, whole=len(tail) < last)
        if state is not None:
            return state
        last *= 8


def _page(agent: AgentInstance, key: str, query: MessagesQuery) -> MessagePage:
    store = agent.store
    own = agent.resolve_key(key)
    store.info(own)  # raises NoSuchSession: get_history returns an empty list
    history = store.get_history(
        own, last=value_or_none(query.last), after=query.after, full=query.full
    )
    page = _first(history, query.limit)
    return MessagePage(
        messages=[
            MessageItem(seq=one.seq, at=one.at, hidden=one.hidden, message=Raw(one.to_json()))
            for one in page
        ],
        after=page[-1].seq if len(page) < len(history) else None,
    )


def _first(history: list[Message], limit: int) -> list[Message]:
    """Return the messages of one page; at least one."""
    size = 0
    for number, message in enumerate(history[:limit], start=1):
        size += len(message.to_json())
        if size > _PAGE_BYTES:
            return history[:number]
    return history[:limit]


def _stats(catalog: Catalog) -> Stats:
    seen: set[str] = set()
    channels: dict[str, GroupStats] = {}
    states: dict[str, GroupStats] = {}
    every = GroupStats()
    after: str | None = None
    while True:
        page = catalog.list(limit=MAX_SESSIONS, after=after)
        # A session that changes during the count moves to the front; count it once.
        new = [entry for entry in page.entries if entry.key not in seen]
        seen.update(entry.key for entry in new)
        for entry in new:
            every = _plus(every, entry)
            channel = entry.channel or ""
            channels[channel] = _plus(channels.get(channel, GroupStats()), entry)
            states[entry.state] = _plus(states.get(entry.state, GroupStats()), entry)
        after = page.after
        if after is None or len(seen) >= MOST_COUNTED:
            break
    return Stats(
        sessions=every.sessions,
        messages=every.messages,
        tokens=every.tokens,
        channels=channels,
        states=states,
        complete=after is None,
    )


def _plus(count: GroupStats, entry: Entry) -> GroupStats:
    return GroupStats(
        sessions=count.sessions + 1,
        messages=count.messages + entry.count,
        tokens=count.tokens + entry.tokens,
    )


# --- talking ---------------------------------------------------------------------------------


@_endpoint("POST", f"{_SESSION}/messages", "say", statuses=(409, 410, 502))
async def say(call: ApiCall[AgentQuery, MessageRequest]) -> MessageResponse:
    """Send a message and wait for the answer. Creates the session if there is none.

    A failed turn is 502 or 503.
    """
    key, view = await call.gateway.loop.run(
        resolve_session, call.agent, call.key, new_session=call.body.new_session
    )
    inbound = InboundMessage(key=key, content=call.body.content, id=call.body.id)
    answer = await call.gateway.loop.handle(inbound, agent=call.agent.id, view=view)
    if answer.outcome == "failed":
        kept = "the message is stored" if answer.saved else "the message is not stored yet"
        raise HTTPException(_status(answer), f"{answer.text} ({kept})")
    return MessageResponse(
        answer=answer.text,
        outcome=answer.outcome,
        seq=answer.seq,
        saved=answer.saved,
        session=answer.key,
    )


def _status(answer: Answer) -> int:
    """Return 503 if a retry may help, otherwise 502: the model failed."""
    later = isinstance(answer.error, StoreUnavailable | StoreClosed | ModelUnavailable)
    return 503 if later or not answer.saved else 502


@_endpoint("POST", f"{_SESSION}/stop", "stop", always=True)
async def stop(call: ApiCall[AgentQuery, EmptyBody]) -> StopResponse:
    """Stop the answer that is being written. The text so far is kept."""
    return StopResponse(stopped=await call.gateway.loop.stop(call.key, agent=call.agent.id))


# --- changing --------------------------------------------------------------------------------


@_endpoint("PATCH", _SESSION, "changeSession")
async def change_session(call: ApiCall[AgentQuery, SessionPatch]) -> SessionDetails:
    """Change the title or the tags of a session."""
    return await call.gateway.loop.run(_changed, call.agent, call.key, call.body)


@_endpoint("DELETE", _SESSION, "deleteSession", statuses=(409,))
async def delete_session(call: ApiCall[AgentQuery, EmptyBody]) -> Trashed:
    """Move a session to the trash. It can be restored."""
    return await _alone(call, lambda store, key: store.delete(key))


@_endpoint("POST", f"{_SESSION}/restore", "restoreSession", statuses=(409,))
async def restore_session(call: ApiCall[AgentQuery, RestoreRequest]) -> SessionDetails:
    """Restore a session from the trash."""
    return await call.gateway.loop.run(_restored, call.agent, call.key, call.body)


@_endpoint("GET", "/v1/trash", "listTrash")
async def list_trash(call: ApiCall[AgentQuery, EmptyBody]) -> TrashResponse:
    """List the deleted sessions, the last deleted first."""
    found = await call.gateway.loop.run(call.agent.store.list_trash)
    newest = sorted(found, key=lambda one: one.deleted, reverse=True)
    return TrashResponse(sessions=newest[:MAX_SESSIONS], count=len(newest))


@_endpoint("POST", f"{_SESSION}/archive", "archiveSession", statuses=(409,))
async def archive_session(call: ApiCall[AgentQuery, EmptyBody]) -> Compacted:
    """Move the messages that a summary has hidden to the archive. They stay readable."""
    return await _alone(call, lambda store, key: store.compact(key))


@_endpoint("POST", f"{_SESSION}/fork", "forkSession", status=201, statuses=(409,))
async def fork_session(call: ApiCall[AgentQuery, ForkRequest]) -> SessionDetails:
    """Copy the visible messages to a new session."""
    new_key, at = call.body.new_key, value_or_none(call.body.at)
    await _alone(call, lambda store, key: store.fork(key, new_key, at=at))
    return await call.gateway.loop.run(_shown, call.agent, new_key)


@_endpoint("POST", f"{_SESSION}/undo", "undo", statuses=(409,))
async def undo(call: ApiCall[AgentQuery, EmptyBody]) -> Undone:
    """Undo the newest operation that hid messages."""
    return await _alone(call, undoing.undo_last)


@_endpoint("POST", f"{_SESSION}/compact", "compactSession", statuses=(409,))
async def compact(call: ApiCall[AgentQuery, EmptyBody]) -> SummaryResponse:
    """Summarize all but the last turns now."""
    key = await call.gateway.loop.run(_existing, call.agent, call.key)

    async def change(sessions: SessionStore) -> SummaryReport | None:
        del sessions  # a checkpoint checks the floor itself
        model = await call.gateway.loop.run(call.agent.model_of, key)
        try:
            return await call.gateway.loop.run_model(call.agent.context(model).summarize, key)
        except ModelClosing:
            raise StoreClosed("the agent is shutting down; nothing was summarized") from None

    done = await call.gateway.loop.change(key, change, agent=call.agent.id)
    if done is None:
        return SummaryResponse(compacted=0, words="there is nothing to summarize")
    return SummaryResponse(
        compacted=done.count,
        first=done.first,
        last=done.last,
        tokens_before=done.tokens_before,
        tokens_after=done.tokens_after,
        words=str(done),
    )


async def _alone(call: ApiCall[Any, Any], change: Callable[[Store, str], T]) -> T:
    """Run a change of the store while holding the lease. Raise Busy."""
    loop = call.gateway.loop
    key = await loop.run(_existing, call.agent, call.key)

    async def carried_out(sessions: SessionStore) -> T:
        return await loop.run(change, sessions.store, key)

    return await loop.change(key, carried_out, agent=call.agent.id)


def _existing(agent: AgentInstance, key: str) -> str:
    """Return the session's own key. Raise NoSuchSession."""
    own = agent.resolve_key(key)
    return agent.store.info(own).key


def _changed(agent: AgentInstance, key: str, body: SessionPatch) -> SessionDetails:
    own = _existing(agent, key)
    fields: dict[str, Any] = {}
    if body.title is not UNSET:
        fields["title"] = body.title
    if body.tags is not UNSET:
        fields["tags"] = list(dict.fromkeys(body.tags)) or None
    if fields:
        agent.store.set_meta(own, **fields)
    return _shown(agent, own)


def _restored(agent: AgentInstance, key: str, body: RestoreRequest) -> SessionDetails:
    as_key = value_or_none(body.as_key)
    agent.store.restore(key, uid=value_or_none(body.uid), as_key=as_key)
    return _shown(agent, as_key or key)
