"""Tests that a name always opens the session that currently has it as key or alias."""

import gc
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest

from stenolog.sessions.aliases import (
    MAX_CACHED_KEYS,
    Aliases,
    change_alias_mark,
    prepare_alias_mark,
)
from stenolog.sessions.session_store import JSONLBackend
from stenolog.stores.base import Store
from stenolog.stores.in_memory import InMemoryAdmin, InMemoryStore
from stenolog.stores.open_store import open_store
from stenolog.transfer.migration import migrate_from_json
from support import temporary_folders

KEYS: Final = 100_000
WHERE: Final = {"jsonl": "{}", "sqlite": "sqlite:{}/steno.db"}

Opened = Callable[[], Store]


@pytest.fixture(params=WHERE)
def opened(request: pytest.FixtureRequest) -> Iterator[Opened]:
    with temporary_folders.folder() as path:
        yield lambda: open_store(WHERE[request.param].format(path))


def set_aliases(store: Store, key: str, *names: str) -> None:
    """Set aliases, as an import does."""
    prepare_alias_mark(store)
    store.set_meta(key, aliases=list(names))
    change_alias_mark(store)


def contents(sessions: JSONLBackend, key: str) -> list[Any]:
    return [message.content for message in sessions.get_history(key)]


@pytest.mark.parametrize("looked", [False, True], ids=["unknown", "known"])
@pytest.mark.parametrize("given", ["before", "after"])
def test_alias_opens_its_owner_after_the_session_of_that_key_is_deleted(
    opened: Opened, looked: bool, given: str
) -> None:
    with opened() as beside:
        beside.add_message("old", "user", "a")
        if given == "before":
            set_aliases(beside, "old", "name")
        sessions = JSONLBackend(opened())
        if looked:
            assert sessions.get_history("something else") == []
        beside.add_message("name", "user", "for a while")
        assert contents(sessions, "name") == ["for a while"]
        assert sessions.add_message("name", "user", "too") == 2
        if given == "after":
            set_aliases(beside, "old", "name")
            assert contents(sessions, "name") == ["for a while", "too"]
        beside.delete("name")

        assert contents(sessions, "name") == ["a"]
        assert sessions.add_message("name", "user", "b") == 2
        assert sessions.set_summary("name", "both")
        assert (sessions.get_summary("name"), beside.get_summary("old")) == ("both", "both")
        assert sessions.list_sessions() == ["old"]
        sessions.close()


def test_write_after_a_read_goes_to_the_owner_if_the_session_was_deleted(opened: Opened) -> None:
    with opened() as beside:
        beside.add_message("old", "user", "a")
        set_aliases(beside, "old", "name")
        beside.add_message("name", "user", "for a while")
        sessions = JSONLBackend(opened())
        assert contents(sessions, "name") == ["for a while"]
        beside.delete("name")
        assert sessions.add_message("name", "user", "b") == 2
        assert sessions.list_sessions() == ["old"]
        sessions.close()


def test_p7_aliases_of_sessions_imported_by_another_process_are_found(opened: Opened) -> None:
    with opened() as beside, temporary_folders.folder() as old:
        sessions = JSONLBackend(opened())
        for number in range(3):
            text = json.dumps({"key": f"k:{number}", "messages": [{"role": "user"}]})
            (old / f"name_{number}.json").write_text(text)
            assert migrate_from_json(old, beside).sessions == 1
            assert sessions.add_message(f"name_{number}", "user", "x") == 2
            assert sessions.get_history(f"nobody:{number}") == []
        assert sessions.list_sessions() == ["k:0", "k:1", "k:2"]
        sessions.close()


def test_summary_is_read_from_the_owner_of_an_alias(opened: Opened) -> None:
    with opened() as beside:
        beside.set_summary("name", "of the session")
        sessions = JSONLBackend(opened())
        assert sessions.get_summary("name") == "of the session"
        beside.set_summary("old", "of the owner")
        set_aliases(beside, "old", "name")
        beside.delete("name")
        assert sessions.get_summary("name") == "of the owner"
        sessions.close()


class Many(InMemoryStore):
    """A store with many sessions, none of them in memory."""

    @property
    def admin(self) -> InMemoryAdmin:
        return ManyAdmin(self)


class ManyAdmin(InMemoryAdmin):
    def stamps(self) -> dict[str, str]:
        return super().stamps() | {f"user:{number}": f"stamp {number}" for number in range(KEYS)}


def _referenced_objects(names: Aliases) -> list[object]:
    """Return everything it refers to, except its store."""
    found: list[object] = [value for name, value in vars(names).items() if name != "_store"]
    seen: dict[int, object] = {}
    while found:
        one = found.pop()
        if id(one) not in seen and not isinstance(one, type):
            seen[id(one)] = one
            found += gc.get_referents(one)
    return list(seen.values())


@pytest.mark.parametrize("aliases", [False, True])
@pytest.mark.slow
def test_p9_memory_does_not_grow_with_the_number_of_keys(aliases: bool) -> None:
    store = Many()
    store.add_message("old", "user", "a")
    if aliases:
        set_aliases(store, "old", "name")
    names = Aliases(store)
    for number in range(KEYS):
        assert names.resolve_known(f"user:{number}") == f"user:{number}"
        names.remember_session(f"user:{number}")
    held = _referenced_objects(names)
    # The cached names, and eight bytes for each session of the store.
    assert len(held) < MAX_CACHED_KEYS + 100
    big = [sys.getsizeof(one) for one in held if sys.getsizeof(one) > 1_000]
    assert sum(big) < 100 * MAX_CACHED_KEYS + 9 * KEYS
    assert names.resolve_key("name") == ("old" if aliases else "name")


def test_p9_only_changed_sessions_are_read_again_for_aliases() -> None:
    store = InMemoryStore()
    for number in range(50):
        store.add_message(f"user:{number}", "user", "x")
    set_aliases(store, "user:7", "name")
    names = Aliases(store)
    assert names.resolve_key("name") == "user:7"
    looked: list[str] = []
    info = store.info
    store.info = lambda key: looked.append(key) or info(key)  # type: ignore[method-assign, func-returns-value]
    set_aliases(store, "user:9", "other")
    assert names.resolve_key("other") == "user:9"
    assert sorted(set(looked)) == ["other", "user:9"]
    assert names.resolve_key("name") == "user:7"
    store.delete("user:7")
    assert names.resolve_key("name") == "name"
