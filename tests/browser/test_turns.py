"""The timeline of a session in a real browser: drawn by uPlot, with what it cost."""

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from playwright.sync_api import Locator, expect

from stenolog.sessions.usage import updated_side_usage
from stenolog.stores.open_store import open_store
from stenolog.testing.scripted_model import ScriptedModel
from support.gateway.served_gateway import Served
from support.prices import price_package
from support.viewer_page import ViewerPage
from support.viewer_samples import HOSTILE, PLAN, fill

_PRICES = """
class Usage:
    def __init__(self, input_tokens, output_tokens, cache_read_tokens):
        self.all = input_tokens, output_tokens

class Price:
    def __init__(self, total):
        self.total_price = total

def calc_price(usage, model_ref, provider_id=None):
    if model_ref != "qwen3-4b":
        raise LookupError(model_ref)
    read, written = usage.all
    return Price((read + 4 * written) / 1_000_000)
"""
_HURT = "s:hostile"
_SIDE = "cli:side"
_INKS = """canvas => {
  const copy = new OffscreenCanvas(canvas.width, canvas.height);
  const onto = copy.getContext("2d", { willReadFrequently: true });
  onto.drawImage(canvas, 0, 0);
  const { data } = onto.getImageData(0, 0, canvas.width, canvas.height);
  const found = new Set();
  for (let at = 0; at < data.length; at += 4) {
    if (data[at + 3] === 255) found.add(`rgb(${data[at]}, ${data[at + 1]}, ${data[at + 2]})`);
  }
  return [...found];
}"""
"""The colours that were drawn."""
_WANTED = """(chart, names) => names.map(name => {
  const probe = document.createElement("i");
  probe.style.color = getComputedStyle(chart).getPropertyValue(name);
  chart.append(probe);
  const made = getComputedStyle(probe).color;
  probe.remove();
  return made;
})"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    place = tmp_path_factory.mktemp("sessions")
    fill(place)
    mark: dict[str, Any] = {"model": HOSTILE, "usage": {"prompt": 50, "answer": 20, "cached": 0}}
    with open_store(str(place)) as store:
        for _ in range(3):
            store.add_message(_HURT, "user", HOSTILE)
            body = {"role": "assistant", "content": HOSTILE, "stenolog": mark}
            store.add_full_message(_HURT, body)
        used = {"qwen3-4b": {"calls": 2, "prompt": 40_000, "answer": 5_000, "cached": 0}}
        answer = {"model": "qwen3-4b", "usage": {"prompt": 3_000, "answer": 250, "cached": 0}}
        store.add_message(_SIDE, "user", "Hello.")
        store.add_full_message(_SIDE, {"role": "assistant", "content": "Hi.", "stenolog": answer})
        store.set_meta(_SIDE, **updated_side_usage({}, store.info(_SIDE).uid, used))
    # No package knows what a model of the samples costs.
    prices = ModuleType("genai_prices")
    exec(_PRICES, vars(prices))
    with price_package(prices), Served(place, ScriptedModel(["x"])) as gateway:
        yield gateway


def _has_colours(chart: Locator, *names: str) -> bool:
    inks = chart.locator("canvas").evaluate(_INKS)
    return set(chart.evaluate(_WANTED, list(names))) <= set(inks)


def test_chart_shows_tokens_and_cost_of_each_turn(viewer: ViewerPage) -> None:
    viewer.open_session(PLAN, "/turns")
    page = viewer.page
    chart = page.locator("#chart")
    expect(chart.locator("canvas")).to_be_visible()
    assert _has_colours(chart, "--c-summary", "--c-history", "--c-tools")
    assert "$0.0047" in page.locator(".lead").inner_text()
    row = page.locator(".turns tbody tr", has_text="Lugano")
    assert row.locator("[data-name=cost]").inner_text() == "$0.0028"
    assert page.locator("main .hint").count() == 0
    viewer.screenshot("turns-priced")


@pytest.mark.slow
def test_chart_labels_the_turn_under_the_pointer_and_opens_it_on_click(viewer: ViewerPage) -> None:
    viewer.open_session(PLAN, "/turns")
    page = viewer.page
    area = page.locator("#chart .u-over")
    box = area.bounding_box()
    assert box is not None
    # Eight places, of which the second is the turn with the trains.
    spot = {"x": box["width"] * 1.5 / 8, "y": box["height"] / 2}
    area.hover(position=spot)  # type: ignore[arg-type]
    expect(page.locator("#chart-label")).to_contain_text(
        "1,526 input tokens · 314 output tokens · $0.0028"
    )
    area.click(position=spot)  # type: ignore[arg-type]
    page.wait_for_url("**?at=3#m3")
    expect(page.locator("#m3")).to_be_in_viewport()


def test_chart_shows_hostile_prompts_as_text(viewer: ViewerPage) -> None:
    viewer.open_session(_HURT, "/turns")
    page = viewer.page
    expect(page.locator("#chart canvas")).to_be_visible()
    area = page.locator("#chart .u-over")
    box = area.bounding_box()
    assert box is not None
    area.hover(position={"x": box["width"] / 16, "y": box["height"] / 2})
    expect(page.locator("#chart-label")).to_contain_text("<script>window.hurt=1</script>")
    assert "No known price for <script>" in page.locator("main .hint").inner_text()
    assert page.evaluate("window.hurt ?? 0") == 0
    assert page.locator("main script, main svg, main img").count() == 0


def test_cost_of_notes_and_summaries_is_shown_separately(viewer: ViewerPage) -> None:
    viewer.open_session(_SIDE, "/turns")
    lead = viewer.page.locator(".lead")
    expect(lead).to_contain_text("$0.0640, of which notes and summaries $0.0600")
    expect(viewer.page.locator("#side")).to_have_text(
        "Notes and summaries of this session used another 45,000 tokens."
    )
    viewer.screenshot("care-turns-side")
