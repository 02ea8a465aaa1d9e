"""Which texts have what a query asks for, by the words that the catalog would find. Pure.

It reads every text it is given: for the notes of one scope, of which there are not many.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby

from stenolog.catalog import tokenizer
from stenolog.catalog.query import Query, Term


def has_all(query: Query, text: str) -> bool:
    """Whether a text has each term that is wanted, and none that is excluded."""
    lines = tokenizer.lines(text)
    tokens = f" {lines.parts}  {lines.more} "
    return all(_has(term, tokens) != term.excluded for term in query.terms)


def _has(term: Term, tokens: str) -> bool:
    """Whether a term is there as it is written, or as if each word were written in one."""
    written = [part for word in term.words for part in word.parts]
    joined = [part for word in term.words for part in word.joined or word.parts]
    singles = {single for word in term.words for single in word.singles}
    return any(
        all(run in tokens for run in _runs(form, singles, begins=term.begins))
        for form in (written, joined)
    )


def _runs(form: Sequence[str], singles: set[str], *, begins: bool) -> Iterator[str]:
    """Tokens in their order. A single character of a script without spaces stands in none."""
    for single, run in groupby(form, singles.__contains__):
        if single:
            yield from (f" {token} " for token in run)
        else:
            together = list(run)
            # A pair of characters does not go on; what begins so, begins with it anyway.
            goes_on = begins and together[-1] == form[-1] and not set(together[-1]) <= singles
            yield f" {' '.join(together)}{'' if goes_on else ' '}"
