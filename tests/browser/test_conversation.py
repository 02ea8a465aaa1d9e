"""A session in a real browser: what was said, live, compacted, forked and talked in."""

import re
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import Browser, expect

from browser.looking import Looking, window
from browser.samples import LONG, PLAN
from gateway.served import Served
from stenolog.providers.scripted import ScriptedModel
from stenolog.stores.opening import open_store

_WRITER = """
import sys
from stenolog.stores.opening import open_store
where, key, *texts = sys.argv[1:]
with open_store(where) as store:
    for text in texts:
        store.add_message(key, "assistant", text)
"""

_WATCH = """() => {
  const writing = document.querySelector("#writing");
  window.written = [];
  new MutationObserver(() => window.written.push(writing.textContent))
    .observe(writing, { childList: true, characterData: true, subtree: true });
}"""
"""Keeps what stood on the page while it was being said."""


def _written_elsewhere(place: Path, key: str, *texts: str) -> None:
    """Have another process append to a session."""
    subprocess.run([sys.executable, "-c", _WRITER, str(place), key, *texts], check=True, timeout=60)


def test_markdown_tools_thoughts_and_pictures_are_shown(looking: Looking) -> None:
    looking.session(PLAN)
    page = looking.page
    expect(page.locator("article")).to_have_count(7)
    page.evaluate("scrollTo(0, 0)")
    looking.picture("conversation")
    answer = page.locator("#m7")
    assert answer.locator("table td").first.inner_text() == "EC 151"
    assert answer.locator("pre .k, pre .n, pre .s2").count() > 3
    tools = page.locator("#m4 details.tool")
    assert tools.count() == 2
    assert "412 ms" in tools.nth(0).locator("summary").inner_text()
    assert "failed" in tools.nth(1).locator("summary").inner_text()
    assert not tools.nth(0).locator(".result").is_visible()
    tools.nth(0).locator("summary").click()
    assert "07:32" in tools.nth(0).locator(".result").inner_text()
    thought = page.locator("#m4 details.thought")
    assert not thought.locator(".words").is_visible()
    assert page.locator("#m8 img.picture").evaluate("image => image.naturalWidth") == 240


def test_what_another_process_writes_comes_live_and_leaves_the_scroll_alone(
    looking: Looking, place: Path
) -> None:
    looking.session(PLAN)
    page = looking.page
    page.evaluate("scrollTo(0, 0)")
    _written_elsewhere(place, PLAN, "From **elsewhere**.", "And again.")
    expect(page.locator("#new")).to_have_text("2 new ↓")
    assert page.evaluate("scrollY") == 0
    expect(page.locator("#m10 strong")).to_have_text("elsewhere")
    looking.picture("new")
    page.locator("#new").click()
    expect(page.locator("#m11")).to_be_in_viewport()
    expect(page.locator("#new")).to_be_hidden()
    _written_elsewhere(place, PLAN, "At the end one goes on with it.")
    expect(page.locator("#m12")).to_be_in_viewport()
    expect(page.locator("#sight")).to_have_text("12 messages")


def test_a_compaction_has_a_divider_and_can_be_undone(looking: Looking) -> None:
    looking.session(LONG)
    page = looking.page
    divider = page.locator(".divider")
    expect(divider).to_have_count(1)
    assert "26 messages compacted" in divider.inner_text()
    divider.locator("summary").click()
    assert divider.locator("strong").inner_text() == "small owls"
    expect(page.locator("article")).to_have_count(14)
    looking.picture("divider")
    divider.locator("[data-show-hidden]").click()
    expect(page.locator("article.hidden-one")).to_have_count(26)
    assert page.locator("article").first.get_attribute("id") == "m1"
    divider.locator("[data-undo]").click()
    expect(page.locator("#toast")).to_contain_text("26 messages are in sight again")
    expect(page.locator(".divider")).to_have_count(0)
    expect(page.locator("article:not(.hidden-one)")).to_have_count(40)


def test_a_compaction_elsewhere_shows_its_divider_live(looking: Looking, place: Path) -> None:
    looking.session("telegram:alan")
    page = looking.page
    expect(page.locator("article")).to_have_count(2)
    with open_store(str(place)) as store:
        store.checkpoint("telegram:alan", summary="They spoke of offers.", upto=1)
    expect(page.locator(".divider")).to_contain_text("1 message compacted")


def test_a_fork_goes_on_from_a_message(looking: Looking) -> None:
    looking.session(PLAN)
    page = looking.page
    page.locator("#m2").hover()
    page.locator("#m2 [data-fork-at]").click()
    page.wait_for_url(lambda url: PLAN not in url and "telegram" in url)
    expect(page.locator("article")).to_have_count(2)
    expect(page.locator(".head")).to_contain_text(f"fork of {PLAN}")


def test_one_talks_to_the_agent(looking: Looking) -> None:
    looking.session("web:new?/#%")
    assert looking.page.locator(".failure").count() == 1
    looking.problems.clear()  # the console tells of the 404
    looking.session("cli:default:20260305-190012-77aa")
    page = looking.page
    page.evaluate(_WATCH)
    page.keyboard.press("c")
    page.keyboard.type("Hello there")
    page.keyboard.press("Enter")
    expect(page.locator("article.user").last).to_contain_text("Hello there")
    expect(page.locator("article.assistant").last.locator("strong")).to_have_text("Hello there")
    expect(page.locator("#writing")).to_be_hidden()
    expect(page.locator("article")).to_have_count(6)
    assert "You said: **Hello there**" in page.evaluate("window.written")
    page.locator("#say textarea").fill("/context")
    page.keyboard.press("Enter")
    expect(page.locator("#writing")).to_contain_text("tokens are sent to scripted")
    page.locator("#say textarea").fill("/help")
    page.keyboard.press("Enter")
    expect(page.locator("#writing .words code").first).to_be_visible()
    expect(page.locator("#writing")).not_to_contain_text("`")


def test_the_header_tells_what_the_session_has_become(looking: Looking) -> None:
    looking.session("slack:C42:grace")
    page = looking.page
    before = page.locator("#tokens").inner_text()
    page.locator("#say textarea").fill("What came of it? " * 40)
    page.keyboard.press("Enter")
    expect(page.locator("#sight")).to_have_text("6 messages")
    expect(page.locator("#state")).to_have_attribute("title", "idle")
    expect(page.locator("#tokens")).not_to_have_text(before)
    now = page.locator("#tokens").inner_text()
    page.reload()
    expect(page.locator("#tokens")).to_have_text(now)
    looking.open("/?q=slack")
    expect(page.locator(".row .figures")).to_contain_text("6 messages")
    expect(page.locator(".row .figures")).to_contain_text(now)


def test_a_stopped_answer_is_marked_once_and_the_session_is_at_rest(
    tmp_path: Path, browser: Browser, screenshots: Path
) -> None:
    with open_store(str(tmp_path)) as store:
        store.add_message("s", "assistant", "Hello.")
    with (
        Served(tmp_path, ScriptedModel(["word " * 2_000], pause=0.02)) as served,
        window(browser, served) as context,
        Looking(context, served, screenshots) as looking,
    ):
        looking.session("s")
        page = looking.page
        page.locator("#say textarea").fill("Go on and on")
        page.keyboard.press("Enter")
        expect(page.locator("#writing")).to_contain_text("word word")
        expect(page.locator("#state")).to_have_class("dot running")
        page.locator("#stop").click()
        last = page.locator("article.assistant").last
        expect(last).to_contain_text("Cut off")
        expect(last).not_to_contain_text("interrupted")
        expect(page.locator("#state")).to_have_class("dot idle")


def _looked_up(what: str) -> str:
    """Look something up."""
    return f"found: {what}"


def test_a_tool_that_runs_has_its_result_in_its_call(
    tmp_path: Path, browser: Browser, screenshots: Path
) -> None:
    function = {"name": "_looked_up", "arguments": '{"what": "owl"}'}
    asking = {
        "role": "assistant",
        "content": "Let me look.",
        "tool_calls": [{"id": "1", "type": "function", "function": function}],
    }
    with open_store(str(tmp_path)) as store:
        store.add_message("s", "assistant", "Hello.")
    with (
        Served(tmp_path, ScriptedModel([asking, "An owl."]), tools=[_looked_up]) as served,
        window(browser, served) as context,
        Looking(context, served, screenshots) as looking,
    ):
        looking.session("s")
        page = looking.page
        page.locator("#say textarea").fill("What is it?")
        page.keyboard.press("Enter")
        expect(page.locator("article").last).to_contain_text("An owl.")
        expect(page.locator("#send")).to_be_enabled()
        expect(page.locator("article")).to_have_count(4)
        page.locator("details.tool summary").click()
        expect(page.locator("details.tool .result")).to_have_text("found: owl")
        expect(page.locator("#writing")).to_be_hidden()


def test_a_new_session_begins_in_the_browser(looking: Looking) -> None:
    page = looking.page
    looking.open("/")
    page.locator("#begin").click()
    page.locator("dialog textarea").fill("Is anybody there?")
    page.locator("dialog button", has_text="OK").click()
    page.wait_for_url("**/s/cli%3A*%3Adefault")
    expect(page.locator("article")).to_have_count(2)
    expect(page.locator("article strong")).to_have_text("Is anybody there?")
    expect(page.locator("#state")).to_have_class("dot idle")


def test_a_title_and_tags_are_given(looking: Looking) -> None:
    looking.session("api:anonymous:notes")
    page = looking.page
    page.locator("#rename").click()
    page.keyboard.type("Release notes")
    page.keyboard.press("Enter")
    expect(page.locator("#title")).to_have_text("Release notes")
    page.locator("#retag").click()
    page.keyboard.type("words, german")
    page.keyboard.press("Enter")
    expect(page.locator("#tags .tag")).to_have_text(["german", "words"])
    looking.open("/?tag=german")
    expect(page.locator(".row .title")).to_have_text(["Release notes"])


def test_the_export_holds_every_message_as_it_is_stored(looking: Looking) -> None:
    looking.session(LONG)
    with looking.page.expect_download() as downloading:
        looking.page.locator(".export summary").click()
        looking.page.get_by_text("JSON lines").click()
    lines = downloading.value.path().read_text().splitlines()
    assert downloading.value.suggested_filename == "cli-default.jsonl"
    assert len(lines) in (14, 40)
    assert re.fullmatch(r'\{"role":"assistant","content":"Answer 20: .*', lines[-1])


def test_older_messages_come_when_they_are_wanted(
    tmp_path: Path, browser: Browser, screenshots: Path
) -> None:
    with open_store(str(tmp_path)) as store:
        store.add_messages(
            "big",
            [
                {"role": "user" if number % 2 else "assistant", "content": f"Message {number}."}
                for number in range(1, 1_001)
            ],
        )
    with (
        Served(tmp_path, ScriptedModel(["x"])) as served,
        window(browser, served) as context,
        Looking(context, served, screenshots) as looking,
    ):
        looking.session("big")
        page = looking.page
        expect(page.locator("article")).to_have_count(50)
        expect(page.locator("#m1000")).to_be_in_viewport()
        page.locator("#older").click()
        expect(page.locator("article")).to_have_count(100)
        assert page.locator("article").first.get_attribute("id") == "m901"
        looking.session("big", "?at=300#m300")
        expect(page.locator("#m300")).to_be_in_viewport()
        page.locator("#newer").click()
        expect(page.locator("#m400")).to_be_attached()
        looking.session("big", "/turns")
        expect(page.locator(".turns tbody tr")).to_have_count(200)


def test_the_dot_tells_when_a_turn_elsewhere_is_over(looking: Looking, place: Path) -> None:
    key = "telegram:alan"
    page = looking.page
    with open_store(str(place)) as store:
        with store.lease(key, ttl=60):
            looking.session(key)
            expect(page.locator("#state")).to_have_class("dot running")
        # Nothing is stored when a turn ends.
        expect(page.locator("#state")).not_to_have_class("dot running")
