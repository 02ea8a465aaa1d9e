"""Conversation page: a part of a session's messages, with markers for hidden and damaged ones.

If the store supports it, only the shown messages are read: the end of a long session appears at
once, and older messages are loaded on request.
"""

from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Annotated, Final, Literal

from msgspec import Meta, Struct
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from stenolog.agent.commands import sibling_key
from stenolog.agent.instance import AgentInstance
from stenolog.catalog.entries import Entry
from stenolog.catalog.searchable_text import tags_from
from stenolog.errors import StenologError, UsageError
from stenolog.gateway.api_types import MAX_SEQ, AgentQuery
from stenolog.gateway.requests import parse_query
from stenolog.gateway.viewer.formatting import damage
from stenolog.gateway.viewer.hidden_messages import Gap, Visibility, read_visibility
from stenolog.gateway.viewer.message_views import MessageView, message_views
from stenolog.gateway.viewer.pages import entry_of, page, title_of
from stenolog.gateway.viewer.session_outline import MessageFilter, read_outline
from stenolog.messages import results_of
from stenolog.records import Message, SessionInfo, Span
from stenolog.settings.secrets import without_password
from stenolog.stores import spans
from stenolog.stores.base import Store
from stenolog.stores.snapshots import SnapshotMark, SnapshotStore

SIZE: Final = 50
"""Number of messages on a new page, and of each further part."""
_MAX_PART: Final = 400
"""Maximum number of messages in one part, when a whole range is requested."""
_RESULT_MARGIN: Final = 50
"""Number of additional messages read to find the results of the last calls."""
_MAX_DISCARDED: Final = 2_000
"""Maximum number of messages that are read and discarded.

If more would be discarded, the session is opened separately, so that reading stops early.
"""

Seq = Annotated[int, Meta(ge=0, le=MAX_SEQ)]
_EVERYTHING: Final = MessageFilter()


class FilterQuery(AgentQuery, frozen=True, kw_only=True):
    """Kinds of messages that a page shows."""

    full: bool = False
    """Include hidden messages."""
    only: Literal["", "prompts", "failed"] = ""
    """Show only prompts, or only failed tool calls."""
    tools: bool = True
    """Show tool calls and results."""
    thinking: bool = True

    @property
    def chosen(self) -> MessageFilter:
        """Return the filter of the messages."""
        return MessageFilter(only=self.only, tools=self.tools, thinking=self.thinking)

    @property
    def filter_text(self) -> str:
        """Return the filter as query parameters, for the requests of the open page."""
        fields = [f"only={self.only}"] if self.only else []
        fields += [] if self.tools else ["tools=false"]
        fields += [] if self.thinking else ["thinking=false"]
        return "&".join(fields)


class ConversationQuery(FilterQuery, frozen=True, kw_only=True):
    """Query of the conversation page."""

    at: Seq = 0
    """Seq of the message to show in the middle. 0 shows the end."""
    q: Annotated[str, Meta(max_length=1_000)] = ""
    """Words to search in this session. The page searches when it is open."""


class PartQuery(FilterQuery, frozen=True, kw_only=True):
    """Query of a part for a page that is already open."""

    before: Seq = 0
    after: Seq | None = None
    limit: Annotated[int, Meta(ge=1, le=_MAX_PART)] = _MAX_PART
    """Maximum number of messages after `after`."""
    first: Seq = 0
    """With `last`: return this whole range, including hidden messages."""
    last: Seq = 0


class PageItem(Struct, frozen=True, kw_only=True):
    """One row of the page: a message, a gap of hidden messages, or a range of damaged ones."""

    message: MessageView | None = None
    gap: Gap | None = None
    lost: Span | None = None
    """First and last seq of damaged messages."""


class PagePart(Struct, frozen=True, kw_only=True):
    """Consecutive rows of a conversation."""

    items: Sequence[PageItem]
    first: int
    """Seq of the first message, or 0 if the part has none."""
    last: int
    older: bool
    """Whether there are messages before this part."""
    newer: bool
    full: bool
    """Whether hidden messages are included."""
    digest: str
    """Digest of the hidden and damaged messages. If it changes, an open page is out of date."""


class ConversationPage(Struct, frozen=True, kw_only=True):
    """A session and a part of its messages."""

    info: SessionInfo
    title: str
    tags: tuple[str, ...]
    entry: Entry | None
    part: PagePart
    fork_key: str
    damage: str
    """Description of the damage; empty if the session is intact."""


async def conversation(request: Request) -> Response:
    """Serve the page of a session."""
    call = parse_query(request, ConversationQuery)
    entry = await entry_of(call)
    query = call.query
    found = await call.gateway.loop.run(_load_page, call.agent, call.key, query, entry)
    return page("conversation.html", found=found, part=found.part, agent=query.agent, query=query)


async def fragment(request: Request) -> Response:
    """Serve more messages for a page that is already open."""
    call = parse_query(request, PartQuery)
    # A page that shows the end also displays the current state of the session.
    query = call.query
    entry = await entry_of(call) if query.after is not None else None
    info, part = await call.gateway.loop.run(_load_part, call.agent, call.key, query)
    return page("part.html", info=info, entry=entry, part=part, agent=query.agent, query=query)


# --- reading ---------------------------------------------------------------------------------


def _load_page(
    agent: AgentInstance, key: str, query: ConversationQuery, entry: Entry | None
) -> ConversationPage:
    store = agent.store
    own = agent.resolve_key(key)

    def read(info: SessionInfo) -> PagePart:
        if query.at:
            return around(store, info, query.at, full=query.full, chosen=query.chosen)
        return newest(store, info, full=query.full, chosen=query.chosen)

    info, part = read_again_if_damaged(store, own, read)
    return ConversationPage(
        info=info,
        title=title_of(entry, info),
        tags=tags_from(info.meta),
        entry=entry,
        part=part,
        fork_key=_fork_key(own),
        damage=damage(info.lost, info.damaged, without_password(agent.spec.sessions)),
    )


def read_again_if_damaged(
    store: Store, key: str, read: Callable[[SessionInfo], PagePart]
) -> tuple[SessionInfo, PagePart]:
    """Read a session, and read it again if the first read discovered damage."""
    before = store.info(key)
    part = read(before)
    info = store.info(key)
    if (info.lost, info.damaged) == (before.lost, before.damaged):
        return before, part
    return info, read(info)


def _fork_key(key: str) -> str:
    try:
        return sibling_key(key)
    except UsageError:
        return f"{key}-fork"


def _load_part(agent: AgentInstance, key: str, query: PartQuery) -> tuple[SessionInfo, PagePart]:
    store = agent.store
    return read_again_if_damaged(
        store, agent.resolve_key(key), lambda info: _requested_part(store, info, query)
    )


def _requested_part(store: Store, info: SessionInfo, query: PartQuery) -> PagePart:
    visibility = read_visibility(store, info)
    if query.last:
        first = max(query.first, query.last - _MAX_PART + 1)
        runs = visibility.present
        return _between(store, info, visibility, runs, first, query.last, full=True)
    runs = _runs(store, info, visibility, query.chosen, full=query.full)
    if query.before:
        start = _back(runs, query.before, SIZE)
        return _between(store, info, visibility, runs, start, query.before - 1, full=query.full)
    after = query.after or 0
    end = _forward(runs, after, query.limit)
    return _between(store, info, visibility, runs, after + 1, end, full=query.full)


def _runs(
    store: Store, info: SessionInfo, visibility: Visibility, chosen: MessageFilter, *, full: bool
) -> Sequence[Span]:
    """Return the seqs that the page can show."""
    runs = visibility.present if full else info.in_sight
    if not chosen.is_active:
        return runs
    selected = read_outline(store, info).selected(chosen)
    return spans.minus(runs, spans.minus([(1, info.last_seq)], selected))


def newest(
    store: Store, info: SessionInfo, *, full: bool, chosen: MessageFilter = _EVERYTHING
) -> PagePart:
    """Return the end of a session."""
    if chosen.is_active:
        visibility = read_visibility(store, info)
        runs = _runs(store, info, visibility, chosen, full=full)
        start = _back(runs, info.last_seq + 1, SIZE)
        return _between(store, info, visibility, runs, start, info.last_seq, full=full)
    history = store.get_history(info.key, last=SIZE + _RESULT_MARGIN, full=full)
    start = max(0, len(history) - SIZE)
    while start > 0 and results_of(history[start].to_dict()):
        start -= 1
    visibility = read_visibility(store, info)
    return _part(info, visibility, history[start:], full=full, older=start > 0, newer=False)


def around(
    store: Store,
    info: SessionInfo,
    at: int,
    *,
    full: bool,
    chosen: MessageFilter = _EVERYTHING,
) -> PagePart:
    """Return the messages around `at`. If that one is hidden, include all hidden messages."""
    at = min(at, info.last_seq)
    full = full or not spans.contains(info.in_sight, at)
    visibility = read_visibility(store, info)
    runs = _runs(store, info, visibility, chosen, full=full)
    start = _back(runs, at, SIZE // 2)
    end = _forward(runs, at, SIZE // 2)
    return _between(store, info, visibility, runs, start, end, full=full)


def _between(
    store: Store,
    info: SessionInfo,
    visibility: Visibility,
    runs: Sequence[Span],
    first: int,
    last: int,
    *,
    full: bool,
) -> PagePart:
    end = _forward(runs, last, _RESULT_MARGIN)
    history = _read(store, info, runs, max(1, first), end)
    found = [one for one in history if one.seq <= last]
    later = history[len(found) :]
    older = _back(runs, first, 1) < first
    return _part(info, visibility, found, later, full=full, older=older, newer=bool(later))


def _read(
    store: Store, info: SessionInfo, runs: Sequence[Span], first: int, last: int
) -> list[Message]:
    """Return the messages of `runs` with seqs from `first` to `last`."""
    behind = spans.size(spans.clipped(runs, last + 1, info.last_seq))
    if isinstance(store, SnapshotStore) and behind > max(_MAX_DISCARDED, last - first):
        try:
            history = _read_up_to(store, info, first, last)
        except StenologError:
            # The session is damaged or was replaced again and again: use the ordinary read.
            history = store.get_history(info.key, after=first - 1, full=True)
    else:
        full = tuple(runs) != info.in_sight
        history = store.get_history(info.key, after=first - 1, full=full)
    return [one for one in history if one.seq <= last and spans.contains(runs, one.seq)]


def message_at(agent: AgentInstance, key: str, seq: int) -> Message | None:
    """Return one message, visible or hidden; None if the session has none with this seq."""
    info = agent.store.info(agent.resolve_key(key))
    present = read_visibility(agent.store, info).present
    return next(iter(_read(agent.store, info, present, seq, seq)), None)


def _read_up_to(store: SnapshotStore, info: SessionInfo, first: int, last: int) -> list[Message]:
    """Return all messages from `first` to `last`, visible or hidden, without reading later ones."""
    mark = SnapshotMark(key=info.key, uid=info.uid, stamp="")
    made: list[Message] = []
    with store.read_snapshot(mark, after=first - 1) as reading:
        for one in reading.messages:
            if one.seq > last:
                break
            made.append(replace(one, hidden=not spans.contains(info.in_sight, one.seq)))
    return made


def _part(
    info: SessionInfo,
    visibility: Visibility,
    history: Sequence[Message],
    later: Sequence[Message] = (),
    *,
    full: bool,
    older: bool,
    newer: bool,
) -> PagePart:
    runs = visibility.gaps
    first = history[0].seq if history else 0
    # A gap is placed before the next message. Gaps before the first message of all count too.
    shown_upto = _last_before(info.in_sight, first) if first else 0
    above = _last_before(visibility.present, first) if full and first else shown_upto
    items: list[PageItem] = []
    for message in message_views(history, later):
        if full:
            # All messages are shown; mark only the point from which the model sees them.
            here = [run for run in runs if run.has_summary and shown_upto <= run.last < message.seq]
        else:
            here = [run for run in runs if shown_upto < run.first and run.last < message.seq]
        items += [PageItem(gap=run) for run in here]
        items += _lost_items(visibility, above, message.seq)
        items.append(PageItem(message=message))
        shown_upto = above = message.seq
    if not newer and not full:
        items += [PageItem(gap=run) for run in runs if run.first > shown_upto]
    elif not newer:
        items += [
            PageItem(gap=run) for run in runs if run.has_summary and run.last >= shown_upto > 0
        ]
    if not newer:
        items += _lost_items(visibility, above, info.last_seq + 1)
    return PagePart(
        items=items,
        first=first,
        last=history[-1].seq if history else 0,
        older=older,
        newer=newer,
        full=full,
        digest=_digest(info, visibility),
    )


def _lost_items(visibility: Visibility, after: int, before: int) -> list[PageItem]:
    return [PageItem(lost=run) for run in spans.clipped(visibility.lost, after + 1, before - 1)]


def _digest(info: SessionInfo, visibility: Visibility) -> str:
    """Return a digest of summary, gaps and damage. Appending messages does not change it."""
    state = ascii((info.uid, info.summary, list(visibility.gaps)))
    state += ascii((list(visibility.lost), info.damaged))
    return blake2b(state.encode(), digest_size=8).hexdigest()


# --- seq arithmetic --------------------------------------------------------------------------


def _last_before(in_sight: Sequence[Span], seq: int) -> int:
    """Return the last seq of these ranges before `seq`, or 0."""
    before = [min(end, seq - 1) for first, end in in_sight if first < seq]
    return before[-1] if before else 0


def _back(runs: Sequence[Span], seq: int, count: int) -> int:
    """Return the seq at which the last `count` messages of `runs` before `seq` start."""
    left = count
    for first, end in reversed(runs):
        last = min(end, seq - 1)
        if last < first:
            continue
        if last - first + 1 >= left:
            return last - left + 1
        left -= last - first + 1
        seq = first
    return seq


def _forward(runs: Sequence[Span], seq: int, count: int) -> int:
    """Return the seq at which the first `count` messages of `runs` after `seq` end."""
    left = count
    for first, end in runs:
        start = max(first, seq + 1)
        if start > end:
            continue
        if end - start + 1 >= left:
            return start + left - 1
        left -= end - start + 1
        seq = end
    return seq
