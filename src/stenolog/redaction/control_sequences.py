"""Removal of control sequences from texts that are shown or exported.

Control sequences change colours, the window title or the position of the cursor, and invisible
characters change the direction of writing. In a terminal they could forge what a program prints.
"""

from collections.abc import Mapping
from typing import Any, Final

from stenolog.lazy_loading import lazy_pattern

_C1_REGEX: Final = r"(?<![\x80-\xff])"
"""Pattern of the place before a control character from U+0080 to U+009F.

After a character from U+0080 to U+00FF, it is a byte of UTF-8 that was decoded as Latin-1: a
closing quote becomes U+00E2, U+0080 and U+009D.
"""
_PARAMETERS_REGEX: Final = r"[0-?]*+[ -/]*+[@-~]"
_INTRODUCER_REGEX: Final = rf"(?:\x1b[\]PX^_]|{_C1_REGEX}[\x90\x98\x9d-\x9f])"
_CONTENT_REGEX: Final = r"(?P<content>[^\n\r\x07\x1b\x90\x98\x9c-\x9f]{0,8192}+)"
# guard: unterminated-kept
_STRING_REGEX: Final = rf"{_INTRODUCER_REGEX}{_CONTENT_REGEX}(?:\x07|\x1b\\|{_C1_REGEX}\x9c)"
"""Pattern of sequences that contain a text, such as a window title or the address of a link.

Without its end in the same line, a sequence was cut or is none, and its text is kept.
"""
# Control characters, and characters that change the writing direction.
UNPRINTABLE_RANGES: Final = (
    "\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
)
# Match whole control sequences. Otherwise their visible part, such as "[31m", would remain.
_UNPRINTABLE: Final = lazy_pattern(
    rf"(?:\x1b\[|{_C1_REGEX}\x9b){_PARAMETERS_REGEX}|{_STRING_REGEX}"
    rf"|\x1b[ -/]*+[0-~]|[{UNPRINTABLE_RANGES}]"
)
STRING_CONTENT: Final = lazy_pattern(_INTRODUCER_REGEX + _CONTENT_REGEX)
"""Pattern of the text in a sequence, with or without the end of the sequence."""
# A letter after ESC is kept: it may be the first letter of a secret.
# In programs and in JSON, ESC is written as an escape. A carriage return separates two texts.
HIDDEN_REGEX: Final = (
    rf"(?:\x1b\[|\x9b){_PARAMETERS_REGEX}|{_STRING_REGEX}|\x1b(?:[ -/]++[0-~]|[\]^_])"
    r"|[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f]"
    rf"|(?<!\\)\\++(?:(?:(?:u001|x1)[bB]|033|e)(?:\[{_PARAMETERS_REGEX}|[ -/]++[0-~])"
    rf"|(?:u009|x9)[bB]{_PARAMETERS_REGEX})"
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
