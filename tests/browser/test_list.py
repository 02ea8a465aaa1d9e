"""The list of sessions, in a real browser: painted, filtered, searched, and jumped from."""

from pathlib import Path

from playwright.sync_api import expect

from stenolog.stores.open_store import open_store
from stenolog.testing.scripted_model import ScriptedModel
from support.gateway.served_gateway import Served
from support.viewer_page import NewWindow, ViewerPage

_SOON = 20_000
"""Milliseconds within which the list has asked again, however busy the machine is."""


def test_list_shows_every_session_with_its_numbers(viewer: ViewerPage) -> None:
    viewer.open("/")
    rows = viewer.page.locator(".row")
    assert rows.count() == 8
    row = rows.filter(has_text="Incident of 3 March")
    assert row.locator(".tag").all_inner_texts() == ["incident", "team"]
    assert "slack" in row.locator(".channel").inner_text()
    assert row.locator("time").inner_text()
    waiting = rows.filter(has_text="arm64").locator(".dot")
    assert waiting.get_attribute("title") == "running"
    viewer.screenshot("list")


def test_search_finds_titles_keys_and_messages_while_typing(viewer: ViewerPage) -> None:
    page = viewer.page
    viewer.open("/")
    page.keyboard.press("/")
    page.keyboard.type("owl 13")
    page.wait_for_selector(".hit")
    assert page.locator(".row").count() == 0
    marks = page.locator(".hit").first.locator("mark").all_inner_texts()
    assert set(marks) == {"owl", "13"}
    viewer.screenshot("search")
    page.locator("#search").fill("telegram:al")
    expect(page.locator(".row")).to_have_count(1)
    assert "offers" in page.locator(".row").inner_text()


def test_more_sessions_load_while_scrolling(tmp_path: Path, new_window: NewWindow) -> None:
    with open_store(str(tmp_path)) as store:
        for number in range(130):
            store.add_message(f"cli:user{number:03}", "assistant", "Hello.")
    with Served(tmp_path, ScriptedModel(["x"])) as served, new_window(served) as viewer:
        page = viewer.page
        viewer.open("/")
        for count in (50, 100, 130):
            page.keyboard.press("G")
            expect(page.locator(".row")).not_to_have_count(count - 50)
        expect(page.locator(".row")).to_have_count(130)
        keys = page.locator(".row .key").all_inner_texts()
        assert len(set(keys)) == 130


_REMEMBER = """() => {
  window.rows = [...document.querySelectorAll(".row")];
  window.kept = (key) => window.rows.find((row) => row.textContent.includes(key)).isConnected;
}"""


def test_list_shows_changes_of_other_processes_and_keeps_focus_and_selection(
    tmp_path: Path, new_window: NewWindow
) -> None:
    with open_store(str(tmp_path)) as store:
        for name in ("ann", "bob", "eve"):
            store.add_message(f"cli:{name}", "assistant", f"I am {name}.")
        with Served(tmp_path, ScriptedModel(["x"])) as served, new_window(served) as viewer:
            page = viewer.page
            viewer.open("/")
            keys = page.locator(".row .key")
            expect(keys).to_have_text(["cli:eve", "cli:bob", "cli:ann"])
            page.keyboard.press("j")
            page.keyboard.press("j")
            page.locator(".row", has_text="cli:bob").locator("a").first.focus()
            page.evaluate(_REMEMBER)
            age = page.locator(".row", has_text="cli:eve").locator("time").inner_text()
            store.add_message("cli:ann", "assistant", "Here again.")
            with store.lease("cli:bob", ttl=60):
                expect(keys).to_have_text(["cli:ann", "cli:eve", "cli:bob"], timeout=_SOON)
                bob = page.locator(".row", has_text="cli:bob")
                expect(bob.locator(".dot")).to_have_class("dot running", timeout=_SOON)
                expect(bob).to_have_class("row chosen")
                expect(bob.locator("a").first).to_be_focused()
            eve = page.locator(".row", has_text="cli:eve")
            expect(eve.locator("time")).not_to_have_text(age, timeout=_SOON)
            assert page.evaluate("['cli:ann', 'cli:bob', 'cli:eve'].every(window.kept)")
            store.add_message("cli:new", "assistant", "I am new.")
            four = ["cli:new", "cli:ann", "cli:eve", "cli:bob"]
            expect(keys).to_have_text(four, timeout=_SOON)


def test_enter_starts_a_new_session(viewer: ViewerPage) -> None:
    page = viewer.page
    viewer.open("/")
    page.locator("#begin").click()
    expect(page.locator("dialog[open] button").first).to_have_text("Send")
    page.keyboard.type("One line")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("and another")
    expect(page.locator("dialog[open] textarea")).to_have_value("One line\nand another")
    page.keyboard.press("Enter")
    page.wait_for_url("**/s/cli%3A*%3Adefault")
    expect(page.locator("article.user")).to_contain_text("and another")
    expect(page.locator("article")).to_have_count(2)
    expect(page.locator("#state")).to_have_class("dot idle")


def test_empty_workspace_offers_three_ways_to_start(tmp_path: Path, new_window: NewWindow) -> None:
    with Served(tmp_path, ScriptedModel(["x"])) as served, new_window(served) as viewer:
        viewer.open("/")
        cards = viewer.page.locator(".card")
        expect(cards).to_have_count(3)
        expect(cards.locator("pre")).to_have_text(
            ["steno chat", "steno import claude-code", f"{served.url}/v1"]
        )
        viewer.screenshot("care-empty")
        viewer.page.set_viewport_size({"width": 390, "height": 844})
        viewer.screenshot("care-empty-390")
