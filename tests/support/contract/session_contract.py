"""Tests of `info`, `set_meta`, `compact`, `stamps`, `view`, `close`, and of keys (promise P6)."""

from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from stenolog.errors import NoSuchSession, RefusedMessage, StoreClosed, UsageError
from stenolog.stores.base import SessionView, Store
from support.contract.call_table import (
    CALL_TABLE,
    CHANGING_CALLS,
    VIEW_CHANGES,
    CallRow,
    append_sample,
)
from support.contract.open_store_base import (
    ContractPart,
    all_messages,
    append,
    append_conversation,
    assert_raises,
    assert_session,
    repeat_in_threads,
    user_messages,
    visible_texts,
)
from support.store_calls import Call
from support.strategies import hostile_keys


class Sessions(ContractPart):
    """Tests of `info`, `set_meta` and `compact`."""

    def test_info_describes_the_session(self, store: Store) -> None:
        append(store, "a", "1", "2", "3", "4", "5")
        store.admin.hide("a", 4, 4)
        store.checkpoint("a", summary="so far", upto=2)
        store.set_meta("a", title="A talk", tags=["x"])
        info = store.info("a")
        assert info.key == "a"
        assert (info.last_seq, info.count, info.visible, info.floor) == (5, 5, 2, 2)
        assert (info.summary, info.meta) == ("so far", {"title": "A talk", "tags": ["x"]})
        assert (info.lost, info.damaged, info.void_bytes, info.archived) == (0, 0, 0, 0)
        assert info.undoable == 2
        assert info.forked_from is None
        assert info.bytes > 0
        assert info.uid
        assert info.generation >= 1
        assert info.created <= info.updated
        assert info.created.utcoffset() == info.updated.utcoffset() == timedelta(0)

    def test_session_without_messages_has_info(self, store: Store) -> None:
        store.set_meta("a", title="empty")
        info = store.info("a")
        assert (info.last_seq, info.count, info.visible, info.floor) == (0, 0, 0, 0)
        assert visible_texts(store, "a") == []
        assert append(store, "a", "1") == [1]

    def test_info_follows_every_change(self, store: Store) -> None:
        append(store, "a", "1", "2")
        first_info = store.info("a")
        store.clear("a")
        append(store, "a", "3")
        info = store.info("a")
        assert (info.last_seq, info.count, info.visible, info.floor) == (3, 3, 1, 2)
        assert (info.uid, info.created) == (first_info.uid, first_info.created)
        assert info.updated >= first_info.updated
        assert info.updated >= store.get_history("a")[-1].at

    def test_meta_is_merged_and_none_removes_a_field(self, store: Store) -> None:
        store.set_meta("a", title="x", tags=["t"], nested={"b": [1]})
        store.set_meta("a", title="y", pinned=True)
        assert store.info("a").meta == {
            "title": "y",
            "tags": ["t"],
            "nested": {"b": [1]},
            "pinned": True,
        }
        store.set_meta("a", tags=None, nested=None, unheard_of=None)
        assert store.info("a").meta == {"title": "y", "pinned": True}
        append(store, "a", "1")
        store.compact("a")
        assert store.info("a").meta == {"title": "y", "pinned": True}

    def test_meta_may_have_a_field_named_key(self, store: Store) -> None:
        store.set_meta("a", key="x", name="y")
        assert store.info("a").meta == {"key": "x", "name": "y"}

    def test_changes_to_returned_meta_do_not_affect_the_store(self, store: Store) -> None:
        store.set_meta("a", tags=["x"])
        store.info("a").meta["tags"].append("y")
        assert store.info("a").meta == {"tags": ["x"]}

    def test_p8_meta_above_64_kib_is_rejected(self, store: Store) -> None:
        store.set_meta("a", title="x")
        assert_raises(UsageError, store.set_meta, "a", blob="x" * 70_000)
        store.set_meta("a", one="x" * 40_000)
        assert_raises(UsageError, store.set_meta, "a", two="x" * 40_000)
        assert set(store.info("a").meta) == {"title", "one"}
        assert_raises(RefusedMessage, store.set_meta, "a", blob=b"bytes")

    def test_p4_compact_archives_only_messages_below_the_floor(self, store: Store) -> None:
        append(store, "a", "1", "2", "3", "4", "5")
        messages = all_messages(store, "a")
        assert store.compact("a").archived == 0
        store.admin.hide("a", 3, 3)
        assert store.compact("a").archived == 0
        store.undo("a")
        store.checkpoint("a", summary="so far", upto=2)
        assert store.compact("a").archived == 2
        assert store.info("a").archived == 2
        assert all_messages(store, "a") == [(seq, text, seq <= 2) for seq, text, _ in messages]
        assert store.compact("a").archived == 0
        assert_session(store, "a", visible=["3", "4", "5"], summary="so far", count=5)

    def test_p4_transcript_is_complete_after_many_compactions(self, store: Store) -> None:
        for number in range(1, 31):
            append(store, "a", str(number))
            if number % 5 == 0:
                store.checkpoint("a", summary=f"to {number - 2}", upto=number - 2)
                store.compact("a")
        assert all_messages(store, "a") == [
            (number, str(number), number <= 28) for number in range(1, 31)
        ]
        last_four_seqs = [m.seq for m in store.get_history("a", full=True, after=3, last=4)]
        assert last_four_seqs == [27, 28, 29, 30]
        assert [m.seq for m in store.get_history("a", full=True, last=25)] == list(range(6, 31))
        assert append(store, "a", "31") == [31]

    def test_p2_a_batch_across_the_floor_survives_compaction(self, store: Store) -> None:
        append(store, "a", "1")
        store.add_messages("a", user_messages("2", "3", "4"))
        store.checkpoint("a", summary="half of the batch", upto=3)
        assert store.compact("a").archived <= 3
        assert_session(store, "a", visible=["4"], hidden=[1, 2, 3])
        assert store.info("a").archived <= 3
        store.undo("a")
        assert visible_texts(store, "a") == ["1", "2", "3", "4"]

    def test_session_with_only_hidden_messages_can_be_compacted(self, store: Store) -> None:
        append(store, "a", "1", "2", "3")
        store.clear("a")
        assert store.compact("a").archived == 3
        assert_session(store, "a", visible=[], hidden=[1, 2, 3])
        assert append(store, "a", "4") == [4]
        assert visible_texts(store, "a") == ["4"]
        assert store.list_sessions() == ["a"]


class Stamps(ContractPart):
    """Tests of `stamps`, with which an index detects changed sessions."""

    @pytest.mark.parametrize("call", CHANGING_CALLS, ids=str)
    def test_stamp_of_a_session_differs_after_a_change(self, store: Store, call: Call) -> None:
        assert store.admin.stamps() == {}
        append_sample(store, "a")
        append(store, "b", "1")
        before = store.admin.stamps()
        call.make(store, "a")
        after = store.admin.stamps()
        assert sorted(before) == sorted(after) == ["a", "b"]
        assert before["a"] != after["a"]
        assert before["b"] == after["b"]

    def test_reads_do_not_change_stamps(self, store: Store) -> None:
        append(store, "a", "1", "2")
        stamps_before = store.admin.stamps()
        store.get_history("a", full=True)
        store.info("a")
        assert list(store.follow("a", timeout=0))
        assert store.admin.stamps() == stamps_before

    def test_stamps_exist_only_for_existing_sessions(self, store: Store) -> None:
        append(store, "a", "1")
        first_stamp = store.admin.stamps()["a"]
        store.delete("a")
        assert store.admin.stamps() == {}
        append(store, "a", "1")
        assert store.admin.stamps()["a"] != first_stamp
        store.admin.restore("a", as_key="b")
        store.fork("a", "c")
        assert sorted(store.admin.stamps()) == ["a", "b", "c"]
        store.admin.purge("a")
        assert sorted(store.admin.stamps()) == ["b", "c"]


class Views(ContractPart):
    """Tests of `view` and `refresh`."""

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

    def test_view_and_refresh_raise_if_there_is_no_session(self, store: Store) -> None:
        assert_raises(NoSuchSession, store.view, "a")
        append(store, "a", "1")
        view = store.view("a")
        store.delete("a")
        assert_raises(NoSuchSession, store.view, "a")
        with pytest.raises(NoSuchSession):
            store.view("a", since=view)
        assert store.list_sessions() == []

    def test_a_session_without_messages_has_an_empty_view(self, store: Store) -> None:
        store.set_summary("a", "nothing yet")
        view = store.view("a")
        assert (view.messages, view.summary, view.upto) == ((), "nothing yet", 0)
        append(store, "a", "1")
        assert [message.seq for message in store.view(view.key, since=view).messages] == [1]

    def test_refresh_returns_only_the_new_messages(self, store: Store) -> None:
        append_conversation(store, "a")
        view = store.view("a")
        empty_tail = store.view(view.key, since=view)
        assert (empty_tail.messages, empty_tail.is_tail, empty_tail.after) == ((), True, 7)
        append(store, "a", "8")
        store.add_messages("a", user_messages("9", "10"))
        tail = store.view(view.key, since=view)
        assert [message.seq for message in tail.messages] == [8, 9, 10]
        assert (tail.is_tail, tail.after, tail.upto) == (True, 7, 10)
        assert (tail.info, tail.uid, tail.change) == (store.info("a"), view.uid, view.change)
        assert view.merged(tail) == store.view("a")

    @pytest.mark.parametrize("last", [0, 1, 3, 9])
    def test_merging_a_tail_keeps_the_limit(self, store: Store, last: int) -> None:
        append_conversation(store, "a")
        view = store.view("a", last)
        append(store, "a", "8", "9")
        assert view.merged(store.view(view.key, since=view)) == store.view("a", last)

    def test_a_merged_view_can_be_refreshed_again(self, store: Store) -> None:
        append_conversation(store, "a")
        view = store.view("a")
        for text in ["8", "9", "10"]:
            append(store, "a", text)
            refreshed_view = store.view(view.key, since=view)
            assert len(refreshed_view.messages) == 1
            view = view.merged(refreshed_view)
        assert view == store.view("a")

    @pytest.mark.parametrize("call", VIEW_CHANGES, ids=str)
    def test_after_a_change_refresh_returns_a_full_view(self, store: Store, call: Call) -> None:
        append_sample(store, "a")
        view = store.view("a")
        call.make(store, "a")
        append(store, "a", "8")
        refreshed_view = store.view(view.key, since=view)
        assert not refreshed_view.is_tail
        assert refreshed_view == store.view("a") == view.merged(refreshed_view)
        assert not view.matches(
            refreshed_view.uid, refreshed_view.generation, refreshed_view.change
        )
        assert (refreshed_view.generation, refreshed_view.change) >= (view.generation, view.change)

    def test_a_view_can_be_refreshed_after_messages_were_archived(self, store: Store) -> None:
        """After archiving, `refresh` may return a full view or only the new messages."""
        append_conversation(store, "a")
        store.checkpoint("a", summary="more", upto=5)
        view = store.view("a")
        store.compact("a")
        append(store, "a", "8")
        assert view.merged(store.view(view.key, since=view)) == store.view("a")

    def test_full_view_returned_by_refresh_keeps_its_limit(self, store: Store) -> None:
        append(store, "a", "1", "2", "3", "4")
        view = store.view("a", 2)
        store.pop("a")
        assert [message.seq for message in store.view(view.key, since=view).messages] == [2, 3]

    def test_calls_without_effect_leave_a_view_valid(self, store: Store) -> None:
        append_conversation(store, "a")
        view = store.view("a")
        store.truncate_history("a", 9)
        store.admin.hide("a", 4, 4)
        store.set_summary("a", "so far")
        store.set_meta("a", title="A talk")
        store.compact("a")
        assert store.view(view.key, since=view).is_tail

    @pytest.mark.parametrize("call", [Call("delete"), Call("purge")], ids=str)
    @pytest.mark.parametrize("texts", [["new 1", "new 2"], ["new 1", "new 2", "new 3"]], ids=len)
    def test_refresh_of_a_recreated_session_returns_the_new_one(
        self, store: Store, call: Call, texts: list[str]
    ) -> None:
        append(store, "a", "1", "2")
        view = store.view("a")
        call.make(store, "a")
        append(store, "a", *texts)
        refreshed_view = store.view(view.key, since=view)
        assert refreshed_view.uid != view.uid
        assert not refreshed_view.is_tail
        assert [m.content for m in refreshed_view.messages] == texts

    def test_a_restored_session_is_refreshed_without_loss(self, store: Store) -> None:
        append(store, "a", "1", "2")
        view = store.view("a")
        store.delete("a")
        store.admin.restore("a")
        append(store, "a", "3")
        assert view.merged(store.view(view.key, since=view)) == store.view("a")

    def test_views_through_a_lease_work_after_its_end(self, store: Store) -> None:
        append(store, "a", "1")
        with store.lease("a", ttl=60) as lease:
            view = lease.store.view("a")
            lease.store.add_message("a", "user", "2")
            assert [message.seq for message in lease.store.view(view.key, since=view).messages] == [
                2
            ]
        assert view.merged(lease.store.view(view.key, since=view)) == store.view("a")

    def test_p7_views_during_writes_are_consistent(self, store: Store) -> None:
        """Info, summary and messages agree while a writer appends, hides, deletes and recreates."""
        views: list[SessionView | None] = [None, None, None]

        def refresh_and_check(reader_index: int, last: int | None) -> None:
            view = views[reader_index]
            try:
                view = (
                    store.view("a", last)
                    if view is None
                    else view.merged(store.view(view.key, since=view))
                )
                _check_view(view)
            except NoSuchSession:
                view = None
            views[reader_index] = view

        readers = [
            partial(refresh_and_check, index, last) for index, last in enumerate([None, 2, None])
        ]
        with repeat_in_threads(*readers):
            for number in range(40):
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
    visible_seqs = [seq for first, end in view.info.visible_spans for seq in range(first, end + 1)]
    expected_seqs = [seq for seq in visible_seqs if seq <= view.upto]
    if view.last is not None:
        expected_seqs = expected_seqs[max(len(expected_seqs) - view.last, 0) :]
    assert seqs == expected_seqs
    if view.summary:
        assert view.summary == f"up to {view.info.floor}"


class Closing(ContractPart):
    """Tests of `health`, `close`, and the `Store` protocol."""

    def test_store_implements_the_protocol(self, store: Store) -> None:
        assert isinstance(store, Store)

    def test_working_store_is_healthy(self, store: Store) -> None:
        append(store, "a", "1")
        health = store.admin.health()
        assert health.ok
        assert health.problems == ()
        assert health.free_bytes is None or health.free_bytes > 0

    @pytest.mark.parametrize("row", CALL_TABLE, ids=lambda row: str(row.call))
    def test_p8_calls_on_a_closed_store_raise_store_closed(
        self, store: Store, row: CallRow
    ) -> None:
        append(store, "a", "1")
        store.close()
        assert_raises(StoreClosed, row.call.make, store, "a")

    def test_p8_lists_and_follow_on_a_closed_store_raise_store_closed(self, store: Store) -> None:
        append(store, "a", "1")
        view = store.view("a")
        store.close()
        for call in (
            lambda: store.view(view.key, since=view),
            store.list_sessions,
            store.admin.list_trash,
            store.admin.stamps,
            store.admin.health,
            lambda: next(store.follow("a", timeout=0)),
        ):
            assert_raises(StoreClosed, call)

    def test_with_block_closes_the_store_and_closing_twice_does_nothing(
        self, tmp_path: Path
    ) -> None:
        with self.make_store(tmp_path) as store:
            append(store, "a", "1")
        assert_raises(StoreClosed, store.get_history, "a")
        store.close()


class Keys(ContractPart):
    """Tests of session keys and `list_sessions`."""

    def test_p6_three_hundred_hostile_keys_have_separate_sessions(
        self, store: Store, tmp_path: Path
    ) -> None:
        keys = hostile_keys()
        assert len(set(keys)) == 300
        for key in keys:
            assert store.add_message(key, "user", f"to {key}") == 1
            store.set_summary(key, f"about {key}")
        for key in keys:
            assert_session(store, key, visible=[f"to {key}"], summary=f"about {key}")
            assert store.info(key).key == key
        assert store.list_sessions() == sorted(keys, key=str.encode)
        assert len({store.info(key).uid for key in keys}) == 300
        store.clear(keys[0])
        assert all(visible_texts(store, key) for key in keys[1:])
        assert [path.name for path in tmp_path.iterdir()] == ["workspace"]

    @pytest.mark.parametrize(
        "key", ["", "x" * 1025, "\u00e9" * 513, "\ud800", "a\udfff", None, 7, b"a"]
    )
    def test_p6_invalid_keys_are_rejected(self, store: Store, key: str) -> None:
        for call in (
            lambda: store.add_message(key, "user", "x"),
            lambda: store.get_history(key),
            lambda: store.get_summary(key),
            lambda: store.set_summary(key, "x"),
            lambda: store.truncate_history(key, 1),
            lambda: store.info(key),
            lambda: store.compact(key),
            lambda: next(store.follow(key, timeout=0)),
        ):
            assert_raises(UsageError, call)
        assert store.list_sessions() == []

    def test_sessions_are_listed_in_byte_order_of_their_keys(self, store: Store) -> None:
        keys = ["b", "a", "B", "a:b", "a_b", "\u00e9", "e\u0301", "\uffff", "\U0001f600", "10", "9"]
        for key in keys:
            append(store, key, "x")
        assert store.list_sessions() == sorted(keys, key=str.encode)

    def test_pages_of_sessions_have_no_gaps_or_duplicates(self, store: Store) -> None:
        keys = sorted((f"user:{number}" for number in range(25)), key=str.encode)
        for key in reversed(keys):
            append(store, key, "x")
        listed_keys: list[str] = []
        while page := store.list_sessions(limit=7, after=listed_keys[-1] if listed_keys else None):
            listed_keys += page
        assert listed_keys == keys
        assert store.list_sessions(limit=0) == []
        assert store.list_sessions(limit=99) == keys
        assert store.list_sessions(after="user:9") == []
        assert store.list_sessions(after="user:1x", limit=2) == ["user:2", "user:20"]
        assert store.list_sessions(after="") == keys

    def test_prefix_is_matched_literally(self, store: Store) -> None:
        keys = ["a:1", "a:2", "a_1", "A:1", "a%1", "%", "a", "ab", "b:1"]
        for key in keys:
            append(store, key, "x")
        assert store.list_sessions(prefix="a:") == ["a:1", "a:2"]
        assert store.list_sessions(prefix="a_") == ["a_1"]
        assert store.list_sessions(prefix="%") == ["%"]
        assert store.list_sessions(prefix="a") == ["a", "a%1", "a:1", "a:2", "a_1", "ab"]
        assert store.list_sessions(prefix="a", after="a%1", limit=2) == ["a:1", "a:2"]
        assert store.list_sessions(prefix="zz") == []

    def test_p8_invalid_arguments_of_a_list_are_rejected(self, store: Store) -> None:
        append(store, "a", "1")
        assert_raises(UsageError, store.list_sessions, limit=-1)
        invalid_texts: list[Any] = [1, "\ud800"]
        for text in invalid_texts:
            assert_raises(UsageError, store.list_sessions, prefix=text)
            assert_raises(UsageError, store.list_sessions, after=text)
