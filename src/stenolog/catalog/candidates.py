"""Candidates for recall: messages of one session or sender that share words with a question.

Each word is searched separately, newest messages first, so that a common word costs no more than a
rare one. The result has the messages with the most and the rarest words, and their neighbours: an
answer often shares no word with its question.

Only messages of that session or sender are searched. A message hidden at or below the floor, with a
summary, was summarized and can be found. Messages hidden in any other way were withdrawn and cannot
be found, even if they are summarized later.
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

MAX_TEXT: Final = 8_000
"""Maximum number of characters that are returned of a message."""

_MAX_PER_WORD: Final = 500
"""Maximum number of messages per word; of a more common word, the newest."""

_NO_LIMIT: Final = -1
_MAX_WORDS: Final = 24
_MAX_WITH_NEIGHBOURS: Final = 20
"""Number of best messages that are returned with their neighbours."""
_NEIGHBOUR_OFFSETS: Final = (-1, 1, -2, 2)
_ENOUGH_IN_PERIOD: Final = 20
"""Number of messages in the requested period from which on no others are searched."""


class CandidateQuery(Struct, frozen=True, kw_only=True):
    """The question, and the messages to search."""

    owner: str
    """Key of the session that is searched, or a sender."""
    threads: bool
    """Whether `owner` is a sender, and all sessions of that sender are searched."""
    stems: Sequence[str]
    """Stems of the words of the question."""
    agent: str | None
    """If set, sessions of other agents are left out."""
    in_sight_of: str | None
    """The asking session. Its visible messages are left out."""
    since: int | None
    until: int | None
    limit: int


class _Session(Struct, frozen=True):
    id: int
    key: str
    agent: str | None
    listed: int
    count: int
    visible: int
    sight: str
    withdrawn: str
    mixed: int = 0


Marks = Sequence[Sequence[str]]
"""Groups of marks. A message must have at least one mark of each group."""

FindNewest = Callable[[Marks, int], list[int]]
"""Function that returns the newest messages with these marks, up to a limit."""


def find_candidates(
    transaction: Transaction, database: Database, query: CandidateQuery
) -> Candidates:
    """Return the candidates from one read transaction."""
    return _CandidateSearch(transaction, database, query).candidates()


class _CandidateSearch:
    """One question in one read transaction."""

    def __init__(self, transaction: Transaction, database: Database, query: CandidateQuery) -> None:
        self._transaction = transaction
        self._sql = sql = database.sql
        self._fulltext = database.fulltext
        self._query = query
        self._stems = list(dict.fromkeys(query.stems))[:_MAX_WORDS]
        rows = transaction.execute(sql["owned" if query.threads else "own"], (query.owner,))
        found = [_Session(*row) for row in rows]
        self._sessions = {one.id: one for one in found if not one.mixed}
        self._current = next(
            (one for one in self._sessions.values() if one.key == query.in_sight_of), None
        )
        excluded = [one.id for one in self._sessions.values() if not self._may_return(one)]
        self._has_no_sessions = len(excluded) == len(self._sessions)
        excluded += [one.id for one in found if one.mixed]
        marks = [owner_mark(query.owner)] if query.threads else map(session_mark, self._sessions)
        self._required_marks = list(marks)  # guard: recall-own-messages
        self._excluded_marks = list(map(session_mark, excluded))
        self._visibilities: dict[int, _Visibility] = {}
        self._visible_ids = self._read_visible_ids()
        self._containing: dict[str, int] = {}

    def candidates(self) -> Candidates:
        """Return the candidates, and the frequencies of the words."""
        positions: dict[tuple[int, int], None] = {}
        if not self._has_no_sessions:
            has_period = self._query.since is not None or self._query.until is not None
            if has_period:
                positions.update(dict.fromkeys(self._ranked(self._newest_in_period)))
            if self._stems and (not has_period or len(positions) < _ENOUGH_IN_PERIOD):
                positions.update(dict.fromkeys(self._ranked(self._newest)))
        hits = list(positions)[: self._query.limit]
        return Candidates(
            messages=list(self._read_messages(hits)),
            count=sum(one.count for one in self._sessions.values()),
            containing=self._containing,
        )

    # --- scope -------------------------------------------------------------------------------

    def _may_return(self, session: _Session) -> bool:
        """Whether messages of this session may be returned."""
        return bool(
            session.listed
            and (self._query.agent is None or session.agent in (None, self._query.agent))
            and not (session is self._current and session.visible >= session.count)
        )

    def _visibility(self, session: int) -> "_Visibility":
        if session not in self._visibilities:
            known = self._sessions[session]
            self._visibilities[session] = _Visibility(
                _decode_spans(known.sight), _decode_spans(known.withdrawn)
            )
        return self._visibilities[session]

    def _read_visible_ids(self) -> set[int]:
        """Return the ids of the messages that are visible in the asking session."""
        if self._current is None or self._current.visible >= self._current.count:
            return set()
        return {
            id_
            for span in self._visibility(self._current.id).seqs
            for (id_,) in self._transaction.execute(self._sql["seen"], (self._current.id, *span))
        }

    # --- selection ---------------------------------------------------------------------------

    def _newest(self, words: Marks, limit: int) -> list[int]:
        """Return the newest matches, up to a limit."""
        return self._find_hidden("newest_with", self._fulltext_values(words), limit)

    def _newest_in_period(self, words: Marks, limit: int) -> list[int]:
        """Return the newest matches of the requested period, up to a limit."""
        since = self._query.since if self._query.since is not None else -(2**62)
        until = self._query.until if self._query.until is not None else 2**62
        blocks = [
            block
            for block, oldest, newest in self._transaction.execute(self._sql["blocks"])
            if newest >= since and oldest < until
        ]
        if not blocks:
            return []
        ids = (min(blocks) * BLOCK_SIZE, (max(blocks) + 1) * BLOCK_SIZE - 1)
        return self._find_hidden(
            "newest_with_in", (*self._fulltext_values(words), *ids, since, until), limit
        )

    def _find_hidden(self, name: str, values: Sequence[object], limit: int) -> list[int]:
        # Visible messages are mostly the newest ones, and must not use up the limit.
        most = _NO_LIMIT if limit == _NO_LIMIT else limit + len(self._visible_ids)
        rows = self._transaction.execute(self._sql[name], (*values, most))
        found = [id_ for (id_,) in rows if id_ not in self._visible_ids]
        return found if limit == _NO_LIMIT else found[:limit]

    def _fulltext_values(self, words: Marks) -> Values:
        """Return the full-text query for the words in the messages of the owner."""
        return self._fulltext.mark_values([*words, self._required_marks], but=self._excluded_marks)

    def _ranked(self, newest: FindNewest) -> Iterator[tuple[int, int]]:
        """Yield session and seq of the messages with the most and rarest words, then the newest."""
        limit = self._query.limit
        if not self._stems:
            return self._without_withdrawn(newest([], limit))
        found = {stem: newest([[stem_mark(stem)]], _MAX_PER_WORD) for stem in self._stems}
        rare = [stem for stem, ids in found.items() if 0 < len(ids) < _MAX_PER_WORD]
        for stem, ids in found.items():
            if len(ids) == _MAX_PER_WORD and rare:
                # Messages of any age that have this common word and a rare one.
                both = [[stem_mark(one) for one in rare], [stem_mark(stem)]]
                found[stem] = list(dict.fromkeys([*ids, *newest(both, _NO_LIMIT)]))
        total = sum(one.count for one in self._sessions.values())
        scores: dict[int, float] = {}
        for stem, ids in found.items():
            self._containing[stem] = max(len(ids), self._containing.get(stem, 0))
            weight = math.log(1 + total / (len(ids) + 0.5))
            for id_ in ids:
                scores[id_] = scores.get(id_, 0.0) + weight
        ranked = sorted(scores, key=lambda id_: (-scores[id_], -id_))
        # Withdrawn messages must not use up the limit, however many there are.
        return islice(self._without_withdrawn(ranked), limit)

    def _without_withdrawn(self, ids: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield session and seq of these ids in order, without withdrawn messages."""
        step = 2 * self._query.limit
        for start in range(0, len(ids), step):
            some = ids[start : start + step]
            rows = self._transaction.execute(self._sql["where_said"], (json.dumps(some),))
            positions = {id_: (session, seq) for id_, session, seq in rows}
            for id_ in some:
                session, seq = positions.get(id_, (0, 0))
                if session in self._sessions and self._visibility(session).may_return(seq):
                    yield session, seq

    # --- content -----------------------------------------------------------------------------

    def _read_messages(self, hits: Sequence[tuple[int, int]]) -> Iterator[Candidate]:
        """Yield these messages, and the neighbours of the best ones."""
        positions = dict.fromkeys(hits)
        for session, seq in hits[:_MAX_WITH_NEIGHBOURS]:
            positions.update({(session, seq + step): None for step in _NEIGHBOUR_OFFSETS})
        wanted = []
        for session, seq in positions:
            visibility = self._visibility(session)
            is_current = self._current is not None and session == self._current.id
            in_sight = is_current and spans.contains(visibility.seqs, seq)
            if visibility.may_return(seq) and not in_sight:
                wanted.append((session, seq))
        values = (MAX_TEXT, json.dumps(wanted))
        rows = self._transaction.execute(self._sql["said_at"], values)
        for key, uid, seq, role, at, text in rows:
            told = text[:MAX_TEXT]
            yield Candidate(
                key=key, uid=uid, seq=seq, role=role, at=from_microseconds(at), text=told
            )


class _Visibility(Struct, frozen=True):
    """The visible and the withdrawn seqs of a session."""

    seqs: list[Span]
    withdrawn: list[Span]

    def may_return(self, seq: int) -> bool:
        """Whether it is visible, or hidden before the first visible one and not withdrawn."""
        if self.seqs and seq >= self.seqs[0][0]:
            return spans.contains(self.seqs, seq)
        return not spans.contains(self.withdrawn, seq)


def _decode_spans(text: str) -> list[Span]:
    return msgspec.json.decode(text, type=list[Span])
