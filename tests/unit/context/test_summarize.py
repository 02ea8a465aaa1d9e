"""Tests that a summary plan is executed as one checkpoint, by seq, or not at all."""

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from stenolog import Store
from stenolog.context.summarize import (
    COMPACTED_UPTO,
    SummaryPlan,
    SummaryReport,
    Trigger,
    apply_plan,
    is_undone,
    plan_summary,
)
from stenolog.context.window import Limits
from stenolog.errors import StoreBusy
from stenolog.providers.chat_model import CompletionFunction
from stenolog.stores.base import find_info
from stenolog.stores.open_store import open_store
from stenolog.stores.withdrawn_messages import withdrawn_seqs
from support import needs
from support.histories import CHEAP, KEY, talk
from support.scripted_completion import ScriptedCompletion

LIMITS = Limits(max_context_tokens=4_000, max_history_messages=10)
NEW = '{"facts": ["The cat is called Ivo"], "last_state": "on"}'


@pytest.fixture(params=["memory:", "jsonl", "sqlite"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """Yield a session of eight turns, sixteen messages, on each engine."""
    if request.param == "sqlite":
        needs.package("apsw")
    places = {"memory:": "memory:", "jsonl": str(tmp_path), "sqlite": f"sqlite:{tmp_path}/s.db"}
    with open_store(places[request.param]) as opened:
        opened.add_messages(KEY, talk(8))
        yield opened


def planned(store: Store, trigger: Trigger = "auto") -> SummaryPlan | None:
    view = store.view(KEY)
    return plan_summary(
        view.messages,
        summary=view.info.summary,
        floor=view.info.floor,
        uid=view.uid,
        limits=LIMITS,
        tokens=CHEAP,
        trigger=trigger,
        undone=is_undone(view.info),
    )


def carried_out(
    store: Store, ask: CompletionFunction | None = None, trigger: Trigger = "auto"
) -> SummaryReport | None:
    plan = planned(store, trigger)
    assert plan is not None
    return apply_plan(store, KEY, plan, complete=ask, limits=LIMITS, tokens=CHEAP)


def seqs(store: Store) -> list[int]:
    return [message.seq for message in store.get_history(KEY)]


def test_plan_becomes_one_checkpoint_and_one_report(store: Store) -> None:
    done = carried_out(store, ScriptedCompletion([NEW]))
    assert done is not None
    assert (done.key, done.reason, done.first, done.last, done.count) == (KEY, "count", 1, 12, 12)
    assert done.tokens_after < done.tokens_before
    assert done.fallback == ""
    assert "12 messages (seq 1–12) were summarized: about" in str(done)
    assert seqs(store) == [13, 14, 15, 16]
    assert "The cat is called Ivo" in store.get_summary(KEY)
    assert store.info(KEY).undoable == 1
    assert planned(store) is None


def test_report_counts_dropped_lines(store: Store) -> None:
    lines = [f"a fact of some length, number {number}" for number in range(99)]
    done = carried_out(
        store, ScriptedCompletion([json.dumps({"facts": lines, "last_state": "on"})])
    )
    assert done is not None
    kept = store.get_summary(KEY).splitlines()
    assert done.dropped_lines == sum(f"- {line}" not in kept for line in lines) > 0
    assert f"tokens; {done.dropped_lines} lines did not fit; undo shows" in str(done)


def test_each_undo_reverts_one_summary(store: Store) -> None:
    carried_out(store)
    store.add_messages(KEY, talk(8))
    carried_out(store)
    store.undo(KEY)
    assert is_undone(store.info(KEY))
    undone = store.undo(KEY)
    assert (undone.op, undone.shown) == ("checkpoint", 12)
    assert is_undone(store.info(KEY))
    assert len(seqs(store)) == 32
    assert store.get_summary(KEY) == ""


def test_undone_summary_is_recognized_after_a_restart(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        store.add_messages(KEY, talk(8))
        carried_out(store)
        store.undo(KEY)
    with open_store(tmp_path) as store:
        assert planned(store) is None


def test_a_crash_before_the_checkpoint_leaves_the_token_budget_in_force(store: Store) -> None:
    plan = planned(store)
    assert plan is not None
    store.set_meta(KEY, **{COMPACTED_UPTO: plan.upto})  # without a checkpoint after it
    assert planned(store) is None
    store.add_messages(KEY, talk(2, size=9_000))
    assert planned(store) is not None


def test_p5_messages_stored_during_a_summary_stay_visible(store: Store) -> None:
    asked, appended = threading.Event(), threading.Event()

    def slow(
        messages: Sequence[Mapping[str, Any]],
        *,
        schema: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
    ) -> str:
        del messages, schema, max_tokens
        asked.set()
        assert appended.wait(60)
        return NEW

    def talk_on() -> None:
        assert asked.wait(60)
        for number in range(30):
            store.add_message(KEY, "user", f"meanwhile {number}")
        appended.set()

    other = threading.Thread(target=talk_on)
    other.start()
    done = carried_out(store, slow)
    other.join()
    assert done is not None
    assert (done.first, done.last) == (1, 12)
    assert seqs(store) == list(range(13, 47))
    assert [message.seq for message in store.get_history(KEY, full=True) if message.hidden] == list(
        range(1, 13)
    )


def moved(store: Store) -> None:
    store.checkpoint(KEY, summary="Somebody was quicker.", upto=4)


def told(store: Store) -> None:
    store.set_summary(KEY, "Somebody knows better.")


def begun_anew(store: Store) -> None:
    store.delete(KEY)
    store.add_messages(KEY, talk(8))


def gone(store: Store) -> None:
    store.delete(KEY)


def taken_back(store: Store) -> None:
    store.admin.hide(KEY, 3, 4)


@pytest.mark.quick(5)
@pytest.mark.parametrize("meanwhile", [moved, told, begun_anew, gone, taken_back])
def test_plan_is_dropped_if_the_session_was_replaced(store: Store, meanwhile: Any) -> None:
    def answer(messages: Sequence[Mapping[str, Any]]) -> str:
        del messages
        meanwhile(store)
        return NEW

    assert carried_out(store, ScriptedCompletion([answer])) is None
    assert "Ivo" not in store.get_summary(KEY)
    left = {moved: 12, told: 16, begun_anew: 16, gone: 0, taken_back: 14}
    assert len(seqs(store)) == left[meanwhile]
    info = find_info(store, KEY)
    assert info is None or not is_undone(info)


def test_messages_shown_during_a_summary_are_not_hidden(
    store: Store,
) -> None:
    store.admin.hide(KEY, 3, 4)

    def answer(messages: Sequence[Mapping[str, Any]]) -> str:
        del messages
        store.undo(KEY)
        return NEW

    assert carried_out(store, ScriptedCompletion([answer])) is None
    assert len(seqs(store)) == 16


def test_messages_hidden_after_the_plan_do_not_stop_it(store: Store) -> None:
    def answer(messages: Sequence[Mapping[str, Any]]) -> str:
        del messages
        store.pop(KEY)
        return NEW

    assert carried_out(store, ScriptedCompletion([answer])) is not None
    assert seqs(store) == [13, 14, 15]


class Late:
    """A store on which another process moves the floor at the last moment."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def checkpoint(self, key: str, **given: Any) -> None:
        moved(self._store)
        self._store.checkpoint(key, **given)


def test_moved_floor_makes_the_checkpoint_fail(store: Store) -> None:
    plan = planned(store)
    assert plan is not None
    late: Any = Late(store)
    assert apply_plan(late, KEY, plan, complete=None, limits=LIMITS, tokens=CHEAP) is None
    assert store.get_summary(KEY) == "Somebody was quicker."
    assert seqs(store) == list(range(5, 17))
    assert not is_undone(store.info(KEY))


class Busy(Late):
    """A store that is busy at the checkpoint; the calls before it succeed."""

    meanwhile: Any = staticmethod(lambda _: None)

    def checkpoint(self, key: str, **given: Any) -> None:
        del given
        self.meanwhile(self._store)
        raise StoreBusy(f"{key!r} is in use")


def test_failed_checkpoint_keeps_the_message_count_trigger(store: Store) -> None:
    plan = planned(store)
    assert plan is not None
    busy: Any = Busy(store)
    with pytest.raises(StoreBusy):
        apply_plan(busy, KEY, plan, complete=None, limits=LIMITS, tokens=CHEAP)
    assert not is_undone(store.info(KEY))
    assert carried_out(store) is not None


def test_checkpoint_stored_despite_an_error_can_be_undone(store: Store) -> None:
    plan = planned(store)
    assert plan is not None
    busy: Any = Busy(store)
    busy.meanwhile = lambda at: at.checkpoint(KEY, summary="It was made.", upto=plan.upto)
    with pytest.raises(StoreBusy):
        apply_plan(busy, KEY, plan, complete=None, limits=LIMITS, tokens=CHEAP)
    assert not is_undone(store.info(KEY))
    store.undo(KEY)
    assert is_undone(store.info(KEY))


class Deleted(Late):
    """A store on which another process changes the session just before its metadata is written."""

    meanwhile: Any = staticmethod(gone)

    def set_meta(self, key: str, **given: Any) -> None:
        if self.meanwhile is not None:
            meanwhile, self.meanwhile = self.meanwhile, None
            meanwhile(self._store)
        self._store.set_meta(key, **given)

    def checkpoint(self, key: str, **given: Any) -> None:
        self._store.checkpoint(key, **given)


def test_session_deleted_before_the_checkpoint_is_not_recreated(store: Store) -> None:
    plan = planned(store)
    assert plan is not None
    deleted: Any = Deleted(store)
    assert apply_plan(deleted, KEY, plan, complete=None, limits=LIMITS, tokens=CHEAP) is None
    assert store.list_sessions() == []
    assert plan.uid in [trashed.uid for trashed in store.admin.list_trash()]


def test_recreated_session_is_left_unchanged(store: Store) -> None:
    plan = planned(store)
    assert plan is not None
    deleted: Any = Deleted(store)
    deleted.meanwhile = begun_anew
    assert apply_plan(deleted, KEY, plan, complete=None, limits=LIMITS, tokens=CHEAP) is None
    assert len(seqs(store)) == 16
    assert store.get_summary(KEY) == ""
    assert store.info(KEY).meta == {}


def test_session_recreated_with_a_summary_is_not_deleted(store: Store) -> None:
    def summarized_anew(at: Store) -> None:
        gone(at)
        at.set_summary(KEY, "Ivo is a cat.")

    plan = planned(store)
    assert plan is not None
    deleted: Any = Deleted(store)
    deleted.meanwhile = summarized_anew
    assert apply_plan(deleted, KEY, plan, complete=None, limits=LIMITS, tokens=CHEAP) is None
    assert store.get_summary(KEY) == "Ivo is a cat."
    assert store.info(KEY).meta == {}


def test_session_deleted_before_the_checkpoint_raises_no_error(store: Store) -> None:
    class Later(Late):
        def checkpoint(self, key: str, **given: Any) -> None:
            gone(self._store)
            self._store.checkpoint(key, **given)

    plan = planned(store)
    assert plan is not None
    later: Any = Later(store)
    assert apply_plan(later, KEY, plan, complete=None, limits=LIMITS, tokens=CHEAP) is None
    assert store.list_sessions() == []


# --- withdrawn messages --------------------------------------------------------------------------


def test_withdrawn_messages_are_recorded_with_the_summary(store: Store) -> None:
    store.admin.hide(KEY, 3, 4)
    store.admin.hide(KEY, 7, 7)
    carried_out(store)
    assert store.info(KEY).floor == 12
    assert withdrawn_seqs(store.info(KEY).meta) == [(3, 4), (7, 7)]


def test_hidden_start_without_a_summary_counts_as_withdrawn(store: Store) -> None:
    store.truncate_history(KEY, 12)
    carried_out(store)
    assert withdrawn_seqs(store.info(KEY).meta) == [(1, 4)]


def test_messages_summarized_by_another_program_are_not_withdrawn(store: Store) -> None:
    store.checkpoint(KEY, summary="By a loop of their own.", upto=4)
    carried_out(store)
    assert withdrawn_seqs(store.info(KEY).meta) == []


def test_each_summary_adds_newly_withdrawn_messages(store: Store) -> None:
    store.admin.hide(KEY, 3, 4)
    carried_out(store)  # up to 12
    store.admin.hide(KEY, 13, 14)  # adjacent to the floor, so it becomes part of it
    store.add_messages(KEY, talk(8))  # up to 32
    store.admin.hide(KEY, 20, 20)
    carried_out(store)
    assert withdrawn_seqs(store.info(KEY).meta) == [(3, 4), (13, 14), (20, 20)]


def test_messages_removed_by_set_history_are_withdrawn(store: Store) -> None:
    store.set_history(KEY, [*talk(2), *talk(6, size=20)])
    carried_out(store)
    assert withdrawn_seqs(store.info(KEY).meta) == [(5, 16)]


def test_visible_messages_are_no_longer_withdrawn(store: Store) -> None:
    store.admin.hide(KEY, 3, 4)
    carried_out(store)
    store.undo(KEY)
    store.undo(KEY)
    assert len(seqs(store)) == 16
    carried_out(store, trigger="manual")
    assert withdrawn_seqs(store.info(KEY).meta) == []


def test_concurrent_summary_keeps_its_meta_field(store: Store) -> None:
    store.admin.hide(KEY, 3, 3)
    store.admin.hide(KEY, 7, 7)
    plan = planned(store)
    assert plan is not None
    late: Any = Late(store)
    assert apply_plan(late, KEY, plan, complete=None, limits=LIMITS, tokens=CHEAP) is None
    assert withdrawn_seqs(store.info(KEY).meta) == [(3, 3)]


def test_concurrent_summary_of_more_messages_keeps_its_withdrawn_messages(store: Store) -> None:
    def summarized_more(at: Store) -> None:
        at.set_meta(KEY, taken_back=[[14, 14]])
        at.checkpoint(KEY, summary="Somebody was quicker.", upto=14)

    store.admin.hide(KEY, 14, 14)
    plan = planned(store)
    assert plan is not None
    late: Any = Deleted(store)
    late.meanwhile = summarized_more
    assert apply_plan(late, KEY, plan, complete=None, limits=LIMITS, tokens=CHEAP) is None
    assert store.info(KEY).floor == 14
    assert withdrawn_seqs(store.info(KEY).meta) == [(14, 14)]


def test_next_summary_extends_the_previous_one(store: Store) -> None:
    carried_out(store, ScriptedCompletion([NEW]))
    store.add_messages(KEY, talk(8))
    model = ScriptedCompletion(['{"facts": ["The dog is called Max"], "last_state": "on"}'])
    carried_out(store, model)
    assert "Ivo" in model.calls[0][-1]["content"]
    assert "The cat is called Ivo" in store.get_summary(KEY)
    assert "The dog is called Max" in store.get_summary(KEY)
