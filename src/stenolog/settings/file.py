"""The config file: its location, its values, and their line numbers."""

import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path as File
from typing import Any, Final

import platformdirs
from msgspec import Struct

from stenolog.errors import Problem, WrongSettings

# --- paths ----------------------------------------------------------------------------------------
# Names and texts in TOML syntax, as errors and the config file show them.


Path = tuple[str, ...]

_BARE: Final = re.compile(r"[A-Za-z0-9_-]+")


def dotted(path: Path) -> str:
    """Return a path with dots. Names that are not plain words are quoted."""
    return ".".join(part if _BARE.fullmatch(part) else quoted(part) for part in path)


def quoted(text: str) -> str:
    """Return a text in TOML syntax.

    Control characters are escaped, so that terminals ignore them.
    """
    return f'"{"".join(map(_escaped, text))}"'


def _escaped(character: str) -> str:
    if character in '"\\':
        return f"\\{character}"
    if character.isprintable():
        return character
    known = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}
    code = ord(character)
    return known.get(character) or (f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}")


# --- file ---------------------------------------------------------------------------------------


PREFIX: Final = "STENO_"
"""Prefix of all environment variables of stenolog."""
VARIABLE: Final = "STENO_CONFIG"

_AT: Final = re.compile(r" \(at line (\d+), column (\d+)\)$")
_DEEPEST: Final = 5
"""Maximum nesting depth of a field."""
_LONGEST: Final = 1_000
"""Maximum number of lines of a value. Line numbers after a longer value are unknown."""
_DIGITS: Final = re.compile(r"\d(?:_?\d){639,}")
"""Pattern of numbers with 640 digits or more, which Python may reject."""


class FileValue(Struct, frozen=True, kw_only=True):
    """The content of a config file."""

    file: File
    table: dict[str, Any]
    lines: dict[Path, int]
    """First line of each value and each table, by path."""
    shared: bool = False
    """Whether users other than the owner may read the file."""

    def source(self, path: Path) -> str:
        """Return `FILE:LINE` of a value, or of the table that contains it."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.lines:
                return f"{self.file}:{self.lines[path[:end]]}"
        return str(self.file)


def config_path(config: File | None, environment: Mapping[str, str]) -> File:
    """Return the config file: `config`, the file that STENO_CONFIG names, or the user's own.

    A file in the current folder is never used, because it could send conversations and keys
    elsewhere.
    """
    if config is not None:
        return expand_home(config)
    if environment.get(VARIABLE):
        return expand_home(environment[VARIABLE])
    return platformdirs.user_config_path("stenolog") / "config.toml"


def is_anything_set(environment: Mapping[str, str]) -> bool:
    """Whether any setting may differ from its default.

    This check is fast, for code that needs only one setting.
    """
    if any(name.startswith(PREFIX) for name in environment):
        return True
    try:
        config_path(None, environment).stat()
    except FileNotFoundError:
        return False
    except OSError:
        # The code that reads the file reports the error.
        return True
    return True


def expand_home(name: str | File) -> File:
    """Return a file by its name, in which `~` is the user's home."""
    # pathlib raises an error for an unknown user.
    return File(os.path.expanduser(name))  # noqa: PTH111


def read_file(config: File | None, environment: Mapping[str, str]) -> FileValue | None:
    """Return the content of the config file, or None if the user has none. Raises WrongSettings.

    A file that was given explicitly must exist.
    """
    file = config_path(config, environment)
    try:
        content = file.read_bytes()
        shared = bool(file.stat().st_mode & 0o077)
    except FileNotFoundError:
        if config is None and not environment.get(VARIABLE):
            return None
        named = "" if config is not None else f" (from {VARIABLE})"
        raise _wrong(str(file), f"there is no such file{named}") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise _wrong(str(file), f"it cannot be read: {reason}") from error
    text = _decoded(file, content)
    table = _parsed(file, text)
    return FileValue(file=file, table=table, lines=lines_of(text), shared=shared)


def lines_of(text: str) -> dict[Path, int]:
    """Return the line in which each value and each table of this TOML starts.

    tomllib does not report lines. But a value always ends at the end of a line, and an incomplete
    value is not valid. So this function adds lines after each value until the text is valid TOML
    again.
    """
    line_numbers: dict[Path, int] = {}
    lines = text.split("\n")
    begin, header = 0, ""
    while begin < len(lines):
        for end in range(begin + 1, min(begin + _LONGEST, len(lines)) + 1):
            statement = "\n".join(lines[begin:end])
            is_header = statement.lstrip().startswith("[")
            try:
                table = tomllib.loads(statement if is_header else f"{header}\n{statement}")
            except ValueError:
                continue
            if is_header:
                header = statement
            for path in _paths(table):
                line_numbers.setdefault(path, begin + 1)
            break
        else:
            return line_numbers
        begin = end
    return line_numbers


def _paths(table: Mapping[str, Any], above: Path = ()) -> Iterator[Path]:
    for name, value in table.items():
        yield (*above, name)
        if isinstance(value, dict) and len(above) < _DEEPEST:
            yield from _paths(value, (*above, name))


def _decoded(file: File, content: bytes) -> str:
    try:
        # tomllib does not accept Windows line ends in text.
        return content.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise _wrong(f"{file}:{line}", "this is not UTF-8 text") from error


def _parsed(file: File, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise _wrong(str(file), "it is nested too deeply") from error
    except tomllib.TOMLDecodeError as error:
        message = str(error)
        at = _AT.search(message)
        source = f"{file}:{at[1]}:{at[2]}" if at else str(file)
        raise _wrong(source, f"invalid TOML: {_AT.sub('', message)}") from error
    except ValueError as error:
        raise WrongSettings([_long_number_problem(file, text)]) from error


def _long_number_problem(file: File, text: str) -> Problem:
    """Return the problem of a text with a number that has more digits than Python reads."""
    short = _DIGITS.sub("0", text)
    for match in _DIGITS.finditer(text):
        before, after = text[: match.start()], _DIGITS.sub("0", text[match.end() :])
        try:
            # The digits may be in a text or a comment, where they are valid.
            tomllib.loads(f"{_DIGITS.sub('0', before)}{match[0]}{after}")
        except ValueError:
            line = before.count("\n") + 1
            starts = [(at, path) for path, at in lines_of(short).items() if at <= line]
            field = ".".join(max(starts, default=(0, ()))[1])
            digits = sum(map(str.isdigit, match[0]))
            reason = f"a number with {digits:,} digits is too long"
            return Problem(source=f"{file}:{line}", field=field, reason=reason)
    return Problem(source=str(file), reason="a number in it is too long")


def _wrong(source: str, reason: str) -> WrongSettings:
    return WrongSettings([Problem(source=source, reason=reason)])
