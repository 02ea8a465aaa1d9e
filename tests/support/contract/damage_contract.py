"""Tests of damaged records (promises P3 and P8)."""

from abc import abstractmethod
from typing import Literal

import pytest

from stenolog.errors import DamagedStore, NoSuchSession, NothingToUndo, OnceConflict
from stenolog.records import TrashedSession
from stenolog.stores.base import Store
from support.contract.open_store_base import (
    ContractPart,
    all_messages,
    append,
    assert_raises,
    assert_session,
    visible_texts,
)

DamagedRecord = Literal["state", "change", "trash", "message"]
"""Record to damage: the state of a session, the change that `undo` needs next, the state of a
deleted session, or message 2."""


class DamageContract(ContractPart):
    """Tests that a damaged record affects no other record.

    The damage is reported, and a damaged session can be deleted and purged.
    """

    @abstractmethod
    def damage(self, store: Store, record: DamagedRecord, key: str) -> Store:
        """Make this record of a session unreadable; return the store, opened again.

        If the engine keeps copies of the record, this method must damage all copies.
        """

    def _make_damaged_store(self, store: Store, record: DamagedRecord) -> Store:
        append(store, "a", "1")
        store.add_message("a", "user", "2", once="two")
        append(store, "a", *"345")
        append(store, "b", "other")
        store.set_meta("a", title="A talk")
        store.set_summary("a", "long " * 2_000)
        store.admin.hide("a", 2, 3)
        # The previous summary is too long for the state, so undo needs the change record.
        store.set_summary("a", "so far")
        if record == "trash":
            store.delete("b")
            store.delete("a")
        return self.damage(store, record, "a")

    # --- state -------------------------------------------------------------------------------

    def test_p3_session_with_damaged_state_stays_readable(
        self, store: Store, caplog: pytest.LogCaptureFixture
    ) -> None:
        with self._make_damaged_store(store, "state") as damaged_store:
            assert [content for _, content, _ in all_messages(damaged_store, "a")] == [*"12345"]
            assert_session(damaged_store, "a", visible=[*"145"], hidden=[2, 3], summary="so far")
            info = damaged_store.info("a")
            assert (info.last_seq, info.count, info.lost) == (5, 5, 0)
            assert info.meta == {"title": "A talk"}
            assert damaged_store.list_sessions() == ["a", "b"]
            followed_seqs = [message.seq for message in damaged_store.follow("a", timeout=0)]
            assert followed_seqs == [1, 2, 3, 4, 5]
            assert visible_texts(damaged_store, "b") == ["other"]
        assert "steno doctor" in caplog.text

    def test_p3_append_to_session_with_damaged_state_is_readable(self, store: Store) -> None:
        with self._make_damaged_store(store, "state") as damaged_store:
            assert append(damaged_store, "a", "6") == [6]
            assert damaged_store.add_message("a", "user", "7", once="seven") == 7
            assert damaged_store.add_message("a", "user", "7", once="seven") == 7
            assert visible_texts(damaged_store, "a") == [*"14567"]

    def test_p4_session_with_damaged_state_can_be_changed(self, store: Store) -> None:
        with self._make_damaged_store(store, "state") as damaged_store:
            damaged_store.admin.hide("a", 4, 4)
            damaged_store.set_meta("a", tags=["x"])
            assert_session(damaged_store, "a", visible=["1", "5"], hidden=[2, 3, 4])
            assert damaged_store.info("a").meta == {"title": "A talk", "tags": ["x"]}
            assert damaged_store.undo("a").op == "hide"
            assert visible_texts(damaged_store, "a") == [*"145"]

    def test_p4_session_with_damaged_state_can_be_deleted_and_restored(self, store: Store) -> None:
        with self._make_damaged_store(store, "state") as damaged_store:
            trashed = damaged_store.delete("a")
            assert (trashed.key, trashed.count) == ("a", 5)
            assert damaged_store.list_sessions() == ["b"]
            assert damaged_store.admin.list_trash() == [trashed]
            damaged_store.admin.restore("a")
            assert_session(damaged_store, "a", visible=[*"145"], hidden=[2, 3])

    def test_session_with_damaged_state_can_be_purged(self, store: Store) -> None:
        with self._make_damaged_store(store, "state") as damaged_store:
            assert damaged_store.admin.purge("a").messages == 5
            assert (damaged_store.list_sessions(), damaged_store.admin.list_trash()) == (["b"], [])
            assert all_messages(damaged_store, "a") == []
            assert append(damaged_store, "a", "new") == [1]

    def test_messages_of_session_with_damaged_state_can_be_purged(self, store: Store) -> None:
        with self._make_damaged_store(store, "state") as damaged_store:
            assert damaged_store.admin.purge("a", before=4).messages == 3
            assert [seq for seq, _, _ in all_messages(damaged_store, "a")] == [4, 5]

    def test_p4_damaged_state_of_a_fork_is_rebuilt(self, store: Store) -> None:
        append(store, "source", *"12345")
        store.checkpoint("source", summary="so far", upto=2)
        store.set_meta("source", title="A talk")
        store.fork("source", "a")
        with self.damage(store, "state", "a") as damaged_store:
            assert visible_texts(damaged_store, "a") == [*"345"]

    def test_p4_damaged_state_after_a_purge_is_rebuilt(self, store: Store) -> None:
        append(store, "a", *"123456")
        store.set_summary("a", "so far")
        store.admin.hide("a", 4, 4)
        store.admin.purge("a", before=3)
        with self.damage(store, "state", "a") as damaged_store:
            assert [seq for seq, _, _ in all_messages(damaged_store, "a")] == [3, 4, 5, 6]

    def test_session_with_damaged_state_can_be_forked(self, store: Store) -> None:
        with self._make_damaged_store(store, "state") as damaged_store:
            damaged_store.fork("a", "fork")
            assert visible_texts(damaged_store, "fork") == [*"145"]

    @pytest.mark.parametrize("record", ["state", "change", "trash"])
    def test_damaged_session_can_be_copied(self, store: Store, record: DamagedRecord) -> None:
        with self._make_damaged_store(store, record) as damaged_store:
            # A session in the trash may be listed by its uid instead of its key.
            [mark] = [mark for mark in damaged_store.admin.list_snapshots() if mark.key != "b"]
            assert mark.key == "a" or record == "trash"
            with damaged_store.admin.read_snapshot(mark) as reading:
                assert [message.seq for message in reading.messages] == [1, 2, 3, 4, 5]
                assert reading.snapshot.summary == "so far"
                assert reading.snapshot.hidden == [(2, 3)]

    # --- changes -----------------------------------------------------------------------------

    def test_p8_undo_of_damaged_change_raises_damaged_store(self, store: Store) -> None:
        with self._make_damaged_store(store, "change") as damaged_store:
            for _ in range(2):
                with pytest.raises(DamagedStore, match=r"'a'.*steno doctor"):
                    damaged_store.undo("a")
            assert_session(damaged_store, "a", visible=[*"145"], hidden=[2, 3])

    def test_purge_of_messages_drops_undo_steps_that_are_damaged(self, store: Store) -> None:
        with self._make_damaged_store(store, "change") as damaged_store:
            assert damaged_store.admin.purge("a", before=2).messages == 1
            assert visible_texts(damaged_store, "a") == ["4", "5"]
            assert_raises(NothingToUndo, damaged_store.undo, "a")

    def test_p3_session_with_damaged_change_works_otherwise(self, store: Store) -> None:
        with self._make_damaged_store(store, "change") as damaged_store:
            assert append(damaged_store, "a", "6") == [6]
            damaged_store.admin.hide("a", 6, 6)
            assert damaged_store.undo("a").op == "hide"
            assert visible_texts(damaged_store, "a") == [*"1456"]
            damaged_store.delete("a")
            damaged_store.admin.restore("a")
            assert visible_texts(damaged_store, "a") == [*"1456"]
            assert damaged_store.admin.purge("a").messages == 6
            assert damaged_store.list_sessions() == ["b"]

    # --- trash -------------------------------------------------------------------------------

    def _damaged_trash_entry(self, damaged_store: Store) -> TrashedSession:
        """Return the trash entry of the damaged session, which is listed by its key or its uid."""
        [entry] = [trashed for trashed in damaged_store.admin.list_trash() if trashed.key != "b"]
        assert entry.key in ("a", entry.uid)
        assert entry.count == 5
        return entry

    def test_p3_damaged_trash_entry_is_listed_and_can_be_restored(self, store: Store) -> None:
        with self._make_damaged_store(store, "trash") as damaged_store:
            entry = self._damaged_trash_entry(damaged_store)
            damaged_store.admin.restore(entry.key, uid=entry.uid, as_key="a")
            assert_session(damaged_store, "a", visible=[*"145"], hidden=[2, 3], uid=entry.uid)
            assert [trashed.key for trashed in damaged_store.admin.list_trash()] == ["b"]
            damaged_store.admin.restore("b")
            assert visible_texts(damaged_store, "b") == ["other"]

    def test_p8_damaged_trash_entry_can_be_purged(self, store: Store) -> None:
        with self._make_damaged_store(store, "trash") as damaged_store:
            assert (
                damaged_store.admin.purge(self._damaged_trash_entry(damaged_store).key).messages
                == 5
            )
            assert [trashed.key for trashed in damaged_store.admin.list_trash()] == ["b"]
            assert damaged_store.admin.purge("b").messages == 1
            assert damaged_store.admin.list_trash() == []

    # --- messages ----------------------------------------------------------------------------

    def test_p3_damaged_message_hides_only_itself(
        self, store: Store, caplog: pytest.LogCaptureFixture
    ) -> None:
        with self._make_damaged_store(store, "message") as damaged_store:
            assert [content for _, content, _ in all_messages(damaged_store, "a")] == [*"1345"]
            damaged_store.undo("a")
            damaged_store.undo("a")
            assert visible_texts(damaged_store, "a") == [*"1345"]
            info = damaged_store.info("a")
            assert (info.last_seq, info.count, info.lost, info.damaged) == (5, 4, 1, 1)
            assert append(damaged_store, "a", "6") == [6]
            assert visible_texts(damaged_store, "a") == [*"13456"]
        assert "steno doctor" in caplog.text

    def test_p12_damaged_message_is_never_taken_for_another(self, store: Store) -> None:
        with self._make_damaged_store(store, "message") as damaged_store:
            results: list[object] = []
            for content in ("2", "other"):
                try:
                    results.append(damaged_store.add_message("a", "user", content, once="two"))
                except (DamagedStore, OnceConflict) as error:
                    results.append(type(error))
            # A log loses the idempotency key with the message. A database keeps the key; with a
            # checksum, it also knows what the message was.
            assert results in (
                [6, OnceConflict],
                [2, OnceConflict],
                [2, DamagedStore],
                [DamagedStore, DamagedStore],
            )

    def test_session_with_damaged_message_can_be_deleted_and_purged(self, store: Store) -> None:
        with self._make_damaged_store(store, "message") as damaged_store:
            damaged_store.delete("a")
            damaged_store.admin.restore("a")
            assert [content for _, content, _ in all_messages(damaged_store, "a")] == [*"1345"]
            damaged_store.admin.purge("a")
            assert_raises(NoSuchSession, damaged_store.info, "a")
