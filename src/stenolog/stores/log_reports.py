"""Log messages for the logger `stenolog`.

`logging` is imported only when there is a message: most processes log nothing and start faster.
"""

import sys


def warning(text: str, *values: object) -> None:
    """Log a warning."""
    try:
        import logging
    except (ImportError, OSError):
        # Without a free descriptor nothing can be imported, and that is when warnings matter most.
        # A program that configured logging has imported it already.
        sys.stderr.write(f"{text % values}\n")
        return
    logging.getLogger("stenolog").warning(text, *values, stacklevel=2)


def info(text: str, *values: object) -> None:
    """Log an informational message, if the program has imported `logging`."""
    if "logging" in sys.modules:
        sys.modules["logging"].getLogger("stenolog").info(text, *values, stacklevel=2)
