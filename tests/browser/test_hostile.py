"""Whatever stands in a session, its pages run no script but ours and ask nobody else."""

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from playwright.sync_api import expect

from stenolog.memory.facade import open_memory
from stenolog.testing.scripted_model import ScriptedModel
from support.gateway.served_gateway import Served
from support.viewer_page import ViewerPage
from support.viewer_samples import HOSTILE, fill, hostile


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("sessions")
    fill(where)
    return where


@pytest.fixture(scope="module")
def key(place: Path) -> str:
    made = hostile(place)
    with open_memory(place, threads=True) as memory:
        memory.remember(HOSTILE, key=made, about=HOSTILE)
    return made


@pytest.fixture(scope="module")
def served(place: Path, key: str) -> Iterator[Served]:
    del key
    with Served(place, ScriptedModel([HOSTILE] * 9)) as gateway:
        yield gateway


_PATHS = (
    "/",
    "/?q=words",
    f"/?q={quote(HOSTILE)}",
    f"/?tag={quote(HOSTILE)}",
    "/s/{key}",
    "/s/{key}?full=true",
    "/s/{key}?at=1",
    f"/s/{{key}}?q={quote(HOSTILE)}",
    "/s/{key}?tools=false&only=failed",
    "/s/{key}/outline",
    "/s/{key}/turns",
    "/s/{key}/context",
    "/notes",
    "/notes?who={key}",
    f"/s/{quote(HOSTILE, safe='')}",
)


def test_no_field_of_a_session_runs_a_script(viewer: ViewerPage, key: str) -> None:
    page = viewer.page
    for path in _PATHS:
        found = viewer.open(path.replace("{key}", quote(key, safe="")))
        assert found.status == 200 or path == _PATHS[-1]
        page.locator("details").evaluate_all("all => all.forEach(one => { one.open = true; })")
        assert page.evaluate("window.hurt ?? 0") == 0, path
        hurting = page.locator("main script, main svg[onload], main [onerror], main style")
        assert hurting.count() == 0, path
        links = page.locator("main a").evaluate_all(
            "all => all.map(one => one.attributes.href.value)"
        )
        assert [one for one in links if not one.startswith(("/", "#", "https://"))] == [], path
        assert page.locator("main img:not([src^='data:image/'])").count() == 0, path
    # The console tells of the one that is not there.
    assert [words for words in viewer.problems if "404" not in words] == []
    viewer.problems.clear()


def test_messages_that_arrive_live_run_no_script(viewer: ViewerPage, key: str) -> None:
    viewer.open_session(key)
    page = viewer.page
    page.locator("#say textarea").fill(HOSTILE)
    page.keyboard.press("Enter")
    expect(page.locator("article.user").last).to_contain_text("window.hurt=1")
    expect(page.locator("article").last.locator(".who")).to_have_text("assistant")
    expect(page.locator("#send")).to_be_enabled()
    page.locator("[data-undo]").first.click()
    page.locator("dialog[open] button", has_text="Undo").click()
    expect(page.locator(".divider")).to_have_count(0)
    page.locator("#rename").click()
    page.keyboard.press("Enter")
    assert page.evaluate("window.hurt ?? 0") == 0
