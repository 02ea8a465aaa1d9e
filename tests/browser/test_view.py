"""`steno view` in a browser: transcripts without a message box, and the sign-in page."""

import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from stenolog.agent.instance import AgentInstance
from stenolog.agent.spec import AgentSpec
from stenolog.catalog import open_catalog
from stenolog.catalog.background_catalog import SessionHead
from stenolog.catalog.message_metadata import FIELD
from stenolog.cli.agents import open_viewer
from stenolog.stores.open_store import open_store
from stenolog.testing.scripted_model import ScriptedModel
from support.gateway.served_gateway import Served
from support.slow_store import SlowStore
from support.transcripts import SAMPLES
from support.viewer_page import NewWindow
from support.viewing import Viewing

TITLE = "Add a tide table to the harbour page"
COMPACTED = "20c7a18b-7d9d-457e-bc34-7dfb461f0515"


@pytest.fixture(scope="module")
def viewing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Viewing]:
    home = tmp_path_factory.mktemp("home")
    shutil.copytree(SAMPLES / "claude-code" / "projects", home / ".claude" / "projects")
    shutil.copytree(SAMPLES / "codex" / "sessions", home / ".codex" / "sessions")
    with Viewing(home, "view", "--port", "0") as started:
        yield started


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    with browser.new_context(
        viewport={"width": 1280, "height": 860},
        permissions=["clipboard-read", "clipboard-write"],
        reduced_motion="reduce",
    ) as context:
        opened = context.new_page()
        problems: list[str] = []
        opened.on("pageerror", lambda error: problems.append(str(error)))
        opened.on(
            "console",
            lambda said: problems.append(said.text) if "Content Security" in said.text else None,
        )
        yield opened
        assert problems == []


def test_view_shows_a_transcript_without_a_message_box(
    viewing: Viewing, page: Page, screenshots: Path
) -> None:
    page.goto(viewing.link)
    expect(page.locator("li.row")).to_have_count(12)
    expect(page.get_by_role("button", name="New")).to_have_count(0)
    expect(page.get_by_role("link", name="Notes")).to_have_count(0)
    page.screenshot(path=str(screenshots / "view-list.png"))
    page.get_by_role("link", name=TITLE).first.click()
    expect(page.locator("h1")).to_have_text(TITLE)
    expect(page.locator("article.message").first).to_be_visible()
    page.screenshot(path=str(screenshots / "view-transcript.png"))
    for missing in ("#say", "#rename", "#retag", "[data-fork-at]", "[data-undo]"):
        expect(page.locator(missing)).to_have_count(0)
    expect(page.get_by_role("link", name="Context", exact=True)).to_have_count(0)
    # The keys of the message box do nothing.
    page.keyboard.press("c")
    page.keyboard.press("/")
    page.keyboard.type("lighthouses")
    page.keyboard.press("Enter")
    expect(page.locator(".hit").first).to_be_visible()


@pytest.mark.parametrize("width", [1280, 390])
def test_compacted_transcript_shows_what_happened(
    viewing: Viewing, browser: Browser, screenshots: Path, width: int
) -> None:
    with browser.new_context(viewport={"width": width, "height": 800}) as context:
        page = context.new_page()
        page.goto(viewing.url)
        page.get_by_label("access token").fill(viewing.token)
        page.keyboard.press("Enter")
        expect(page.locator("li.row")).to_have_count(12)
        page.goto(f"{page.url}s/claude-code%3A{COMPACTED}")
        # 28 messages, without 6 tool results at their calls and the mark of the compaction.
        expect(page.locator("article.message")).to_have_count(21)
        expect(page.locator("article.user")).to_have_count(3)
        expect(page.locator("details.tool")).to_have_count(6)
        lines = page.locator("article.program .line")
        expect(lines).to_have_text(
            [
                "Compaction: summary of the earlier messages",
                "Note about commands",
                "/compact keep the tide table",
                "Output: Compacted (ctrl+o to see full summary)",
                re.compile("File: .*/harbour/page.md"),
            ]
        )
        expect(page.get_by_text("<command-name>")).to_be_hidden()
        expect(page.get_by_text("hidden from the model")).to_have_count(0)
        expect(page.locator(".divider")).to_have_count(0)
        page.screenshot(path=str(screenshots / f"compacted-end-{width}.png"))
        page.evaluate("scrollTo(0, 0)")
        page.screenshot(path=str(screenshots / f"compacted-top-{width}.png"))
        lines.nth(2).click()
        expect(page.get_by_text("<command-name>")).to_be_visible()
        page.screenshot(path=str(screenshots / f"compacted-open-{width}.png"))
        page.keyboard.press("f")
        page.get_by_role("button", name="Model's view").click()
        expect(page.locator("article.message")).to_have_count(7)
        expect(page.locator(".divider")).to_have_count(2)
        page.screenshot(path=str(screenshots / f"compacted-model-{width}.png"))
        page.get_by_role("button", name="Model's view").click()
        expect(page.locator("article.message")).to_have_count(21)


def test_access_token_signs_a_browser_in(viewing: Viewing, page: Page, screenshots: Path) -> None:
    page.goto(viewing.url)
    port = viewing.url.rpartition(":")[2]
    command = f"steno open --port {port}"
    expect(page.locator("pre")).to_have_text(command)
    page.screenshot(path=str(screenshots / "view-sign-in.png"))
    page.get_by_role("button", name="Copy").click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == command
    page.get_by_label("access token").fill("not the token")
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("alert")).to_contain_text("not the access token")
    page.screenshot(path=str(screenshots / "view-wrong-token.png"))
    page.set_viewport_size({"width": 390, "height": 844})
    page.screenshot(path=str(screenshots / "view-wrong-token-phone.png"))
    page.get_by_label("access token").fill(viewing.token)
    page.keyboard.press("Enter")
    expect(page.locator("li.row").first).to_be_visible()
    assert viewing.token not in page.url
    assert ".localhost" in page.url


def test_progress_of_the_first_index_is_shown(new_window: NewWindow, tmp_path: Path) -> None:
    store = SlowStore(tmp_path / "catalog.db")
    store.add_full_message("cli:old", {"role": "tool", "content": "x", FIELD: {"failed": True}})
    store.allowed.set()
    with open_catalog(store) as catalog:
        catalog.refresh()
    store.allowed.clear()
    for number in range(30):
        store.add_message(f"cli:{number}", "user", f"a question about tides {number}")

    def heads(keys: Sequence[str]) -> Iterator[SessionHead]:
        for key in keys:
            yield SessionHead(key=key, prompt=f"Prompt of {key}")

    with (
        Served(
            tmp_path,
            ScriptedModel([]),
            read_only=True,
            open_instance=lambda spec: open_viewer(spec, store, heads=heads),
        ) as served,
        new_window(served) as viewer,
    ):
        page, status = viewer.page, viewer.page.locator("#indexing")
        viewer.open("/")
        expect(page.locator("li.row")).to_have_count(31)
        row = page.locator(
            "li.row", has=page.get_by_role("link", name="Prompt of cli:7", exact=True)
        )
        expect(row.locator(".figures")).to_contain_text("… messages … tokens …")
        expect(page.locator("li.row .messages", has_text="1 message")).to_have_count(1)
        expect(page.locator("#total")).to_have_text("31 sessions · 1 with failed tools so far")
        expect(status).to_contain_text(
            "Indexed 1 of 31 sessions. Search finds only indexed sessions."
        )
        viewer.screenshot("view-indexing")
        store.allowed.set()
        expect(status).to_contain_text("All sessions are indexed.")
        status.get_by_role("link", name="Reload").click()
        expect(status).to_have_count(0)
        expect(page.get_by_role("link", name="a question about tides 7")).to_be_visible()
        expect(page.locator("li.row .messages", has_text="1 message")).to_have_count(31)
        expect(page.locator("#total")).to_have_text("31 sessions · 1 with failed tools")


def test_list_names_a_place_that_cannot_be_read_and_the_reason(
    new_window: NewWindow, tmp_path: Path
) -> None:
    place = tmp_path / "harbour"
    with open_store(str(place)) as store:
        store.add_message("cli:a", "user", "a question about tides")

    def open_read_only(spec: AgentSpec) -> AgentInstance:
        return open_viewer(spec, open_store(str(place), read_only=True), heads=lambda _: iter(()))

    with (
        Served(tmp_path, ScriptedModel([]), read_only=True, open_instance=open_read_only) as served,
        new_window(served) as viewer,
    ):
        page, notice = viewer.page, viewer.page.get_by_role("alert")
        viewer.open("/")
        expect(page.locator("li.row")).to_have_count(1)
        expect(notice).to_have_count(0)
        shutil.rmtree(place)
        page.reload()
        expect(notice).to_contain_text(f"Cannot be read: looking at {place}")
        expect(notice).to_contain_text("No such file or directory")
        expect(page.get_by_text("Start a conversation")).to_have_count(0)
        viewer.screenshot("view-unreadable")
