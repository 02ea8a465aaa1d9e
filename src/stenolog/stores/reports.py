"""What a log of the program should tell: the logger `stenolog`, imported when there is news.

Almost every process has nothing to report, and none of them waits for `logging`.
"""

import sys


def warning(text: str, *values: object) -> None:
    """Somebody should look at this."""
    try:
        import logging
    except (ImportError, OSError):
        # Without a free descriptor nothing can be imported, and then there is most to tell. Who
        # set up a log of their own has it imported already.
        sys.stderr.write(f"{text % values}\n")
        return
    logging.getLogger("stenolog").warning(text, *values, stacklevel=2)


def info(text: str, *values: object) -> None:
    """What happened, for who wants to know; nobody does who has not set up `logging`."""
    if "logging" in sys.modules:
        sys.modules["logging"].getLogger("stenolog").info(text, *values, stacklevel=2)
