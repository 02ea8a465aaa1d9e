"""Login links of several gateways that serve one store."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest

from stenolog.testing.scripted_model import ScriptedModel
from support.gateway.served_gateway import Served


@pytest.fixture(params=["jsonl", "sqlite", "postgresql"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A store of each engine."""
    match request.param:
        case "jsonl":
            return str(tmp_path / "workspace")
        case "sqlite":
            return f"sqlite:{tmp_path / 'sessions.db'}"
    return str(request.getfixturevalue("own_url"))


@contextmanager
def _two_gateways(where: str) -> Iterator[tuple[Served, Served]]:
    with Served(where, ScriptedModel([])) as one, Served(where, ScriptedModel([])) as other:
        yield one, other


def _new_link(gateway: Served) -> str:
    with gateway.client() as client:
        return str(client.post("/v1/login-links").json()["url"])


def _open_link(gateway: Served, link: str) -> httpx2.Response:
    host = gateway.browser_url.removeprefix("http://")
    return httpx2.get(f"{gateway.url}{link}", headers={"Host": host}, follow_redirects=False)


def test_a_link_of_one_gateway_is_accepted_once_by_another(where: str) -> None:
    with _two_gateways(where) as (one, other):
        link = _new_link(one)
        opened = _open_link(other, link)
        assert (opened.status_code, opened.headers["location"]) == (303, "/")
        assert opened.headers["set-cookie"].startswith("steno=")
        assert [_open_link(gateway, link).status_code for gateway in (one, other)] == [403, 403]


def test_login_link_is_accepted_once_across_two_gateways(where: str) -> None:
    with _two_gateways(where) as gateways, ThreadPoolExecutor(6) as pool:
        link = _new_link(gateways[0])
        together = threading.Barrier(6)

        def use(number: int) -> int:
            together.wait()
            return _open_link(gateways[number % 2], link).status_code

        assert sorted(pool.map(use, range(6))) == [303] + [403] * 5


def test_logout_applies_to_every_gateway_and_survives_a_restart(
    where: str,
) -> None:
    def status(gateway: Served, method: str = "GET", path: str = "/") -> int:
        host = gateway.browser_url.removeprefix("http://")
        headers = {"Host": host, "Cookie": cookie, "Origin": gateway.browser_url}
        return httpx2.request(method, gateway.url + path, headers=headers).status_code

    with _two_gateways(where) as (one, other):
        cookie = _open_link(one, _new_link(one)).headers["set-cookie"].partition(";")[0]
        assert (status(one), status(one, "POST", "/logout")) == (200, 200)
        assert (status(one), status(other)) == (401, 401)
    with Served(where, ScriptedModel([])) as restarted:
        assert status(restarted) == 401
