"""Who is answered: an allow-list, by which an empty one means nobody."""

import logging
from collections.abc import Iterable
from typing import Final

_REMEMBERED: Final = 1_000
_logger = logging.getLogger("stenolog")


class AllowList:
    """The senders that may talk to the agent: ids as they are, names behind an @."""

    def __init__(self, entries: Iterable[str], *, setting: str) -> None:
        """`setting`: where the owner adds somebody."""
        given = [entry.strip() for entry in entries]
        self._ids = {entry for entry in given if entry and not entry.startswith("@")}
        self._names = {entry[1:].casefold() for entry in given if entry.startswith("@")} - {""}
        self._setting = setting
        self._refused: set[str] = set()

    def allows(self, id: str, name: str = "") -> bool:
        """Whether this sender is answered. Who is not is logged, once."""
        if id in self._ids or (name and name.casefold() in self._names):
            return True
        if id not in self._refused and len(self._refused) < _REMEMBERED:
            self._refused.add(id)
            called = f" (@{name})" if name else ""
            _logger.warning(
                "a message of %r%s was not answered; %s lists who is", id, called, self._setting
            )
        return False
