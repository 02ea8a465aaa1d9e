"""Which addresses are on this machine. Pure."""

import ipaddress
from urllib.parse import urlsplit


def is_here(url: str) -> bool:
    """Whether a URL is of this machine: a proxy is for the world outside."""
    host = urlsplit(url).hostname or ""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return address.is_loopback or address.is_unspecified
