"""How far the updates of an app were taken in, where it hands out all from a number on. Pure.

The app forgets what lies below the number it is asked from. So that number never passes an update
that is not durable, however many after it are.
"""

from collections.abc import Iterable
from typing import Literal

_State = Literal["open", "durable", "left"]


class Offsets:
    """Which updates are under way, durable, or to come again."""

    def __init__(self, *, known_below: int = 0) -> None:
        """Updates below this number were taken in by an earlier process."""
        self._known_below = known_below
        self._states: dict[int, _State] = {}
        self._next: int | None = None

    @property
    def next(self) -> int | None:
        """From which number on to ask; None where nothing is known yet."""
        return self._next

    @property
    def waiting(self) -> bool:
        """Whether any is not durable yet."""
        return any(state != "durable" for state in self._states.values())

    def came(self, numbers: Iterable[int]) -> list[int]:
        """Those that are to be taken in now; they are under way from now on."""
        there = sorted(set(numbers))
        for number in [one for one, state in self._states.items() if state == "left"]:
            if there and number not in there:
                self._states[number] = "durable"  # the app has forgotten it, and gives it no more
        new = []
        for number in there:
            if number < self._known_below:
                self._states[number] = "durable"
            elif self._states.get(number, "left") == "left" and number >= (self._next or 0):
                self._states[number] = "open"
                new.append(number)
        self._advance()
        return new

    def settled(self, number: int, *, durable: bool) -> None:
        """An update is durable, or it is to come again."""
        self._states[number] = "durable" if durable else "left"
        self._advance()

    def _advance(self) -> None:
        for number in sorted(self._states):
            if self._states[number] != "durable":
                self._next = number
                return
            del self._states[number]
            self._next = max(number + 1, self._next or 0)
