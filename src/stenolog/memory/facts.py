"""What becomes of the facts that a model found: kept, known already, or in the place of another.

Pure, and without a model: the same facts against the same notes always give the same drafts.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Final

from msgspec import Struct

from stenolog.memory import quotes, specifics
from stenolog.memory.note_records import Draft, Note

LONGEST_TEXT: Final = 500
LONGEST_ABOUT: Final = 60
LONGEST_QUOTE: Final = 500
"""Characters of each that are kept."""


class Fact(Struct, frozen=True, kw_only=True):
    """Something that a model takes for true of the user."""

    text: str
    about: str = ""
    """What it is about, as `diet`: of two facts about the same, the newer holds."""
    quote: str = ""
    """What the user said, word for word."""
    confidence: float = 0.5


def subject(about: str) -> str:
    """What a fact is about, as it is compared: words without case and punctuation."""
    return " ".join(quotes.words(about))[:LONGEST_ABOUT].strip()


def is_backed(fact: Fact, spoken: Sequence[str], earlier: Sequence[str] = ()) -> bool:
    """Whether the user said what the fact rests on, and the fact can follow from it.

    `spoken`: what the user said in this turn. `earlier`: what the user said before, such as the
    quotes of known facts; a name or a number in the fact may come from there.
    """
    # guard: fact-quote-checked
    if not quotes.said(fact.quote, spoken) or not quotes.follows(fact.text, fact.quote):
        return False
    said = (*spoken, *earlier)
    # guard: fact-specifics-said
    if specifics.unsaid(f"{fact.text}\n{fact.about}", said):
        return False
    # guard: fact-values-said
    if quotes.unsaid_values(fact.text, said):
        return False
    return quotes.shares_enough(fact.text, said)


def about_the_same(about: str, known: Sequence[Note]) -> list[Note]:
    """Those of the notes whose place a new one takes; none where it is about nothing."""
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
    """Drafts of those facts that are new, each with the notes that it takes the place of.

    `known`: the core notes in force. `at`: when it was said; where a known note about the same was
    made later, the fact is of the past and left out: old sessions may be read late. Two facts of
    one turn stand beside each other, also where they are about the same: nobody contradicts
    himself in one breath, but many name two things.
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
    """What two texts have in common that say the same: words with meaning, in the same order."""
    # A text of nothing but small words is at least itself.
    return quotes.content_words(text) or tuple(quotes.words(text)) or (text,)


def _cut(text: str, most: int) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 1] + "…"
