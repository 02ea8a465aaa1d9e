"""From what a person types to what the index is asked. Pure, and no text is refused.

Plain words must all be there. `"in quotes"`: in this order. `-word`: not there. `wor*`: words that
begin so. Whatever else stands in a query is taken literally.
"""

import re
from collections.abc import Iterable, Sequence
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


def expression(query: Query, *, role: str | None = None, sessions: Iterable[int] = ()) -> str:
    """The query in the language of FTS5, limited to a role and to these sessions."""
    wanted = [_term(term) for term in query.terms if not term.excluded]
    if role is not None:
        wanted.append(_quoted([role_mark(role)]))
    marks = [_quoted([session_mark(session)]) for session in sessions]
    if marks:
        wanted.append(f"({' OR '.join(marks)})")
    text = " AND ".join(wanted)
    excluded = [_term(term) for term in query.terms if term.excluded]
    return f"({text}) NOT ({' OR '.join(excluded)})" if excluded else text


def rank_expression(query: Query) -> str:
    """What of a query tells how well a message fits; empty where nothing does.

    What only begins so is left out: FTS5 would gather all words that do, for every count it makes.
    """
    told = [term for term in query.terms if not term.excluded and not term.begins]
    return " AND ".join(map(_term, told))


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


def _term(term: Term) -> str:
    """A term as it is written, or as if each of its words were written in one."""
    written = [part for word in term.words for part in word.parts]
    joined = [part for word in term.words for part in word.joined or word.parts]
    singles = {single for word in term.words for single in word.singles}
    forms = [_run(written, singles, begins=term.begins)]
    if joined != written:
        forms.append(_run(joined, singles, begins=term.begins))
    return f"({' OR '.join(forms)})" if len(forms) > 1 else forms[0]


def _run(tokens: Sequence[str], singles: set[str], *, begins: bool) -> str:
    """Tokens in their order. A single character of a script without spaces stands in none."""
    found: list[str] = []
    run: list[str] = []
    for token in tokens:
        if token in singles:
            found += [_quoted(run)] * bool(run) + [_quoted([token])]
            run = []
        else:
            run.append(token)
    if run:
        # A pair of characters does not go on; what begins so, begins with it anyway.
        goes_on = begins and not (singles and set(run[-1]) <= singles)
        found.append(_quoted(run) + (" *" if goes_on else ""))
    return f"({' AND '.join(found)})" if len(found) > 1 else found[0]


def _quoted(tokens: Sequence[str]) -> str:
    return f'"{" ".join(tokens)}"'
