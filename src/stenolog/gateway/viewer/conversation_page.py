"""Conversation page: some messages of a session, with markers for hidden and damaged messages.

If the store supports partial reads, only the shown messages are read. The end of a long session
appears at once, and older messages are loaded on request. A search in the session reads all
messages.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from itertools import takewhile
from time import monotonic
from typing import Annotated, Any, Final

from msgspec import Meta, Struct
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from stenolog.agent.commands import sibling_key
from stenolog.agent.instance import AgentInstance
from stenolog.catalog.entries import Entry
from stenolog.catalog.searchable_text import text_of
from stenolog.errors import UsageError
from stenolog.gateway.requests import MAX_SEQ, AgentQuery, ApiCall, Seq, parse_query
from stenolog.gateway.responses import json_response
from stenolog.gateway.viewer.hidden_messages import SUMMARIZED, Gap, read_visibility
from stenolog.gateway.viewer.message_views import MessageView, message_views
from stenolog.gateway.viewer.pages import (
    CATALOG_WAIT_SECONDS,
    entry_of,
    page,
    run_within,
    session_header,
)
from stenolog.gateway.viewer.session_outline import MessageFilter, read_outline
from stenolog.gateway.viewer.templating import damage_html
from stenolog.messages import ThinkingPart, read_message, results_of
from stenolog.records import Message, SessionInfo, Span
from stenolog.sessions.fork_source import find_fork_source
from stenolog.settings.values import mask_secrets
from stenolog.stores import spans
from stenolog.stores.base import Store
from stenolog.stores.snapshots import iterate_messages
from stenolog.transfer.transcripts.program_messages import is_in_place

MESSAGES_PER_PART: Final = 50
_MAX_PART_MESSAGES: Final = 400
"""Maximum number of messages in one part, when a whole range is requested."""
_RESULT_MARGIN: Final = 50
"""Number of additional messages that are read to find the results of the last calls."""
# If more messages would be discarded, a snapshot is read: reading a snapshot can stop early.
_MAX_DISCARDED: Final = 2_000
"""Maximum number of messages after a part that are read and discarded."""
_ALL_MESSAGES: Final = MessageFilter(full=True)


class ConversationQuery(MessageFilter, frozen=True, kw_only=True):
    """Query of the conversation page."""

    at: Seq = 0
    """Seq of the message to show in the middle. 0 shows the end."""
    q: Annotated[str, Meta(max_length=1_000)] = ""
    """Words to search for in this session. The page runs the search after it has opened."""


class PartQuery(MessageFilter, frozen=True, kw_only=True):
    """Query of a part of the conversation, for a page that is already open."""

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
    last_prompt: int
    """Seq of the last prompt, after which tools may be running; of the session's end if unknown."""


async def conversation(request: Request) -> Response:
    """Serve the page of a session."""
    call = parse_query(request, ConversationQuery)
    entry = await entry_of(call)
    query, read_only = call.query, call.gateway.read_only
    view, part = await call.gateway.loop.run(
        _load_page, call.agent, call.key, query, entry, read_only
    )
    return page("conversation.html", view=view, part=part, agent=query.agent, query=query)


async def fragment(request: Request) -> Response:
    """Serve more messages for a page that is already open."""
    call = parse_query(request, PartQuery)
    query = call.query
    # With newer messages, the page also gets the session's current state, which is in the entry.
    entry = await entry_of(call) if query.after is not None else None
    read_only = call.gateway.read_only
    info, part = await call.gateway.loop.run(_load_part, call.agent, call.key, query, read_only)
    return page("part.html", info=info, entry=entry, part=part, agent=query.agent, query=query)


# --- reading ---------------------------------------------------------------------------------


def _load_page(
    agent: AgentInstance,
    key: str,
    page_query: ConversationQuery,
    entry: Entry | None,
    read_only: bool,
) -> tuple[dict[str, Any], PagePart]:
    store = agent.store
    session_key = agent.resolve_key(key)

    def read(info: SessionInfo) -> PagePart:
        message_filter = _with_default_visibility(page_query, info, read_only)
        if page_query.at:
            return part_around(store, info, page_query.at, message_filter)
        return newest_part(store, info, message_filter)

    info, part = read_again_if_damaged(store, session_key, read)
    lost_spans = read_visibility(store, info).lost if info.lost else ()
    shows_hidden = _shows_hidden_by_default(info, read_only)
    chosen = ("full=false",) if shows_hidden and page_query.full is False else ()
    return {
        **session_header(info, entry, find_fork_source(store, info)),
        "fork_key": _suggest_fork_key(session_key),
        "filter": "&".join(filter(None, (page_query.filter_text, *chosen))),
        "shows_hidden": shows_hidden,
        "damage": damage_html(info.lost, info.damaged, mask_secrets(agent.spec.sessions)),
        "first_lost": lost_spans[0][0] if lost_spans else None,
    }, part


def _shows_hidden_by_default(info: SessionInfo, read_only: bool) -> bool:
    """Return whether readers want to see what happened, not what the model sees next."""
    return read_only or is_in_place(info)


def _with_default_visibility(
    message_filter: MessageFilter, info: SessionInfo, read_only: bool
) -> MessageFilter:
    if message_filter.full is None and _shows_hidden_by_default(info, read_only):
        return replace(message_filter, full=True)
    return message_filter


def read_again_if_damaged(
    store: Store, key: str, read_part: Callable[[SessionInfo], PagePart]
) -> tuple[SessionInfo, PagePart]:
    """Return the info and a part of a session. Read both again if reading discovered damage."""
    old_info = store.info(key)
    part = read_part(old_info)
    info = store.info(key)
    if (info.lost, info.damaged) == (old_info.lost, old_info.damaged):
        return old_info, part
    return info, read_part(info)


def _suggest_fork_key(key: str) -> str:
    try:
        return sibling_key(key)
    except UsageError:
        return f"{key}-fork"


def _load_part(
    agent: AgentInstance, key: str, part_query: PartQuery, read_only: bool
) -> tuple[SessionInfo, PagePart]:
    store = agent.store

    def read(info: SessionInfo) -> PagePart:
        if part_query.last:
            first = max(part_query.first, part_query.last - _MAX_PART_MESSAGES + 1)
            return _PartReader(store, info, _ALL_MESSAGES).read_part(first, part_query.last)
        reader = _PartReader(store, info, _with_default_visibility(part_query, info, read_only))
        if part_query.before:
            first = _start_seq_before(reader.shown, part_query.before, MESSAGES_PER_PART)
            return reader.read_part(first, part_query.before - 1)
        after = part_query.after or 0
        return reader.read_part(after + 1, _end_seq_after(reader.shown, after, part_query.limit))

    return read_again_if_damaged(store, agent.resolve_key(key), read)


def newest_part(store: Store, info: SessionInfo, message_filter: MessageFilter) -> PagePart:
    """Return the newest messages of a session."""
    reader = _PartReader(store, info, message_filter)
    if message_filter.filter_text:
        first_seq = _start_seq_before(reader.shown, info.last_seq + 1, MESSAGES_PER_PART)
        return reader.read_part(first_seq, info.last_seq)
    count = MESSAGES_PER_PART + _RESULT_MARGIN
    history = store.get_history(info.key, last=count, full=bool(message_filter.full))
    start = max(0, len(history) - MESSAGES_PER_PART)
    while start > 0 and results_of(history[start].to_dict()):
        start -= 1
    return reader.make_part(history[start:], has_older=start > 0)


def part_around(
    store: Store, info: SessionInfo, seq: int, message_filter: MessageFilter
) -> PagePart:
    """Return the messages around `seq`. Hidden messages are included by default if it is hidden."""
    seq = min(seq, info.last_seq)
    if message_filter.full is None and not spans.contains(info.visible_spans, seq):
        message_filter = replace(message_filter, full=True)
    reader = _PartReader(store, info, message_filter)
    start = _start_seq_before(reader.shown, seq, MESSAGES_PER_PART // 2)
    return reader.read_part(start, _end_seq_after(reader.shown, seq, MESSAGES_PER_PART // 2))


class _PartReader:
    """Reader of parts of a conversation."""

    def __init__(self, store: Store, info: SessionInfo, message_filter: MessageFilter) -> None:
        self._store = store
        self._info = info
        self._full = bool(message_filter.full)
        self._visibility = read_visibility(store, info)
        self.shown: Sequence[Span] = self._visibility.present if self._full else info.visible_spans
        """Seqs of the messages that the page can show."""
        if message_filter.filter_text:
            selected_spans = read_outline(store, info).selected_spans(message_filter)
            excluded_spans = spans.minus([(1, info.last_seq)], selected_spans)
            self.shown = spans.minus(self.shown, excluded_spans)

    def read_part(self, first: int, last: int) -> PagePart:
        """Return the part with the shown messages from seq `first` to `last`."""
        end = _end_seq_after(self.shown, last, _RESULT_MARGIN)
        messages = self.read_messages(max(1, first), end)
        history = [message for message in messages if message.seq <= last]
        has_older = _start_seq_before(self.shown, first, 1) < first
        return self.make_part(history, messages[len(history) :], has_older=has_older)

    def read_messages(self, first: int, last: int) -> list[Message]:
        """Return the shown messages with seqs from `first` to `last`."""
        store, info = self._store, self._info
        discarded = spans.size(spans.clipped(self.shown, last + 1, info.last_seq))
        if discarded > max(_MAX_DISCARDED, last - first):
            all_messages = iterate_messages(store, info, first - 1)
            history: Iterable[Message] = (
                replace(message, hidden=not spans.contains(info.visible_spans, message.seq))
                for message in takewhile(lambda message: message.seq <= last, all_messages)
            )
        else:
            full = tuple(self.shown) != info.visible_spans
            history = store.get_history(info.key, after=first - 1, full=full)
        wanted_spans = spans.clipped(self.shown, first, last)
        return [message for message in history if spans.contains(wanted_spans, message.seq)]

    def make_part(
        self, history: Sequence[Message], later: Sequence[Message] = (), *, has_older: bool
    ) -> PagePart:
        """Return the rows of `history`. Results of its calls may be in the `later` messages."""
        info, visibility = self._info, self._visibility
        first = history[0].seq if history else 0
        # A gap of hidden messages is shown before the next message, even before the first one.
        gaps_after = _seq_before(info.visible_spans, first) if first else 0
        lost_after = _seq_before(visibility.present, first) if self._full and first else gaps_after
        items: list[PageItem] = []
        # Before a compaction of another program all messages are hidden, so marks say nothing.
        mark_hidden = not (self._full and info.summary and is_in_place(info))
        for message in message_views(history, later, mark_hidden=mark_hidden):
            items += self._gap_items(gaps_after, message.seq)
            items += self._lost_items(lost_after, message.seq)
            items.append(PageItem(message=message))
            gaps_after = lost_after = message.seq
        if not later:
            if gaps_after or not self._full:
                items += self._gap_items(gaps_after, MAX_SEQ + 1)
            items += self._lost_items(lost_after, info.last_seq + 1)
        messages = [item.message for item in items if item.message is not None]
        summary_seqs = [message.seq for message in messages if message.is_summary]
        if self._full:
            # The summary is shown once: as the message that the program wrote, if there is one.
            items = [item for item in items if not _has_summary_message(item.gap, summary_seqs)]
        prompts = [message.seq for message in messages if message.kind == "user"]
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
            last_prompt=MAX_SEQ if later else max(prompts, default=0),
        )

    def _gap_items(self, after: int, before: int) -> list[PageItem]:
        gaps = [gap for gap in self._visibility.gaps if gap.last < before]
        if self._full:
            # All messages are shown, so mark only where the messages that the model sees start.
            return [PageItem(gap=gap) for gap in gaps if gap.has_summary and gap.last >= after]
        return [PageItem(gap=gap) for gap in gaps if gap.first > after]

    def _lost_items(self, after: int, before: int) -> list[PageItem]:
        lost_spans = spans.clipped(self._visibility.lost, after + 1, before - 1)
        return [PageItem(lost=span) for span in lost_spans]


def _has_summary_message(gap: Gap | None, summary_seqs: Iterable[int]) -> bool:
    """Return whether the summary of a gap is one of the messages, in the gap or after it."""
    return gap is not None and any(seq >= gap.first for seq in summary_seqs)


# --- seq arithmetic --------------------------------------------------------------------------


def _seq_before(ranges: Sequence[Span], seq: int) -> int:
    """Return the last seq before `seq` that is in these ranges, or 0."""
    earlier = spans.clipped(ranges, 1, seq - 1)
    return earlier[-1][1] if earlier else 0


def _start_seq_before(ranges: Sequence[Span], seq: int, count: int) -> int:
    """Return the first of the last `count` seqs before `seq` in these ranges, or else `seq`."""
    earlier = spans.last_seqs(spans.clipped(ranges, 1, seq - 1), count)
    return earlier[0][0] if earlier else seq


def _end_seq_after(ranges: Sequence[Span], seq: int, count: int) -> int:
    """Return the last of the first `count` seqs after `seq` in these ranges, or else `seq`."""
    for first, last in spans.clipped(ranges, seq + 1, MAX_SEQ):
        if last - first + 1 >= count:
            return first + count - 1
        count -= last - first + 1
        seq = last
    return seq


# --- search -----------------------------------------------------------------------------------


_MAX_RESULTS: Final = 10_000
_MAX_CATALOG_HITS: Final = 200
_MAX_SEARCH_SECONDS: Final = 5.0
"""Seconds after which a search ends and returns the matches so far."""
_TERM_PATTERN: Final = re.compile(r'"([^"]+)"|(\S+)')
_ESCAPABLE: Final = re.compile(r'["\\/\x00-\x1f]')
"""Characters that JSON may contain as an escape sequence."""


class FindQuery(AgentQuery, frozen=True, kw_only=True):
    """Query of a search in one session."""

    q: Annotated[str, Meta(max_length=1_000)] = ""


class SessionSearchResult(Struct, frozen=True, kw_only=True):
    """Result of a search in one session."""

    seqs: Sequence[int]
    """Seqs of the messages that contain all words, ascending, including hidden messages."""
    words: Sequence[str]
    """Words to highlight in the matching messages."""
    complete: bool
    """Whether the whole session was searched."""


async def find_messages(request: Request) -> Response:
    """Return the messages of a session that contain all words of a query."""
    call = parse_query(request, FindQuery)
    result = await call.gateway.loop.run(_search_messages, call.agent, call.key, call.query.q)
    if result.complete and result.words and not result.seqs:
        result = await _search_catalog(call) or result
    return json_response(result)


def search_words(text: str) -> list[str]:
    """Return the words and quoted phrases of a search, in lower case."""
    terms = (
        quoted or word.removesuffix("*") for quoted, word in _TERM_PATTERN.findall(text.casefold())
    )
    return list(dict.fromkeys(" ".join(term.split()) for term in terms if term.strip()))


def _search_messages(agent: AgentInstance, key: str, search_text: str) -> SessionSearchResult:
    words = search_words(search_text)
    if not words:
        return SessionSearchResult(seqs=(), words=(), complete=True)
    store = agent.store
    info = store.info(agent.resolve_key(key))
    deadline = monotonic() + _MAX_SEARCH_SECONDS
    seqs: list[int] = []
    for message in iterate_messages(store, info):
        if monotonic() > deadline:
            return SessionSearchResult(seqs=seqs, words=words, complete=False)
        if _may_contain(message, words) and _contains_words(message.to_dict(), words):
            seqs.append(message.seq)
            if len(seqs) >= _MAX_RESULTS:
                return SessionSearchResult(seqs=seqs, words=words, complete=False)
    return SessionSearchResult(seqs=seqs, words=words, complete=True)


def _may_contain(message: Message, words: Sequence[str]) -> bool:
    """Return whether a message may contain all words, judged by its stored JSON.

    Decoding every message would be slower.
    """
    stored_json = message.to_json()
    if b"\\u" in stored_json:
        return True
    text = stored_json.decode(errors="replace").casefold()
    return all(word in text for word in words if " " not in word and not _ESCAPABLE.search(word))


def _contains_words(body: Mapping[str, Any], words: Sequence[str]) -> bool:
    thoughts = (part.text for part in read_message(body) if isinstance(part, ThinkingPart))
    text = "\n".join((text_of(body), *thoughts)).casefold()
    if any(" " in word for word in words):
        text = " ".join(text.split())
    return all(word in text for word in words)


async def _search_catalog(call: ApiCall[FindQuery, None]) -> SessionSearchResult | None:
    """Search in the catalog, which also finds words that differ only in their accents.

    Returns None if the catalog finds nothing or is not ready.
    """
    agent, query = call.agent, call.query.q
    key = agent.resolve_key(call.key)
    result = await run_within(
        call.gateway,
        8 * CATALOG_WAIT_SECONDS,
        lambda: agent.catalog.search(query, prefix=key, newest=True, limit=_MAX_CATALOG_HITS),
    )
    hits = [] if result is None else [hit for hit in result.hits if hit.key == key]
    if result is None or not hits:
        return None
    words = {hit.snippet[first:last].casefold() for hit in hits for first, last in hit.marks}
    seqs = sorted(hit.seq for hit in hits)
    return SessionSearchResult(seqs=seqs, words=sorted(words), complete=result.after is None)
