"""Somebody who looks at the viewer in a browser, and what must never happen there."""

from collections.abc import Iterator
from contextlib import contextmanager
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
    """A window that came in by a link that works once, as `steno open` prints it."""
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
    """Come in by the link; the list is what it leads to."""
    with served.client() as client:
        link = client.post("/v1/login-links").json()["url"]
    page.goto(served.browser_url + link)
    assert page.url == served.browser_url + "/"


class Looking:
    """A page of a browser that is signed in. At its end nothing may have gone wrong in it."""

    def __init__(self, context: BrowserContext, served: Served, screenshots: Path) -> None:
        self.served = served
        self._screenshots = screenshots
        self.problems: list[str] = []
        self.elsewhere: list[str] = []
        self.page = context.new_page()
        self.page.set_default_timeout(15_000)
        self.page.on("console", self._heard)
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("request", self._asked)

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
            assert self.problems == []
            assert self.elsewhere == []

    def open(self, path: str) -> Response:
        """The page at this path."""
        found = self.page.goto(self.served.browser_url + path)
        assert found is not None
        return found

    def session(self, key: str, rest: str = "") -> Response:
        """The page of a session."""
        return self.open(f"/s/{quote(key, safe='')}{rest}")

    def picture(self, name: str) -> None:
        """Keep what can be seen now."""
        self.page.screenshot(path=str(self._screenshots / f"{name}.png"))

    def _heard(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(f"{message.type}: {message.text}")

    def _asked(self, request: Request) -> None:
        if not request.url.startswith((self.served.browser_url + "/", "data:image/")):
            self.elsewhere.append(request.url)
