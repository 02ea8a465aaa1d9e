"""Whose a session is where the threads of a sender are joined, by its key alone. Pure.

What is said in a thread (`channel:thread:sender`) is its sender's, whatever the thread; every other
key is its own. Keys of other programs may have three parts as well and mean something else by them,
so that this holds only for who asks for it.
"""

import re
from typing import Final

_PARTS: Final = 3
_NO_ESCAPE: Final = re.compile("%(?!3A|25)")
"""What no part of a key that was made by our rules has."""


def owner_of(key: str) -> str:
    """Who the messages of a session belong to: a user (`telegram:123`) or a chat."""
    parts = key.split(":")
    if len(parts) != _PARTS or not all(parts) or _NO_ESCAPE.search(key):
        return key
    return f"{parts[0]}:{parts[2]}"
