"""Tests of `purge`, the only call that destroys data: which data it removes and keeps."""
# ruff: noqa: D102 - tests have names instead of docstrings

from contextlib import suppress
from threading import Barrier

import pytest

from stenolog.errors import (
    NoSuchSession,
    NothingToUndo,
    OnceConflict,
    SessionDeleted,
    StenologError,
    UsageError,
)
from stenolog.stores.base import PurgingStore, Store
from stenolog.testing.contract.open_store_base import (
    ContractPart,
    all_messages,
    append,
    append_conversation,
    assert_raises,
    assert_session,
    repeat_in_threads,
    thread_pool,
    user_message,
    user_messages,
    visible_texts,
)
from stenolog.testing.store_calls import Call, session_content, trash_content


class Purging(ContractPart):
    """Tests of `purge`."""

    def test_purge_removes_the_session_and_its_deleted_versions(self, store: Store) -> None:
        append_conversation(store, "a")
        store.delete("a")
        append(store, "a", "8", "9")
        store.compact("a")
        append(store, "b", "stays")
        purged = store.purge("a")
        assert (purged.messages, purged.first, purged.last) == (9, 1, 7)
        assert purged.not_reached == ()
        assert (store.list_sessions(), store.list_trash()) == (["b"], [])
        assert store.get_history("a", full=True) == []
        assert_raises(NoSuchSession, store.restore, "a")
        assert_raises(NoSuchSession, store.info, "a")

    def test_purged_key_starts_a_new_session_without_idempotency_keys(self, store: Store) -> None:
        append_conversation(store, "a")
        uid = store.info("a").uid
        store.purge("a")
        assert store.add_message("a", "user", "other", once="six") == 1
        info = store.info("a")
        assert info.uid != uid
        assert (info.count, info.summary, info.meta, info.archived) == (1, "", {}, 0)
        assert all_messages(store, "a") == [(1, "other", False)]

    def test_deleted_session_can_be_purged(self, store: Store) -> None:
        append_conversation(store, "a")
        append(store, "b", "1")
        store.delete("a")
        store.delete("b")
        assert store.purge("a").messages == 7
        assert trash_content(store) == [("b", 1)]
        store.restore("b")
        assert visible_texts(store, "b") == ["1"]

    def test_purge_trash_removes_only_the_given_entries(self, store: Store) -> None:
        if not isinstance(store, PurgingStore):
            pytest.skip("the store cannot purge single trash entries")
        append(store, "a", "old", "older")
        first_entry = store.delete("a")
        append(store, "a", "later")
        second_entry = store.delete("a")
        append(store, "a", "in use")
        lease = store.lease("a", ttl=60)
        append(store, "b", "of another key")
        other_entry = store.delete("b")
        purged = store.purge_trash("a", [(first_entry.uid, first_entry.deleted)])
        assert (purged.messages, purged.first, purged.last) == (2, 1, 2)
        assert [entry.uid for entry in store.list_trash()] == [other_entry.uid, second_entry.uid]
        assert visible_texts(store, "a") == ["in use"]
        assert not lease.lost
        lease.release()
        assert store.unfinished_purges() == []

    def test_purge_trash_rejects_entries_that_changed(self, store: Store) -> None:
        if not isinstance(store, PurgingStore):
            pytest.skip("the store cannot purge single trash entries")
        append(store, "a", "1")
        uid = store.info("a").uid
        first_entry = store.delete("a")
        store.restore("a")
        append(store, "a", "2")
        second_entry = store.delete("a")
        assert first_entry.uid == second_entry.uid == uid
        current_pairs = [(second_entry.uid, second_entry.deleted)]
        for entries in (
            [(first_entry.uid, first_entry.deleted)],
            [*current_pairs, ("00", second_entry.deleted)],
            [],
        ):
            assert_raises(NoSuchSession, store.purge_trash, "a", entries)
        assert_raises(NoSuchSession, store.purge_trash, "b", current_pairs)
        store.restore("a")
        assert_raises(NoSuchSession, store.purge_trash, "a", current_pairs)
        assert_raises(NoSuchSession, store.finish_purge, uid)
        assert visible_texts(store, "a") == ["1", "2"]

    def test_p7_purge_removes_a_session_that_is_concurrently_deleted_and_restored(
        self, store: Store
    ) -> None:
        def delete_and_restore() -> None:
            for call in (store.delete, store.restore):
                with suppress(StenologError):
                    call("a")

        for _ in range(5):
            append(store, "a", "1")
            store.delete("a")
            append(store, "a", "2")
            with repeat_in_threads(delete_and_restore):
                assert store.purge("a").messages == 2
            assert (store.list_sessions(), store.list_trash()) == ([], [])

    def test_p8_purge_of_an_unknown_session_raises(self, store: Store) -> None:
        for call in (Call("purge"), Call("purge", before=3)):
            error = assert_raises(NoSuchSession, call.make, store, "nobody")
            assert error.key == "nobody"
        append_conversation(store, "a")
        store.purge("a")
        assert_raises(NoSuchSession, store.purge, "a")
        assert store.list_sessions() == []

    def test_follow_ends_when_the_session_is_purged(self, store: Store) -> None:
        append(store, "a", "1")
        new_messages = store.follow("a")
        assert next(new_messages).content == "1"
        store.purge("a")
        assert_raises(SessionDeleted, next, new_messages)

    def test_purge_report_names_remaining_forks(self, store: Store) -> None:
        append_conversation(store, "a")
        store.fork("a", "fork one")
        store.fork("a", "fork two")
        store.delete("fork two")
        store.fork("fork one", "of the fork")
        not_reached = store.purge("a", before=3).not_reached
        assert sum("fork one" in sentence for sentence in not_reached) == 1
        assert sum("fork two" in sentence for sentence in not_reached) == 1
        not_reached = store.purge("a").not_reached
        assert sum("fork one" in sentence for sentence in not_reached) == 1
        assert sum("fork two" in sentence for sentence in not_reached) == 1
        assert visible_texts(store, "fork one") == ["3", "5", "6", "7"]

    @pytest.mark.parametrize("before", [2, 3, 4, 5, 6, 7, 8])
    def test_purge_before_a_seq_removes_only_earlier_messages(
        self, store: Store, before: int
    ) -> None:
        append_conversation(store, "a")
        messages_before = all_messages(store, "a")
        purged = store.purge("a", before=before)
        assert (purged.messages, purged.first, purged.last) == (before - 1, 1, before - 1)
        assert all_messages(store, "a") == [row for row in messages_before if row[0] >= before]
        info = store.info("a")
        assert (info.count, info.last_seq) == (8 - before, 7)
        assert (info.lost, info.damaged, info.void_bytes) == (0, 0, 0)
        assert info.floor >= max(2, before - 1)
        assert info.meta == {"title": "A talk", "tags": ["x"]}
        assert visible_texts(store, "a") == [str(seq) for seq in (3, 5, 6, 7) if seq >= before]
        assert [m.seq for m in store.follow("a", timeout=0)] == list(range(before, 8))
        assert append(store, "a", "8") == [8]

    @pytest.mark.parametrize("before", [-1, 0, 1])
    def test_purge_before_the_first_seq_removes_nothing(self, store: Store, before: int) -> None:
        append_conversation(store, "a")
        content = session_content(store, "a")
        purged = store.purge("a", before=before)
        assert (purged.messages, purged.first, purged.last) == (0, 0, 0)
        assert session_content(store, "a") == content

    def test_purge_before_a_seq_beyond_the_end_removes_all_messages(self, store: Store) -> None:
        append_conversation(store, "a")
        assert store.purge("a", before=99).messages == 7
        assert store.list_sessions() == ["a"]
        info = store.info("a")
        assert (info.count, info.visible, info.last_seq, info.floor) == (0, 0, 7, 7)
        assert all_messages(store, "a") == []
        assert append(store, "a", "8") == [8]
        assert visible_texts(store, "a") == ["8"]

    def test_repeated_purge_removes_only_the_remaining_messages(self, store: Store) -> None:
        append_conversation(store, "a")
        assert store.purge("a", before=4).messages == 3
        assert store.purge("a", before=4).messages == 0
        purged = store.purge("a", before=6)
        assert (purged.messages, purged.first, purged.last) == (2, 4, 5)
        assert all_messages(store, "a") == [(6, "6", False), (7, "7", False)]
        store.clear("a")
        store.compact("a")
        assert store.purge("a", before=7).messages == 1
        assert all_messages(store, "a") == [(7, "7", True)]

    def test_undo_does_not_cross_a_purge(self, store: Store) -> None:
        append(store, "a", *"123456")
        store.truncate_history("a", 4)
        store.hide("a", 5, 5)
        store.purge("a", before=2)
        assert store.info("a").undoable == 1
        assert store.undo("a").op == "hide"
        assert_raises(NothingToUndo, store.undo, "a")
        assert all_messages(store, "a") == [
            (2, "2", True),
            *((n, str(n), False) for n in (3, 4, 5, 6)),
        ]
        assert store.info("a").floor == 2

    def test_undo_steps_of_remaining_messages_work_after_a_purge(self, store: Store) -> None:
        append(store, "a", *"123456")
        store.clear("a")
        store.undo("a")
        store.hide("a", 4, 4)
        store.set_history("a", [*store.get_history("a")[:4], user_message("x")])
        store.purge("a", before=3)
        assert visible_texts(store, "a") == ["3", "5", "x"]
        assert store.undo("a").op == "replace"
        assert store.undo("a").op == "hide"
        assert_session(store, "a", visible=["3", "4", "5", "6"], hidden=[7])

    def test_purge_drops_all_undo_steps_before_an_affected_one(self, store: Store) -> None:
        append(store, "a", *"123456")
        store.hide("a", 5, 5)
        store.truncate_history("a", 3)
        store.hide("a", 6, 6)
        store.purge("a", before=2)
        assert store.info("a").undoable == 1
        assert store.undo("a").shown == 1
        assert_raises(NothingToUndo, store.undo, "a")
        assert visible_texts(store, "a") == ["3", "4", "6"]

    def test_earlier_summary_cannot_be_restored_by_undo_after_a_purge(self, store: Store) -> None:
        append(store, "a", "1", "2", "3")
        store.checkpoint("a", summary="the first not_reached a secret", upto=1)
        store.set_summary("a", "something else")
        not_reached = store.purge("a", before=2).not_reached
        assert [sentence for sentence in not_reached if "summary" in sentence]
        assert store.get_summary("a") == "something else"
        assert_raises(NothingToUndo, store.undo, "a")

    def test_purge_report_has_no_summary_warning_without_a_summary(self, store: Store) -> None:
        append(store, "a", "1", "2", "3")
        assert store.purge("a", before=2).not_reached == ()

    def test_purge_before_reports_deleted_sessions_of_the_key(self, store: Store) -> None:
        append(store, "a", "1", "2")
        store.delete("a")
        append(store, "a", "1", "2")
        not_reached = store.purge("a", before=2).not_reached
        assert [sentence for sentence in not_reached if "trash" in sentence]
        assert trash_content(store) == [("a", 2)]

    def test_p12_idempotency_keys_of_remaining_messages_survive_a_purge(self, store: Store) -> None:
        append_conversation(store, "a")
        store.purge("a", before=3)
        assert store.add_messages("a", user_messages(*"345"), once="batch") == [3, 4, 5]
        assert store.add_message("a", "user", "6", once="six") == 6
        store.purge("a", before=6)
        assert store.add_message("a", "user", "6", once="six") == 6
        assert_raises(OnceConflict, store.add_message, "a", "user", "other", once="six")
        # The idempotency key of a purged message is gone as well.
        assert store.add_messages("a", user_messages("new"), once="batch") == [8]

    def test_p12_idempotency_keys_of_archived_messages_survive_a_purge(self, store: Store) -> None:
        for number in range(1, 7):
            store.add_message("a", "user", str(number), once=f"t{number}")
        store.truncate_history("a", 1)
        store.compact("a")
        store.purge("a", before=4)
        assert store.add_message("a", "user", "5", once="t5") == 5
        assert store.add_message("a", "user", "2", once="t2") == 7

    def test_p2_rest_of_a_partly_purged_batch_stays_readable(self, store: Store) -> None:
        append(store, "a", "1")
        store.add_messages("a", user_messages(*"2345"))
        store.purge("a", before=4)
        assert visible_texts(store, "a") == ["4", "5"]
        append(store, "a", "6")
        store.truncate_history("a", 1)
        store.compact("a")
        store.undo("a")
        assert_session(store, "a", visible=["4", "5", "6"], lost=0)

    def test_purge_removes_archived_messages(self, store: Store) -> None:
        for number in range(1, 13):
            append(store, "a", str(number))
            if number % 4 == 0:
                store.truncate_history("a", 1)
                store.compact("a")
        assert store.purge("a", before=6).messages == 5
        assert all_messages(store, "a") == [(n, str(n), n < 12) for n in range(6, 13)]
        store.purge("a", before=12)
        assert all_messages(store, "a") == [(12, "12", False)]
        append(store, "a", "13")
        store.truncate_history("a", 1)
        assert store.compact("a").archived == 1
        assert all_messages(store, "a") == [(12, "12", True), (13, "13", False)]
        assert store.info("a").lost == 0

    def test_a_purged_session_can_be_forked_deleted_and_restored(self, store: Store) -> None:
        append_conversation(store, "a")
        store.purge("a", before=4)
        content = session_content(store, "a")
        store.delete("a")
        assert trash_content(store) == [("a", 4)]
        store.restore("a")
        assert session_content(store, "a") == content
        store.fork("a", "b")
        assert visible_texts(store, "b") == ["5", "6", "7"]
        assert_raises(UsageError, store.fork, "a", "c", at=2)

    def test_p7_purge_during_writes_loses_no_new_messages(self, store: Store) -> None:
        append(store, "a", *"12345")
        start_barrier = Barrier(3)

        def write(name: str) -> None:
            start_barrier.wait()
            for number in range(25):
                append(store, "a", f"{name}{number}")

        with thread_pool(2) as pool:
            writers = pool.map(write, "xy")
            start_barrier.wait()
            for before in range(2, 7):
                store.purge("a", before=before)
            list(writers)
        texts = visible_texts(store, "a")
        for name in "xy":
            assert [text for text in texts if text[0] == name] == [f"{name}{n}" for n in range(25)]
        assert [m.seq for m in store.get_history("a", full=True)] == list(range(6, 56))
