"""A session in a real browser: what was said, live, compacted, forked and talked in."""

import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Route, expect

from stenolog.stores.open_store import open_store
from stenolog.testing.scripted_model import ScriptedModel
from support.gateway.served_gateway import Served
from support.viewer_page import NewWindow, ViewerPage, window
from support.viewer_samples import LONG, PLAN

_WRITER = """
import sys
from stenolog.stores.open_store import open_store
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


def test_conversation_shows_markdown_tools_thinking_and_pictures(viewer: ViewerPage) -> None:
    viewer.open_session(PLAN)
    page = viewer.page
    expect(page.locator("article")).to_have_count(7)
    page.evaluate("scrollTo(0, 0)")
    viewer.screenshot("conversation")
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


def test_messages_of_another_process_appear_without_scrolling_the_page(
    viewer: ViewerPage, place: Path
) -> None:
    viewer.open_session(PLAN)
    page = viewer.page
    page.evaluate("scrollTo(0, 0)")
    _written_elsewhere(place, PLAN, "From **elsewhere**.", "And again.")
    expect(page.locator("#new")).to_have_text("2 new ↓")
    assert page.evaluate("scrollY") == 0
    expect(page.locator("#m10 strong")).to_have_text("elsewhere")
    viewer.screenshot("new")
    page.locator("#new").click()
    expect(page.locator("#m11")).to_be_in_viewport()
    expect(page.locator("#new")).to_be_hidden()
    _written_elsewhere(place, PLAN, "At the end one goes on with it.")
    expect(page.locator("#m12")).to_be_in_viewport()
    expect(page.locator("#message-count")).to_have_text("12 messages")


def test_summary_has_a_divider_and_can_be_undone(viewer: ViewerPage) -> None:
    viewer.open_session(LONG)
    page = viewer.page
    divider = page.locator(".divider")
    expect(divider).to_have_count(1)
    assert "26 messages replaced by a summary" in divider.inner_text()
    divider.locator("summary").click()
    assert divider.locator("strong").inner_text() == "small owls"
    expect(page.locator("article")).to_have_count(14)
    viewer.screenshot("divider")
    divider.locator("[data-show-hidden]").click()
    expect(page.locator("article.hidden-one")).to_have_count(26)
    assert page.locator("article").first.get_attribute("id") == "m1"
    undo = divider.locator("[data-undo]")
    undo.click()
    expect(page.locator("dialog[open]")).to_contain_text("26 messages replaced by a summary.")
    page.locator("dialog[open] button", has_text="Cancel").click()
    expect(divider).to_have_count(1)
    undo.click()
    page.locator("dialog[open] button", has_text="Undo").click()
    told = "Summary undone. 26 messages are visible to the model again."
    expect(page.locator("#toast")).to_have_text(told)
    expect(page.locator(".divider")).to_have_count(0)
    expect(page.locator("article:not(.hidden-one)")).to_have_count(40)


def test_summary_of_another_process_appears_on_the_open_page(
    viewer: ViewerPage, place: Path
) -> None:
    viewer.open_session("telegram:alan")
    page = viewer.page
    expect(page.locator("article")).to_have_count(2)
    with open_store(str(place)) as store:
        store.checkpoint("telegram:alan", summary="They spoke of offers.", upto=1)
    expect(viewer.page.locator("#toast")).to_have_text(
        "1 message was replaced by a summary. The model gets the summary instead."
    )
    expect(viewer.page.locator(".divider .hint")).to_contain_text("They stay stored.")
    expect(page.locator(".divider")).to_contain_text("1 message replaced by a summary")


def test_change_before_the_event_stream_opens_is_shown(viewer: ViewerPage, place: Path) -> None:
    key = "cli:early"
    with open_store(str(place)) as store:
        store.add_messages(key, [{"role": "assistant", "content": f"{n}"} for n in range(4)])

        def hidden_before(route: Route) -> None:
            store.admin.hide(key, 2, 2)
            route.continue_()

        viewer.page.route("**/events*", hidden_before, times=1)
        viewer.open_session(key)
        expect(viewer.page.locator(".divider")).to_contain_text("1 message hidden")
        expect(viewer.page.locator("article")).to_have_count(3)


def test_fork_starts_at_the_selected_message(viewer: ViewerPage) -> None:
    viewer.open_session(PLAN)
    page = viewer.page
    page.locator("#m2").hover()
    page.locator("#m2 [data-fork-at]").click()
    page.wait_for_url(lambda url: PLAN not in url and "telegram" in url)
    expect(page.locator("article")).to_have_count(2)
    expect(page.locator(".head")).to_contain_text(f"forked from {PLAN}")
    told = f"Forked from {PLAN} at message 2."
    expect(page.locator("#toast")).to_have_text(told)
    page.reload()
    expect(page.locator("article")).to_have_count(2)
    expect(page.locator("#toast")).to_be_hidden()


def test_message_is_sent_and_the_answer_is_streamed(viewer: ViewerPage) -> None:
    viewer.open_session("web:new?/#%")
    assert viewer.page.locator(".failure").count() == 1
    viewer.problems.clear()  # the console tells of the 404
    viewer.open_session("cli:default:20260305-190012-77aa")
    page = viewer.page
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
    expect(page.locator("#writing")).to_contain_text("Next request to scripted")
    page.locator("#say textarea").fill("/help")
    page.keyboard.press("Enter")
    expect(page.locator("#writing")).to_contain_text("/new start a new session")
    expect(page.locator("#writing")).not_to_contain_text("`")


def test_retry_shows_its_answer_once_and_undo_its_reply(viewer: ViewerPage, place: Path) -> None:
    with open_store(str(place)) as store:
        store.add_message("web:retried", "user", "Name a star.")
        store.add_message("web:retried", "assistant", "A planet.")
    page = viewer.page
    viewer.open_session("web:retried")
    box = page.locator("#say textarea")
    box.fill("/retry")
    box.press("Enter")
    expect(page.locator("article.assistant .words")).to_have_text("You said: Name a star.")
    expect(page.locator("#stop")).to_be_hidden()
    texts = page.locator("main").locator("p", has_text="You said: Name a star.")
    expect(texts).to_have_count(1)
    box.fill("/undo")
    box.press("Enter")
    expect(page.locator("#writing")).to_contain_text("Undid")


def test_header_updates_message_count_state_and_tokens(viewer: ViewerPage) -> None:
    viewer.open_session("slack:C42:grace")
    page = viewer.page
    before = page.locator("#tokens").inner_text()
    page.locator("#say textarea").fill("What came of it? " * 40)
    page.keyboard.press("Enter")
    expect(page.locator("#message-count")).to_have_text("6 messages")
    expect(page.locator("#state")).to_have_attribute("title", "idle")
    expect(page.locator("#tokens")).not_to_have_text(before)
    now = page.locator("#tokens").inner_text()
    page.reload()
    expect(page.locator("#tokens")).to_have_text(now)
    viewer.open("/?q=slack")
    expect(page.locator(".row .figures")).to_contain_text("6 messages")
    # The list has the tokens of all requests, the page those of the next one.
    expect(page.locator(".row .tokens")).to_contain_text("tokens used")


def test_stopped_answer_is_marked_once_and_the_session_becomes_idle(
    tmp_path: Path, new_window: NewWindow
) -> None:
    with open_store(str(tmp_path)) as store:
        store.add_message("s", "assistant", "Hello.")
    with (
        Served(tmp_path, ScriptedModel(["word " * 2_000], pause=0.02)) as served,
        new_window(served) as viewer,
    ):
        viewer.open_session("s")
        page = viewer.page
        page.locator("#say textarea").fill("Go on and on")
        page.keyboard.press("Enter")
        expect(page.locator("#writing")).to_contain_text("word word")
        expect(page.locator("#state")).to_have_class("dot running")
        page.locator("#stop").click()
        last = page.locator("article.assistant").last
        expect(last).to_contain_text("You stopped this answer.")
        expect(last).not_to_contain_text("interrupted")
        expect(page.locator("#state")).to_have_class("dot idle")


def _looked_up(what: str) -> str:
    """Look something up."""
    return f"found: {what}"


def test_result_of_a_running_tool_appears_in_its_call(
    tmp_path: Path, new_window: NewWindow
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
        new_window(served) as viewer,
    ):
        viewer.open_session("s")
        page = viewer.page
        page.locator("#say textarea").fill("What is it?")
        page.keyboard.press("Enter")
        expect(page.locator("article").last).to_contain_text("An owl.")
        expect(page.locator("#send")).to_be_enabled()
        expect(page.locator("article")).to_have_count(4)
        page.locator("details.tool summary").click()
        expect(page.locator("details.tool .result pre")).to_have_text("found: owl")
        expect(page.locator("#writing")).to_be_hidden()


def test_title_and_tags_can_be_edited(viewer: ViewerPage) -> None:
    viewer.open_session("api:anonymous:notes")
    page = viewer.page
    page.locator("#rename").click()
    page.keyboard.type("Release notes")
    page.keyboard.press("Enter")
    expect(page.locator("#title")).to_have_text("Release notes")
    page.locator("#retag").click()
    page.keyboard.type("words, german")
    page.keyboard.press("Enter")
    expect(page.locator("#tags .tag")).to_have_text(["german", "words"])
    viewer.open("/?tag=german")
    expect(page.locator(".row .title")).to_have_text(["Release notes"])


def test_export_menu_names_formats_with_secrets_and_closes(viewer: ViewerPage) -> None:
    viewer.open_session(PLAN)
    page = viewer.page
    menu = page.locator(".export .menu")
    summary = page.locator(".export summary")
    expect(menu).to_be_hidden()
    summary.focus()
    page.keyboard.press("Enter")
    expect(menu).to_be_visible()
    viewer.screenshot("export")
    told = page.locator(".export a").all_inner_texts()
    assert [one.split("\n") for one in told] == [
        ["HTML page", "known forms of secrets removed"],
        ["Markdown", "known forms of secrets removed"],
        ["JSONL", "visible messages as stored; includes secrets"],
        ["JSONL, full history", "all messages as stored; includes secrets"],
    ]
    page.keyboard.press("Tab")
    expect(page.locator(".export a").first).to_be_focused()
    page.keyboard.press("Escape")
    expect(menu).to_be_hidden()
    expect(summary).to_be_focused()
    summary.click()
    expect(menu).to_be_visible()
    page.locator("#title").click()
    expect(menu).to_be_hidden()
    summary.click()
    with page.expect_download():
        page.locator(".export a", has_text="Markdown").click()
    expect(menu).to_be_hidden()


def _thousand(where: Path, key: str = "big") -> None:
    roles = ("assistant", "user")
    with open_store(str(where)) as store:
        store.add_messages(
            key,
            [
                {"role": roles[number % 2], "content": f"Message {number}."}
                for number in range(1, 1_001)
            ],
        )
        # More operations than `undo` knows.
        for number in range(9):
            store.set_summary(key, f"So {number}.")


def _top_of(viewer: ViewerPage, seq: int) -> float:
    """How far below the top of the window a message begins."""
    return float(
        viewer.page.evaluate(f"document.getElementById('m{seq}').getBoundingClientRect().top")
    )


def test_scroll_position_is_kept_when_another_process_summarizes(
    tmp_path: Path, new_window: NewWindow
) -> None:
    _thousand(tmp_path)
    with (
        Served(tmp_path, ScriptedModel(["x"])) as served,
        new_window(served) as viewer,
        open_store(str(tmp_path)) as store,
    ):
        viewer.open_session("big")
        page = viewer.page
        for count in (100, 150, 200):
            page.evaluate("scrollTo(0, 0)")
            expect(page.locator("article")).to_have_count(count)
        page.evaluate("document.getElementById('m870').scrollIntoView(); scrollBy(0, 13)")
        before = _top_of(viewer, 870)
        # First what is far above it, then what is being read.
        for upto, look in ((500, "message assistant"), (900, "message assistant hidden-one")):
            store.checkpoint("big", summary="Short.", upto=upto)
            expect(page.locator("#message-count")).to_have_text(
                f"1,000 messages · model sees {1_000 - upto}"
            )
            expect(page.locator("#m870")).to_have_class(look)
            assert abs(_top_of(viewer, 870) - before) < 2
            expect(page.locator("#m1000")).to_be_attached()
            expect(page.locator("#older")).to_be_visible()
        store.add_message("big", "assistant", "One more.")
        expect(page.locator("#new")).to_have_text("1 new ↓")
        assert abs(_top_of(viewer, 870) - before) < 2
        page.locator("#new").click()
        expect(page.locator("#m1001")).to_be_in_viewport()
        store.admin.hide("big", 990, 990)
        expect(page.locator("#m990")).to_have_count(0)
        expect(page.locator("#m1001")).to_be_in_viewport()


@pytest.mark.slow
def test_page_opens_at_a_message_and_turns_are_paged(tmp_path: Path, new_window: NewWindow) -> None:
    _thousand(tmp_path)
    with Served(tmp_path, ScriptedModel(["x"])) as served, new_window(served) as viewer:
        page = viewer.page
        viewer.open_session("big", "?at=300#m300")
        expect(page.locator("#m300")).to_be_in_viewport()
        for seq in (375, 400):
            page.evaluate("scrollTo(0, document.documentElement.scrollHeight)")
            expect(page.locator(f"#m{seq}")).to_be_attached()
        viewer.open_session("big", "/turns")
        expect(page.locator(".turns tbody tr")).to_have_count(200)
        expect(page.locator(".lead")).to_contain_text("500 turns")
        expect(page.locator(".turns tbody tr").last).to_contain_text("500")
        page.get_by_role("link", name="Older turns").first.click()
        expect(page.locator(".pager").first).to_contain_text("Turns 101–300 of 500")
        expect(page.locator(".turns tbody tr").last).to_contain_text("300")
        page.get_by_role("link", name="Older turns").first.click()
        expect(page.locator(".pager").first).to_contain_text("Turns 1–100 of 500")
        expect(page.locator(".turns tbody tr")).to_have_count(100)


def test_typed_text_is_kept_when_the_gateway_ends(
    tmp_path: Path, browser: Browser, screenshots: Path
) -> None:
    with open_store(str(tmp_path)) as store:
        store.add_message("s", "assistant", "Hello.")
    with ExitStack() as left_open:
        with Served(tmp_path, ScriptedModel(["x"])) as served:
            context = left_open.enter_context(window(browser, served))
            viewer = left_open.enter_context(ViewerPage(context, served, screenshots))
            viewer.open_session("s")
            page = viewer.page
            expect(page.locator("#gone")).to_be_hidden()
            served.hurry()
        expect(page.locator("#gone")).to_be_visible()
        page.locator("#say textarea").fill("What I\nwrote")
        expect(page.locator("#send")).to_be_disabled()
        page.locator("#say textarea").press("Enter")
        toast = page.locator("#toast")
        expect(toast).to_have_text("Can't reach the gateway. Your message is kept.")
        expect(page.locator("#say textarea")).to_have_value("What I\nwrote")
        # The notice covers neither the text box nor what is written in it.
        shown, box = toast.bounding_box(), page.locator("#say").bounding_box()
        assert shown is not None
        assert box is not None
        assert shown["y"] + shown["height"] < box["y"]
        # A link does not lead to an error of the browser.
        page.get_by_role("link", name="Turns").click()
        expect(toast).to_have_text("Can't reach the gateway.")
        expect(page.locator("#say textarea")).to_have_value("What I\nwrote")
        viewer.screenshot("care-gateway-gone")
        viewer.problems.clear()  # the console tells of it, too


def _expect_ended(viewer: ViewerPage) -> None:
    page = viewer.page
    expect(page.get_by_role("alert")).to_contain_text("This session was deleted.")
    expect(page.get_by_role("button", name="Restore")).to_be_enabled()
    expect(page.get_by_role("link", name="Back to sessions")).to_be_visible()
    for name in ("Send", "Rename"):
        expect(page.get_by_role("button", name=name)).to_be_disabled()
    expect(page.get_by_label("Message the agent")).to_be_disabled()
    # What was said can still be read, and nothing says that it goes on.
    expect(page.locator("article.message")).to_have_count(1)
    expect(page.locator("#state")).to_have_count(0)
    expect(page.locator("#gone")).to_be_hidden()


def _expect_only_errors_of_the_deletion(viewer: ViewerPage) -> None:
    # A request that the page sends before it hears of the deletion fails with 404 or 410, and the
    # console of the browser reports every failed response.
    assert [one for one in viewer.problems if not re.search(r"status of 4(04|10) ", one)] == []
    viewer.problems.clear()


def test_open_page_of_a_deleted_session_accepts_no_messages(
    viewer: ViewerPage, place: Path
) -> None:
    _written_elsewhere(place, "goes", "Hello.")
    with viewer.page.expect_response("**/events**"):
        viewer.open_session("goes")
    expect(viewer.page.get_by_label("Message the agent")).to_be_enabled()
    with open_store(str(place)) as store:
        store.delete("goes")
    _expect_ended(viewer)
    viewer.screenshot("deleted")
    viewer.page.get_by_role("button", name="Restore").click()
    expect(viewer.page.get_by_role("alert")).to_have_count(0)
    expect(viewer.page.get_by_label("Message the agent")).to_be_enabled()
    expect(viewer.page.locator("article.message")).to_have_count(1)
    with open_store(str(place)) as store:
        assert store.list_sessions(prefix="goes") == ["goes"]
        assert store.admin.list_trash() == []
    _expect_only_errors_of_the_deletion(viewer)


def test_restore_button_of_a_deleted_session_is_not_covered(
    viewer: ViewerPage, place: Path
) -> None:
    with open_store(str(place)) as store:
        many = [{"role": "assistant", "content": f"Answer {n}."} for n in range(40)]
        store.add_messages("long-gone", many)
    with viewer.page.expect_response("**/events**"):
        viewer.open_session("long-gone")
    expect(viewer.page.locator("#m40")).to_be_in_viewport()
    with open_store(str(place)) as store:
        store.delete("long-gone")
    button = viewer.page.get_by_role("button", name="Restore")
    expect(button).to_be_in_viewport()
    viewer.screenshot("deleted-long")
    assert button.evaluate("""one => {
      const box = one.getBoundingClientRect();
      return document.elementFromPoint(box.x + box.width / 2, box.y + box.height / 2) === one;
    }""")
    _expect_only_errors_of_the_deletion(viewer)
