"""The pages for people who do not see colours, use only the keyboard, or hear the page."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, Final

import pytest
from playwright.sync_api import Page, expect

from stenolog.agent.spec import AgentSpec
from stenolog.context.window import Limits
from stenolog.memory.facade import open_memory
from stenolog.stores.open_store import open_store
from stenolog.testing.scripted_model import ScriptedModel
from support.axe import serious_problems
from support.gateway.served_gateway import Served
from support.viewer_page import NewWindow, ViewerPage
from support.viewer_samples import LONG, PLAN, WAITING, fill

_CODE: Final = "cli:code"
_TALK: Final = """\
See https://example.org/plan and tick these:

- [x] read the log
- [ ] write the fix

```diff
-total = 0.1
+total = Decimal("0.1")
```

```python
# Round at the end only.
def total(lines: list[int]) -> int:
    return sum(lines) * 1_000 + 0x1F
```
"""


def _said(messages: Any, tools: Any) -> str:
    del tools
    return f"You said: {messages[-1]['content']}"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    place = tmp_path_factory.mktemp("sessions")
    fill(place)
    with open_memory(place, threads=True) as memory:
        memory.remember("Ada is vegetarian.", key=PLAN, about="diet")
        memory.remember("Ada is vegan.", key=PLAN, about="diet")
    with open_store(str(place)) as store, store.lease(WAITING, ttl=600):
        cut = {"role": "assistant", "content": _TALK, "stenolog": {"interrupted": "stopped"}}
        asked = {"role": "user", "content": "Why is the total wrong?"}
        store.add_messages(_CODE, [asked, cut], at=[datetime(2026, 3, 1, 2, 30, tzinfo=UTC)] * 2)
        spec = AgentSpec(consolidation=False, limits=Limits(max_context_tokens=6_000))
        with Served(place, ScriptedModel(_said, pause=0.01), spec=spec) as gateway:
            yield gateway


def _show_all(page: Page) -> None:
    """Show everything that a click may show, but no menu, which would cover the rest."""
    details = page.locator("details:not(.export)")
    details.evaluate_all("all => all.forEach((one) => { one.open = true; })")
    for button in page.locator("[data-show-hidden]").all():
        button.click()
        expect(page.locator(".revealed")).not_to_have_count(0)


@pytest.mark.parametrize(
    ("width", "dark"),
    [
        (1280, False),
        pytest.param(1280, True, marks=pytest.mark.slow),
        pytest.param(1800, False, marks=pytest.mark.slow),
        pytest.param(1800, True, marks=pytest.mark.slow),
        pytest.param(390, False, marks=pytest.mark.slow),
        pytest.param(390, True, marks=pytest.mark.slow),
    ],
)
def test_axe_finds_no_serious_problem(
    new_window: NewWindow, served: Served, width: int, dark: bool
) -> None:
    name = f"{width}-{'dark' if dark else 'light'}"
    problems: dict[str, list[Any]] = {}
    with new_window(served, phone=width == 390, dark=dark) as viewer:
        page = viewer.page
        page.set_viewport_size({"width": width, "height": 860})

        def check(what: str) -> None:
            viewer.screenshot(f"care-{what}-{name}")
            # As tall as the page, so that the text box covers nothing.
            tall = page.evaluate("document.documentElement.scrollHeight")
            page.set_viewport_size({"width": width, "height": tall})
            found = serious_problems(page)
            page.set_viewport_size({"width": width, "height": 860})
            if found:
                problems[what] = found

        viewer.open("/")
        check("list")
        viewer.open("/?q=owl")
        check("search")
        for key in (PLAN, LONG, _CODE):
            viewer.open_session(key)
            _show_all(page)
            check(f"conversation-{key.partition(':')[2]}")
        viewer.open_session(PLAN, "/turns")
        page.locator(".export summary").click()
        check("turns")
        viewer.open_session(LONG, "/context")
        check("context")
        viewer.open("/notes?who=telegram:ada&full=true")
        check("notes")
        viewer.open_session("nobody:here")
        check("error")
        viewer.problems.clear()  # the console names the 404
        page.context.clear_cookies()
        viewer.open("/")
        check("sign-in")
        viewer.problems.clear()
    assert problems == {}, json.dumps(problems, indent=1)


def _focused(page: Page) -> str:
    found: str = page.evaluate("document.activeElement.id || document.activeElement.textContent")
    return found.strip()


def test_keys_move_the_focus_and_expand_tools(viewer: ViewerPage) -> None:
    page = viewer.page
    press = page.keyboard.press
    viewer.open("/")
    press("j")
    press("j")
    row = page.locator("[aria-current=true].row")
    expect(row).to_have_count(1)
    expect(row.locator("a.title")).to_be_focused()
    viewer.open_session(PLAN)
    press("g")
    for _ in range(3):
        press("j")
    message = page.locator("#m4")
    expect(message).to_be_focused()
    expect(message).to_have_attribute("aria-current", "true")
    expect(page.locator("article[tabindex='0']")).to_have_count(1)
    tools = message.locator("details.tool")
    press("Enter")
    assert tools.evaluate_all("all => all.every((one) => one.open)")
    press(" ")
    assert tools.evaluate_all("all => all.every((one) => !one.open)")
    press("e")
    assert page.locator("details.thought[open]").count() > 0
    press("Control+k")
    expect(page.locator("#search")).to_be_focused()


def test_session_can_be_found_and_answered_with_the_keyboard_only(viewer: ViewerPage) -> None:
    page = viewer.page
    press = page.keyboard.press
    viewer.open("/")
    press("Tab")
    assert _focused(page) == "Skip to content"
    press("Enter")
    assert _focused(page) == "main"
    press("/")
    page.keyboard.type("total wrong")
    expect(page.locator(".row")).to_have_count(1)
    press("Escape")
    press("j")
    press("Enter")
    page.wait_for_url("**/s/**")
    press("c")
    page.keyboard.type("Thank you")
    press("Enter")
    expect(page.locator("#announced")).to_contain_text("You said: Thank you")
    expect(page.locator("article.assistant").last).to_contain_text("You said: Thank you")
    press("Escape")
    press("u")
    page.wait_for_url("**/")


def test_controls_and_states_have_accessible_names(viewer: ViewerPage) -> None:
    page = viewer.page
    viewer.open("/")
    expect(page.get_by_role("heading", level=1, name="Sessions")).to_have_count(1)
    expect(page.get_by_role("navigation", name="Main")).to_have_count(1)
    expect(page.get_by_role("img", name="running")).to_have_count(1)
    viewer.open_session(PLAN)
    expect(page.get_by_role("navigation", name="Session")).to_have_count(1)
    expect(page.get_by_role("article", name="Message 3: user")).to_have_count(1)
    expect(page.get_by_role("button", name="Fork from message 3")).to_have_count(1)
    expect(page.get_by_role("link", name="Link to message 3")).to_have_count(1)
    expect(page.get_by_role("log", name="Conversation")).to_have_count(1)
    expect(page.locator("#state")).to_have_attribute("aria-label", "idle")


def test_times_are_shown_in_the_time_zone_of_the_browser(
    new_window: NewWindow, served: Served
) -> None:
    with new_window(served, timezone="America/New_York") as viewer:
        page = viewer.page
        viewer.open_session(_CODE)
        time = page.locator("#m1 time")
        assert time.get_attribute("datetime") == "2026-03-01T02:30:00+00:00"
        expect(time).to_have_text("2026-02-28 21:30")
        expect(time).to_have_attribute("title", "2026-02-28 21:30:00 EST")
        viewer.open_session(_CODE, "/turns")
        expect(page.locator("td time").first).to_have_text("2026-02-28")
