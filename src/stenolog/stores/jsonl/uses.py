"""Who is inside a store right now, so that closing it never closes a file under somebody."""

from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

from stenolog.errors import StoreClosed


class Uses:
    """Entered by `with` for each call; after `end`, nobody enters any more.

    Adding to a list and taking from it are each one step of the interpreter, so no lock is needed:
    a call first says that it is there and then looks whether the store was closed; closing first
    says so and then looks whether anybody is there. One of the two sees the other; where both do,
    only one finds the release in its list.
    """

    def __init__(self, release: Callable[[], None]) -> None:
        self._releases = [release]
        self._inside: list[None] = []
        self._ended = False

    def __enter__(self) -> None:
        self._inside.append(None)
        if self._ended:
            self.__exit__(None, None, None)
            raise StoreClosed("the store is closed")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._inside.pop()
        if self._ended:
            self.end()

    def end(self) -> None:
        """Let nobody in any more; the last one out releases."""
        self._ended = True
        if not self._inside:
            with suppress(IndexError):
                self._releases.pop()()
