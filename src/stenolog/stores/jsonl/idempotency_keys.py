"""Idempotency keys (tokens) of a log, for at least the newest thousand messages (P12).

The line of a message contains its token. States carry the tokens of archived messages, so that no
archive has to be opened to find one.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from stenolog.codec import digest
from stenolog.records import Message, Record, Token
from stenolog.stores.jsonl.scan import part_of

TOKEN_WINDOW: Final = 1_000
"""Minimum number of newest messages whose tokens are known."""
_BYTES: Final = 400
"""Approximate bytes per token in memory, with its digest and dictionary entry."""


class Tokens:
    """Tokens of one log, read when the first one is looked up."""

    __slots__ = ("_from_states", "_known")

    def __init__(self) -> None:
        self._known: dict[str, Token] | None = None
        self._from_states: dict[str, Token] = {}

    @property
    def is_loaded(self) -> bool:
        """Whether the tokens of the newest messages were read."""
        return self._known is not None

    @property
    def weight(self) -> int:
        """Approximate number of bytes of the tokens in memory."""
        return _BYTES * len(self._known or ())

    def clear(self) -> None:
        """Forget the tokens, because the log is being read again."""
        self._known = None

    def add_from_state(self, tokens: Iterable[Token]) -> None:
        """Add the tokens of a state; the caller passes the newest state first."""
        for token in tokens:
            self._from_states.setdefault(token.token, token)

    def load(self, messages: Sequence[Message]) -> None:
        """Set the known tokens to those of the states and of these messages."""
        self._known = {**self._from_states, **_tokens_of(messages)}

    def add(self, records: Sequence[Record]) -> None:
        """Add the tokens of appended records, if the tokens were read before."""
        if self._known is not None:
            self._known.update(_tokens_of(records))

    def find(self, once: str) -> Token | None:
        """Return the messages of an idempotency key, or None."""
        known = self._known or {}
        if len(known) > 2 * TOKEN_WINDOW:
            newest = sorted(known.values(), key=_first)[-TOKEN_WINDOW:]
            self._known = known = {token.token: token for token in newest}
        return known.get(once)

    def upto(self, seq: int) -> list[Token]:
        """Return the newest tokens of messages up to this seq, to keep in a state."""
        known = [token for token in (self._known or {}).values() if token.first <= seq]
        return sorted(known, key=_first)[-TOKEN_WINDOW:]


def _first(token: Token) -> int:
    return token.first


def _tokens_of(records: Sequence[Record]) -> dict[str, Token]:
    """Return the tokens in these records."""
    found = {}
    for index, record in enumerate(records):
        if isinstance(record, Message) and record._once is not None:
            count = (part_of(record) or (1, 1))[1]
            members = [
                member.to_json()
                for place, member in enumerate(records[index : index + count], 1)
                if isinstance(member, Message)
                and (part_of(member) or (1, 1)) == (place, count)
                and member.seq == record.seq + place - 1
            ]
            # Without the text of a damaged message there is no digest; only the count is compared.
            content = digest(members) if len(members) == count else ""
            found[record._once] = Token(record._once, record.seq, count, content)
    return found
