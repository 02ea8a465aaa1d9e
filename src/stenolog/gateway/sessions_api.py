"""The sessions API: list, search, change, delete and talk to sessions.

Changes of a session need its lease, like chat commands; only titles and tags change at any time.
Blocking calls run in the thread pools of the agent loop.
"""

from collections.abc import Callable
from typing import Any, Final, TypeVar

from msgspec import UNSET, Raw
from starlette.exceptions import HTTPException

from stenolog.agent.blocking_model import ModelClosing
from stenolog.agent.instance import AgentInstance
from stenolog.agent.turn_events import Answer, InboundMessage
from stenolog.catalog import Catalog
from stenolog.catalog.entries import Entry, Hits, Page, State
from stenolog.catalog.searchable_text import state_from, tags_from
from stenolog.codec import encode_object
from stenolog.context.summarize import SummaryReport
from stenolog.errors import ModelUnavailable, StoreClosed, StoreUnavailable
from stenolog.gateway.api_types import (
    MOST_SESSIONS,
    Changed,
    CompactionShown,
    Counted,
    Events,
    Forking,
    ListQuery,
    MessagePage,
    MessageShown,
    MessagesQuery,
    Nothing,
    OfAgent,
    Restoring,
    Said,
    SearchQuery,
    SessionShown,
    Stats,
    Stopped,
    given,
)
from stenolog.gateway.chat_turns import resolve_session
from stenolog.gateway.openapi import Endpoint
from stenolog.gateway.requests import Call
from stenolog.records import Message, Trashed, Undone
from stenolog.sessions import undoing
from stenolog.sessions.session_store import SessionStore
from stenolog.stores.base import Store, leased_keys

T = TypeVar("T")

MOST_COUNTED: Final = 50_000
"""Maximum number of sessions that the statistics count."""
_PAGE_BYTES: Final = 8 * 1024 * 1024
"""Size in bytes after which a page of messages ends."""
_TAIL: Final = 32

# --- reading ---------------------------------------------------------------------------------


async def list_sessions(call: Call[ListQuery, Nothing]) -> Page:
    """Return a page of sessions, most recently changed first."""
    query = call.query
    return await call.gateway.loop.run(
        call.agent.catalog.list,
        prefix=query.prefix,
        tag=given(query.tag),
        state=given(query.state),
        channel=given(query.channel),
        limit=query.limit,
        after=given(query.after),
    )


async def show_session(call: Call[OfAgent, Nothing]) -> SessionShown:
    """Return one session, without its messages."""
    return await call.gateway.loop.run(_shown, call.agent, call.key)


async def list_messages(call: Call[MessagesQuery, Nothing]) -> MessagePage:
    """Return a page of messages, ordered by seq."""
    return await call.gateway.loop.run(_page, call.agent, call.key, call.query)


async def search(call: Call[SearchQuery, Nothing]) -> Hits:
    """Return a page of search results."""
    query = call.query
    return await call.gateway.loop.run(
        call.agent.catalog.search,
        query.q,
        role=given(query.role),
        prefix=query.prefix,
        tag=given(query.tag),
        since=given(query.since),
        should_stop=given(query.until),
        limit=query.limit,
        newest=query.newest,
        after=given(query.after),
    )


async def stats(call: Call[OfAgent, Nothing]) -> Stats:
    """Return the numbers of sessions, messages and tokens."""
    return await call.gateway.loop.run(_stats, call.agent.catalog)


def _shown(agent: AgentInstance, key: str) -> SessionShown:
    store = agent.store
    own = agent.own_key(key)
    info = store.info(own)
    title = info.meta.get("title")
    return SessionShown(
        key=info.key,
        uid=info.uid,
        title=title if isinstance(title, str) and title.strip() else None,
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
    own = agent.own_key(key)
    store.info(own)  # raises NoSuchSession: get_history returns an empty list
    history = store.get_history(own, last=given(query.last), after=query.after, full=query.full)
    page = _first(history, query.limit)
    return MessagePage(
        messages=[
            MessageShown(seq=one.seq, at=one.at, hidden=one.hidden, message=Raw(one.to_json()))
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
    channels: dict[str, Counted] = {}
    states: dict[str, Counted] = {}
    every = Counted()
    after: str | None = None
    while True:
        page = catalog.list(limit=MOST_SESSIONS, after=after)
        # A session that changes during the count moves to the front; count it once.
        new = [entry for entry in page.entries if entry.key not in seen]
        seen.update(entry.key for entry in new)
        for entry in new:
            every = _plus(every, entry)
            channel = entry.channel or ""
            channels[channel] = _plus(channels.get(channel, Counted()), entry)
            states[entry.state] = _plus(states.get(entry.state, Counted()), entry)
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


def _plus(count: Counted, entry: Entry) -> Counted:
    return Counted(
        sessions=count.sessions + 1,
        messages=count.messages + entry.count,
        tokens=count.tokens + entry.tokens,
    )


# --- talking ---------------------------------------------------------------------------------


async def say(call: Call[OfAgent, Said]) -> Events:
    """Answer a message or run a command. A failed turn is 502 or 503."""
    key, view = await call.gateway.loop.run(
        resolve_session, call.agent, call.key, new_session=call.body.new_session
    )
    inbound = InboundMessage(key=key, content=call.body.content, id=call.body.id)
    answer = await call.gateway.loop.handle(inbound, agent=call.agent.id, view=view)
    if answer.outcome == "failed":
        kept = "the message is kept" if answer.saved else "the message is not stored yet"
        raise HTTPException(_status(answer), f"{answer.text} ({kept})")
    return Events(
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


async def stop(call: Call[OfAgent, Nothing]) -> Stopped:
    """Stop the answer in progress; the text so far is kept."""
    return Stopped(stopped=await call.gateway.loop.stop(call.key, agent=call.agent.id))


# --- changing --------------------------------------------------------------------------------


async def change_session(call: Call[OfAgent, Changed]) -> SessionShown:
    """Change the title or the tags of a session."""
    return await call.gateway.loop.run(_changed, call.agent, call.key, call.body)


async def delete_session(call: Call[OfAgent, Nothing]) -> Trashed:
    """Move a session to the trash; the uid restores it."""
    return await _alone(call, lambda store, key: store.delete(key))


async def restore_session(call: Call[OfAgent, Restoring]) -> SessionShown:
    """Restore a session from the trash."""
    return await call.gateway.loop.run(_restored, call.agent, call.key, call.body)


async def fork_session(call: Call[OfAgent, Forking]) -> SessionShown:
    """Copy the visible messages to a new session."""
    new_key, at = call.body.new_key, given(call.body.at)
    await _alone(call, lambda store, key: store.fork(key, new_key, at=at))
    return await call.gateway.loop.run(_shown, call.agent, new_key)


async def undo(call: Call[OfAgent, Nothing]) -> Undone:
    """Undo the newest operation."""
    return await _alone(call, undoing.undo_last)


async def compact(call: Call[OfAgent, Nothing]) -> CompactionShown:
    """Summarize all but the last turns."""
    key = await call.gateway.loop.run(_existing, call.agent, call.key)

    async def change(sessions: SessionStore) -> SummaryReport | None:
        del sessions  # a checkpoint checks the floor itself
        model = await call.gateway.loop.run(call.agent.model_of, key)
        try:
            return await call.gateway.loop.ask(call.agent.context(model).summarize, key)
        except ModelClosing:
            raise StoreClosed("the agent closes; nothing was compacted") from None

    done = await call.gateway.loop.change(key, change, agent=call.agent.id)
    if done is None:
        return CompactionShown(compacted=0, words="there is nothing that could be made shorter")
    return CompactionShown(
        compacted=done.count,
        first=done.first,
        last=done.last,
        tokens_before=done.tokens_before,
        tokens_after=done.tokens_after,
        words=str(done),
    )


async def _alone(call: Call[Any, Any], change: Callable[[Store, str], T]) -> T:
    """Run a change of the store while holding the lease. Raise Busy."""
    loop = call.gateway.loop
    key = await loop.run(_existing, call.agent, call.key)

    async def carried_out(sessions: SessionStore) -> T:
        return await loop.run(change, sessions.store, key)

    return await loop.change(key, carried_out, agent=call.agent.id)


def _existing(agent: AgentInstance, key: str) -> str:
    """Return the session's own key. Raise NoSuchSession."""
    own = agent.own_key(key)
    return agent.store.info(own).key


def _changed(agent: AgentInstance, key: str, body: Changed) -> SessionShown:
    own = _existing(agent, key)
    fields: dict[str, Any] = {}
    if body.title is not UNSET:
        fields["title"] = body.title
    if body.tags is not UNSET:
        fields["tags"] = list(dict.fromkeys(body.tags)) or None
    if fields:
        agent.store.set_meta(own, **fields)
    return _shown(agent, own)


def _restored(agent: AgentInstance, key: str, body: Restoring) -> SessionShown:
    as_key = given(body.as_key)
    agent.store.restore(key, uid=given(body.uid), as_key=as_key)
    return _shown(agent, as_key or key)


# --- endpoints -------------------------------------------------------------------------------

_SESSION: Final = "/v1/sessions/{key}"

SESSIONS: Final[tuple[Endpoint, ...]] = (
    Endpoint(
        method="GET",
        path="/v1/sessions",
        name="listSessions",
        summary="The sessions, the last changed first.",
        answer=list_sessions,
        query=ListQuery,
        response=Page,
    ),
    Endpoint(
        method="GET",
        path=_SESSION,
        name="getSession",
        summary="One session, without its messages.",
        answer=show_session,
        response=SessionShown,
    ),
    Endpoint(
        method="PATCH",
        path=_SESSION,
        name="changeSession",
        summary="Give a session another title or other tags.",
        answer=change_session,
        body=Changed,
        response=SessionShown,
    ),
    Endpoint(
        method="DELETE",
        path=_SESSION,
        name="deleteSession",
        summary="Put a session into the trash; restore brings it back.",
        answer=delete_session,
        response=Trashed,
        statuses=(409,),
    ),
    Endpoint(
        method="POST",
        path=f"{_SESSION}/restore",
        name="restoreSession",
        summary="Bring a deleted session back.",
        answer=restore_session,
        body=Restoring,
        response=SessionShown,
        statuses=(409,),
    ),
    Endpoint(
        method="GET",
        path=f"{_SESSION}/messages",
        name="listMessages",
        summary="The messages of a session, by seq.",
        answer=list_messages,
        query=MessagesQuery,
        response=MessagePage,
    ),
    Endpoint(
        method="POST",
        path=f"{_SESSION}/messages",
        name="say",
        summary="Say something and wait for the answer; the session is made where there is none.",
        answer=say,
        body=Said,
        response=Events,
        statuses=(409, 410, 502),
    ),
    Endpoint(
        method="POST",
        path=f"{_SESSION}/fork",
        name="forkSession",
        summary="Make a copy of what is in sight, a session of its own.",
        answer=fork_session,
        body=Forking,
        response=SessionShown,
        status=201,
        statuses=(409,),
    ),
    Endpoint(
        method="POST",
        path=f"{_SESSION}/compact",
        name="compactSession",
        summary="Make a summary of all but the last turns now.",
        answer=compact,
        body=Nothing,
        response=CompactionShown,
        statuses=(409,),
    ),
    Endpoint(
        method="POST",
        path=f"{_SESSION}/undo",
        name="undo",
        summary="Take back the newest compaction, clearing, hiding or replacing.",
        answer=undo,
        body=Nothing,
        response=Undone,
        statuses=(409,),
    ),
    Endpoint(
        method="POST",
        path=f"{_SESSION}/stop",
        name="stop",
        summary="End the answer that is being written; what was said is kept.",
        answer=stop,
        body=Nothing,
        response=Stopped,
        always=True,
    ),
    Endpoint(
        method="GET",
        path="/v1/search",
        name="search",
        summary="Messages that have all the words, hidden and archived ones too.",
        answer=search,
        query=SearchQuery,
        response=Hits,
    ),
    Endpoint(
        method="GET",
        path="/v1/stats",
        name="stats",
        summary="How much there is: sessions, messages and tokens.",
        answer=stats,
        response=Stats,
    ),
)
"""The endpoints of the sessions API."""
