"""Types of the fixtures that run steno."""

from collections.abc import Callable

from click.testing import Result

Steno = Callable[..., Result]
InTerminal = Callable[..., tuple[int, str]]
