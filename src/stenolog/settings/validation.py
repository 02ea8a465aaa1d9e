"""Checks single setting values, and creates the error texts for wrong values."""

import difflib
import math
import re
import zoneinfo
from collections.abc import Callable, Mapping
from typing import Any, Final, get_args
from urllib.parse import urlsplit

import msgspec
from msgspec import inspect

from stenolog.errors import UsageError
from stenolog.settings.fields import Field, to_toml
from stenolog.settings.secrets import has_password, has_user
from stenolog.stores.open_store import parse_address

_MAX_SHOWN_LENGTH: Final = 60
"""Maximum number of characters of a wrong value that an error shows."""
_VARIABLE_PATTERN: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NO_USER_TEXT: Final = (
    "the address of a server must not contain a user or password; put the key in an environment "
    "variable and name it in key_env"
)
_HOST_PATTERN: Final = re.compile(r"[A-Za-z0-9._-]+|[0-9a-fA-F:]*:[0-9a-fA-F:.]*")
MIN_SECRET_LENGTH: Final = 16
_HEADER_NAME_PATTERN: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


class InvalidValue(Exception):
    """The field does not accept the value. The text says which values the field accepts."""


def has_surrogates(text: str) -> bool:
    """Whether the text came from bytes that are not UTF-8."""
    return any("\ud800" <= character <= "\udfff" for character in text)


def check_value(field: Field, value: object) -> Any:
    """Return the value in the type of the field. Raises InvalidValue."""
    if isinstance(value, str) and has_surrogates(value):
        raise InvalidValue("this is not UTF-8 text")
    try:
        converted_value = msgspec.convert(value, field.type)
    except msgspec.ValidationError as error:
        raise InvalidValue(
            f"must be {describe_type(field)}{_describe_wrong_value(field, value)}"
        ) from error
    check = _VALUE_CHECKS.get(field.path[-1])
    if check is not None and converted_value:
        check(converted_value)
    return converted_value


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
            # Take the choices from the type, because the values of `kind` are not in order.
            return "one of " + ", ".join(to_toml(choice) for choice in get_args(field.type))
        case inspect.VarTupleType():
            return "a list of texts"
        case inspect.DictType():
            return "a table of texts"
    return "text"


def _describe_range(kind: inspect.IntType | inspect.FloatType) -> str:
    lower_bound = f"from {kind.ge:,}" if kind.ge is not None else f"greater than {kind.gt:,} and up"
    return f"{lower_bound} to {kind.le:,}"


def _describe_wrong_value(field: Field, value: object) -> str:
    # A misplaced secret must not appear in a log.
    if field.is_secret or isinstance(value, Mapping):
        return ""
    if field.may_be_address or field.type is str:
        # A wrong value may contain a password or a key.
        return f", not {_type_name(value)}"
    if isinstance(value, float) and not math.isfinite(value):
        return f", not {value}"
    try:
        text = to_toml(value)
    except TypeError:
        text = str(value)
    except ValueError:
        # Python does not convert integers of this length to text.
        return f", not {_type_name(value)}"
    return f", not {text if len(text) <= _MAX_SHOWN_LENGTH else text[:_MAX_SHOWN_LENGTH] + '…'}"


def _type_name(value: object) -> str:
    match value:
        case str():
            return "text"
        case bool():
            return "true or false"
        case int() | float():
            return "a number"
        case list() | tuple():
            return "this list"
    return "a date or time"


# --- checks beyond types ---------------------------------------------------------------------


def _check_sessions_address(value: str) -> None:
    try:
        parse_address(value)
    except UsageError as error:
        # Even an unknown kind of address may contain a password.
        text = "must be a folder, sqlite:FILE, postgresql://… or memory:"
        raise InvalidValue(text if "@" in value or has_password(value) else str(error)) from error


def _check_model(value: str) -> None:
    if has_user(value):
        raise InvalidValue(_NO_USER_TEXT)


def _check_models(value: tuple[str, ...]) -> None:
    for name in value:
        if not name.strip():
            raise InvalidValue("a model name must not be empty")
        _check_model(name)


def _check_zone(value: str) -> None:
    try:
        zoneinfo.ZoneInfo(value)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError) as error:
        names = zoneinfo.available_timezones()
        if not names:
            raise InvalidValue("this machine has no time zone data; install tzdata") from error
        matches = difflib.get_close_matches(value, sorted(names), n=1)
        advice = f"; did you mean {matches[0]}?" if matches else ", such as Europe/Zurich"
        raise InvalidValue(f"must be the name of a time zone{advice}") from error


def _check_server(value: str) -> None:
    _check_model(value)
    try:
        parts = urlsplit(value)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_valid = False
    if not is_valid or any(
        character.isspace() or not character.isprintable() for character in value
    ):
        raise InvalidValue("must be the address of a server, such as http://localhost:8080/v1")


def _check_key(value: str) -> None:
    if not value.isascii() or not value.isprintable() or " " in value:
        raise InvalidValue("must contain only ASCII characters without spaces and line ends")


def _check_variable(value: str) -> None:
    # The value is not shown, because it may be the key itself by mistake.
    if not _VARIABLE_PATTERN.fullmatch(value):
        raise InvalidValue("must be the name of an environment variable, such as OPENAI_API_KEY")


def _check_headers(value: Mapping[str, str]) -> None:
    for name, text in value.items():
        if not _HEADER_NAME_PATTERN.fullmatch(name):
            raise InvalidValue(f"{to_toml(name)} is not a valid header name")
        if not text.isprintable():
            raise InvalidValue(f"the value of {name} contains a control character")


def _check_secret(value: str) -> None:
    if len(value) < MIN_SECRET_LENGTH:
        raise InvalidValue(f"must have at least {MIN_SECRET_LENGTH} characters")


def _check_host(value: str) -> None:
    if not _HOST_PATTERN.fullmatch(value):
        raise InvalidValue(
            "must be a host name or an address such as 127.0.0.1, without http:// and port"
        )


def _check_hosts(value: tuple[str, ...]) -> None:
    for host in value:
        _check_host(host)


def _check_origins(value: tuple[str, ...]) -> None:
    for origin in value:
        try:
            parts = urlsplit(origin)
            is_valid = f"{parts.scheme}://{parts.netloc}" == origin and bool(parts.hostname)
            is_valid = is_valid and parts.port != 0 and "@" not in origin
        except ValueError:
            is_valid = False
        if not is_valid or parts.scheme not in ("http", "https"):
            raise InvalidValue("must be an origin such as https://chat.example.org, without a path")


def _check_routes(value: tuple[str, ...]) -> None:
    for route in value:
        channel, colon, sender = route.partition(":")
        if not channel or (colon and not sender) or route != route.strip():
            raise InvalidValue(
                "must be a channel such as telegram, or a sender such as telegram:123, "
                f"not {to_toml(route)}"
            )


_VALUE_CHECKS: Final[Mapping[str, Callable[[Any], None]]] = {
    "sessions": _check_sessions_address,
    "model": _check_model,
    "models": _check_models,
    "routes": _check_routes,
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
    "hosts": _check_hosts,
    "origins": _check_origins,
}
"""Check functions by field name. A field name has the same meaning in every table."""
