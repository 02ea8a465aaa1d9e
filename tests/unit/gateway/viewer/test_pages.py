"""The pages over HTTP: who gets them, with which headers, and what goes wrong."""

from collections.abc import Iterator
from urllib.parse import quote

import httpx2
import pytest

from gateway.served import Served
from stenolog.gateway.viewer.serving import POLICY
from stenolog.providers.scripted import ScriptedModel
from stenolog.stores.opening import open_store

_KEY = "a/b?c#d%2F"
_HOSTILE = "\"'><script>hurt()</script>"
_PATH = "/s/a%2Fb%3Fc%23d%252F"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    where = tmp_path_factory.mktemp("sessions")
    with open_store(str(where)) as store:
        store.add_message(_KEY, "user", "Hello.")
        store.add_message(_KEY, "assistant", "Half \ud800 a character.")
    with Served(where, ScriptedModel(["x"])) as gateway:
        yield gateway


def test_who_has_not_signed_in_is_told_how_and_nothing_else(served: Served) -> None:
    for path in ("/", _PATH, "/notes", "/static/viewer.css", "/nothing"):
        found = httpx2.get(served.url + path, headers={"Accept": "text/html,*/*"})
        assert found.status_code == 401
        assert found.headers["content-type"] == "text/html; charset=utf-8"
        assert "steno open" in found.text
        assert "Hello" not in found.text
        assert "default-src 'none'" in found.headers["content-security-policy"]
        assert found.headers["www-authenticate"] == "Bearer"


def test_programs_are_told_in_json_as_before(served: Served) -> None:
    for headers in ({}, {"Authorization": "Bearer wrong", "Accept": "text/html"}):
        found = httpx2.get(served.url + "/v1/sessions", headers=headers)
        assert found.status_code == 401
        assert found.json()["error"]["code"] == "invalid_api_key"


def test_any_key_has_its_pages(served: Served) -> None:
    with served.client() as client:
        assert _PATH in client.get("/").text
        for rest in ("", "?full=true", "?at=1", "/fragment", "/turns", "/context"):
            found = client.get(_PATH + rest)
            assert found.status_code == 200, rest
            assert found.headers["content-security-policy"] == POLICY
            assert found.headers["cache-control"] == "no-store"
        lines = client.get(f"{_PATH}/export.jsonl")
        assert lines.headers["content-disposition"] == 'attachment; filename="a-b-c-d-2F.jsonl"'
        assert len(lines.text.splitlines()) == 2


def test_no_field_is_taken_for_html(served: Served) -> None:
    with served.client() as client:
        path = f"/v1{_PATH.replace('/s/', '/sessions/')}"
        client.patch(path, json={"title": _HOSTILE, "tags": [_HOSTILE]})
        for page in (
            "/",
            "/?q=" + quote(_HOSTILE),
            _PATH,
            f"{_PATH}/turns",
            "/notes?q=" + _HOSTILE,
        ):
            text = client.get(page).text
            assert _HOSTILE not in text, page
            assert "<script>h" not in text, page
        client.patch(path, json={"title": None, "tags": []})


def test_every_page_has_the_strict_policy(served: Served) -> None:
    with served.client() as client:
        for path in ("/", _PATH, "/notes", f"{_PATH}/fragment", "/s/nobody"):
            found = client.get(path)
            policy = found.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert "frame-ancestors 'none'" in policy
            assert " style=" not in found.text
            assert "<script>" not in found.text
        assert client.get("/static/viewer.js").headers["content-type"].startswith("text/javascript")
        for name in ("..%2Fserving.py", "%2E%2E%2Fserving.py", "nothing.js", "serving.py"):
            assert client.get(f"/static/{name}").status_code == 404, name


def test_what_goes_wrong_is_told_by_a_page(served: Served) -> None:
    with served.client() as client:
        for path, status in {
            "/s/nobody": 404,
            "/s/%": 400,
            "/?after=nonsense": 400,
            "/?agent=nobody": 404,
            f"{_PATH}?at=-1": 400,
            "/s/nobody/context": 404,
            "/s/nobody/export.jsonl": 404,
        }.items():
            found = client.get(path)
            assert found.status_code == status, path
            assert found.headers["content-type"] == "text/html; charset=utf-8"
            assert found.headers["content-security-policy"] == POLICY


def test_a_note_is_changed_only_by_a_page_of_ours(served: Served) -> None:
    with served.client() as client:
        link = client.post("/v1/login-links").json()["url"]
    with httpx2.Client(base_url=served.url) as browser:
        browser.get(link)
        act = {"act": "undo", "who": "x"}
        foreign = browser.post("/notes", json=act, headers={"Sec-Fetch-Site": "cross-site"})
        assert foreign.status_code == 403
        own = browser.post("/notes", json=act, headers={"Origin": served.url})
        assert own.status_code == 400
        assert "forgotten" in own.json()["error"]["message"]
