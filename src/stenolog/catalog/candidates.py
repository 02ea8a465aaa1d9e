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

from stenolog.catalog.catalog_database import BLOCK, Database, Transaction, moment
from stenolog.catalog.entries import Candidate, Candidates
from stenolog.catalog.fulltext import Values
from stenolog.catalog.query import owner_mark, session_mark, stem_mark
from stenolog.records import Span
from stenolog.stores import spans

LONGEST_TEXT: Final = 8_000
"""Maximum number of characters that are returned of a message."""

_MOST_EACH: Final = 500
"""Maximum number of messages per word; of a more common word, the newest."""

_ALL: Final = -1
_MOST_WORDS: Final = 24
_MOST_NEIGHBOURED: Final = 20
"""Number of best messages that are returned with their neighbours."""
_STEPS: Final = (-1, 1, -2, 2)
_ENOUGH: Final = 20
"""Number of messages in the requested period from which on no others are searched."""


class Asked(Struct, frozen=True, kw_only=True):
    """The question, and the messages to search."""

    owner: str
    """Key of the session that is searched, or a sender."""
    threads: bool
    """Whether `owner` is a sender, and all sessions of that sender are searched (owners.py)."""
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

Newest = Callable[[Marks, int], list[int]]
"""Function that returns the newest messages with these marks, up to a limit."""


def candidates(transaction: Transaction, database: Database, asked: Asked) -> Candidates:
    """Return the candidates from one read transaction."""
    return _Gathering(transaction, database, asked).candidates()


class _Gathering:
    """One question in one read transaction."""

    def __init__(self, transaction: Transaction, database: Database, asked: Asked) -> None:
        self._transaction = transaction
        self._sql = sql = database.sql
        self._language = database.language
        self._asked = asked
        self._stems = list(dict.fromkeys(asked.stems))[:_MOST_WORDS]
        rows = transaction.execute(sql["owned" if asked.threads else "own"], (asked.owner,))
        found = [_Session(*row) for row in rows]
        self._sessions = {one.id: one for one in found if not one.mixed}
        self._current = next(
            (one for one in self._sessions.values() if one.key == asked.in_sight_of), None
        )
        barred = [one.id for one in self._sessions.values() if not self._may_tell(one)]
        self._none = len(barred) == len(self._sessions)
        barred += [one.id for one in found if one.mixed]
        marks = [owner_mark(asked.owner)] if asked.threads else map(session_mark, self._sessions)
        self._where = list(marks)  # guard: recall-own-messages
        self._but = list(map(session_mark, barred))
        self._sights: dict[int, _Sight] = {}
        self._seen = self._seen_ids()
        self._containing: dict[str, int] = {}

    def candidates(self) -> Candidates:
        """Return the candidates, and the frequencies of the words."""
        places: dict[tuple[int, int], None] = {}
        if not self._none:
            timed = self._asked.since is not None or self._asked.until is not None
            if timed:
                places.update(dict.fromkeys(self._best(self._newest_in_time)))
            if self._stems and (not timed or len(places) < _ENOUGH):
                places.update(dict.fromkeys(self._best(self._newest)))
        hits = list(places)[: self._asked.limit]
        return Candidates(
            messages=list(self._said(hits)),
            count=sum(one.count for one in self._sessions.values()),
            containing=self._containing,
        )

    # --- scope -------------------------------------------------------------------------------

    def _may_tell(self, session: _Session) -> bool:
        """Whether messages of this session may be returned."""
        return bool(
            session.listed
            and (self._asked.agent is None or session.agent in (None, self._asked.agent))
            and not (session is self._current and session.visible >= session.count)
        )

    def _sight(self, session: int) -> "_Sight":
        if session not in self._sights:
            known = self._sessions[session]
            self._sights[session] = _Sight(_spans(known.sight), _spans(known.withdrawn))
        return self._sights[session]

    def _seen_ids(self) -> set[int]:
        """Return the ids of the messages that are visible in the asking session."""
        if self._current is None or self._current.visible >= self._current.count:
            return set()
        return {
            id_
            for span in self._sight(self._current.id).seqs
            for (id_,) in self._transaction.execute(self._sql["seen"], (self._current.id, *span))
        }

    # --- selection ---------------------------------------------------------------------------

    def _newest(self, words: Marks, limit: int) -> list[int]:
        """Return the newest matches, up to a limit."""
        return self._unseen("newest_with", self._in(words), limit)

    def _newest_in_time(self, words: Marks, limit: int) -> list[int]:
        """Return the newest matches of the requested period, up to a limit."""
        since = self._asked.since if self._asked.since is not None else -(2**62)
        until = self._asked.until if self._asked.until is not None else 2**62
        blocks = [
            block
            for block, oldest, newest in self._transaction.execute(self._sql["blocks"])
            if newest >= since and oldest < until
        ]
        if not blocks:
            return []
        ids = (min(blocks) * BLOCK, (max(blocks) + 1) * BLOCK - 1)
        return self._unseen("newest_with_in", (*self._in(words), *ids, since, until), limit)

    def _unseen(self, name: str, values: Sequence[object], limit: int) -> list[int]:
        # Visible messages are mostly the newest ones, and must not use up the limit.
        most = _ALL if limit == _ALL else limit + len(self._seen)
        rows = self._transaction.execute(self._sql[name], (*values, most))
        found = [id_ for (id_,) in rows if id_ not in self._seen]
        return found if limit == _ALL else found[:limit]

    def _in(self, words: Marks) -> Values:
        """Return the full-text query for the words in the messages of the owner."""
        return self._language.marked([*words, self._where], but=self._but)

    def _best(self, newest: Newest) -> Iterator[tuple[int, int]]:
        """Yield session and seq of the messages with the most and rarest words, then the newest."""
        limit = self._asked.limit
        if not self._stems:
            return self._findable(newest([], limit))
        found = {stem: newest([[stem_mark(stem)]], _MOST_EACH) for stem in self._stems}
        rare = [stem for stem, ids in found.items() if 0 < len(ids) < _MOST_EACH]
        for stem, ids in found.items():
            if len(ids) == _MOST_EACH and rare:
                # Messages of any age that have this common word and a rare one.
                both = [[stem_mark(one) for one in rare], [stem_mark(stem)]]
                found[stem] = list(dict.fromkeys([*ids, *newest(both, _ALL)]))
        total = sum(one.count for one in self._sessions.values())
        scores: dict[int, float] = {}
        for stem, ids in found.items():
            self._containing[stem] = max(len(ids), self._containing.get(stem, 0))
            weight = math.log(1 + total / (len(ids) + 0.5))
            for id_ in ids:
                scores[id_] = scores.get(id_, 0.0) + weight
        ranked = sorted(scores, key=lambda id_: (-scores[id_], -id_))
        # Withdrawn messages must not use up the limit, however many there are.
        return islice(self._findable(ranked), limit)

    def _findable(self, ids: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield session and seq of these ids in order, without withdrawn messages."""
        step = 2 * self._asked.limit
        for start in range(0, len(ids), step):
            some = ids[start : start + step]
            rows = self._transaction.execute(self._sql["where_said"], (json.dumps(some),))
            places = {id_: (session, seq) for id_, session, seq in rows}
            for id_ in some:
                session, seq = places.get(id_, (0, 0))
                if session in self._sessions and self._sight(session).may_tell(seq):
                    yield session, seq

    # --- content -----------------------------------------------------------------------------

    def _said(self, hits: Sequence[tuple[int, int]]) -> Iterator[Candidate]:
        """Yield these messages, and the neighbours of the best ones."""
        places = dict.fromkeys(hits)
        for session, seq in hits[:_MOST_NEIGHBOURED]:
            places.update({(session, seq + step): None for step in _STEPS})
        wanted = []
        for session, seq in places:
            sight = self._sight(session)
            is_current = self._current is not None and session == self._current.id
            in_sight = is_current and spans.contains(sight.seqs, seq)
            if sight.may_tell(seq) and not in_sight:
                wanted.append((session, seq))
        values = (LONGEST_TEXT, json.dumps(wanted))
        rows = self._transaction.execute(self._sql["said_at"], values)
        for key, uid, seq, role, at, text in rows:
            told = text[:LONGEST_TEXT]
            yield Candidate(key=key, uid=uid, seq=seq, role=role, at=moment(at), text=told)


class _Sight(Struct, frozen=True):
    """The visible and the withdrawn seqs of a session."""

    seqs: list[Span]
    withdrawn: list[Span]

    def may_tell(self, seq: int) -> bool:
        """Whether it is visible, or hidden before the first visible one and not withdrawn."""
        if self.seqs and seq >= self.seqs[0][0]:
            return spans.contains(self.seqs, seq)
        return not spans.contains(self.withdrawn, seq)


def _spans(text: str) -> list[Span]:
    return msgspec.json.decode(text, type=list[Span])
