"""The resume picker: what matches as one types, what is drawn, and what is chosen by which key."""

import asyncio
import io
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.data_structures import Size
from prompt_toolkit.input.defaults import create_pipe_input
from prompt_toolkit.output.vt100 import Vt100_Output

from stenolog.catalog import Catalog, open_catalog
from stenolog.cli import picker
from stenolog.cli.chat import find_last_session
from stenolog.cli.picker import (
    Choices,
    Picker,
    find_sessions,
    search_messages,
)
from stenolog.stores.base import Store
from stenolog.stores.open_store import open_store
from support.terminal import Terminal

BIKE, CAKE, TRIP, CHAT = "cli:1:default", "cli:2:default", "cli:3:default", "telegram:7"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(tmp_path / "workspace") as opened:
        for key, question, answer in (
            (CHAT, "Bike lamps?", "Two of them."),
            (BIKE, "My bike is broken", "The chain?"),
            (CAKE, "How to bake", "Take 200 g of flour."),
            (TRIP, "Where to go", "To the mountains, by bike or by train."),
        ):
            opened.add_message(key, "user", question)
            opened.add_message(key, "assistant", answer)
        yield opened


@pytest.fixture
def catalog(store: Store) -> Iterator[Catalog]:
    with open_catalog(store) as opened:
        yield opened


def keys(choices: Choices) -> list[str]:
    return [entry.key for entry in choices.matches]


def loaded(catalog: Catalog, *, channel: str | None = None) -> Choices:
    choices = Choices(channel=channel)
    choices.add(catalog.list(limit=100).entries)
    return choices


def test_all_sessions_are_listed_newest_first_without_a_query(catalog: Catalog) -> None:
    assert keys(loaded(catalog)) == [TRIP, CAKE, BIKE, CHAT]


def test_all_words_must_be_in_title_key_or_prompt(catalog: Catalog) -> None:
    choices = loaded(catalog)
    choices.set_query("BIKE bro")
    assert keys(choices) == [BIKE]
    choices.set_query("cli:2")
    assert keys(choices) == [CAKE]
    choices.set_query("nothing of it")
    assert (keys(choices), choices.selection) == ([], None)


def test_message_hits_follow_title_matches(catalog: Catalog) -> None:
    choices = loaded(catalog)
    choices.set_query("bik")
    assert keys(choices) == [BIKE, CHAT]
    choices.add_hits("bik", search_messages(catalog, "bik"))
    assert keys(choices) == [BIKE, CHAT, TRIP]
    assert list(choices.hits) == [TRIP]
    choices.set_query("bike la")
    assert keys(choices) == [CHAT]


def test_late_hits_are_dropped(catalog: Catalog) -> None:
    choices = loaded(catalog)
    choices.set_query("bake")
    choices.add_hits("bike", search_messages(catalog, "bike"))
    assert keys(choices) == [CAKE]


def test_only_the_last_word_is_a_prefix(catalog: Catalog) -> None:
    assert {hit.key for hit in search_messages(catalog, "bik")} == {BIKE, CHAT, TRIP}
    assert [hit.key for hit in search_messages(catalog, "bike mount")] == [TRIP]
    assert search_messages(catalog, "bik mountains") == []
    assert search_messages(catalog, "") == ()


def test_only_sessions_of_the_channel_match(catalog: Catalog) -> None:
    choices = loaded(catalog, channel="cli")
    choices.set_query("lamps")
    assert keys(choices) == []
    choices.set_channel(None)
    assert keys(choices) == [CHAT]


def test_selection_is_kept_when_matches_arrive(catalog: Catalog) -> None:
    choices = loaded(catalog)
    choices.set_query("bik")
    choices.move(1)
    choices.add_hits("bik", search_messages(catalog, "bik"))
    assert choices.selection is not None
    assert choices.selection.key == CHAT
    choices.move(99)
    assert choices.selected_row == 2
    choices.move(-99)
    assert choices.selected_row == 0


def test_text_selects_its_exact_key_or_all_matches(store: Store, catalog: Catalog) -> None:
    store.add_message("cli:1:default:more", "user", "x")
    assert [entry.key for entry in find_sessions(catalog, BIKE)] == [BIKE]
    assert [entry.key for entry in find_sessions(catalog, "bike")] == [BIKE, CHAT]
    assert [entry.key for entry in find_sessions(catalog, "mountains")] == [TRIP]
    assert find_sessions(catalog, "zebra") == []


def test_newest_session_of_a_channel_is_readable(store: Store, catalog: Catalog) -> None:
    assert getattr(find_last_session(catalog, channel="cli"), "key", "") == TRIP
    assert getattr(find_last_session(catalog, channel="telegram"), "key", "") == CHAT
    assert find_last_session(catalog, channel="slack") is None
    store.set_meta("cli:empty", title="no word was said here")
    assert getattr(find_last_session(catalog, channel="cli"), "key", "") == TRIP


# --- the list on the screen ----------------------------------------------------------------------


class Drawn(io.StringIO):
    """The picker with keys that are sent to it, and a terminal that shows it."""

    def __init__(self, catalog: Catalog, *, rows: int = 30, columns: int = 80) -> None:
        super().__init__()
        self._catalog = catalog
        self.size = Size(rows=rows, columns=columns)
        self.terminal = Terminal(rows=rows, columns=columns)
        self.written = ""

    def write(self, text: str) -> int:
        self.written += text
        self.terminal.feed(text)
        return len(text)

    def choose(self, typed: str, *, text: str = "", channel: str | None = None) -> str | None:
        """What is chosen by these keys, which are all there from the beginning."""
        return asyncio.run(self._run(typed, text=text, channel=channel))

    def see(self, typed: str = "", *, until: str = "Enter resume") -> list[str]:
        """The lines on the screen as soon as they contain this text; then Esc is pressed."""
        return asyncio.run(self._see(typed, until))

    async def _run(self, typed: str, *, text: str = "", channel: str | None = None) -> str | None:
        output = Vt100_Output(self, lambda: self.size, term="xterm", enable_cpr=False)
        with create_pipe_input() as self.source, create_app_session(self.source, output):
            self.source.send_text(typed)
            picking = Picker(self._catalog, channel=channel).run(text)
            entry = await asyncio.wait_for(picking, 20)
            return None if entry is None else entry.key

    async def _see(self, typed: str, until: str) -> list[str]:
        running = asyncio.create_task(self._run(typed))
        with suppress(TimeoutError):
            async with asyncio.timeout(15):
                while until not in self.terminal.screen:  # noqa: ASYNC110 - writing has no event
                    await asyncio.sleep(0.01)
        lines = self.terminal.screen.splitlines()
        self.source.send_text("\x1b")
        assert await running is None
        assert until in "\n".join(lines)
        return lines


def test_rows_fit_the_terminal_and_have_age_messages_and_title(
    store: Store, catalog: Catalog
) -> None:
    store.add_message("cli:9:default", "user", "日本語 " * 40 + "\x1b[2J\n")
    drawn = Drawn(catalog, columns=80)
    lines = drawn.see()
    assert re.fullmatch(r">\s+now\s+1 ◐ 日本語 .*…", lines[1])
    assert re.fullmatch(r"\s+now\s+2\s+Where to go", lines[2])
    # Each of these characters is two columns wide.
    assert max(len(line) + len(re.findall("[日本語]", line)) for line in lines) < 80
    assert "\x1b[2J" not in drawn.written


@pytest.mark.parametrize(("rows", "columns"), [(30, 80), (10, 40), (5, 20), (2, 2)])
def test_list_fits_a_small_terminal(store: Store, rows: int, columns: int) -> None:
    for number in range(30):
        store.add_message(f"many:{number}", "user", f"number {number} " + "long " * 30)
    with open_catalog(store) as catalog:
        drawn = Drawn(catalog, rows=rows, columns=columns)
        assert drawn.choose("\x1b[B\r") == "many:28"
        assert drawn.terminal.all == ""


def test_detail_of_a_multiline_message_is_one_line(store: Store, catalog: Catalog) -> None:
    store.add_message("cli:9:default", "user", "What is wrong here?\n\nsome log text")
    lines = Drawn(catalog).see()
    assert "  What is wrong here? some log text" in lines
    assert [line for line in lines if line.startswith("  cli:9:default · 1 message · ≈")]


def test_long_list_scrolls_to_the_selected_session(store: Store, catalog: Catalog) -> None:
    for number in range(40):
        store.add_message(f"many:{number}", "user", f"number {number}")
    for presses, chosen in ((20, "number 19"), (43, "Bike lamps?")):
        lines = Drawn(catalog).see("\x1b[B" * presses, until=f" {chosen}\n")
        (row,) = [line for line in lines[1:] if line.startswith(">") and len(line) > 2]
        assert row.endswith(chosen)
        assert lines[-1] == ">"
        assert len(lines) == 20


def test_hit_in_a_message_is_shown(catalog: Catalog) -> None:
    lines = Drawn(catalog).see("mountains", until="[2] assistant: To the mountains")
    assert lines[0] == "Resume a session  all channels · 1 session"
    assert "Where to go  …To the mountains" in lines[1]


def test_no_match_is_said(catalog: Catalog) -> None:
    lines = Drawn(catalog).see("zebra", until="No matching sessions.")
    assert lines[0] == "Resume a session  all channels · 0 sessions"
    assert lines[-1] == "> zebra"


@pytest.mark.parametrize(
    ("typed", "chosen"),
    [
        ("\r", TRIP),
        ("\x1b[B\r", CAKE),
        ("\x1b[B\x1b[B\x1b[A\r", CAKE),
        ("bake\r", CAKE),
        ("mountains\r", TRIP),
        ("lamps\t\r", CHAT),
        ("zebra\r\x1b", None),
        ("\x1b", None),
        ("\x03", None),
        ("\x04", None),
    ],
    ids=repr,
)
def test_keys_choose_a_session(catalog: Catalog, typed: str, chosen: str | None) -> None:
    assert Drawn(catalog).choose(typed, channel="cli") == chosen


def test_picker_starts_with_the_given_filter_and_shows_the_keyboard_hints(catalog: Catalog) -> None:
    drawn = Drawn(catalog)
    assert drawn.choose("\r", text="flour") == CAKE
    written = drawn.written
    assert "Resume a session" in written
    assert "type to filter · ↑↓ select · Enter resume · Esc cancel" in written
    # It never takes the screen over, and leaves nothing behind.
    assert "\x1b[?1049h" not in written
    assert "\x1b[J" in written[-80:]


def test_more_sessions_than_a_page_are_all_found(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(picker, "_FIRST_PAGE_SIZE", 2)
    assert Drawn(catalog).choose("lamps\r") == CHAT
