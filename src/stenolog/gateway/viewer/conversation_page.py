"""Conversation page: some messages of a session, with markers for hidden and damaged messages.

If the store supports partial reads, only the shown messages are read. The end of a long session
appears at once, and older messages are loaded on request.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import Annotated, Final, Literal

from msgspec import Meta, Struct
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from stenolog.agent.commands import sibling_key
from stenolog.agent.instance import AgentInstance
from stenolog.catalog.entries import Entry
from stenolog.catalog.searchable_text import last_copied_from, source_from
from stenolog.errors import StenologError, UsageError
from stenolog.gateway.api_types import MAX_SEQ, AgentQuery
from stenolog.gateway.requests import parse_query
from stenolog.gateway.viewer.formatting import damage_html
from stenolog.gateway.viewer.hidden_messages import SUMMARIZED, Gap, read_visibility
from stenolog.gateway.viewer.message_views import MessageView, message_views
from stenolog.gateway.viewer.pages import SessionPage, entry_of, page
from stenolog.gateway.viewer.session_outline import MessageFilter, all_messages, read_outline
from stenolog.messages import results_of
from stenolog.records import Message, SessionInfo, Span
from stenolog.settings.secrets import without_password
from stenolog.stores import spans
from stenolog.stores.base import Store, forked_at
from stenolog.stores.snapshots import SnapshotMark, SnapshotStore
from stenolog.transfer.transcripts.transcript import identity_of

MESSAGES_PER_PART: Final = 50
_MAX_PART_MESSAGES: Final = 400
"""Maximum number of messages in one part, when a whole range is requested."""
_RESULT_MARGIN: Final = 50
"""Number of additional messages that are read to find the results of the last calls."""
# If more messages would be discarded, a snapshot is read, because its reading can stop early.
_MAX_DISCARDED: Final = 2_000
"""Maximum number of later messages that are read and discarded."""
_MAX_SEARCHED: Final = 20_000
"""The source session of a fork is searched only if it has at most this many messages."""

Seq = Annotated[int, Meta(ge=0, le=MAX_SEQ)]
_ALL_KINDS: Final = MessageFilter()


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
    def kinds(self) -> MessageFilter:
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
    """Words to search in this session. The open page runs the search."""


class PartQuery(FilterQuery, frozen=True, kw_only=True):
    """Query of a part for a page that is already open."""

    before: Seq = 0
    after: Seq | None = None
    limit: Annotated[int, Meta(ge=1, le=_MAX_PART_MESSAGES)] = _MAX_PART_MESSAGES
    """Maximum number of messages to return after the seq `after`."""
    first: Seq = 0
    """With `last`: return the whole range from `first` to `last`, including hidden messages."""
    last: Seq = 0


class PageItem(Struct, frozen=True, kw_only=True):
    """One row of the page: a message, a gap of hidden messages, or a range of damaged messages."""

    message: MessageView | None = None
    gap: Gap | None = None
    lost: Span | None = None
    """First and last seq of damaged messages."""


class PagePart(Struct, frozen=True, kw_only=True):
    """Consecutive rows of a conversation."""

    items: Sequence[PageItem]
    first: int
    """Seq of the first message, or 0 if the part has no messages."""
    last: int
    has_older: bool
    """Whether there are messages before this part."""
    has_newer: bool
    full: bool
    """Whether hidden messages are included."""
    summarized: int
    """Number of messages of the session that a summary replaces."""
    digest: str
    """Digest of the hidden and damaged messages. If the digest changes, open pages are outdated."""


class ConversationPage(SessionPage, frozen=True, kw_only=True):
    """A session and a part of its messages."""

    part: PagePart
    source_seq: int
    """Seq of the source session's last message before the fork; 0 if unknown or not a fork."""
    fork_key: str
    damage: str
    """Description of the damage; empty if the session is intact."""
    first_lost: int | None
    """Seq of the first damaged message; None if no message is damaged."""


async def conversation(request: Request) -> Response:
    """Serve the page of a session."""
    call = parse_query(request, ConversationQuery)
    entry = await entry_of(call)
    query = call.query
    view = await call.gateway.loop.run(_load_page, call.agent, call.key, query, entry)
    return page("conversation.html", view=view, part=view.part, agent=query.agent, query=query)


async def fragment(request: Request) -> Response:
    """Serve more messages for a page that is already open."""
    call = parse_query(request, PartQuery)
    # A page that shows the end of a session also shows the session's current state.
    query = call.query
    entry = await entry_of(call) if query.after is not None else None
    info, part = await call.gateway.loop.run(_load_part, call.agent, call.key, query)
    return page("part.html", info=info, entry=entry, part=part, agent=query.agent, query=query)


# --- reading ---------------------------------------------------------------------------------


def _load_page(
    agent: AgentInstance, key: str, query: ConversationQuery, entry: Entry | None
) -> ConversationPage:
    store = agent.store
    session_key = agent.resolve_key(key)

    def read(info: SessionInfo) -> PagePart:
        if query.at:
            return part_around(store, info, query.at, full=query.full, kinds=query.kinds)
        return newest_part(store, info, full=query.full, kinds=query.kinds)

    info, part = read_again_if_damaged(store, session_key, read)
    lost_spans = read_visibility(store, info).lost if info.lost else ()
    return ConversationPage(
        info=info,
        entry=entry,
        part=part,
        source_seq=_source_seq(store, info),
        fork_key=_fork_key(session_key),
        damage=damage_html(info.lost, info.damaged, without_password(agent.spec.sessions)),
        first_lost=lost_spans[0][0] if lost_spans else None,
    )


def read_again_if_damaged(
    store: Store, key: str, read: Callable[[SessionInfo], PagePart]
) -> tuple[SessionInfo, PagePart]:
    """Read a session. Read the session again if the first read discovered damage."""
    old_info = store.info(key)
    part = read(old_info)
    info = store.info(key)
    if (info.lost, info.damaged) == (old_info.lost, old_info.damaged):
        return old_info, part
    return info, read(info)


def _source_seq(store: Store, info: SessionInfo) -> int:
    """Return the seq of the last message before the fork in the source session, or 0.

    If another program made the fork, the meta has the identity of this message instead of its seq,
    because the seqs may differ.
    """
    source, identity = info.forked_from or source_from(info.meta), last_copied_from(info.meta)
    if forked_at(info) or not (source and identity):
        return forked_at(info)
    encoded_id = identity.encode()
    with suppress(StenologError):  # The source may be missing or damaged, or have an invalid key.
        source_info = store.info(source)
        messages = all_messages(store, source_info) if source_info.count <= _MAX_SEARCHED else ()
        candidates = (m for m in messages if encoded_id in m.to_json())
        return max((m.seq for m in candidates if identity_of(m.to_dict()) == identity), default=0)
    return 0


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
    if query.last:
        first = max(query.first, query.last - _MAX_PART_MESSAGES + 1)
        return _PartReader(store, info, full=True).part_between(first, query.last)
    reader = _PartReader(store, info, full=query.full, kinds=query.kinds)
    if query.before:
        return reader.part_between(
            _start_of_last(reader.shown, query.before, MESSAGES_PER_PART), query.before - 1
        )
    after = query.after or 0
    return reader.part_between(after + 1, _end_of_first(reader.shown, after, query.limit))


def newest_part(
    store: Store, info: SessionInfo, *, full: bool, kinds: MessageFilter = _ALL_KINDS
) -> PagePart:
    """Return the newest messages of a session."""
    reader = _PartReader(store, info, full=full, kinds=kinds)
    if kinds.is_active:
        start = _start_of_last(reader.shown, info.last_seq + 1, MESSAGES_PER_PART)
        return reader.part_between(start, info.last_seq)
    history = store.get_history(info.key, last=MESSAGES_PER_PART + _RESULT_MARGIN, full=full)
    start = max(0, len(history) - MESSAGES_PER_PART)
    while start > 0 and results_of(history[start].to_dict()):
        start -= 1
    return reader.make_part(history[start:], has_older=start > 0)


def part_around(
    store: Store, info: SessionInfo, at: int, *, full: bool, kinds: MessageFilter = _ALL_KINDS
) -> PagePart:
    """Return the messages around seq `at`. If `at` is hidden, include all hidden messages."""
    at = min(at, info.last_seq)
    full = full or not spans.contains(info.in_sight, at)
    reader = _PartReader(store, info, full=full, kinds=kinds)
    start = _start_of_last(reader.shown, at, MESSAGES_PER_PART // 2)
    return reader.part_between(start, _end_of_first(reader.shown, at, MESSAGES_PER_PART // 2))


def message_at(agent: AgentInstance, key: str, seq: int) -> Message | None:
    """Return the visible or hidden message with this seq; None if there is no such message."""
    info = agent.store.info(agent.resolve_key(key))
    messages = _PartReader(agent.store, info, full=True).read_messages(seq, seq)
    return messages[0] if messages else None


class _PartReader:
    """Reader of parts of a session. With `full`, hidden messages are included."""

    def __init__(
        self, store: Store, info: SessionInfo, *, full: bool, kinds: MessageFilter = _ALL_KINDS
    ) -> None:
        self._store = store
        self._info = info
        self._full = full
        self._visibility = read_visibility(store, info)
        self.shown: Sequence[Span] = self._visibility.present if full else info.in_sight
        """Seqs that the page can show."""
        if kinds.is_active:
            selected_spans = read_outline(store, info).selected_spans(kinds)
            excluded_spans = spans.minus([(1, info.last_seq)], selected_spans)
            self.shown = spans.minus(self.shown, excluded_spans)

    def part_between(self, first: int, last: int) -> PagePart:
        """Return the shown messages with seqs from `first` to `last`."""
        end = _end_of_first(self.shown, last, _RESULT_MARGIN)
        messages = self.read_messages(max(1, first), end)
        history = [message for message in messages if message.seq <= last]
        has_older = _start_of_last(self.shown, first, 1) < first
        return self.make_part(history, messages[len(history) :], has_older=has_older)

    def read_messages(self, first: int, last: int) -> list[Message]:
        """Return the shown messages with seqs from `first` to `last`."""
        store, info = self._store, self._info
        discarded = spans.size(spans.clipped(self.shown, last + 1, info.last_seq))
        if isinstance(store, SnapshotStore) and discarded > max(_MAX_DISCARDED, last - first):
            try:
                history = _read_up_to(store, info, first, last)
            except StenologError:
                # The session is damaged or was replaced repeatedly: read it with `get_history`.
                history = store.get_history(info.key, after=first - 1, full=True)
        else:
            full = tuple(self.shown) != info.in_sight
            history = store.get_history(info.key, after=first - 1, full=full)
        wanted_spans = spans.clipped(self.shown, first, last)
        return [message for message in history if spans.contains(wanted_spans, message.seq)]

    def make_part(
        self, history: Sequence[Message], later: Sequence[Message] = (), *, has_older: bool
    ) -> PagePart:
        """Return the rows of `history`. `later` messages may have results of calls in `history`."""
        info, visibility = self._info, self._visibility
        first = history[0].seq if history else 0
        # A gap of hidden messages is shown before the next message, even before the first one.
        last_shown = _last_before(info.in_sight, first) if first else 0
        last_above = _last_before(visibility.present, first) if self._full and first else last_shown
        items: list[PageItem] = []
        for message in message_views(history, later):
            items += self._gap_items(last_shown, message.seq)
            items += self._lost_items(last_above, message.seq)
            items.append(PageItem(message=message))
            last_shown = last_above = message.seq
        if not later:
            if last_shown or not self._full:
                items += self._gap_items(last_shown, MAX_SEQ + 1)
            items += self._lost_items(last_above, info.last_seq + 1)
        # Appending messages does not change the digest.
        digest_source = ascii((info.uid, info.summary, list(visibility.gaps)))
        digest_source += ascii((list(visibility.lost), info.damaged))
        return PagePart(
            items=items,
            first=first,
            last=history[-1].seq if history else 0,
            has_older=has_older,
            has_newer=bool(later),
            full=self._full,
            summarized=sum(gap.count for gap in visibility.gaps if gap.reason == SUMMARIZED),
            digest=blake2b(digest_source.encode(), digest_size=8).hexdigest(),
        )

    def _gap_items(self, after: int, before: int) -> list[PageItem]:
        gaps = [gap for gap in self._visibility.gaps if gap.last < before]
        if self._full:
            # All messages are shown. Mark only the position after which the model sees messages.
            return [PageItem(gap=gap) for gap in gaps if gap.has_summary and gap.last >= after]
        return [PageItem(gap=gap) for gap in gaps if gap.first > after]

    def _lost_items(self, after: int, before: int) -> list[PageItem]:
        lost_spans = spans.clipped(self._visibility.lost, after + 1, before - 1)
        return [PageItem(lost=span) for span in lost_spans]


def _read_up_to(store: SnapshotStore, info: SessionInfo, first: int, last: int) -> list[Message]:
    """Return all messages from `first` to `last`, visible or hidden, and read no later message."""
    mark = SnapshotMark(key=info.key, uid=info.uid, stamp="")
    messages: list[Message] = []
    with store.read_snapshot(mark, after=first - 1) as reading:
        for message in reading.messages:
            if message.seq > last:
                break
            hidden = not spans.contains(info.in_sight, message.seq)
            messages.append(replace(message, hidden=hidden))
    return messages


# --- seq arithmetic --------------------------------------------------------------------------


def _last_before(visible: Sequence[Span], seq: int) -> int:
    """Return the last seq before `seq` that is in these ranges, or 0."""
    ends = [min(end, seq - 1) for first, end in visible if first < seq]
    return ends[-1] if ends else 0


def _start_of_last(runs: Sequence[Span], seq: int, count: int) -> int:
    """Return the seq at which the last `count` messages of `runs` before `seq` start."""
    remaining = count
    for first, end in reversed(runs):
        last = min(end, seq - 1)
        if last < first:
            continue
        if last - first + 1 >= remaining:
            return last - remaining + 1
        remaining -= last - first + 1
        seq = first
    return seq


def _end_of_first(runs: Sequence[Span], seq: int, count: int) -> int:
    """Return the seq at which the first `count` messages of `runs` after `seq` end."""
    remaining = count
    for first, end in runs:
        start = max(first, seq + 1)
        if start > end:
            continue
        if end - start + 1 >= remaining:
            return start + remaining - 1
        remaining -= end - start + 1
        seq = end
    return seq
