"""Tools, copying, covered secrets and pictures in a real browser."""

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from playwright.sync_api import Browser, BrowserContext, Locator, Page, expect

from stenolog.gateway.viewer.export_page import export_pieces
from stenolog.redaction.redact import SharingRedactor
from stenolog.stores.open_store import open_store
from stenolog.testing.scripted_model import ScriptedModel
from support.gateway.served_gateway import Served
from support.tool_samples import CODING, SECRET, fill_tools
from support.viewer_page import ViewerPage, window


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("sessions")
    fill_tools(where)
    return where


@pytest.fixture(scope="module")
def served(place: Path) -> Iterator[Served]:
    with Served(place, ScriptedModel(lambda _messages, _tools: "Hello.")) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def signed_in(browser: Browser, served: Served) -> Iterator[BrowserContext]:
    with window(browser, served) as made:
        made.grant_permissions(["clipboard-read", "clipboard-write"])
        yield made


def _tool(page: Page, name: str) -> Locator:
    return page.locator("details.tool", has=page.locator(f"summary b:text-is('{name}')"))


def _clipboard(page: Page) -> str:
    expect(page.locator("#toast")).to_have_text("Copied")
    page.evaluate("document.querySelector('#toast').textContent = ''")
    text: str = page.evaluate("navigator.clipboard.readText()")
    return text.replace("\r\n", "\n")


# --- tools -----------------------------------------------------------------------------------


def test_tool_summary_shows_the_main_argument_and_the_error(viewer: ViewerPage) -> None:
    viewer.open_session(CODING)
    page = viewer.page
    failed = _tool(page, "Bash")
    assert failed.locator("summary").inner_text().split("\n") == [
        "Bash cd /srv/app && python -m pytest -q · 14.9 s · failed",
        "Exit code 1: ImportError: cannot import name 'CENT' from 'harbour.money'",
    ]
    assert _tool(page, "Grep").locator("summary code").inner_text() == "def total"
    assert _tool(page, "TodoWrite").locator("summary code").inner_text() == "1 of 3 done"
    assert page.locator("details.tool.failed").count() == 1
    viewer.screenshot("tools-folded")


def test_edits_are_shown_as_diffs_and_commands_as_shell(viewer: ViewerPage) -> None:
    viewer.open_session(CODING)
    page = viewer.page
    edit = _tool(page, "Edit")
    edit.locator("summary").click()
    assert edit.locator(".diff .removed").count() == 3
    assert edit.locator(".diff .added").nth(1).inner_text().strip() == "+    result = Decimal(0)"
    assert edit.locator(".label").first.inner_text() == "/srv/app/harbour/invoice.py"
    viewer.screenshot("tools-diff")
    patch = _tool(page, "apply_patch")
    patch.locator("summary").click()
    assert patch.locator(".diff .added").count() == patch.locator(".diff .removed").count() == 1
    shell = _tool(page, "shell")
    shell.locator("summary").first.click()
    assert shell.locator("pre.shell").inner_text().strip() == "seq 1 1500"
    written = _tool(page, "Write")
    written.locator("summary").click()
    assert written.locator("pre .kn").first.inner_text() == "from"
    failed = _tool(page, "Bash")
    failed.locator("summary").click()
    viewer.screenshot("tools-shell-failed")


def test_plan_is_shown_as_a_checklist(viewer: ViewerPage) -> None:
    viewer.open_session(CODING)
    todo = _tool(viewer.page, "TodoWrite")
    todo.locator("summary").click()
    assert todo.locator("li").all_inner_texts() == [
        "☑ Read the failing test",
        "◐ Round in one place",
        "☐ Run all tests",
    ]
    assert todo.get_by_label("in progress").count() == 1
    viewer.screenshot("tools-checklist")


def test_long_output_is_folded_with_its_length(viewer: ViewerPage) -> None:
    viewer.open_session(CODING)
    shell = _tool(viewer.page, "shell")
    shell.locator("summary").first.click()
    more = shell.locator("details.rest > summary")
    assert more.inner_text() == "1,500 lines · show all"
    assert not shell.locator("details.rest > pre").is_visible()
    more.click()
    assert shell.locator("details.rest > pre").inner_text().endswith("line 1500")


# --- copying ---------------------------------------------------------------------------------


def test_copy_buttons_copy_code_messages_links_and_keys(viewer: ViewerPage) -> None:
    viewer.open_session(CODING)
    page = viewer.page
    answer = page.locator("#m11")
    answer.hover()
    answer.locator("[data-copy=message]").click()
    text = _clipboard(page)
    assert text.startswith("Done. Each total is now rounded **once**:\n\n| check |")
    assert SECRET not in text
    assert "[redacted: api key]" in text
    answer.locator("[data-copy=link]").click()
    assert _clipboard(page).endswith("?at=11#m11")
    page.locator("[data-copy=key]").click()
    assert _clipboard(page) == CODING
    answer.locator(".copyable").hover()
    answer.locator("[data-copy=code]").click()
    assert _clipboard(page).endswith("print(total(rows))")
    shell = _tool(page, "shell")
    shell.locator("summary").first.click()
    shell.locator(".result .block").hover()
    shell.locator(".result [data-copy=block]").click()
    assert _clipboard(page).split("\n") == [f"line {number}" for number in range(1, 1501)]


def test_copy_buttons_work_without_the_clipboard_api(viewer: ViewerPage) -> None:
    viewer.page.add_init_script(
        "Object.defineProperty(navigator, 'clipboard', { value: undefined });"
        "document.addEventListener('copy', () => { window.copied = String(getSelection()"
        " || document.activeElement.value); });"
    )
    viewer.open_session(CODING)
    viewer.page.locator("[data-copy=key]").click()
    expect(viewer.page.locator("#toast")).to_have_text("Copied")
    assert viewer.page.evaluate("window.copied") == CODING


# --- secrets and pictures --------------------------------------------------------------------


def test_secrets_are_covered_until_they_are_clicked(viewer: ViewerPage) -> None:
    viewer.open_session(CODING)
    page = viewer.page
    assert SECRET not in page.locator("main").inner_text()
    secret = page.locator("#m1 button.secret")
    assert secret.inner_text() == "api key ••••••"
    viewer.screenshot("tools-secret")
    secret.focus()
    page.keyboard.press("Enter")
    assert secret.inner_text() == SECRET
    page.locator("#m1 [data-copy=message]").click()
    assert SECRET in _clipboard(page)
    page.keyboard.press("Tab")
    secret.click()
    assert secret.inner_text() == "api key ••••••"


def test_secrets_are_covered_in_search_results_and_on_the_context_page(viewer: ViewerPage) -> None:
    page = viewer.page
    for query in ("totals cent", SECRET):
        viewer.open(f"/?q={quote(query)}")
        expect(page.locator(".snippet").first).to_contain_text("[redacted: api key]")
        assert SECRET[8:20] not in page.locator("main").inner_text()
        viewer.screenshot("search-secret")
    viewer.open_session(CODING, "/context")
    page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
    assert SECRET not in page.locator("main").inner_text()
    viewer.screenshot("context-secret")
    secret = page.locator(".exact button.secret").first
    secret.click()
    assert secret.inner_text() == SECRET


def test_picture_is_enlarged_with_mouse_and_keyboard(viewer: ViewerPage) -> None:
    viewer.open_session(CODING)
    page = viewer.page
    picture = page.locator("#m1 img.picture")
    picture.click()
    zoomed = page.locator("dialog.zoom img")
    expect(zoomed).to_be_visible()
    assert zoomed.bounding_box()["width"] > 500  # type: ignore[index]
    page.keyboard.press("Escape")
    expect(page.locator("dialog.zoom")).to_have_count(0)
    picture.focus()
    page.keyboard.press("Enter")
    expect(zoomed).to_be_visible()
    zoomed.click()
    expect(page.locator("dialog.zoom")).to_have_count(0)


# --- the exported page -----------------------------------------------------------------------


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (390, False)])
def test_exported_page_has_no_scripts_and_sends_no_requests(
    browser: Browser, place: Path, tmp_path: Path, screenshots: Path, width: int, dark: bool
) -> None:
    file = tmp_path / "shared.html"
    with open_store(str(place)) as store:
        history = store.get_history(CODING)
        clean = SharingRedactor(enabled=True)
        pieces = export_pieces("html", store.info(CODING), history, clean)
        file.write_bytes(b"".join(pieces))
    assert SECRET not in file.read_text()
    problems: list[str] = []
    with browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme="dark" if dark else "light"
    ) as context:
        page = context.new_page()
        page.on("console", lambda message: problems.append(message.text))
        page.on("request", lambda request: problems.append(request.url))
        page.goto(file.as_uri())
        problems.remove(file.as_uri())
        assert [one for one in problems if not one.startswith("data:image/png;")] == []
        assert page.locator("script").count() == 0
        paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert paper == ("rgb(21, 23, 26)" if dark else "rgb(251, 250, 247)")
        assert page.evaluate("document.documentElement.scrollWidth") == width
        assert page.locator(".totals .bad dd").inner_text() == "1"
        _tool(page, "Edit").locator("summary").click()
        assert _tool(page, "Edit").locator(".diff .added").count() == 3
        assert page.locator("#m11 table td").first.inner_text() == "cents"
        assert page.locator("#m11 pre .kn").count() == 1
        page.screenshot(
            path=str(screenshots / f"tools-export-{width}{'-dark' if dark else ''}.png")
        )
        page.locator(".outline a").nth(1).click()
        expect(page.locator("#m12")).to_be_in_viewport()
