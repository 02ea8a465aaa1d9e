"""The resume picker: what matches as one types, what is drawn, and what is chosen by which key."""

import asyncio
import io
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from prompt_toolkit.data_structures import Size
from prompt_toolkit.input.defaults import create_pipe_input
from prompt_toolkit.output.vt100 import Vt100_Output

from stenolog.catalog import Catalog, open_catalog
from stenolog.cli import picker
from stenolog.cli.picker import (
    Choices,
    Picker,
    find_last_session,
    find_sessions,
    load_sessions,
    prefix_query,
    search_messages,
)
from stenolog.stores.base import Store
from stenolog.stores.open_store import open_store

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
    load_sessions(catalog, choices)
    return choices


def text_of(fragments: object) -> str:
    assert isinstance(fragments, list)
    return "".join(part[1] for part in fragments)


def test_detail_of_a_multiline_message_is_one_line(tmp_path: Path) -> None:
    with open_store(tmp_path / "workspace") as store, open_catalog(store) as catalog:
        store.add_message(CHAT, "user", "What is wrong here?\n\nsome log text")
        shown_in = Picker(catalog)
        load_sessions(catalog, shown_in.choices)
        shown = text_of(shown_in.selection_detail(80))
    assert shown.splitlines()[0].rstrip() == "  What is wrong here? some log text"


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
    choices.set_query("bike la")
    assert keys(choices) == [CHAT]


def test_late_hits_are_dropped(catalog: Catalog) -> None:
    choices = loaded(catalog)
    choices.set_query("bake")
    choices.add_hits("bike", search_messages(catalog, "bike"))
    assert keys(choices) == [CAKE]


def test_only_the_last_word_is_a_prefix() -> None:
    assert [prefix_query(typed) for typed in ("bik", "bik ", 'a "b"')] == ["bik*", "bik ", 'a "b"']


def test_tab_shows_other_channels(catalog: Catalog) -> None:
    choices = loaded(catalog, channel="cli")
    choices.set_query("lamps")
    assert (keys(choices), choices.other_match_count) == ([], 1)
    choices.toggle_channel()
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


def test_rows_fit_the_terminal_and_have_age_messages_and_title(
    store: Store, catalog: Catalog
) -> None:
    store.add_message("cli:9:default", "user", "日本語 " * 40 + "\x1b[2J")
    shown = Picker(catalog)
    load_sessions(catalog, shown.choices)
    rows = text_of(shown.session_rows(50, 10)).split("\n")
    assert re.fullmatch(r">\s+now\s+1 ◐ 日本語 .*… *", rows[0])
    assert re.fullmatch(r"\s+now\s+2\s+Where to go *", rows[1])
    # Each of these characters is two columns wide.
    assert max(len(row) + len(re.findall("[日本語]", row)) for row in rows) < 50
    assert "\x1b" not in "".join(rows)


def test_long_list_scrolls_to_the_selected_session(store: Store, catalog: Catalog) -> None:
    for number in range(30):
        store.add_message(f"many:{number}", "user", f"number {number}")
    shown = Picker(catalog)
    load_sessions(catalog, shown.choices)
    shown.choices.move(20)
    rows = text_of(shown.session_rows(60, 5)).split("\n")
    assert len(rows) == 5
    assert [row.startswith(">") for row in rows] == [False] * 4 + [True]


class Drawn:
    """The picker with keys that are sent to it, and what it writes."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self.written = io.StringIO()

    def choose(self, typed: str, *, text: str = "", channel: str | None = None) -> str | None:
        """What is chosen by these keys, which are all there from the beginning."""
        output = Vt100_Output(
            self.written, lambda: Size(rows=30, columns=80), term="xterm", enable_cpr=False
        )
        with create_pipe_input() as source:
            source.send_text(typed)
            picker = Picker(self._catalog, channel=channel)
            picking = picker.run(text, source=source, output=output)
            return asyncio.run(asyncio.wait_for(picking, 8))


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
    written = drawn.written.getvalue()
    assert "Resume a session" in written
    assert "type to filter · ↑↓ select · Enter resume · Esc cancel" in written
    # It never takes the screen over, and leaves nothing behind.
    assert "\x1b[?1049h" not in written
    assert "\x1b[J" in written[-80:]


def test_more_sessions_than_a_page_are_all_found(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(picker, "_FIRST_PAGE_SIZE", 2)
    monkeypatch.setattr(picker, "PAGE_SIZE", 1)
    assert Drawn(catalog).choose("lamps\r") == CHAT
