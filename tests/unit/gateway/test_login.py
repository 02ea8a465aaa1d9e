"""Links that work once, and the cookie they become."""

import asyncio
import re
from collections.abc import Callable

import httpx2
import pytest
from starlette.applications import Starlette
from starlette.types import Receive, Scope, Send

from stenolog.gateway.access_token import Token
from stenolog.gateway.hosts import known_hosts
from stenolog.gateway.login import Cookies, LoginLinks, login_routes, read_proof

TOKEN = Token(b"x" * 43)
DAYS_7 = 7 * 86_400
OWN = TOKEN.host_name()


class Clock:
    """A time that a test sets."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    """The time, for links and cookies alike."""
    return Clock()


@pytest.fixture
def ask(clock: Clock) -> Callable[..., httpx2.Response]:
    """Ask the login as a caller that the gate has let through."""
    names = known_hosts(bound_host="127.0.0.1", hosts=("steno",), own_host=OWN)
    links, cookies = LoginLinks(clock), Cookies(TOKEN, clock)
    app = Starlette(routes=login_routes(TOKEN, links, cookies, names, OWN))

    def ask(
        method: str,
        url: str,
        *,
        caller: str | None = None,
        proof: str | None = None,
        content: str = "",
        **headers: str,
    ) -> httpx2.Response:
        async def let_through(scope: Scope, receive: Receive, send: Send) -> None:
            state = {} if caller is None else {"caller": caller, "proof": proof}
            await app({**scope, "state": state}, receive, send)

        async def main() -> httpx2.Response:
            transport = httpx2.ASGITransport(let_through)
            async with httpx2.AsyncClient(transport=transport, base_url="http://steno") as client:
                named = {name.replace("_", "-"): value for name, value in headers.items()}
                return await client.request(method, url, headers=named, content=content)

        return asyncio.run(main())

    return ask


Ask = Callable[..., httpx2.Response]


def _new_link(ask: Ask) -> str:
    return str(ask("POST", "/v1/login-links", caller="bearer").json()["url"])


def test_login_link_sets_a_cookie_and_redirects_home(ask: Ask, clock: Clock) -> None:
    given = ask("POST", "/v1/login-links", caller="bearer")
    assert given.status_code == 200
    assert (given.json()["expires_in"], given.json()["host"]) == (60, OWN)
    assert re.fullmatch(r"/login\?code=[\w-]{43}", given.json()["url"])
    taken = ask("GET", given.json()["url"])
    assert (taken.status_code, taken.headers["location"]) == (303, "/")
    value, *attributes = taken.headers["set-cookie"].split("; ")
    assert value.startswith("steno=")
    assert {part.lower() for part in attributes} == {
        "httponly",
        "samesite=strict",
        "path=/",
        f"max-age={DAYS_7}",
    }
    assert Cookies(TOKEN, clock).is_valid(value.removeprefix("steno="))


def test_cookie_is_secure_over_https(ask: Ask) -> None:
    taken = ask("GET", f"https://steno{_new_link(ask)}")
    assert "; Secure" in taken.headers["set-cookie"]


@pytest.mark.parametrize("site", ["cross-site", "same-site", "same-origin", ""])
def test_login_from_another_site_continues_through_an_own_page(ask: Ask, site: str) -> None:
    # Redirected, it would not send the cookie along.
    headers = {"Accept": "text/html,*/*", **({"Sec_Fetch_Site": site} if site else {})}
    taken = ask("GET", _new_link(ask), **headers)
    assert (taken.status_code, taken.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert '<meta http-equiv="refresh" content="0;url=/">' in taken.text
    assert taken.headers["set-cookie"].startswith("steno=")


def test_login_opened_by_the_user_redirects_directly(ask: Ask) -> None:
    taken = ask("GET", _new_link(ask), Accept="text/html,*/*", Sec_Fetch_Site="none")
    assert (taken.status_code, taken.headers["location"]) == (303, "/")


END = "127.0.0.1 8787"


def _proof(at: float = 1_000.0, *, end: str = END, token: Token = TOKEN) -> str:
    written = str(int(at * 1_000))
    return f"Steno {written}.{token.proof('ask', end, written)}"


def _read(header: str, *, since: float = 0.0, now: float = 1_000.0) -> str | None:
    return read_proof(TOKEN, header, END, since=since, now=now)


def test_proof_is_valid_for_30_seconds() -> None:
    for now in (970.0, 1_000.0, 1_030.0):
        assert _read(_proof(), now=now) == TOKEN.proof("ask", END, "1000000")
    for now in (969.0, 1_031.0):
        assert _read(_proof(), now=now) is None


def test_proof_made_before_the_start_is_rejected() -> None:
    assert _read(_proof(), since=1_000.001) is None
    assert _read(_proof(), since=1_000.0) is not None


@pytest.mark.parametrize(
    "given",
    [
        "",
        _proof(end="127.0.0.1 8788"),
        _proof(end="::1 8787"),
        _proof(token=Token(b"y" * 43)),
        _proof().replace("1000000", "1000001"),
        _proof().replace("Steno 1", "Steno 01"),
        _proof().replace("Steno", "Bearer"),
        _proof() + "\n",
        _proof()[:-1],
        f"Steno 1000000.{TOKEN.proof('give', '1000000', '/login?code=x')}",
    ],
)
def test_invalid_proof_is_rejected(given: str) -> None:
    assert _read(given) is None


def test_caller_with_a_proof_gets_a_proof_in_return(ask: Ask) -> None:
    given = ask("POST", "/v1/login-links", caller="bearer", proof="p").json()
    assert given["proof"] == TOKEN.proof("give", "p", given["url"])
    assert "proof" not in ask("POST", "/v1/login-links", caller="bearer").json()


@pytest.mark.parametrize("caller", [None, "nobody", "cookie"])
def test_login_link_requires_the_token(ask: Ask, caller: str | None) -> None:
    refused = ask("POST", "/v1/login-links", caller=caller)
    assert refused.status_code == 403
    assert "url" not in refused.json()


def test_login_link_works_once(ask: Ask) -> None:
    link = _new_link(ask)
    assert [ask("GET", link).status_code for _ in range(3)] == [303, 403, 403]


def test_login_link_expires_after_60_seconds(ask: Ask, clock: Clock) -> None:
    first, second = _new_link(ask), _new_link(ask)
    clock.now += 59
    assert ask("GET", first).status_code == 303
    clock.now += 1
    refused = ask("GET", second)
    assert refused.status_code == 403
    assert "set-cookie" not in refused.headers
    assert refused.text.startswith(
        "This link was used before, has expired, or is of another gateway. Run `steno open --port "
    )


@pytest.mark.parametrize("query", ["", "?code=", "?code=x", "?code=%ff", "?code=%C3%BC", "?c=1"])
def test_invalid_login_code_is_rejected(ask: Ask, query: str) -> None:
    link = _new_link(ask)
    assert ask("GET", f"/login{query}").status_code == 403
    assert ask("GET", link).status_code == 303


@pytest.mark.parametrize("method", ["HEAD", "POST", "PUT"])
def test_other_methods_do_not_use_up_a_login_link(ask: Ask, method: str) -> None:
    link = _new_link(ask)
    assert ask(method, link).status_code == 405
    assert ask("GET", link).status_code == 303


def test_cookie_expires_after_7_days(clock: Clock) -> None:
    cookies = Cookies(TOKEN, clock)
    value = cookies.make_value()
    clock.now += DAYS_7 - 1
    assert cookies.is_valid(value)
    clock.now += 1
    assert not cookies.is_valid(value)


def test_cookie_survives_a_restart_but_not_a_new_token(clock: Clock) -> None:
    value = Cookies(TOKEN, clock).make_value()
    assert Cookies(Token(TOKEN.value), clock).is_valid(value)
    assert not Cookies(Token(b"y" * 43), clock).is_valid(value)


def test_expiry_of_a_cookie_cannot_be_changed(clock: Clock) -> None:
    cookies = Cookies(TOKEN, clock)
    until, _, signature = cookies.make_value().partition(".")
    assert not cookies.is_valid(f"{int(until) + 1}.{signature}")
    assert not cookies.is_valid(f"0{until}.{signature}")
    assert not cookies.is_valid(f"{until}.{signature.upper()}")
    assert not cookies.is_valid(f"{until}.")
    assert not cookies.is_valid(f"{until}.{signature[::-1]}")
    assert not cookies.is_valid("")
    assert not cookies.is_valid(f"{until}.{signature}\n")


def test_own_host_name_is_derived_from_the_token() -> None:
    assert re.fullmatch(r"steno-[0-9a-f]{16}\.localhost", OWN)
    assert Token(b"y" * 43).host_name() != OWN
    assert TOKEN.host_name() == OWN


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "127.0.0.1:8787"])
def test_no_cookie_is_set_at_addresses_shared_with_other_programs(ask: Ask, host: str) -> None:
    link = _new_link(ask)
    refused = ask("GET", link, host=host)
    assert (refused.status_code, "set-cookie" in refused.headers) == (421, False)
    # Nobody without the token learns the name, and the link is not used up.
    assert OWN not in refused.text + str(refused.headers)
    assert "steno open" in refused.text
    taken = ask("GET", link, host=f"{OWN}:8787")
    assert taken.status_code == 303
    # Bound to this host alone.
    assert "domain" not in taken.headers["set-cookie"].lower()


def test_logout_removes_the_cookie_from_the_browser(ask: Ask) -> None:
    ended = ask("POST", "/logout", caller="cookie")
    assert ended.json() == {"logged_out": True}
    assert 'steno=""' in ended.headers["set-cookie"]
    assert "Max-Age=0" in ended.headers["set-cookie"]


def test_the_token_in_the_form_signs_the_browser_in(ask: Ask) -> None:
    content = f"token=+{TOKEN.value.decode()}"
    for host in ("steno", OWN):
        url = f"http://{host}:8787/sign-in"
        given = ask("POST", url, content=content, Accept="text/html", Sec_Fetch_Site="same-origin")
        assert given.status_code == 200
        assert '<meta http-equiv="refresh" content="0;url=/">' in given.text
        assert given.headers["set-cookie"].startswith("steno=")
        assert TOKEN.value.decode() not in given.text


def test_at_a_name_that_accepts_no_cookies_the_form_leads_to_the_own_name(ask: Ask) -> None:
    content = f"token={TOKEN.value.decode()}"
    given = ask("POST", "http://127.0.0.1:8787/sign-in", content=content)
    assert "set-cookie" not in given.headers
    [link] = re.findall(r'href="(.*?)"', given.text)
    assert link.startswith(f"http://{OWN}:8787/login?code=")
    assert TOKEN.value.decode() not in given.text
    assert ask("GET", link).status_code == 303


LONG_FORM = pytest.param(f"token={TOKEN.value.decode()}&x={'x' * 20_000}", id="too long")


@pytest.mark.parametrize(
    "content",
    ["", "token=", "token=wrong", "code=x", "token=%ff%fe", "\xff", "a=b&" * 100, LONG_FORM],
)
def test_a_form_without_the_token_signs_nobody_in(ask: Ask, content: str) -> None:
    refused = ask("POST", "/sign-in", content=content)
    assert refused.status_code == 401
    assert "set-cookie" not in refused.headers
    assert "code=" not in refused.text


def test_wrong_tokens_do_not_lock_out_the_right_one() -> None:
    names = known_hosts(bound_host="127.0.0.1", hosts=("steno",), own_host=OWN)
    app = Starlette(routes=login_routes(TOKEN, LoginLinks(), Cookies(TOKEN), names, OWN))

    async def main() -> list[int]:
        transport = httpx2.ASGITransport(app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://steno") as client:
            forms = [b"token=x"] * 20 + [b"token=" + TOKEN.value]
            posts = (client.post("/sign-in", content=form) for form in forms)
            return [response.status_code for response in await asyncio.gather(*posts)]

    assert asyncio.run(main()) == [401] * 20 + [303]
