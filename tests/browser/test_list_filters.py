"""Filters, orders, groups, search results, actions and the trash of the list of sessions."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from stenolog.stores.base import Store
from stenolog.stores.open_store import open_store
from stenolog.testing.scripted_model import ScriptedModel
from support.gateway.served_gateway import Served
from support.viewer_page import NewWindow, ViewerPage, window

NOW = datetime.now(UTC)


def _answer(text: str, model: str, prompt: int) -> dict[str, Any]:
    usage = {"prompt": prompt, "answer": 100, "cached": 0}
    return {"role": "assistant", "content": text, "stenolog": {"model": model, "usage": usage}}


def _add(
    store: Store,
    key: str,
    prompt: str,
    *,
    days: float,
    project: str = "",
    model: str = "gpt-4o",
    tokens: int = 1_000,
    failed: bool = False,
) -> None:
    result = {"role": "tool", "tool_call_id": "1", "content": '{"found": "an invoice"}'}
    bodies: list[dict[str, Any]] = [
        {"role": "user", "content": prompt},
        {**result, "stenolog": {"seconds": 1.0, "failed": failed}},
        _answer("All done with the invoice.", model, tokens),
    ]
    at = NOW - timedelta(days=days)
    store.add_messages(key, bodies, at=[at + timedelta(seconds=n) for n in range(len(bodies))])
    if project:
        program = key.partition(":")[0]
        store.set_meta(key, transcript={"program": program, "folders": [project]})


def _fill(store: Store) -> None:
    _add(store, "codex:1", "Fix the rounding", days=1, project="/srv/billing", tokens=90_000)
    _add(store, "codex:2", "Deploy it", days=2, project="/srv/billing", failed=True)
    _add(store, "claude-code:3", "Draw a logo", days=3, project="/srv/site", model="gpt-5")
    _add(store, "claude-code:4", "Old things", days=100, project="/srv/site")
    _add(store, "cli:own", "Just talking", days=4, model="my-own-model")
    store.fork("codex:1", "cli:forked")
    store.set_meta("cli:own", tags=["mine"])


@pytest.fixture
def place(tmp_path: Path) -> Path:
    with open_store(str(tmp_path)) as store:
        _fill(store)
    return tmp_path


@pytest.fixture
def viewer(place: Path, browser: Browser, screenshots: Path) -> Iterator[ViewerPage]:
    with (
        Served(place, ScriptedModel(["x"])) as served,
        window(browser, served) as context,
        ViewerPage(context, served, screenshots) as made,
    ):
        yield made


def _keys(page: Page) -> list[str]:
    return page.locator(".row .key").all_inner_texts()


def test_rows_show_cost_model_program_project_failures_and_the_total(viewer: ViewerPage) -> None:
    page = viewer.page
    viewer.open("/")
    expect(page.locator("#total")).to_contain_text("6 sessions · $0.2")
    expect(page.locator("#total")).to_contain_text("1 with failed tools")
    row = page.locator(".row", has_text="Deploy it")
    expect(row.locator(".failures")).to_have_text("1 failed")
    expect(row.locator(".cost")).to_have_text("$0.0035")
    expect(row.locator(".channel")).to_have_text("codex")
    expect(row.locator(".project")).to_have_text("billing")
    expect(row.locator(".project")).to_have_attribute("title", "/srv/billing")
    expect(row.locator(".model")).to_have_text("gpt-4o")
    own = page.locator(".row", has_text="Just talking")
    expect(own.locator(".cost")).to_have_text("")
    viewer.screenshot("list-columns")


def test_forks_are_marked_and_lead_to_their_source(viewer: ViewerPage) -> None:
    page = viewer.page
    viewer.open("/")
    fork = page.locator(".row", has=page.locator(".fork-mark"))
    expect(fork).to_have_count(1)
    expect(fork.locator(".key")).to_have_text("cli:forked")
    expect(fork.locator(".fork-of")).to_have_text("fork of codex:1 at 3")
    fork.locator(".fork-of").click()
    page.wait_for_url("**/s/codex%3A1#m3")


def test_facets_filter_with_counts_and_short_addresses(viewer: ViewerPage) -> None:
    page = viewer.page
    viewer.open("/")
    facet = page.locator("#facets section", has_text="Program").locator("a")
    expect(facet).to_have_text([r"codex 3", r"claude-code 2"], use_inner_text=True)
    page.locator("#facets a", has_text="claude-code").first.click()
    page.wait_for_url("**/?program=claude-code")
    assert _keys(page) == ["claude-code:3", "claude-code:4"]
    page.locator("#facets a", has_text="last 30 days").click()
    page.wait_for_url("**/?program=claude-code&since=30d")
    assert _keys(page) == ["claude-code:3"]
    expect(page.locator("#total")).to_contain_text("1 session")
    page.locator(".chosen-filters .chip", has_text="program").click()
    page.wait_for_url("**/?since=30d")
    page.locator("#facets a", has_text="has failed tools").click()
    assert _keys(page) == ["codex:2"]
    page.locator(".clear").click()
    page.wait_for_url(lambda url: url.endswith("/"))
    expect(page.locator(".row")).to_have_count(6)
    for facet_text, keys in (("gpt-5", ["claude-code:3"]), ("mine", ["cli:own"])):
        page.locator("#facets a", has_text=facet_text).click()
        expect(page.locator(".row .key")).to_have_text(keys)
        viewer.open("/")
    viewer.screenshot("list-facets")


def test_project_filter_tells_folders_with_the_same_name_apart(
    viewer: ViewerPage, place: Path
) -> None:
    with open_store(str(place)) as store:
        _add(store, "codex:8", "Ships", days=1, project="/data/ada/harbour")
        _add(store, "codex:9", "Cranes", days=1, project="/srv/harbour")
    page = viewer.page
    viewer.open("/")
    section = page.locator("#facets section", has_text="Project")
    names = section.locator("li span").all_inner_texts()
    assert sorted(names) == ["ada/harbour", "billing", "site", "srv/harbour"]
    viewer.screenshot("list-same-project-names")
    section.locator("a", has_text="srv/harbour").click()
    page.wait_for_url("**/?project=%2Fsrv%2Fharbour")
    assert _keys(page) == ["codex:9"]


def test_date_filter_keeps_empty_fields_out_of_the_address(viewer: ViewerPage) -> None:
    page = viewer.page
    viewer.open("/?program=claude-code")
    day = f"{NOW - timedelta(days=50):%Y-%m-%d}"
    page.locator("input[name=until]").fill(day)
    page.locator(".dates button").click()
    page.wait_for_url(f"**/?program=claude-code&until={day}")
    assert _keys(page) == ["claude-code:4"]
    viewer.open("/")
    page.locator("#search").fill("zzzz")
    expect(page.locator(".sessions .empty")).to_contain_text("No matching sessions")
    page.locator("#search").fill("")
    expect(page.locator(".row")).to_have_count(6)
    assert page.url.endswith("/"), page.url


def test_filter_keeps_the_search_words(viewer: ViewerPage) -> None:
    page = viewer.page
    viewer.open("/")
    page.locator("#search").fill("invoice")
    expect(page.locator(".group")).to_have_count(6)
    expect(page.locator(".group .failures")).to_have_count(1)
    page.locator("#facets a", has_text="has failed tools").click()
    page.wait_for_url("**/?failed=true&q=invoice")
    expect(page.locator(".group")).to_have_count(1)
    expect(page.locator(".group .failures")).to_have_text("1 failed")
    viewer.screenshot("list-search-failed")


def test_list_is_sorted_by_cost_tokens_length_and_age(viewer: ViewerPage) -> None:
    page = viewer.page
    viewer.open("/")
    page.locator("#sort").select_option("cost")
    page.wait_for_url("**/?sort=cost")
    assert _keys(page)[0] == "codex:1"
    page.locator("#sort").select_option("oldest")
    page.wait_for_url("**/?sort=oldest")
    assert _keys(page)[0] == "claude-code:4"
    viewer.open("/?sort=tokens")
    assert _keys(page)[0] == "codex:1"
    page.locator("#sort").select_option("")
    page.wait_for_url(lambda url: url.endswith("/"))
    found = viewer.open("/?sort=size")
    assert found.status == 400
    viewer.problems.clear()  # the console tells of the 400


def test_sessions_are_grouped_by_project(viewer: ViewerPage) -> None:
    page = viewer.page
    viewer.open("/")
    page.locator(".chip", has_text="By project").click()
    page.wait_for_url("**/?by=project")
    heads = page.locator(".project-head")
    expect(heads.locator("a")).to_have_text(["billing", "site", "No project"])
    expect(heads.first).to_contain_text("3 sessions")
    expect(heads.first.locator(".cost")).to_contain_text("$0.2")
    assert _keys(page)[:3] == ["cli:forked", "codex:1", "codex:2"]
    viewer.screenshot("list-projects")
    heads.nth(2).locator("a").click()
    page.wait_for_url("**/?project=-")
    assert _keys(page) == ["cli:own"]


def test_search_results_are_grouped_by_session_with_a_link_to_the_rest(
    viewer: ViewerPage, place: Path
) -> None:
    with open_store(str(place)) as store:
        for number in range(12):
            store.add_message("cli:own", "user", f"Where is invoice {number}?")
    page = viewer.page
    viewer.open("/?q=invoice")
    own = page.locator(".group", has_text="Just talking")
    expect(own.locator(".hit")).to_have_count(3)
    expect(own.locator(".who").first).to_have_text("user")
    more = own.locator(".more-here")
    expect(more).to_have_text("11 more in this session")
    expect(more).to_have_attribute("href", "/s/cli%3Aown?q=invoice")
    # Words of people come before the output of tools.
    other = page.locator(".group", has_text="Draw a logo").locator(".who")
    expect(other).to_have_text(["assistant", "tool"])
    expect(page.locator(".kinds .chip")).to_have_text(["All", "Sessions 0", "Messages 24"])
    viewer.screenshot("list-search")
    page.locator(".kinds .chip", has_text="Messages").click()
    page.wait_for_url("**/?q=invoice&show=messages")
    expect(page.locator(".group")).to_have_count(6)


def test_more_search_results_load_while_scrolling(viewer: ViewerPage, place: Path) -> None:
    with open_store(str(place)) as store:
        for number in range(40):
            store.add_message(f"cli:more{number:02}", "user", "One more zeppelin.")
    page = viewer.page
    viewer.open("/?q=zeppelin")
    groups = page.locator(".group")
    while groups.count() < 40:
        loaded = groups.count()
        groups.last.scroll_into_view_if_needed()
        expect(groups).not_to_have_count(loaded)
    expect(groups).to_have_count(40)
    titles = page.locator(".group .key").all_inner_texts()
    assert len(set(titles)) == 40
    page.locator(".kinds .chip", has_text="Sessions").click()
    expect(page.locator(".row")).to_have_count(40)


def test_back_keeps_the_loaded_rows_and_the_scroll_position(
    tmp_path_factory: pytest.TempPathFactory, new_window: NewWindow
) -> None:
    place = tmp_path_factory.mktemp("many")
    with open_store(str(place)) as store:
        for number in range(320):
            store.add_message(f"cli:user{number:03}", "assistant", "Hello.")
    with Served(place, ScriptedModel(["x"])) as served, new_window(served) as viewer:
        page = viewer.page
        viewer.open("/")
        rows = page.locator(".row")
        while rows.count() < 250:
            loaded = rows.count()
            page.keyboard.press("G")
            expect(rows).not_to_have_count(loaded)
        row = rows.nth(205)
        row.scroll_into_view_if_needed()
        key = row.locator(".key").inner_text()
        before = row.evaluate("one => one.getBoundingClientRect().top")
        row.locator(".title").click()
        page.wait_for_selector("#session")
        page.go_back()
        same = page.locator(".row", has_text=key)
        expect(same).to_be_in_viewport()
        assert rows.count() >= 250
        after = same.evaluate("one => one.getBoundingClientRect().top")
        assert abs(after - before) < 3


# Pixels between an element and the last word before it.
_GAP_BEFORE = """one => {
  const text = one.previousSibling;
  const range = document.createRange();
  range.setStart(text, 0);
  range.setEnd(text, text.data.trimEnd().length);
  return one.getBoundingClientRect().left - range.getBoundingClientRect().right;
}"""


def test_delete_asks_first_and_the_trash_restores_the_session(viewer: ViewerPage) -> None:
    page = viewer.page
    viewer.open("/")
    page.locator("#select").click()
    expect(page.locator("[data-act=delete]")).to_be_disabled()
    page.locator(".row", has_text="Deploy it").click()
    page.locator(".row", has_text="Draw a logo").locator(".pick").check()
    expect(page.locator("#chosen-count")).to_have_text("2 selected")
    viewer.screenshot("list-select")
    page.locator("[data-act=delete]").click()
    dialog = page.locator("dialog[open]")
    expect(dialog).to_contain_text("Move 2 sessions to the trash?")
    expect(dialog.locator("li")).to_have_text(["Deploy it", "Draw a logo"])
    dialog.locator("button", has_text="Cancel").click()
    expect(page.locator(".row")).to_have_count(6)
    page.locator("[data-act=delete]").click()
    viewer.screenshot("list-delete")
    page.locator("dialog[open] button.danger").click()
    expect(page.locator("#toast")).to_have_text("Moved 2 sessions to the trash.")
    expect(page.locator(".row")).to_have_count(4)
    page.locator(".tools a", has_text="Trash").click()
    page.wait_for_url("**/trash")
    expect(page.locator(".row")).to_have_count(2)
    viewer.screenshot("list-trash")
    assert page.locator(".row time").first.evaluate(_GAP_BEFORE) < 6
    page.locator(".row", has_text="codex:2").locator("button").click()
    expect(page.locator("#toast")).to_have_text("Restored codex:2.")
    expect(page.locator(".row")).to_have_count(1)
    viewer.open("/")
    assert "codex:2" in _keys(page)
    assert "claude-code:3" not in _keys(page)


def test_archive_asks_first_and_moves_summarized_messages(viewer: ViewerPage, place: Path) -> None:
    with open_store(str(place)) as store:
        store.add_message("cli:own", "user", "Go on.")
        store.checkpoint("cli:own", summary="They talked.", upto=3)
    page = viewer.page
    viewer.open("/")
    page.locator("#select").click()
    page.locator(".row", has_text="Just talking").locator(".pick").check()
    page.locator("[data-act=archive]").click()
    expect(page.locator("dialog[open]")).to_contain_text(
        "Archive the summarized messages of 1 session?"
    )
    page.locator("dialog[open] button", has_text="Archive").click()
    expect(page.locator("#toast")).to_have_text("Archived 3 messages of 1 session.")
    with open_store(str(place)) as store:
        assert store.info("cli:own").archived == 3


def test_list_fits_on_a_phone_and_opens_its_filters(place: Path, new_window: NewWindow) -> None:
    with Served(place, ScriptedModel(["x"])) as served, new_window(served, phone=True) as viewer:
        page = viewer.page
        for address in ("/", "/?by=project", "/?q=invoice", "/trash"):
            viewer.open(address)
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), address
        viewer.open("/")
        expect(page.locator("#facets")).to_be_hidden()
        page.locator("#show-facets").click()
        expect(page.locator("#facets")).to_be_visible()
        viewer.screenshot("list-phone-filters")
        page.locator("#facets a", has_text="codex").first.click()
        page.wait_for_url("**/?program=codex")
