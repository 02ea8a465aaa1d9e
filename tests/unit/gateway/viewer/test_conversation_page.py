"""Which messages of a session are read, and where what is out of sight is told."""

from collections.abc import Callable
from pathlib import Path

import pytest

from stenolog.gateway.viewer.conversation_page import (
    SIZE,
    PagePart,
    around,
    newest,
    read_again_if_damaged,
)
from stenolog.records import Message
from stenolog.stores.base import Store
from stenolog.stores.in_memory import InMemoryStore
from stenolog.stores.open_store import open_store

_KEY = "s"


def _filled(count: int) -> InMemoryStore:
    store = InMemoryStore()
    roles = ("user", "assistant")
    store.add_messages(
        _KEY, [{"role": roles[number % 2], "content": f"{number}"} for number in range(count)]
    )
    return store


def _told(part: PagePart) -> list[int | tuple[int, int]]:
    """The seqs of the messages, and the runs that are not shown."""
    made: list[int | tuple[int, int]] = []
    for item in part.items:
        if item.message is not None:
            made.append(item.message.seq)
        elif item.gap is not None:
            made.append((item.gap.first, item.gap.last))
    return made


def test_at_first_the_end_is_shown() -> None:
    with _filled(200) as store:
        part = newest(store, store.info(_KEY), full=False)
    assert _told(part) == list(range(201 - SIZE, 201))
    assert (part.older, part.newer) == (True, False)


def test_a_page_does_not_begin_with_a_result() -> None:
    with _filled(20) as store:
        calls = [{"id": "a", "function": {"name": "f", "arguments": "{}"}}]
        store.add_message(_KEY, "user", "Do it.")
        store.add_full_message(_KEY, {"role": "assistant", "content": "", "tool_calls": calls})
        store.add_full_message(_KEY, {"role": "tool", "tool_call_id": "a", "content": "x"})
        store.add_messages(_KEY, [{"role": "assistant", "content": "."}] * (SIZE - 1))
        part = newest(store, store.info(_KEY), full=False)
    assert _told(part)[:2] == [22, 24]


def test_a_message_is_shown_with_what_is_around_it() -> None:
    with _filled(500) as store:
        part = around(store, store.info(_KEY), 250, full=False)
    assert _told(part) == list(range(225, 276))
    assert (part.older, part.newer) == (True, True)


def test_beyond_the_end_the_end_is_shown() -> None:
    with _filled(5) as store:
        part = around(store, store.info(_KEY), 10**9, full=False)
    assert _told(part) == [1, 2, 3, 4, 5]
    assert not part.newer


def test_what_was_compacted_stands_where_it_was() -> None:
    with _filled(10) as store:
        store.checkpoint(_KEY, summary="so", upto=4)
        store.hide(_KEY, 7, 8)
        info = store.info(_KEY)
        assert _told(newest(store, info, full=False)) == [(1, 4), 5, 6, (7, 8), 9, 10]
        assert _told(newest(store, info, full=True)) == [1, 2, 3, 4, (1, 4), 5, 6, 7, 8, 9, 10]


def test_where_everything_was_cleared_that_is_told() -> None:
    with _filled(4) as store:
        store.clear(_KEY)
        assert _told(newest(store, store.info(_KEY), full=False)) == [(1, 4)]


def test_a_message_that_is_out_of_sight_is_shown_when_it_is_asked_for() -> None:
    with _filled(10) as store:
        store.checkpoint(_KEY, summary="so", upto=6)
        part = around(store, store.info(_KEY), 3, full=False)
    assert 3 in _told(part)


def test_what_is_in_sight_is_known_by_a_mark_that_an_append_does_not_change() -> None:
    with _filled(10) as store:
        before = newest(store, store.info(_KEY), full=False).digest
        store.add_message(_KEY, "user", "more")
        assert newest(store, store.info(_KEY), full=False).digest == before
        store.checkpoint(_KEY, summary="so", upto=4)
        after = newest(store, store.info(_KEY), full=False).digest
        assert after != before
        store.undo(_KEY)
        assert newest(store, store.info(_KEY), full=False).digest == before


@pytest.mark.parametrize(
    "act",
    [
        lambda store: store.pop(_KEY),
        lambda store: store.set_summary(_KEY, "another"),
        lambda store: store.hide(_KEY, 30, 30),
        lambda store: store.truncate_history(_KEY, 2),
    ],
)
def test_the_mark_changes_with_every_operation_however_many_there_were(
    act: Callable[[Store], object],
) -> None:
    with _filled(30) as store:
        for number in range(9):
            store.set_summary(_KEY, f"so {number}")
        before = newest(store, store.info(_KEY), full=False).digest
        undoable = store.info(_KEY).undoable
        act(store)
        assert store.info(_KEY).undoable == undoable
        assert newest(store, store.info(_KEY), full=False).digest != before


def _not_asked(*_: object, **__: object) -> list[Message]:
    raise AssertionError("all up to the end would be read")


@pytest.mark.parametrize("where", ["memory:", "{}/s", "sqlite:{}/s.db"])
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("at", [60, 118, 3_990])
def test_of_a_long_session_no_more_is_read_than_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, full: bool, at: int
) -> None:
    with open_store(where.format(tmp_path)) as store:
        store.add_messages(_KEY, [{"role": "user", "content": "x"}] * 4_000)
        store.checkpoint(_KEY, summary="so", upto=40)
        store.hide(_KEY, 120, 130)
        info = store.info(_KEY)
        with monkeypatch.context() as patched:
            patched.setattr("stenolog.gateway.viewer.conversation_page._MAX_DISCARDED", 10**9)
            expected = around(store, info, at, full=full)
        if at < 1_000:
            monkeypatch.setattr(type(store), "get_history", _not_asked)
        assert around(store, info, at, full=full) == expected
        assert expected.newer == (at < 1_000)
        marked = [one.message.seq for one in expected.items if one.message and one.message.hidden]
        assert bool(marked) == (full and at < 1_000)


def test_a_call_before_the_end_of_a_part_has_its_result() -> None:
    with _filled(100) as store:
        calls = [{"id": "a", "function": {"name": "f", "arguments": "{}"}}]
        store.add_full_message(_KEY, {"role": "assistant", "content": "", "tool_calls": calls})
        store.add_full_message(_KEY, {"role": "tool", "tool_call_id": "a", "content": "x"})
        store.add_messages(_KEY, [{"role": "user", "content": "x"}] * 4_000)
        part = around(store, store.info(_KEY), 101 - SIZE // 2, full=False)
    last = part.items[-1].message
    assert last is not None
    assert last.seq == 101
    assert ["<pre>x</pre>" in str(call.result) for call in last.calls] == [True]


def test_seqs_that_a_fork_has_not_are_no_divider() -> None:
    with _filled(12) as store:
        store.checkpoint(_KEY, summary="so", upto=4)
        store.hide(_KEY, 7, 8)
        store.fork(_KEY, "fork")
        store.hide("fork", 10, 10)
        info = store.info("fork")
        assert _told(newest(store, info, full=False)) == [(4, 4), 5, 6, 9, (10, 10), 11, 12]
        everything = around(store, info, 9, full=True)
        assert _told(everything) == [(4, 4), 5, 6, 9, 10, 11, 12]
        assert not everything.older


def _damaged(where: str, folder: Path) -> str:
    """A workspace in which the second message of five is damaged."""
    place = where.format(folder)
    with open_store(place) as store:
        for number in range(1, 6):
            store.add_message(_KEY, "user", f"word{number}")
    for path in [one for one in folder.rglob("*") if one.is_file()]:
        path.write_bytes(path.read_bytes().replace(b"word2", b"#ord2"))
    return place


def _with_lost(part: PagePart) -> list[int | str]:
    """The seqs of the messages, and in words what stands between them."""
    made: list[int | str] = []
    for item in part.items:
        if item.message is not None:
            made.append(item.message.seq)
        else:
            made.append("gap" if item.gap is not None else f"lost {item.lost}")
    return made


@pytest.mark.parametrize("where", ["{}/s", "sqlite:{}/s.db"])
def test_a_damaged_message_is_told_where_it_was_and_not_as_hidden(
    tmp_path: Path, where: str
) -> None:
    with open_store(_damaged(where, tmp_path)) as store:
        store.get_history(_KEY, full=True)  # which meets it
        for full in (False, True):
            part = newest(store, store.info(_KEY), full=full)
            assert _with_lost(part) == [1, "lost (2, 2)", 3, 4, 5]
            part = around(store, store.info(_KEY), 3, full=full)
            assert _with_lost(part) == [1, "lost (2, 2)", 3, 4, 5]
        before = newest(store, store.info(_KEY), full=False).digest
        store.add_message(_KEY, "user", "more")
        assert newest(store, store.info(_KEY), full=False).digest == before
        store.checkpoint(_KEY, summary="so", upto=3)
        part = newest(store, store.info(_KEY), full=False)
        assert _with_lost(part) == ["gap", "lost (2, 2)", 4, 5, 6]
        part = newest(store, store.info(_KEY), full=True)
        assert _with_lost(part) == [1, "lost (2, 2)", 3, "gap", 4, 5, 6]


def test_a_damaged_message_at_the_end_is_told_too(tmp_path: Path) -> None:
    with open_store(_damaged("{}/s", tmp_path)) as store:
        store.hide(_KEY, 3, 5)
        part = newest(store, store.info(_KEY), full=False)
    assert _with_lost(part) == [1, "gap", "lost (2, 2)"]


@pytest.mark.parametrize("where", ["{}/s", "sqlite:{}/s.db"])
def test_damage_that_is_met_by_reading_is_told_at_once(tmp_path: Path, where: str) -> None:
    with open_store(_damaged(where, tmp_path)) as store:
        info, part = read_again_if_damaged(
            store, _KEY, lambda info: newest(store, info, full=False)
        )
    assert (info.lost, info.visible) == (1, 4)
    assert _with_lost(part) == [1, "lost (2, 2)", 3, 4, 5]
