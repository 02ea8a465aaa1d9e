"""Parse a search query. Every text is a valid query. Pure.

All plain words are required. `"in quotes"`: in this order. `-word`: excluded. `wor*`: words with
this prefix. All other characters are literal.
"""

import re
from collections.abc import Sequence
from typing import Final

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
