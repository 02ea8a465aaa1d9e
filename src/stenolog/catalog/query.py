"""Parse a search query. Every text is a valid query. Pure.

All plain words are required. `"in quotes"`: in this order. `-word`: excluded. `wor*`: words with
this prefix. All other characters are literal.

The second part is the interface of a full-text index, and its implementation for FTS5 of SQLite.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Protocol

from msgspec import Struct

from stenolog.catalog import tokenizer
from stenolog.catalog.tokenizer import Word

_TERM = re.compile(
    r'(?P<not>(?:-(?=[^\s-]))?)(?:"(?P<phrase>[^"]*)"|(?P<word>[^\s"]+))(?P<begins>\*?)'
)
_MAX_ROLE_BYTES = 32
MAX_TERMS: Final = 64
"""Maximum number of different terms; more are ignored, because each one costs an index scan."""


class Term(Struct, frozen=True):
    """One term of a query."""

    words: Sequence[Word]
    is_excluded: bool
    is_prefix: bool
    """Whether the last word is a prefix."""


class Query(Struct, frozen=True):
    """A parsed query. Without terms, there is nothing to search for."""

    terms: Sequence[Term]

    @property
    def is_empty(self) -> bool:
        """Whether the query has no required term."""
        return all(term.is_excluded for term in self.terms)

    @property
    def ranked(self) -> list[Term]:
        """The terms for ranking: neither excluded nor prefixes."""
        return [term for term in self.terms if not term.is_excluded and not term.is_prefix]


class TokenRun(Struct, frozen=True):
    """Consecutive tokens."""

    tokens: Sequence[str]
    is_prefix: bool = False
    """Whether the last token is a prefix."""


def parse(text: str) -> Query:
    """Parse the terms of a query. Duplicates and terms after the maximum are ignored."""
    result: list[Term] = []
    seen: set[tuple[str | None, ...]] = set()
    for match in _TERM.finditer(text):
        if match.groups() in seen:
            continue
        if len(result) == MAX_TERMS:
            break
        seen.add(match.groups())
        body = match["phrase"] if match["phrase"] is not None else match["word"]
        words = tokenizer.words(body)
        if any(word.parts for word in words):
            is_prefix = bool(match["begins"]) or body.endswith("*")
            result.append(Term(words, bool(match["not"]), is_prefix))
    return Query(result)


def term_forms(term: Term) -> list[list[TokenRun]]:
    """Return a term as written, and with each word joined into one, if that is different.

    A message matches a form if it has all its runs.
    """
    written = [part for word in term.words for part in word.parts]
    joined = [part for word in term.words for part in word.joined or word.parts]
    singles = {single for word in term.words for single in word.singles}
    result = [_split_runs(written, singles, is_prefix=term.is_prefix)]
    if joined != written:
        result.append(_split_runs(joined, singles, is_prefix=term.is_prefix))
    return result


def session_mark(session: int) -> str:
    """Return the token of all messages of a session."""
    return f"=s{session}"


def role_mark(role: str) -> str:
    """Return the token of all messages with a role."""
    raw = role.encode()
    if len(raw) > _MAX_ROLE_BYTES:
        # Rarely needed, and slow to import.
        from hashlib import sha256

        raw = sha256(raw).digest()
    return f"=r{raw.hex()}"


def owner_mark(owner: str) -> str:
    """Return the token of all messages of an owner."""
    # Slow to import, and not needed for a list.
    from hashlib import sha256

    return f"=o{sha256(owner.encode('utf-8', 'replace')).hexdigest()[:32]}"


def stem_mark(stem: str) -> str:
    """Return the token of all messages with a word of this stem."""
    return f"=w{stem}"


def _split_runs(tokens: Sequence[str], singles: set[str], *, is_prefix: bool) -> list[TokenRun]:
    """Split tokens into runs. A single character of a script without spaces is a separate run."""
    result: list[TokenRun] = []
    run: list[str] = []
    for token in tokens:
        if token in singles:
            result += [TokenRun(run)] * bool(run) + [TokenRun([token])]
            run = []
        else:
            run.append(token)
    if run:
        # A pair of characters is not a prefix; words that start with it have it as a token.
        result.append(
            TokenRun(run, is_prefix=is_prefix and not (singles and set(run[-1]) <= singles))
        )
    return result


# --- full-text search ------------------------------------------------------------------------


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
