"""Search for messages, and make snippets that show why they match.

The cost of a search is bounded, regardless of the number of matches.

If there are few matches, all are read. If there are many matches, the newest are found block by
block (schema.sql), starting with the blocks that may contain the newest messages. A search for a
word that every message has is therefore as fast as a search for a rare word.
Ranking is limited to the newest thousand matches. If a filter excludes almost all matches of a
common word, all its matches are read.
"""

import json
import unicodedata
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
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
)
from stenolog.catalog.entries import Hit, Hits
from stenolog.catalog.query import Query
from stenolog.catalog.tokenizer import Word
from stenolog.errors import UsageError
from stenolog.records import Span
from stenolog.stores import spans

MAX_RANKED: Final = 1_000
"""Maximum number of matches that are ranked; of more matches, only the newest are ranked."""

_MAX_SESSION_MARKS: Final = 64
"""Maximum number of sessions in a full-text query. With more, matches are filtered afterwards."""

_MAX_BLOCKS_PER_QUERY: Final = 32
"""Maximum number of blocks per query."""


class SearchFilter(Struct, frozen=True):
    """Conditions of a search besides its query."""

    role: str | None
    sessions: Sequence[Any] | None
    """Values for `session_filter` in queries.sql; None: all sessions."""
    since: int | None
    """Earliest time in microseconds since 1970; `until` has the same unit."""
    until: int | None


class _Match(Struct, frozen=True, order=True):
    at: int
    id: int


class _MatchPage(Struct, frozen=True):
    matches: Sequence[_Match]
    """Matches, newest first."""
    is_complete: bool
    """Whether these are all matches."""


class SessionGroups(Struct, frozen=True):
    """Search results by session."""

    hits: dict[int, list[Hit]]
    """The best hits of each session on the page, by session id."""
    counts: dict[int, int]
    """Number of matches in each session, including sessions on other pages."""
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
        self._sessions: set[int] | None = None
        """Ids of the selected sessions; None: all sessions."""
        if search_filter.sessions is not None:
            rows = transaction.execute(self._sql["sessions_of"], search_filter.sessions)
            self._sessions = {id_ for (id_,) in rows}
        self._has_no_sessions = self._sessions is not None and not self._sessions
        session_ids = sorted(self._sessions or ())
        self._match_values = self._fulltext.match_values(
            query,
            role=search_filter.role,
            sessions=session_ids if len(session_ids) <= _MAX_SESSION_MARKS else (),
        )
        self._since, self._until = search_filter.since, search_filter.until
        self._unlisted = {id_ for (id_,) in transaction.execute(self._sql["unlisted"])}

    def find_newest(self, limit: int, after: str | None) -> Hits:
        """Return a page of matches, newest first."""
        start = None if after is None else _decode_cursor(after)
        if self._has_no_sessions:
            return Hits(hits=(), count=0, exact=True, after=None)
        match_page = self._find_newest(limit + 1, start)
        page = match_page.matches[:limit]
        return Hits(
            hits=self._read_hits(match.id for match in page),
            count=len(match_page.matches),
            exact=match_page.is_complete and start is None,
            after=f"{page[-1].at}.{page[-1].id}" if len(match_page.matches) > limit else None,
        )

    def find_best(self, limit: int, after: str | None) -> Hits:
        """Return a page of matches: people and models before tools, then by BM25 and time."""
        start = max(0, _decode_number(after, after)) if after is not None else 0
        match_page = self._find_newest(MAX_RANKED, None)
        ranked_ids = [id_ for id_, _ in self._rank_matches(match_page)]
        page = ranked_ids[start : start + limit]
        end = start + len(page)
        return Hits(
            hits=self._read_hits(page),
            count=len(ranked_ids),
            exact=match_page.is_complete,
            after=str(end) if page and end < len(ranked_ids) else None,
        )

    def find_by_session(self, limit: int, start: int, size: int) -> SessionGroups:
        """Return the best matches of each session, the session with the best match first."""
        match_page = self._find_newest(MAX_RANKED, None)
        ids_by_session: dict[int, list[int]] = {}
        for id_, session in self._rank_matches(match_page):
            ids_by_session.setdefault(session, []).append(id_)
        page = list(ids_by_session)[start : start + limit]
        return SessionGroups(
            {session: self._read_hits(ids_by_session[session][:size]) for session in page},
            {session: len(ids) for session, ids in ids_by_session.items()},
            exact=match_page.is_complete,
            after=start + limit if start + limit < len(ids_by_session) else None,
        )

    def _rank_matches(self, match_page: _MatchPage) -> list[tuple[int, int]]:
        """Return message id and session of each match, the best first."""
        ids = [match.id for match in match_page.matches]
        ranks = self._read_ranks(ids)
        rows = self._transaction.execute(self._sql["found_in"], (json.dumps(ids),))
        session_by_id = {id_: (session, speech) for id_, session, speech in rows}
        ranked_matches = sorted(
            (match for match in match_page.matches if match.id in session_by_id),
            key=lambda m: (-session_by_id[m.id][1], ranks.get(m.id, 0.0), -m.at, -m.id),
        )
        return [(match.id, session_by_id[match.id][0]) for match in ranked_matches]

    # --- matches -----------------------------------------------------------------------------

    def _passes_filter(self, at: int, session: int) -> bool:
        return (
            (self._since is None or at >= self._since)
            and (self._until is None or at < self._until)
            and (self._sessions is None or session in self._sessions)
            and session not in self._unlisted
        )

    def _find_newest(self, count: int, start: _Match | None) -> _MatchPage:
        """Return up to `count` of the newest matches that are older than `start`."""
        if self._has_no_sessions:
            return _MatchPage((), is_complete=True)
        rows = list(
            self._transaction.execute(self._sql["matches"], (*self._match_values, MAX_RANKED + 1))
        )
        if len(rows) > MAX_RANKED:
            ids = [row[0] for row in rows]
            blocks_needed = (max(ids) - min(ids) + 1) / len(ids) * count / BLOCK_SIZE
            return self._find_newest_by_blocks(count, start, 1 + int(blocks_needed))
        matches = sorted(self._filter_matches(rows, start), reverse=True)
        return _MatchPage(matches[:count], is_complete=len(matches) <= count)

    def _filter_matches(self, rows: Iterable[Row], start: _Match | None) -> list[_Match]:
        matches = [_Match(at, id_) for id_, at, session in rows if self._passes_filter(at, session)]
        return [match for match in matches if match < start] if start is not None else matches

    def _find_newest_by_blocks(self, count: int, start: _Match | None, batch: int) -> _MatchPage:
        """Read blocks of messages, newest first, until no unread block can have newer matches.

        `batch`: the estimated number of blocks to read. Reading several blocks at once is cheaper,
        especially for prefixes.
        """
        blocks = [
            (block, newest)
            for block, oldest, newest in self._transaction.execute(self._sql["blocks"])
            if (self._since is None or newest >= self._since)
            and (self._until is None or oldest < self._until)
            and (start is None or oldest <= start.at)
        ]
        matches: list[_Match] = []
        while blocks:
            if len(matches) >= count and matches[count - 1].at > blocks[0][1]:
                return _MatchPage(matches[:count], is_complete=False)
            size = min(batch, _MAX_BLOCKS_PER_QUERY)
            block_numbers = [block for block, _ in blocks[:size]]
            id_range = (min(block_numbers) * BLOCK_SIZE, (max(block_numbers) + 1) * BLOCK_SIZE - 1)
            values = (*self._match_values, *id_range, BLOCK_SIZE, json.dumps(block_numbers))
            rows = self._transaction.execute(self._sql["matches_in"], values)
            matches += self._filter_matches(rows, start)
            matches = sorted(matches, reverse=True)[: count + 1]
            blocks, batch = blocks[size:], batch * 2
        return _MatchPage(matches[:count], is_complete=len(matches) <= count)

    def _read_ranks(self, ids: Sequence[int]) -> dict[int, float]:
        """Return the rank of each message, lower is better; empty without terms for ranking."""
        rank_query = self._fulltext.rank_values(self._query)
        if not ids or rank_query is None:
            return {}
        values = (*rank_query, min(ids), max(ids), json.dumps(ids))
        return dict(self._transaction.execute(self._sql["ranks"], values))

    # --- results -----------------------------------------------------------------------------

    def _read_hits(self, ids: Iterable[int]) -> list[Hit]:
        """Return the hits with these message ids. Messages of deleted sessions are left out."""
        return [
            Hit(
                key=key,
                uid=uid,
                title=title,
                seq=seq,
                role=role,
                at=from_microseconds(at),
                hidden=not spans.contains(msgspec.json.decode(visible_json, type=list[Span]), seq),
                snippet=(snippet := make_snippet(text, self._query)).text,
                marks=snippet.marks,
            )
            for id_ in ids
            for key, uid, title, visible_json, seq, role, at, text in self._transaction.execute(
                self._sql["hit"], (id_,)
            )
        ]


def _decode_cursor(after: str) -> _Match:
    at, _, id_ = after.partition(".")
    return _Match(_decode_number(at, after), _decode_number(id_, after))


def _decode_number(text: str, after: str) -> int:
    try:
        return min(int(text), MAX_INTEGER)
    except ValueError:
        raise UsageError(f"after={after!r} is not the `after` of a previous page") from None


# --- snippets --------------------------------------------------------------------------------


SNIPPET_WIDTH: Final = 160
_MAX_CHARACTERS_BEFORE_MATCH: Final = 40
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


def make_snippet(text: str, query: Query, *, width: int = SNIPPET_WIDTH) -> Snippet:
    """Return the part of a text with the most matching words, or else its start."""
    positions = _find_positions(text, query)
    start, end = _choose_window(text, positions, width)
    # Replace each whitespace character by one space, so that positions do not change.
    line = "".join(" " if char.isspace() else char for char in text[start:end])
    before, after = _ELLIPSIS * (start > 0), _ELLIPSIS * (end < len(text))
    shift = len(before) - start
    marks: list[tuple[int, int]] = []
    for position in positions:
        first, last = max(position.start, start) + shift, min(position.end, end) + shift
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
    positions: list[_WordPosition] = []
    for start, end, word in tokenizer.word_positions(text):
        if len(positions) >= _MAX_POSITIONS:
            break
        # A character such as ㌔ normalizes to several characters, which shifts the positions.
        is_normalized = unicodedata.is_normalized("NFKC", text[start:end])
        if word.chars and is_normalized and len(word.parts) == max(1, end - start - 1):
            # Limit the number of positions: one word may be as long as the text.
            positions += islice(
                _pair_positions(text, start, word, tokens_to_find), _MAX_POSITIONS - len(positions)
            )
            continue
        tokens = word.parts + word.joined
        matches = tokens_to_find.intersection(tokens)
        matches |= {begin for begin in prefixes if any(t.startswith(begin) for t in tokens)}
        if matches:
            positions.append(_WordPosition(start, end, frozenset(matches)))
    return positions


def _pair_positions(text: str, start: int, word: Word, tokens: set[str]) -> Iterator[_WordPosition]:
    """Yield the positions of matching characters and pairs, in a script without spaces."""
    for at, pair in enumerate(word.parts, start):
        if pair in tokens:
            yield _WordPosition(at, at + len(pair), frozenset([pair]))
        for single in range(at, at + len(pair)):
            if text[single] in tokens:
                yield _WordPosition(single, single + 1, frozenset(text[single]))


def _choose_window(text: str, positions: Sequence[_WordPosition], width: int) -> tuple[int, int]:
    """Return start and end of the first part of the text with the most different matches."""
    if len(text) <= width:
        return 0, len(text)
    best, start = -1, 0
    starts = [first.start for first in positions]
    for index, first in enumerate(positions):
        end = bisect_left(starts, first.start + width - _MAX_CHARACTERS_BEFORE_MATCH)
        distinct = len(frozenset().union(*(position.tokens for position in positions[index:end])))
        if distinct > best:
            best, start = distinct, first.start
    start = max(0, min(start - _MAX_CHARACTERS_BEFORE_MATCH, len(text) - width))
    return _align_to_words(text, start, min(len(text), start + width))


def _align_to_words(text: str, start: int, end: int) -> tuple[int, int]:
    """Move start and end inwards to the nearest spaces, so that no word is cut."""
    if start > 0:
        space = text.find(" ", start, start + _MAX_CHARACTERS_BEFORE_MATCH // 2)
        start = space + 1 if space >= 0 else start
    if end < len(text):
        space = text.rfind(" ", end - _MAX_CHARACTERS_BEFORE_MATCH // 2, end)
        end = space if space > start else end
    return start, end
