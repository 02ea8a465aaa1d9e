"""Rows about the viewer: first paint of a long conversation in a real browser."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import stenolog
from gateway import gateway
from gateway_server import TOKEN
from measure import Context, Measurement, NotRun, percentiles
from messages import sample
from stenolog.catalog import open_catalog

if TYPE_CHECKING:
    from playwright.sync_api import Browser

MESSAGES = 100_000
_KEY = "long"
_FIRST_PAINT_SCRIPT = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
"""Milliseconds from navigation to the first visible text, as the browser reports it."""


def first_paint(context: Context, *, fresh: bool) -> Measurement:
    """Measure the ms until a page of a session with 100,000 messages shows its first text.

    With `fresh`, each page is the first page that a new gateway serves. The comparison is the
    shortest page of the same gateway.
    """
    workspace = context.folder / "viewer"
    with stenolog.open_store(workspace) as store:
        if not store.list_sessions(limit=1):
            messages = sample(997)
            batch = [dict(messages[number % len(messages)]) for number in range(MESSAGES)]
            for start in range(0, MESSAGES, 1_000):
                store.add_messages(_KEY, batch[start : start + 1_000])
            # Build the catalog first, so that the time to build it is not measured.
            with open_catalog(store) as catalog:
                catalog.refresh()
    times = context.times(12)
    ours: list[float] = []
    raw: list[float] = []
    with _browser() as browser:
        if fresh:
            for _ in range(times):
                with gateway(workspace) as (url, _process):
                    ours.append(_paint(browser, f"{url}/s/{_KEY}"))
                    raw.append(_paint(browser, f"{url}/healthz"))
        else:
            with gateway(workspace) as (url, _process):
                _paint(browser, f"{url}/s/{_KEY}")
                for _ in range(times):
                    ours.append(_paint(browser, f"{url}/s/{_KEY}"))
                    raw.append(_paint(browser, f"{url}/healthz"))
    stats = percentiles(ours)
    return Measurement(measured=stats["p50_us"] / 1000, ours=stats, raw=percentiles(raw))


@contextmanager
def _browser() -> Iterator["Browser"]:
    chromium = shutil.which("chromium")
    if chromium is None:
        raise NotRun("there is no chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


def _paint(browser: "Browser", url: str) -> float:
    """Return the seconds until the first paint of a page, in a window with an empty cache."""
    with browser.new_context(extra_http_headers={"Authorization": f"Bearer {TOKEN}"}) as window:
        page = window.new_page()
        page.goto(url, wait_until="load")
        # The page's Content-Security-Policy forbids waiting for a script expression.
        while (painted := page.evaluate(_FIRST_PAINT_SCRIPT)) is None:
            page.wait_for_timeout(20)
        return float(painted) / 1000
