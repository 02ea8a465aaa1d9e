"""The command `steno`. Data goes to stdout, messages for the user go to stderr."""

from stenolog.cli.steno import main

__all__ = ["main"]
