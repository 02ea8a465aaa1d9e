"""Recall: finds notes and past messages that match a question, as one block for the prompt.

Recall reads only one scope. Superseded and forgotten notes are left out, and the visible messages
of the session that asks. Blocks of earlier recalls are removed from messages before the ranking, so
that recalled text does not make a message match.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

from stenolog.catalog import Catalog
from stenolog.errors import UsageError
from stenolog.memory.notes import Note, Notes
from stenolog.memory.prompt_block import strip_blocks
from stenolog.memory.ranking import (
    Candidate,
    Question,
    RankedCandidate,
    WordFrequencies,
    parse_question,
    rank,
)
from stenolog.memory.recall_format import RecallHit, RecallResult, format_recall
from stenolog.memory.scopes import Scope
from stenolog.tokens import Tokens

__all__ = ["RecallHit", "RecallResult", "recall"]

MAX_RANKED: Final = 200
"""Maximum number of ranked messages, and of ranked notes."""

_MIN_RELATIVE_SCORE: Final = 0.25
"""Minimum score of an entry, as a fraction of the best score."""

_MAX_ENTRIES: Final = 50


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
    include_recent_facts: bool = True,
    tokens: Tokens | None = None,
) -> RecallResult:
    """Return notes and messages of one scope that match a question, within `budget` tokens.

    `include_recent_facts`: fill the remaining budget with the newest core facts, which may be
    relevant without sharing a word with the question. `now`: its time zone is used for dates and
    for words such as "yesterday". `tokens`: the token counter of the model that gets the block.

    `exclude_session`: the session that asks, whose visible messages are left out; its summarized
    messages are searched. `half_life_days`: age in days at which half of the reduction by age
    applies; 0 disables the reduction. Raises UsageError if `now` has no time zone, and the errors
    of the stores.
    """
    moment = datetime.now(UTC) if now is None else now
    count = (tokens or Tokens()).text
    if moment.tzinfo is None:
        raise UsageError(f"now must have a time zone: {moment.isoformat()}")
    query = parse_question(question, now=moment)
    facts = _newest_facts(notes, scope) if include_recent_facts and notes is not None else []
    best: list[RankedCandidate] = []
    if not query.is_empty:
        candidates, frequencies = _message_candidates(query, catalog, scope, exclude_session)
        ranked = rank(
            query,
            [*_note_candidates(query, notes, scope), *candidates],
            now=moment,
            half_life_days=half_life_days,
            frequencies=frequencies,
        )
        best = _best_entries(ranked, query)
    return format_recall(best, query, extra=facts, budget=budget, count=count, zone=moment.tzinfo)


def _newest_facts(notes: Notes, scope: Scope) -> list[RankedCandidate]:
    facts = notes.list(scope, kind="core")[: -_MAX_ENTRIES - 1 : -1]
    return [RankedCandidate(candidate=_note_candidate(note), score=0.0) for note in facts]


def _note_candidate(note: Note) -> Candidate:
    hints = f"{note.about}\n{note.quote}"
    return Candidate(kind=note.kind, source=note.id, at=note.at, text=note.text, hints=hints)


def _note_candidates(question: Question, notes: Notes | None, scope: Scope) -> list[Candidate]:
    """Return the notes that share words with the question or belong to its period."""
    if notes is None:
        return []
    hits = notes.candidates(question.stems, scope=scope, period=question.period, limit=MAX_RANKED)
    return [_note_candidate(note) for note in hits]


def _message_candidates(
    question: Question, catalog: Catalog | None, scope: Scope, session: str | None
) -> tuple[list[Candidate], WordFrequencies]:
    """Return the messages of the scope that may be relevant to the question."""
    if catalog is None:
        return [], WordFrequencies()
    period = question.period
    hits = catalog.candidates(
        question.stems,
        owner=scope.who,
        threads=scope.of == "sender",
        agent=scope.agent,
        exclude_visible_of=session,
        since=None if period is None else period.since,
        until=None if period is None else period.until,
        limit=MAX_RANKED,
    )
    normalized_question = _normalize_text(question.text)
    message_candidates = [
        Candidate(
            kind="message",
            source=f"{message.key}:{message.seq}",
            at=message.at,
            text=text,
            role=message.role,
            session=message.uid,
            seq=message.seq,
        )
        for message in hits.messages
        if (text := strip_blocks(message.text).strip())
        and not (message.role == "user" and _normalize_text(text) == normalized_question)
    ]
    return message_candidates, WordFrequencies(count=hits.count, containing=hits.containing)


def _best_entries(ranked: Sequence[RankedCandidate], question: Question) -> list[RankedCandidate]:
    """Return each text once, without texts that score much worse than the best text."""
    seen_texts: set[str] = set()
    entries: list[RankedCandidate] = []
    for entry in ranked:
        if question.stems and entry.score < _MIN_RELATIVE_SCORE * ranked[0].score:
            break
        normalized_text = _normalize_text(entry.candidate.text)
        if normalized_text not in seen_texts:
            seen_texts.add(normalized_text)
            entries.append(entry)
        if len(entries) == _MAX_ENTRIES:
            break
    return entries


def _normalize_text(text: str) -> str:
    """Normalize case and spaces for comparisons."""
    return " ".join(text.casefold().split())
