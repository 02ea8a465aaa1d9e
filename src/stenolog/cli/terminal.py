"""The terminal: whether there is one, and what writes to it without taking the screen over."""

import os
import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from prompt_toolkit.output.vt100 import Vt100_Output
    from rich.console import Console

_DUMB: Final = ("", "dumb", "unknown")


def is_interactive() -> bool:
    """Whether somebody types and looks, in a terminal that can move its cursor."""
    term = os.environ.get("TERM", "").casefold()
    # A program may be started with its stdin closed; then there is no stream for it.
    typed = sys.stdin is not None and sys.stdin.isatty()
    return typed and sys.stdout.isatty() and term not in _DUMB


def console() -> "Console":
    """What turns colours into the codes of this terminal; none with NO_COLOR."""
    # Slow to import, and only a terminal needs it.
    from rich.console import Console

    return Console(highlight=False, emoji=False, markup=False)


def inline_output() -> "Vt100_Output":
    """The terminal, for what is drawn below the other output and goes away again."""
    from prompt_toolkit.output.color_depth import ColorDepth
    from prompt_toolkit.output.vt100 import Vt100_Output

    output = Vt100_Output.from_pty(
        sys.stdout,
        term=os.environ.get("TERM"),
        default_color_depth=ColorDepth.from_env(),
        enable_bell=False,
    )
    # Where the cursor is need not be known, and the answer would come in between what is typed.
    output.enable_cpr = False
    return output
