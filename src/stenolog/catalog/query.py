"""Parse search queries, and convert them for the full-text index of each database. Pure.

All plain words are required. `"in quotes"`: words in this order. `-word`: excluded. `wor*`: words
with this prefix. All other characters are literal, so every text is a valid query.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import astuple

from stenolog.catalog import tokenizer
from stenolog.catalog.catalog_database import BLOCK_SIZE, FullTextIndex
from stenolog.catalog.tokenizer import Word

_TERM_PATTERN = re.compile(
    r'(?P<not>(?:-(?=[^\s-]))?)(?:"(?P<phrase>[^"]*)"|(?P<word>[^\s"]+))(?P<begins>\*?)'
)
_MAX_ROLE_BYTES = 32
MAX_TERMS: Final = 64
"""Maximum number of different terms. Further terms are ignored: each term costs an index scan."""


class Term(Struct, frozen=True):
    """One term of a query."""

    words: Sequence[Word]
    is_excluded: bool
    is_prefix: bool
    """Whether the last word is a prefix."""


class Query(Struct, frozen=True):
    """A parsed query. A query without a required term finds nothing."""

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

    @property
    def text(self) -> str:
        """The run in the form in which it occurs in a message's stored tokens."""
        return f" {' '.join(self.tokens)}{'' if self.is_prefix else ' '}"


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


def prefix_query(text: str) -> str:
    """Return the query with each plain word as a prefix; empty if it has no plain word."""

    def add_star(match: re.Match[str]) -> str:
        is_plain = match["word"] and not (match["not"] or match["word"].endswith("*"))
        return f"{match[0]}*" if is_plain else match[0]

    query = _TERM_PATTERN.sub(add_star, text)
    return "" if query == text else query


def term_forms(term: Term) -> list[list[TokenRun]]:
    """Return the forms of a term: as written and, if different, with each word as one token.

    A form is a list of token runs. A message matches a term if it has all runs of one form.
    """
    written_tokens = [part for word in term.words for part in word.parts]
    joined_tokens = [part for word in term.words for part in word.joined_tokens or word.parts]
    chars = {char for word in term.words for char in word.chars}
    forms = [_split_token_runs(written_tokens, chars, is_prefix=term.is_prefix)]
    if joined_tokens != written_tokens:
        forms.append(_split_token_runs(joined_tokens, chars, is_prefix=term.is_prefix))
    return forms


def session_mark(session_id: int) -> str:
    """Return the index token that marks all messages of a session."""
    return f"=s{session_id}"


def role_mark(role: str) -> str:
    """Return the index token that marks all messages with a role."""
    role_bytes = role.encode()
    if len(role_bytes) > _MAX_ROLE_BYTES:
        # This module is rarely needed, and slow to import.
        from hashlib import sha256

        role_bytes = sha256(role_bytes).digest()
    return f"=r{role_bytes.hex()}"


def owner_mark(owner: str) -> str:
    """Return the index token that marks all messages of an owner."""
    # This module is slow to import, and a list does not need it.
    from hashlib import sha256

    return f"=o{sha256(owner.encode('utf-8', 'replace')).hexdigest()[:32]}"


def stem_mark(stem: str) -> str:
    """Return the index token that marks all messages with a word of this stem."""
    return f"=w{stem}"


def _split_token_runs(tokens: Sequence[str], chars: set[str], *, is_prefix: bool) -> list[TokenRun]:
    """Split tokens into runs. A single character of a script without spaces is a separate run."""
    runs: list[TokenRun] = []
    for is_char, group in groupby(tokens, chars.__contains__):
        run = list(group)
        runs += [TokenRun([token]) for token in run] if is_char else [TokenRun(run)]
    # In scripts without spaces, no token is longer than a pair, so none is searched as a prefix.
    if is_prefix and not set(tokens[-1]) <= chars:
        runs[-1] = TokenRun(runs[-1].tokens, is_prefix=True)
    return runs


# --- full-text search ------------------------------------------------------------------------
# Each database has a dialect, a class that makes the values of SQL statements on its full-text
# index.


Values = tuple[Any, ...]
"""Values for an SQL statement on the full-text index. A search appends other values."""


class MessageTokens(Struct, frozen=True):
    """The tokens of one message, separated by spaces."""

    id: int
    parts: str
    extra_tokens: str
    marks: str
    """Tokens that mark the session, owner, role and stems of the message."""


# --- SQLite ----------------------------------------------------------------------------------


class FTS5:
    """Dialect of SQLite (FTS5): a search is one expression."""

    def tokens_to_add(self, messages: Sequence[MessageTokens]) -> list[Values]:
        """Return the columns of the index for each message."""
        return [astuple(message) for message in messages]

    def tokens_to_remove(
        self, message_ids: Sequence[int], read_added_tokens: Callable[[], Sequence[MessageTokens]]
    ) -> list[Values]:
        """Return the added columns, because FTS5 needs them again to remove the words."""
        return self.tokens_to_add(read_added_tokens()) if message_ids else []

    def match_values(self, query: Query, *, role: str | None, sessions: Sequence[int]) -> Values:
        """Return the values of a search for a query, optionally limited to a role and sessions."""
        return (match_expression(query, role=role, sessions=sessions),)

    def rank_values(self, query: Query) -> Values | None:
        """Return the values for ranking matches; None if no term of the query is ranked."""
        # Leave out prefixes: FTS5 would look up all words with a prefix for each message.
        expression = " AND ".join(map(_term_expression, query.ranked_terms))
        return (expression,) if expression else None

    def mark_values(self, groups: Sequence[Sequence[str]], *, excluded: Sequence[str]) -> Values:
        """Return the values of a search by marks: one mark of each group, no excluded mark."""
        condition = " AND ".join(f"({_any_mark_expression(group)})" for group in groups)
        return (f"({condition}) NOT ({_any_mark_expression(excluded)})" if excluded else condition,)


def match_expression(query: Query, *, role: str | None = None, sessions: Iterable[int] = ()) -> str:
    """Return the FTS5 expression of a query, optionally limited to a role and to sessions."""
    conditions = [_term_expression(term) for term in query.terms if not term.is_excluded]
    if role is not None:
        conditions.append(_quote_tokens([role_mark(role)]))
    marks = [session_mark(session) for session in sessions]
    if marks:
        conditions.append(f"({_any_mark_expression(marks)})")
    required_expression = " AND ".join(conditions)
    excluded_expressions = [_term_expression(term) for term in query.terms if term.is_excluded]
    if not excluded_expressions:
        return required_expression
    return f"({required_expression}) NOT ({' OR '.join(excluded_expressions)})"


def _term_expression(term: Term) -> str:
    forms = [_form_expression(form) for form in term_forms(term)]
    return f"({' OR '.join(forms)})" if len(forms) > 1 else forms[0]


def _form_expression(runs: Sequence[TokenRun]) -> str:
    phrases = [_quote_tokens(run.tokens) + (" *" if run.is_prefix else "") for run in runs]
    return f"({' AND '.join(phrases)})" if len(phrases) > 1 else phrases[0]


def _any_mark_expression(marks: Iterable[str]) -> str:
    return " OR ".join(_quote_tokens([mark]) for mark in marks)


def _quote_tokens(tokens: Sequence[str]) -> str:
    return f'"{" ".join(tokens)}"'


# --- PostgreSQL ------------------------------------------------------------------------------
# A tsquery finds the messages that have the words of a query in any order. The order is checked in
# the stored tokens of these messages, because a tsvector has no positions above 16,383, and at most
# 255 positions per word. Words of a query are always quoted, never operators.


_MAX_TSVECTOR_BYTES: Final = 1_000_000
"""Maximum number of bytes of the tokens of a message; PostgreSQL's limit is a little higher."""

_MAX_OCCURRENCES: Final = 16
"""Maximum number of occurrences of a word that count for ranking."""
# In a tsvector, a word with n occurrences gets the positions 1 to n.
_POSITION_LISTS: Final = [
    ":" + ",".join(map(str, range(1, count + 1))) for count in range(1, _MAX_OCCURRENCES + 1)
]
_MAX_POSITION_BYTES: Final = 2 * _MAX_OCCURRENCES + 4

_LEADING_MARK_COUNT: Final = 4
"""Maximum number of marks before the stems: block, session, owner (if any) and role."""

_MAX_QUERY_TOKENS: Final = 16
"""Maximum number of tokens of a term in a tsquery; the rest is checked in column `lines`."""
_MAX_LEXEME: Final = 500
"""Maximum number of characters of a token in a tsquery. PostgreSQL accepts at most 2,046 bytes."""


class TSQuery:
    """Dialect of PostgreSQL: a search is a tsquery plus conditions that no tsquery can express."""

    def tokens_to_add(self, messages: Sequence[MessageTokens]) -> list[Values]:
        """Return the tokens of each message as a tsvector, and as a text that keeps their order."""
        return [(m.id, _make_vector(m), f" {m.parts} \n {m.extra_tokens} ") for m in messages]

    def tokens_to_remove(
        self, message_ids: Sequence[int], read_added_tokens: Callable[[], Sequence[MessageTokens]]
    ) -> list[Values]:
        """Return only the ids, because PostgreSQL needs no tokens to remove a message."""
        del read_added_tokens
        return [(message_id,) for message_id in message_ids]

    def match_values(self, query: Query, *, role: str | None, sessions: Sequence[int]) -> Values:
        """Return the values of a search for a query, optionally limited to a role and sessions."""
        conditions: list[str] = []
        phrase_checks: list[tuple[bool, list[list[str]]]] = []
        for term in query.terms:
            forms = term_forms(term)
            is_exact = all(map(_tsquery_is_sufficient, forms))
            if not is_exact:
                phrase_checks.append(
                    (term.is_excluded, [[run.text for run in form] for form in forms])
                )
            if is_exact or not term.is_excluded:
                condition = _join_conditions(" | ", map(_unordered_query, forms))
                conditions.append(f"!{condition}" if term.is_excluded else condition)
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

    def mark_values(self, groups: Sequence[Sequence[str]], *, excluded: Sequence[str]) -> Values:
        """Return the values of a search by marks: one mark of each group, no excluded mark."""
        conditions = [_any_token_query(group) for group in groups]
        if excluded:
            conditions.append(f"!{_any_token_query(excluded)}")
        return (_join_conditions(" & ", conditions),)


def _make_vector(message: MessageTokens) -> str:
    """Return all tokens of a message as a tsvector. Tokens beyond the limit are left out.

    The mark `=b` has the block of the message, so that a search can be limited to some blocks.
    Tokens have no quotes or backslashes (tokenizer.py), so they need no escapes.
    """
    words = Counter(message.parts.split())
    words.update(message.extra_tokens.split())
    marks = [f"=b{message.id // BLOCK_SIZE}", *message.marks.split()]
    texts = (message.parts, message.extra_tokens, message.marks)
    size = sum(len(text.encode()) for text in texts)
    if size + _MAX_POSITION_BYTES * len(words) <= _MAX_TSVECTOR_BYTES:
        tokens = [
            f"'{word}'{_POSITION_LISTS[min(count, _MAX_OCCURRENCES) - 1]}"
            for word, count in words.items()
        ]
        return " ".join([*tokens, *(f"'{mark}'" for mark in marks)])
    # The tokens are too long: omit the numbers of occurrences first, and then the last stems.
    # Hardly any text of 64 K characters exceeds the limit.
    bytes_left, tokens = _MAX_TSVECTOR_BYTES, []
    all_tokens = [*marks[:_LEADING_MARK_COUNT], *words, *marks[_LEADING_MARK_COUNT:]]
    for token in dict.fromkeys(all_tokens):
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
        last_index = len(run.tokens) - 1
        for index, token in enumerate(run.tokens):
            conditions[_quote_token(token, is_prefix=run.is_prefix and index == last_index)] = None
            if len(conditions) == _MAX_QUERY_TOKENS:
                return _join_conditions(" & ", conditions)
    return _join_conditions(" & ", conditions)


def _any_token_query(tokens: Iterable[str]) -> str:
    return _join_conditions(" | ", map(_quote_token, tokens))


def _join_conditions(operator: str, conditions: Iterable[str]) -> str:
    """Join conditions as a balanced tree: PostgreSQL parses nested brackets by recursion."""
    parts = list(conditions)
    while len(parts) > 1:
        pairs = [operator.join(parts[start : start + 2]) for start in range(0, len(parts), 2)]
        parts = [f"({pair})" for pair in pairs]
    return parts[0]


def _quote_token(token: str, *, is_prefix: bool = False) -> str:
    """Quote a token for a tsquery."""
    # guard: query-quoted
    escaped = token[:_MAX_LEXEME].replace("\\", "\\\\").replace("'", "''").replace("\0", "\x1a")
    return f"'{escaped}'{':*' if is_prefix else ''}"


DIALECTS: Final[Mapping[FullTextIndex, FTS5 | TSQuery]] = {"fts5": FTS5(), "tsquery": TSQuery()}
"""Dialect of each full-text index. The dialects have the same methods."""
