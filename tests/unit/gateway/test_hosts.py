"""Which Host is ours, and which Origin may ask."""

from ipaddress import IPv4Address, IPv6Address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenolog.gateway.hosts import (
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


@pytest.mark.quick(5)
@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LocalHost:8787",
        "127.0.0.1",
        "127.0.0.1:80",
        "127.255.0.3:9",
        "[::1]",
        "[::1]:8787",
        "[0:0:0:0:0:0:0:1]:8787",
        "192.168.1.5:8787",
        "steno.example.org",
        "STENO.EXAMPLE.ORG:443",
        "[fe80::1]",
    ],
)
def test_known_host_is_accepted_at_any_port(host: str) -> None:
    assert is_known_host([host], KNOWN)


@pytest.mark.quick(6)
@pytest.mark.parametrize(
    "host",
    [
        "",
        " ",
        ":8787",
        "evil.example",
        "localhost.evil.example",
        "evil.example:8787",
        "localhost.",
        "localhost:",
        "localhost:0",
        "localhost:65536",
        "localhost:8787:8787",
        "localhost:http",
        "localhost:+80",
        "localhost:\xb2",
        "user@localhost",
        "localhost@evil.example",
        "localhost:80@evil.example",
        "localhost/evil",
        "localhost,evil.example",
        "localhost evil.example",
        "localhost\n",
        "http://localhost",
        "127.0.0.1.evil.example",
        "127.1",
        "0x7f.0.0.1",
        "2130706433",
        "0177.0.0.1",
        "::1",
        "[::]",
        "[::1",
        "[::1]x",
        "[::1%25lo]",
        "[127.0.0.1]",
        "[localhost]",
        "0.0.0.0",
        "192.168.1.6",
        "l\xc3\xb6calhost",
        "a" * 400,
    ],
)
def test_unknown_host_is_rejected(host: str) -> None:
    assert not is_known_host([host], KNOWN)


def test_missing_or_duplicate_host_is_rejected() -> None:
    assert not is_known_host([], KNOWN)
    assert not is_known_host(["localhost", "localhost"], KNOWN)
    assert not is_known_host(["localhost", "evil.example"], KNOWN)


@given(names, ports)
def test_host_name_is_known_only_if_configured(name: str, port: str) -> None:
    other = known_hosts(bound_host="127.0.0.1", hosts=(name,))
    assert is_known_host([f"{name}{port}"], other)
    assert is_known_host([f"{name.upper()}{port}"], other)
    assert is_known_host([f"{name}{port}"], KNOWN) == (name in ("localhost",))


@given(st.integers(0, 2**32 - 1), ports)
def test_ip_address_is_known_if_loopback_or_bound(number: int, port: str) -> None:
    address = IPv4Address(number)
    ours = address.is_loopback or str(address) == "192.168.1.5"
    assert is_known_host([f"{address}{port}"], KNOWN) == ours


def test_name_of_this_machine_is_recognized_in_any_case() -> None:
    assert is_loopback("LocalHost")
    assert not is_loopback("localhost.example")


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
    short, long = (f"[{text}]{port}" for text in (str(address), address.exploded))
    assert parse_authority(short) == parse_authority(long)
    assert is_known_host([short], known_hosts(bound_host=address.exploded))


@given(st.text(st.characters(max_codepoint=255), max_size=40))
def test_any_host_header_is_parsed_or_rejected(value: str) -> None:
    found = parse_authority(value)
    if found is not None:
        host = f"[{found.host}]" if ":" in found.host else found.host
        port = f":{found.port}" if found.port else ""
        assert parse_authority(f"{host}{port}") == found
    is_known_host([value], KNOWN)
    is_same_origin(value, value)
    is_allowed_origin(value, KNOWN)


@pytest.mark.parametrize(
    ("origin", "host"),
    [
        ("http://localhost:8787", "localhost:8787"),
        ("https://localhost:8787", "localhost:8787"),
        ("http://localhost", "localhost"),
        ("http://localhost", "localhost:80"),
        ("https://steno.example.org", "steno.example.org"),
        ("https://Steno.example.org:443", "steno.example.org"),
        ("http://[::1]:8787", "[0::1]:8787"),
    ],
)
def test_a_page_of_the_same_host_and_port_has_the_same_origin(origin: str, host: str) -> None:
    assert is_same_origin(origin, host)


@pytest.mark.quick(5)
@pytest.mark.parametrize(
    ("origin", "host"),
    [
        ("null", "localhost:8787"),
        ("", "localhost:8787"),
        ("localhost:8787", "localhost:8787"),
        ("http://localhost:3000", "localhost:8787"),
        ("http://localhost", "localhost:8787"),
        ("http://127.0.0.1:8787", "localhost:8787"),
        ("http://localhost:8787/", "localhost:8787"),
        ("http://localhost:8787.evil.example", "localhost:8787"),
        ("http://localhost:8787@evil.example", "localhost:8787"),
        ("http://user@localhost:8787", "localhost:8787"),
        ("file://localhost:8787", "localhost:8787"),
        ("chrome-extension://localhost:8787", "localhost:8787"),
        ("http://localhost:8787 http://evil.example", "localhost:8787"),
        ("http://", ""),
        ("http://evil.example", "localhost"),
    ],
)
def test_any_other_page_has_another_origin(origin: str, host: str) -> None:
    assert not is_same_origin(origin, host)


@pytest.mark.quick(5)
@pytest.mark.parametrize(
    ("origin", "may"),
    [
        ("https://chat.example.org", True),
        ("HTTPS://Chat.example.org:443", True),
        ("http://localhost:3000", True),
        ("https://x.example", True),
        ("http://chat.example.org", False),
        ("https://chat.example.org:444", False),
        ("https://a.chat.example.org", False),
        ("https://chat.example.org.evil.example", False),
        ("https://chat.example.org/", False),
        ("http://localhost:3001", False),
        ("null", False),
        ("*", False),
    ],
)
def test_only_configured_origins_are_allowed(origin: str, may: bool) -> None:
    assert is_allowed_origin(origin, KNOWN) == may


@given(st.sampled_from(["http", "https"]), names, ports)
def test_no_foreign_origin_is_allowed_by_default(scheme: str, name: str, port: str) -> None:
    origin = f"{scheme}://{name}{port}"
    assert not is_allowed_origin(origin, known_hosts(bound_host="127.0.0.1"))
    assert is_allowed_origin(origin, known_hosts(bound_host="127.0.0.1", origins=(origin,)))
    assert is_same_origin(origin, f"{name}{port}")
    assert not is_same_origin(origin, f"x.{name}{port}")


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
