"""Full-text search of PostgreSQL. Typed text is always quoted and never an operator. Pure.

A tsquery finds the messages that have the words, but not their order. Consecutive words are checked
among these messages in the stored tokens, because positions in a tsvector end at 16,383, and at 255
for each word.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from stenolog.catalog.catalog_database import BLOCK
from stenolog.catalog.fulltext import Indexed, Values
from stenolog.catalog.query import Query, Run, Term, forms, role_mark, session_mark

_MOST_BYTES: Final = 1_000_000
"""Maximum number of bytes of the tokens of a message; PostgreSQL's limit is a little higher."""

_MOST_COUNTED: Final = 16
"""Maximum number of occurrences of a word that count for ranking."""
_COUNTS: Final = [
    ":" + ",".join(map(str, range(1, count + 1))) for count in range(1, _MOST_COUNTED + 1)
]
_COUNT_BYTES: Final = 2 * _MOST_COUNTED + 4

_OWN_MARKS: Final = 4
"""Number of marks before the stems: block, session, owner and role."""

_MOST_TOKENS: Final = 16
"""Maximum number of tokens of a form in the tsquery; the others are checked in the tokens."""
_LONGEST: Final = 500
"""Longer than any token; PostgreSQL accepts no token of more than 2,046 bytes."""


class TSQuery:
    """Values for PostgreSQL: a tsquery, and the conditions that it cannot express."""

    def added(self, said: Sequence[Indexed]) -> list[Values]:
        """Return the words as a tsvector, and in order."""
        return [(one.id, _vector(one), f" {one.parts} \n {one.more} ") for one in said]

    def removed(self, ids: Sequence[int], again: Callable[[], Sequence[Indexed]]) -> list[Values]:
        """Return the ids of these messages."""
        del again
        return [(id_,) for id_ in ids]

    def matching(self, query: Query, *, role: str | None, sessions: Sequence[int]) -> Values:
        """Return a search for a query, optionally limited to a role and to sessions."""
        asked: list[str] = []
        looked_up: list[tuple[bool, list[list[str]]]] = []
        for term in query.terms:
            found = forms(term)
            certain = all(map(_is_certain, found))
            if not certain:
                looked_up.append((term.excluded, [[_piece(run) for run in form] for form in found]))
            if not term.excluded:
                asked.append(_joined(" | ", map(_loosely, found)))
            elif certain:
                asked.append(f"!{_joined(' | ', map(_loosely, found))}")
        if role is not None:
            asked.append(_lexeme(role_mark(role)))
        if sessions:
            asked.append(_any(map(session_mark, sessions)))
        more = json.dumps(looked_up, ensure_ascii=False) if looked_up else None
        return _joined(" & ", asked), more

    def ranking(self, query: Query) -> Values | None:
        """Return the part of a query that is used for ranking, or None if there is none."""
        tokens = dict.fromkeys(token for term in query.told for token in _tokens(term))
        return (_any(tokens),) if tokens else None

    def marked(self, every: Sequence[Sequence[str]], *, but: Sequence[str]) -> Values:
        """Return a search for messages with a mark of each group in `every`, and none in `but`."""
        asked = [_any(group) for group in every]
        if but:
            asked.append(f"!{_any(but)}")
        return (_joined(" & ", asked),)


def _vector(one: Indexed) -> str:
    """Return all tokens of a message as a tsvector. Tokens beyond the limit are left out.

    Tokens have no quotes or backslashes (tokenizer.py), so they need no escapes.
    """
    words = Counter(one.parts.split())
    words.update(one.more.split())
    marks = [_block_mark(one.id // BLOCK), *one.marks.split()]
    size = len(one.parts.encode()) + len(one.more.encode()) + len(one.marks.encode())
    if size + _COUNT_BYTES * len(words) <= _MOST_BYTES:
        told = [
            f"'{word}'{_COUNTS[min(count, _MOST_COUNTED) - 1]}" for word, count in words.items()
        ]
        return " ".join([*told, *(f"'{mark}'" for mark in marks)])
    # First omit the numbers of occurrences, then the last stems. Hardly any text of 64 K characters
    # has that many.
    room, told = _MOST_BYTES, []
    for token in dict.fromkeys([*marks[:_OWN_MARKS], *words, *marks[_OWN_MARKS:]]):
        room -= len(token.encode())
        if room < 0:
            break
        told.append(f"'{token}'")
    return " ".join(told)


def _block_mark(block: int) -> str:
    """Return the token of all messages of a block, which limits a search to the newest blocks."""
    return f"=b{block}"


def _tokens(term: Term) -> list[str]:
    return [token for form in forms(term) for run in form for token in run.tokens]


def _is_certain(form: Sequence[Run]) -> bool:
    """Whether the tsquery alone decides if a message has this form."""
    return len(form) <= _MOST_TOKENS and all(len(run.tokens) == 1 for run in form)


def _loosely(form: Sequence[Run]) -> str:
    """Return a tsquery for the first tokens of a form, in any order."""
    asked: dict[str, None] = {}
    for run in form:
        last = len(run.tokens) - 1
        for number, token in enumerate(run.tokens):
            asked[_lexeme(token, begins=run.begins and number == last)] = None
            if len(asked) == _MOST_TOKENS:
                return _joined(" & ", asked)
    return _joined(" & ", asked)


def _piece(run: Run) -> str:
    """Return the tokens of a run as they occur in the column `lines`."""
    return f" {' '.join(run.tokens)}{'' if run.begins else ' '}"


def _any(tokens: Iterable[str]) -> str:
    return _joined(" | ", map(_lexeme, tokens))


def _joined(sign: str, asked: Iterable[str]) -> str:
    """Join in brackets as a balanced tree: PostgreSQL recurses as deep as the nesting."""
    parts = list(asked)
    while len(parts) > 1:
        pairs = [sign.join(parts[at : at + 2]) for at in range(0, len(parts), 2)]
        parts = [f"({pair})" for pair in pairs]
    return parts[0]


def _lexeme(token: str, *, begins: bool = False) -> str:
    """Quote a token."""
    # guard: query-quoted
    plain = token[:_LONGEST].replace("\\", "\\\\").replace("'", "''").replace("\0", "\x1a")
    return f"'{plain}'{':*' if begins else ''}"
