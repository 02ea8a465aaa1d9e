"""Pages of the viewer in a browser, with checks for console errors and foreign requests."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import quote

from playwright.sync_api import (
    Browser,
    BrowserContext,
    ConsoleMessage,
    Page,
    Request,
    Response,
)

from support.gateway.served_gateway import Served


@contextmanager
def window(
    browser: Browser,
    served: Served,
    *,
    phone: bool = False,
    dark: bool = False,
    timezone: str | None = None,
) -> Iterator[BrowserContext]:
    """Yield a browser context that is signed in with a login link."""
    with browser.new_context(
        viewport={"width": 390, "height": 844} if phone else {"width": 1200, "height": 860},
        color_scheme="dark" if dark else "light",
        device_scale_factor=2 if phone else 1,
        is_mobile=phone,
        has_touch=phone,
        reduced_motion="reduce",
        timezone_id=timezone,
    ) as made:
        sign_in(made.new_page(), served)
        yield made


def sign_in(page: Page, served: Served) -> None:
    """Sign in with a login link, which leads to the list."""
    with served.client() as client:
        link = client.post("/v1/login-links").json()["url"]
    page.goto(served.browser_url + link)
    assert page.url == served.browser_url + "/"


class ViewerPage:
    """A page of a signed-in browser. On exit, checks for console errors and foreign requests."""

    def __init__(self, context: BrowserContext, served: Served, screenshots: Path) -> None:
        self.served = served
        self._screenshots = screenshots
        self.problems: list[str] = []
        self.foreign_requests: list[str] = []
        self.page = context.new_page()
        self.page.set_default_timeout(15_000)
        self.page.on("console", self._record_console)
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("request", self._record_request)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.page.close()
        if error is None:
            assert self.problems == [], self.problems
            assert self.foreign_requests == [], self.foreign_requests

    def open(self, path: str) -> Response:
        """Open the page at this path."""
        found = self.page.goto(self.served.browser_url + path)
        assert found is not None
        return found

    def open_session(self, key: str, rest: str = "") -> Response:
        """Open the page of a session."""
        return self.open(f"/s/{quote(key, safe='')}{rest}")

    def screenshot(self, name: str) -> None:
        """Save a screenshot."""
        self.page.screenshot(path=str(self._screenshots / f"{name}.png"))

    def _record_console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(f"{message.type}: {message.text}")

    def _record_request(self, request: Request) -> None:
        if not request.url.startswith((self.served.browser_url + "/", "data:image/")):
            self.foreign_requests.append(request.url)


NewWindow = Callable[..., AbstractContextManager[ViewerPage]]
"""Function that opens a new window on a gateway. It has the options of `window`."""
