"""Output of the crash suites."""

from collections.abc import Callable

Say = Callable[[str], None]
