"""Full-text search of PostgreSQL. Typed text is always quoted and never an operator. Pure.

A tsquery finds the messages that have the words, but not their order. Consecutive words are checked
among these messages in the stored tokens, because positions in a tsvector end at 16,383, and at 255
for each word.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from stenolog.catalog.catalog_database import BLOCK_SIZE
from stenolog.catalog.query import (
    MessageTokens,
    Query,
    Term,
    TokenRun,
    Values,
    role_mark,
    session_mark,
    term_forms,
)

_MAX_BYTES: Final = 1_000_000
"""Maximum number of bytes of the tokens of a message; PostgreSQL's limit is a little higher."""

_MAX_COUNTED: Final = 16
"""Maximum number of occurrences of a word that count for ranking."""
_COUNTS: Final = [
    ":" + ",".join(map(str, range(1, count + 1))) for count in range(1, _MAX_COUNTED + 1)
]
_COUNT_BYTES: Final = 2 * _MAX_COUNTED + 4

_OWN_MARKS: Final = 4
"""Number of marks before the stems: block, session, owner and role."""

_MAX_TOKENS: Final = 16
"""Maximum number of tokens of a form in the tsquery; the others are checked in the tokens."""
_MAX_LEXEME: Final = 500
"""Longer than any token; PostgreSQL accepts no token of more than 2,046 bytes."""


class TSQuery:
    """Values for PostgreSQL: a tsquery, and the conditions that it cannot express."""

    def tokens_to_add(self, messages: Sequence[MessageTokens]) -> list[Values]:
        """Return the words as a tsvector, and in order."""
        return [(one.id, _vector(one), f" {one.parts} \n {one.more} ") for one in messages]

    def tokens_to_remove(
        self, ids: Sequence[int], again: Callable[[], Sequence[MessageTokens]]
    ) -> list[Values]:
        """Return the ids of these messages."""
        del again
        return [(id_,) for id_ in ids]

    def match_values(self, query: Query, *, role: str | None, sessions: Sequence[int]) -> Values:
        """Return a search for a query, optionally limited to a role and to sessions."""
        conditions: list[str] = []
        phrase_checks: list[tuple[bool, list[list[str]]]] = []
        for term in query.terms:
            found = term_forms(term)
            is_exact = all(map(_is_certain, found))
            if not is_exact:
                phrase_checks.append(
                    (term.is_excluded, [[_line_pattern(run) for run in form] for form in found])
                )
            if not term.is_excluded:
                conditions.append(_joined(" | ", map(_unordered_query, found)))
            elif is_exact:
                conditions.append(f"!{_joined(' | ', map(_unordered_query, found))}")
        if role is not None:
            conditions.append(_lexeme(role_mark(role)))
        if sessions:
            conditions.append(_any_of(map(session_mark, sessions)))
        more = json.dumps(phrase_checks, ensure_ascii=False) if phrase_checks else None
        return _joined(" & ", conditions), more

    def rank_values(self, query: Query) -> Values | None:
        """Return the part of a query that is used for ranking, or None if there is none."""
        tokens = dict.fromkeys(token for term in query.ranked for token in _tokens(term))
        return (_any_of(tokens),) if tokens else None

    def mark_values(self, every: Sequence[Sequence[str]], *, but: Sequence[str]) -> Values:
        """Return a search for messages with a mark of each group in `every`, and none in `but`."""
        conditions = [_any_of(group) for group in every]
        if but:
            conditions.append(f"!{_any_of(but)}")
        return (_joined(" & ", conditions),)


def _vector(one: MessageTokens) -> str:
    """Return all tokens of a message as a tsvector. Tokens beyond the limit are left out.

    Tokens have no quotes or backslashes (tokenizer.py), so they need no escapes.
    """
    words = Counter(one.parts.split())
    words.update(one.more.split())
    marks = [_block_mark(one.id // BLOCK_SIZE), *one.marks.split()]
    size = len(one.parts.encode()) + len(one.more.encode()) + len(one.marks.encode())
    if size + _COUNT_BYTES * len(words) <= _MAX_BYTES:
        tokens = [
            f"'{word}'{_COUNTS[min(count, _MAX_COUNTED) - 1]}" for word, count in words.items()
        ]
        return " ".join([*tokens, *(f"'{mark}'" for mark in marks)])
    # First omit the numbers of occurrences, then the last stems. Hardly any text of 64 K characters
    # has that many.
    room, tokens = _MAX_BYTES, []
    for token in dict.fromkeys([*marks[:_OWN_MARKS], *words, *marks[_OWN_MARKS:]]):
        room -= len(token.encode())
        if room < 0:
            break
        tokens.append(f"'{token}'")
    return " ".join(tokens)


def _block_mark(block: int) -> str:
    """Return the token of all messages of a block, which limits a search to the newest blocks."""
    return f"=b{block}"


def _tokens(term: Term) -> list[str]:
    return [token for form in term_forms(term) for run in form for token in run.tokens]


def _is_certain(form: Sequence[TokenRun]) -> bool:
    """Whether the tsquery alone decides if a message has this form."""
    return len(form) <= _MAX_TOKENS and all(len(run.tokens) == 1 for run in form)


def _unordered_query(form: Sequence[TokenRun]) -> str:
    """Return a tsquery for the first tokens of a form, in any order."""
    conditions: dict[str, None] = {}
    for run in form:
        last = len(run.tokens) - 1
        for number, token in enumerate(run.tokens):
            conditions[_lexeme(token, begins=run.is_prefix and number == last)] = None
            if len(conditions) == _MAX_TOKENS:
                return _joined(" & ", conditions)
    return _joined(" & ", conditions)


def _line_pattern(run: TokenRun) -> str:
    """Return the tokens of a run as they occur in the column `lines`."""
    return f" {' '.join(run.tokens)}{'' if run.is_prefix else ' '}"


def _any_of(tokens: Iterable[str]) -> str:
    return _joined(" | ", map(_lexeme, tokens))


def _joined(sign: str, conditions: Iterable[str]) -> str:
    """Join in brackets as a balanced tree: PostgreSQL recurses as deep as the nesting."""
    parts = list(conditions)
    while len(parts) > 1:
        pairs = [sign.join(parts[at : at + 2]) for at in range(0, len(parts), 2)]
        parts = [f"({pair})" for pair in pairs]
    return parts[0]


def _lexeme(token: str, *, begins: bool = False) -> str:
    """Quote a token."""
    # guard: query-quoted
    plain = token[:_MAX_LEXEME].replace("\\", "\\\\").replace("'", "''").replace("\0", "\x1a")
    return f"'{plain}'{':*' if begins else ''}"
