"""The list of sessions, in a real browser: painted, filtered, searched, and jumped from."""

from pathlib import Path

from playwright.sync_api import Browser, expect

from browser.looking import Looking, sign_in, window
from gateway.served import Served
from stenolog.providers.scripted import ScriptedModel
from stenolog.stores.opening import open_store


def test_the_list_shows_every_session_with_its_figures(looking: Looking) -> None:
    looking.open("/")
    rows = looking.page.locator(".row")
    assert rows.count() == 8
    row = rows.filter(has_text="Incident of 3 March")
    assert row.locator(".tag").all_inner_texts() == ["incident", "team"]
    assert "slack" in row.locator(".channel").inner_text()
    assert row.locator("time").inner_text()
    waiting = rows.filter(has_text="arm64").locator(".dot")
    assert waiting.get_attribute("title") == "running"
    looking.picture("list")


def test_typing_filters_by_title_and_key_and_finds_what_was_said(looking: Looking) -> None:
    page = looking.page
    looking.open("/")
    page.keyboard.press("/")
    page.keyboard.type("owl 13")
    page.wait_for_selector(".hit")
    assert page.locator(".row").count() == 0
    marks = page.locator(".hit").first.locator("mark").all_inner_texts()
    assert set(marks) == {"owl", "13"}
    looking.picture("search")
    page.locator("#search").fill("telegram:al")
    expect(page.locator(".row")).to_have_count(1)
    assert "offers" in page.locator(".row").inner_text()


def test_a_hit_jumps_to_its_message_also_where_it_was_compacted(looking: Looking) -> None:
    page = looking.page
    looking.open("/?q=box%203")
    page.locator(".hit", has_text="Answer 3").first.locator("a").click()
    page.wait_for_selector("#m6")
    assert page.url.endswith("#m6")
    assert page.locator("#m6").get_attribute("class") == "message assistant hidden-one"
    expect(page.locator("#m6")).to_be_in_viewport()


def test_tags_channels_and_states_narrow_the_list(looking: Looking) -> None:
    page = looking.page
    looking.open("/")
    page.locator(".row", has_text="Incident").locator(".tag", has_text="team").click()
    page.wait_for_url("**tag=team**")
    assert page.locator(".row").count() == 1
    looking.open("/?state=running")
    assert page.locator(".row").count() == 1
    looking.open("/?channel=telegram")
    assert page.locator(".row").count() == 2


def test_more_rows_come_as_one_scrolls(tmp_path: Path, browser: Browser, screenshots: Path) -> None:
    with open_store(str(tmp_path)) as store:
        for number in range(130):
            store.add_message(f"cli:user{number:03}", "assistant", "Hello.")
    with (
        Served(tmp_path, ScriptedModel(["x"])) as served,
        window(browser, served) as context,
        Looking(context, served, screenshots) as looking,
    ):
        page = looking.page
        looking.open("/")
        for count in (50, 100, 130):
            page.keyboard.press("G")
            expect(page.locator(".row")).not_to_have_count(count - 50)
        expect(page.locator(".row")).to_have_count(130)
        keys = page.locator(".row .key").all_inner_texts()
        assert len(set(keys)) == 130


def test_without_the_cookie_a_page_says_how_to_get_in(
    browser: Browser, served: Served, screenshots: Path
) -> None:
    with browser.new_context() as stranger, Looking(stranger, served, screenshots) as looking:
        found = looking.open("/")
        assert found.status == 401
        assert "steno open" in looking.page.locator("body").inner_text()
        card = looking.page.locator(".failure")
        assert card.evaluate("one => getComputedStyle(one).borderRadius") == "16px"
        looking.picture("sign-in")
        assert [one for one in looking.problems if "401" not in one] == []
        looking.problems.clear()  # the console tells of the 401 itself
        sign_in(looking.page, served)
        expect(looking.page.locator(".row")).to_have_count(8)
