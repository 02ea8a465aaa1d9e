"""Fixtures for browser tests: a Chromium, and a gateway with sample sessions."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, sync_playwright

from stenolog.stores.open_store import open_store
from stenolog.testing.scripted_model import ScriptedModel
from support import needs
from support.gateway.served_gateway import Served
from support.viewer_page import NewWindow, ViewerPage, window
from support.viewer_samples import WAITING, fill


def _answer(messages: Any, tools: Any) -> str:
    del tools
    return f"You said: **{messages[-1]['content']}**"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Start Chromium once per file. While it runs, no other test can have an event loop."""
    needs.tool("chromium")
    with sync_playwright() as playwright:
        # The sandbox does not start for root, as in a container.
        chromium = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("sessions")
    fill(where)
    return where


@pytest.fixture(scope="module")
def served(place: Path) -> Iterator[Served]:
    with (
        open_store(str(place)) as store,
        store.lease(WAITING, ttl=600),
        Served(place, ScriptedModel(_answer, pause=0.01)) as gateway,
    ):
        yield gateway


@pytest.fixture(scope="session")
def screenshots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    given = os.environ.get("STENO_SCREENSHOTS")
    folder = Path(given) if given else tmp_path_factory.mktemp("screenshots")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def signed_in(browser: Browser, served: Served) -> Iterator[BrowserContext]:
    with window(browser, served) as made:
        yield made


@pytest.fixture
def viewer(signed_in: BrowserContext, served: Served, screenshots: Path) -> Iterator[ViewerPage]:
    with ViewerPage(signed_in, served, screenshots) as one:
        yield one


@pytest.fixture
def new_window(browser: Browser, screenshots: Path) -> NewWindow:
    @contextmanager
    def new_window(served: Served, **options: Any) -> Iterator[ViewerPage]:
        with (
            window(browser, served, **options) as context,
            ViewerPage(context, served, screenshots) as viewer,
        ):
            yield viewer

    return new_window
