"""Turn facts found by a model into notes: new ones, known ones, and replacements. Pure.

The same facts and the same notes always give the same drafts.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Final

from msgspec import Struct

from stenolog.memory import named_details, quotes
from stenolog.memory.note_records import Draft, Note

LONGEST_TEXT: Final = 500
LONGEST_ABOUT: Final = 60
LONGEST_QUOTE: Final = 500
"""Maximum number of characters that are stored of each field."""


class Fact(Struct, frozen=True, kw_only=True):
    """A statement about the user, according to a model."""

    text: str
    about: str = ""
    """Subject, such as `diet`. Of two facts with the same subject, the newer one is in force."""
    quote: str = ""
    """The user's exact words."""
    confidence: float = 0.5


def subject(about: str) -> str:
    """Normalize a subject for comparisons: words without case and punctuation."""
    return " ".join(quotes.words(about))[:LONGEST_ABOUT].strip()


def is_backed(fact: Fact, spoken: Sequence[str], earlier: Sequence[str] = ()) -> bool:
    """Whether the user said the quote of a fact, and the fact can follow from it.

    `spoken`: what the user said in this turn. `earlier`: what the user said before, such as the
    quotes of known facts; a name or a number in the fact may come from there.
    """
    # guard: fact-quote-checked
    if not quotes.said(fact.quote, spoken) or not quotes.follows(fact.text, fact.quote):
        return False
    said = (*spoken, *earlier)
    # guard: fact-specifics-said
    if named_details.unsaid(f"{fact.text}\n{fact.about}", said):
        return False
    # guard: fact-values-said
    if quotes.unsaid_values(fact.text, said):
        return False
    return quotes.shares_enough(fact.text, said)


def about_the_same(about: str, known: Sequence[Note]) -> list[Note]:
    """Return the notes with the same subject, which a new note replaces; empty without one."""
    wanted = subject(about)
    return [note for note in known if wanted and subject(note.about) == wanted]


def new_notes(
    facts: Sequence[Fact],
    known: Sequence[Note],
    *,
    at: datetime | None = None,
    session: str = "",
    uid: str = "",
    seqs: tuple[int, ...] = (),
) -> list[Draft]:
    """Return drafts of the new facts, each with the notes that it replaces.

    `known`: the core notes in force. `at`: the time of the statement. If a known note with the same
    subject is newer, the fact is outdated and left out, because old sessions may be read late. Two
    facts of one turn never replace each other, even with the same subject: a user rarely
    contradicts himself within a turn, but often names two things.
    """
    drafts: list[Draft] = []
    meanings = {_meaning(note.text) for note in known}
    for fact in facts:
        meaning = _meaning(fact.text)
        if meaning in meanings:
            continue
        meanings.add(meaning)
        same = about_the_same(fact.about, known)
        if at is not None and any(note.at > at for note in same):
            continue
        drafts.append(
            Draft(
                kind="core",
                text=_cut(fact.text, LONGEST_TEXT),
                about=subject(fact.about),
                quote=_cut(fact.quote, LONGEST_QUOTE),
                session=session,
                uid=uid,
                seqs=seqs,
                confidence=min(max(fact.confidence, 0.0), 1.0),
                supersedes=tuple(note.id for note in same),
                at=at,
            )
        )
    return drafts


def _meaning(text: str) -> tuple[str, ...]:
    """Return the content words in order. Two texts with equal ones say the same."""
    # A text that has only function words is compared by all its words.
    return quotes.content_words(text) or tuple(quotes.words(text)) or (text,)


def _cut(text: str, most: int) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 1] + "…"
