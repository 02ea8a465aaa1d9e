"""The command `steno`. Data goes to stdout, words go to stderr."""

from stenolog.cli.steno import main

__all__ = ["main"]
