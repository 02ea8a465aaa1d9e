"""The config file: its location and its values."""

import os
import re
import tomllib
from collections.abc import Mapping
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


class FileContent(Struct, frozen=True, kw_only=True):
    """The content of a config file."""

    table: dict[str, Any]
    is_shared: bool = False
    """Whether users other than the owner may access the file."""


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
    return FileContent(table=_parse_toml(file, content), is_shared=is_shared)


def _parse_toml(file: File, content: bytes) -> dict[str, Any]:
    try:
        return tomllib.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise _wrong_settings(f"{file}:{line}", "this is not UTF-8 text") from error
    except RecursionError as error:
        raise _wrong_settings(str(file), "it is nested too deeply") from error
    except tomllib.TOMLDecodeError as error:
        position = _ERROR_POSITION.search(str(error))
        source = f"{file}:{position[1]}:{position[2]}" if position else str(file)
        reason = _ERROR_POSITION.sub("", str(error))
        raise _wrong_settings(source, f"invalid TOML: {reason}") from error
    except ValueError as error:
        # Python does not convert numbers with thousands of digits.
        raise _wrong_settings(str(file), "a number in it is too long") from error


def _wrong_settings(source: str, reason: str) -> WrongSettings:
    return WrongSettings([Problem(source=source, reason=reason)])
