"""A browser logs in at a name of the gateway's own, and logs out."""

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from support.gateway.served_gateway import Served
from support.viewer_page import sign_in, window


class _Recorder(http.server.BaseHTTPRequestHandler):
    """Another server on this machine, which keeps the cookies that it is sent."""

    def do_GET(self) -> None:
        self.server.cookies.append(self.headers.get("Cookie", ""))  # type: ignore[attr-defined]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *values: object) -> None:
        """Write nothing."""


@pytest.fixture
def recorder() -> Iterator[http.server.HTTPServer]:
    server = http.server.HTTPServer(("127.0.0.1", 0), _Recorder)
    server.cookies = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_cookie_is_not_sent_to_other_servers_of_this_machine(
    browser: Browser, served: Served, recorder: http.server.HTTPServer
) -> None:
    with window(browser, served) as context:
        page = context.new_page()
        for host in ("127.0.0.1", "localhost"):
            page.goto(f"http://{host}:{recorder.server_port}/")
        assert set(recorder.cookies) == {""}  # type: ignore[attr-defined]
        # At the addresses that other servers use, the browser is not logged in.
        refused = page.goto(served.url)
        assert refused is not None
        assert refused.status == 401


@pytest.mark.slow
def test_logout_removes_the_cookie(browser: Browser, served: Served, screenshots: Path) -> None:
    with window(browser, served) as context:
        page = context.new_page()
        page.goto(served.browser_url)
        assert len(context.cookies()) == 1
        button = page.get_by_role("button", name="Log out")
        page.screenshot(path=str(screenshots / "log-out.png"))
        with page.expect_navigation():
            button.click()
        assert page.get_by_text("steno open").first.is_visible()
        page.screenshot(path=str(screenshots / "logged-out.png"))
        assert context.cookies() == []
        sign_in(page, served)
        page.set_viewport_size({"width": 390, "height": 844})
        page.screenshot(path=str(screenshots / "log-out-phone.png"))
