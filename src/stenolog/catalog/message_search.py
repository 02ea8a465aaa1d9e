"""Search for messages, and make snippets that show why they match.

The cost of a search is bounded, regardless of the number of matches.

Few matches are all read. Of many, the newest are found block by block (schema.sql), starting with
the blocks that may contain the newest, so that a word in every message is as fast as a rare one.
Ranking is limited to the newest thousand matches. Only if a filter excludes almost all matches of a
common word are all of them read.
"""

import json
import unicodedata
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import islice
from typing import Any, Final

import msgspec
from msgspec import Struct

from stenolog.catalog import tokenizer
from stenolog.catalog.catalog_database import (
    BLOCK_SIZE,
    MAX_INTEGER,
    Database,
    Row,
    Transaction,
    from_microseconds,
    to_microseconds,
)
from stenolog.catalog.entries import Hit, Hits
from stenolog.catalog.query import Query
from stenolog.catalog.tokenizer import Word
from stenolog.errors import UsageError
from stenolog.records import Span
from stenolog.stores import spans

MAX_RANKED: Final = 1_000
"""Maximum number of matches that are ranked; of more, the newest."""

_MAX_SESSION_MARKS: Final = 64
"""Maximum number of sessions in the full-text query; more are filtered afterwards."""

_MAX_BLOCKS: Final = 32
"""Maximum number of blocks per query."""


class SearchFilter(Struct, frozen=True, kw_only=True):
    """Conditions besides the query."""

    role: str | None
    sessions: Sequence[Any] | None
    """Values of session_filter; None: all sessions."""
    since: datetime | None
    until: datetime | None


class _Match(Struct, frozen=True, order=True):
    at: int
    id: int


class _Block(Struct, frozen=True):
    block: int
    oldest: int
    newest: int


class _MatchPage(Struct, frozen=True):
    newest: Sequence[_Match]
    """Matches, newest first."""
    complete: bool
    """Whether these are all matches."""


class FoundGroups(Struct, frozen=True):
    """Search results by session."""

    hits: dict[int, list[Hit]]
    """The best hits of each session of the page, by its id."""
    counts: dict[int, int]
    """Number of matches in each session, also of other pages."""
    exact: bool
    after: int | None


class Search:
    """One search in one read transaction."""

    def __init__(
        self,
        transaction: Transaction,
        database: Database,
        query: Query,
        search_filter: SearchFilter,
    ) -> None:
        self._transaction = transaction
        self._sql = database.sql
        self._fulltext = database.fulltext
        self._query = query
        self._filter = search_filter
        self._sessions = self._filtered_sessions()
        few = self._sessions is not None and len(self._sessions) <= _MAX_SESSION_MARKS
        self._match_values = self._fulltext.match_values(
            query, role=search_filter.role, sessions=sorted(self._sessions or ()) if few else ()
        )
        self._since = (
            to_microseconds(search_filter.since) if search_filter.since is not None else None
        )
        self._until = (
            to_microseconds(search_filter.until) if search_filter.until is not None else None
        )
        self._unlisted = {id_ for (id_,) in transaction.execute(self._sql["unlisted"])}

    def newest(self, limit: int, after: str | None) -> Hits:
        """Return the newest matches first."""
        start = None if after is None else _decode_cursor(after)
        if self._sessions is not None and not self._sessions:
            return Hits(hits=(), count=0, exact=True, after=None)
        found = self._find_newest(limit + 1, start)
        page = found.newest[:limit]
        return Hits(
            hits=[hit for one in page for hit in self._hit(one.id)],
            count=len(found.newest),
            exact=found.complete and start is None,
            after=_encode_cursor(page[-1]) if len(found.newest) > limit else None,
        )

    def best(self, limit: int, after: str | None) -> Hits:
        """Return the best matches first: speech before tools, by BM25; of equal ones the newest."""
        start = _decode_offset(after) if after is not None else 0
        if self._sessions is not None and not self._sessions:
            return Hits(hits=(), count=0, exact=True, after=None)
        found = self._find_newest(MAX_RANKED, None)
        ranked = [one for one, _ in self._ranked(found)]
        page = ranked[start : start + limit]
        end = start + len(page)
        return Hits(
            hits=[hit for one in page for hit in self._hit(one.id)],
            count=len(ranked),
            exact=found.complete,
            after=str(end) if page and end < len(ranked) else None,
        )

    def by_session(self, limit: int, start: int, size: int) -> "FoundGroups":
        """Return the best matches of each session, the session with the best match first."""
        if self._sessions is not None and not self._sessions:
            return FoundGroups({}, {}, exact=True, after=None)
        found = self._find_newest(MAX_RANKED, None)
        groups: dict[int, list[int]] = {}
        for match, session in self._ranked(found):
            groups.setdefault(session, []).append(match.id)
        page = list(groups)[start : start + limit]
        return FoundGroups(
            {one: [hit for id_ in groups[one][:size] for hit in self._hit(id_)] for one in page},
            {one: len(ids) for one, ids in groups.items()},
            exact=found.complete,
            after=start + limit if start + limit < len(groups) else None,
        )

    def _ranked(self, found: "_MatchPage") -> "list[tuple[_Match, int]]":
        """Return the matches with their sessions, the best first."""
        ids = [one.id for one in found.newest]
        ranks = self._ranks(ids)
        rows = self._transaction.execute(self._sql["found_in"], (json.dumps(ids),))
        places = {id_: (session, speech) for id_, session, speech in rows}
        ranked = sorted(
            (one for one in found.newest if one.id in places),
            key=lambda one: (-places[one.id][1], ranks.get(one.id, 0.0), -one.at, -one.id),
        )
        return [(one, places[one.id][0]) for one in ranked]

    # --- matches -----------------------------------------------------------------------------

    def _filtered_sessions(self) -> set[int] | None:
        """Return the selected sessions, or None for all sessions."""
        values = self._filter.sessions
        if values is None:
            return None
        return {id_ for (id_,) in self._transaction.execute(self._sql["sessions_of"], values)}

    def _passes_filter(self, at: int, session: int) -> bool:
        return (
            (self._since is None or at >= self._since)
            and (self._until is None or at < self._until)
            and (self._sessions is None or session in self._sessions)
            and session not in self._unlisted
        )

    def _find_newest(self, count: int, start: _Match | None) -> _MatchPage:
        """Return up to `count` of the newest matches after `start`."""
        rows = list(
            self._transaction.execute(self._sql["matches"], (*self._match_values, MAX_RANKED + 1))
        )
        if len(rows) > MAX_RANKED:
            ids = [row[0] for row in rows]
            near = (max(ids) - min(ids) + 1) / len(ids) * count / BLOCK_SIZE
            return self._find_newest_by_blocks(count, start, 1 + int(near))
        found = sorted(self._accepted(rows, start), reverse=True)
        return _MatchPage(found[:count], complete=len(found) <= count)

    def _accepted(self, rows: Sequence[Row], start: _Match | None) -> list[_Match]:
        found = [_Match(at, id_) for id_, at, session in rows if self._passes_filter(at, session)]
        return [one for one in found if one < start] if start is not None else found

    def _find_newest_by_blocks(self, count: int, start: _Match | None, batch: int) -> _MatchPage:
        """Read blocks, newest first, until no other block can have newer matches.

        `batch`: the estimated number of blocks. Reading several at once is cheaper, especially for
        prefixes.
        """
        blocks = self._blocks(start)
        found: list[_Match] = []
        while blocks:
            if len(found) >= count and found[count - 1].at > blocks[0].newest:
                return _MatchPage(found[:count], complete=False)
            size = min(batch, _MAX_BLOCKS)
            rank_query, blocks = blocks[:size], blocks[size:]
            found += self._accepted(self._matches_in([one.block for one in rank_query]), start)
            found = sorted(found, reverse=True)[: count + 1]
            batch *= 2
        return _MatchPage(found[:count], complete=len(found) <= count)

    def _blocks(self, start: _Match | None) -> list[_Block]:
        """Return the blocks that may have matches."""
        found = [_Block(*row) for row in self._transaction.execute(self._sql["blocks"])]
        return [
            one
            for one in found
            if (self._since is None or one.newest >= self._since)
            and (self._until is None or one.oldest < self._until)
            and (start is None or one.oldest <= start.at)
        ]

    def _matches_in(self, blocks: Sequence[int]) -> list[Row]:
        first, last = min(blocks) * BLOCK_SIZE, (max(blocks) + 1) * BLOCK_SIZE - 1
        values = (*self._match_values, first, last, BLOCK_SIZE, json.dumps(blocks))
        return list(self._transaction.execute(self._sql["matches_in"], values))

    def _ranks(self, ids: Sequence[int]) -> dict[int, float]:
        """Return the rank of each message, lower is better; empty without terms for ranking."""
        rank_query = self._fulltext.rank_values(self._query)
        if not ids or rank_query is None:
            return {}
        values = (*rank_query, min(ids), max(ids), json.dumps(ids))
        return dict(self._transaction.execute(self._sql["ranks"], values))

    # --- results -----------------------------------------------------------------------------

    def _hit(self, id_: int) -> list[Hit]:
        """Return the hit, or nothing if its session is gone."""
        return [  # guard: search-shows-hidden
            Hit(
                key=key,
                uid=uid,
                title=title,
                seq=seq,
                role=role,
                at=from_microseconds(at),
                hidden=not spans.contains(msgspec.json.decode(sight, type=list[Span]), seq),
                snippet=(snippet := make_snippet(text, self._query)).text,
                marks=snippet.marks,
            )
            for key, uid, title, sight, seq, role, at, text in self._transaction.execute(
                self._sql["hit"], (id_,)
            )
        ]


def _encode_cursor(last: _Match) -> str:
    return f"{last.at}.{last.id}"


def _decode_cursor(after: str) -> _Match:
    at, _, id_ = after.partition(".")
    try:
        return _Match(min(int(at), MAX_INTEGER), min(int(id_), MAX_INTEGER))
    except ValueError:
        raise UsageError(f"after={after!r} is not the `after` of a previous page") from None


def _decode_offset(after: str) -> int:
    try:
        return min(max(0, int(after)), MAX_INTEGER)
    except ValueError:
        raise UsageError(f"after={after!r} is not the `after` of a previous page") from None


# --- snippets --------------------------------------------------------------------------------


WIDTH: Final = 160
_MAX_BEFORE: Final = 40
"""Maximum number of characters before the first matching word."""
_ELLIPSIS: Final = "…"
_MAX_POSITIONS: Final = 200


class Snippet(Struct, frozen=True):
    """A part of a text in one line, and the positions of the matching words."""

    text: str
    marks: Sequence[tuple[int, int]]


class _WordPosition(Struct, frozen=True):
    start: int
    end: int
    tokens: frozenset[str]


def make_snippet(text: str, query: Query, *, width: int = WIDTH) -> Snippet:
    """Return the part of a text with the most matching words, or else its start."""
    positions = _find_positions(text, query)
    start, end = _window(text, positions, width)
    # One character for another, so that positions do not change.
    line = "".join(" " if char.isspace() else char for char in text[start:end])
    before, after = _ELLIPSIS * (start > 0), _ELLIPSIS * (end < len(text))
    shift = len(before) - start
    marks: list[tuple[int, int]] = []
    for place in positions:
        first, last = max(place.start, start) + shift, min(place.end, end) + shift
        if first < last and marks and first <= marks[-1][1]:
            marks[-1] = (marks[-1][0], max(last, marks[-1][1]))
        elif first < last:
            marks.append((first, last))
    return Snippet(before + line + after, marks)


def _find_positions(text: str, query: Query) -> list[_WordPosition]:
    """Return the positions of the query's words."""
    tokens_to_find: set[str] = set()
    prefixes: list[str] = []
    for term in query.terms:
        if not term.is_excluded:
            tokens_to_find.update(t for word in term.words for t in (*word.parts, *word.joined))
            if term.is_prefix:
                prefixes.append(term.words[-1].parts[-1])
                prefixes += term.words[-1].joined[-1:]
    found: list[_WordPosition] = []
    for start, end, word in tokenizer.word_positions(text):
        if len(found) >= _MAX_POSITIONS:
            break
        # One character may normalize to several, such as ㌔: then the pairs have other positions.
        plain = unicodedata.is_normalized("NFKC", text[start:end])
        if word.singles and plain and len(word.parts) == max(1, end - start - 1):
            # Such a run may be as long as the text.
            found += islice(
                _pair_positions(text, start, word, tokens_to_find), _MAX_POSITIONS - len(found)
            )
            continue
        tokens = word.parts + word.joined
        matches = tokens_to_find.intersection(tokens)
        matches |= {begin for begin in prefixes if any(t.startswith(begin) for t in tokens)}
        if matches:
            found.append(_WordPosition(start, end, frozenset(matches)))
    return found


def _pair_positions(text: str, start: int, word: Word, wanted: set[str]) -> Iterator[_WordPosition]:
    """Yield the matching pairs and characters in a script without spaces."""
    for at, pair in enumerate(word.parts, start):
        if pair in wanted:
            yield _WordPosition(at, at + len(pair), frozenset([pair]))
        for single in range(at, at + len(pair)):
            if text[single] in wanted:
                yield _WordPosition(single, single + 1, frozenset(text[single]))


def _window(text: str, positions: Sequence[_WordPosition], width: int) -> tuple[int, int]:
    """Return start and end of the first window with the most different words."""
    if len(text) <= width:
        return 0, len(text)
    best, start = -1, 0
    starts = [place.start for place in positions]
    for index, place in enumerate(positions):
        reach = bisect_left(starts, place.start + width - _MAX_BEFORE)
        different = len(frozenset().union(*(near.tokens for near in positions[index:reach])))
        if different > best:
            best, start = different, place.start
    start = max(0, min(start - _MAX_BEFORE, len(text) - width))
    return _align_to_words(text, start, min(len(text), start + width))


def _align_to_words(text: str, start: int, end: int) -> tuple[int, int]:
    """Shrink the window at both ends if that avoids cutting a word."""
    if start > 0:
        space = text.find(" ", start, start + _MAX_BEFORE // 2)
        start = space + 1 if space >= 0 else start
    if end < len(text):
        space = text.rfind(" ", end - _MAX_BEFORE // 2, end)
        end = space if space > start else end
    return start, end
