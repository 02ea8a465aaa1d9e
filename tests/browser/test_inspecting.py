"""The context inspector, the turns and the notes, in a real browser."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from stenolog.agent.spec import AgentSpec
from stenolog.context.window import Limits
from stenolog.gateway.viewer.templating import short_number
from stenolog.memory.facade import open_memory
from stenolog.stores.open_store import open_store
from stenolog.testing.scripted_model import ScriptedModel
from support.gateway.served_gateway import Served
from support.prices import price_package
from support.viewer_page import NewWindow, ViewerPage
from support.viewer_samples import LONG, PLAN, fill

_LONG_NAMES = "phone:long-names"
_SHORTENED = "phone:shortened"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    place = tmp_path_factory.mktemp("sessions")
    fill(place)
    with open_memory(place, threads=True) as memory:
        memory.remember("Ada eats everything.", key=PLAN, about="diet")
        memory.remember("Ada is vegetarian.", key=PLAN, about="diet")
        memory.remember("Ada lives in Basel.", key=PLAN, about="home")
        memory.remember("Owls are kept in boxes.", key=LONG, about="owls")
    mark: dict[str, Any] = {
        "model": "somebody/a-model-with-a-very-long-name-4-5-20250929-instruct",
        "seconds": 131.2,
        "usage": {"prompt": 123_456, "answer": 1_234, "cached": 0},
    }
    with open_store(str(place)) as store:
        store.add_message(_LONG_NAMES, "user", "Who are you?")
        body = {"role": "assistant", "content": "It is me.", "stenolog": mark}
        store.add_full_message(_LONG_NAMES, body)
        store.add_messages(_SHORTENED, [{"role": "user", "content": f"{n}"} for n in range(1_200)])
        store.truncate_history(_SHORTENED, keep_last=150)
    spec = AgentSpec(
        consolidation=False,
        system="You plan journeys.\n\nAsk before you book anything. Times are those of the place.",
        limits=Limits(max_context_tokens=6_000),
    )
    with Served(place, ScriptedModel(["x"]), spec=spec) as gateway:
        yield gateway


def test_context_page_shows_the_next_request_and_its_token_counts(viewer: ViewerPage) -> None:
    viewer.open_session(LONG, "/context")
    page = viewer.page
    shares = {
        one.get_attribute("data-share"): int(one.locator("b").inner_text().replace(",", ""))
        for one in page.locator(".legend li").all()
    }
    assert list(shares) == ["system", "tools", "memory", "summary", "history", "free", "reserve"]
    assert all(shares[name] > 0 for name in ("system", "tools", "memory", "summary", "history"))
    sent = int(page.locator("#sent").inner_text().replace(",", ""))
    room = int(page.locator("#room").inner_text().replace(",", ""))
    used = sum(shares.values()) - shares["free"] - shares["reserve"]
    assert used == sent
    assert sent + shares["free"] == room
    assert room + shares["reserve"] == 6_000
    rows = [int(one.replace(",", "")) for one in page.locator(".exact .took").all_inner_texts()]
    assert sum(rows) == sent
    assert page.locator("#tokens").inner_text() == f"{short_number(sent)} tokens in next request"
    assert page.locator(".stack.used rect").count() == 5
    assert page.locator(".stack.whole rect").count() == 7
    exact = page.locator(".exact pre").first.inner_text()
    assert "You plan journeys." in exact
    assert "small owls" in exact
    assert "Owls are kept in boxes." in exact
    viewer.screenshot("context")


def test_turns_page_shows_tokens_tools_and_duration_of_each_turn(viewer: ViewerPage) -> None:
    page = viewer.page
    with price_package(None):
        viewer.open_session(PLAN, "/turns")
        expect(page.locator(".turns tbody tr")).to_have_count(3)
    row = page.locator(".turns tbody tr", has_text="Lugano")
    assert row.locator("td").all_inner_texts()[1:5] == ["2", "1,526", "314", "11.5 s"]
    viewer.screenshot("turns")
    row.locator("a").click()
    expect(page.locator("#m3")).to_be_in_viewport()


def test_notes_of_a_person_are_listed_and_cannot_be_changed(viewer: ViewerPage) -> None:
    viewer.open("/notes?who=telegram:ada")
    page = viewer.page
    expect(page.locator(".note .text")).to_have_text(["Ada lives in Basel.", "Ada is vegetarian."])
    expect(page.locator("main button")).to_have_count(0)
    page.get_by_role("link", name="Show deleted").click()
    expect(page.locator(".note.gone .text")).to_have_text("Ada eats everything.")
    viewer.screenshot("notes")


def test_dark_theme_can_be_changed_and_the_choice_is_kept(
    new_window: NewWindow, served: Served
) -> None:
    with new_window(served, dark=True) as viewer:
        viewer.open_session(PLAN)
        page = viewer.page
        paper = "getComputedStyle(document.body).backgroundColor"
        assert page.evaluate(paper) == "rgb(21, 23, 26)"
        page.locator("#m3").evaluate("message => message.scrollIntoView()")
        viewer.screenshot("dark")
        page.locator("#theme").click()
        assert page.evaluate(paper) == "rgb(251, 250, 247)"
        page.reload()
        assert page.evaluate(paper) == "rgb(251, 250, 247)"


def test_pages_fit_on_a_phone(new_window: NewWindow, served: Served) -> None:
    with new_window(served, phone=True) as viewer:
        page = viewer.page
        viewer.open("/")
        # A phone zooms out of a page that is too wide, which changes innerWidth.
        wide = "document.documentElement.scrollWidth - Math.min(innerWidth, screen.width)"
        assert page.evaluate(wide) <= 0
        viewer.screenshot("phone-list")
        for key in (PLAN, _SHORTENED, _LONG_NAMES):
            for rest in ("", "/context", "/turns"):
                viewer.open_session(key, rest)
                assert page.evaluate(wide) <= 0
                # No number is broken into lines, nor anything of a head or a table over another.
                parts = page.locator("article header > *, .turns tbody .number")
                heights = parts.evaluate_all("all => all.map(one => one.offsetHeight)")
                assert max(heights, default=0) <= 26
                viewer.screenshot(f"phone-{key.partition(':')[2]}{rest.replace('/', '-')}")
        head = page.locator(".turns tbody td").first.bounding_box()
        assert head is not None
        assert head["width"] > 300
        viewer.open("/notes")
        assert page.evaluate(wide) <= 0


def test_shortcuts_of_the_help_dialog_work(viewer: ViewerPage) -> None:
    page = viewer.page
    press = page.keyboard.press
    viewer.open("/")
    press("j")
    press("j")
    press("k")
    expect(page.locator(".row").first).to_have_class("row chosen")
    press("?")
    expect(page.locator("#help")).to_be_visible()
    viewer.screenshot("keys")
    press("Escape")
    expect(page.locator("#help")).to_be_hidden()
    press("Enter")
    page.wait_for_url("**/s/**")
    viewer.open_session(PLAN)
    press("g")
    expect(page.locator("article.chosen")).to_have_id("m1")
    press("]")
    expect(page.locator("article.chosen")).to_have_id("m3")
    press("]")
    expect(page.locator("article.chosen")).to_have_id("m8")
    press("[")
    expect(page.locator("article.chosen")).to_have_id("m3")
    press("j")
    expect(page.locator("article.chosen")).to_have_id("m4")
    press("e")
    assert page.locator("details.tool[open]").count() == 2
    press("e")
    assert page.locator("details.tool[open]").count() == 0
    press("G")
    expect(page.locator("article.chosen")).to_have_id("m9")
    press("/")
    expect(page.locator("#search")).to_be_focused()
    page.keyboard.type("owl")
    press("Enter")
    page.wait_for_url("**q=owl**")
    page.locator("#search").blur()
    press("j")
    expect(page.locator(".row.chosen, .hit.chosen")).to_have_count(1)


def test_context_page_counts_messages_that_are_not_sent(
    tmp_path: Path, new_window: NewWindow
) -> None:
    bodies = [
        {"role": "system", "content": "You are a pirate."},
        {"role": "user", "content": "Tell me everything. " * 900},
        {"role": "assistant", "content": "Everything is this. " * 900},
        {"role": "user", "content": "Thank you."},
    ]
    with open_store(str(tmp_path)) as store:
        store.add_messages("s", bodies)
    spec = AgentSpec(consolidation=False, limits=Limits(max_context_tokens=6_000))
    model = ScriptedModel(["x"], name="http://127.0.0.1:9555/v1#demo-model")
    with Served(tmp_path, model, spec=spec) as served, new_window(served) as viewer:
        viewer.open_session("s", "/context")
        page = viewer.page
        words = page.locator(".cut").inner_text()
        assert words == "3 older messages are not sent."
        assert "demo-model" in page.locator(".lead").inner_text()
        assert "9555" not in page.locator(".lead").inner_text()
        viewer.screenshot("care-context-not-sent")


def test_message_is_shown_as_json(viewer: ViewerPage) -> None:
    viewer.open_session(PLAN)
    page = viewer.page
    page.locator("#m4").hover()
    viewer.screenshot("care-json")
    with page.expect_navigation():
        page.get_by_role("link", name="JSON of message 4").click()
    found = json.loads(page.locator("body").inner_text())
    [message] = found["messages"]
    assert message["seq"] == 4
    assert message["message"]["tool_calls"][0]["id"] == "a"
