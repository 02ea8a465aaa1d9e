"""Login links of several gateways that serve one store."""

from pathlib import Path

import httpx2

from stenolog.testing.scripted_model import ScriptedModel
from support.gateway.served_gateway import Served


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


def test_cookie_is_valid_at_every_gateway_with_the_same_token(tmp_path: Path) -> None:
    where = str(tmp_path / "workspace")
    with Served(where, ScriptedModel([])) as one, Served(where, ScriptedModel([])) as other:
        cookie = _open_link(one, _new_link(one)).headers["set-cookie"].partition(";")[0]
        for gateway in (one, other):
            host = gateway.browser_url.removeprefix("http://")
            assert httpx2.get(gateway.url, headers={"Host": host, "Cookie": cookie}).is_success
