"""The row about the viewer: a long conversation in a real browser, to the first paint."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import stenolog
from gateway import gateway
from gateway_server import TOKEN
from measure import Figure, NotRun, Place, percentiles
from messages import sample
from stenolog.catalog import open_catalog

if TYPE_CHECKING:
    from playwright.sync_api import Browser

MESSAGES = 100_000
_KEY = "long"
_PAINTED = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
"""From the click to the first words in sight, in ms, as the browser itself counts."""


def first_paint(place: Place, *, fresh: bool) -> Figure:
    """How many ms until something of a session of 100,000 messages is to be seen.

    With `fresh` each is the first page that a gateway serves at all; beside it stands the
    shortest page that the same gateway has.
    """
    workspace = place.folder / "viewer"
    with stenolog.open_store(workspace) as store:
        if not store.list_sessions(limit=1):
            messages = sample(997)
            batch = [dict(messages[number % len(messages)]) for number in range(MESSAGES)]
            for start in range(0, MESSAGES, 1_000):
                store.add_messages(_KEY, batch[start : start + 1_000])
            # As where somebody has listed the sessions before: nobody is measured making the index.
            with open_catalog(store) as catalog:
                catalog.refresh()
    times = place.times(12)
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
    found = percentiles(ours)
    return Figure(measured=found["p50_us"] / 1000, ours=found, raw=percentiles(raw))


@contextmanager
def _browser() -> Iterator["Browser"]:
    chromium = shutil.which("chromium")
    if chromium is None:
        raise NotRun("there is no chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        try:
            yield made
        finally:
            made.close()


def _paint(browser: "Browser", url: str) -> float:
    """The seconds until the first paint of a page, in a window that has nothing in its cache."""
    with browser.new_context(extra_http_headers={"Authorization": f"Bearer {TOKEN}"}) as window:
        page = window.new_page()
        page.goto(url, wait_until="load")
        # What the page allows forbids to wait for a piece of script in it.
        while (painted := page.evaluate(_PAINTED)) is None:
            page.wait_for_timeout(20)
        return float(painted) / 1000
