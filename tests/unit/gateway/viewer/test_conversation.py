"""Which messages of a session are read, and where what is out of sight is told."""

from stenolog.gateway.viewer.conversation import SIZE, Part, around, newest
from stenolog.stores.in_memory import InMemoryStore

_KEY = "s"


def _filled(count: int) -> InMemoryStore:
    store = InMemoryStore()
    roles = ("user", "assistant")
    store.add_messages(
        _KEY, [{"role": roles[number % 2], "content": f"{number}"} for number in range(count)]
    )
    return store


def _told(part: Part) -> list[int | tuple[int, int]]:
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
        before = newest(store, store.info(_KEY), full=False).sight
        store.add_message(_KEY, "user", "more")
        assert newest(store, store.info(_KEY), full=False).sight == before
        store.checkpoint(_KEY, summary="so", upto=4)
        after = newest(store, store.info(_KEY), full=False).sight
        assert after != before
        store.undo(_KEY)
        assert newest(store, store.info(_KEY), full=False).sight == before


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
