"""Login links and logouts of several gateways that serve one store."""

from collections.abc import Iterator
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


def test_login_link_works_once_and_only_at_the_gateway_that_made_it(tmp_path: Path) -> None:
    where = str(tmp_path / "workspace")
    with (
        Served(where, ScriptedModel([])) as one,
        Served(where, ScriptedModel([])) as other,
        Served(where, ScriptedModel([]), read_only=True) as viewer,
    ):
        link, unused = _new_link(viewer), _new_link(viewer)
        assert [_open_link(gateway, link).status_code for gateway in (one, other)] == [403, 403]
        opened = _open_link(viewer, link)
        assert (opened.status_code, opened.headers["location"]) == (303, "/")
        assert opened.headers["set-cookie"].startswith("steno=")
        assert [_open_link(gateway, link).status_code for gateway in (viewer, one)] == [403, 403]
    with Served(where, ScriptedModel([]), read_only=True) as restarted:
        assert _open_link(restarted, unused).status_code == 403


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
