"""P12: which `once` tokens a log knows, of at least the newest thousand messages.

A token stands in the line of its message. Of archived messages the states carry them, so that
no archive is opened for it.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from stenolog.codec import digest
from stenolog.records import Message, Record, Token
from stenolog.stores.jsonl.scan import part_of

REMEMBERED: Final = 1_000
"""How many of the newest messages' tokens are known, at least."""
_BYTES: Final = 400
"""About what one of them takes, with its digest and its place in the table."""


class Tokens:
    """The tokens of one log; nothing is looked up before somebody asks for one."""

    __slots__ = ("_carried", "_known")

    def __init__(self) -> None:
        self._known: dict[str, Token] | None = None
        self._carried: dict[str, Token] = {}

    @property
    def learnt(self) -> bool:
        """Whether the newest messages were looked at."""
        return self._known is not None

    @property
    def weight(self) -> int:
        """About how many bytes those in memory hold."""
        return _BYTES * len(self._known or ())

    def unlearn(self) -> None:
        """The log is read anew."""
        self._known = None

    def carry(self, tokens: Iterable[Token]) -> None:
        """Take in those that stand in a state, the newest state first."""
        for token in tokens:
            self._carried.setdefault(token.token, token)

    def learn(self, messages: Sequence[Message]) -> None:
        """Begin with those of the newest messages."""
        self._known = {**self._carried, **_tokens_of(messages)}

    def add(self, records: Sequence[Record]) -> None:
        """Take in what was appended, once anybody has asked."""
        if self._known is not None:
            self._known.update(_tokens_of(records))

    def find(self, once: str) -> Token | None:
        """Which messages a token stands for."""
        known = self._known or {}
        if len(known) > 2 * REMEMBERED:
            newest = sorted(known.values(), key=_first)[-REMEMBERED:]
            self._known = known = {token.token: token for token in newest}
        return known.get(once)

    def upto(self, seq: int) -> list[Token]:
        """The newest of messages up to this seq, for a state that outlives them."""
        known = [token for token in (self._known or {}).values() if token.first <= seq]
        return sorted(known, key=_first)[-REMEMBERED:]


def _first(token: Token) -> int:
    return token.first


def _tokens_of(records: Sequence[Record]) -> dict[str, Token]:
    """The tokens that stand in these records."""
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
            # What a damaged one said is not known; then the count must do.
            told = digest(members) if len(members) == count else ""
            found[record._once] = Token(record._once, record.seq, count, told)
    return found
