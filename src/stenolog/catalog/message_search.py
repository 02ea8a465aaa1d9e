"""Search for messages that match a query, with snippets, and for candidates for recall.

If a query has few matches, all are read. If it has many matches, the newest are found block by
block (schema.sql), starting with the blocks that may contain the newest messages. A search for a
common word is therefore as fast as a search for a rare word. Only the newest thousand matches are
ranked. If a filter excludes almost all matches of a common word, all matches of the word are read.
"""

import json
import math
import unicodedata
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, Final

import msgspec
from msgspec import Struct

from stenolog.catalog import tokenizer
from stenolog.catalog.catalog_database import (
    BLOCK_SIZE,
    MAX_INTEGER,
    Row,
    Transaction,
    from_microseconds,
)
from stenolog.catalog.entries import Candidate, Candidates, Hit, Hits
from stenolog.catalog.query import DIALECTS, Query, owner_mark, session_mark, stem_mark
from stenolog.catalog.searchable_text import LONGEST_TEXT
from stenolog.catalog.tokenizer import Word
from stenolog.errors import UsageError
from stenolog.records import Span
from stenolog.redaction.redact import STUB, cut_start, redact_text
from stenolog.stores import spans

MAX_RANKED: Final = 1_000
"""Maximum number of matches that are ranked; of more matches, only the newest are ranked."""

_MAX_SESSION_MARKS: Final = 64
"""Maximum number of sessions in a full-text query. With more, Python filters the matches."""

_MAX_BLOCKS_PER_QUERY: Final = 32
"""Maximum number of blocks that one SQL statement reads."""


class SearchFilter(Struct, frozen=True):
    """Conditions of a search besides its query."""

    role: str | None
    session_values: Sequence[Any] | None
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

    def __init__(self, transaction: Transaction, query: Query, search_filter: SearchFilter) -> None:
        self._transaction = transaction
        self._fulltext = DIALECTS[transaction.fulltext]
        self._query = query
        self._sessions: set[int] | None = None
        """Ids of the selected sessions; None: all sessions."""
        if search_filter.session_values is not None:
            rows = transaction.run("sessions_of", search_filter.session_values)
            self._sessions = {id_ for (id_,) in rows}
        self._has_no_sessions = self._sessions is not None and not self._sessions
        session_ids = sorted(self._sessions or ())
        self._match_values = self._fulltext.match_values(
            query,
            role=search_filter.role,
            sessions=session_ids if len(session_ids) <= _MAX_SESSION_MARKS else (),
        )
        self._since, self._until = search_filter.since, search_filter.until
        self._unlisted = {id_ for (id_,) in transaction.run("unlisted")}

    def find_newest(self, limit: int, after: str | None) -> Hits:
        """Return a page of matches, newest first."""
        start = None if after is None else _decode_cursor(after)
        if self._has_no_sessions:
            return Hits(hits=(), count=0, exact=True, after=None)
        match_page = self._newest_matches(limit + 1, start)
        matches = match_page.matches[:limit]
        return Hits(
            hits=self._read_hits(match.id for match in matches),
            count=len(match_page.matches),
            exact=match_page.is_complete and start is None,
            after=f"{matches[-1].at}.{matches[-1].id}" if len(match_page.matches) > limit else None,
        )

    def find_best(self, limit: int, after: str | None) -> Hits:
        """Return a page of ranked matches. Texts that users and models wrote come first."""
        start = max(0, _decode_number(after, after)) if after is not None else 0
        match_page = self._newest_matches(MAX_RANKED, None)
        ranked_ids = [id_ for id_, _ in self._rank_matches(match_page)]
        ids = ranked_ids[start : start + limit]
        end = start + len(ids)
        return Hits(
            hits=self._read_hits(ids),
            count=len(ranked_ids),
            exact=match_page.is_complete,
            after=str(end) if ids and end < len(ranked_ids) else None,
        )

    def find_by_session(self, limit: int, start: int, size: int) -> SessionGroups:
        """Return up to `size` matches per session, the session with the best match first."""
        match_page = self._newest_matches(MAX_RANKED, None)
        ids_by_session: dict[int, list[int]] = {}
        for id_, session in self._rank_matches(match_page):
            ids_by_session.setdefault(session, []).append(id_)
        sessions = list(ids_by_session)[start : start + limit]
        return SessionGroups(
            {session: self._read_hits(ids_by_session[session][:size]) for session in sessions},
            {session: len(ids) for session, ids in ids_by_session.items()},
            exact=match_page.is_complete,
            after=start + limit if start + limit < len(ids_by_session) else None,
        )

    def _rank_matches(self, match_page: _MatchPage) -> list[tuple[int, int]]:
        """Return message id and session of each match, the best first."""
        ids = [match.id for match in match_page.matches]
        ranks = self._read_ranks(ids)
        rows = self._transaction.run("found_in", (json.dumps(ids),))
        session_and_speech = {id_: (session, speech) for id_, session, speech in rows}
        ranked_matches = sorted(
            (match for match in match_page.matches if match.id in session_and_speech),
            key=lambda m: (-session_and_speech[m.id][1], ranks.get(m.id, 0.0), -m.at, -m.id),
        )
        return [(match.id, session_and_speech[match.id][0]) for match in ranked_matches]

    # --- matches -----------------------------------------------------------------------------

    def _passes_filter(self, at: int, session: int) -> bool:
        return (
            (self._since is None or at >= self._since)
            and (self._until is None or at < self._until)
            and (self._sessions is None or session in self._sessions)
            and session not in self._unlisted
        )

    def _newest_matches(self, count: int, start: _Match | None) -> _MatchPage:
        """Return up to `count` of the newest matches that are older than `start`."""
        if self._has_no_sessions:
            return _MatchPage((), is_complete=True)
        values = (*self._match_values, MAX_RANKED + 1)
        rows = list(self._transaction.run("matches", values))
        if len(rows) > MAX_RANKED:
            ids = [row[0] for row in rows]
            blocks_needed = (max(ids) - min(ids) + 1) / len(ids) * count / BLOCK_SIZE
            return self._newest_matches_by_block(count, start, 1 + int(blocks_needed))
        matches = sorted(self._filter_matches(rows, start), reverse=True)
        return _MatchPage(matches[:count], is_complete=len(matches) <= count)

    def _filter_matches(self, rows: Iterable[Row], start: _Match | None) -> list[_Match]:
        matches = [_Match(at, id_) for id_, at, session in rows if self._passes_filter(at, session)]
        return [match for match in matches if match < start] if start is not None else matches

    def _newest_matches_by_block(
        self, count: int, start: _Match | None, block_count: int
    ) -> _MatchPage:
        """Read blocks of messages, newest first, until no unread block can have newer matches.

        `block_count`: the estimated number of blocks to read. Reading several blocks at once is
        cheaper, especially for prefixes.
        """
        blocks = [
            (block, newest)
            for block, oldest, newest in self._transaction.run("blocks")
            if (self._since is None or newest >= self._since)
            and (self._until is None or oldest < self._until)
            and (start is None or oldest <= start.at)
        ]
        matches: list[_Match] = []
        while blocks:
            if len(matches) >= count and matches[count - 1].at > blocks[0][1]:
                return _MatchPage(matches[:count], is_complete=False)
            read_count = min(block_count, _MAX_BLOCKS_PER_QUERY)
            block_numbers = [block for block, _ in blocks[:read_count]]
            id_range = (min(block_numbers) * BLOCK_SIZE, (max(block_numbers) + 1) * BLOCK_SIZE - 1)
            values = (*self._match_values, *id_range, BLOCK_SIZE, json.dumps(block_numbers))
            rows = self._transaction.run("matches_in", values)
            matches += self._filter_matches(rows, start)
            matches = sorted(matches, reverse=True)[: count + 1]
            blocks, block_count = blocks[read_count:], block_count * 2
        return _MatchPage(matches[:count], is_complete=len(matches) <= count)

    def _read_ranks(self, ids: Sequence[int]) -> dict[int, float]:
        """Return the rank of each message; lower is better. Empty if no term is ranked."""
        rank_query = self._fulltext.rank_values(self._query)
        if not ids or rank_query is None:
            return {}
        values = (*rank_query, min(ids), max(ids), json.dumps(ids))
        return dict(self._transaction.run("ranks", values))

    # --- results -----------------------------------------------------------------------------

    def _read_hits(self, ids: Iterable[int]) -> list[Hit]:
        """Return the hits with these message ids. Messages of deleted sessions are left out."""
        rows = [row for id_ in ids for row in self._transaction.run("hit", (id_,))]
        return [
            Hit(
                key=key,
                uid=uid,
                title=title,
                seq=seq,
                role=role,
                at=from_microseconds(at),
                hidden=not spans.contains(_decode_spans(visible_json), seq),
                snippet=(snippet := make_snippet(text, self._query)).text,
                marks=snippet.marks,
            )
            for key, uid, title, visible_json, seq, role, at, text in rows
        ]


def _decode_cursor(after: str) -> _Match:
    at, _, id_ = after.partition(".")
    return _Match(_decode_number(at, after), _decode_number(id_, after))


def _decode_number(number_text: str, after: str) -> int:
    try:
        return min(int(number_text), MAX_INTEGER)
    except ValueError:
        raise UsageError(f"after={after!r} is not the `after` of a previous page") from None


# --- candidates for recall -------------------------------------------------------------------
# Each word of the question is searched separately, newest messages first, so that a common word
# costs no more than a rare word. The result contains the messages that share the most, or the
# rarest, words with the question. The result also contains neighbours of these messages, because an
# answer often shares no word with its question.
#
# Only messages of one session or sender are searched. Hidden messages that a summary covers can be
# found. Messages hidden in any other way were withdrawn and cannot be found, even if a later
# summary covers them.


MAX_TEXT_LENGTH: Final = 8_000
"""Maximum number of characters that are returned per message."""

_MAX_PER_WORD: Final = 500
"""Maximum number of messages per word. If more messages have the word, the newest are used."""

_NO_LIMIT: Final = -1
_MAX_WORDS: Final = 24
_MESSAGES_WITH_NEIGHBOURS: Final = 20
"""Number of best matches whose neighbouring messages are returned, too."""
_NEIGHBOUR_OFFSETS: Final = (-1, 1, -2, 2)
_ENOUGH_MATCHES_IN_PERIOD: Final = 20
"""If the requested period has at least this many matches, only the period is searched."""


class CandidateQuery(Struct, frozen=True, kw_only=True):
    """A question, and the conditions on the messages to search."""

    owner: str
    """Key of the session to search, or a sender if `threads` is set."""
    threads: bool
    """Whether `owner` is a sender whose sessions are all searched."""
    stems: Sequence[str]
    """Stems of the words of the question."""
    agent: str | None
    """Name of an agent; sessions of other agents are left out. None: all agents."""
    exclude_visible_of: str | None
    """Key of the session that asks the question; its visible messages are left out."""
    since: int | None
    until: int | None
    limit: int


class _Session(Struct, frozen=True):
    id: int
    key: str
    agent: str | None
    is_listed: int
    message_count: int
    visible_count: int
    visible_json: str
    withdrawn_json: str
    has_mixed_senders: int = 0


MarkGroups = Sequence[Sequence[str]]
"""Groups of marks (index tokens, see query.py). A match has at least one mark of each group."""


class CandidateSearch:
    """The search for the candidates of one question, in one read transaction."""

    def __init__(self, transaction: Transaction, query: CandidateQuery) -> None:
        self._transaction = transaction
        self._fulltext = DIALECTS[transaction.fulltext]
        self._query = query
        self._stems = list(dict.fromkeys(query.stems))[:_MAX_WORDS]
        rows = transaction.run("owned" if query.threads else "own", (query.owner,))
        sessions = [_Session(*row) for row in rows]
        self._sessions = {s.id: s for s in sessions if not s.has_mixed_senders}
        by_key = {s.key: s for s in self._sessions.values()}
        self._asking_session = by_key.get(query.exclude_visible_of or "")
        self._message_count = sum(s.message_count for s in self._sessions.values())
        excluded_ids = [s.id for s in self._sessions.values() if not self._may_return_from(s)]
        self._has_no_sessions = len(excluded_ids) == len(self._sessions)
        excluded_ids += [s.id for s in sessions if s.has_mixed_senders]
        marks = [owner_mark(query.owner)] if query.threads else map(session_mark, self._sessions)
        self._required_marks = list(marks)  # guard: recall-own-messages
        self._excluded_marks = list(map(session_mark, excluded_ids))
        self._visibilities: dict[int, _Visibility] = {}
        self._visible_ids = self._read_visible_ids()
        self._counts_by_stem: dict[str, int] = {}

    def find(self) -> Candidates:
        """Return the candidates, and how many messages contain each word of the question."""
        positions: dict[tuple[int, int], None] = {}
        if not self._has_no_sessions:
            has_period = self._query.since is not None or self._query.until is not None
            if has_period:
                positions.update(dict.fromkeys(self._rank_messages(in_period=True)))
            if self._stems and (not has_period or len(positions) < _ENOUGH_MATCHES_IN_PERIOD):
                positions.update(dict.fromkeys(self._rank_messages(in_period=False)))
        return Candidates(
            messages=list(self._read_messages(list(positions)[: self._query.limit])),
            count=self._message_count,
            containing=self._counts_by_stem,
        )

    # --- scope -------------------------------------------------------------------------------

    def _may_return_from(self, session: _Session) -> bool:
        """Return whether the search may return messages of this session."""
        return bool(
            session.is_listed
            and (self._query.agent is None or session.agent in (None, self._query.agent))
            and not (
                session is self._asking_session and session.visible_count >= session.message_count
            )
        )

    def _visibility_of(self, session_id: int) -> "_Visibility":
        if session_id not in self._visibilities:
            session = self._sessions[session_id]
            self._visibilities[session_id] = _Visibility(
                _decode_spans(session.visible_json), _decode_spans(session.withdrawn_json)
            )
        return self._visibilities[session_id]

    def _read_visible_ids(self) -> set[int]:
        """Return the ids of the visible messages of the session that asks the question."""
        session = self._asking_session
        if session is None or session.visible_count >= session.message_count:
            return set()
        return {
            id_
            for span in self._visibility_of(session.id).visible_spans
            for (id_,) in self._transaction.run("seen", (session.id, *span))
        }

    # --- selection ---------------------------------------------------------------------------

    def _find_newest(self, mark_groups: MarkGroups, limit: int, *, in_period: bool) -> list[int]:
        """Return the ids of the owner's newest messages that have a mark of each group.

        `in_period`: return only messages of the requested period.
        """
        values = self._fulltext.mark_values(
            [*mark_groups, self._required_marks], excluded=self._excluded_marks
        )
        if in_period:
            since = self._query.since if self._query.since is not None else -(2**62)
            until = self._query.until if self._query.until is not None else 2**62
            blocks = [
                block
                for block, oldest, newest in self._transaction.run("blocks")
                if newest >= since and oldest < until
            ]
            if not blocks:
                return []
            id_range = (min(blocks) * BLOCK_SIZE, (max(blocks) + 1) * BLOCK_SIZE - 1)
            values = (*values, *id_range, since, until)
        statement = "newest_with_in" if in_period else "newest_with"
        # Visible messages are left out afterwards, so they must not use up the limit.
        row_limit = _NO_LIMIT if limit == _NO_LIMIT else limit + len(self._visible_ids)
        rows = self._transaction.run(statement, (*values, row_limit))
        ids = [id_ for (id_,) in rows if id_ not in self._visible_ids]
        return ids if limit == _NO_LIMIT else ids[:limit]

    def _rank_messages(self, *, in_period: bool) -> Iterator[tuple[int, int]]:
        """Yield session id and seq of each match, those with the most and rarest words first."""
        limit, find = self._query.limit, partial(self._find_newest, in_period=in_period)
        if not self._stems:
            return self._positions_without_withdrawn(find([], limit))
        ids_by_stem = {stem: find([[stem_mark(stem)]], _MAX_PER_WORD) for stem in self._stems}
        rare_stems = [stem for stem, ids in ids_by_stem.items() if 0 < len(ids) < _MAX_PER_WORD]
        for stem, ids in ids_by_stem.items():
            if len(ids) == _MAX_PER_WORD and rare_stems:
                # Find messages of any age that have this common word and a rare word.
                mark_groups = [list(map(stem_mark, rare_stems)), [stem_mark(stem)]]
                ids_by_stem[stem] = list(dict.fromkeys([*ids, *find(mark_groups, _NO_LIMIT)]))
        scores: dict[int, float] = {}
        for stem, ids in ids_by_stem.items():
            self._counts_by_stem[stem] = max(len(ids), self._counts_by_stem.get(stem, 0))
            weight = math.log(1 + self._message_count / (len(ids) + 0.5))
            for id_ in ids:
                scores[id_] = scores.get(id_, 0.0) + weight
        ranked_ids = sorted(scores, key=lambda id_: (-scores[id_], -id_))
        # Withdrawn messages must not use up the limit, however many there are.
        return islice(self._positions_without_withdrawn(ranked_ids), limit)

    def _positions_without_withdrawn(self, ids: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield session id and seq of the messages with these ids, without withdrawn ones."""
        batch_size = 2 * self._query.limit
        for start in range(0, len(ids), batch_size):
            batch = ids[start : start + batch_size]
            rows = self._transaction.run("where_said", (json.dumps(batch),))
            position_by_id = {id_: (session, seq) for id_, session, seq in rows}
            for id_ in batch:
                session, seq = position_by_id.get(id_, (0, 0))
                if session in self._sessions and self._visibility_of(session).may_return(seq):
                    yield session, seq

    # --- content -----------------------------------------------------------------------------

    def _read_messages(self, matches: Sequence[tuple[int, int]]) -> Iterator[Candidate]:
        """Yield the messages at these positions, and the neighbours of the best matches."""
        positions = dict.fromkeys(matches)
        for session, seq in matches[:_MESSAGES_WITH_NEIGHBOURS]:
            positions.update({(session, seq + offset): None for offset in _NEIGHBOUR_OFFSETS})
        positions_to_read = []
        for session, seq in positions:
            visibility = self._visibility_of(session)
            is_asking = self._asking_session is not None and session == self._asking_session.id
            is_visible = is_asking and spans.contains(visibility.visible_spans, seq)
            if visibility.may_return(seq) and not is_visible:
                positions_to_read.append((session, seq))
        values = (MAX_TEXT_LENGTH, json.dumps(positions_to_read))
        rows = self._transaction.run("said_at", values)
        for key, uid, seq, role, at, text in rows:
            time, excerpt = from_microseconds(at), text[:MAX_TEXT_LENGTH]
            yield Candidate(key=key, uid=uid, seq=seq, role=role, at=time, text=excerpt)


class _Visibility(Struct, frozen=True):
    """The ranges of visible and of withdrawn seqs of a session."""

    visible_spans: list[Span]
    withdrawn_spans: list[Span]

    def may_return(self, seq: int) -> bool:
        """Return whether a search may return a message: it is visible, or a summary covers it.

        A summary covers all messages before the first visible one, except withdrawn messages.
        """
        if self.visible_spans and seq >= self.visible_spans[0][0]:
            return spans.contains(self.visible_spans, seq)
        return not spans.contains(self.withdrawn_spans, seq)


def _decode_spans(spans_json: str) -> list[Span]:
    return msgspec.json.decode(spans_json, type=list[Span])


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


class WordPosition(Struct, frozen=True):
    """A word of a text that matches, with the tokens that match."""

    start: int
    end: int
    tokens: frozenset[str]


def make_snippet(text: str, query: Query, *, width: int = SNIPPET_WIDTH) -> Snippet:
    """Return the part of a text with the most matching words; without matches, the start.

    Secrets are redacted before the text is cut, because a part of a secret is not recognized.
    """
    if len(text) >= LONGEST_TEXT:
        # The text is cut already: its last word may be the start of a secret.
        text = cut_start(text, LONGEST_TEXT - 1).rstrip()
    text = redact_text(text)  # guard: snippet-redacted
    # The words of `[redacted: api key]` are no matches.
    positions = _find_positions(STUB.sub(lambda stub: " " * len(stub[0]), text), query)
    start, end = choose_window(text, positions, width)
    # Replace each whitespace character by one space, so that positions do not change.
    line = "".join(" " if char.isspace() else char for char in text[start:end])
    before, after = _ELLIPSIS * (start > 0), _ELLIPSIS * (end < len(text))
    shift = len(before) - start
    marks: list[tuple[int, int]] = []
    for position in positions:
        mark_start, mark_end = max(position.start, start) + shift, min(position.end, end) + shift
        if mark_start < mark_end and marks and mark_start <= marks[-1][1]:
            marks[-1] = (marks[-1][0], max(mark_end, marks[-1][1]))
        elif mark_start < mark_end:
            marks.append((mark_start, mark_end))
    return Snippet(before + line + after, marks)


def _find_positions(text: str, query: Query) -> list[WordPosition]:
    """Return the positions of the query's words."""
    tokens_to_find: set[str] = set()
    prefixes: list[str] = []
    for term in query.terms:
        if not term.is_excluded:
            tokens_to_find.update(
                t for word in term.words for t in (*word.parts, *word.joined_tokens)
            )
            if term.is_prefix:
                prefixes.append(term.words[-1].parts[-1])
                prefixes += term.words[-1].joined_tokens[-1:]
    positions: list[WordPosition] = []
    for start, end, word in tokenizer.word_positions(text):
        if len(positions) >= _MAX_POSITIONS:
            break
        # A character such as ㌔ normalizes to several characters, which shifts the positions.
        is_normalized = unicodedata.is_normalized("NFKC", text[start:end])
        if word.chars and is_normalized and len(word.parts) == max(1, end - start - 1):
            # Limit the number of positions: one word may be as long as the text.
            positions += islice(
                _find_pairs(text, start, word, tokens_to_find), _MAX_POSITIONS - len(positions)
            )
            continue
        tokens = word.parts + word.joined_tokens
        matches = tokens_to_find.intersection(tokens)
        matches |= {prefix for prefix in prefixes if any(t.startswith(prefix) for t in tokens)}
        if matches:
            positions.append(WordPosition(start, end, frozenset(matches)))
    return positions


def _find_pairs(text: str, start: int, word: Word, tokens: set[str]) -> Iterator[WordPosition]:
    """Yield the positions of matching characters and character pairs of a word."""
    for pair_start, pair in enumerate(word.parts, start):
        if pair in tokens:
            yield WordPosition(pair_start, pair_start + len(pair), frozenset([pair]))
        for index in range(pair_start, pair_start + len(pair)):
            if text[index] in tokens:
                yield WordPosition(index, index + 1, frozenset(text[index]))


def choose_window(text: str, positions: Sequence[WordPosition], width: int) -> tuple[int, int]:
    """Return start and end of the first window with the most different matching tokens."""
    if len(text) <= width:
        return 0, len(text)
    best_count, start = -1, 0
    starts = [first.start for first in positions]
    for index, first in enumerate(positions):
        end_index = bisect_left(starts, first.start + width - _MAX_CHARACTERS_BEFORE_MATCH)
        token_sets = (position.tokens for position in positions[index:end_index])
        distinct_count = len(frozenset().union(*token_sets))
        if distinct_count > best_count:
            best_count, start = distinct_count, first.start
    start = max(0, min(start - _MAX_CHARACTERS_BEFORE_MATCH, len(text) - width))
    return _align_to_words(text, start, min(len(text), start + width))


def _align_to_words(text: str, start: int, end: int) -> tuple[int, int]:
    """Move start and end inwards to a space nearby, if any, so that no word is cut."""
    if start > 0:
        space = text.find(" ", start, start + _MAX_CHARACTERS_BEFORE_MATCH // 2)
        start = space + 1 if space >= 0 else start
    if end < len(text):
        space = text.rfind(" ", end - _MAX_CHARACTERS_BEFORE_MATCH // 2, end)
        end = space if space > start else end
    return start, end
