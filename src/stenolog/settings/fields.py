"""Fields of the settings, derived from the classes in `values`: paths, checks and TOML."""

import ast
import re
import textwrap
import zoneinfo
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from inspect import getsource
from itertools import chain, pairwise
from types import MappingProxyType, ModuleType
from typing import Any, Final, get_args
from urllib.parse import SplitResult, urlsplit

import msgspec
from msgspec import Struct, inspect

from stenolog.errors import UsageError
from stenolog.settings import values
from stenolog.settings.file import KeyPath, quote_text
from stenolog.settings.values import Settings, has_secret, has_user
from stenolog.stores.open_store import parse_address

ANY_NAME: Final = "NAME"
"""Placeholder for a user-chosen name in the path of a setting: `models.NAME.key`."""
NAMED_TABLES: Final = ("models", "agents", "webhooks", "retention")
"""Tables that contain tables with user-chosen names."""
TABLE_ALIASES: Final = {"channels_config": "channels"}
"""Name of a table, by the name that zeroclaw uses for the same table."""

IGNORED_PATHS: Final = (("keys",), ("agent", "routes"))
"""Paths of fields in the value classes that are not settings."""


class Field(Struct, frozen=True, kw_only=True):
    """A setting: its path, its type and its purpose."""

    path: KeyPath
    type: Any
    default: Any
    description: str

    @property
    def name(self) -> str:
        """Dotted path of the setting, such as `gateway.port`."""
        return ".".join(self.path)


@cache
def all_fields() -> Mapping[KeyPath, Field]:
    """Return all fields by path, in the order of the config file."""
    return MappingProxyType({field.path: field for field in _struct_fields(Settings, ())})


def find_field(path: KeyPath) -> Field | None:
    """Return the field at this path, or None."""
    if len(path) > 1 and path[0] in NAMED_TABLES:
        path = (path[0], ANY_NAME, *path[2:])
    return all_fields().get(path)


def _struct_fields(struct: type[Struct], path: KeyPath) -> Iterator[Field]:
    texts = field_docstrings(values)[struct.__name__]
    sub_tables: list[Iterator[Field]] = []
    for attribute in msgspec.structs.fields(struct):
        setting_path = (*path, attribute.name)
        # A table has the type of a struct S, or `Mapping[str, S]` if it contains named tables.
        table_type = (get_args(attribute.type) or (attribute.type,))[-1]
        if setting_path in IGNORED_PATHS:
            continue
        if isinstance(table_type, type) and issubclass(table_type, Struct):
            has_names = table_type is not attribute.type
            table_path = (*setting_path, ANY_NAME) if has_names else setting_path
            sub_tables.append(_struct_fields(table_type, table_path))
        else:
            text, default = texts[attribute.name], attribute.default
            yield Field(path=setting_path, type=attribute.type, default=default, description=text)
    # In TOML, the values of a table come before its sub-tables.
    yield from chain.from_iterable(sub_tables)


@cache
def field_docstrings(module: ModuleType) -> Mapping[str, Mapping[str, str]]:
    """Return the docstring of each field of each class of a module, as one line."""
    texts: dict[str, dict[str, str]] = {}
    for node in ast.parse(getsource(module)).body:
        if not isinstance(node, ast.ClassDef):
            continue
        class_texts = texts.setdefault(node.name, {})
        for statements in pairwise(node.body):
            match statements:
                case ast.AnnAssign(ast.Name(name)), ast.Expr(ast.Constant(text)):
                    class_texts[name] = " ".join(str(text).split())
    return texts


# --- checking -------------------------------------------------------------------------------------
# Checks of single values, and the error texts for wrong values.


_VARIABLE_PATTERN: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_USER_NOT_ALLOWED: Final = (
    "the address of a server must not contain a user or password; put the key in an environment "
    "variable and name it in key_env"
)
_HOST_PATTERN: Final = re.compile(r"[A-Za-z0-9._-]+|[0-9a-fA-F:]*:[0-9a-fA-F:.]*")
MIN_SECRET_LENGTH: Final = 16
"""Minimum number of characters of a field `secret`."""
_HEADER_NAME_PATTERN: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


class InvalidValue(Exception):
    """The field does not accept the value. The text says which values the field accepts."""


def check_value(name: str, value: Any) -> None:
    """Check the value of a field beyond its type. Raises InvalidValue."""
    check = _VALUE_CHECKS.get(name)
    if check is not None and value:
        for text in value if isinstance(value, tuple) else [value]:
            check(text)


def describe_type(field: Field) -> str:
    """Describe the values that a field accepts, such as `a whole number from 1 to 100`."""
    match inspect.type_info(field.type):
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType() as kind:
            return f"a whole number {_describe_range(kind)}"
        case inspect.FloatType() as kind:
            return f"a number {_describe_range(kind)}"
        case inspect.LiteralType():
            # `inspect.LiteralType` does not keep the order of the choices.
            return "one of " + ", ".join(to_toml(choice) for choice in get_args(field.type))
        case inspect.VarTupleType():
            return "a list of texts"
        case inspect.DictType():
            return "a table of texts"
    return "text"


def _describe_range(kind: inspect.IntType | inspect.FloatType) -> str:
    lower_bound = f"from {kind.ge:,}" if kind.ge is not None else f"greater than {kind.gt:,} and up"
    return f"{lower_bound} to {kind.le:,}"


# --- checks beyond types ---------------------------------------------------------------------


def _check_sessions_address(address: str) -> None:
    try:
        parse_address(address)
    except UsageError as error:
        # An address of an unknown kind may contain a password, which the error must not quote.
        text = "must be a folder, sqlite:FILE, postgresql://… or memory:"
        raise InvalidValue(text if "@" in address or has_secret(address) else str(error)) from error


def _check_model(model: str) -> None:
    if has_user(model):
        raise InvalidValue(_USER_NOT_ALLOWED)


def _check_listed_model(name: str) -> None:
    if not name.strip():
        raise InvalidValue("a model name must not be empty")
    _check_model(name)


def _check_zone(zone: str) -> None:
    try:
        zoneinfo.ZoneInfo(zone)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError) as error:
        if not zoneinfo.available_timezones():
            raise InvalidValue("this machine has no time zone data; install tzdata") from error
        raise InvalidValue("must be the name of a time zone, such as Europe/Zurich") from error


def _check_server(url: str) -> None:
    _check_model(url)
    # `isprintable` is False for all white space except the plain space.
    if _parse_url(url) is None or " " in url or not url.isprintable():
        raise InvalidValue("must be the address of a server, such as http://localhost:8080/v1")


def _parse_url(url: str) -> SplitResult | None:
    """Return the parts of a URL of a web server, or None for any other text."""
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        return None
    return parts if is_valid else None


def _check_key(key: str) -> None:
    if not key.isascii() or not key.isprintable() or " " in key:
        raise InvalidValue("must contain only ASCII characters without spaces and line ends")


def _check_variable(name: str) -> None:
    # The value is not shown, because it may be the key itself by mistake.
    if not _VARIABLE_PATTERN.fullmatch(name):
        raise InvalidValue("must be the name of an environment variable, such as OPENAI_API_KEY")


def _check_headers(headers: Mapping[str, str]) -> None:
    for name, text in headers.items():
        if not _HEADER_NAME_PATTERN.fullmatch(name):
            raise InvalidValue(f"{to_toml(name)} is not a valid header name")
        if not text.isprintable():
            raise InvalidValue(f"the value of {name} contains a control character")


def _check_secret(secret: str) -> None:
    if len(secret) < MIN_SECRET_LENGTH:
        raise InvalidValue(f"must have at least {MIN_SECRET_LENGTH} characters")


def _check_host(host: str) -> None:
    if not _HOST_PATTERN.fullmatch(host):
        raise InvalidValue(
            "must be a host name or an address such as 127.0.0.1, without http:// and port"
        )


def _check_origin(origin: str) -> None:
    parts = _parse_url(origin)
    if parts is None or f"{parts.scheme}://{parts.netloc}" != origin or "@" in origin:
        raise InvalidValue("must be an origin such as https://chat.example.org, without a path")


def _check_route(route: str) -> None:
    channel, colon, sender = route.partition(":")
    if not channel or (colon and not sender) or route != route.strip():
        raise InvalidValue(
            "must be a channel such as telegram, or a sender such as telegram:123, "
            f"not {to_toml(route)}"
        )


_VALUE_CHECKS: Final[Mapping[str, Callable[[Any], None]]] = {
    "sessions": _check_sessions_address,
    "model": _check_model,
    "models": _check_listed_model,
    "routes": _check_route,
    "zone": _check_zone,
    "base_url": _check_server,
    "reply_url": _check_server,
    "key": _check_key,
    "token": _check_key,
    "secret": _check_secret,
    "key_env": _check_variable,
    "token_env": _check_variable,
    "secret_env": _check_variable,
    "headers": _check_headers,
    "host": _check_host,
    "hosts": _check_host,
    "origins": _check_origin,
}
"""Check functions by field name. A field name has the same meaning in every table.

The check of a list is called for each text in the list.
"""


# --- writing --------------------------------------------------------------------------------------
# Settings as TOML: single values, and the commented file that `steno config init` writes.


_WRAP_COLUMNS: Final = 78
_EXAMPLE_NAMES: Final = {"models": "fast", "agents": "ada", "webhooks": "shop", "retention": "old"}
"""Examples of user-chosen names in the commented config file, by table."""
_SECTION_COMMENTS: Final = {
    "models": "# A named model, for agent.model. Add as many as you like.\n",
    "agents": (
        "# An additional agent. Add as many as you like. It has all fields of [agent] and\n"
        "# [agent.context]; fields that are not set are taken from there.\n"
    ),
    "webhooks": (
        "# A program that sends messages to /webhooks/shop while `steno serve` runs. Add as\n"
        "# many as you like.\n"
    ),
    "retention": (
        "# A retention rule. Add as many as you like. Without rules everything is kept.\n"
        "# `steno retention run --dry-run` shows what the rules would do.\n"
    ),
}
_AGENT_FIELDS: Final = ("model", "system", "routes")
"""Fields listed for additional agents. Other fields are listed only under [agent]."""

_FILE_HEADER: Final = """\
# Settings of stenolog. Lines of the form `#name = value` show the defaults: to
# change one, remove the # and edit the value. Environment variables override
# this file, such as STENO_AGENT__MODEL for agent.model; command-line options
# override both. `steno config show` prints all values and their sources.
"""


def to_toml(value: Any) -> str:
    """Return a value as TOML. Raises TypeError for a value that no setting has."""
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case str():
            return quote_text(value)
        case tuple() | list():
            return f"[{', '.join(map(to_toml, value))}]"
        case Mapping():
            pairs = [f"{to_toml(name)} = {to_toml(text)}" for name, text in value.items()]
            return f"{{ {', '.join(pairs)} }}" if pairs else "{}"
    raise TypeError(f"a setting cannot be a {type(value).__name__}")


def commented_file() -> str:
    """Return a config file with all fields, defaults and descriptions.

    The unchanged file sets nothing, because every value is commented out.
    """
    lines = [_FILE_HEADER]
    section: KeyPath = ()
    for field in all_fields().values():
        if field.path[0] == "agents" and (
            len(field.path) > 3 or field.path[-1] not in _AGENT_FIELDS
        ):
            continue
        if field.path[:-1] != section:
            section = field.path[:-1]
            lines += _section_header(section)
        lines += [f"# {line}" for line in textwrap.wrap(field.description, _WRAP_COLUMNS)]
        lines.append(f"#{field.path[-1]} = {to_toml(field.default)}\n")
    return "\n".join(lines)


def _section_header(section: KeyPath) -> list[str]:
    table = section[0]
    if len(section) > 1 and table in _EXAMPLE_NAMES:
        return [_SECTION_COMMENTS[table], f"#[{table}.{_EXAMPLE_NAMES[table]}]\n"]
    return [f"[{'.'.join(section)}]\n"]
