"""Parse a search query. Every text is a valid query. Pure.

All plain words are required. `"in quotes"`: words in this order. `-word`: excluded. `wor*`: words
with this prefix. All other characters are literal.

The second part of this module is the interface of a full-text index, and its implementation for
SQLite's index FTS5.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Protocol

from msgspec import Struct

from stenolog.catalog import tokenizer
from stenolog.catalog.tokenizer import Word

_TERM_PATTERN = re.compile(
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
    def ranked_terms(self) -> list[Term]:
        """The terms for ranking: neither excluded nor prefixes."""
        return [term for term in self.terms if not term.is_excluded and not term.is_prefix]


class TokenRun(Struct, frozen=True):
    """Tokens that follow each other in a text."""

    tokens: Sequence[str]
    is_prefix: bool = False
    """Whether the last token is a prefix."""


def parse_query(text: str) -> Query:
    """Parse the terms of a query. Duplicates and terms beyond `MAX_TERMS` are ignored."""
    terms: list[Term] = []
    seen_terms: set[tuple[str | None, ...]] = set()
    for match in _TERM_PATTERN.finditer(text):
        if match.groups() in seen_terms:
            continue
        if len(terms) == MAX_TERMS:
            break
        seen_terms.add(match.groups())
        term_text = match["phrase"] if match["phrase"] is not None else match["word"]
        words = tokenizer.split_words(term_text)
        if any(word.parts for word in words):
            is_prefix = bool(match["begins"]) or term_text.endswith("*")
            terms.append(Term(words, bool(match["not"]), is_prefix))
    return Query(terms)


def term_forms(term: Term) -> list[list[TokenRun]]:
    """Return the forms of a term: as written and, if different, with each word as one token.

    A message matches a form if it has all token runs of the form.
    """
    written_tokens = [part for word in term.words for part in word.parts]
    joined_tokens = [part for word in term.words for part in word.joined or word.parts]
    chars = {single for word in term.words for single in word.chars}
    forms = [_split_runs(written_tokens, chars, is_prefix=term.is_prefix)]
    if joined_tokens != written_tokens:
        forms.append(_split_runs(joined_tokens, chars, is_prefix=term.is_prefix))
    return forms


def session_mark(session: int) -> str:
    """Return the index token that marks all messages of a session."""
    return f"=s{session}"


def role_mark(role: str) -> str:
    """Return the index token that marks all messages with a role."""
    raw = role.encode()
    if len(raw) > _MAX_ROLE_BYTES:
        # This module is rarely needed, and slow to import.
        from hashlib import sha256

        raw = sha256(raw).digest()
    return f"=r{raw.hex()}"


def owner_mark(owner: str) -> str:
    """Return the index token that marks all messages of an owner."""
    # This module is slow to import, and a list does not need it.
    from hashlib import sha256

    return f"=o{sha256(owner.encode('utf-8', 'replace')).hexdigest()[:32]}"


def stem_mark(stem: str) -> str:
    """Return the index token that marks all messages with a word of this stem."""
    return f"=w{stem}"


def _split_runs(tokens: Sequence[str], chars: set[str], *, is_prefix: bool) -> list[TokenRun]:
    """Split tokens into runs. A single character of a script without spaces is a separate run."""
    runs: list[TokenRun] = []
    run: list[str] = []
    for token in tokens:
        if token in chars:
            runs += [TokenRun(run)] * bool(run) + [TokenRun([token])]
            run = []
        else:
            run.append(token)
    if run:
        # In scripts without spaces, a token has at most two characters: no pair is a prefix.
        runs.append(TokenRun(run, is_prefix=is_prefix and not (chars and set(run[-1]) <= chars)))
    return runs


# --- full-text search ------------------------------------------------------------------------


Values = tuple[Any, ...]
"""Values for an SQL statement on the full-text index. A search appends other values."""


class MessageTokens(Struct, frozen=True):
    """The tokens of one message, separated by spaces."""

    id: int
    parts: str
    extra: str
    marks: str
    """Tokens that mark the session, owner, role and stems of the message."""


class FullTextDialect(Protocol):
    """Values for the statements of a full-text index. Pure."""

    def tokens_to_add(self, messages: Sequence[MessageTokens]) -> list[Values]:
        """Return the values of the statement `add_words`, for each message."""

    def tokens_to_remove(
        self, ids: Sequence[int], read_added: Callable[[], Sequence[MessageTokens]]
    ) -> list[Values]:
        """Return the values of `remove_words`. `read_added` returns the tokens that were added."""

    def match_values(self, query: Query, *, role: str | None, sessions: Sequence[int]) -> Values:
        """Return the values of a search for a query, optionally limited to a role and sessions."""

    def rank_values(self, query: Query) -> Values | None:
        """Return the values for ranking matches; None if no term of the query is ranked."""

    def mark_values(self, required: Sequence[Sequence[str]], *, excluded: Sequence[str]) -> Values:
        """Return values that find messages with a mark of each group and no excluded mark."""


# --- fts5 -----------------------------------------------------------------------------------------
# This part writes queries for FTS5, the full-text index of SQLite.


class FTS5:
    """Values for FTS5: every search is one expression."""

    def tokens_to_add(self, messages: Sequence[MessageTokens]) -> list[Values]:
        """Return the columns of the index for each message."""
        return [(message.id, message.parts, message.extra, message.marks) for message in messages]

    def tokens_to_remove(
        self, ids: Sequence[int], read_added: Callable[[], Sequence[MessageTokens]]
    ) -> list[Values]:
        """Return the added columns, because FTS5 needs them again to remove the words."""
        return self.tokens_to_add(read_added()) if ids else []

    def match_values(self, query: Query, *, role: str | None, sessions: Sequence[int]) -> Values:
        """Return the values of a search for a query, optionally limited to a role and sessions."""
        return (match_expression(query, role=role, sessions=sessions),)

    def rank_values(self, query: Query) -> Values | None:
        """Return the values for ranking matches; None if no term of the query is ranked."""
        # Leave out prefixes: FTS5 would look up all words with a prefix for each message.
        expression = " AND ".join(map(_term_expression, query.ranked_terms))
        return (expression,) if expression else None

    def mark_values(self, required: Sequence[Sequence[str]], *, excluded: Sequence[str]) -> Values:
        """Return values that find messages with a mark of each group and no excluded mark."""
        condition = " AND ".join(f"({_any_mark_expression(group)})" for group in required)
        return (f"({condition}) NOT ({_any_mark_expression(excluded)})" if excluded else condition,)


def match_expression(query: Query, *, role: str | None = None, sessions: Iterable[int] = ()) -> str:
    """Return the FTS5 expression of a query, optionally limited to a role and to sessions."""
    conditions = [_term_expression(term) for term in query.terms if not term.is_excluded]
    if role is not None:
        conditions.append(_quote([role_mark(role)]))
    marks = [session_mark(session) for session in sessions]
    if marks:
        conditions.append(f"({_any_mark_expression(marks)})")
    required = " AND ".join(conditions)
    excluded = [_term_expression(term) for term in query.terms if term.is_excluded]
    return f"({required}) NOT ({' OR '.join(excluded)})" if excluded else required


def _term_expression(term: Term) -> str:
    forms = [_form_expression(form) for form in term_forms(term)]
    return f"({' OR '.join(forms)})" if len(forms) > 1 else forms[0]


def _form_expression(runs: Sequence[TokenRun]) -> str:
    phrases = [_quote(run.tokens) + (" *" if run.is_prefix else "") for run in runs]
    return f"({' AND '.join(phrases)})" if len(phrases) > 1 else phrases[0]


def _any_mark_expression(marks: Iterable[str]) -> str:
    return " OR ".join(_quote([mark]) for mark in marks)


def _quote(tokens: Sequence[str]) -> str:
    return f'"{" ".join(tokens)}"'
