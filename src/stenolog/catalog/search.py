"""Finding messages, at a bounded cost however many there are that match.

Few hits are taken as they are. Of many, the newest are found block by block (schema.sql), those
first that may hold them, so that a word that stands in every message is looked up as quickly as
a rare one; and of many, the newest thousand are ranked. Only a filter that leaves next to nothing
of a word that stands everywhere has all its messages looked at.
"""

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Final

import msgspec
from msgspec import Struct

from stenolog.catalog.database import (
    BLOCK,
    MOST,
    Database,
    Row,
    Transaction,
    microseconds,
    moment,
    prefix_range,
)
from stenolog.catalog.entries import Hit, Hits
from stenolog.catalog.query import Query
from stenolog.catalog.snippets import snippet
from stenolog.errors import UsageError
from stenolog.records import Span
from stenolog.stores import spans

FEW: Final = 1_000
"""So many hits are ranked; of more, the newest."""

_MOST_MARKS: Final = 64
"""So many sessions are named to the index itself; more are left out afterwards."""

_MOST_BLOCKS: Final = 32
"""So many are asked for at once."""


class Filter(Struct, frozen=True, kw_only=True):
    """Which messages are wanted besides those that match."""

    role: str | None
    prefix: str
    tag: str | None
    since: datetime | None
    until: datetime | None


class _Found(Struct, frozen=True, order=True):
    at: int
    id: int


class _Block(Struct, frozen=True):
    block: int
    oldest: int
    newest: int


class _Gathered(Struct, frozen=True):
    newest: Sequence[_Found]
    """The newest first."""
    complete: bool
    """Whether these are all."""


class Search:
    """One search in one look at the index."""

    def __init__(
        self, transaction: Transaction, database: Database, query: Query, wanted: Filter
    ) -> None:
        self._transaction = transaction
        self._sql = database.sql
        self._language = database.language
        self._query = query
        self._filter = wanted
        self._sessions = self._wanted_sessions()
        few = self._sessions is not None and len(self._sessions) <= _MOST_MARKS
        self._matching = self._language.matching(
            query, role=wanted.role, sessions=sorted(self._sessions or ()) if few else ()
        )
        self._since = microseconds(wanted.since) if wanted.since is not None else None
        self._until = microseconds(wanted.until) if wanted.until is not None else None
        self._unlisted = {id_ for (id_,) in transaction.execute(self._sql["unlisted"])}

    def newest(self, limit: int, after: str | None) -> Hits:
        """The newest hits first."""
        start = None if after is None else _decoded(after)
        if self._sessions is not None and not self._sessions:
            return Hits(hits=(), count=0, exact=True, after=None)
        found = self._gather(limit + 1, start)
        page = found.newest[:limit]
        return Hits(
            hits=[hit for one in page for hit in self._hit(one.id)],
            count=len(found.newest),
            exact=found.complete and start is None,
            after=_encoded(page[-1]) if len(found.newest) > limit else None,
        )

    def best(self, limit: int, after: str | None) -> Hits:
        """The best hits first, by bm25; of equal ones the newest."""
        start = _offset(after) if after is not None else 0
        if self._sessions is not None and not self._sessions:
            return Hits(hits=(), count=0, exact=True, after=None)
        found = self._gather(FEW, None)
        ranks = self._ranks([one.id for one in found.newest])
        ranked = sorted(found.newest, key=lambda one: (ranks.get(one.id, 0.0), -one.at, -one.id))
        page = ranked[start : start + limit]
        end = start + len(page)
        return Hits(
            hits=[hit for one in page for hit in self._hit(one.id)],
            count=len(ranked),
            exact=found.complete,
            after=str(end) if page and end < len(ranked) else None,
        )

    # --- which -------------------------------------------------------------------------------

    def _wanted_sessions(self) -> set[int] | None:
        """The sessions that prefix and tag leave; None where that is all of them."""
        if not self._filter.prefix and self._filter.tag is None:
            return None
        values = (*prefix_range(self._filter.prefix), self._filter.tag)
        return {id_ for (id_,) in self._transaction.execute(self._sql["sessions_of"], values)}

    def _is_wanted(self, at: int, session: int) -> bool:
        return (
            (self._since is None or at >= self._since)
            and (self._until is None or at < self._until)
            and (self._sessions is None or session in self._sessions)
            and session not in self._unlisted
        )

    def _gather(self, count: int, start: _Found | None) -> _Gathered:
        """So many of the newest hits that come after `start`."""
        rows = list(self._transaction.execute(self._sql["matches"], (*self._matching, FEW + 1)))
        if len(rows) > FEW:
            ids = [row[0] for row in rows]
            near = (max(ids) - min(ids) + 1) / len(ids) * count / BLOCK
            return self._gather_by_blocks(count, start, 1 + int(near))
        found = sorted(self._accepted(rows, start), reverse=True)
        return _Gathered(found[:count], complete=len(found) <= count)

    def _accepted(self, rows: Sequence[Row], start: _Found | None) -> list[_Found]:
        found = [_Found(at, id_) for id_, at, session in rows if self._is_wanted(at, session)]
        return [one for one in found if one < start] if start is not None else found

    def _gather_by_blocks(self, count: int, start: _Found | None, batch: int) -> _Gathered:
        """Block by block, those first that may have the newest; until no other can have newer.

        `batch`: how many it will take, as far as that can be told. To ask for many at once is
        cheaper, above all where a word is only begun.
        """
        blocks = self._blocks(start)
        found: list[_Found] = []
        while blocks:
            if len(found) >= count and found[count - 1].at > blocks[0].newest:
                return _Gathered(found[:count], complete=False)
            size = min(batch, _MOST_BLOCKS)
            asked, blocks = blocks[:size], blocks[size:]
            found += self._accepted(self._matches_in([one.block for one in asked]), start)
            found = sorted(found, reverse=True)[: count + 1]
            batch *= 2
        return _Gathered(found[:count], complete=len(found) <= count)

    def _blocks(self, start: _Found | None) -> list[_Block]:
        """Those that may hold what is wanted."""
        found = [_Block(*row) for row in self._transaction.execute(self._sql["blocks"])]
        return [
            one
            for one in found
            if (self._since is None or one.newest >= self._since)
            and (self._until is None or one.oldest < self._until)
            and (start is None or one.oldest <= start.at)
        ]

    def _matches_in(self, blocks: Sequence[int]) -> list[Row]:
        first, last = min(blocks) * BLOCK, (max(blocks) + 1) * BLOCK - 1
        values = (*self._matching, first, last, BLOCK, json.dumps(blocks))
        return list(self._transaction.execute(self._sql["matches_in"], values))

    def _ranks(self, ids: Sequence[int]) -> dict[int, float]:
        """How well each of these fits, the less the better; empty where nothing tells."""
        asked = self._language.ranking(self._query)
        if not ids or asked is None:
            return {}
        values = (*asked, min(ids), max(ids), json.dumps(ids))
        return dict(self._transaction.execute(self._sql["ranks"], values))

    # --- what is shown -----------------------------------------------------------------------

    def _hit(self, id_: int) -> list[Hit]:
        """The hit, where its session is still there."""
        return [  # guard: search-shows-hidden
            Hit(
                key=key,
                uid=uid,
                title=title,
                seq=seq,
                role=role,
                at=moment(at),
                hidden=not spans.contains(msgspec.json.decode(sight, type=list[Span]), seq),
                snippet=(shown := snippet(text, self._query)).text,
                marks=shown.marks,
            )
            for key, uid, title, sight, seq, role, at, text in self._transaction.execute(
                self._sql["hit"], (id_,)
            )
        ]


def _encoded(last: _Found) -> str:
    return f"{last.at}.{last.id}"


def _decoded(after: str) -> _Found:
    at, _, id_ = after.partition(".")
    try:
        return _Found(min(int(at), MOST), min(int(id_), MOST))
    except ValueError:
        raise UsageError(f"after={after!r} is not what a page before it gave") from None


def _offset(after: str) -> int:
    try:
        return min(max(0, int(after)), MOST)
    except ValueError:
        raise UsageError(f"after={after!r} is not what a page before it gave") from None
