"""Moving in a long session, in a real browser: outline, search, filters, scrolling, jumps."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from stenolog.stores.open_store import open_store
from stenolog.testing.scripted_model import ScriptedModel
from support.gateway.served_gateway import Served
from support.viewer_page import NewWindow, ViewerPage, window

_KEY = "long"
_TURNS = 400
_WIDTHS = pytest.mark.parametrize("width", [1280, 390])


def _turn(number: int) -> list[dict[str, Any]]:
    """Five messages: a prompt, thinking, a tool that fails in every 20th turn, and an answer."""
    call = {"name": "run", "arguments": f'{{"command": "make part-{number}"}}'}
    failed = {"failed": True} if number % 20 == 0 else {}
    usage = {"prompt": 100, "answer": 10, "cached": 0}
    return [
        {"role": "user", "content": f"Prompt {number}: how is part {number}?"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": f"Thought {number}.",
            "tool_calls": [{"id": f"c{number}", "type": "function", "function": call}],
        },
        {
            "role": "tool",
            "tool_call_id": f"c{number}",
            "content": f"output-{number}",
            "stenolog": {"seconds": 0.5, **failed},
        },
        {"role": "assistant", "content": f"Look at line {number}."},
        {
            "role": "assistant",
            "content": f"Answer {number}: the owl is in box {number}.",
            "stenolog": {"model": "m", "seconds": 1.0, "usage": usage},
        },
    ]


def _fill(where: Path, key: str = _KEY, turns: int = _TURNS) -> None:
    with open_store(str(where)) as store:
        store.add_messages(key, [one for number in range(1, turns + 1) for one in _turn(number)])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("sessions")
    _fill(where)
    _fill(where, "summarized", 60)
    with open_store(str(where)) as store:
        store.add_message("accents", "assistant", "The owl is in Zürich.")
        store.checkpoint("summarized", summary="Boxes with owls.", upto=250)
    return where


@pytest.fixture(scope="module")
def served(place: Path) -> Iterator[Served]:
    with Served(place, ScriptedModel(["x"])) as gateway:
        yield gateway


@pytest.fixture
def viewer_at_width(
    browser: Browser, served: Served, screenshots: Path, width: int
) -> Iterator[ViewerPage]:
    """A window of this width, a phone if it is narrow."""
    with (
        window(browser, served, phone=width < 600) as context,
        ViewerPage(context, served, screenshots) as one,
    ):
        if width >= 600:
            one.page.set_viewport_size({"width": width, "height": 800})
        yield one


def _top_of(page: Page, selector: str) -> float:
    return float(page.locator(selector).evaluate("one => one.getBoundingClientRect().top"))


def _bar_end(page: Page) -> float:
    return float(page.locator("#session-bar").evaluate("one => one.getBoundingClientRect().bottom"))


def _press(page: Page, selector: str) -> None:
    """Press a button by the keyboard. A click would scroll the page to a sticky one."""
    page.locator(selector).evaluate("one => one.focus({ preventScroll: true })")
    page.keyboard.press("Enter")


@_WIDTHS
def test_title_and_tabs_stay_in_view(viewer_at_width: ViewerPage, width: int) -> None:
    viewer_at_width.open_session(_KEY)
    page = viewer_at_width.page
    expect(page.locator("#m2000")).to_be_in_viewport()
    expect(page.locator("#title")).not_to_be_in_viewport()
    expect(page.locator("#short-title")).to_be_in_viewport()
    expect(page.locator("#short-title")).to_have_text(page.locator("#title").inner_text())
    assert (page.locator("#session-bar").bounding_box() or {"height": 99})["height"] < 64
    viewer_at_width.screenshot(f"navigation-end-{width}")
    # Nothing that is gone to is below the bar.
    viewer_at_width.open_session(_KEY, "?at=1006#m1006")
    page.evaluate("location.hash = ''; location.hash = '#m1011'")
    expect(page.locator("#m1011")).to_be_in_viewport()
    assert _top_of(page, "#m1011") >= _bar_end(page)
    for _ in range(4):
        page.keyboard.press("k")
        assert _top_of(page, "article.chosen") >= _bar_end(page) - 1
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.locator(".tabs a", has_text="Turns").click()
    page.wait_for_url("**/turns")


@pytest.mark.parametrize("width", [1280])
def test_outline_follows_the_scroll_position_and_links_to_every_prompt(
    viewer_at_width: ViewerPage,
) -> None:
    found = viewer_at_width.open_session(_KEY)
    assert "Prompt 300" not in found.text()
    page = viewer_at_width.page
    expect(page.locator("#outline-totals")).to_have_text("400 prompts · 20 failed")
    current = page.locator("#outline [aria-current]")
    expect(current).to_contain_text("Prompt 400")
    expect(current).to_be_in_viewport()
    expect(current).to_contain_text("1 tool")
    expect(current.locator(".bad")).to_have_text("1 failed: run")
    expect(current.locator(".bad")).to_have_attribute("title", "Failed: run")
    expect(current.locator("time")).to_be_visible()
    assert page.locator("#outline a").count() <= 100
    assert page.locator("#outline a.failed").count() == 5
    viewer_at_width.screenshot("navigation-outline")
    # By the keyboard: to the prompt above, and to one that is not on the page.
    page.keyboard.press("o")
    expect(current).to_be_focused()
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Enter")
    expect(current).to_contain_text("Prompt 399")
    page.locator("#outline-turns").evaluate("one => { one.scrollTop = 0; }")
    link = page.locator("#outline a", has_text="Prompt 250:")
    link.focus()
    page.keyboard.press("Enter")
    expect(page.locator("#m1246")).to_be_in_viewport()
    assert abs(_top_of(page, "#m1246") - _bar_end(page)) < 30
    expect(current).to_contain_text("Prompt 250")
    # While scrolling.
    page.mouse.move(700, 400)
    page.mouse.wheel(0, 1)
    page.locator("#m1251").evaluate("one => one.scrollIntoView({ block: 'start' })")
    expect(current).to_contain_text("Prompt 251")


@pytest.mark.parametrize("width", [390])
def test_outline_is_a_drawer_on_a_phone(viewer_at_width: ViewerPage) -> None:
    viewer_at_width.open_session(_KEY)
    page = viewer_at_width.page
    outline = page.locator("#outline")
    expect(outline).to_be_hidden()
    assert page.locator("#outline a").count() == 0
    before = page.evaluate("scrollY")
    _press(page, "#outline-button")
    expect(page.locator("#outline [aria-current]")).to_be_focused()
    expect(page.locator("#outline-button")).to_have_attribute("aria-expanded", "true")
    assert page.evaluate("scrollY") == before
    viewer_at_width.screenshot("navigation-drawer")
    page.keyboard.press("Escape")
    expect(outline).to_be_hidden()
    expect(page.locator("#outline-button")).to_be_focused()
    _press(page, "#outline-button")
    page.locator("#outline a", has_text="Prompt 390:").tap()
    expect(outline).to_be_hidden()
    expect(page.locator("#m1946")).to_be_in_viewport()
    expect(page.locator("#m1946")).to_be_focused()


@_WIDTHS
def test_search_covers_the_whole_session(viewer_at_width: ViewerPage, width: int) -> None:
    viewer_at_width.open_session(_KEY)
    page = viewer_at_width.page
    page.keyboard.press("f")
    field = page.get_by_label("Search in this session")
    expect(field).to_be_focused()
    count = page.locator("#find-count")
    page.keyboard.type("owl box 7")
    # 7, 17 … 397 and 70 to 79, each with an answer; not in what tools were asked.
    expect(count).to_have_text("1 of 76")
    expect(page.locator("#m35")).to_be_in_viewport()
    page.keyboard.press("Enter")
    expect(count).to_have_text("2 of 76")
    expect(page.locator("#m85")).to_be_in_viewport()
    page.keyboard.press("Shift+Enter")
    page.keyboard.press("Shift+Enter")
    expect(count).to_have_text("76 of 76")
    expect(page.locator("#m1985")).to_be_in_viewport()
    assert page.evaluate("CSS.highlights.get('found-here').size") >= 3
    assert _top_of(page, "#m1985") >= _bar_end(page) - 1
    viewer_at_width.screenshot(f"navigation-search-{width}")
    # A result of a tool is shown in its call, which opens.
    field.fill("output-123")
    expect(count).to_have_text("1 of 1")
    expect(page.locator("#m612 .result", has_text="output-123")).to_be_in_viewport()
    field.fill("no-such-thing")
    expect(count).to_have_text("no match")
    field.press("Escape")
    expect(page.locator("#tools")).to_be_hidden()
    # The browser's own search stays.
    assert page.evaluate("""() => {
      const options = { key: "f", ctrlKey: true, cancelable: true, bubbles: true };
      return document.body.dispatchEvent(new KeyboardEvent("keydown", options));
    }""")


@pytest.mark.parametrize("width", [1280])
@pytest.mark.parametrize("start", ["", "?at=1006"], ids=["match-on-page", "match-to-load"])
def test_late_response_to_an_earlier_jump_is_discarded(
    viewer_at_width: ViewerPage, start: str
) -> None:
    viewer_at_width.open_session(_KEY, start)
    page = viewer_at_width.page
    held: list[Route] = []
    page.route("**/s/long?at=35", lambda route: held.append(route))
    page.keyboard.press("f")
    field = page.get_by_label("Search in this session")
    with page.expect_request("**/s/long?at=35"):
        field.fill("owl box 7")
    field.press("Shift+Enter")
    expect(page.locator("#find-count")).to_have_text("76 of 76")
    expect(page.locator("#m1985")).to_be_in_viewport()
    with page.expect_request_finished(lambda one: one.url.endswith("?at=35")):
        held[0].continue_()
    page.evaluate("() => new Promise((done) => { setTimeout(done, 200); })")
    expect(page.locator("#m35")).to_have_count(0)
    expect(page.locator("#m1985")).to_be_in_viewport()


@pytest.mark.parametrize("width", [1280])
def test_address_with_search_words_opens_a_session_at_a_hidden_message(
    viewer_at_width: ViewerPage,
) -> None:
    page = viewer_at_width.page
    viewer_at_width.open_session("summarized", "?q=%22box 7.%22")
    expect(page.locator("#find-count")).to_have_text("1 of 1")
    expect(page.locator("#m35")).to_be_in_viewport()
    expect(page.locator("#m35")).to_have_class("message assistant hidden-one arrived")
    # As in the list of sessions, accents do not matter.
    viewer_at_width.open_session("accents", "?q=zurich")
    expect(page.locator("#find-count")).to_have_text("1 of 1")
    expect(page.locator("#m1")).to_have_class("message assistant arrived")
    assert page.evaluate("CSS.highlights.get('found-here').size") == 1


@_WIDTHS
def test_filters_apply_to_the_whole_session_and_keep_the_scroll_position(
    viewer_at_width: ViewerPage, width: int
) -> None:
    viewer_at_width.open_session(_KEY, "?at=1006")
    page = viewer_at_width.page
    page.keyboard.press("f")
    page.locator("#m1006").evaluate("one => one.scrollIntoView({ block: 'start' })")
    before = _top_of(page, "#m1006")
    _press(page, "#filters [data-filter='only=prompts']")
    prompts = page.get_by_role("button", name="Prompts only")
    expect(prompts).to_have_attribute("aria-pressed", "true")
    expect(page.locator("article:not(.user)")).to_have_count(0)
    assert abs(_top_of(page, "#m1006") - before) < 2
    assert page.locator("article").count() >= 50
    viewer_at_width.screenshot(f"navigation-prompts-{width}")
    _press(page, "#filters [data-filter='only=failed']")
    expect(prompts).to_have_attribute("aria-pressed", "false")
    expect(page.locator("article.user")).to_have_count(0)
    # All 20 of them, from the first message to the last.
    expect(page.locator("article details.failed")).to_have_count(20)
    expect(page.locator("article")).to_have_count(20)
    viewer_at_width.screenshot(f"navigation-failed-{width}")
    _press(page, "#filters [data-filter='only=failed']")
    _press(page, "#filters [data-filter='tools=false']")
    expect(page.locator("#m1009")).to_be_attached()
    expect(page.locator("article details.tool:visible")).to_have_count(0)
    expect(page.locator("article details.thought").first).to_be_attached()
    _press(page, "#filters [data-filter='thinking=false']")
    expect(page.get_by_role("button", name="Thinking")).to_have_attribute("aria-pressed", "false")
    expect(page.locator("article details.thought")).to_have_count(0)
    expect(page.locator("#m1007")).to_have_count(0)
    # Until the tab is closed.
    viewer_at_width.open("/")
    viewer_at_width.open_session(_KEY)
    expect(page.get_by_role("button", name="No tools")).to_have_attribute("aria-pressed", "true")
    expect(page.locator("article details.thought")).to_have_count(0)
    _press(page, "#filters [data-filter='tools=false']")
    _press(page, "#filters [data-filter='thinking=false']")
    expect(page.locator("article details.tool").first).to_be_attached()


@_WIDTHS
def test_messages_load_while_scrolling_and_the_page_stays_small(
    viewer_at_width: ViewerPage,
) -> None:
    viewer_at_width.open_session(_KEY)
    page = viewer_at_width.page
    expect(page.locator("#position")).to_contain_text("–2,000 of 2,000")
    first = int(page.locator("article").first.get_attribute("data-seq") or 0)
    for _ in range(14):
        before = page.evaluate("""() => {
          scrollTo(0, 0);
          return document.querySelector("article").getBoundingClientRect().top;
        }""")
        expect(page.locator("article").first).not_to_have_attribute("data-seq", str(first))
        # What was being read has not moved.
        assert abs(_top_of(page, f"#m{first}") - before) < 2
        first = int(page.locator("article").first.get_attribute("data-seq") or 0)
        assert page.locator("article").count() <= 450
    assert first <= 1_300
    expect(page.locator("#m2000")).to_have_count(0)
    expect(page.locator("#position")).to_contain_text("of 2,000")
    # And down again.
    last = ""
    while last != "2000":
        last = page.locator("article").last.get_attribute("data-seq") or ""
        page.evaluate("scrollTo(0, document.documentElement.scrollHeight)")
        if last != "2000":
            expect(page.locator("article").last).not_to_have_attribute("data-seq", last)
    expect(page.locator("#m2000")).to_be_in_viewport()
    assert page.locator("article").count() <= 450


def test_messages_added_while_the_end_is_not_loaded_appear_at_the_end(
    tmp_path: Path, new_window: NewWindow
) -> None:
    _fill(tmp_path, turns=200)
    with (
        Served(tmp_path, ScriptedModel(["x"])) as served,
        new_window(served) as viewer,
        open_store(str(tmp_path)) as store,
    ):
        viewer.open_session(_KEY)
        page = viewer.page
        page.keyboard.press("o")
        page.locator("#outline-turns").evaluate("one => { one.scrollTop = 0; }")
        page.locator("#outline a", has_text="Prompt 110:").click()
        expect(page.locator("#m546")).to_be_in_viewport()
        expect(page.locator("#m1000")).to_have_count(0)
        store.add_message(_KEY, "user", "Prompt 201: and now?")
        store.add_message(_KEY, "assistant", "At the end.")
        page.locator("#m546").click()
        page.keyboard.press("G")
        expect(page.locator("#m1002")).to_be_in_viewport()
        expect(page.locator("#outline [aria-current]")).to_contain_text("Prompt 201")
        store.add_message(_KEY, "user", "Prompt 202: live?")
        expect(page.locator("#m1003")).to_be_in_viewport()
        expect(page.locator("#outline [aria-current]")).to_contain_text("Prompt 202")


@_WIDTHS
def test_messages_of_a_divider_can_be_shown_and_hidden_again(
    viewer_at_width: ViewerPage, width: int
) -> None:
    viewer_at_width.open_session("summarized")
    page = viewer_at_width.page
    divider = page.locator(".divider")
    divider.evaluate("one => one.scrollIntoView({ block: 'center' })")
    before = _top_of(page, ".divider .line")
    _press(page, "[data-show-hidden]")
    expect(page.locator("article.hidden-one").first).to_be_attached()
    assert abs(_top_of(page, ".divider .line") - before) < 12
    expect(page.locator("#m250")).to_be_in_viewport()
    hide = page.get_by_role("button", name="Hide messages")
    viewer_at_width.screenshot(f"navigation-divider-{width}")
    _press(page, "[data-hide-hidden]")
    expect(page.locator("article.hidden-one")).to_have_count(0)
    expect(hide).to_have_count(0)
    assert abs(_top_of(page, ".divider .line") - before) < 12
    expect(page.get_by_role("button", name="Show messages")).to_be_focused()
