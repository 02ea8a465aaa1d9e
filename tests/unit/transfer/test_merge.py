"""What an old session adds to one that is there: each message once, and nothing brought back."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stenolog.sessions.session_manager import SessionManager
from stenolog.stores.base import Store
from stenolog.stores.open_store import open_store
from stenolog.transfer.migration import migrate_from_json
from support import temporary_folders


@pytest.fixture
def workspace() -> Iterator[Path]:
    with temporary_folders.folder() as path:
        yield path


@pytest.fixture
def place(workspace: Path) -> Path:
    folder = workspace / "old"
    folder.mkdir()
    return folder


@pytest.fixture(params=["{}", "sqlite:{}/steno.db"], ids=["jsonl", "sqlite"])
def store(request: pytest.FixtureRequest, workspace: Path) -> Iterator[Store]:
    with open_store(request.param.format(workspace)) as opened:
        yield opened


def contents(store: Store, key: str = "k") -> list[Any]:
    return [message.content for message in store.get_history(key, full=True)]


def forget_tokens(store: Store) -> list[str]:
    """Say so much that the tokens before it are forgotten; what was said."""
    said = [f"said here {number}" for number in range(1_200)]
    store.add_messages("k", [{"role": "user", "content": text} for text in said])
    for number in range(1_100):
        said.append(f"live {number}")
        store.add_message("k", "user", said[-1], once=f"u{number}")
    store.truncate_history("k", 10)
    store.compact("k")
    return said


@pytest.mark.parametrize("before", [[], ["a", "b"]], ids=["new", "begun"])
def test_p12_session_manager_with_forgotten_idempotency_keys_is_merged_once(
    store: Store, place: Path, before: list[str]
) -> None:
    for content in before:
        store.add_message("k", "user", content)
    manager = SessionManager(place)
    there = [f"there {number}" for number in range(5)]
    for content in there:
        manager.add_message("k", "user", content)
    migrate_from_json(place, store)
    assert contents(store) == before + there
    said = forget_tokens(store)

    manager.add_message("k", "user", "the last one")
    migrated = migrate_from_json(place, store)

    assert contents(store) == [*before, *there, *said, "the last one"]
    assert migrated.messages == 1
    # And so on: the newest receipt counts for all that went before.
    manager.add_message("k", "user", "after that")
    assert migrate_from_json(place, store).messages == 1


def test_p4_running_session_manager_does_not_restore_purged_messages(
    store: Store, place: Path
) -> None:
    file = {"key": "k", "messages": [{"role": "user", "content": text} for text in "ab"]}
    (place / "k.json").write_text(json.dumps(file))
    manager = SessionManager(place)
    manager.add_message("k", "user", "c")
    migrate_from_json(place, store)
    store.checkpoint("k", summary="", upto=2)
    store.admin.purge("k", before=3)
    assert contents(store) == ["c"]

    manager.add_message("k", "user", "d")
    migrated = migrate_from_json(place, store)

    assert [one.key for one in migrated.imported] == ["k"]
    assert contents(store) == ["c", "d"]


def test_p4_summary_of_purged_messages_is_not_restored(store: Store, place: Path) -> None:
    manager = SessionManager(place)
    for content in "abc":
        manager.add_message("k", "user", content)
    migrate_from_json(place, store)
    store.checkpoint("k", summary="", upto=3)
    store.admin.purge("k", before=4)

    manager.checkpoint("k", summary="a secret in b", upto=3)
    manager.add_message("k", "user", "d")
    migrate_from_json(place, store)

    assert (contents(store), store.get_summary("k")) == (["d"], "")


def test_p4_session_manager_with_same_first_messages_is_another_conversation(
    store: Store, place: Path
) -> None:
    """The same words with other tokens were said once more."""
    for number in (1, 2):
        manager = SessionManager(place)
        assert manager.add_message("k", "user", "hi") == 1
        assert manager.add_message("k", "user", f"talk {number}") == 2
        migrate_from_json(place, store)
    assert contents(store) == ["hi", "talk 1", "hi", "talk 2"]


def test_repeated_summaries_of_session_manager_are_merged(store: Store, place: Path) -> None:
    manager = SessionManager(place)
    for number, summary in enumerate(("one", "two", "three"), 1):
        manager.add_message("k", "user", f"message {number}")
        manager.checkpoint("k", summary=summary, upto=number)
        [imported] = migrate_from_json(place, store).imported
        assert imported.problems == ()
        assert (store.get_summary("k"), store.info("k").floor) == (summary, number)
    # A summary that was written here is not replaced.
    store.set_summary("k", "ours")
    manager.add_message("k", "user", "message 4")
    manager.checkpoint("k", summary="four", upto=4)
    [imported] = migrate_from_json(place, store).imported
    assert "the summary was skipped" in imported.problems[0]
    assert store.get_summary("k") == "ours"
