"""Recall: what notes and past messages have to do with a question, in one block for the prompt.

Only one scope is ever looked at. Notes that were superseded or forgotten are no part of it, nor
what the asking session has in sight anyway. What was recalled earlier is taken out of the messages
before they are looked at, so that nothing is found because it was found before.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

from stenolog.catalog import Catalog
from stenolog.errors import UsageError
from stenolog.memory.blocks import strip_blocks
from stenolog.memory.notes import Note, Notes
from stenolog.memory.ranking import Candidate, Commonness, Question, Ranked, rank, understood
from stenolog.memory.scopes import Scope
from stenolog.memory.telling import Found, Recalled, tell
from stenolog.tokens import Tokens

__all__ = ["Found", "Recalled", "recall"]

CANDIDATES: Final = 200
"""So many messages that share words with the question are ranked, and so many notes."""

_LEAST: Final = 0.25
"""What is so much worse than the best has little to do with the question."""

_MOST_TOLD: Final = 50


def recall(
    question: str,
    *,
    scope: Scope,
    notes: Notes | None,
    catalog: Catalog | None,
    budget: int = 1_500,
    half_life_days: float = 30.0,
    now: datetime | None = None,
    exclude_session: str | None = None,
    unasked: bool = True,
    tokens: Tokens | None = None,
) -> Recalled:
    """What one scope knows about a question, within a budget of tokens.

    `unasked`: where room is left, the newest core facts are told as well: what a question shares no
    word with may still be what it is about. `now`: dates, and words such as "yesterday", are those
    of its zone. `tokens`: the counter of the model that gets the block.

    `exclude_session`: the session that asks; what it has in sight is not told again, what was
    compacted away is. `half_life_days`: after so long half of what age can take from a score is
    gone; 0: age takes nothing. Raises
    UsageError for a time without a zone, and what the stores raise.
    """
    moment = datetime.now(UTC) if now is None else now
    count = (tokens or Tokens()).text
    if moment.tzinfo is None:
        raise UsageError(f"now={moment.isoformat()}: a time with its zone is wanted")
    asked = understood(question, now=moment)
    more = _newest_facts(notes, scope) if unasked and notes is not None else []
    if asked.empty:
        return tell([], asked, more=more, budget=budget, count=count, zone=moment.tzinfo)
    noted = [] if notes is None else _notes(asked, notes, scope)
    said, commonness = _messages(asked, catalog, scope, exclude_session)
    ranked = rank(
        asked, [*noted, *said], now=moment, half_life_days=half_life_days, commonness=commonness
    )
    worthy = _worthy(ranked, asked)
    return tell(worthy, asked, more=more, budget=budget, count=count, zone=moment.tzinfo)


def _newest_facts(notes: Notes, scope: Scope) -> list[Ranked]:
    facts = notes.list(scope, kind="core")[: -_MOST_TOLD - 1 : -1]
    return [Ranked(candidate=_candidate(note), score=0.0) for note in facts]


def _candidate(note: Note) -> Candidate:
    hints = f"{note.about}\n{note.quote}"
    return Candidate(kind=note.kind, source=note.id, at=note.at, text=note.text, hints=hints)


def _notes(question: Question, notes: Notes, scope: Scope) -> list[Candidate]:
    """The notes that share words with the question, or those of the time that it names."""
    found = notes.candidates(question.stems, scope=scope, period=question.period, limit=CANDIDATES)
    return [_candidate(note) for note in found]


def _messages(
    question: Question,
    catalog: Catalog | None,
    scope: Scope,
    session: str | None,
) -> tuple[list[Candidate], Commonness]:
    """The messages of the scope that may have to do with the question."""
    if catalog is None:
        return [], Commonness()
    period = question.period
    found = catalog.candidates(
        question.stems,
        owner=scope.who,
        threads=scope.of == "sender",
        agent=scope.agent,
        in_sight_of=session,
        since=None if period is None else period.since,
        until=None if period is None else period.until,
        limit=CANDIDATES,
    )
    own_words = _plain(question.text)
    said = [
        Candidate(
            kind="message",
            source=f"{one.key}:{one.seq}",
            at=one.at,
            text=text,
            role=one.role,
            session=one.uid,
            seq=one.seq,
        )
        for one in found.messages
        if (text := strip_blocks(one.text).strip())
        and not (one.role == "user" and _plain(text) == own_words)
    ]
    return said, Commonness(count=found.count, containing=found.containing)


def _worthy(ranked: Sequence[Ranked], question: Question) -> list[Ranked]:
    """Each text once, as far as it is not much worse than the best."""
    told: set[str] = set()
    kept: list[Ranked] = []
    for one in ranked:
        if question.stems and one.score < _LEAST * ranked[0].score:
            break
        words = _plain(one.candidate.text)
        if words not in told:
            told.add(words)
            kept.append(one)
        if len(kept) == _MOST_TOLD:
            break
    return kept


def _plain(text: str) -> str:
    """A text as it is compared: without case, and with single spaces."""
    return " ".join(text.casefold().split())
