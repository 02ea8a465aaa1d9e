"""Tests of `view` and `refresh`: info, summary and visible messages of one moment."""
# ruff: noqa: D102 - tests have names instead of docstrings

from collections.abc import Callable
from functools import partial

import pytest

from stenolog.errors import NoSuchSession, StoreClosed, UsageError
from stenolog.stores.base import SessionView, Store
from stenolog.testing.contract.open_store_base import (
    ContractPart,
    append,
    append_conversation,
    assert_raises,
    repeating,
    user_messages,
)

ROUNDS = 40
"""Number of changes that the writer makes while a reader reads."""

CHANGES: dict[str, Callable[[Store], object]] = {
    "truncate_history": lambda store: store.truncate_history("a", 1),
    "clear": lambda store: store.clear("a"),
    "hide": lambda store: store.hide("a", 6, 6),
    "pop": lambda store: store.pop("a"),
    "set_history": lambda store: store.set_history("a", user_messages("other")),
    "checkpoint": lambda store: store.checkpoint("a", summary="new", upto=3),
    "set_summary": lambda store: store.set_summary("a", "new"),
    "set_meta": lambda store: store.set_meta("a", title="new"),
    "undo": lambda store: store.undo("a"),
    "purge": lambda store: store.purge("a", before=4),
}
"""Calls that change visibility, summary or meta, but do not remove the session."""


class Views(ContractPart):
    """`view` and `refresh`."""

    def test_a_view_has_info_summary_and_visible_messages(self, store: Store) -> None:
        append_conversation(store, "a")
        view = store.view("a")
        assert view.info == store.info("a")
        assert view.messages == tuple(store.get_history("a"))
        assert [message.seq for message in view.messages] == [3, 5, 6, 7]
        assert (view.key, view.summary, view.upto, view.last) == ("a", "so far", 7, None)
        assert (view.uid, view.generation) == (view.info.uid, view.info.generation)
        assert view.change == view.info.change > 0
        assert not view.is_tail

    @pytest.mark.parametrize(
        ("last", "seqs"), [(0, []), (1, [7]), (3, [5, 6, 7]), (9, [3, 5, 6, 7])]
    )
    def test_last_limits_only_the_messages_of_a_view(
        self, store: Store, last: int, seqs: list[int]
    ) -> None:
        append_conversation(store, "a")
        view = store.view("a", last)
        assert [message.seq for message in view.messages] == seqs
        assert (view.info, view.upto, view.last) == (store.info("a"), 7, last)

    @pytest.mark.parametrize("last", [-1, 1.5, "1", True])
    def test_view_rejects_an_invalid_last(self, store: Store, last: int) -> None:
        append(store, "a", "1")
        with pytest.raises(UsageError, match="last must be"):
            store.view("a", last)

    def test_view_and_refresh_raise_if_there_is_no_session(self, store: Store) -> None:
        assert_raises(NoSuchSession, store.view, "a")
        append(store, "a", "1")
        view = store.view("a")
        store.delete("a")
        assert_raises(NoSuchSession, store.view, "a")
        assert_raises(NoSuchSession, store.refresh, view)
        assert store.list_sessions() == []

    def test_a_session_without_messages_has_an_empty_view(self, store: Store) -> None:
        store.set_summary("a", "nothing yet")
        view = store.view("a")
        assert (view.messages, view.summary, view.upto) == ((), "nothing yet", 0)
        append(store, "a", "1")
        assert [message.seq for message in store.refresh(view).messages] == [1]

    def test_refresh_returns_only_the_new_messages(self, store: Store) -> None:
        append_conversation(store, "a")
        view = store.view("a")
        empty_tail = store.refresh(view)
        assert (empty_tail.messages, empty_tail.is_tail, empty_tail.after) == ((), True, 7)
        append(store, "a", "8")
        store.add_messages("a", user_messages("9", "10"))
        tail = store.refresh(view)
        assert [message.seq for message in tail.messages] == [8, 9, 10]
        assert (tail.is_tail, tail.after, tail.upto) == (True, 7, 10)
        assert (tail.info, tail.uid, tail.change) == (store.info("a"), view.uid, view.change)
        assert view.merged(tail) == store.view("a")

    @pytest.mark.parametrize("last", [0, 1, 3, 9])
    def test_merging_a_tail_keeps_the_limit(self, store: Store, last: int) -> None:
        append_conversation(store, "a")
        view = store.view("a", last)
        append(store, "a", "8", "9")
        assert view.merged(store.refresh(view)) == store.view("a", last)

    def test_a_merged_view_can_be_refreshed_again(self, store: Store) -> None:
        append_conversation(store, "a")
        view = store.view("a")
        for text in ["8", "9", "10"]:
            append(store, "a", text)
            newer = store.refresh(view)
            assert len(newer.messages) == 1
            view = view.merged(newer)
        assert view == store.view("a")

    @pytest.mark.parametrize("name", CHANGES)
    def test_after_a_change_refresh_returns_a_full_view(self, store: Store, name: str) -> None:
        append_conversation(store, "a")
        store.checkpoint("a", summary="more", upto=3)
        view = store.view("a")
        CHANGES[name](store)
        append(store, "a", "8")
        newer = store.refresh(view)
        assert not newer.is_tail
        assert newer == store.view("a") == view.merged(newer)
        assert not view.matches(newer.uid, newer.generation, newer.change)
        assert (newer.generation, newer.change) >= (view.generation, view.change)

    def test_a_view_can_be_refreshed_after_messages_were_archived(self, store: Store) -> None:
        """After archiving, `refresh` may return a full view or only the new messages."""
        append_conversation(store, "a")
        store.checkpoint("a", summary="more", upto=5)
        view = store.view("a")
        store.compact("a")
        append(store, "a", "8")
        assert view.merged(store.refresh(view)) == store.view("a")

    def test_full_view_returned_by_refresh_keeps_its_limit(self, store: Store) -> None:
        append(store, "a", "1", "2", "3", "4")
        view = store.view("a", 2)
        store.pop("a")
        assert [message.seq for message in store.refresh(view).messages] == [2, 3]

    def test_calls_without_effect_leave_a_view_valid(self, store: Store) -> None:
        append_conversation(store, "a")
        view = store.view("a")
        store.truncate_history("a", 9)
        store.hide("a", 4, 4)
        store.set_summary("a", "so far")
        store.set_meta("a", title="A talk")
        store.compact("a")
        assert store.refresh(view).is_tail

    def test_refresh_of_a_recreated_session_returns_the_new_one(self, store: Store) -> None:
        append(store, "a", "1", "2")
        view = store.view("a")
        store.delete("a")
        append(store, "a", "new 1", "new 2", "new 3")
        newer = store.refresh(view)
        assert newer.uid != view.uid
        assert not newer.is_tail
        assert [m.content for m in newer.messages] == ["new 1", "new 2", "new 3"]

    def test_refresh_of_a_purged_and_recreated_session_returns_the_new_one(
        self, store: Store
    ) -> None:
        append(store, "a", "1", "2")
        view = store.view("a")
        store.purge("a")
        append(store, "a", "new 1", "new 2")
        newer = store.refresh(view)
        assert newer.uid != view.uid
        assert [m.content for m in newer.messages] == ["new 1", "new 2"]

    def test_a_restored_session_is_refreshed_without_loss(self, store: Store) -> None:
        append(store, "a", "1", "2")
        view = store.view("a")
        store.delete("a")
        store.restore("a")
        append(store, "a", "3")
        assert view.merged(store.refresh(view)) == store.view("a")

    def test_views_through_a_lease_work_after_its_end(self, store: Store) -> None:
        append(store, "a", "1")
        with store.lease("a", ttl=60) as lease:
            view = lease.store.view("a")
            lease.store.add_message("a", "user", "2")
            assert [message.seq for message in lease.store.refresh(view).messages] == [2]
        assert view.merged(lease.store.refresh(view)) == store.view("a")

    def test_views_of_a_closed_store_raise_store_closed(self, store: Store) -> None:
        append(store, "a", "1")
        view = store.view("a")
        store.close()
        assert_raises(StoreClosed, store.view, "a")
        assert_raises(StoreClosed, store.refresh, view)

    def test_p7_views_during_writes_are_consistent(self, store: Store) -> None:
        """Info, summary and messages agree while a writer appends, hides, deletes and recreates."""
        views: list[SessionView | None] = [None, None, None]

        def read(reader: int, last: int | None) -> None:
            view = views[reader]
            try:
                view = store.view("a", last) if view is None else view.merged(store.refresh(view))
                _check_view(view)
            except NoSuchSession:
                view = None
            views[reader] = view

        readers = [partial(read, reader, last) for reader, last in enumerate([None, 2, None])]
        with repeating(*readers):
            for number in range(ROUNDS):
                last_seq = store.add_messages("a", user_messages(*"abc"))[-1]
                match number % 5:
                    case 0:
                        store.clear("a")
                    case 1:
                        store.checkpoint("a", summary=f"up to {last_seq - 1}", upto=last_seq - 1)
                    case 2:
                        store.compact("a")
                    case 3:
                        store.undo("a")
                    case 4:
                        store.delete("a")


def _check_view(view: SessionView) -> None:
    """Check that the parts of a view agree with each other."""
    seqs = [message.seq for message in view.messages]
    visible_seqs = [seq for first, end in view.info.in_sight for seq in range(first, end + 1)]
    expected_seqs = [seq for seq in visible_seqs if seq <= view.upto]
    if view.last is not None:
        expected_seqs = expected_seqs[max(len(expected_seqs) - view.last, 0) :]
    assert seqs == expected_seqs
    if view.summary:
        assert view.summary == f"up to {view.info.floor}"
