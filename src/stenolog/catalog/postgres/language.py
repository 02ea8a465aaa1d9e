"""The language of PostgreSQL's full-text search, in which nothing that a person typed is a sign.

A query for words (tsquery) tells which messages have them, not where. What words stand one behind
the other is looked up among those messages, in the tokens themselves: positions end at 16,383, and
at 255 for each word. Pure.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from stenolog.catalog.database import BLOCK
from stenolog.catalog.language import Indexed, Values
from stenolog.catalog.query import Query, Run, Term, forms, role_mark, session_mark

_MOST_BYTES: Final = 1_000_000
"""What the words of one message may take; PostgreSQL allows for little more."""

_MOST_COUNTED: Final = 16
"""A word that is there more often counts as often for the rank of a message."""
_COUNTS: Final = [
    ":" + ",".join(map(str, range(1, count + 1))) for count in range(1, _MOST_COUNTED + 1)
]
_COUNT_BYTES: Final = 2 * _MOST_COUNTED + 4

_OWN_MARKS: Final = 4
"""Block, session, owner and role come before the words in their common form."""

_MOST_TOKENS: Final = 16
"""So many of a form are asked for by name; what is left to ask is looked up in the tokens."""
_LONGEST: Final = 500
"""No token has so many characters, and none that PostgreSQL takes has more than 2,046 bytes."""


class TSQuery:
    """How PostgreSQL is told and asked: a tsquery, and what it does not tell."""

    def added(self, said: Sequence[Indexed]) -> list[Values]:
        """The words as a tsvector, and in their order."""
        return [(one.id, _vector(one), f" {one.parts} \n {one.more} ") for one in said]

    def removed(self, ids: Sequence[int], again: Callable[[], Sequence[Indexed]]) -> list[Values]:
        """The rows of these messages."""
        del again
        return [(id_,) for id_ in ids]

    def matching(self, query: Query, *, role: str | None, sessions: Sequence[int]) -> Values:
        """A query, limited to a role and to these sessions if there are any."""
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
        """What of a query tells how well a message fits; None where nothing does."""
        tokens = dict.fromkeys(token for term in query.told for token in _tokens(term))
        return (_any(tokens),) if tokens else None

    def marked(self, every: Sequence[Sequence[str]], *, but: Sequence[str]) -> Values:
        """Messages that have, of every one of these groups of marks, any; and none of the last."""
        asked = [_any(group) for group in every]
        if but:
            asked.append(f"!{_any(but)}")
        return (_joined(" & ", asked),)


def _vector(one: Indexed) -> str:
    """All tokens of a message as a tsvector is written; what there is no room for is left out.

    No token has a quote or a backslash (tokenizer.py), so none has to be escaped.
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
    # How often each word is there is given up first. Then the last words in their common form are,
    # which hardly any text of 64 K characters comes to.
    room, told = _MOST_BYTES, []
    for token in dict.fromkeys([*marks[:_OWN_MARKS], *words, *marks[_OWN_MARKS:]]):
        room -= len(token.encode())
        if room < 0:
            break
        told.append(f"'{token}'")
    return " ".join(told)


def _block_mark(block: int) -> str:
    """The token that each message of a block has, so that the newest are found without the rest."""
    return f"=b{block}"


def _tokens(term: Term) -> list[str]:
    return [token for form in forms(term) for run in form for token in run.tokens]


def _is_certain(form: Sequence[Run]) -> bool:
    """Whether the words of it alone tell that a message has it."""
    return len(form) <= _MOST_TOKENS and all(len(run.tokens) == 1 for run in form)


def _loosely(form: Sequence[Run]) -> str:
    """That the tokens of a form are there, or the first of them, wherever they stand."""
    asked: dict[str, None] = {}
    for run in form:
        last = len(run.tokens) - 1
        for number, token in enumerate(run.tokens):
            asked[_lexeme(token, begins=run.begins and number == last)] = None
            if len(asked) == _MOST_TOKENS:
                return _joined(" & ", asked)
    return _joined(" & ", asked)


def _piece(run: Run) -> str:
    """The tokens of a run as they stand in the lines."""
    return f" {' '.join(run.tokens)}{'' if run.begins else ' '}"


def _any(tokens: Iterable[str]) -> str:
    return _joined(" | ", map(_lexeme, tokens))


def _joined(sign: str, asked: Iterable[str]) -> str:
    """In brackets, by halves: PostgreSQL goes down as deep as these are nested."""
    parts = list(asked)
    while len(parts) > 1:
        pairs = [sign.join(parts[at : at + 2]) for at in range(0, len(parts), 2)]
        parts = [f"({pair})" for pair in pairs]
    return parts[0]


def _lexeme(token: str, *, begins: bool = False) -> str:
    """A token between quotes, whatever is in it."""
    # guard: query-quoted
    plain = token[:_LONGEST].replace("\\", "\\\\").replace("'", "''").replace("\0", "\x1a")
    return f"'{plain}'{':*' if begins else ''}"
