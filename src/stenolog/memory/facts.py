"""Makes drafts of notes from the facts that a model returned. Pure functions.

The same facts and the same notes always give the same drafts.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Final

from msgspec import Struct

from stenolog.memory import named_details, quotes
from stenolog.memory.note_records import Draft, Note

MAX_TEXT_CHARACTERS: Final = 500
MAX_ABOUT_CHARACTERS: Final = 60
MAX_QUOTE_CHARACTERS: Final = 500
"""Maximum number of characters stored per field of a fact."""


class Fact(Struct, frozen=True, kw_only=True):
    """A statement about the user, according to a model."""

    text: str
    about: str = ""
    """Subject, such as `diet`. Of the facts with the same subject, the newest is in force."""
    quote: str = ""
    """The user's exact words."""
    confidence: float = 0.5


def normalize_subject(about: str) -> str:
    """Normalize a subject for comparisons: words without case and punctuation."""
    return " ".join(quotes.words(about))[:MAX_ABOUT_CHARACTERS].strip()


def is_supported(fact: Fact, user_texts: Sequence[str], earlier_texts: Sequence[str] = ()) -> bool:
    """Whether the user said the quote of a fact, and the fact can follow from the quote.

    `user_texts`: texts of the user in this turn. `earlier_texts`: earlier texts of the user, such
    as the quotes of known facts. A name or a number in the fact may come from `earlier_texts`.
    """
    # guard: fact-quote-checked
    if not quotes.is_quoted(fact.quote, user_texts) or not quotes.is_related(fact.text, fact.quote):
        return False
    said_texts = (*user_texts, *earlier_texts)
    # guard: fact-specifics-said
    if named_details.unsupported_details(f"{fact.text}\n{fact.about}", said_texts):
        return False
    # guard: fact-values-said
    if quotes.unsupported_values(fact.text, said_texts):
        return False
    return quotes.shares_enough_words(fact.text, said_texts)


def same_subject(about: str, known_notes: Sequence[Note]) -> list[Note]:
    """Return the known notes with the same subject, which a new note replaces."""
    subject = normalize_subject(about)
    return [note for note in known_notes if subject and normalize_subject(note.about) == subject]


def new_notes(
    facts: Sequence[Fact],
    known_notes: Sequence[Note],
    *,
    at: datetime | None = None,
    session: str = "",
    uid: str = "",
    seqs: tuple[int, ...] = (),
) -> list[Draft]:
    """Return drafts of the new facts, each with the notes that it replaces.

    `known_notes`: the core notes in force. `at`: the time of the statement. If a known note with
    the same subject is newer, the fact is outdated and left out, because old sessions may be read
    late. Two facts of one turn never replace each other, even with the same subject: a user rarely
    contradicts himself within a turn, but often names two things.
    """
    drafts: list[Draft] = []
    known_texts = {_text_key(note.text) for note in known_notes}
    for fact in facts:
        text_key = _text_key(fact.text)
        if text_key in known_texts:
            continue
        known_texts.add(text_key)
        same_subject_notes = same_subject(fact.about, known_notes)
        if at is not None and any(note.at > at for note in same_subject_notes):
            continue
        drafts.append(
            Draft(
                kind="core",
                text=_cut_text(fact.text, MAX_TEXT_CHARACTERS),
                about=normalize_subject(fact.about),
                quote=_cut_text(fact.quote, MAX_QUOTE_CHARACTERS),
                session=session,
                uid=uid,
                seqs=seqs,
                confidence=min(max(fact.confidence, 0.0), 1.0),
                supersedes=tuple(note.id for note in same_subject_notes),
                at=at,
            )
        )
    return drafts


def _text_key(text: str) -> tuple[str, ...]:
    """Return the content words in order. Texts with equal content words say the same."""
    # A text that has only function words is compared by all its words.
    return quotes.content_words(text) or tuple(quotes.words(text)) or (text,)


def _cut_text(text: str, limit: int) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"
