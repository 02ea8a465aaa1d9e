"""A question as recall takes it: its words in their common form, and the time it names. Pure."""

from datetime import datetime

from msgspec import Struct

from stenolog.catalog.stemming import stems
from stenolog.memory.blocks import strip_blocks
from stenolog.memory.time_words import Period, told

_LONGEST = 4_000
"""Of a longer question, so many characters count."""


class Question(Struct, frozen=True, kw_only=True):
    """What is asked for."""

    text: str
    stems: tuple[str, ...]
    """Its words, each once, without stop words and without those that name a time."""
    period: Period | None
    """The time that it names."""

    @property
    def empty(self) -> bool:
        """Whether nothing can be looked for."""
        return not self.stems and self.period is None


def understood(question: str, *, now: datetime) -> Question:
    """The question taken apart, as seen from `now`."""
    text = strip_blocks(question)[:_LONGEST]
    found = told(text, now=now)
    return Question(text=text, stems=tuple(dict.fromkeys(stems(found.rest))), period=found.period)
