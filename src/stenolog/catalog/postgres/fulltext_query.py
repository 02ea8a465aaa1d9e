"""Full-text search of PostgreSQL. Words of a query are always quoted, never operators. Pure.

A tsquery finds the messages that have the words of a query in any order. The order is checked in
the stored tokens of these messages: a tsvector has no positions above 16,383, and at most 255 for
each word.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from stenolog.catalog.catalog_database import BLOCK_SIZE
from stenolog.catalog.query import (
    MessageTokens,
    Query,
    TokenRun,
    Values,
    role_mark,
    session_mark,
    term_forms,
)

_MAX_TSVECTOR_BYTES: Final = 1_000_000
"""Maximum number of bytes of the tokens of a message; PostgreSQL's limit is a little higher."""

_MAX_OCCURRENCES: Final = 16
"""Maximum number of occurrences of a word that count for ranking."""
_POSITION_LISTS: Final = [
    ":" + ",".join(map(str, range(1, count + 1))) for count in range(1, _MAX_OCCURRENCES + 1)
]
_MAX_POSITION_BYTES: Final = 2 * _MAX_OCCURRENCES + 4

_LEADING_MARKS: Final = 4
"""Number of marks before the stems: block, session, owner and role."""

_MAX_QUERY_TOKENS: Final = 16
"""Maximum number of tokens of a term in a tsquery; the rest is checked in column `lines`."""
_MAX_LEXEME: Final = 500
"""Maximum length of a token in characters. PostgreSQL accepts at most 2,046 bytes."""


class TSQuery:
    """Values for PostgreSQL: a tsquery, and the conditions that it cannot express."""

    def tokens_to_add(self, messages: Sequence[MessageTokens]) -> list[Values]:
        """Return the tokens of each message as a tsvector, and as text in order."""
        return [(m.id, _make_vector(m), f" {m.parts} \n {m.extra} ") for m in messages]

    def tokens_to_remove(
        self, ids: Sequence[int], read_added: Callable[[], Sequence[MessageTokens]]
    ) -> list[Values]:
        """Return only the ids, because PostgreSQL needs no tokens to remove a message."""
        del read_added
        return [(id_,) for id_ in ids]

    def match_values(self, query: Query, *, role: str | None, sessions: Sequence[int]) -> Values:
        """Return the values of a search for a query, optionally limited to a role and sessions."""
        conditions: list[str] = []
        phrase_checks: list[tuple[bool, list[list[str]]]] = []
        for term in query.terms:
            forms = term_forms(term)
            is_exact = all(map(_tsquery_is_sufficient, forms))
            if not is_exact:
                phrase_checks.append(
                    (term.is_excluded, [[_line_pattern(run) for run in form] for form in forms])
                )
            if not term.is_excluded:
                conditions.append(_join_conditions(" | ", map(_unordered_query, forms)))
            elif is_exact:
                conditions.append(f"!{_join_conditions(' | ', map(_unordered_query, forms))}")
        if role is not None:
            conditions.append(_quote_token(role_mark(role)))
        if sessions:
            conditions.append(_any_token_query(map(session_mark, sessions)))
        checks_json = json.dumps(phrase_checks, ensure_ascii=False) if phrase_checks else None
        return _join_conditions(" & ", conditions), checks_json

    def rank_values(self, query: Query) -> Values | None:
        """Return the values for ranking matches; None if no term of the query is ranked."""
        runs = (run for term in query.ranked_terms for form in term_forms(term) for run in form)
        tokens = dict.fromkeys(token for run in runs for token in run.tokens)
        return (_any_token_query(tokens),) if tokens else None

    def mark_values(self, required: Sequence[Sequence[str]], *, excluded: Sequence[str]) -> Values:
        """Return values that find messages with a mark of each group and no excluded mark."""
        conditions = [_any_token_query(group) for group in required]
        if excluded:
            conditions.append(f"!{_any_token_query(excluded)}")
        return (_join_conditions(" & ", conditions),)


def _make_vector(message: MessageTokens) -> str:
    """Return all tokens of a message as a tsvector. Tokens beyond the limit are left out.

    The mark `=b` has the block of the message, so that a search can be limited to some blocks.
    Tokens have no quotes or backslashes (tokenizer.py), so they need no escapes.
    """
    words = Counter(message.parts.split())
    words.update(message.extra.split())
    marks = [f"=b{message.id // BLOCK_SIZE}", *message.marks.split()]
    size = len(message.parts.encode()) + len(message.extra.encode()) + len(message.marks.encode())
    if size + _MAX_POSITION_BYTES * len(words) <= _MAX_TSVECTOR_BYTES:
        tokens = [
            f"'{word}'{_POSITION_LISTS[min(count, _MAX_OCCURRENCES) - 1]}"
            for word, count in words.items()
        ]
        return " ".join([*tokens, *(f"'{mark}'" for mark in marks)])
    # The tokens are too long: omit the numbers of occurrences first, and then the last stems.
    # Hardly any text of 64 K characters exceeds the limit.
    bytes_left, tokens = _MAX_TSVECTOR_BYTES, []
    for token in dict.fromkeys([*marks[:_LEADING_MARKS], *words, *marks[_LEADING_MARKS:]]):
        bytes_left -= len(token.encode())
        if bytes_left < 0:
            break
        tokens.append(f"'{token}'")
    return " ".join(tokens)


def _tsquery_is_sufficient(form: Sequence[TokenRun]) -> bool:
    """Return whether a tsquery alone decides if a message matches this form of a term."""
    return len(form) <= _MAX_QUERY_TOKENS and all(len(run.tokens) == 1 for run in form)


def _unordered_query(form: Sequence[TokenRun]) -> str:
    """Return a tsquery for the first tokens of this form of a term, in any order."""
    conditions: dict[str, None] = {}
    for run in form:
        last = len(run.tokens) - 1
        for number, token in enumerate(run.tokens):
            conditions[_quote_token(token, is_prefix=run.is_prefix and number == last)] = None
            if len(conditions) == _MAX_QUERY_TOKENS:
                return _join_conditions(" & ", conditions)
    return _join_conditions(" & ", conditions)


def _line_pattern(run: TokenRun) -> str:
    """Return consecutive tokens as they occur in the column `lines`."""
    return f" {' '.join(run.tokens)}{'' if run.is_prefix else ' '}"


def _any_token_query(tokens: Iterable[str]) -> str:
    return _join_conditions(" | ", map(_quote_token, tokens))


def _join_conditions(operator: str, conditions: Iterable[str]) -> str:
    """Join conditions as a balanced tree, because PostgreSQL recurses for each bracket."""
    parts = list(conditions)
    while len(parts) > 1:
        pairs = [operator.join(parts[at : at + 2]) for at in range(0, len(parts), 2)]
        parts = [f"({pair})" for pair in pairs]
    return parts[0]


def _quote_token(token: str, *, is_prefix: bool = False) -> str:
    """Quote a token."""
    # guard: query-quoted
    plain = token[:_MAX_LEXEME].replace("\\", "\\\\").replace("'", "''").replace("\0", "\x1a")
    return f"'{plain}'{':*' if is_prefix else ''}"
