"""How the words of messages are put into an engine's full-text index, and asked for there."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from msgspec import Struct

from stenolog.catalog.query import Query, Run, Term, forms, role_mark, session_mark

Values = tuple[Any, ...]
"""What a statement that asks for words takes first."""


class Indexed(Struct, frozen=True):
    """The tokens of one message, with spaces between."""

    id: int
    parts: str
    more: str
    marks: str
    """Tokens of the index's own (query.py)."""


class Language(Protocol):
    """What an engine is told and asked. Pure."""

    def added(self, said: Sequence[Indexed]) -> list[Values]:
        """What the statement `add_words` takes, for each of these messages."""
        ...

    def removed(self, ids: Sequence[int], again: Callable[[], Sequence[Indexed]]) -> list[Values]:
        """What the statement `remove_words` takes; `again` tells what was added of each."""
        ...

    def matching(self, query: Query, *, role: str | None, sessions: Sequence[int]) -> Values:
        """A query, limited to a role and to these sessions if there are any."""
        ...

    def ranking(self, query: Query) -> Values | None:
        """What of a query tells how well a message fits; None where nothing does."""
        ...

    def marked(self, every: Sequence[Sequence[str]], *, but: Sequence[str]) -> Values:
        """Messages that have, of every one of these groups of marks, any; and none of the last."""
        ...


# --- fts5 -----------------------------------------------------------------------------------------
# The language of FTS5, which SQLite's full-text index is asked in.


class FTS5:
    """How SQLite is told and asked: always one expression."""

    def added(self, said: Sequence[Indexed]) -> list[Values]:
        """The columns of the index."""
        return [(one.id, one.parts, one.more, one.marks) for one in said]

    def removed(self, ids: Sequence[int], again: Callable[[], Sequence[Indexed]]) -> list[Values]:
        """The same: words can only be taken out of an index by naming them again."""
        return self.added(again()) if ids else []

    def matching(self, query: Query, *, role: str | None, sessions: Sequence[int]) -> Values:
        """A query, limited to a role and to these sessions if there are any."""
        return (expression(query, role=role, sessions=sessions),)

    def ranking(self, query: Query) -> Values | None:
        """What of a query tells how well a message fits; None where nothing does."""
        asked = rank_expression(query)
        return (asked,) if asked else None

    def marked(self, every: Sequence[Sequence[str]], *, but: Sequence[str]) -> Values:
        """Messages that have, of every one of these groups of marks, any; and none of the last."""
        asked = " AND ".join(f"({_any(group)})" for group in every)
        return (f"({asked}) NOT ({_any(but)})" if but else asked,)


def expression(query: Query, *, role: str | None = None, sessions: Iterable[int] = ()) -> str:
    """The query, limited to a role and to these sessions."""
    wanted = [_term(term) for term in query.terms if not term.excluded]
    if role is not None:
        wanted.append(_quoted([role_mark(role)]))
    marks = [session_mark(session) for session in sessions]
    if marks:
        wanted.append(f"({_any(marks)})")
    text = " AND ".join(wanted)
    excluded = [_term(term) for term in query.terms if term.excluded]
    return f"({text}) NOT ({' OR '.join(excluded)})" if excluded else text


def rank_expression(query: Query) -> str:
    """What of a query tells how well a message fits; empty where nothing does.

    What only begins so is left out: FTS5 would gather all words that do, for every count it makes.
    """
    return " AND ".join(map(_term, query.told))


def _term(term: Term) -> str:
    found = [_form(form) for form in forms(term)]
    return f"({' OR '.join(found)})" if len(found) > 1 else found[0]


def _form(runs: Sequence[Run]) -> str:
    found = [_quoted(run.tokens) + (" *" if run.begins else "") for run in runs]
    return f"({' AND '.join(found)})" if len(found) > 1 else found[0]


def _any(marks: Iterable[str]) -> str:
    return " OR ".join(_quoted([mark]) for mark in marks)


def _quoted(tokens: Sequence[str]) -> str:
    return f'"{" ".join(tokens)}"'
