"""Failures as answers: a loop must go on talking, so what failed is logged, counted and shown."""

import logging
from collections.abc import Callable
from typing import TypeVar

from msgspec import Struct

from stenolog.errors import StenologError
from stenolog.records import Health
from stenolog.stores.locks import ThreadLock

_logger = logging.getLogger("stenolog")
_Result = TypeVar("_Result")


class SessionHealth(Struct, frozen=True, kw_only=True):
    """Whether writes can be expected to be kept, and what went wrong so far."""

    ok: bool
    """The store says so, and the newest write succeeded."""
    free_bytes: int | None
    """Room left where the store lives; None where that has no meaning, or could not be asked."""
    problems: tuple[str, ...]
    """What is wrong now or soon will be, each with what to do."""
    failed_writes: int
    """How many writes failed since the store was opened."""
    failed_reads: int
    """How many reads fell back to nothing since the store was opened."""
    last_error: str | None
    """The newest failure in words; None where there was none."""


class Failures:
    """Makes calls that do not raise, and remembers what went wrong in them."""

    def __init__(self) -> None:
        self._counting = ThreadLock()
        self._writes = 0
        self._reads = 0
        self._last_error: str | None = None
        self._write_trouble: str | None = None

    def write(self, call: str, key: str, write: Callable[[], _Result]) -> _Result | None:
        """What the write gave; None where it failed."""
        try:
            result = write()
        except StenologError as error:
            words = _in_words(call, key, error)
            _logger.log(logging.ERROR, words)
        except Exception as error:
            words = _in_words(call, key, error)
            _logger.exception(words)
        else:
            with self._counting:
                self._write_trouble = None
            return result

        with self._counting:
            self._writes += 1
            self._last_error = words
            self._write_trouble = f"the newest write failed: {words}"
        return None

    def change(self, call: str, key: str, change: Callable[[], object]) -> bool:
        """Whether the change was made."""

        def changed() -> bool:
            change()
            return True

        return bool(self.write(call, key, changed))

    def read(
        self, call: str, key: str | None, read: Callable[[], _Result], *, otherwise: _Result
    ) -> _Result:
        """What the read gave; `otherwise` where it failed."""
        try:
            return read()
        except StenologError as error:
            words = _in_words(call, key, error)
            _logger.log(logging.ERROR, "%s; taken as empty", words)
        except Exception as error:
            words = _in_words(call, key, error)
            _logger.exception("%s; taken as empty", words)

        with self._counting:
            self._reads += 1
            self._last_error = words
        return otherwise

    def health(self, ask: Callable[[], Health]) -> SessionHealth:
        """What the store says of itself, and what failed; a failure to ask is a problem in it."""
        try:
            found = ask()
        except StenologError as error:
            found = Health(ok=False, free_bytes=None, problems=(str(error),))
        except Exception as error:
            _logger.exception("health failed")
            found = Health(ok=False, free_bytes=None, problems=(repr(error),))

        with self._counting:
            trouble = () if self._write_trouble is None else (self._write_trouble,)
            return SessionHealth(
                ok=found.ok and not trouble,
                free_bytes=found.free_bytes,
                problems=(*found.problems, *trouble),
                failed_writes=self._writes,
                failed_reads=self._reads,
                last_error=self._last_error,
            )


def _in_words(call: str, key: str | None, error: Exception) -> str:
    of = "" if key is None else f" of {key!r}"
    return f"{call}{of} failed: {type(error).__name__}: {error}"
