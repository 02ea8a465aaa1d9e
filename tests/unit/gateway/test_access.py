"""The gate: who is let through, as what, and what every answer carries."""

import asyncio
import time
from typing import Any

import httpx2
import pytest
from starlette.types import Message, Receive, Scope, Send

from stenolog.gateway.access import AccessMiddleware
from stenolog.gateway.access_token import Token
from stenolog.gateway.hosts import known_hosts
from stenolog.gateway.login import Cookies

TOKEN = Token(b"x" * 43)
BEARER = {"Authorization": f"Bearer {TOKEN.value.decode()}"}
COOKIES = Cookies(TOKEN)
ELSEWHERE = "https://chat.example.org"
OWN = TOKEN.host_name()
HERE = f"http://{OWN}:8787"

Pairs = dict[str, str] | list[tuple[str, str]]


async def _caller(scope: Scope, receive: Receive, send: Send) -> None:
    """An application that answers how it knows its caller."""
    del receive
    own = [tuple(pair) for pair in scope["state"].get("own", [])]
    await send({"type": "http.response.start", "status": 200, "headers": own})
    await send({"type": "http.response.body", "body": scope["state"]["caller"].encode()})


def _gate(*own: tuple[bytes, bytes]) -> AccessMiddleware:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"]["own"] = own
        await _caller(scope, receive, send)

    return AccessMiddleware(
        app,
        token=TOKEN,
        known_hosts=known_hosts(
            bound_host="127.0.0.1", hosts=("steno.example.org",), origins=(ELSEWHERE,), own_host=OWN
        ),
        cookies=COOKIES,
        open_paths=("/healthz", "/readyz"),
        open_prefixes=("/webhooks/",),
    )


def _ask(
    headers: Pairs,
    *,
    method: str = "GET",
    path: str = "/v1/x",
    gate: AccessMiddleware | None = None,
) -> httpx2.Response:
    async def main() -> httpx2.Response:
        transport = httpx2.ASGITransport(gate or _gate())
        async with httpx2.AsyncClient(transport=transport, base_url=HERE) as client:
            return await client.request(method, path, headers=headers)

    return asyncio.run(main())


def _cookie() -> dict[str, str]:
    return {"Cookie": f"other=1; steno={COOKIES.make_value()}; more=2"}


def _code(response: httpx2.Response) -> str:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "code"}
    assert error["message"].endswith(".")
    return str(error["code"])


def test_request_with_the_token_is_accepted() -> None:
    assert _ask(BEARER).text == "bearer"
    assert _ask({"Authorization": f"bEARER  {TOKEN.value.decode()} "}).text == "bearer"


@pytest.mark.quick(5)
@pytest.mark.parametrize(
    "given",
    [
        "",
        "Bearer",
        "Bearer ",
        f"Bearer {'x' * 42}",
        f"Bearer {'x' * 44}",
        f"Bearer {'x' * 5_000}",
        f"Bearer {'X' * 43}",
        f"Bearer {'x' * 43} more",
        f"Bearer {'x' * 43},Bearer {'x' * 43}",
        f"Basic {'x' * 43}",
        f"Bearer:{'x' * 43}",
        "x" * 43,
    ],
)
def test_request_with_a_wrong_token_is_rejected(given: str) -> None:
    refused = _ask({"Authorization": given})
    assert (refused.status_code, _code(refused)) == (401, "invalid_api_key")
    assert refused.headers["www-authenticate"] == "Bearer"


def test_token_in_another_place_is_rejected() -> None:
    value = TOKEN.value.decode()
    for headers in ({"X-Authorization": f"Bearer {value}"}, {"Cookie": f"steno={value}"}):
        assert _ask(headers).status_code == 401
    for name in ("token", "access_token", "code", "api_key"):
        assert _ask({}, path=f"/v1/x?{name}={value}").status_code == 401


def test_error_without_a_token_says_what_to_send() -> None:
    refused = _ask({})
    assert refused.status_code == 401
    assert "Authorization: Bearer" in refused.json()["error"]["message"]
    # The port of the server end of the connection, which in this test is that of the address.
    port = httpx2.URL(HERE).port
    assert f"`steno open --port {port}`" in refused.json()["error"]["message"]


def test_request_with_two_tokens_is_rejected() -> None:
    assert _ask([*BEARER.items(), *BEARER.items()]).status_code == 401


def test_wrong_token_with_a_valid_cookie_is_rejected() -> None:
    assert _ask({**_cookie(), "Authorization": "Bearer wrong"}).status_code == 401


def test_cookie_allows_reading() -> None:
    assert [_ask(_cookie(), method=method).status_code for method in ("GET", "HEAD")] == [200, 200]
    assert _ask(_cookie()).text == "cookie"


def test_invalid_cookie_of_the_same_name_does_not_hide_a_valid_one() -> None:
    shadowed = {"Cookie": f"steno=1.{'0' * 64}; {_cookie()['Cookie']}; steno=x"}
    assert _ask(shadowed).text == "cookie"


@pytest.mark.parametrize("name", ["Steno", "steno2", "xsteno", ""])
def test_cookie_with_another_name_is_rejected(name: str) -> None:
    assert _ask({"Cookie": f"{name}={COOKIES.make_value()}"}).status_code == 401


@pytest.mark.quick(5)
@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "BREW"])
@pytest.mark.parametrize(
    "page",
    [
        {},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "none"},
        {"Origin": ELSEWHERE},
        {"Origin": ELSEWHERE, "Sec-Fetch-Site": "same-origin"},
    ],
)
def test_cookie_does_not_allow_changes_from_other_pages(method: str, page: dict[str, str]) -> None:
    refused = _ask({**_cookie(), **page}, method=method)
    assert (refused.status_code, _code(refused)) == (403, "foreign_page")


@pytest.mark.parametrize("page", [{"Origin": HERE}, {"Sec-Fetch-Site": "same-origin"}])
def test_cookie_allows_changes_from_own_pages(page: dict[str, str]) -> None:
    assert _ask({**_cookie(), **page}, method="POST").text == "cookie"


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/login", "/login?code=1", "/webhooks/a"])
def test_open_paths_need_no_token(path: str) -> None:
    assert _ask({}, path=path).text == "nobody"
    assert _ask(BEARER, path=path).text == "bearer"


@pytest.mark.parametrize("length", [{"Content-Length": "5"}, {"Transfer-Encoding": "chunked"}])
def test_connection_of_a_rejected_request_with_a_body_is_closed(length: dict[str, str]) -> None:
    rejected = _ask(length, method="POST")
    assert (rejected.status_code, rejected.headers["connection"]) == (401, "close")
    assert "connection" not in _ask({}, method="POST").headers
    assert "connection" not in _ask({**BEARER, **length}, method="POST").headers


def test_only_the_login_is_open_by_default() -> None:
    names = known_hosts(bound_host="127.0.0.1", own_host=OWN)
    gate = AccessMiddleware(_caller, token=TOKEN, known_hosts=names, cookies=COOKIES)
    assert _ask({}, path="/login", gate=gate).text == "nobody"
    for path in ("/healthz", "/readyz", "/webhooks/a", "/"):
        assert _ask({}, path=path, gate=gate).status_code == 401


def _proof(*, end: str = f"{OWN} 8787") -> dict[str, str]:
    now = str(time.time_ns() // 1_000_000)
    return {"Authorization": f"Steno {now}.{TOKEN.proof('ask', end, now)}"}


def test_proof_is_accepted_only_for_login_links() -> None:
    gate, proof = _gate(), _proof()
    for method, path in [
        ("GET", "/v1/login-links"),
        ("POST", "/v1/login-links/"),
        ("POST", "/v1/x"),
        ("GET", "/"),
    ]:
        assert _ask(proof, method=method, path=path, gate=gate).status_code == 401
    assert _ask(proof, method="POST", path="/v1/login-links", gate=gate).text == "bearer"


def test_proof_for_another_address_is_rejected() -> None:
    gate = _gate()
    for end in ("localhost 8788", "127.0.0.2 8787", "", "localhost"):
        proof = _proof(end=end)
        # The impostor who hands it on writes the Host that it was made for.
        asked = {**proof, "Host": "localhost:8788"}
        assert _ask(asked, method="POST", path="/v1/login-links", gate=gate).status_code == 401


def test_request_with_two_proofs_is_rejected() -> None:
    both = [*_proof().items(), *_proof().items()]
    assert _ask(both, method="POST", path="/v1/login-links").status_code == 401


@pytest.mark.quick(5)
@pytest.mark.parametrize("path", ["/v1/x", "/healthz", "/login", "/webhooks/a"])
@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8787", "user@localhost", f"steno-{'0' * 16}.localhost"]
)
def test_foreign_host_is_rejected_on_every_path(path: str, host: str) -> None:
    refused = _ask({**BEARER, "Host": host}, path=path)
    assert (refused.status_code, _code(refused)) == (421, "wrong_host")


@pytest.mark.quick(5)
@pytest.mark.parametrize("path", ["/v1/x", "/healthz", "/login", "/webhooks/a"])
@pytest.mark.parametrize("origin", ["http://evil.example", "null", "", "http://localhost:3000"])
def test_foreign_origin_is_rejected_on_every_path(path: str, origin: str) -> None:
    for method in ("GET", "POST", "OPTIONS"):
        refused = _ask({**BEARER, "Origin": origin}, path=path, method=method)
        assert (refused.status_code, _code(refused)) == (403, "foreign_origin")
        assert "access-control-allow-origin" not in refused.headers


def test_request_with_two_origins_is_rejected() -> None:
    assert _ask([*BEARER.items(), ("Origin", HERE), ("Origin", HERE)]).status_code == 403


def test_own_origin_is_accepted_without_cors_headers() -> None:
    answer = _ask({**BEARER, "Origin": HERE})
    assert answer.status_code == 200
    assert "access-control-allow-origin" not in answer.headers


def test_allowed_origin_is_accepted_with_the_token() -> None:
    answer = _ask({**BEARER, "Origin": ELSEWHERE})
    assert answer.text == "bearer"
    assert answer.headers["access-control-allow-origin"] == ELSEWHERE
    assert "access-control-allow-credentials" not in answer.headers
    assert "Origin" in answer.headers["vary"]
    refused = _ask({"Origin": ELSEWHERE})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == ELSEWHERE


def test_preflight_request_of_an_allowed_origin_is_answered() -> None:
    asking = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "a, b-c"}
    answer = _ask({**asking, "Origin": ELSEWHERE}, method="OPTIONS")
    assert (answer.status_code, answer.content) == (204, b"")
    assert answer.headers["access-control-allow-origin"] == ELSEWHERE
    assert answer.headers["access-control-allow-headers"] == "a, b-c"
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert "access-control-allow-credentials" not in answer.headers
    assert _ask({**asking, "Origin": HERE}, method="OPTIONS").status_code == 401
    assert _ask({**asking}, method="OPTIONS").status_code == 401
    assert _ask({"Origin": ELSEWHERE}, method="OPTIONS").status_code == 401


@pytest.mark.parametrize(
    "headers", [BEARER, {}, {"Host": "evil.example"}, {"Origin": "null"}, {"Origin": ELSEWHERE}]
)
def test_every_response_has_the_security_headers(headers: dict[str, str]) -> None:
    answer = _ask(headers)
    expected = {
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "x-frame-options": "DENY",
        "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
        "cross-origin-resource-policy": "same-origin",
        "cache-control": "no-store",
    }
    assert {name: answer.headers[name] for name in expected} == expected


def test_own_content_security_policy_of_a_response_is_kept() -> None:
    own = (b"content-security-policy", b"default-src 'self'")
    answer = _ask(BEARER, gate=_gate(own))
    assert answer.headers.get_list("content-security-policy") == ["default-src 'self'"]


def test_request_with_two_lengths_is_rejected() -> None:
    both = {**BEARER, "Content-Length": "3", "Transfer-Encoding": "chunked"}
    refused = _ask(both, method="POST")
    assert (refused.status_code, refused.headers["connection"]) == (400, "close")


def test_no_response_contains_the_token() -> None:
    for headers in (BEARER, _cookie(), {"Authorization": "Bearer wrong"}):
        answer = _ask(headers, method="POST")
        assert TOKEN.value.decode() not in f"{answer.headers} {answer.text}"


def _run(scope: dict[str, Any]) -> tuple[list[Scope], list[Message]]:
    """What the gate passed on, and what it sent itself."""
    passed: list[Scope] = []
    sent: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        del receive, send
        passed.append(scope)

    async def receive() -> Message:
        return {}

    async def send(message: Message) -> None:
        sent.append(message)

    gate = AccessMiddleware(
        app, token=TOKEN, known_hosts=known_hosts(bound_host="127.0.0.1"), cookies=COOKIES
    )
    asyncio.run(gate(scope, receive, send))
    return passed, sent


def test_lifespan_events_are_passed_on() -> None:
    scope = {"type": "lifespan"}
    assert _run(scope) == ([scope], [])


def test_a_websocket_is_closed() -> None:
    headers = [(b"host", b"localhost"), (b"authorization", b"Bearer " + TOKEN.value)]
    passed, sent = _run({"type": "websocket", "path": "/healthz", "headers": headers})
    assert (passed, [message["type"] for message in sent]) == ([], ["websocket.close"])


@pytest.mark.parametrize("where", ["target", "header"])
def test_request_head_is_limited_to_16_kb(where: str) -> None:
    def ask(size: int) -> int:
        long = "a" * size
        path = f"/v1/x?q={long}" if where == "target" else "/v1/x"
        more = {} if where == "target" else {"X-Long": long}
        return _ask({**BEARER, **more}, path=path).status_code

    assert ask(15_000) == 200
    assert ask(16_384) == 431
    assert ask(30_000) == 431


@pytest.mark.parametrize("host", ["127.0.0.1:8787", "localhost", "[::1]:8787", "127.0.0.1"])
def test_cookie_is_rejected_at_addresses_shared_with_other_programs(host: str) -> None:
    assert _ask({**_cookie(), "Host": host}).status_code == 401
    assert _ask({**BEARER, "Host": host}).text == "bearer"


@pytest.mark.parametrize("host", [f"{OWN}:8787", OWN.upper(), "steno.example.org"])
def test_cookie_is_accepted_at_the_own_and_configured_host_names(host: str) -> None:
    assert _ask({**_cookie(), "Host": host}).text == "cookie"
