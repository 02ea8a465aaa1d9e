"""Checks of the `Host` and `Origin` headers, as pure functions.

A web page can make its own host name resolve to this machine (DNS rebinding), so that the browser
treats this gateway as the server of that page. But the browser sends that name in `Host`, and the
page's origin in `Origin`, so the gateway rejects names and origins that it does not know.
"""

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Final

from msgspec import Struct

LOOPBACK_HOSTS: Final = frozenset({"127.0.0.1", "::1", "localhost"})
"""Loopback hosts. Other programs on this machine can listen at these hosts too."""
_LOOPBACK_NAME: Final = "localhost"
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}
_AUTHORITY_PATTERN: Final = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9._-]+))(?::([0-9]{1,5}))?")
_MAX_HOST_LENGTH: Final = 300
"""Maximum length of a `Host` value; a host name has at most 253 characters."""
_MAX_CACHED_RESULTS: Final = 128
"""Maximum number of cached results per function: clients send few different hosts."""


class Authority(Struct, frozen=True):
    """Host and port of a request, such as `steno.example.org:8787`."""

    host: str
    """Lower-case name, or address in canonical form without brackets."""
    port: int | None


class KnownHosts(Struct, frozen=True, kw_only=True):
    """Host names of this gateway, and origins of other pages that may use the gateway."""

    hosts: frozenset[str]
    origins: frozenset[tuple[str, str, int]]
    cookie_hosts: frozenset[str]
    """Hosts at which a browser can log in."""


def known_hosts(
    *, bound_host: str, hosts: Iterable[str] = (), origins: Iterable[str] = (), own_host: str = ""
) -> KnownHosts:
    """Return the known hosts. `bound_host`, `hosts` and `origins` are from the settings.

    `own_host` is the name of this gateway below `localhost`. Browsers send a host's cookie to every
    port of the host. So browsers cannot log in at a host that other programs share, unless `hosts`
    lists the host.
    """
    parsed_origins = map(_parse_origin, origins)
    listed_names = [*hosts, own_host] if own_host else hosts
    listed_hosts = frozenset(_canonical_host(name.lower()) for name in listed_names)
    canonical_bound_host = _canonical_host(bound_host.lower())
    return KnownHosts(
        hosts=listed_hosts | {canonical_bound_host},
        origins=frozenset(origin for origin in parsed_origins if origin is not None),
        cookie_hosts=listed_hosts | ({canonical_bound_host} - LOOPBACK_HOSTS),
    )


def accepts_cookies(host: str, known_hosts: KnownHosts) -> bool:
    """Return whether the gateway accepts login cookies at this host."""
    authority = parse_authority(host)
    return authority is not None and authority.host in known_hosts.cookie_hosts


def login_host(address: str, hosts: Iterable[str], own_host: str) -> str:
    """Return the host for a login link of a gateway that was reached at this address.

    For a loopback address, the result is the first loopback name in `hosts`, for browsers that do
    not resolve names below `localhost`, or else `own_host`. Other addresses are returned unchanged.
    """
    if address not in LOOPBACK_HOSTS:
        return address
    return next((host for host in hosts if is_loopback(host)), own_host)


@lru_cache(maxsize=_MAX_CACHED_RESULTS)
def parse_authority(header: str) -> Authority | None:
    """Parse a `Host` header. Return None if the header is malformed."""
    host_text = header.lower()
    match = len(host_text) <= _MAX_HOST_LENGTH and _AUTHORITY_PATTERN.fullmatch(host_text)
    if not match:
        return None
    ipv6_text, name, port = match.groups()
    if port is not None and not 0 < int(port) <= 65_535:
        return None
    if ipv6_text is not None and not isinstance(_parse_address(ipv6_text), IPv6Address):
        return None
    return Authority(_canonical_host(ipv6_text or name), int(port) if port else None)


def is_known_host(host_headers: Sequence[str], known_hosts: KnownHosts) -> bool:
    """Return whether the `Host` headers name this gateway, at any port."""
    # If there are two `Host` headers, a proxy may have checked only one of them.
    if len(host_headers) != 1:  # guard: one-host-header
        return False
    authority = parse_authority(host_headers[0])
    return authority is not None and (
        authority.host in known_hosts.hosts or is_loopback(authority.host)
    )


def is_same_origin(origin: str, host: str) -> bool:
    """Return whether the page with this `Origin` is from the server that `Host` names.

    The schemes of page and request may differ, because a proxy may terminate TLS.
    """
    page_origin, authority = _parse_origin(origin), parse_authority(host)
    if page_origin is None or authority is None:
        return False
    scheme, name, port = page_origin
    return (name, port) == (authority.host, authority.port or _DEFAULT_PORTS[scheme])


def is_allowed_origin(origin: str, known_hosts: KnownHosts) -> bool:
    """Return whether the settings list this `Origin`."""
    return _parse_origin(origin) in known_hosts.origins


@lru_cache(maxsize=_MAX_CACHED_RESULTS)
def is_loopback(host: str) -> bool:
    """Return whether this host is `localhost` or a loopback address."""
    address = _parse_address(host)
    host = host.lower()
    # guard: loopback-name-exact
    return host == _LOOPBACK_NAME if address is None else address.is_loopback


def address_text(host: str, port: int) -> str:
    """Return a server's host and port as one text, equal at the client and at the server."""
    # Remove the name of a network interface, such as `%eth0`: it differs between machines.
    address = _parse_address(host.partition("%")[0])
    # A dual-stack socket reports IPv4 addresses as mapped IPv6 addresses.
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return f"{mapped or address or host} {port}"


def _parse_origin(origin: str) -> tuple[str, str, int] | None:
    """Return scheme, host and port; None if the origin is not that of a web page."""
    scheme, separator, rest = origin.lower().partition("://")
    authority = parse_authority(rest)
    if not separator or scheme not in _DEFAULT_PORTS or authority is None:
        return None
    return scheme, authority.host, authority.port or _DEFAULT_PORTS[scheme]


def _canonical_host(host: str) -> str:
    address = _parse_address(host)
    return host if address is None else str(address)


def _parse_address(host: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(host)
    except ValueError:
        return None
