"""From what a person types to what the index is asked. Pure, and no text is refused.

Plain words must all be there. `"in quotes"`: in this order. `-word`: not there. `wor*`: words that
begin so. Whatever else stands in a query is taken literally.
"""

import re
from collections.abc import Sequence
from typing import Final

from msgspec import Struct

from stenolog.catalog import tokenizer
from stenolog.catalog.tokenizer import Word

_TERM = re.compile(
    r'(?P<not>(?:-(?=[^\s-]))?)(?:"(?P<phrase>[^"]*)"|(?P<word>[^\s"]+))(?P<begins>\*?)'
)
_LONGEST_ROLE = 32
MOST_TERMS: Final = 64
"""What comes after so many different terms is passed over: each costs a walk through the index."""


class Term(Struct, frozen=True):
    """One thing that is asked for."""

    words: Sequence[Word]
    excluded: bool
    begins: bool
    """Whether the last of the words may go on."""


class Query(Struct, frozen=True):
    """What was asked for; no term where nothing can be searched for."""

    terms: Sequence[Term]

    @property
    def empty(self) -> bool:
        """Whether nothing is asked for but what must not be there."""
        return all(term.excluded for term in self.terms)

    @property
    def told(self) -> list[Term]:
        """What tells how well a message fits: all but what must not be there, or only begins so."""
        return [term for term in self.terms if not term.excluded and not term.begins]


class Run(Struct, frozen=True):
    """Tokens that stand one behind the other."""

    tokens: Sequence[str]
    begins: bool = False
    """Whether the last of them may go on."""


def parse(text: str) -> Query:
    """The terms of a query: the first of the different ones, where there are very many."""
    found: list[Term] = []
    seen: set[tuple[str | None, ...]] = set()
    for match in _TERM.finditer(text):
        if match.groups() in seen:
            continue
        if len(found) == MOST_TERMS:
            break
        seen.add(match.groups())
        body = match["phrase"] if match["phrase"] is not None else match["word"]
        words = tokenizer.words(body)
        if any(word.parts for word in words):
            begins = bool(match["begins"]) or body.endswith("*")
            found.append(Term(words, bool(match["not"]), begins))
    return Query(found)


def forms(term: Term) -> list[list[Run]]:
    """A term as it is written, and as if each of its words were written in one, if that differs.

    Of each form all runs must be there.
    """
    written = [part for word in term.words for part in word.parts]
    joined = [part for word in term.words for part in word.joined or word.parts]
    singles = {single for word in term.words for single in word.singles}
    found = [_runs(written, singles, begins=term.begins)]
    if joined != written:
        found.append(_runs(joined, singles, begins=term.begins))
    return found


def session_mark(session: int) -> str:
    """The token that each message of a session has."""
    return f"=s{session}"


def role_mark(role: str) -> str:
    """The token that each message of a role has."""
    raw = role.encode()
    if len(raw) > _LONGEST_ROLE:
        # Hardly ever met, and slow to import.
        from hashlib import sha256

        raw = sha256(raw).digest()
    return f"=r{raw.hex()}"


def owner_mark(owner: str) -> str:
    """The token that each message of an owner has."""
    # Who only lists does not wait for it.
    from hashlib import sha256

    return f"=o{sha256(owner.encode('utf-8', 'replace')).hexdigest()[:32]}"


def stem_mark(stem: str) -> str:
    """The token that each message with a form of this word has."""
    return f"=w{stem}"


def _runs(tokens: Sequence[str], singles: set[str], *, begins: bool) -> list[Run]:
    """Tokens in their order. A single character of a script without spaces stands in none."""
    found: list[Run] = []
    run: list[str] = []
    for token in tokens:
        if token in singles:
            found += [Run(run)] * bool(run) + [Run([token])]
            run = []
        else:
            run.append(token)
    if run:
        # A pair of characters does not go on; what begins so, begins with it anyway.
        found.append(Run(run, begins=begins and not (singles and set(run[-1]) <= singles)))
    return found
