"""Full-text index: its interface for both databases, and its implementation for SQLite."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from msgspec import Struct

from stenolog.catalog.query import Query, Term, TokenRun, role_mark, session_mark, term_forms

Values = tuple[Any, ...]
"""First values of a statement that searches for words."""


class MessageTokens(Struct, frozen=True):
    """The tokens of one message, separated by spaces."""

    id: int
    parts: str
    more: str
    marks: str
    """Additional tokens, such as session and role (query.py)."""


class FullTextDialect(Protocol):
    """Values for the statements of a full-text index. Pure."""

    def tokens_to_add(self, messages: Sequence[MessageTokens]) -> list[Values]:
        """Return the values of the statement `add_words`, for each message."""
        ...

    def tokens_to_remove(
        self, ids: Sequence[int], again: Callable[[], Sequence[MessageTokens]]
    ) -> list[Values]:
        """Return the values of the statement `remove_words`. `again` returns what was added."""
        ...

    def match_values(self, query: Query, *, role: str | None, sessions: Sequence[int]) -> Values:
        """Return a search for a query, optionally limited to a role and to sessions."""
        ...

    def rank_values(self, query: Query) -> Values | None:
        """Return the part of a query that is used for ranking, or None if there is none."""
        ...

    def mark_values(self, every: Sequence[Sequence[str]], *, but: Sequence[str]) -> Values:
        """Return a search for messages with a mark of each group in `every`, and none in `but`."""
        ...


# --- fts5 -----------------------------------------------------------------------------------------
# The query language of FTS5, the full-text index of SQLite.


class FTS5:
    """Values for FTS5: every search is one expression."""

    def tokens_to_add(self, messages: Sequence[MessageTokens]) -> list[Values]:
        """Return the columns of the index."""
        return [(one.id, one.parts, one.more, one.marks) for one in messages]

    def tokens_to_remove(
        self, ids: Sequence[int], again: Callable[[], Sequence[MessageTokens]]
    ) -> list[Values]:
        """Return the same columns: FTS5 removes words only if they are given again."""
        return self.tokens_to_add(again()) if ids else []

    def match_values(self, query: Query, *, role: str | None, sessions: Sequence[int]) -> Values:
        """Return a search for a query, optionally limited to a role and to sessions."""
        return (expression(query, role=role, sessions=sessions),)

    def rank_values(self, query: Query) -> Values | None:
        """Return the part of a query that is used for ranking, or None if there is none."""
        asked = rank_expression(query)
        return (asked,) if asked else None

    def mark_values(self, every: Sequence[Sequence[str]], *, but: Sequence[str]) -> Values:
        """Return a search for messages with a mark of each group in `every`, and none in `but`."""
        asked = " AND ".join(f"({_any_of(group)})" for group in every)
        return (f"({asked}) NOT ({_any_of(but)})" if but else asked,)


def expression(query: Query, *, role: str | None = None, sessions: Iterable[int] = ()) -> str:
    """Return the expression of a query, limited to a role and to sessions."""
    wanted = [_term(term) for term in query.terms if not term.is_excluded]
    if role is not None:
        wanted.append(_quoted([role_mark(role)]))
    marks = [session_mark(session) for session in sessions]
    if marks:
        wanted.append(f"({_any_of(marks)})")
    text = " AND ".join(wanted)
    excluded = [_term(term) for term in query.terms if term.is_excluded]
    return f"({text}) NOT ({' OR '.join(excluded)})" if excluded else text


def rank_expression(query: Query) -> str:
    """Return the expression for ranking; empty if there is none.

    Prefixes are left out: FTS5 would collect all their words again for each count.
    """
    return " AND ".join(map(_term, query.ranked))


def _term(term: Term) -> str:
    found = [_form(form) for form in term_forms(term)]
    return f"({' OR '.join(found)})" if len(found) > 1 else found[0]


def _form(runs: Sequence[TokenRun]) -> str:
    found = [_quoted(run.tokens) + (" *" if run.is_prefix else "") for run in runs]
    return f"({' AND '.join(found)})" if len(found) > 1 else found[0]


def _any_of(marks: Iterable[str]) -> str:
    return " OR ".join(_quoted([mark]) for mark in marks)


def _quoted(tokens: Sequence[str]) -> str:
    return f'"{" ".join(tokens)}"'
