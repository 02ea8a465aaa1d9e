"""Search for messages. The cost is bounded, regardless of the number of matches.

Few matches are all read. Of many, the newest are found block by block (schema.sql), starting with
the blocks that may contain the newest, so that a word in every message is as fast as a rare one.
Ranking is limited to the newest thousand matches. Only if a filter excludes almost all matches of a
common word are all of them read.
"""

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Final

import msgspec
from msgspec import Struct

from stenolog.catalog.catalog_database import (
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
"""Maximum number of matches that are ranked; of more, the newest."""

_MOST_MARKS: Final = 64
"""Maximum number of sessions in the full-text query; more are filtered afterwards."""

_MOST_BLOCKS: Final = 32
"""Maximum number of blocks per query."""


class Filter(Struct, frozen=True, kw_only=True):
    """Conditions besides the query."""

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
    """Matches, newest first."""
    complete: bool
    """Whether these are all matches."""


class Search:
    """One search in one read transaction."""

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
        """Return the newest matches first."""
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
        """Return the best matches first, by BM25; of equal ones the newest."""
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

    # --- matches -----------------------------------------------------------------------------

    def _wanted_sessions(self) -> set[int] | None:
        """Return the sessions that prefix and tag select, or None for all sessions."""
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
        """Return up to `count` of the newest matches after `start`."""
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
        """Read blocks, newest first, until no other block can have newer matches.

        `batch`: the estimated number of blocks. Reading several at once is cheaper, especially for
        prefixes.
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
        first, last = min(blocks) * BLOCK, (max(blocks) + 1) * BLOCK - 1
        values = (*self._matching, first, last, BLOCK, json.dumps(blocks))
        return list(self._transaction.execute(self._sql["matches_in"], values))

    def _ranks(self, ids: Sequence[int]) -> dict[int, float]:
        """Return the rank of each message, lower is better; empty without terms for ranking."""
        asked = self._language.ranking(self._query)
        if not ids or asked is None:
            return {}
        values = (*asked, min(ids), max(ids), json.dumps(ids))
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
