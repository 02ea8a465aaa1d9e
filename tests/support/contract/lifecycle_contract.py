"""Tests of `fork`, `delete`, `restore`, the trash (promise P4), and `purge`.

Only `purge` destroys data: the tests check which data it removes and keeps.
"""

from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import chain

import pytest

from stenolog.errors import (
    NoSuchSession,
    NothingToUndo,
    OnceConflict,
    SessionDeleted,
    SessionExists,
    StenologError,
    UsageError,
)
from stenolog.stores.base import FORKED_AT, Store
from support.contract.open_store_base import (
    ContractPart,
    all_messages,
    append,
    append_conversation,
    assert_raises,
    assert_session,
    repeat_in_threads,
    run_at_once,
    shifted_clock,
    user_message,
    user_messages,
    visible_texts,
)
from support.store_calls import Call, session_content, trash_content


class Forks(ContractPart):
    """Tests of `fork`."""

    def test_fork_copies_visible_messages_with_seqs_and_times(self, store: Store) -> None:
        append_conversation(store, "a")
        store.fork("a", "b")
        assert [(m.seq, m.content, m.at) for m in store.get_history("b")] == [
            (m.seq, m.content, m.at) for m in store.get_history("a")
        ]
        assert [m.seq for m in store.get_history("b")] == [3, 5, 6, 7]
        assert store.list_sessions() == ["a", "b"]

    def test_fork_has_summary_meta_and_key_of_its_source(self, store: Store) -> None:
        append_conversation(store, "a")
        before = datetime.now(UTC) - timedelta(seconds=1)
        store.fork("a", "b")
        source_info, fork_info = store.info("a"), store.info("b")
        assert (fork_info.summary, fork_info.floor) == ("so far", 2)
        assert fork_info.meta == {**source_info.meta, FORKED_AT: source_info.last_seq}
        assert (fork_info.key, fork_info.forked_from) == ("b", "a")
        assert source_info.forked_from is None
        assert fork_info.uid != source_info.uid
        assert before <= fork_info.created <= fork_info.updated

    def test_fork_copies_messages_byte_for_byte_without_delivery_state(self, store: Store) -> None:
        stenolog_field = {
            "received": {"sender": "telegram:7"},
            "origin": {"channel": "telegram", "chat": 7},
        }
        request = {"role": "user", "content": "q", "stenolog": stenolog_field}
        answer = {"role": "assistant", "content": "a", "stenolog": {"seen": 1, "model": "m"}}
        store.add_full_message("a", request, once="update-1")
        store.add_full_message("a", answer)
        copied_meta = {"title": "A talk", "tags": ["x"], "chat_model": "m", "own": {"delivery": 1}}
        delivery_meta = {
            "delivery": {"seq": 2, "mark": "sent", "origin": {"channel": "telegram", "chat": 7}},
            "continued_in": {"key": "c", "before": "a", "chat": "", "number": 1},
            "last_response": 2,
            "requests": [["job-1", 1]],
            "tries": [1, 1],
        }
        store.set_meta("a", **copied_meta, **delivery_meta)
        store.fork("a", "b")
        assert store.info("b").meta == {**copied_meta, FORKED_AT: 2}
        assert store.info("a").meta == {**copied_meta, **delivery_meta}
        assert [m.to_json() for m in store.get_history("b")] == [
            m.to_json() for m in store.get_history("a")
        ]
        # A fork does not know the idempotency keys of its source, so a new message is stored.
        assert store.add_full_message("b", request, once="update-1") == 3
        store.fork("b", "c", at=2)
        assert store.info("c").meta == {**copied_meta, FORKED_AT: 2}

    def test_p4_messages_left_out_of_a_fork_do_not_count_as_lost(self, store: Store) -> None:
        append_conversation(store, "a")
        store.fork("a", "b")
        copied_messages = [(n, str(n), False) for n in (3, 5, 6, 7)]
        assert_session(store, "b", messages=copied_messages, count=4, last_seq=7)
        assert store.info("b").visible == 4
        assert_session(store, "b", lost=0, damaged=0, void_bytes=0)
        assert [m.seq for m in store.follow("b", timeout=0)] == [3, 5, 6, 7]
        assert [m.seq for m in store.get_history("b", full=True, after=3, last=2)] == [6, 7]
        assert [m.seq for m in store.get_history("b", after=4)] == [5, 6, 7]

    @pytest.mark.parametrize("at", [2, 3, 4, 5, 7])
    def test_fork_at_a_seq_ends_there_and_continues_with_the_next(
        self, store: Store, at: int
    ) -> None:
        append_conversation(store, "a")
        store.fork("a", "b", at=at)
        kept_seqs = [seq for seq in (3, 5, 6, 7) if seq <= at]
        kept_messages = [(seq, str(seq), False) for seq in kept_seqs]
        assert_session(store, "b", messages=kept_messages, count=len(kept_seqs), last_seq=at)
        assert_session(store, "b", summary="so far", lost=0, floor=2)
        assert append(store, "b", "next") == [at + 1]
        assert append(store, "a", "next") == [8]

    @pytest.mark.parametrize("at", [-1, 0, 1, 8, 99])
    def test_fork_below_the_floor_or_beyond_the_end_is_rejected(
        self, store: Store, at: int
    ) -> None:
        append_conversation(store, "a")
        with pytest.raises(UsageError, match=str(at)):
            store.fork("a", "b", at=at)
        assert store.list_sessions() == ["a"]
        assert_raises(NoSuchSession, store.info, "b")

    def test_fork_without_messages_is_a_session(self, store: Store) -> None:
        append(store, "a", "1", "2")
        store.fork("a", "b", at=0)
        assert store.list_sessions() == ["a", "b"]
        assert_session(store, "b", messages=[], forked_from="a")
        store.set_meta("empty", title="x")
        store.fork("empty", "c")
        assert store.info("c").meta == {"title": "x", FORKED_AT: 0}
        assert append(store, "b", "one") == [1]
        assert append(store, "c", "one") == [1]

    def test_fork_and_source_are_independent(self, store: Store) -> None:
        append_conversation(store, "a")
        store.fork("a", "b")
        fork_content = session_content(store, "b")
        append(store, "a", "more")
        store.clear("a")
        store.set_meta("a", title="changed")
        store.compact("a")
        assert session_content(store, "b") == fork_content
        source_content = session_content(store, "a")
        store.set_history("b", user_messages("other"))
        store.set_summary("b", "changed")
        store.set_meta("b", title=None)
        store.compact("b")
        assert session_content(store, "a") == source_content
        store.admin.purge("a")
        assert visible_texts(store, "b") == ["other"]

    def test_fork_has_no_idempotency_keys_and_no_undo_steps(self, store: Store) -> None:
        append_conversation(store, "a")
        store.fork("a", "b")
        assert store.info("b").undoable == 0
        assert_raises(NothingToUndo, store.undo, "b")
        assert store.add_message("b", "user", "6", once="six") == 8
        assert store.add_messages("b", user_messages("other"), once="batch") == [9]
        assert store.add_message("a", "user", "6", once="six") == 6

    def test_fork_can_be_changed_undone_and_compacted(self, store: Store) -> None:
        append_conversation(store, "a")
        store.fork("a", "b")
        store.truncate_history("b", 1)
        assert visible_texts(store, "b") == ["7"]
        store.compact("b")
        assert all_messages(store, "b") == [(n, str(n), n < 7) for n in (3, 5, 6, 7)]
        assert store.undo("b").shown == 3
        assert visible_texts(store, "b") == ["3", "5", "6", "7"]
        store.admin.hide("b", 1, 6)
        assert (visible_texts(store, "b"), store.info("b").floor) == (["7"], 6)
        store.clear("b")
        assert store.undo("b").shown == 1
        assert store.info("b").lost == 0

    def test_fork_includes_archived_messages_that_undo_made_visible(self, store: Store) -> None:
        append(store, "a", *"12345")
        store.truncate_history("a", 1)
        store.compact("a")
        store.undo("a")
        store.fork("a", "b", at=4)
        assert visible_texts(store, "b") == ["1", "2", "3", "4"]

    def test_fork_of_a_fork_copies_its_visible_messages(self, store: Store) -> None:
        append_conversation(store, "a")
        store.fork("a", "b", at=6)
        store.admin.hide("b", 5, 5)
        store.fork("b", "c")
        copied_messages = [(3, "3", False), (6, "6", False)]
        assert_session(store, "c", messages=copied_messages, forked_from="b", last_seq=6, lost=0)

    def test_p8_fork_requires_a_source_and_an_unused_key(self, store: Store) -> None:
        append(store, "a", "1")
        append(store, "b", "taken")
        missing_error = assert_raises(NoSuchSession, store.fork, "nobody", "c")
        existing_error = assert_raises(SessionExists, store.fork, "a", "b")
        assert (missing_error.key, existing_error.key) == ("nobody", "b")
        assert_raises(SessionExists, store.fork, "a", "a")
        assert_raises(UsageError, store.fork, "a", "")
        assert (visible_texts(store, "a"), visible_texts(store, "b")) == (["1"], ["taken"])
        assert store.list_sessions() == ["a", "b"]

    def test_p7_one_of_many_concurrent_forks_to_a_key_succeeds(self, store: Store) -> None:
        for number in range(8):
            append(store, f"a{number}", f"from {number}")

        def try_fork(source_number: int) -> bool:
            try:
                store.fork(f"a{source_number}", "b")
            except SessionExists:
                return False
            return True

        successes = run_at_once(*(partial(try_fork, number) for number in range(8)))
        [winner] = [number for number, success in enumerate(successes) if success]
        assert visible_texts(store, "b") == [f"from {winner}"]


class Trash(ContractPart):
    """Tests of `delete`, `restore` and `list_trash`."""

    def test_deleted_session_is_not_listed_or_readable(self, store: Store) -> None:
        append_conversation(store, "a")
        append(store, "b", "1")
        store.delete("a")
        assert store.list_sessions() == ["b"]
        assert store.get_history("a") == store.get_history("a", full=True) == []
        assert store.get_summary("a") == ""
        assert_raises(NoSuchSession, store.info, "a")
        assert visible_texts(store, "b") == ["1"]

    def test_delete_returns_the_trash_entry(self, store: Store) -> None:
        append_conversation(store, "a")
        uid, before = store.info("a").uid, datetime.now(UTC) - timedelta(seconds=1)
        trashed = store.delete("a")
        assert (trashed.key, trashed.uid, trashed.count) == ("a", uid, 7)
        assert before <= trashed.deleted <= datetime.now(UTC) + timedelta(seconds=1)
        assert trashed.deleted.utcoffset() == timedelta(0)
        assert store.admin.list_trash() == [trashed]

    def test_the_trash_lists_the_last_deleted_first(self, store: Store) -> None:
        assert store.admin.list_trash() == []
        for key in ("b", "a", "c"):
            append(store, key, key)
        trash_entries = [store.delete(key) for key in ("c", "b", "a")]
        assert store.admin.list_trash() == trash_entries[::-1]

    def test_p4_restore_recovers_the_complete_session(self, store: Store) -> None:
        append_conversation(store, "a")
        content_before, info = session_content(store, "a"), store.info("a")
        messages = all_messages(store, "a")
        times = [message.at for message in store.get_history("a", full=True)]
        store.delete("a")
        store.admin.restore("a")
        restored_info = store.info("a")
        assert session_content(store, "a") == content_before
        assert all_messages(store, "a") == messages
        assert (restored_info.uid, restored_info.created) == (info.uid, info.created)
        assert restored_info.archived == info.archived
        assert [message.at for message in store.get_history("a", full=True)] == times
        assert store.admin.list_trash() == []
        # Undo steps, idempotency keys and the next seq are restored as well.
        assert store.add_message("a", "user", "6", once="six") == 6
        assert store.add_messages("a", user_messages(*"345"), once="batch") == [3, 4, 5]
        assert_raises(OnceConflict, store.add_message, "a", "user", "other", once="six")
        assert store.undo("a").op == "hide"
        assert store.undo("a").op == "checkpoint"
        assert visible_texts(store, "a") == [*"1234567"]
        assert append(store, "a", "8") == [8]

    def test_session_recreated_after_delete_has_a_new_uid(self, store: Store) -> None:
        append_conversation(store, "a")
        first_entry = store.delete("a")
        assert store.add_message("a", "user", "new", once="six") == 1
        info = store.info("a")
        assert info.uid != first_entry.uid
        assert (info.count, info.summary, info.meta, info.undoable) == (1, "", {}, 0)
        second_entry = store.delete("a")
        assert second_entry.uid == info.uid
        assert [t.uid for t in store.admin.list_trash()] == [second_entry.uid, first_entry.uid]

    def test_restore_uses_the_last_deleted_session_or_the_given_uid(self, store: Store) -> None:
        trash_entries = []
        for text in ("first", "second", "third"):
            append(store, "a", text)
            trash_entries.append(store.delete("a"))
        store.admin.restore("a")
        assert visible_texts(store, "a") == ["third"]
        store.delete("a")
        store.admin.restore("a", uid=trash_entries[0].uid)
        assert_session(store, "a", visible=["first"], uid=trash_entries[0].uid)
        assert [t.uid for t in store.admin.list_trash()] == [
            trash_entries[2].uid,
            trash_entries[1].uid,
        ]

    def test_p4_restore_order_does_not_depend_on_the_clock(self, store: Store) -> None:
        uids = []
        for seconds in (0, 3600, -3600, -7200):
            with shifted_clock(seconds):
                append(store, "a", f"clock {seconds}")
                uids.append(store.delete("a").uid)
        assert [trashed.uid for trashed in store.admin.list_trash()] == uids[::-1]
        times = [trashed.deleted for trashed in store.admin.list_trash()]
        assert times == sorted(set(times), reverse=True)
        store.admin.restore("a")
        assert visible_texts(store, "a") == ["clock -7200"]
        store.delete("a")
        store.admin.restore("a", uid=uids[1])
        assert visible_texts(store, "a") == ["clock 3600"]

    def test_p8_restore_to_a_key_in_use_is_rejected(self, store: Store) -> None:
        append(store, "a", "old")
        store.delete("a")
        append(store, "a", "new")
        error = assert_raises(SessionExists, store.admin.restore, "a")
        assert error.key == "a"
        assert visible_texts(store, "a") == ["new"]
        assert trash_content(store) == [("a", 1)]
        append(store, "b", "taken")
        assert_raises(SessionExists, store.admin.restore, "a", as_key="b")
        assert (visible_texts(store, "b"), trash_content(store)) == (["taken"], [("a", 1)])

    def test_session_can_be_restored_under_another_key(self, store: Store) -> None:
        append_conversation(store, "a")
        content_before, uid = session_content(store, "a"), store.info("a").uid
        store.delete("a")
        append(store, "a", "new")
        store.admin.restore("a", as_key="b")
        assert session_content(store, "b") == content_before
        info = store.info("b")
        assert (info.key, info.uid) == ("b", uid)
        assert store.list_sessions() == ["a", "b"]
        assert visible_texts(store, "a") == ["new"]
        assert store.admin.list_trash() == []
        store.undo("b")
        store.undo("b")
        assert visible_texts(store, "b") == [*"1234567"]
        assert store.add_message("b", "user", "6", once="six") == 6
        assert store.delete("b").key == "b"
        assert [t.key for t in store.admin.list_trash()] == ["b"]
        store.admin.restore("b")
        assert store.info("b").uid == uid

    def test_p8_only_sessions_in_the_trash_can_be_restored(self, store: Store) -> None:
        append(store, "a", "1")
        append(store, "b", "1")
        uid = store.delete("b").uid
        for call in (Call("delete"), Call("restore"), Call("restore", as_key="c")):
            assert_raises(NoSuchSession, call.make, store, "nobody")
        assert_raises(NoSuchSession, store.admin.restore, "a")
        assert_raises(NoSuchSession, store.admin.restore, "b", uid="0" * 16)
        assert_raises(NoSuchSession, store.admin.restore, "a", uid=uid, as_key="c")
        assert_raises(UsageError, store.admin.restore, "b", as_key="")
        assert store.list_sessions() == ["a"]
        assert trash_content(store) == [("b", 1)]

    def test_a_deleted_session_cannot_be_deleted_or_forked(self, store: Store) -> None:
        append_conversation(store, "a")
        store.delete("a")
        for call in (Call("delete"), Call("fork", "b"), Call("purge", before=3)):
            assert_raises(NoSuchSession, call.make, store, "a")
        assert (store.list_sessions(), trash_content(store)) == ([], [("a", 7)])

    def test_a_session_without_messages_can_be_deleted_and_restored(self, store: Store) -> None:
        store.set_summary("a", "nothing was said yet")
        assert store.delete("a").count == 0
        store.admin.restore("a")
        assert store.get_summary("a") == "nothing was said yet"

    def test_deleted_fork_is_restored_without_lost_messages(self, store: Store) -> None:
        append_conversation(store, "a")
        store.fork("a", "b", at=6)
        content_before = session_content(store, "b")
        store.delete("b")
        store.admin.restore("b")
        assert session_content(store, "b") == content_before
        assert store.info("b").lost == 0

    @pytest.mark.parametrize("call", [Call("delete"), Call("purge")], ids=str)
    @pytest.mark.parametrize("new_texts", [[], ["new 1", "new 2", "new 3"]], ids=len)
    def test_follow_ends_when_the_session_is_deleted_or_purged(
        self, store: Store, call: Call, new_texts: list[str]
    ) -> None:
        append(store, "a", "1", "2")
        new_messages = store.follow("a", after=1)
        assert next(new_messages).content == "2"
        call.make(store, "a")
        append(store, "a", *new_texts)
        assert assert_raises(SessionDeleted, next, new_messages).key == "a"

    def test_p7_messages_during_a_delete_are_in_the_deleted_or_the_new_session(
        self, store: Store
    ) -> None:
        append(store, "a", "first")

        def delete_repeatedly() -> None:
            for _ in range(5):
                with suppress(NoSuchSession):
                    store.delete("a")

        texts_by_writer = [[f"{name}{number}" for number in range(20)] for name in "xy"]
        writers = [partial(append, store, "a", *texts) for texts in texts_by_writer]
        run_at_once(delete_repeatedly, *writers)
        texts = visible_texts(store, "a")
        assert store.admin.list_trash()
        for trashed in store.admin.list_trash():
            store.admin.restore("a", uid=trashed.uid, as_key=f"restored {trashed.uid}")
            texts += visible_texts(store, f"restored {trashed.uid}")
        assert sorted(texts) == sorted(["first", *chain(*texts_by_writer)])


class Purging(ContractPart):
    """Tests of `purge`."""

    def test_purge_removes_the_session_and_its_deleted_versions(self, store: Store) -> None:
        append_conversation(store, "a")
        store.delete("a")
        append(store, "a", "8", "9")
        store.compact("a")
        append(store, "b", "stays")
        purged = store.admin.purge("a")
        assert (purged.messages, purged.first, purged.last) == (9, 1, 7)
        assert purged.not_reached == ()
        assert (store.list_sessions(), store.admin.list_trash()) == (["b"], [])
        assert store.get_history("a", full=True) == []
        assert_raises(NoSuchSession, store.admin.restore, "a")
        assert_raises(NoSuchSession, store.info, "a")

    def test_purged_key_starts_a_new_session_without_idempotency_keys(self, store: Store) -> None:
        append_conversation(store, "a")
        uid = store.info("a").uid
        store.admin.purge("a")
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
        assert store.admin.purge("a").messages == 7
        assert trash_content(store) == [("b", 1)]
        store.admin.restore("b")
        assert visible_texts(store, "b") == ["1"]

    def test_delete_unchanged_moves_a_session_that_did_not_change(self, store: Store) -> None:
        append(store, "a", "1", "2")
        store.set_meta("a", title="t")
        info = store.info("a")
        trashed = store.admin.delete_unchanged(info)
        assert trashed is not None
        assert (trashed.key, trashed.uid, trashed.count) == ("a", info.uid, 2)
        assert store.admin.list_trash() == [trashed]
        assert_raises(NoSuchSession, store.admin.delete_unchanged, info)
        store.admin.restore("a")
        assert visible_texts(store, "a") == ["1", "2"]

    def test_p1_delete_unchanged_keeps_a_session_that_changed(self, store: Store) -> None:
        append(store, "a", "1", "2")
        infos = [store.info("a")]
        append(store, "a", "3")
        infos.append(store.info("a"))
        store.set_meta("a", tags=["keep"])
        infos.append(store.info("a"))
        store.admin.hide("a", 1, 1)
        for info in infos:
            assert store.admin.delete_unchanged(info) is None
        assert (visible_texts(store, "a"), store.admin.list_trash()) == (["2", "3"], [])
        info = store.info("a")
        first = store.delete("a")
        append(store, "a", "another session")
        assert store.admin.delete_unchanged(info) is None
        assert [entry.uid for entry in store.admin.list_trash()] == [first.uid]

    def test_purge_trash_removes_only_the_given_entries(self, store: Store) -> None:
        append(store, "a", "old", "older")
        first_entry = store.delete("a")
        append(store, "a", "later")
        second_entry = store.delete("a")
        append(store, "a", "in use")
        lease = store.lease("a", ttl=60)
        append(store, "b", "of another key")
        other_entry = store.delete("b")
        purged = store.admin.purge("a", trash=[(first_entry.uid, first_entry.deleted)])
        assert (purged.messages, purged.first, purged.last) == (2, 1, 2)
        assert [entry.uid for entry in store.admin.list_trash()] == [
            other_entry.uid,
            second_entry.uid,
        ]
        assert visible_texts(store, "a") == ["in use"]
        assert not lease.lost
        lease.release()
        assert store.admin.list_trash(unfinished=True) == []

    def test_purge_trash_rejects_entries_that_changed(self, store: Store) -> None:
        append(store, "a", "1")
        uid = store.info("a").uid
        first_entry = store.delete("a")
        store.admin.restore("a")
        append(store, "a", "2")
        second_entry = store.delete("a")
        assert first_entry.uid == second_entry.uid == uid
        current_pairs = [(second_entry.uid, second_entry.deleted)]
        for entries in (
            [(first_entry.uid, first_entry.deleted)],
            [*current_pairs, ("00", second_entry.deleted)],
            [],
        ):
            assert_raises(NoSuchSession, store.admin.purge, "a", trash=entries)
        assert_raises(NoSuchSession, store.admin.purge, "b", trash=current_pairs)
        store.admin.restore("a")
        assert_raises(NoSuchSession, store.admin.purge, "a", trash=current_pairs)
        assert_raises(NoSuchSession, store.admin.finish_purge, uid)
        assert_raises(UsageError, store.admin.purge, "a", before=2, trash=current_pairs)
        assert visible_texts(store, "a") == ["1", "2"]

    def test_p7_purge_removes_a_session_that_is_concurrently_deleted_and_restored(
        self, store: Store
    ) -> None:
        def delete_and_restore() -> None:
            for call in (store.delete, store.admin.restore):
                with suppress(StenologError):
                    call("a")

        for _ in range(5):
            append(store, "a", "1")
            store.delete("a")
            append(store, "a", "2")
            with repeat_in_threads(delete_and_restore):
                assert store.admin.purge("a").messages == 2
            assert (store.list_sessions(), store.admin.list_trash()) == ([], [])

    def test_p8_purge_of_an_unknown_session_raises(self, store: Store) -> None:
        append_conversation(store, "a")
        store.admin.purge("a")
        for call in (Call("purge"), Call("purge", before=3)):
            assert assert_raises(NoSuchSession, call.make, store, "a").key == "a"
        assert store.list_sessions() == []

    def test_purge_report_names_remaining_forks(self, store: Store) -> None:
        append_conversation(store, "a")
        store.fork("a", "fork one")
        store.fork("a", "fork two")
        store.delete("fork two")
        store.fork("fork one", "of the fork")
        for purged in (store.admin.purge("a", before=3), store.admin.purge("a")):
            for fork in ("fork one", "fork two"):
                assert sum(fork in sentence for sentence in purged.not_reached) == 1
        assert visible_texts(store, "fork one") == ["3", "5", "6", "7"]

    @pytest.mark.parametrize("before", [2, 3, 4, 5, 6, 7, 8])
    def test_purge_before_a_seq_removes_only_earlier_messages(
        self, store: Store, before: int
    ) -> None:
        append_conversation(store, "a")
        messages_before = all_messages(store, "a")
        purged = store.admin.purge("a", before=before)
        assert (purged.messages, purged.first, purged.last) == (before - 1, 1, before - 1)
        kept_messages = [row for row in messages_before if row[0] >= before]
        kept_texts = [str(seq) for seq in (3, 5, 6, 7) if seq >= before]
        assert_session(store, "a", messages=kept_messages, visible=kept_texts, count=8 - before)
        assert_session(store, "a", last_seq=7, lost=0, damaged=0, void_bytes=0)
        assert store.info("a").floor >= max(2, before - 1)
        assert store.info("a").meta == {"title": "A talk", "tags": ["x"]}
        assert [m.seq for m in store.follow("a", timeout=0)] == list(range(before, 8))
        assert append(store, "a", "8") == [8]

    @pytest.mark.parametrize("before", [-1, 0, 1])
    def test_purge_before_the_first_seq_removes_nothing(self, store: Store, before: int) -> None:
        append_conversation(store, "a")
        content = session_content(store, "a")
        purged = store.admin.purge("a", before=before)
        assert (purged.messages, purged.first, purged.last) == (0, 0, 0)
        assert session_content(store, "a") == content

    def test_purge_before_a_seq_beyond_the_end_removes_all_messages(self, store: Store) -> None:
        append_conversation(store, "a")
        assert store.admin.purge("a", before=99).messages == 7
        assert store.list_sessions() == ["a"]
        assert_session(store, "a", messages=[], count=0, last_seq=7, floor=7)
        assert store.info("a").visible == 0
        assert append(store, "a", "8") == [8]
        assert visible_texts(store, "a") == ["8"]

    def test_repeated_purge_removes_only_the_remaining_messages(self, store: Store) -> None:
        append_conversation(store, "a")
        assert store.admin.purge("a", before=4).messages == 3
        assert store.admin.purge("a", before=4).messages == 0
        purged = store.admin.purge("a", before=6)
        assert (purged.messages, purged.first, purged.last) == (2, 4, 5)
        assert all_messages(store, "a") == [(6, "6", False), (7, "7", False)]
        store.clear("a")
        store.compact("a")
        assert store.admin.purge("a", before=7).messages == 1
        assert all_messages(store, "a") == [(7, "7", True)]

    def test_undo_does_not_cross_a_purge(self, store: Store) -> None:
        append(store, "a", *"123456")
        store.truncate_history("a", 4)
        store.admin.hide("a", 5, 5)
        store.admin.purge("a", before=2)
        assert store.info("a").undoable == 1
        assert store.undo("a").op == "hide"
        assert_raises(NothingToUndo, store.undo, "a")
        assert_session(store, "a", texts=[*"23456"], hidden=[2], floor=2, last_seq=6)

    def test_undo_steps_of_remaining_messages_work_after_a_purge(self, store: Store) -> None:
        append(store, "a", *"123456")
        store.clear("a")
        store.undo("a")
        store.admin.hide("a", 4, 4)
        store.set_history("a", [*store.get_history("a")[:4], user_message("x")])
        store.admin.purge("a", before=3)
        assert visible_texts(store, "a") == ["3", "5", "x"]
        assert store.undo("a").op == "replace"
        assert store.undo("a").op == "hide"
        assert_session(store, "a", visible=["3", "4", "5", "6"], hidden=[7])

    def test_purge_drops_all_undo_steps_before_an_affected_one(self, store: Store) -> None:
        append(store, "a", *"123456")
        store.admin.hide("a", 5, 5)
        store.truncate_history("a", 3)
        store.admin.hide("a", 6, 6)
        store.admin.purge("a", before=2)
        assert store.info("a").undoable == 1
        assert store.undo("a").shown == 1
        assert_raises(NothingToUndo, store.undo, "a")
        assert visible_texts(store, "a") == ["3", "4", "6"]

    def test_earlier_summary_cannot_be_restored_by_undo_after_a_purge(self, store: Store) -> None:
        append(store, "a", "1", "2", "3")
        store.checkpoint("a", summary="the first message has a secret", upto=1)
        store.set_summary("a", "something else")
        not_reached = store.admin.purge("a", before=2).not_reached
        assert [sentence for sentence in not_reached if "summary" in sentence]
        assert store.get_summary("a") == "something else"
        assert_raises(NothingToUndo, store.undo, "a")

    def test_purge_report_has_no_summary_warning_without_a_summary(self, store: Store) -> None:
        append(store, "a", "1", "2", "3")
        assert store.admin.purge("a", before=2).not_reached == ()

    @pytest.mark.parametrize("imported", [5, True, "x", {"file": 1}, [1, {"file": 2}]], ids=str)
    def test_session_with_a_foreign_imported_field_can_be_purged(
        self, store: Store, imported: object
    ) -> None:
        append(store, "a", "1", "2")
        store.set_meta("a", imported=imported)
        assert store.admin.purge("a", before=2).messages == 1
        assert store.admin.purge("a").messages == 1
        assert store.list_sessions() == []

    def test_purge_before_reports_deleted_sessions_of_the_key(self, store: Store) -> None:
        append(store, "a", "1", "2")
        store.delete("a")
        append(store, "a", "1", "2")
        not_reached = store.admin.purge("a", before=2).not_reached
        assert [sentence for sentence in not_reached if "trash" in sentence]
        assert trash_content(store) == [("a", 2)]

    def test_p12_idempotency_keys_of_remaining_messages_survive_a_purge(self, store: Store) -> None:
        append_conversation(store, "a")
        store.admin.purge("a", before=3)
        assert store.add_messages("a", user_messages(*"345"), once="batch") == [3, 4, 5]
        assert store.add_message("a", "user", "6", once="six") == 6
        store.admin.purge("a", before=6)
        assert store.add_message("a", "user", "6", once="six") == 6
        assert_raises(OnceConflict, store.add_message, "a", "user", "other", once="six")
        # The idempotency key of a purged message is gone as well.
        assert store.add_messages("a", user_messages("new"), once="batch") == [8]

    def test_p12_idempotency_keys_of_archived_messages_survive_a_purge(self, store: Store) -> None:
        for number in range(1, 7):
            store.add_message("a", "user", str(number), once=f"t{number}")
        store.truncate_history("a", 1)
        store.compact("a")
        store.admin.purge("a", before=4)
        assert store.add_message("a", "user", "5", once="t5") == 5
        assert store.add_message("a", "user", "2", once="t2") == 7

    def test_p2_rest_of_a_partly_purged_batch_stays_readable(self, store: Store) -> None:
        append(store, "a", "1")
        store.add_messages("a", user_messages(*"2345"))
        store.admin.purge("a", before=4)
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
        assert store.admin.purge("a", before=6).messages == 5
        assert all_messages(store, "a") == [(n, str(n), n < 12) for n in range(6, 13)]
        store.admin.purge("a", before=12)
        assert all_messages(store, "a") == [(12, "12", False)]
        append(store, "a", "13")
        store.truncate_history("a", 1)
        assert store.compact("a").archived == 1
        assert_session(store, "a", messages=[(12, "12", True), (13, "13", False)], lost=0)

    def test_a_purged_session_can_be_forked_deleted_and_restored(self, store: Store) -> None:
        append_conversation(store, "a")
        store.admin.purge("a", before=4)
        content = session_content(store, "a")
        store.delete("a")
        assert trash_content(store) == [("a", 4)]
        store.admin.restore("a")
        assert session_content(store, "a") == content
        store.fork("a", "b")
        assert visible_texts(store, "b") == ["5", "6", "7"]
        assert_raises(UsageError, store.fork, "a", "c", at=2)

    def test_p7_purge_during_writes_loses_no_new_messages(self, store: Store) -> None:
        append(store, "a", *"12345")

        def purge_repeatedly() -> None:
            for before in range(2, 7):
                store.admin.purge("a", before=before)

        texts_by_writer = [[f"{name}{number}" for number in range(25)] for name in "xy"]
        writers = [partial(append, store, "a", *texts) for texts in texts_by_writer]
        run_at_once(purge_repeatedly, *writers)
        texts = visible_texts(store, "a")
        for written_texts in texts_by_writer:
            assert [text for text in texts if text in written_texts] == written_texts
        assert [m.seq for m in store.get_history("a", full=True)] == list(range(6, 56))
