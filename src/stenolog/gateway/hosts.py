"""Whether a request was meant for us, and whether the page that it came from may ask.

A web page can have its own name point to this machine (DNS rebinding): the browser then takes us
for that page's server. But it says the name in `Host`, and the page in `Origin`. Nothing is done
here, only decided.
"""

import re
from collections.abc import Iterable, Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Final

from msgspec import Struct

BOTH_LOOPBACKS: Final = frozenset({"127.0.0.1", "::1", "localhost"})
"""Addresses of this machine that every other program here uses, too."""
_LOOPBACK: Final = "localhost"
_PORTS: Final = {"http": 80, "https": 443}
_AUTHORITY: Final = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9._-]+))(?::([0-9]{1,5}))?")
_LONGEST: Final = 300
"""A name has at most 253 characters."""


class Authority(Struct, frozen=True):
    """Whom a request is for: `steno.example.org:8787`."""

    host: str
    """A name in small letters, or an address in its usual form, without brackets."""
    port: int | None


class Known(Struct, frozen=True, kw_only=True):
    """The names that we are called by, and the pages of elsewhere that may ask."""

    hosts: frozenset[str]
    origins: frozenset[tuple[str, str, int]]
    cookie_hosts: frozenset[str]
    """The hosts at which a browser can log in."""


def known(
    *,
    bound: str,
    hosts: Iterable[str] = (),
    origins: Iterable[str] = (),
    own: str = "",
) -> Known:
    """Return what the settings say: the address listened at, further names, and further origins.

    `own`: the name of this gateway below `localhost`. Browsers send a cookie to every port of its
    host, so nobody logs in at an address that other programs use, unless `hosts` lists it.
    """
    parsed = (_origin(origin.encode()) for origin in origins)
    named = frozenset(_usual(host.lower()) for host in (*hosts, *([own] if own else [])))
    usual = _usual(bound.lower())
    return Known(
        hosts=named | {usual},
        origins=frozenset(origin for origin in parsed if origin is not None),
        cookie_hosts=named | ({usual} - BOTH_LOOPBACKS),
    )


def takes_cookies(host: bytes, known: Known) -> bool:
    """Return whether a cookie that is sent to this host is ours, and only ours."""
    called = authority(host)
    return called is not None and called.host in known.cookie_hosts


def login_host(address: str, hosts: Iterable[str], own: str) -> str:
    """Return the host for a login link of a gateway that was reached at this loopback address.

    That is the gateway's own name, or the first loopback name that `hosts` lists for browsers that
    do not resolve names below `localhost`.
    """
    if address not in BOTH_LOOPBACKS:
        return address
    return next((host for host in hosts if is_loopback(host)), own)


def authority(value: bytes) -> Authority | None:
    """What a `Host` header says; None where it is not well-formed."""
    text = value.decode("latin-1").lower()
    found = _AUTHORITY.fullmatch(text) if len(text) <= _LONGEST else None
    if found is None:
        return None
    within, name, port = found.groups()
    if port is not None and not 0 < int(port) <= 65_535:
        return None
    if within is None:
        return Authority(_usual(name), int(port) if port else None)
    address = _address(within)
    if not isinstance(address, IPv6Address):
        return None
    return Authority(str(address), int(port) if port else None)


def is_ours(values: Sequence[bytes], known: Known) -> bool:
    """Whether a request with these `Host` headers calls us by a name of ours, at any port."""
    # With two of them, another server on the way may have gone by the other one.
    if len(values) != 1:  # guard: one-host-header
        return False
    called = authority(values[0])
    return called is not None and (called.host in known.hosts or is_loopback(called.host))


def is_same_origin(origin: bytes, host: bytes) -> bool:
    """Whether the page with this `Origin` is one of the server that `Host` names.

    Its scheme may be another than that of the request: a proxy may have taken the TLS off.
    """
    asking, called = _origin(origin), authority(host)
    if asking is None or called is None:
        return False
    scheme, name, port = asking
    return (name, port) == (called.host, called.port or _PORTS[scheme])


def is_further_origin(origin: bytes, known: Known) -> bool:
    """Whether the page with this `Origin` is one of those that the settings name."""
    return _origin(origin) in known.origins


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach us at this host: a name, or an address."""
    address = _address(host)
    host = host.lower()
    # guard: loopback-name-exact
    return host == _LOOPBACK if address is None else address.is_loopback


def end_of(host: str, port: int) -> str:
    """Where a connection ends, in the words that both of its sides use for that."""
    # The name of an interface is only known where it is.
    address = _address(host.partition("%")[0])
    # A socket for both kinds of addresses writes those of IPv4 in its own way.
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return f"{mapped or address or host} {port}"


def _origin(value: bytes) -> tuple[str, str, int] | None:
    """Scheme, host and port; None for `null` and for what is no origin of a web page."""
    scheme, separator, rest = value.partition(b"://")
    named = scheme.decode("latin-1").lower()
    called = authority(rest)
    if not separator or named not in _PORTS or called is None:
        return None
    return named, called.host, called.port or _PORTS[named]


def _usual(host: str) -> str:
    address = _address(host)
    return host if address is None else str(address)


def _address(host: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(host)
    except ValueError:
        return None
