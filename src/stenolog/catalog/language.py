"""How the words of messages are put into an engine's full-text index, and asked for there."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from msgspec import Struct

from stenolog.catalog.query import Query

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
