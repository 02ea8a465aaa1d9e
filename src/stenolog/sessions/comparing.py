"""What a life in a destination is to the one in the source: the same, its beginning, or no copy."""

from collections.abc import Iterator
from typing import Final

from msgspec import Struct

from stenolog.records import Message, Span
from stenolog.sessions.digests import MessagesDigest, NewlyLost, missing
from stenolog.stores import spans
from stenolog.stores.whole import Life, Reading, token_of

_LEFT: Final = "The destination is left as it is"
NEWER: Final = (
    f"the destination went on by itself and has more than the source. {_LEFT}: copy from there to "
    "here, or to another place"
)
DIVERGED: Final = (
    f"the destination has other content under the same uid: both went on by themselves. {_LEFT}: "
    "fork, rename or purge one of the two, or copy to another place"
)
LOST_HERE: Final = (
    f"the source has lost messages to damage that the destination still has. {_LEFT}: copy the "
    "session back from there"
)
DAMAGED_THERE: Final = (
    f"the copy in the destination is damaged. {_LEFT}: purge the session there and copy again"
)


class Verdict(Struct, frozen=True, kw_only=True):
    """What was found."""

    digest: MessagesDigest
    """Of the source's messages, as far as the destination has seqs."""
    equal: bool = False
    begins_like: bool = False
    """The destination is an earlier copy, and its messages are how the source begins."""
    reason: str = ""
    """Why it must not be written to; empty where it may be."""
    newer: bool = False
    """It has all that the source has."""


def compare(here: Reading, there: Reading) -> Verdict:
    """Compare a life in the source with the one of the same uid in the destination.

    An earlier copy that nobody wrote to since may be written to. Raises NewlyLost where the source
    is found to be damaged.
    """
    source, target = here.life, there.life
    seen = _Seen(source, target.last_seq)
    copied = MessagesDigest()
    try:
        for message in copied.passing(target, there.messages):
            seen.take(message, here.messages)
    except NewlyLost:
        # Of the destination: what the source lacks is told by `finish`.
        return Verdict(digest=seen.digest, reason=DAMAGED_THERE)
    seen.finish(here.messages)
    ahead = target.last_seq > source.last_seq or target.number > source.number
    equal = (
        not seen.differ
        and source.last_seq == target.last_seq
        and seen.digest.with_life(source) == copied.with_life(target)
    )
    found = Verdict(digest=seen.digest, equal=equal)
    if equal:
        return found
    # What is only there and was purged here went away for a reason.
    if seen.other or (seen.only_there and not ahead and there.untouched):
        reason = DIVERGED if seen.other else LOST_HERE
        return Verdict(digest=seen.digest, reason=reason)
    if not there.untouched or ahead:
        behind = source.last_seq > target.last_seq or source.number > target.number
        newer = not behind and not seen.only_here
        reason = NEWER if newer else DIVERGED
        return Verdict(digest=seen.digest, reason=reason, newer=newer)
    return Verdict(digest=seen.digest, begins_like=not seen.differ)


class _Seen:
    """Both lives side by side, message by message."""

    def __init__(self, source: Life, upto: int) -> None:
        self.digest = MessagesDigest()
        self.other = False
        """A message is another one there."""
        self.only_here = False
        """One is lacking there."""
        self.only_there = False
        """One is lacking here, and was not purged."""
        self.purged = False
        """One was purged here, and not there."""
        self._source = source
        self._upto = upto
        self._expected = 1
        self._gaps: list[Span] = []
        self._next: Message | None = None

    @property
    def differ(self) -> bool:
        return self.other or self.only_here or self.only_there or self.purged

    def take(self, there: Message, here: Iterator[Message]) -> None:
        """A message of the destination."""
        while (mine := self._peek(here)) is not None and mine.seq < there.seq:
            self._pass(mine)
            self.only_here = True
        if mine is None or mine.seq > there.seq:
            if spans.contains(self._source.purged, there.seq):
                self.purged = True
            else:
                self.only_there = True
            return
        self._pass(mine)
        if _content(mine) != _content(there):
            self.other = True

    def finish(self, here: Iterator[Message]) -> None:
        """The destination has no more. Raises NewlyLost for what the source lacks."""
        while (mine := self._peek(here)) is not None and mine.seq <= self._upto:
            self._pass(mine)
            self.only_here = True
        end = min(self._upto, self._source.last_seq)
        self._note_gap(end + 1)
        if self._gaps:
            raise NewlyLost(self._gaps)

    def _peek(self, here: Iterator[Message]) -> Message | None:
        if self._next is None:
            self._next = next(here, None)
        return self._next

    def _pass(self, mine: Message) -> None:
        self._note_gap(mine.seq)
        self._expected = mine.seq + 1
        self.digest.add(mine)
        self._next = None

    def _note_gap(self, upto: int) -> None:
        if upto > self._expected:
            gap = spans.minus([(self._expected, upto - 1)], missing(self._source))
            self._gaps = spans.union(self._gaps, gap)


def _content(message: Message) -> tuple[str, bytes, tuple[str, int] | None]:
    return message._at, message.to_json(), token_of(message)
