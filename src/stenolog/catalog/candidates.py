"""Candidates for recall: messages of one session or sender that share words with a question.

Each word is searched separately, newest messages first, so that a common word costs no more than a
rare one. The result has the messages with the most and the rarest words, and their neighbours: an
answer often shares no word with its question.

Only messages of one session or sender are searched. Hidden messages that a summary covers can be
found. Messages hidden in any other way were withdrawn and cannot be found, even if a later summary
covers them.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Final

import msgspec
from msgspec import Struct

from stenolog.catalog.catalog_database import BLOCK_SIZE, Database, Transaction, from_microseconds
from stenolog.catalog.entries import Candidate, Candidates
from stenolog.catalog.query import Values, owner_mark, session_mark, stem_mark
from stenolog.records import Span
from stenolog.stores import spans

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
    """The question, and the messages to search."""

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
    count: int
    visible: int
    visible_json: str
    withdrawn: str
    has_mixed_senders: int = 0


MarkGroups = Sequence[Sequence[str]]
"""Groups of marks (index tokens, see query.py). A match has at least one mark of each group."""

FindNewest = Callable[[MarkGroups, int], list[int]]
"""Function that returns the ids of the newest messages with these marks, up to a limit."""


class CandidateSearch:
    """The search for the candidates of one question, in one read transaction."""

    def __init__(self, transaction: Transaction, database: Database, query: CandidateQuery) -> None:
        self._transaction = transaction
        self._sql = sql = database.sql
        self._fulltext = database.fulltext
        self._query = query
        self._stems = list(dict.fromkeys(query.stems))[:_MAX_WORDS]
        rows = transaction.execute(sql["owned" if query.threads else "own"], (query.owner,))
        sessions = [_Session(*row) for row in rows]
        self._sessions = {s.id: s for s in sessions if not s.has_mixed_senders}
        by_key = {s.key: s for s in self._sessions.values()}
        self._current = by_key.get(query.exclude_visible_of or "")
        self._count = sum(s.count for s in self._sessions.values())
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
                positions.update(dict.fromkeys(self._rank_messages(self._find_newest_in_period)))
            if self._stems and (not has_period or len(positions) < _ENOUGH_MATCHES_IN_PERIOD):
                positions.update(dict.fromkeys(self._rank_messages(self._find_newest)))
        return Candidates(
            messages=list(self._read_messages(list(positions)[: self._query.limit])),
            count=self._count,
            containing=self._counts_by_stem,
        )

    # --- scope -------------------------------------------------------------------------------

    def _may_return_from(self, session: _Session) -> bool:
        """Return whether messages of this session may be returned."""
        return bool(
            session.is_listed
            and (self._query.agent is None or session.agent in (None, self._query.agent))
            and not (session is self._current and session.visible >= session.count)
        )

    def _visibility_of(self, session: int) -> "_Visibility":
        if session not in self._visibilities:
            row = self._sessions[session]
            self._visibilities[session] = _Visibility(
                _decode_spans(row.visible_json), _decode_spans(row.withdrawn)
            )
        return self._visibilities[session]

    def _read_visible_ids(self) -> set[int]:
        """Return the ids of the visible messages of the session that asks the question."""
        if self._current is None or self._current.visible >= self._current.count:
            return set()
        return {
            id_
            for span in self._visibility_of(self._current.id).seqs
            for (id_,) in self._transaction.execute(self._sql["seen"], (self._current.id, *span))
        }

    # --- selection ---------------------------------------------------------------------------

    def _find_newest(self, mark_groups: MarkGroups, limit: int) -> list[int]:
        """Return the ids of the newest matches, up to a limit."""
        return self._find_unseen("newest_with", self._fulltext_values(mark_groups), limit)

    def _find_newest_in_period(self, mark_groups: MarkGroups, limit: int) -> list[int]:
        """Return the ids of the newest matches in the requested period, up to a limit."""
        since = self._query.since if self._query.since is not None else -(2**62)
        until = self._query.until if self._query.until is not None else 2**62
        blocks = [
            block
            for block, oldest, newest in self._transaction.execute(self._sql["blocks"])
            if newest >= since and oldest < until
        ]
        if not blocks:
            return []
        id_range = (min(blocks) * BLOCK_SIZE, (max(blocks) + 1) * BLOCK_SIZE - 1)
        return self._find_unseen(
            "newest_with_in", (*self._fulltext_values(mark_groups), *id_range, since, until), limit
        )

    def _find_unseen(self, statement: str, values: Sequence[object], limit: int) -> list[int]:
        # Visible messages are left out afterwards, so they must not use up the limit.
        row_limit = _NO_LIMIT if limit == _NO_LIMIT else limit + len(self._visible_ids)
        rows = self._transaction.execute(self._sql[statement], (*values, row_limit))
        ids = [id_ for (id_,) in rows if id_ not in self._visible_ids]
        return ids if limit == _NO_LIMIT else ids[:limit]

    def _fulltext_values(self, mark_groups: MarkGroups) -> Values:
        """Return the values of a full-text search for these marks in the messages of the owner."""
        required_groups = [*mark_groups, self._required_marks]
        return self._fulltext.mark_values(required_groups, excluded=self._excluded_marks)

    def _rank_messages(self, find: FindNewest) -> Iterator[tuple[int, int]]:
        """Yield session and seq of matches: the most and rarest words first, then the newest."""
        limit = self._query.limit
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
            weight = math.log(1 + self._count / (len(ids) + 0.5))
            for id_ in ids:
                scores[id_] = scores.get(id_, 0.0) + weight
        ranked_ids = sorted(scores, key=lambda id_: (-scores[id_], -id_))
        # Withdrawn messages must not use up the limit, however many there are.
        return islice(self._positions_without_withdrawn(ranked_ids), limit)

    def _positions_without_withdrawn(self, ids: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield session and seq of the messages with these ids, without withdrawn messages."""
        batch_size = 2 * self._query.limit
        for start in range(0, len(ids), batch_size):
            batch = ids[start : start + batch_size]
            rows = self._transaction.execute(self._sql["where_said"], (json.dumps(batch),))
            positions = {id_: (session, seq) for id_, session, seq in rows}
            for id_ in batch:
                session, seq = positions.get(id_, (0, 0))
                if session in self._sessions and self._visibility_of(session).may_return(seq):
                    yield session, seq

    # --- content -----------------------------------------------------------------------------

    def _read_messages(self, hits: Sequence[tuple[int, int]]) -> Iterator[Candidate]:
        """Yield the messages at these positions, and the neighbours of the best matches."""
        positions = dict.fromkeys(hits)
        for session, seq in hits[:_MESSAGES_WITH_NEIGHBOURS]:
            positions.update({(session, seq + step): None for step in _NEIGHBOUR_OFFSETS})
        positions_to_read = []
        for session, seq in positions:
            visibility = self._visibility_of(session)
            is_current = self._current is not None and session == self._current.id
            is_visible = is_current and spans.contains(visibility.seqs, seq)
            if visibility.may_return(seq) and not is_visible:
                positions_to_read.append((session, seq))
        values = (MAX_TEXT_LENGTH, json.dumps(positions_to_read))
        rows = self._transaction.execute(self._sql["said_at"], values)
        for key, uid, seq, role, at, text in rows:
            time, excerpt = from_microseconds(at), text[:MAX_TEXT_LENGTH]
            yield Candidate(key=key, uid=uid, seq=seq, role=role, at=time, text=excerpt)


class _Visibility(Struct, frozen=True):
    """The visible and the withdrawn seqs of a session."""

    seqs: list[Span]
    withdrawn: list[Span]

    def may_return(self, seq: int) -> bool:
        """Return whether a message may be returned: it is visible, or a summary covers it.

        A summary covers all messages before the first visible one, except withdrawn messages.
        """
        if self.seqs and seq >= self.seqs[0][0]:
            return spans.contains(self.seqs, seq)
        return not spans.contains(self.withdrawn, seq)


def _decode_spans(text: str) -> list[Span]:
    return msgspec.json.decode(text, type=list[Span])
