"""Turns that failed when they were gone on with: not tried again before that can be of use."""

from time import monotonic
from typing import Final

from stenolog.errors import ContextTooSmall, ModelRefused, StenologError

_FIRST: Final = 10.0
_LONGEST: Final = 3_600.0
_REMEMBERED: Final = 10_000


class GivenUp:
    """Which sessions are left alone, and for how long.

    What the model refuses, it refuses again, until something else is said. Where its server is
    away, it is asked again after a while that grows. Others are tried again at once.
    """

    def __init__(self) -> None:
        self._until: dict[tuple[str | None, str], tuple[int, int, float]] = {}
        """By session: the last seq when it failed, how often, and until when it is left alone."""

    def holds(self, agent: str | None, key: str, last: int) -> bool:
        """Whether a session whose last seq is this is to be left alone now."""
        found = self._until.get((agent, key))
        return found is not None and found[0] == last and monotonic() < found[2]

    def note(self, agent: str | None, key: str, last: int, error: StenologError) -> None:
        """Take in that going on has failed."""
        before, times, _ = self._until.pop((agent, key), (last, 0, 0.0))
        times = times + 1 if before == last else 1
        pause = min(_FIRST * 2 ** min(times - 1, 30), _LONGEST)
        if isinstance(error, ModelRefused | ContextTooSmall):
            pause = float("inf")
        self._until[agent, key] = (last, times, monotonic() + pause)
        while len(self._until) > _REMEMBERED:
            del self._until[next(iter(self._until))]
