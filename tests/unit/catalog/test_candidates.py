"""What recall may choose from: of one owner only, and only what may be found."""

import random
from datetime import UTC, datetime, timedelta

import pytest

from stenolog.catalog import Catalog, message_search
from stenolog.catalog.message_metadata import mark_received
from stenolog.catalog.tokenizer import stems
from stenolog.errors import UsageError
from stenolog.memory.transcript import is_withdrawn
from stenolog.sessions.keys import owner_in_key
from stenolog.stores import withdrawn_messages
from stenolog.stores.base import Store
from support.catalog_scan import EVERYWHERE
from support.random_operations import operate

THEN = datetime(2026, 3, 1, 12, tzinfo=UTC)


def _found(catalog: Catalog, question: str, owner: str, **how: object) -> list[tuple[str, int]]:
    """What is found with the threads of a sender joined, unless it is said otherwise."""
    joined = {"threads": True, **how}
    found = catalog.candidates(stems(question), owner=owner, **joined)  # type: ignore[arg-type]
    return sorted((one.key, one.seq) for one in found.messages)


def _say(store: Store, key: str, *texts: str, at: datetime | None = None) -> None:
    said = [
        mark_received({"role": "user", "content": text}, sender=owner_in_key(key)) for text in texts
    ]
    store.add_messages(key, said, at=None if at is None else [at] * len(said))


def test_forms_of_a_word_are_found(store: Store, catalog: Catalog) -> None:
    _say(store, "cli:a", "We deployed the server")
    assert _found(catalog, "when is the deployment?", "cli:a") == [("cli:a", 1)]
    assert catalog.search("deploy").count == 0, "a search is for words as they are"


def test_neighbours_of_a_match_are_returned(store: Store, catalog: Catalog) -> None:
    _say(store, "cli:a", "far", "before", "before", "the dentist", "after", "after", "away")
    assert _found(catalog, "dentist", "cli:a") == [("cli:a", seq) for seq in (2, 3, 4, 5, 6)]


def test_messages_of_another_owner_are_not_found(
    store: Store, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner filter is applied before the limit of messages per word."""
    for number in range(30):
        _say(store, f"slack:t{number}:loud", *["zanzibar"] * 10)
    _say(store, "slack:t1:quiet", "x", "zanzibar once", "y")
    _say(store, "slack:t2:quiet", "zanzibar twice")
    _say(store, "slack:quiet", "zanzibar alone")
    _say(store, "slack:t1", "zanzibar in a group")
    with monkeypatch.context() as few:
        few.setattr(message_search, "_MAX_PER_WORD", 5)
        assert _found(catalog, "zanzibar", "slack:quiet", limit=5) == [
            ("slack:quiet", 1),
            ("slack:t1:quiet", 1),
            ("slack:t1:quiet", 2),
            ("slack:t1:quiet", 3),
            ("slack:t2:quiet", 1),
        ]
    assert _found(catalog, "zanzibar", "slack:t1") == [("slack:t1", 1)]
    assert _found(catalog, "zanzibar", "slack:nobody") == []
    assert {key for key, _ in _found(catalog, "zanzibar", "slack:loud", limit=700)} == {
        f"slack:t{number}:loud" for number in range(30)
    }


def test_session_of_two_senders_is_found_by_neither_and_by_itself(
    store: Store, catalog: Catalog
) -> None:
    _say(store, "slack:t1:ann", "zanzibar by ann")
    _say(store, "slack:t2:ann", "zanzibar by ann, too")
    assert len(_found(catalog, "zanzibar", "slack:ann")) == 2
    by_bob = mark_received({"role": "user", "content": "zanzibar by bob"}, sender="slack:bob")
    for body in (by_bob, {"role": "user", "content": "zanzibar by a client of the gateway"}):
        store.add_full_message("slack:t2:ann", body)
        assert catalog.sender("slack:t2:ann") == ""
        assert _found(catalog, "zanzibar", "slack:ann") == [("slack:t1:ann", 1)]
        assert _found(catalog, "zanzibar", "slack:bob") == []
    alone = _found(catalog, "zanzibar", "slack:t2:ann", threads=False)
    assert alone == [("slack:t2:ann", seq) for seq in (1, 2, 3)]


def test_sender_is_found_in_a_session_that_begins_with_another_role(
    store: Store, catalog: Catalog
) -> None:
    store.add_message("slack:t1:ann", "system", "zanzibar by nobody")
    assert catalog.sender("slack:t1:ann") == ""
    # Far from the first user message, so that it is not returned as its neighbour.
    for text in ("zanzibar offered", *["x"] * 6):
        store.add_message("slack:t1:ann", "assistant", text)
    assert catalog.sender("slack:t1:ann") == ""
    _say(store, "slack:t1:ann", "zanzibar by ann")
    assert catalog.sender("slack:t1:ann") == "slack:ann"
    assert ("slack:t1:ann", 2) in _found(catalog, "zanzibar", "slack:ann")


def test_sender_is_kept_when_a_session_is_indexed_again(store: Store, catalog: Catalog) -> None:
    _say(store, "slack:t1:ann", *[f"zanzibar {number}" for number in range(5)])
    assert len(_found(catalog, "zanzibar", "slack:ann")) == 5
    store.admin.purge("slack:t1:ann", before=4)
    assert catalog.sender("slack:t1:ann") == "slack:ann"
    assert _found(catalog, "zanzibar", "slack:ann") == [("slack:t1:ann", 4), ("slack:t1:ann", 5)]
    store.delete("slack:t1:ann")
    store.add_message("slack:t1:ann", "user", "zanzibar by a client of the gateway")
    assert catalog.sender("slack:t1:ann") == ""
    assert _found(catalog, "zanzibar", "slack:ann") == []


def test_fork_keeps_the_sender(store: Store, catalog: Catalog) -> None:
    _say(store, "slack:t1:ann", "zanzibar by ann")
    store.fork("slack:t1:ann", "app:bob:1")
    assert catalog.sender("app:bob:1") == "slack:ann"
    store.add_message("app:bob:1", "user", "zanzibar by a client of the gateway")
    assert catalog.sender("app:bob:1") == ""


def test_other_sessions_are_searched_only_with_threads(store: Store, catalog: Catalog) -> None:
    for number in range(30):
        _say(store, f"app:alice{number}:1", *["zanzibar"] * 10)
    _say(store, "app:bob:1", "zanzibar once")
    _say(store, "app:1", "zanzibar alone")
    assert _found(catalog, "zanzibar", "app:bob:1", threads=False, limit=1) == [("app:bob:1", 1)]
    assert _found(catalog, "zanzibar", "app:1", threads=False) == [("app:1", 1)]
    assert _found(catalog, "zanzibar", "app:bob", threads=False) == []


def test_rarest_words_decide_which_messages_are_returned(store: Store, catalog: Catalog) -> None:
    _say(store, "cli:a", "ferry zanzibar", *["the ferry again"] * 50)
    assert ("cli:a", 1) in _found(catalog, "ferry zanzibar", "cli:a", limit=1)


def test_common_word_counts_for_old_messages_too(
    store: Store, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(message_search, "_MAX_PER_WORD", 10)
    _say(store, "cli:a", "zanzibar ferry", "gap", "gap", *["ferry"] * 20, "gap", "zanzibar", "gap")
    assert ("cli:a", 1) in _found(catalog, "ferry zanzibar", "cli:a", limit=1)


def test_summarized_messages_are_found_and_withdrawn_ones_are_not(
    store: Store, catalog: Catalog
) -> None:
    _say(store, "cli:a", *[f"ferry {number}" for number in range(1, 9)])
    store.checkpoint("cli:a", summary="they talked", upto=3)
    store.admin.hide("cli:a", 6, 6)
    assert _found(catalog, "ferry", "cli:a") == [("cli:a", seq) for seq in (1, 2, 3, 4, 5, 7, 8)]
    store.clear("cli:a")
    assert _found(catalog, "ferry", "cli:a") == [], "no summary stands for them"
    store.undo("cli:a")
    assert len(_found(catalog, "ferry", "cli:a")) == 7


def test_popped_messages_are_not_found(store: Store, catalog: Catalog) -> None:
    _say(store, "cli:a", "my locker is zebra seven", "noted, zebra")
    for left in ([1], []):
        assert store.pop("cli:a") is not None
        assert _found(catalog, "zebra locker", "cli:a") == [("cli:a", seq) for seq in left]
    _say(store, "cli:a", "hello again")
    assert _found(catalog, "zebra locker", "cli:a") == []
    store.undo("cli:a")
    assert _found(catalog, "zebra locker", "cli:a") == [("cli:a", 1), ("cli:a", 3)]


def test_withdrawn_messages_do_not_use_up_the_limit(store: Store, catalog: Catalog) -> None:
    _say(store, "cli:a", "ferry", *["the zanzibar ferry"] * 40)
    store.admin.hide("cli:a", 2, 41)
    assert _found(catalog, "zanzibar ferry", "cli:a", limit=2) == [("cli:a", 1)]


def test_recall_and_consolidation_agree_on_withdrawn_messages(
    store: Store, catalog: Catalog
) -> None:
    """Both would have to change at once; the rule is that of memory.transcript."""
    chance = random.Random(7)
    hidden = taken_back = 0
    for number in range(300):
        operate(store, chance)
        for key in store.list_sessions() if number % 15 == 0 else []:
            info = store.info(key)
            said = [m for m in store.get_history(key, full=True) if m.role != "system"]
            left = [(key, m.seq) for m in said if not is_withdrawn(m, info)]
            assert _found(catalog, EVERYWHERE, key, threads=False, limit=1_000) == left
            hidden += sum(m.hidden for m in said)
            taken_back += len(said) - len(left)
    assert hidden > taken_back > 100


def test_messages_withdrawn_before_a_summary_are_not_found_after_it(
    store: Store, catalog: Catalog
) -> None:
    _say(store, "cli:a", *[f"ferry {number}" for number in range(1, 9)])
    store.admin.hide("cli:a", 3, 4)
    left = [("cli:a", seq) for seq in (1, 2, 5, 6, 7, 8)]
    assert _found(catalog, "ferry", "cli:a") == left
    store.set_meta("cli:a", **{withdrawn_messages.META_FIELD: [[3, 4]]})
    store.checkpoint("cli:a", summary="they talked", upto=6)
    assert _found(catalog, "ferry", "cli:a") == left
    store.checkpoint("cli:a", summary="they talked on", upto=8)
    assert _found(catalog, "ferry", "cli:a") == left


def test_visible_messages_of_the_asking_session_are_left_out(
    store: Store, catalog: Catalog
) -> None:
    _say(store, "cli:a", *[f"ferry {number}" for number in range(1, 7)])
    _say(store, "other:t:x", "ferry")
    assert _found(catalog, "ferry", "cli:a", exclude_visible_of="cli:a") == []
    store.checkpoint("cli:a", summary="they talked", upto=4)
    assert _found(catalog, "ferry", "cli:a", exclude_visible_of="cli:a") == [
        ("cli:a", seq) for seq in (1, 2, 3, 4)
    ]
    assert ("cli:a", 4) in _found(catalog, "ferry", "cli:a", exclude_visible_of="cli:a", limit=1)


def test_sessions_of_another_agent_are_left_out(store: Store, catalog: Catalog) -> None:
    for key, agent in (("s:1:u", "bob"), ("s:2:u", "eve"), ("s:3:u", None)):
        _say(store, key, "ferry")
        store.set_meta(key, agent=agent)
    assert _found(catalog, "ferry", "s:u", agent="bob") == [("s:1:u", 1), ("s:3:u", 1)]
    assert len(_found(catalog, "ferry", "s:u")) == 3


def test_system_prompts_are_left_out(store: Store, catalog: Catalog) -> None:
    store.add_messages("cli:a", [{"role": "system", "content": "talk about the ferry"}])
    _say(store, "cli:a", "the ferry")
    assert _found(catalog, "ferry", "cli:a") == [("cli:a", 2)]


def test_messages_of_the_requested_period_come_first(store: Store, catalog: Catalog) -> None:
    day = timedelta(days=1)
    _say(store, "cli:t:a", *["ferry"] * 30, at=THEN)
    _say(store, "cli:a", "ferry", at=THEN + 40 * day)
    march = {"since": THEN - day, "until": THEN + day}
    assert {key for key, _ in _found(catalog, "ferry", "cli:a", **march)} == {"cli:t:a"}
    april = {"since": THEN + 39 * day, "until": THEN + 41 * day}
    assert ("cli:a", 1) in _found(catalog, "ferry", "cli:a", limit=1, **april)
    assert len(_found(catalog, "ferry", "cli:a", **april)) == 31
    assert _found(catalog, "", "cli:a", **april) == [("cli:a", 1)], "a time alone is enough"


def test_word_frequencies_are_returned(store: Store, catalog: Catalog) -> None:
    _say(store, "cli:a", "ferry", "ferry zanzibar", "neither")
    found = catalog.candidates(["ferri", "zanzibar", "absent"], owner="cli:a")
    assert found.count == 3
    assert found.containing == {"ferri": 2, "zanzibar": 1, "absent": 0}


def test_deleted_session_is_not_found(store: Store, catalog: Catalog) -> None:
    _say(store, "cli:a", "ferry")
    assert _found(catalog, "ferry", "cli:a")
    store.delete("cli:a")
    assert _found(catalog, "ferry", "cli:a") == []
    _say(store, "cli:a", "nothing here")
    assert _found(catalog, "ferry", "cli:a") == []


def test_invalid_limit_and_time_are_rejected(catalog: Catalog) -> None:
    with pytest.raises(UsageError, match="limit"):
        catalog.candidates([], owner="a", limit=0)
    assert catalog.candidates(["x"], owner="a", limit=2**40).messages == []
    with pytest.raises(UsageError, match="zone"):
        catalog.candidates([], owner="a", since=datetime(2026, 1, 1))  # noqa: DTZ001
