"""Which Host is ours, and which Origin may ask."""

from ipaddress import IPv4Address, IPv6Address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenolog.gateway.hosts import (
    Authority,
    address_text,
    is_allowed_origin,
    is_known_host,
    is_loopback,
    is_same_origin,
    known_hosts,
    login_host,
    parse_authority,
)

KNOWN = known_hosts(
    bound_host="192.168.1.5",
    hosts=("Steno.example.org", "fe80:0::1"),
    origins=("https://chat.example.org", "http://localhost:3000", "https://x.example:443"),
)

names = st.from_regex(r"[a-z][a-z0-9-]{0,20}(\.[a-z][a-z0-9-]{0,10}){0,3}", fullmatch=True)
ports = st.one_of(st.just(""), st.integers(1, 65_535).map(lambda port: f":{port}"))


@pytest.mark.parametrize(
    "host",
    [
        b"localhost",
        b"LocalHost:8787",
        b"127.0.0.1",
        b"127.0.0.1:80",
        b"127.255.0.3:9",
        b"[::1]",
        b"[::1]:8787",
        b"[0:0:0:0:0:0:0:1]:8787",
        b"192.168.1.5:8787",
        b"steno.example.org",
        b"STENO.EXAMPLE.ORG:443",
        b"[fe80::1]",
    ],
)
def test_known_host_is_accepted_at_any_port(host: bytes) -> None:
    assert is_known_host([host], KNOWN)


@pytest.mark.parametrize(
    "host",
    [
        b"",
        b" ",
        b":8787",
        b"evil.example",
        b"localhost.evil.example",
        b"evil.example:8787",
        b"localhost.",
        b"localhost:",
        b"localhost:0",
        b"localhost:65536",
        b"localhost:8787:8787",
        b"localhost:http",
        b"localhost:+80",
        b"localhost:\xb2",
        b"user@localhost",
        b"localhost@evil.example",
        b"localhost:80@evil.example",
        b"localhost/evil",
        b"localhost,evil.example",
        b"localhost evil.example",
        b"localhost\n",
        b"http://localhost",
        b"127.0.0.1.evil.example",
        b"127.1",
        b"0x7f.0.0.1",
        b"2130706433",
        b"0177.0.0.1",
        b"::1",
        b"[::1",
        b"[::1]x",
        b"[::1%25lo]",
        b"[127.0.0.1]",
        b"[localhost]",
        b"0.0.0.0",
        b"192.168.1.6",
        b"l\xc3\xb6calhost",
        b"a" * 400,
    ],
)
def test_unknown_host_is_rejected(host: bytes) -> None:
    assert not is_known_host([host], KNOWN)


def test_missing_or_duplicate_host_is_rejected() -> None:
    assert not is_known_host([], KNOWN)
    assert not is_known_host([b"localhost", b"localhost"], KNOWN)
    assert not is_known_host([b"localhost", b"evil.example"], KNOWN)


@given(names, ports)
def test_host_name_is_known_only_if_configured(name: str, port: str) -> None:
    other = known_hosts(bound_host="127.0.0.1", hosts=(name,))
    assert is_known_host([f"{name}{port}".encode()], other)
    assert is_known_host([f"{name.upper()}{port}".encode()], other)
    assert is_known_host([f"{name}{port}".encode()], KNOWN) == (name in ("localhost",))


@given(st.integers(0, 2**32 - 1), ports)
def test_ip_address_is_known_if_loopback_or_bound(number: int, port: str) -> None:
    address = IPv4Address(number)
    ours = address.is_loopback or str(address) == "192.168.1.5"
    assert is_known_host([f"{address}{port}".encode()], KNOWN) == ours


@pytest.mark.parametrize("host", ["localhost", "LocalHost", "127.0.0.1", "127.9.9.9", "::1"])
def test_loopback_addresses_are_recognized(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host",
    ["", "0.0.0.0", "::", "192.168.1.5", "localhost.example", "127.0.0.1.example", "fe80::1"],
)
def test_other_addresses_are_not_loopback(host: str) -> None:
    assert not is_loopback(host)


def test_client_and_server_name_an_endpoint_alike() -> None:
    assert address_text("::ffff:127.0.0.1", 80) == address_text("127.0.0.1", 80) == "127.0.0.1 80"
    assert address_text("fe80::1%eth0", 80) == address_text("fe80:0::1%en1", 80)
    ends = {
        address_text(host, port) for host in ("127.0.0.1", "127.0.0.2", "::1") for port in (80, 81)
    }
    assert len(ends) == 6


@given(st.integers(0, 2**128 - 1), ports)
def test_all_forms_of_an_ipv6_address_are_parsed(number: int, port: str) -> None:
    address = IPv6Address(number)
    short, long = (f"[{text}]{port}".encode() for text in (str(address), address.exploded))
    assert parse_authority(short) == parse_authority(long)
    assert is_known_host([short], known_hosts(bound_host=address.exploded))


@given(st.binary(max_size=40))
def test_any_host_header_is_parsed_or_rejected(value: bytes) -> None:
    found = parse_authority(value)
    if found is not None:
        host = f"[{found.host}]" if ":" in found.host else found.host
        port = f":{found.port}" if found.port else ""
        assert parse_authority(f"{host}{port}".encode()) == found
    is_known_host([value], KNOWN)
    is_same_origin(value, value)
    is_allowed_origin(value, KNOWN)


def test_host_header_is_parsed_into_host_and_port() -> None:
    assert parse_authority(b"A.example:80") == Authority("a.example", 80)
    assert parse_authority(b"[0::1]") == Authority("::1", None)


@pytest.mark.parametrize(
    ("origin", "host"),
    [
        (b"http://localhost:8787", b"localhost:8787"),
        (b"https://localhost:8787", b"localhost:8787"),
        (b"http://localhost", b"localhost"),
        (b"http://localhost", b"localhost:80"),
        (b"https://steno.example.org", b"steno.example.org"),
        (b"https://Steno.example.org:443", b"steno.example.org"),
        (b"http://[::1]:8787", b"[0::1]:8787"),
    ],
)
def test_a_page_of_the_same_host_and_port_has_the_same_origin(origin: bytes, host: bytes) -> None:
    assert is_same_origin(origin, host)


@pytest.mark.parametrize(
    ("origin", "host"),
    [
        (b"null", b"localhost:8787"),
        (b"", b"localhost:8787"),
        (b"localhost:8787", b"localhost:8787"),
        (b"http://localhost:3000", b"localhost:8787"),
        (b"http://localhost", b"localhost:8787"),
        (b"http://127.0.0.1:8787", b"localhost:8787"),
        (b"http://localhost:8787/", b"localhost:8787"),
        (b"http://localhost:8787.evil.example", b"localhost:8787"),
        (b"http://localhost:8787@evil.example", b"localhost:8787"),
        (b"http://user@localhost:8787", b"localhost:8787"),
        (b"file://localhost:8787", b"localhost:8787"),
        (b"chrome-extension://localhost:8787", b"localhost:8787"),
        (b"http://localhost:8787 http://evil.example", b"localhost:8787"),
        (b"http://", b""),
        (b"http://evil.example", b"localhost"),
    ],
)
def test_any_other_page_has_another_origin(origin: bytes, host: bytes) -> None:
    assert not is_same_origin(origin, host)


@pytest.mark.parametrize(
    ("origin", "may"),
    [
        (b"https://chat.example.org", True),
        (b"HTTPS://Chat.example.org:443", True),
        (b"http://localhost:3000", True),
        (b"https://x.example", True),
        (b"http://chat.example.org", False),
        (b"https://chat.example.org:444", False),
        (b"https://a.chat.example.org", False),
        (b"https://chat.example.org.evil.example", False),
        (b"https://chat.example.org/", False),
        (b"http://localhost:3001", False),
        (b"null", False),
        (b"*", False),
    ],
)
def test_only_configured_origins_are_allowed(origin: bytes, may: bool) -> None:
    assert is_allowed_origin(origin, KNOWN) == may


@given(st.sampled_from(["http", "https"]), names, ports)
def test_no_foreign_origin_is_allowed_by_default(scheme: str, name: str, port: str) -> None:
    origin = f"{scheme}://{name}{port}".encode()
    assert not is_allowed_origin(origin, known_hosts(bound_host="127.0.0.1"))
    assert is_allowed_origin(
        origin, known_hosts(bound_host="127.0.0.1", origins=(origin.decode(),))
    )
    assert is_same_origin(origin, f"{name}{port}".encode())
    assert not is_same_origin(origin, f"x.{name}{port}".encode())


@pytest.mark.parametrize(
    ("bound", "hosts", "cookies"),
    [
        ("127.0.0.1", (), {"own.localhost"}),
        ("localhost", (), {"own.localhost"}),
        ("::1", (), {"own.localhost"}),
        ("127.0.0.1", ("Localhost",), {"own.localhost", "localhost"}),
        ("127.0.0.5", (), {"own.localhost", "127.0.0.5"}),
        (
            "192.168.1.5",
            ("steno.example.org",),
            {"own.localhost", "192.168.1.5", "steno.example.org"},
        ),
    ],
)
def test_cookie_hosts_are_the_own_name_and_configured_hosts(
    bound: str, hosts: tuple[str, ...], cookies: set[str]
) -> None:
    assert (
        known_hosts(bound_host=bound, hosts=hosts, own_host="own.localhost").cookie_hosts == cookies
    )


def test_a_login_link_has_the_own_name_unless_the_settings_list_a_loopback_name() -> None:
    assert login_host("127.0.0.1", (), "own.localhost") == "own.localhost"
    assert login_host("::1", ("steno.example.org",), "own.localhost") == "own.localhost"
    assert login_host("::1", ("steno.example.org", "localhost"), "own.localhost") == "localhost"
    assert login_host("127.0.0.5", (), "own.localhost") == "127.0.0.5"
