"""What is out of sight, and what took it away."""

from collections.abc import Callable
from pathlib import Path

import pytest

from stenolog.gateway.viewer.hidden_messages import Gap, read_visibility
from stenolog.stores.base import Store
from stenolog.stores.in_memory import InMemoryStore
from stenolog.stores.open_store import open_store

_KEY = "s"


def _filled(store: Store, count: int = 10) -> None:
    roles = ("user", "assistant")
    store.add_messages(
        _KEY, [{"role": roles[number % 2], "content": f"{number}"} for number in range(count)]
    )


def _told(store: Store, key: str = _KEY) -> list[tuple[int, int, int, str]]:
    return [(one.first, one.last, one.count, one.reason) for one in _gaps(store, key)]


def _gaps(store: Store, key: str = _KEY) -> list[Gap]:
    return list(read_visibility(store, store.info(key)).gaps)


def test_no_gap_without_hidden_messages() -> None:
    with InMemoryStore() as store:
        _filled(store)
        assert _gaps(store) == []


@pytest.mark.parametrize(
    ("act", "told"),
    [
        (lambda store: store.checkpoint(_KEY, summary="so", upto=4), (1, 4, 4, "summarized")),
        (lambda store: store.truncate_history(_KEY, 3), (1, 7, 7, "truncated")),
        (lambda store: store.clear(_KEY), (1, 10, 10, "cleared")),
        (lambda store: store.admin.hide(_KEY, 1, 2), (1, 2, 2, "hidden")),
        (
            lambda store: store.set_history(_KEY, [{"role": "user", "content": "new"}]),
            (1, 10, 10, "replaced"),
        ),
    ],
)
def test_each_gap_names_its_operation(
    tmp_path: Path, act: Callable[[Store], None], told: tuple[int, int, int, str]
) -> None:
    sqlite = open_store(f"sqlite:{tmp_path / 's.db'}")
    for opened in (InMemoryStore(), open_store(str(tmp_path / "s")), sqlite):
        with opened as store:
            _filled(store)
            act(store)
            assert _told(store) == [told]
            assert _gaps(store)[0].can_undo


def test_each_operation_has_its_gap_and_only_the_last_can_be_undone() -> None:
    with InMemoryStore() as store:
        _filled(store)
        store.checkpoint(_KEY, summary="so", upto=2)
        store.checkpoint(_KEY, summary="so on", upto=4)
        store.set_history(_KEY, [*store.get_history(_KEY)[:-2], {"role": "user", "content": "x"}])
        first, second = _gaps(store)
        assert (first.first, first.last, first.reason, first.has_summary) == (
            1,
            4,
            "summarized",
            True,
        )
        assert (second.first, second.last, second.reason, second.has_summary) == (
            9,
            10,
            "replaced",
            False,
        )
        assert (first.can_undo, second.can_undo) == (False, True)


def test_edit_next_to_summarized_messages_is_a_separate_gap() -> None:
    with InMemoryStore() as store:
        _filled(store)
        store.checkpoint(_KEY, summary="so", upto=4)
        store.set_history(_KEY, [{"role": "user", "content": "new"}])
        assert store.info(_KEY).floor == 10
        assert _told(store) == [(1, 4, 4, "summarized"), (5, 10, 6, "replaced")]
        assert [one.has_summary for one in _gaps(store)] == [True, False]


def test_messages_left_out_of_a_fork_are_not_a_gap() -> None:
    with InMemoryStore() as store:
        _filled(store)
        store.admin.hide(_KEY, 3, 4)
        store.fork(_KEY, "fork")
        assert _gaps(store, "fork") == []
        store.admin.hide("fork", 7, 8)
        assert _told(store, "fork") == [(7, 8, 2, "hidden")]
        store.checkpoint("fork", summary="so", upto=6)
        assert _told(store, "fork") == [(1, 6, 4, "summarized"), (7, 8, 2, "hidden")]
        assert list(read_visibility(store, store.info("fork")).present) == [(1, 2), (5, 10)]


def test_fork_shows_the_summary_of_left_out_messages() -> None:
    with InMemoryStore() as store:
        _filled(store)
        store.checkpoint(_KEY, summary="so", upto=4)
        store.fork(_KEY, "fork")
        [only] = _gaps(store, "fork")
        assert (only.last, only.count, only.has_summary, only.can_undo) == (4, 0, True, False)


def test_gap_without_an_undo_step_is_only_marked_hidden() -> None:
    with InMemoryStore() as store:
        _filled(store, 30)
        store.set_history(_KEY, store.get_history(_KEY)[:-2])
        for seq in range(1, 18, 2):
            store.admin.hide(_KEY, seq, seq)
        assert _told(store)[-1] == (29, 30, 2, "hidden")
