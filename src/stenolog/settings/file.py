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


KeyPath = tuple[str, ...]

_BARE_KEY: Final = re.compile(r"[A-Za-z0-9_-]+")


def join_path(path: KeyPath) -> str:
    """Return the path of a setting joined with dots. Names that are not bare keys are quoted."""
    return ".".join(part if _BARE_KEY.fullmatch(part) else quote_text(part) for part in path)


def quote_text(text: str) -> str:
    """Return a text in TOML syntax.

    Control characters are escaped, so that terminals ignore them.
    """
    return f'"{"".join(map(_escape_character, text))}"'


def _escape_character(character: str) -> str:
    if character in '"\\':
        return f"\\{character}"
    if character.isprintable():
        return character
    escapes = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}
    code = ord(character)
    return escapes.get(character) or (f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}")


# --- file ---------------------------------------------------------------------------------------


VARIABLE_PREFIX: Final = "STENO_"
"""Prefix of all environment variables of stenolog."""
CONFIG_VARIABLE: Final = "STENO_CONFIG"

_ERROR_POSITION: Final = re.compile(r" \(at line (\d+), column (\d+)\)$")
_MAX_DEPTH: Final = 5
"""Maximum nesting depth of the tables whose values get line numbers."""
_MAX_VALUE_LINES: Final = 1_000
"""Maximum number of lines of a value. Line numbers after a longer value are unknown."""
_LONG_NUMBER: Final = re.compile(r"\d(?:_?\d){639,}")
"""Pattern of numbers with 640 digits or more, which Python may reject."""


class FileContent(Struct, frozen=True, kw_only=True):
    """The content of a config file."""

    file: File
    table: dict[str, Any]
    lines: dict[KeyPath, int]
    """First line of each value and each table, by path."""
    is_shared: bool = False
    """Whether users other than the owner may access the file."""

    def source(self, path: KeyPath) -> str:
        """Return `FILE:LINE` of a value, or of the table that contains it."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.lines:
                return f"{self.file}:{self.lines[path[:end]]}"
        return str(self.file)


def config_path(config: File | None, environment: Mapping[str, str]) -> File:
    """Return `config`, or else the file that STENO_CONFIG names, or else the user's config file.

    A config file in the current folder is never used, because it could send conversations and keys
    to another server.
    """
    if config is not None:
        return expand_home(config)
    if environment.get(CONFIG_VARIABLE):
        return expand_home(environment[CONFIG_VARIABLE])
    return platformdirs.user_config_path("stenolog") / "config.toml"


def has_file_or_variables(environment: Mapping[str, str]) -> bool:
    """Return whether a config file or an environment variable of stenolog exists.

    Without file and variables, all settings have their defaults. Code that needs only one setting
    calls this fast check first.
    """
    if any(name.startswith(VARIABLE_PREFIX) for name in environment):
        return True
    try:
        config_path(None, environment).stat()
    except OSError as error:
        # For any other error, return True: the code that reads the file reports the error.
        return not isinstance(error, FileNotFoundError)
    return True


def expand_home(name: str | File) -> File:
    """Return the path of a file; `~` is the user's home folder."""
    # Unlike `Path.expanduser`, this call raises no error for an unknown user.
    return File(os.path.expanduser(name))  # noqa: PTH111


def read_file(config: File | None, environment: Mapping[str, str]) -> FileContent | None:
    """Return the content of the config file; None if the user has no config file.

    Raises WrongSettings if the file is invalid, or if `config` or STENO_CONFIG names no file.
    """
    file = config_path(config, environment)
    try:
        content = file.read_bytes()
        is_shared = bool(file.stat().st_mode & 0o077)
    except FileNotFoundError:
        if config is None and not environment.get(CONFIG_VARIABLE):
            return None
        hint = "" if config is not None else f" (from {CONFIG_VARIABLE})"
        raise _wrong_settings(str(file), f"there is no such file{hint}") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise _wrong_settings(str(file), f"it cannot be read: {reason}") from error
    text = _decode_utf8(file, content)
    table = _parse_toml(file, text)
    return FileContent(file=file, table=table, lines=start_lines(text), is_shared=is_shared)


def start_lines(text: str) -> dict[KeyPath, int]:
    """Return the line in which each value and each table of a TOML text starts.

    Python's tomllib does not report lines. A value always ends at the end of a line, and an
    incomplete value is not valid. This function therefore adds lines to a statement until the
    statement is valid.
    """
    line_numbers: dict[KeyPath, int] = {}
    lines = text.split("\n")
    begin, header = 0, ""
    while begin < len(lines):
        for end in range(begin + 1, min(begin + _MAX_VALUE_LINES, len(lines)) + 1):
            statement = "\n".join(lines[begin:end])
            is_header = statement.lstrip().startswith("[")
            try:
                table = tomllib.loads(statement if is_header else f"{header}\n{statement}")
            except ValueError:
                continue
            if is_header:
                header = statement
            for path in _all_paths(table):
                line_numbers.setdefault(path, begin + 1)
            break
        else:
            return line_numbers
        begin = end
    return line_numbers


def _all_paths(table: Mapping[str, Any], parent_path: KeyPath = ()) -> Iterator[KeyPath]:
    for name, value in table.items():
        yield (*parent_path, name)
        if isinstance(value, dict) and len(parent_path) < _MAX_DEPTH:
            yield from _all_paths(value, (*parent_path, name))


def _decode_utf8(file: File, content: bytes) -> str:
    try:
        # `start_lines` splits at \n and parses single lines, where tomllib rejects a \r at the end.
        return content.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise _wrong_settings(f"{file}:{line}", "this is not UTF-8 text") from error


def _parse_toml(file: File, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise _wrong_settings(str(file), "it is nested too deeply") from error
    except tomllib.TOMLDecodeError as error:
        position = _ERROR_POSITION.search(str(error))
        source = f"{file}:{position[1]}:{position[2]}" if position else str(file)
        reason = _ERROR_POSITION.sub("", str(error))
        raise _wrong_settings(source, f"invalid TOML: {reason}") from error
    except ValueError as error:
        raise WrongSettings([_long_number_problem(file, text)]) from error


def _long_number_problem(file: File, text: str) -> Problem:
    """Return the problem for a number with more digits than Python converts."""
    for match in _LONG_NUMBER.finditer(text):
        before, after = text[: match.start()], _LONG_NUMBER.sub("0", text[match.end() :])
        try:
            # Digits in a string or comment are valid, so parse the text with only this number.
            tomllib.loads(f"{_LONG_NUMBER.sub('0', before)}{match[0]}{after}")
        except ValueError:
            line = before.count("\n") + 1
            lines = start_lines(_LONG_NUMBER.sub("0", text))
            starts = [(start, path) for path, start in lines.items() if start <= line]
            field = ".".join(max(starts, default=(0, ()))[1])
            digits = sum(map(str.isdigit, match[0]))
            reason = f"a number with {digits:,} digits is too long"
            return Problem(source=f"{file}:{line}", field=field, reason=reason)
    return Problem(source=str(file), reason="a number in it is too long")


def _wrong_settings(source: str, reason: str) -> WrongSettings:
    return WrongSettings([Problem(source=source, reason=reason)])
