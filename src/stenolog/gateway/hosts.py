"""Checks of the `Host` and `Origin` headers, as pure functions.

A web page can make its own host name resolve to this machine (DNS rebinding), so that the browser
treats this gateway as the server of that page. But the browser sends that name in `Host`, and the
page's origin in `Origin`.
"""

import re
from collections.abc import Iterable, Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Final

from msgspec import Struct

LOOPBACK_HOSTS: Final = frozenset({"127.0.0.1", "::1", "localhost"})
"""Loopback addresses: all other programs of this machine can listen at them too."""
_LOOPBACK: Final = "localhost"
_PORTS: Final = {"http": 80, "https": 443}
_AUTHORITY: Final = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9._-]+))(?::([0-9]{1,5}))?")
_LONGEST: Final = 300
"""Maximum length of a `Host` value; a host name has at most 253 characters."""


class Authority(Struct, frozen=True):
    """Host and port of a request, such as `steno.example.org:8787`."""

    host: str
    """Lower-case name, or address in canonical form without brackets."""
    port: int | None


class KnownHosts(Struct, frozen=True, kw_only=True):
    """Host names of this gateway, and origins of other pages that may use it."""

    hosts: frozenset[str]
    origins: frozenset[tuple[str, str, int]]
    cookie_hosts: frozenset[str]
    """Hosts at which a browser can log in."""


def known_hosts(
    *,
    bound: str,
    hosts: Iterable[str] = (),
    origins: Iterable[str] = (),
    own: str = "",
) -> KnownHosts:
    """Return the host names and origins in the settings: `bound`, `hosts` and `origins`.

    `own`: the name of this gateway below `localhost`. Browsers send a cookie to every port of its
    host, so they cannot log in at an address that other programs use, unless `hosts` lists it.
    """
    parsed = (_origin(origin.encode()) for origin in origins)
    named = frozenset(_canonical(host.lower()) for host in (*hosts, *([own] if own else [])))
    usual = _canonical(bound.lower())
    return KnownHosts(
        hosts=named | {usual},
        origins=frozenset(origin for origin in parsed if origin is not None),
        cookie_hosts=named | ({usual} - LOOPBACK_HOSTS),
    )


def accepts_cookies(host: bytes, known: KnownHosts) -> bool:
    """Return whether only this gateway gets the cookies that browsers send to this host."""
    called = authority(host)
    return called is not None and called.host in known.cookie_hosts


def login_host(address: str, hosts: Iterable[str], own: str) -> str:
    """Return the host for a login link of a gateway that was reached at this address.

    For a loopback address that is the gateway's own name, or the first loopback name in `hosts`,
    for browsers that do not resolve names below `localhost`.
    """
    if address not in LOOPBACK_HOSTS:
        return address
    return next((host for host in hosts if is_loopback(host)), own)


def authority(value: bytes) -> Authority | None:
    """Parse a `Host` header; return None if it is malformed."""
    text = value.decode("latin-1").lower()
    found = _AUTHORITY.fullmatch(text) if len(text) <= _LONGEST else None
    if found is None:
        return None
    within, name, port = found.groups()
    if port is not None and not 0 < int(port) <= 65_535:
        return None
    if within is None:
        return Authority(_canonical(name), int(port) if port else None)
    address = _address(within)
    if not isinstance(address, IPv6Address):
        return None
    return Authority(str(address), int(port) if port else None)


def is_known_host(values: Sequence[bytes], known: KnownHosts) -> bool:
    """Return whether the `Host` headers name this gateway, at any port."""
    # With two headers, a proxy may have used the other one.
    if len(values) != 1:  # guard: one-host-header
        return False
    called = authority(values[0])
    return called is not None and (called.host in known.hosts or is_loopback(called.host))


def is_same_origin(origin: bytes, host: bytes) -> bool:
    """Return whether the page with this `Origin` is from the server that `Host` names.

    The scheme may differ from that of the request, because a proxy may terminate TLS.
    """
    asking, called = _origin(origin), authority(host)
    if asking is None or called is None:
        return False
    scheme, name, port = asking
    return (name, port) == (called.host, called.port or _PORTS[scheme])


def is_allowed_origin(origin: bytes, known: KnownHosts) -> bool:
    """Return whether the settings list this `Origin`."""
    return _origin(origin) in known.origins


def is_loopback(host: str) -> bool:
    """Return whether this host, a name or an address, is reachable only from this machine."""
    address = _address(host)
    host = host.lower()
    # guard: loopback-name-exact
    return host == _LOOPBACK if address is None else address.is_loopback


def server_end(host: str, port: int) -> str:
    """Return the server end of a connection in a form that client and server share."""
    # Interface names are known only on their own machine.
    address = _address(host.partition("%")[0])
    # A dual-stack socket reports IPv4 addresses as mapped IPv6 addresses.
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return f"{mapped or address or host} {port}"


def _origin(value: bytes) -> tuple[str, str, int] | None:
    """Return scheme, host and port; None if the value is not the origin of a web page."""
    scheme, separator, rest = value.partition(b"://")
    named = scheme.decode("latin-1").lower()
    called = authority(rest)
    if not separator or named not in _PORTS or called is None:
        return None
    return named, called.host, called.port or _PORTS[named]


def _canonical(host: str) -> str:
    address = _address(host)
    return host if address is None else str(address)


def _address(host: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(host)
    except ValueError:
        return None
