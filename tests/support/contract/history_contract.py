"""Tests of `get_history`, and of visibility after hiding, replacing, checkpoints and `undo` (P4).

The last eight hiding, replacing or summarizing calls can be undone.
"""

from collections.abc import Callable
from typing import Any

import pytest

from stenolog.errors import Conflict, NothingToUndo, UsageError
from stenolog.records import UndoResult
from stenolog.stores.base import Store
from support.contract.call_table import UNDOABLE_CALLS, append_sample
from support.contract.open_store_base import (
    ContractPart,
    append,
    assert_raises,
    assert_session,
    hidden_seqs,
    user_message,
    user_messages,
    visible_texts,
)
from support.store_calls import Call


class Reading(ContractPart):
    """Tests of `get_history`."""

    def test_last_counts_from_the_end(self, store: Store) -> None:
        append(store, "a", "1", "2", "3")
        for last, expected in [(0, []), (1, ["3"]), (2, ["2", "3"]), (3, ["1", "2", "3"])]:
            assert [m.content for m in store.get_history("a", last=last)] == expected
        assert len(store.get_history("a", last=99)) == 3

    def test_after_is_applied_before_last(self, store: Store) -> None:
        append(store, "a", "1", "2", "3", "4")
        assert [m.seq for m in store.get_history("a", after=2)] == [3, 4]
        assert [m.seq for m in store.get_history("a", after=1, last=2)] == [3, 4]
        assert [m.seq for m in store.get_history("a", after=3, last=2)] == [4]
        assert [m.seq for m in store.get_history("a", after=0)] == [1, 2, 3, 4]
        assert store.get_history("a", after=4) == []
        assert store.get_history("a", after=99) == []

    def test_p8_negative_last_is_rejected(self, store: Store) -> None:
        append(store, "a", "1")
        assert_raises(UsageError, store.get_history, "a", last=-1)
        with pytest.raises(UsageError, match="last must be"):
            store.view("a", -1)

    def test_last_and_after_skip_hidden_messages(self, store: Store) -> None:
        append(store, "a", "1", "2", "3", "4", "5")
        store.admin.hide("a", 3, 4)
        assert [m.seq for m in store.get_history("a", last=2)] == [2, 5]
        assert [m.seq for m in store.get_history("a", after=2)] == [5]
        assert [m.seq for m in store.get_history("a", after=3, last=1)] == [5]

    def test_p4_full_history_includes_hidden_messages_and_marks_them(self, store: Store) -> None:
        append(store, "a", "1", "2", "3", "4")
        store.truncate_history("a", 3)
        store.admin.hide("a", 3, 3)
        store.set_history("a", user_messages("2", "new"))
        assert_session(
            store, "a", visible=["2", "new"], texts=[*"1234", "new"], hidden=[1, 3, 4], last_seq=5
        )
        assert [m.seq for m in store.get_history("a", full=True, last=2)] == [4, 5]
        assert [m.seq for m in store.get_history("a", full=True, after=3)] == [4, 5]
        assert [m.seq for m in store.get_history("a", full=True, after=1, last=1)] == [5]

    def test_hidden_flag_of_a_message_is_not_updated_after_its_read(self, store: Store) -> None:
        append(store, "a", "1")
        [before] = store.get_history("a")
        store.clear("a")
        [after] = store.get_history("a", full=True)
        assert (before.hidden, after.hidden) == (False, True)
        store.undo("a")
        assert after.hidden is True


class Hiding(ContractPart):
    """Tests of truncate, clear, hide and pop."""

    @pytest.mark.parametrize(
        ("keep_last", "expected"),
        [
            (-7, []),
            (0, []),
            (1, ["3"]),
            (2, ["2", "3"]),
            (3, ["1", "2", "3"]),
            (9, ["1", "2", "3"]),
        ],
    )
    def test_truncate_keeps_the_last_visible_messages(
        self, store: Store, keep_last: int, expected: list[str]
    ) -> None:
        append(store, "a", "1", "2", "3")
        store.truncate_history("a", keep_last)
        assert_session(store, "a", visible=expected, texts=[*"123"])

    def test_truncate_counts_only_visible_messages(self, store: Store) -> None:
        append(store, "a", "1", "2", "3", "4", "5")
        store.admin.hide("a", 4, 4)
        store.truncate_history("a", 2)
        assert visible_texts(store, "a") == ["3", "5"]
        store.truncate_history("a", 2)
        assert_session(store, "a", visible=["3", "5"], floor=2)

    def test_clear_hides_all_and_empties_the_summary(self, store: Store) -> None:
        append(store, "a", "1", "2")
        store.set_summary("a", "so far")
        store.clear("a")
        assert_session(store, "a", visible=[], summary="", hidden=[1, 2], floor=2)
        assert append(store, "a", "3") == [3]
        assert visible_texts(store, "a") == ["3"]

    def test_hide_includes_both_ends_and_ignores_missing_seqs(self, store: Store) -> None:
        append(store, "a", "1", "2", "3", "4", "5")
        store.admin.hide("a", 2, 3)
        assert visible_texts(store, "a") == ["1", "4", "5"]
        store.admin.hide("a", 5, 99)
        assert hidden_seqs(store, "a") == [2, 3, 5]
        assert append(store, "a", "6") == [6]
        assert visible_texts(store, "a") == ["1", "4", "6"]
        store.admin.hide("a", 50, 60)
        store.admin.hide("a", -5, 0)
        assert visible_texts(store, "a") == ["1", "4", "6"]

    def test_p8_hide_with_start_after_end_is_rejected(self, store: Store) -> None:
        append(store, "a", "1", "2")
        assert_raises(UsageError, store.admin.hide, "a", 2, 1)
        assert visible_texts(store, "a") == ["1", "2"]

    def test_a_hidden_range_that_touches_the_floor_becomes_the_floor(self, store: Store) -> None:
        append(store, "a", "1", "2", "3", "4", "5", "6")
        store.admin.hide("a", 2, 3)
        assert store.info("a").floor == 0
        store.admin.hide("a", 1, 1)
        assert store.info("a").floor == 3
        store.admin.hide("a", 5, 5)
        assert store.info("a").floor == 3
        store.checkpoint("a", summary="", upto=4)
        assert_session(store, "a", floor=5, visible=["6"])

    def test_show_shows_hidden_messages_and_ignores_other_seqs(self, store: Store) -> None:
        append(store, "a", "1", "2", "3", "4", "5")
        store.truncate_history("a", 2)
        store.admin.show("a", 3, 99)
        assert_session(store, "a", visible=["3", "4", "5"], floor=2)
        store.admin.show("a", 1, 1)
        assert_session(store, "a", visible=["1", "3", "4", "5"], floor=0)
        store.admin.show("a", -5, 1)
        assert store.info("a").undoable == 3
        assert_raises(UsageError, store.admin.show, "a", 2, 1)

    def test_show_shows_archived_messages_but_no_purged_ones(self, store: Store) -> None:
        append(store, "a", "1", "2", "3", "4")
        store.truncate_history("a", 1)
        store.compact("a")
        store.admin.purge("a", before=2)
        store.admin.show("a", 1, 4)
        assert_session(store, "a", visible=["2", "3", "4"], floor=1)

    def test_undo_of_show_hides_only_the_messages_that_it_showed(self, store: Store) -> None:
        append(store, "a", "1", "2", "3", "4")
        store.admin.hide("a", 2, 3)
        store.admin.show("a", 1, 2)
        append(store, "a", "5")
        assert store.undo("a") == _undo_result("show", hid=1)
        assert visible_texts(store, "a") == ["1", "4", "5"]
        assert store.undo("a") == _undo_result("hide", shown=2)
        assert visible_texts(store, "a") == ["1", "2", "3", "4", "5"]

    def test_pop_hides_the_last_visible_message_and_returns_it(self, store: Store) -> None:
        append(store, "a", "1", "2", "3")
        store.admin.hide("a", 3, 3)
        popped_message = store.pop("a")
        assert popped_message is not None
        assert (popped_message.seq, popped_message.content) == (2, "2")
        assert visible_texts(store, "a") == ["1"]
        assert append(store, "a", "4") == [4]
        assert [m and m.seq for m in (store.pop("a"), store.pop("a"))] == [4, 1]
        assert store.pop("a") is None
        assert hidden_seqs(store, "a") == [1, 2, 3, 4]

    def test_more_than_a_thousand_hidden_ranges_are_rejected(self, store: Store) -> None:
        store.add_messages("a", [user_message(str(number)) for number in range(2003)])
        for seq in range(2, 2002, 2):
            store.admin.hide("a", seq, seq)
        assert_raises(UsageError, store.admin.hide, "a", 2002, 2002)
        assert store.info("a").visible == 1003
        store.admin.hide("a", 1, 1)
        assert store.info("a").floor == 2
        store.admin.hide("a", 2002, 2002)
        assert store.info("a").visible == 1001


class Replacing(ContractPart):
    """Tests of `set_history`."""

    @pytest.mark.parametrize(
        ("new_texts", "texts", "hidden"),
        [("1x3y", "123x3y", [2, 3]), ("1", "123", [2, 3]), ("", "123", [1, 2, 3])],
    )
    def test_set_history_keeps_the_common_prefix_and_appends_the_rest(
        self, store: Store, new_texts: str, texts: str, hidden: list[int]
    ) -> None:
        append(store, "a", *"123")
        store.set_summary("a", "so far")
        store.set_history("a", user_messages(*new_texts))
        assert_session(store, "a", visible=[*new_texts], texts=[*texts], hidden=hidden)
        floor = 0 if new_texts else 3
        assert_session(store, "a", last_seq=len(texts), floor=floor, summary="so far")

    def test_longer_history_only_appends_messages(self, store: Store) -> None:
        append(store, "a", "1", "2")
        store.set_history("a", [*store.get_history("a"), user_message("3"), user_message("4")])
        assert [m.seq for m in store.get_history("a")] == [1, 2, 3, 4]
        assert_session(store, "a", hidden=[], undoable=1)

    def test_set_history_with_the_same_messages_changes_nothing(self, store: Store) -> None:
        append(store, "a", "1", "2")
        info_before = store.info("a")
        store.set_history("a", store.get_history("a"))
        store.set_history("a", user_messages("1", "2"))
        assert store.info("a") == info_before
        assert hidden_seqs(store, "a") == []

    def test_common_prefix_is_computed_from_visible_messages(self, store: Store) -> None:
        append(store, "a", "1", "2", "3", "4")
        store.admin.hide("a", 1, 1)
        store.admin.hide("a", 3, 3)
        store.set_history("a", user_messages("2", "4", "5"))
        assert [m.seq for m in store.get_history("a")] == [2, 4, 5]
        store.set_history("a", user_messages("1", "2"))
        assert [m.seq for m in store.get_history("a")] == [6, 7]
        assert store.info("a").floor == 5

    @pytest.mark.parametrize(
        ("old", "new"),
        [
            (1, True),
            (1, 1.0),
            (0, -0.0),
            ({"x": 1, "y": 2}, {"y": 2, "x": 1}),
            ("e\u0301", "\u00e9"),
        ],
    )
    def test_p10_set_history_distinguishes_values_that_compare_equal(
        self, store: Store, old: Any, new: Any
    ) -> None:
        store.add_message("a", "user", old)
        store.set_history("a", [{"role": "user", "content": new}])
        [message] = store.get_history("a")
        assert message.seq == 2
        assert repr(message.content) == repr(new)

    def test_a_long_history_is_appended_in_order(self, store: Store) -> None:
        append(store, "a", "old")
        store.set_history("a", [user_message(str(number)) for number in range(500)])
        assert visible_texts(store, "a") == [str(number) for number in range(500)]
        assert [m.seq for m in store.get_history("a")] == list(range(2, 502))


class Checkpoints(ContractPart):
    """Tests of summaries, checkpoints, and messages that arrive while a summary is written (P5)."""

    def test_set_summary_replaces_only_the_previous_summary(self, store: Store) -> None:
        append(store, "a", "1", "2")
        store.set_summary("a", "first")
        store.set_summary("a", "second")
        assert store.info("a").summary == "second"
        assert_session(store, "a", summary="second", visible=["1", "2"])
        store.set_summary("a", "")
        assert store.get_summary("a") == ""

    def test_p8_summary_that_is_not_text_is_rejected(self, store: Store) -> None:
        append(store, "a", "1")
        for wrong in (None, 1, b"x", ["x"]):
            for call in (Call("set_summary", wrong), Call("checkpoint", summary=wrong, upto=1)):
                assert_raises(UsageError, call.make, store, "a")
        assert_raises(UsageError, store.set_summary, "a", "a pair as two: \ud83d\ude00")
        assert_session(store, "a", summary="", visible=["1"])

    def test_a_checkpoint_moves_the_floor_and_replaces_the_summary(self, store: Store) -> None:
        append(store, "a", "1", "2", "3")
        store.checkpoint("a", summary="one and two", upto=2)
        assert_session(store, "a", visible=["3"], summary="one and two", floor=2, undoable=1)

    def test_checkpoint_at_or_below_the_floor_changes_only_the_summary(self, store: Store) -> None:
        append(store, "a", "1", "2", "3")
        store.checkpoint("a", summary="first", upto=2)
        for upto in (2, 1, 0):
            store.checkpoint("a", summary=f"again {upto}", upto=upto)
            assert_session(store, "a", summary=f"again {upto}", visible=["3"], floor=2)

    def test_p8_checkpoint_beyond_the_last_seq_is_rejected(self, store: Store) -> None:
        append(store, "a", "1", "2")
        assert_raises(UsageError, store.checkpoint, "a", summary="x", upto=3)
        assert_session(store, "a", summary="", visible=["1", "2"])
        assert_raises(UsageError, store.checkpoint, "nobody", summary="x", upto=1)

    def test_p5_checkpoint_with_an_outdated_floor_is_rejected(self, store: Store) -> None:
        append(store, "a", "1", "2", "3")
        store.checkpoint("a", summary="first", upto=1, expect_floor=0)
        with pytest.raises(Conflict) as raised:
            store.checkpoint("a", summary="late", upto=2, expect_floor=0)
        assert (raised.value.key, raised.value.expected, raised.value.found) == ("a", 0, 1)
        assert_session(store, "a", summary="first", visible=["2", "3"])
        store.checkpoint("a", summary="second", upto=2, expect_floor=1)
        assert visible_texts(store, "a") == ["3"]
        with pytest.raises(Conflict):
            store.checkpoint("nobody", summary="x", upto=0, expect_floor=1)

    def test_p5_clear_upto_keeps_later_messages_visible(self, store: Store) -> None:
        append(store, "a", "1", "2")
        store.set_summary("a", "before")
        append(store, "a", "3")
        store.clear("a", upto=2)
        assert_session(store, "a", visible=["3"], summary="")
        assert store.undo("a").op == "clear"
        assert_session(store, "a", visible=["1", "2", "3"], summary="before")

    def test_clear_upto_beyond_the_end_hides_all(self, store: Store) -> None:
        append(store, "a", "1", "2")
        store.clear("a", upto=3)
        assert visible_texts(store, "a") == []
        store.clear("nobody", upto=3)
        assert store.list_sessions() == ["a"]

    def test_p5_set_history_is_rejected_if_a_message_was_appended_since(self, store: Store) -> None:
        append(store, "a", "1", "2")
        kept_messages = store.get_history("a")[:1]
        append(store, "a", "3")
        error = assert_raises(Conflict, store.set_history, "a", kept_messages, expect_last=2)
        assert (error.key, error.expected, error.found) == ("a", 2, 3)
        assert_session(store, "a", visible=["1", "2", "3"], undoable=0)
        store.set_history("a", kept_messages, expect_last=3)
        assert visible_texts(store, "a") == ["1"]

    def test_p5_set_history_expects_the_last_seq_also_if_it_is_hidden(self, store: Store) -> None:
        append(store, "a", "1", "2")
        store.pop("a")
        messages = store.get_history("a")
        assert_raises(Conflict, store.set_history, "a", messages, expect_last=1)
        store.set_history("a", [*messages, user_message("new")], expect_last=2)
        assert visible_texts(store, "a") == ["1", "new"]

    @pytest.mark.parametrize("texts", [["new"], []], ids=len)
    def test_set_history_expects_0_if_there_is_no_session(
        self, store: Store, texts: list[str]
    ) -> None:
        new_messages = user_messages(*texts)
        assert_raises(Conflict, store.set_history, "a", new_messages, expect_last=1)
        assert store.list_sessions() == []
        store.set_history("a", new_messages, expect_last=0)
        assert visible_texts(store, "a") == texts
        assert store.list_sessions() == (["a"] if texts else [])

    def test_p5_late_checkpoint_hides_only_the_summarized_messages(self, store: Store) -> None:
        append(store, "a", *(f"old {number}" for number in range(10)))
        visible_messages = store.get_history("a")
        old_messages, kept_messages = visible_messages[:-4], visible_messages[-4:]
        append(store, "a", "new 1", "new 2", "new 3", "new 4")
        store.checkpoint("a", summary="six of them", upto=old_messages[-1].seq, expect_floor=0)
        assert store.get_history("a", last=8)[:4] == kept_messages
        assert visible_texts(store, "a")[4:] == ["new 1", "new 2", "new 3", "new 4"]
        old_seqs = [message.seq for message in old_messages]
        assert_session(store, "a", hidden=old_seqs, summary="six of them")

    def test_p5_summary_then_truncate_then_compact_loses_nothing(self, store: Store) -> None:
        append(store, "a", *(f"old {number}" for number in range(10)))
        store.set_summary("a", "all but the last four")
        store.truncate_history("a", 4)
        append(store, "a", "new 1", "new 2", "new 3", "new 4")
        store.compact("a")
        texts = [f"old {number}" for number in range(6, 10)] + [f"new {n}" for n in range(1, 5)]
        summary = "all but the last four"
        assert_session(store, "a", visible=texts, hidden=[1, 2, 3, 4, 5, 6], summary=summary)

    @pytest.mark.parametrize("number", [2.5, True, "3"])
    def test_p8_number_that_is_not_an_integer_is_rejected(self, store: Store, number: Any) -> None:
        append(store, "a", "1", "2", "3")
        calls: tuple[Callable[[], object], ...] = (
            lambda: store.get_history("a", last=number),
            lambda: store.get_history("a", after=number),
            lambda: store.view("a", number),
            lambda: store.truncate_history("a", number),
            lambda: store.admin.hide("a", number, 3),
            lambda: store.admin.hide("a", 1, number),
            lambda: store.checkpoint("a", summary="s", upto=number),
            lambda: store.checkpoint("a", summary="s", upto=1, expect_floor=number),
            lambda: store.fork("a", "b", at=number),
            lambda: store.admin.purge("a", before=number),
            lambda: store.list_sessions(limit=number),
            lambda: store.follow("a", after=number, timeout=0),
        )
        for call in calls:
            with pytest.raises(UsageError, match="must be an integer"):
                call()
        assert visible_texts(store, "a") == ["1", "2", "3"]

    def test_p8_none_instead_of_a_required_number_is_rejected(self, store: Store) -> None:
        append(store, "a", "1", "2", "3")
        for call in (
            Call("truncate_history", None),
            Call("hide", None, 3),
            Call("checkpoint", summary="s", upto=None),
            Call("follow", after=None, timeout=0),
        ):
            with pytest.raises(UsageError, match="must be an integer"):
                call.make(store, "a")
        assert visible_texts(store, "a") == ["1", "2", "3"]


def _undo_result(op: str, *, shown: int = 0, hid: int = 0, summary: bool = False) -> UndoResult:
    return UndoResult(op=op, shown=shown, hid=hid, summary_restored=summary)


_UNDOABLE_CALLS = [
    (Call("truncate_history", 1), _undo_result("truncate", shown=2)),
    (Call("truncate_history", 0), _undo_result("truncate", shown=3)),
    (Call("clear"), _undo_result("clear", shown=3, summary=True)),
    (Call("hide", 2, 2), _undo_result("hide", shown=1)),
    (Call("hide", 1, 99), _undo_result("hide", shown=3)),
    (Call("pop"), _undo_result("hide", shown=1)),
    (Call("set_summary", "other"), _undo_result("summary", summary=True)),
    (Call("set_summary", ""), _undo_result("summary", summary=True)),
    (
        Call("checkpoint", summary="other", upto=2),
        _undo_result("checkpoint", shown=2, summary=True),
    ),
    (Call("checkpoint", summary="so far", upto=2), _undo_result("checkpoint", shown=2)),
    (Call("checkpoint", summary="other", upto=0), _undo_result("checkpoint", summary=True)),
    (Call("set_history", user_messages("1", "x", "y")), _undo_result("replace", shown=2, hid=2)),
    (Call("set_history", []), _undo_result("replace", shown=3)),
    (Call("set_history", user_messages(*"1234")), _undo_result("replace", hid=1)),
]

_CALLS_WITHOUT_EFFECT = [
    Call("truncate_history", 3),
    Call("truncate_history", 99),
    Call("hide", 50, 60),
    Call("hide", 0, 0),
    Call("show", 1, 99),
    Call("set_summary", "so far"),
    Call("checkpoint", summary="so far", upto=0),
    Call("set_history", user_messages(*"123")),
    Call("add_messages", []),
    Call("compact"),
    Call("set_meta", title=None),
]


class Undoing(ContractPart):
    """Tests of `undo`."""

    @pytest.mark.parametrize(
        ("operation", "expected"), _UNDOABLE_CALLS, ids=[str(call) for call, _ in _UNDOABLE_CALLS]
    )
    def test_p4_each_operation_can_be_undone(
        self, store: Store, operation: Call, expected: UndoResult
    ) -> None:
        append(store, "a", "1", "2", "3")
        store.set_summary("a", "so far")
        operation.make(store, "a")
        assert store.info("a").undoable == 2
        assert store.undo("a") == expected
        assert_session(store, "a", visible=["1", "2", "3"], summary="so far", floor=0, undoable=1)

    @pytest.mark.parametrize("call", UNDOABLE_CALLS, ids=str)
    def test_p4_undo_restores_visible_messages_and_summary(self, store: Store, call: Call) -> None:
        append_sample(store, "a")
        before = visible_texts(store, "a"), store.get_summary("a")
        call.make(store, "a")
        assert (visible_texts(store, "a"), store.get_summary("a")) != before
        store.undo("a")
        assert (visible_texts(store, "a"), store.get_summary("a")) == before

    @pytest.mark.parametrize("operation", _CALLS_WITHOUT_EFFECT, ids=str)
    def test_operation_without_effect_adds_no_undo_step(
        self, store: Store, operation: Call
    ) -> None:
        append(store, "a", "1", "2", "3")
        store.set_summary("a", "so far")
        operation.make(store, "a")
        assert store.info("a").undoable == 1
        assert store.undo("a").op == "summary"
        assert store.get_summary("a") == ""

    def test_hiding_hidden_messages_adds_no_undo_step(self, store: Store) -> None:
        append(store, "a", "1", "2", "3")
        store.admin.hide("a", 2, 2)
        store.admin.hide("a", 2, 2)
        store.clear("a")
        store.clear("a")
        store.truncate_history("a", 0)
        store.set_history("a", [])
        assert store.pop("a") is None
        assert store.info("a").undoable == 2

    def test_p8_undo_without_a_step_raises_nothing_to_undo(self, store: Store) -> None:
        append(store, "a", "1")
        assert_raises(NothingToUndo, store.undo, "a")
        store.set_summary("a", "x")
        store.undo("a")
        assert_raises(NothingToUndo, store.undo, "a")
        assert visible_texts(store, "a") == ["1"]

    def test_undo_keeps_messages_appended_after_the_operation(self, store: Store) -> None:
        append(store, "a", "1", "2")
        store.clear("a")
        append(store, "a", "3")
        store.set_history("a", user_messages("x"))
        append(store, "a", "4")
        store.undo("a")
        assert visible_texts(store, "a") == ["3", "4"]
        store.undo("a")
        assert_session(store, "a", visible=["1", "2", "3", "4"], hidden=[4])

    def test_undo_shows_only_the_messages_its_operation_hid(self, store: Store) -> None:
        append(store, "a", "1", "2", "3", "4")
        store.admin.hide("a", 2, 2)
        store.truncate_history("a", 1)
        assert store.undo("a") == _undo_result("truncate", shown=2)
        assert_session(store, "a", visible=["1", "3", "4"], floor=0)
        assert store.undo("a") == _undo_result("hide", shown=1)
        assert visible_texts(store, "a") == ["1", "2", "3", "4"]

    def test_messages_hidden_by_an_undo_stay_hidden_after_later_undos(self, store: Store) -> None:
        append(store, "a", "1", "2", "3")
        store.admin.hide("a", 1, 1)
        store.set_history("a", user_messages("2", "x", "y"))
        assert store.undo("a") == _undo_result("replace", shown=1, hid=2)
        assert visible_texts(store, "a") == ["2", "3"]
        assert store.undo("a") == _undo_result("hide", shown=1)
        assert_session(store, "a", texts=[*"123xy"], hidden=[4, 5], last_seq=5)
        assert_raises(NothingToUndo, store.undo, "a")

    def test_undo_empties_a_session_created_by_set_history(self, store: Store) -> None:
        store.set_history("a", user_messages("1", "2"))
        assert store.undo("a") == _undo_result("replace", hid=2)
        assert_session(store, "a", visible=[], hidden=[1, 2])
        assert append(store, "a", "3") == [3]

    def test_at_most_eight_steps_can_be_undone(self, store: Store) -> None:
        for number in range(10):
            store.set_summary("a", f"summary {number}")
        assert store.info("a").undoable == 8
        for number in reversed(range(1, 9)):
            assert store.undo("a").op == "summary"
            assert store.get_summary("a") == f"summary {number}"
        assert_raises(NothingToUndo, store.undo, "a")
        assert store.get_summary("a") == "summary 1"

    def test_eight_steps_of_every_kind_are_undone_in_reverse_order(self, store: Store) -> None:
        append(store, "a", *"123456789")
        earlier_states = []
        operations: list[Callable[[], object]] = [
            lambda: store.admin.hide("a", 4, 5),
            lambda: store.set_summary("a", "first"),
            lambda: store.checkpoint("a", summary="second", upto=2),
            lambda: store.pop("a"),
            lambda: store.set_history(
                "a", [*store.get_history("a")[:2], user_message("x"), user_message("y")]
            ),
            lambda: store.truncate_history("a", 3),
            lambda: store.set_history("a", [*store.get_history("a"), user_message("z")]),
            lambda: store.clear("a"),
        ]

        def current_state() -> tuple[list[Any], str, int]:
            return visible_texts(store, "a"), store.get_summary("a"), store.info("a").floor

        for operation in operations:
            earlier_states.append(current_state())
            operation()
        for expected in reversed(earlier_states):
            store.undo("a")
            assert current_state() == expected

    def test_undo_cannot_be_redone(self, store: Store) -> None:
        store.set_summary("a", "one")
        store.set_summary("a", "two")
        store.undo("a")
        store.undo("a")
        assert store.get_summary("a") == ""
        store.set_summary("a", "three")
        store.undo("a")
        assert_session(store, "a", summary="", undoable=0)

    def test_undo_does_not_change_meta(self, store: Store) -> None:
        store.set_summary("a", "x")
        store.set_meta("a", title="kept")
        store.undo("a")
        assert_session(store, "a", meta={"title": "kept"}, summary="")

    def test_p4_undo_shows_archived_messages(self, store: Store) -> None:
        append(store, "a", "1", "2", "3", "4")
        store.checkpoint("a", summary="one", upto=1)
        assert store.compact("a").archived == 1
        store.checkpoint("a", summary="to three", upto=3)
        assert store.compact("a").archived == 2
        append(store, "a", "5")
        assert store.undo("a") == _undo_result("checkpoint", shown=2, summary=True)
        assert_session(store, "a", visible=["2", "3", "4", "5"], summary="one")
        assert store.undo("a") == _undo_result("checkpoint", shown=1, summary=True)
        assert visible_texts(store, "a") == ["1", "2", "3", "4", "5"]
        assert [m.seq for m in store.get_history("a", last=4)] == [2, 3, 4, 5]
        assert [m.seq for m in store.get_history("a", after=1, last=2)] == [4, 5]
        assert (store.info("a").visible, store.info("a").floor) == (5, 0)

    def test_archived_messages_shown_by_undo_can_be_hidden_again(self, store: Store) -> None:
        append(store, "a", "1", "2", "3")
        store.truncate_history("a", 1)
        store.compact("a")
        store.undo("a")
        store.admin.hide("a", 2, 2)
        assert visible_texts(store, "a") == ["1", "3"]
        store.set_history("a", user_messages("1", "x"))
        assert visible_texts(store, "a") == ["1", "x"]
        store.compact("a")
        assert visible_texts(store, "a") == ["1", "x"]
        store.undo("a")
        store.undo("a")
        assert_session(store, "a", visible=["1", "2", "3"], hidden=[4])

    def test_p4_long_summaries_can_be_restored_by_undo_after_compaction(self, store: Store) -> None:
        append(store, "a", *"12345")
        summaries = [f"{number} " * 20_000 for number in range(4)]
        for upto, summary in enumerate(summaries, start=1):
            store.checkpoint("a", summary=summary, upto=upto)
            if upto % 2:
                store.compact("a")
        for upto in reversed(range(1, 4)):
            store.undo("a")
            assert_session(store, "a", summary=summaries[upto - 1], visible=list("12345")[upto:])

    def test_p4_many_hidden_ranges_can_be_restored_by_undo_after_compaction(
        self, store: Store
    ) -> None:
        store.add_messages("a", [user_message(str(number)) for number in range(800)])
        for seq in range(2, 800, 2):
            store.admin.hide("a", seq, seq)
        odd_texts = visible_texts(store, "a")
        append(store, "a", "new")
        store.clear("a")
        store.compact("a")
        append(store, "a", "newer")
        assert store.undo("a") == _undo_result("clear", shown=402)
        assert visible_texts(store, "a") == [*odd_texts, "new", "newer"]
