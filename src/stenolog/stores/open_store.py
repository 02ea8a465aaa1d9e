"""Open the store at an address.

An engine is imported only when a store uses it, so that programs start fast.
"""

import os
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, Literal

from msgspec import Struct

from stenolog.errors import StenologError, UsageError
from stenolog.stores.base import Store

_SQLITE_MAGIC: Final = b"SQLite format 3\0"
"""First bytes of an SQLite database file."""
_DATABASE_SUFFIXES: Final = (".db", ".sqlite", ".sqlite3")
_EXAMPLE_PATHS: Final = {"jsonl": "./workspace", "sqlite": "./workspace/sessions.db"}

# A connection string of libpq, or the address of a server without the colon before `//`.
_CONNECTION_STRING: Final = re.compile(
    r"(?:^|\s)(?:host|hostaddr|dbname|user|password)\s*=|//[^/@]*:[^@]*@"
)
_OTHER_ADDRESS: Final = re.compile(
    r"(?:jsonl|sqlite|memory|postgres|postgresql):|[A-Za-z][\w+.-]*://"
)
_URL_ADVICE: Final = "write it as a URL: postgresql://USER@HOST/DATABASE"

Engine = Literal["jsonl", "sqlite", "memory", "postgresql"]


class Address(Struct, frozen=True, kw_only=True):
    """Engine of a store, and the location of its sessions."""

    engine: Engine
    path: str | os.PathLike[str] = ""
    """Folder, file or whole URL of the store; empty for an engine without a location."""
    parameters: str = ""
    """Parameters of the address: the text after the question mark."""


def open_store(
    where: str | os.PathLike[str], *, namespace: str = "sessions", read_only: bool = False
) -> Store:
    """Open the store at a folder, `jsonl:FOLDER`, `sqlite:FILE`, `postgresql://…` or `memory:`.

    `sqlite:FILE?synchronous=normal&cache_kb=512` sets options of SQLiteStore.
    `postgresql://…?schema=NAME&connections=32` sets options of PostgresStore. No data is migrated.
    Raises StoreUnavailable if the store cannot be opened, UsageError if the address is invalid.
    """
    parsed = parse_address(where)
    match parsed.engine:
        case "jsonl":
            from stenolog.stores.jsonl import JSONLStore

            try:
                return JSONLStore(parsed.path, namespace=namespace, read_only=read_only)
            except StenologError:
                check_no_file(parsed.path)
                raise
        case "sqlite":
            from stenolog.stores.sqlite import SQLiteStore

            options, _ = _parse_options("sqlite", parsed.parameters)
            return SQLiteStore(parsed.path, namespace=namespace, read_only=read_only, **options)
        case "postgresql":
            from urllib.parse import unquote

            from stenolog.stores.postgres import PostgresStore

            url, _, parameters = str(parsed.path).partition("?")
            options, driver_parameters = _parse_options("postgresql", parameters)
            if driver_parameters:
                url += "?" + "&".join(driver_parameters)
            if "schema" in options:
                options["schema"] = unquote(options["schema"])
            return PostgresStore(url, namespace=namespace, read_only=read_only, **options)
        case "memory" if read_only:
            raise UsageError("'memory:' starts empty, so it cannot be opened read-only")
        case "memory":
            from stenolog.stores.in_memory import InMemoryStore

            return InMemoryStore()


def parse_address(where: str | os.PathLike[str]) -> Address:
    """Parse the address of a store. Raises UsageError if the address is invalid."""
    text = os.fspath(where) if isinstance(where, os.PathLike) else where
    if not isinstance(text, str):
        raise UsageError(
            f"the address of a store must be text or a path, not {type(text).__name__}"
        )
    if "\0" in text:
        raise UsageError(f"the address {text!r} contains a NUL character")
    if not isinstance(where, str):
        return Address(engine="jsonl", path=where)
    if not where:
        raise UsageError("the address is empty; give a folder, or sqlite:FILE")
    scheme, colon, rest = where.partition(":")
    match scheme if colon else "":
        case "memory":
            if rest:
                raise UsageError("'memory:' takes no name; it is forgotten when it is closed")
            return Address(engine="memory")
        case "jsonl":
            return Address(engine="jsonl", path=_require_plain_path(scheme, rest))
        case "sqlite":
            file, _, parameters = rest.partition("?")
            path = _require_plain_path(scheme, file)
            return Address(engine="sqlite", path=path, parameters=parameters)
        case "postgresql" | "postgres":
            if not rest.startswith("//"):
                raise UsageError(f"'{scheme}:' needs a server; {_URL_ADVICE}")
            return Address(engine="postgresql", path=where)
    path = _expand_user(where)
    if not os.path.lexists(path):
        _check_new_folder(where, scheme if colon else "", rest)
    return Address(engine="jsonl", path=path)


def _check_new_folder(where: str, scheme: str, rest: str) -> None:
    """Raise UsageError if the caller most likely did not mean a new folder by this address."""
    if _CONNECTION_STRING.search(where):
        # The error does not quote the address, because the address may contain a password.
        raise UsageError(f"this is no folder but the address of a server; {_URL_ADVICE}")
    if scheme and _looks_like_scheme(scheme, rest):
        # Without this error, a misspelt engine would become a folder, and sessions would seem lost.
        advice = "" if rest.startswith("//") else f"; for a folder of that name write ./{where}"
        raise UsageError(
            f"unknown engine '{scheme}:'; use jsonl:, sqlite:, postgresql: or memory:{advice}"
        )
    if not scheme and where.endswith(_DATABASE_SUFFIXES):
        raise UsageError(
            f"there is no folder {where}; for a database write sqlite:{where}, and for a new "
            f"folder of that name jsonl:{where}"
        )


def is_server_address(text: str) -> bool:
    """Return whether a text may be the address of a server, which may contain a password."""
    return "://" in text or _CONNECTION_STRING.search(text) is not None


def _looks_like_scheme(scheme: str, rest: str) -> bool:
    letters = scheme.replace("+", "").replace("-", "").replace(".", "")
    is_name = scheme[:1].isalpha() and letters.isascii() and letters.isalnum()
    return rest.startswith("//") or (is_name and len(scheme) > 1)


def _require_plain_path(scheme: str, path: str) -> str:
    """Return the path after a scheme, with `~` expanded.

    Raises UsageError if the path is empty, is `:memory:`, starts with `//` or is another address.
    """
    if path == ":memory:":
        raise UsageError("'sqlite:' needs a file; 'memory:' keeps sessions only in this process")
    if not path:
        raise UsageError(f"'{scheme}:' needs a path, for example {scheme}:{_EXAMPLE_PATHS[scheme]}")
    has_slashes = path.startswith("//")
    is_address = _OTHER_ADDRESS.match(path) or _CONNECTION_STRING.search(path)
    if is_address or (has_slashes and "@" in path):  # guard: odd-address-not-quoted
        # The error does not quote the path, because it may contain a password.
        raise UsageError(f"{scheme}:PATH takes a plain path, not another address")
    if has_slashes:
        # Three slashes are ambiguous: some programs read an absolute path, others a relative path.
        relative_path = path.lstrip("/")
        raise UsageError(
            f"{scheme}:PATH takes a plain path, without //: {scheme}:./{relative_path} from here, "
            f"or {scheme}:/{relative_path} from the root"
        )
    return _expand_user(path)


def check_no_file(place: str | os.PathLike[str]) -> None:
    """Raise UsageError if a file is at `place`, where the caller needs a folder."""
    if not os.path.isfile(place):  # noqa: PTH113 - pathlib is slow to import
        return
    header, path = b"", os.fspath(place)
    with suppress(OSError), open(place, "rb") as file:  # noqa: PTH123
        header = file.read(len(_SQLITE_MAGIC))
    if header == _SQLITE_MAGIC:
        raise UsageError(f"{path} is a database, not a folder; use sqlite:{path}")
    raise UsageError(f"{path} is a file, not a folder; give a folder")


def _expand_user(path: str) -> str:
    # `pathlib` is slow to import.
    return os.path.expanduser(path) if path.startswith("~") else path  # noqa: PTH111


_NUMBER: Final = "[0-9]{1,10}"  # `int` raises ValueError for very long numbers
_POSITIVE: Final = f"(?=0*[1-9]){_NUMBER}"
_OPTIONS: Final[dict[Engine, dict[str, tuple[str, Callable[[str], Any]]]]] = {
    "sqlite": {"synchronous": ("full|normal", str), "cache_kb": (_POSITIVE, int)},
    "postgresql": {
        "schema": ("(?s).+", str),
        "connections": (_POSITIVE, int),
        "busy_timeout": (_NUMBER, float),
        "answer_timeout": (_NUMBER, float),
    },
}
"""Options that an address can set, by engine: pattern and conversion of the option's value."""
_OPTION_ADVICE: Final[dict[Engine, str]] = {
    "sqlite": "synchronous=full, synchronous=normal or cache_kb=NUMBER, joined by &",
    "postgresql": "schema=NAME, connections=NUMBER, busy_timeout=SECONDS or answer_timeout=SECONDS",
}


def _parse_options(engine: Engine, parameters: str) -> tuple[dict[str, Any], list[str]]:
    """Return the options of the engine, and the other parameters, which the driver gets.

    Raises UsageError.
    """
    options: dict[str, Any] = {}
    driver_parameters: list[str] = []
    for pair in parameters.split("&") if parameters else ():
        name, _, value = pair.partition("=")
        pattern, convert = _OPTIONS[engine].get(name, (None, str))
        if pattern is not None and re.fullmatch(pattern, value):
            options[name] = convert(value)
        elif pattern is None and engine == "postgresql":
            driver_parameters.append(pair)
        else:
            advice = _OPTION_ADVICE[engine]
            raise UsageError(f"{engine}: invalid parameter {pair!r}; use {advice}")
    return options, driver_parameters
