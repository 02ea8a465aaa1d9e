"""The gateway as a whole under attack: no way past the token, no page of others, no flood."""

import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest

from stenolog.gateway.app import ENDPOINTS
from stenolog.gateway.openapi import Endpoint
from stenolog.testing.scripted_model import ScriptedModel
from support.gateway.served_gateway import TOKEN, Served

SCRIPT = "<script>alert('x')</script>"
CLOSED = [one for one in ENDPOINTS if not one.is_open]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    where = tmp_path_factory.mktemp("attacked")
    model = ScriptedModel(lambda messages, _: f"{SCRIPT} {len(messages)}")
    with Served(where, model, max_body=100_000) as found:
        with found.client() as client:
            client.post("/v1/sessions/s/messages", json={"content": SCRIPT})
        yield found


def _path(endpoint: Endpoint) -> str:
    return endpoint.path.replace("{key}", "s")


@pytest.mark.parametrize("endpoint", CLOSED, ids=lambda one: f"{one.method} {one.path}")
@pytest.mark.parametrize("token", ["", "Bearer", "Bearer x", f"Basic {TOKEN}", TOKEN])
def test_endpoints_reveal_nothing_without_the_token(
    served: Served, endpoint: Endpoint, token: str
) -> None:
    headers = {"Authorization": token} if token else {}
    response = httpx2.request(
        endpoint.method, served.url + _path(endpoint), headers=headers, content=b"{}"
    )
    assert response.status_code == 401
    assert TOKEN not in response.text
    assert SCRIPT not in response.text


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda one: f"{one.method} {one.path}")
def test_endpoints_reject_foreign_hosts_and_origins(served: Served, endpoint: Endpoint) -> None:
    with served.client() as client:
        for header, value, status in (
            ("Host", "evil.example", 421),
            ("Host", f"127.0.0.1.evil.example:{urlsplit(served.url).port}", 421),
            ("Origin", "https://evil.example", 403),
            ("Origin", "null", 403),
        ):
            response = client.request(
                endpoint.method, _path(endpoint), headers={header: value}, content=b"{}"
            )
            assert response.status_code == status, (header, value)
            assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize(
    "path",
    [
        "/v1/sessions/..%2f..%2f..%2fetc%2fpasswd/messages",
        "/v1/sessions/%2e%2e/messages",
        "/v1/sessions/s%00/messages",
        "/v1/sessions/%5c..%5c..%5cwindows/messages",
        "/v1/sessions/s/messages/../../s2/messages",
        "//v1/sessions",
        "/v1//sessions",
        "/v1/sessions/",
        "/healthz/../v1/sessions",
        "/static/../../etc/passwd",
    ],
)
def test_path_tricks_reach_no_other_resource(served: Served, path: str) -> None:
    target = urlsplit(served.url)
    assert target.hostname is not None
    for token, expected in ((TOKEN, (200, 400, 404)), ("x", (401,))):
        # By hand: clients would put the path in order before they send it.
        with socket.create_connection((target.hostname, target.port or 0)) as line:
            line.sendall(
                f"GET {path} HTTP/1.1\r\nHost: {target.netloc}\r\nConnection: close\r\n"
                f"Authorization: Bearer {token}\r\n\r\n".encode()
            )
            told = b"".join(iter(lambda: line.recv(65_536), b""))
        assert int(told.split()[1]) in expected
        assert b"root:" not in told
        assert SCRIPT.encode() not in told


def test_body_above_the_configured_limit_is_rejected(served: Served) -> None:
    with served.client() as client:
        for path in ("/v1/chat/completions", "/v1/sessions/s/messages"):
            assert client.post(path, content=b"x" * 100_001).status_code == 413


def test_message_content_is_never_served_as_html(served: Served) -> None:
    with served.client() as client:
        for path in ("/v1/sessions/s/messages", "/v1/sessions/s", "/v1/sessions", "/v1/search?q=x"):
            response = client.get(path)
            assert response.headers["content-type"] == "application/json"
            assert response.headers["x-content-type-options"] == "nosniff"
            assert "default-src 'none'" in response.headers["content-security-policy"]
        missing = client.get(f"/v1/sessions/{SCRIPT.replace('/', '%2F')}")
        assert missing.status_code == 404
        assert missing.headers["content-type"] == "application/json"


def test_cookie_of_a_login_link_allows_changes_only_from_own_pages(
    served: Served,
) -> None:
    with served.client() as client:
        link = client.post("/v1/login-links").json()["url"]
    host = served.browser_url.removeprefix("http://")
    with httpx2.Client(base_url=served.url, headers={"Host": host}) as browser:
        first = browser.get(link)
        assert (first.status_code, first.headers["location"]) == (303, "/")
        assert browser.get(link).status_code == 403, "a link works once"
        assert browser.get("/v1/sessions").status_code == 200
        body: Any = {"content": "hello"}
        path = "/v1/sessions/t/messages"
        assert browser.post(path, json=body).status_code == 403
        foreign = {"Origin": "https://evil.example"}
        assert browser.post(path, json=body, headers=foreign).status_code == 403
        own = {"Origin": served.browser_url}
        assert browser.post(path, json=body, headers=own).status_code == 200
        assert browser.post("/v1/login-links", headers=own).status_code == 403
