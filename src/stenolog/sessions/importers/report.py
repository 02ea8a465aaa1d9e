"""What could not be carried of one session, while it is read: gathered, counted, and told."""

from collections import Counter
from datetime import datetime
from typing import Any, Final

from stenolog.codec import encode_object
from stenolog.errors import RefusedMessage
from stenolog.stores.json_file import KeptMessage, NotASession

MOST: Final = 20
"""So many problems of one session are told one by one."""
LONGEST: Final = 400
"""So many characters of one: what stands in a file must not fill the screen."""


class NotAMessage(ValueError):
    """There is no message in it, and why."""


class Report:
    """`drop` what is lost, `note` what is lost of a message, `unseen` what is kept for nobody."""

    def __init__(self) -> None:
        self.dropped = 0
        self._words: list[str] = []
        self._unseen: Counter[str] = Counter()

    def drop(self, words: str, count: int = 1) -> None:
        """So many messages are not carried."""
        self.dropped += count
        self._words.append(_short(words, LONGEST))

    def note(self, words: str) -> None:
        """Something else is not carried."""
        self._words.append(_short(words, LONGEST))

    def unseen(self, kind: str) -> None:
        """Something of this kind has no place in a message of ours, and is kept beside it."""
        self._unseen[_short(kind, LONGEST // 10)] += 1

    def keep(
        self, fields: dict[str, Any], at: datetime | None, what: str, *, hidden: bool = False
    ) -> list[KeptMessage]:
        """The message as it is stored; none, and a problem more, where it cannot be kept."""
        try:
            return [KeptMessage(encode_object(fields), at, hidden=hidden)]
        except RefusedMessage as error:
            self.drop(f"{what}: {error}")
            return []

    def problems(self) -> tuple[str, ...]:
        """All of it, each as a sentence."""
        more = len(self._words) - MOST
        rest = (f"and {more:,} more like these",) if more > 0 else ()
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in self._unseen.most_common(MOST))
        unseen = (f"kept, but no model will be shown it: {kinds}",) if kinds else ()
        return (*self._words[:MOST], *rest, *unseen)

    def check(self, messages: list[KeptMessage]) -> None:
        """Raise NotASession where no message is left."""
        if not messages:
            words = "".join(f"; {words}" for words in self.problems())
            raise NotASession(f"there is no message in it{words}")


def _short(words: str, length: int) -> str:
    return words if len(words) <= length else words[: length - 1] + "…"
