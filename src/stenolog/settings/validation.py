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
from stenolog.settings.fields import Field, literal
from stenolog.settings.secrets import has_password, has_user
from stenolog.stores.open_store import address

_LONGEST: Final = 60
"""Maximum number of characters of a wrong value that an error shows."""
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NO_USER: Final = (
    "the address of a server must not contain a user or password; put the key in an environment "
    "variable and name it in key_env"
)
_HOST: Final = re.compile(r"[A-Za-z0-9._-]+|[0-9a-fA-F:]*:[0-9a-fA-F:.]*")
MIN_SECRET: Final = 16
_HEADER: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


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
        converted = msgspec.convert(value, field.type)
    except msgspec.ValidationError as error:
        raise InvalidValue(f"must be {describe_type(field)}{_not_value(field, value)}") from error
    check = _FURTHER.get(field.path)
    if check is not None and converted:
        check(converted)
    return converted


def describe_type(field: Field) -> str:
    """Describe the values that a field accepts: `a whole number from 1 to 100`."""
    match inspect.type_info(field.type):
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType() as kind:
            return f"a whole number {_from_to(kind)}"
        case inspect.FloatType() as kind:
            return f"a number {_from_to(kind)}"
        case inspect.LiteralType():
            # The values of `kind` are not in order, so do not take them from there.
            return "one of " + ", ".join(literal(choice) for choice in get_args(field.type))
        case inspect.VarTupleType():
            return "a list of texts"
        case inspect.DictType():
            return "a table of texts"
    return "text"


def _from_to(kind: inspect.IntType | inspect.FloatType) -> str:
    least = f"from {kind.ge:,}" if kind.ge is not None else f"greater than {kind.gt:,} and up"
    return f"{least} to {kind.le:,}"


def _not_value(field: Field, value: object) -> str:
    # A misplaced secret must not appear in a log.
    if field.secret or isinstance(value, Mapping):  # guard: settings-error-redacted
        return ""
    if field.address or field.type is str:
        # A wrong value may contain a password or a key.
        return f", not {_kind(value)}"
    if isinstance(value, float) and not math.isfinite(value):
        return f", not {value}"
    try:
        text = literal(value)
    except TypeError:
        text = str(value)
    except ValueError:
        # Python does not convert integers of this length to text.
        return f", not {_kind(value)}"
    return f", not {text if len(text) <= _LONGEST else text[:_LONGEST] + '…'}"


def _kind(value: object) -> str:
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


def _is_a_place(value: str) -> None:
    try:
        address(value)
    except UsageError as error:
        # Even an unknown kind of address may contain a password.
        text = "must be a folder, sqlite:FILE, postgresql://… or memory:"
        raise InvalidValue(text if "@" in value or has_password(value) else str(error)) from error


def _is_a_model(value: str) -> None:
    if has_user(value):
        raise InvalidValue(_NO_USER)


def _are_models(value: tuple[str, ...]) -> None:
    for name in value:
        if not name.strip():
            raise InvalidValue("a model name must not be empty")
        _is_a_model(name)


def _is_a_zone(value: str) -> None:
    try:
        zoneinfo.ZoneInfo(value)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError) as error:
        names = zoneinfo.available_timezones()
        if not names:
            raise InvalidValue("this machine has no time zone data; install tzdata") from error
        near = difflib.get_close_matches(value, sorted(names), n=1)
        advice = f"; did you mean {near[0]}?" if near else ", such as Europe/Zurich"
        raise InvalidValue(f"must be the name of a time zone{advice}") from error


def _is_a_server(value: str) -> None:
    _is_a_model(value)
    try:
        parts = urlsplit(value)
        right = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        right = False
    if not right or any(each.isspace() or not each.isprintable() for each in value):
        raise InvalidValue("must be the address of a server, such as http://localhost:8080/v1")


def _is_a_key(value: str) -> None:
    if not value.isascii() or not value.isprintable() or " " in value:
        raise InvalidValue("must contain only ASCII characters without spaces and line ends")


def _is_a_variable(value: str) -> None:
    # The value is not shown, because it may be the key itself by mistake.
    if not _VARIABLE.fullmatch(value):
        raise InvalidValue("must be the name of an environment variable, such as OPENAI_API_KEY")


def _are_headers(value: Mapping[str, str]) -> None:
    for name, text in value.items():
        if not _HEADER.fullmatch(name):
            raise InvalidValue(f"{literal(name)} is not a valid header name")
        if not text.isprintable():
            raise InvalidValue(f"the value of {name} contains a control character")


def _is_a_secret(value: str) -> None:
    if len(value) < MIN_SECRET:
        raise InvalidValue(f"must have at least {MIN_SECRET} characters")


def _is_a_host(value: str) -> None:
    if not _HOST.fullmatch(value):
        raise InvalidValue(
            "must be a host name or an address such as 127.0.0.1, without http:// and port"
        )


def _are_hosts(value: tuple[str, ...]) -> None:
    for host in value:
        _is_a_host(host)


def _are_origins(value: tuple[str, ...]) -> None:
    for origin in value:
        try:
            parts = urlsplit(origin)
            right = f"{parts.scheme}://{parts.netloc}" == origin and bool(parts.hostname)
            right = right and parts.port != 0 and "@" not in origin
        except ValueError:
            right = False
        if not right or parts.scheme not in ("http", "https"):
            raise InvalidValue("must be an origin such as https://chat.example.org, without a path")


def _are_routes(value: tuple[str, ...]) -> None:
    for route in value:
        channel, colon, sender = route.partition(":")
        if not channel or (colon and not sender) or route != route.strip():
            raise InvalidValue(
                "must be a channel such as telegram, or a sender such as telegram:123, "
                f"not {literal(route)}"
            )


_FURTHER: Final[Mapping[tuple[str, ...], Callable[[Any], None]]] = {
    ("agent", "sessions"): _is_a_place,
    ("agent", "model"): _is_a_model,
    ("agent", "models"): _are_models,
    ("agents", "NAME", "sessions"): _is_a_place,
    ("agents", "NAME", "model"): _is_a_model,
    ("agents", "NAME", "models"): _are_models,
    ("agents", "NAME", "routes"): _are_routes,
    ("memory", "zone"): _is_a_zone,
    ("models", "NAME", "base_url"): _is_a_server,
    ("models", "NAME", "model"): _is_a_model,
    ("models", "NAME", "key"): _is_a_key,
    ("models", "NAME", "key_env"): _is_a_variable,
    ("models", "NAME", "headers"): _are_headers,
    ("channels", "telegram", "token"): _is_a_key,
    ("channels", "telegram", "token_env"): _is_a_variable,
    ("channels", "telegram", "base_url"): _is_a_server,
    ("webhooks", "NAME", "secret"): _is_a_secret,
    ("webhooks", "NAME", "secret_env"): _is_a_variable,
    ("webhooks", "NAME", "reply_url"): _is_a_server,
    ("gateway", "host"): _is_a_host,
    ("gateway", "hosts"): _are_hosts,
    ("gateway", "origins"): _are_origins,
}
