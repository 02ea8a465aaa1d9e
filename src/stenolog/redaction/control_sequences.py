"""Removal of control sequences from texts that are shown or exported.

Control sequences change colours, the window title or the position of the cursor, and invisible
characters change the direction of writing. In a terminal they could forge what a program prints.
"""

from collections.abc import Mapping
from typing import Any, Final

from stenolog.lazy_loading import lazy_pattern

_CSI_REGEX: Final = r"(?:\x1b\[|\x9b)[0-?]*+[ -/]*+[@-~]"
"""Pattern of sequences for colours, the cursor, and erasing."""
_STRING_REGEX: Final = (
    r"(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])(?P<content>[^\x07\x1b\x9c]*+)(?:\x07|\x1b\\|\x9c)?"
)
"""Pattern of sequences that contain a text, such as a window title or the address of a link."""
# Control characters, and characters that change the writing direction.
UNPRINTABLE_RANGES: Final = (
    "\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
)
# Match whole control sequences. Otherwise their visible part, such as "[31m", would remain.
_UNPRINTABLE: Final = lazy_pattern(
    rf"{_CSI_REGEX}|{_STRING_REGEX}|\x1b[ -/]*+[0-~]|[{UNPRINTABLE_RANGES}]"
)
STRING_SEQUENCE: Final = lazy_pattern(_STRING_REGEX)
# A letter after ESC is kept: it may be the first letter of a secret.
# In programs and in JSON, ESC is written as an escape. A carriage return separates two texts.
HIDDEN_REGEX: Final = (
    rf"{_CSI_REGEX}|{_STRING_REGEX}|\x1b[ -/]++[0-~]|[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f]"
    r"|(?<!\\)\\++(?:u001[bB]|x1[bB]|033|e)\[[0-?]*+[ -/]*+[@-~]"
)
"""Pattern of the control sequences that can hide a secret from a pattern."""


def printable(text: str) -> str:
    """Return the text without control sequences; line ends and tabs are kept."""
    return text if text.isprintable() else _UNPRINTABLE.sub("", text)


def printable_data(value: Any) -> Any:
    """Return JSON data whose texts have no control sequences. Raises RecursionError."""
    match value:
        case str():
            return printable(value)
        case list():
            return [printable_data(item) for item in value]
        case Mapping():
            return {
                printable(name) if isinstance(name, str) else name: printable_data(item)
                for name, item in value.items()
            }
    return value
