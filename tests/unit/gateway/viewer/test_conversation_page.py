"""Which messages of a session are read, and where what is out of sight is told."""

from collections.abc import Callable
from pathlib import Path

import pytest

from stenolog.gateway.viewer.conversation_page import (
    MESSAGES_PER_PART,
    PagePart,
    newest_part,
    part_around,
    read_again_if_damaged,
)
from stenolog.gateway.viewer.session_outline import MessageFilter
from stenolog.records import Message
from stenolog.stores.base import Store
from stenolog.stores.in_memory import InMemoryStore
from stenolog.stores.open_store import open_store

_KEY = "s"
_VISIBLE = MessageFilter()
_ALL = MessageFilter(full=True)


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


def test_page_opens_at_the_end_of_the_session() -> None:
    with _filled(200) as store:
        part = newest_part(store, store.info(_KEY), _VISIBLE)
    assert _told(part) == list(range(201 - MESSAGES_PER_PART, 201))
    assert (part.has_older, part.has_newer) == (True, False)


def test_page_does_not_start_with_a_tool_result() -> None:
    with _filled(20) as store:
        calls = [{"id": "a", "function": {"name": "f", "arguments": "{}"}}]
        store.add_message(_KEY, "user", "Do it.")
        store.add_full_message(_KEY, {"role": "assistant", "content": "", "tool_calls": calls})
        store.add_full_message(_KEY, {"role": "tool", "tool_call_id": "a", "content": "x"})
        store.add_messages(_KEY, [{"role": "assistant", "content": "."}] * (MESSAGES_PER_PART - 1))
        part = newest_part(store, store.info(_KEY), _VISIBLE)
    assert _told(part)[:2] == [22, 24]


def test_messages_around_a_seq_are_shown() -> None:
    with _filled(500) as store:
        part = part_around(store, store.info(_KEY), 250, _VISIBLE)
    assert _told(part) == list(range(225, 276))
    assert (part.has_older, part.has_newer) == (True, True)


def test_seq_beyond_the_end_shows_the_end() -> None:
    with _filled(5) as store:
        part = part_around(store, store.info(_KEY), 10**9, _VISIBLE)
    assert _told(part) == [1, 2, 3, 4, 5]
    assert not part.has_newer


def test_gap_is_at_the_position_of_the_summarized_messages() -> None:
    with _filled(10) as store:
        store.checkpoint(_KEY, summary="so", upto=4)
        store.admin.hide(_KEY, 7, 8)
        info = store.info(_KEY)
        assert _told(newest_part(store, info, _VISIBLE)) == [(1, 4), 5, 6, (7, 8), 9, 10]
        assert _told(newest_part(store, info, _ALL)) == [1, 2, 3, 4, (1, 4), 5, 6, 7, 8, 9, 10]


def test_hidden_message_is_shown_on_request() -> None:
    with _filled(10) as store:
        store.checkpoint(_KEY, summary="so", upto=6)
        part = part_around(store, store.info(_KEY), 3, _VISIBLE)
    assert 3 in _told(part)


def test_append_does_not_change_the_digest_of_the_visibility() -> None:
    with _filled(10) as store:
        before = newest_part(store, store.info(_KEY), _VISIBLE).digest
        store.add_message(_KEY, "user", "more")
        assert newest_part(store, store.info(_KEY), _VISIBLE).digest == before
        store.checkpoint(_KEY, summary="so", upto=4)
        after = newest_part(store, store.info(_KEY), _VISIBLE).digest
        assert after != before
        store.undo(_KEY)
        assert newest_part(store, store.info(_KEY), _VISIBLE).digest == before


@pytest.mark.parametrize(
    "act",
    [
        lambda store: store.pop(_KEY),
        lambda store: store.set_summary(_KEY, "another"),
        lambda store: store.admin.hide(_KEY, 30, 30),
        lambda store: store.truncate_history(_KEY, 2),
    ],
)
def test_every_operation_changes_the_digest_of_the_visibility(
    act: Callable[[Store], object],
) -> None:
    with _filled(30) as store:
        for number in range(9):
            store.set_summary(_KEY, f"so {number}")
        before = newest_part(store, store.info(_KEY), _VISIBLE).digest
        undoable = store.info(_KEY).undoable
        act(store)
        assert store.info(_KEY).undoable == undoable
        assert newest_part(store, store.info(_KEY), _VISIBLE).digest != before


def _not_asked(*_: object, **__: object) -> list[Message]:
    raise AssertionError("all up to the end would be read")


@pytest.mark.parametrize("where", ["memory:", "{}/s", "sqlite:{}/s.db"])
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("at", [60, 118, 3_990])
def test_only_the_shown_part_of_a_long_session_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, full: bool, at: int
) -> None:
    with open_store(where.format(tmp_path)) as store:
        store.add_messages(_KEY, [{"role": "user", "content": "x"}] * 4_000)
        store.checkpoint(_KEY, summary="so", upto=40)
        store.admin.hide(_KEY, 120, 130)
        info = store.info(_KEY)
        with monkeypatch.context() as patched:
            patched.setattr("stenolog.gateway.viewer.conversation_page._MAX_DISCARDED", 10**9)
            expected = part_around(store, info, at, MessageFilter(full=full))
        if at < 1_000:
            monkeypatch.setattr(type(store), "get_history", _not_asked)
        assert part_around(store, info, at, MessageFilter(full=full)) == expected
        assert expected.has_newer == (at < 1_000)
        marked = [one.message.seq for one in expected.items if one.message and one.message.hidden]
        assert bool(marked) == (full and at < 1_000)


def test_last_call_of_a_part_has_its_result() -> None:
    with _filled(100) as store:
        calls = [{"id": "a", "function": {"name": "f", "arguments": "{}"}}]
        store.add_full_message(_KEY, {"role": "assistant", "content": "", "tool_calls": calls})
        store.add_full_message(_KEY, {"role": "tool", "tool_call_id": "a", "content": "x"})
        store.add_messages(_KEY, [{"role": "user", "content": "x"}] * 4_000)
        part = part_around(store, store.info(_KEY), 101 - MESSAGES_PER_PART // 2, _VISIBLE)
    last = part.items[-1].message
    assert last is not None
    assert last.seq == 101
    assert ["<pre>x</pre>" in str(call.result) for call in last.calls] == [True]


def test_seqs_missing_in_a_fork_are_no_gap() -> None:
    with _filled(12) as store:
        store.checkpoint(_KEY, summary="so", upto=4)
        store.admin.hide(_KEY, 7, 8)
        store.fork(_KEY, "fork")
        store.admin.hide("fork", 10, 10)
        info = store.info("fork")
        assert _told(newest_part(store, info, _VISIBLE)) == [(4, 4), 5, 6, 9, (10, 10), 11, 12]
        everything = part_around(store, info, 9, _ALL)
        assert _told(everything) == [(4, 4), 5, 6, 9, 10, 11, 12]
        assert not everything.has_older


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
def test_damaged_message_is_marked_at_its_position_and_not_as_hidden(
    tmp_path: Path, where: str
) -> None:
    with open_store(_damaged(where, tmp_path)) as store:
        store.get_history(_KEY, full=True)  # which meets it
        for full in (False, True):
            part = newest_part(store, store.info(_KEY), MessageFilter(full=full))
            assert _with_lost(part) == [1, "lost (2, 2)", 3, 4, 5]
            part = part_around(store, store.info(_KEY), 3, MessageFilter(full=full))
            assert _with_lost(part) == [1, "lost (2, 2)", 3, 4, 5]
        before = newest_part(store, store.info(_KEY), _VISIBLE).digest
        store.add_message(_KEY, "user", "more")
        assert newest_part(store, store.info(_KEY), _VISIBLE).digest == before
        store.checkpoint(_KEY, summary="so", upto=3)
        part = newest_part(store, store.info(_KEY), _VISIBLE)
        assert _with_lost(part) == ["gap", "lost (2, 2)", 4, 5, 6]
        part = newest_part(store, store.info(_KEY), _ALL)
        assert _with_lost(part) == [1, "lost (2, 2)", 3, "gap", 4, 5, 6]


def test_damaged_message_at_the_end_is_marked(tmp_path: Path) -> None:
    with open_store(_damaged("{}/s", tmp_path)) as store:
        store.admin.hide(_KEY, 3, 5)
        part = newest_part(store, store.info(_KEY), _VISIBLE)
    assert _with_lost(part) == [1, "gap", "lost (2, 2)"]


@pytest.mark.parametrize("where", ["{}/s", "sqlite:{}/s.db"])
def test_damage_found_while_reading_is_shown_immediately(tmp_path: Path, where: str) -> None:
    with open_store(_damaged(where, tmp_path)) as store:
        info, part = read_again_if_damaged(
            store, _KEY, lambda info: newest_part(store, info, _VISIBLE)
        )
    assert (info.lost, info.visible) == (1, 4)
    assert _with_lost(part) == [1, "lost (2, 2)", 3, 4, 5]
