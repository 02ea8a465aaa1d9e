"""Tests of `undo`: the last eight hiding, replacing or summarizing calls can be undone (P4)."""
# ruff: noqa: D102 - tests have names instead of docstrings

from collections.abc import Callable
from typing import Any

import pytest

from stenolog.errors import NothingToUndo
from stenolog.records import Undone
from stenolog.stores.base import Store
from stenolog.testing.contract.open_store_base import (
    ContractPart,
    all_messages,
    append,
    assert_raises,
    assert_session,
    hidden_seqs,
    user_message,
    user_messages,
    visible_texts,
)
from stenolog.testing.store_calls import Call


def _undo_result(op: str, *, shown: int = 0, hid: int = 0, summary: bool = False) -> Undone:
    return Undone(op=op, shown=shown, hid=hid, summary_restored=summary)


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
    Call("set_summary", "so far"),
    Call("checkpoint", summary="so far", upto=0),
    Call("set_history", user_messages(*"123")),
    Call("add_messages", []),
    Call("compact"),
    Call("set_meta", title=None),
]


class Undoing(ContractPart):
    """`undo`."""

    @pytest.mark.parametrize(
        ("operation", "expected"), _UNDOABLE_CALLS, ids=[str(call) for call, _ in _UNDOABLE_CALLS]
    )
    def test_p4_each_operation_can_be_undone(
        self, store: Store, operation: Call, expected: Undone
    ) -> None:
        append(store, "a", "1", "2", "3")
        store.set_summary("a", "so far")
        operation.make(store, "a")
        assert store.info("a").undoable == 2
        assert store.undo("a") == expected
        assert_session(store, "a", visible=["1", "2", "3"], summary="so far", floor=0, undoable=1)

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
        store.hide("a", 2, 2)
        store.hide("a", 2, 2)
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
        store.hide("a", 2, 2)
        store.truncate_history("a", 1)
        assert store.undo("a") == _undo_result("truncate", shown=2)
        assert_session(store, "a", visible=["1", "3", "4"], floor=0)
        assert store.undo("a") == _undo_result("hide", shown=1)
        assert visible_texts(store, "a") == ["1", "2", "3", "4"]

    def test_messages_hidden_by_an_undo_stay_hidden_after_later_undos(self, store: Store) -> None:
        append(store, "a", "1", "2", "3")
        store.hide("a", 1, 1)
        store.set_history("a", user_messages("2", "x", "y"))
        assert store.undo("a") == _undo_result("replace", shown=1, hid=2)
        assert visible_texts(store, "a") == ["2", "3"]
        assert store.undo("a") == _undo_result("hide", shown=1)
        assert all_messages(store, "a") == [
            (1, "1", False),
            (2, "2", False),
            (3, "3", False),
            (4, "x", True),
            (5, "y", True),
        ]
        assert_raises(NothingToUndo, store.undo, "a")

    def test_repeated_replace_and_undo_restores_the_same_history(self, store: Store) -> None:
        append(store, "a", "1", "2")
        for text in ("x", "y"):
            store.set_history("a", user_messages(text))
            assert visible_texts(store, "a") == [text]
            store.undo("a")
            assert visible_texts(store, "a") == ["1", "2"]
        assert hidden_seqs(store, "a") == [3, 4]

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
        states = []
        steps: list[Callable[[], object]] = [
            lambda: store.hide("a", 4, 5),
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

        def state() -> tuple[list[Any], str, int]:
            return visible_texts(store, "a"), store.get_summary("a"), store.info("a").floor

        for step in steps:
            states.append(state())
            step()
        for expected in reversed(states):
            store.undo("a")
            assert state() == expected

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
        assert store.info("a").visible == 5
        assert store.info("a").floor == 0

    def test_archived_messages_shown_by_undo_can_be_hidden_again(self, store: Store) -> None:
        append(store, "a", "1", "2", "3")
        store.truncate_history("a", 1)
        store.compact("a")
        store.undo("a")
        store.hide("a", 2, 2)
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
            store.hide("a", seq, seq)
        odd_texts = visible_texts(store, "a")
        append(store, "a", "new")
        store.clear("a")
        store.compact("a")
        append(store, "a", "newer")
        assert store.undo("a") == _undo_result("clear", shown=402)
        assert visible_texts(store, "a") == [*odd_texts, "new", "newer"]
