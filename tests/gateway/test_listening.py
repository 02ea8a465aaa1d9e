"""The gateway takes both loopback addresses, so that no other program gets its requests."""

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from stenolog.errors import UsageError
from stenolog.gateway.daemon import listen


def _has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


with_ipv6 = pytest.mark.skipif(not _has_ipv6(), reason="this machine has no ::1")


@contextmanager
def _listening(host: str, port: int = 0) -> Iterator[list[socket.socket]]:
    with ExitStack() as stack:
        opened = listen(host, port)
        for one in opened:
            stack.callback(one.close)
        yield opened


def _addresses(opened: list[socket.socket]) -> set[str]:
    return {one.getsockname()[0] for one in opened}


@with_ipv6
@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_gateway_listens_on_both_loopback_addresses(host: str) -> None:
    with _listening(host) as opened:
        assert _addresses(opened) == {"127.0.0.1", "::1"}
        assert len({one.getsockname()[1] for one in opened}) == 1


@with_ipv6
@pytest.mark.parametrize(
    ("taken", "family", "host"),
    [("::1", socket.AF_INET6, "127.0.0.1"), ("127.0.0.1", socket.AF_INET, "::1")],
)
def test_port_in_use_on_the_other_loopback_address_is_rejected(
    taken: str, family: socket.AddressFamily, host: str
) -> None:
    with socket.create_server((taken, 0), family=family) as other:
        port = other.getsockname()[1]
        with pytest.raises(UsageError, match=f"another program uses port {port} at {taken}"):
            listen(host, port)
    # Nothing stays open after a refusal.
    with _listening(host, port) as opened:
        assert len(opened) == 2


def test_machine_without_ipv6_listens_only_on_127_0_0_1(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    look_up = socket.getaddrinfo

    def without_ipv6(host: str, *values: object, **named: object) -> object:
        if host == "::1":
            raise socket.gaierror(socket.EAI_NONAME, "no such address")
        return look_up(host, *values, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", without_ipv6)
    with _listening("127.0.0.1") as opened:
        assert _addresses(opened) == {"127.0.0.1"}
    assert not caplog.messages


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EACCES])
def test_a_second_address_that_cannot_be_opened_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    class Refusing(socket.socket):
        def __init__(self, family: int = -1, *values: Any, **named: Any) -> None:
            if family == socket.AF_INET6:
                raise OSError(number, os.strerror(number))
            super().__init__(family, *values, **named)

    monkeypatch.setattr(socket, "socket", Refusing)
    with _listening("127.0.0.1") as opened:
        assert _addresses(opened) == {"127.0.0.1"}
    [warning] = caplog.messages
    assert os.strerror(number) in warning
    assert "Another program that listens on ::1" in warning


def test_other_address_is_bound_alone() -> None:
    with _listening("127.0.0.5") as opened:
        assert _addresses(opened) == {"127.0.0.5"}
