"""The tests of picoclaw's JSONL and SQLite stores, by their names, each on both of ours."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from stenolog import Store, open_store

WHERE: Final = {"jsonl": "{}", "sqlite": "sqlite:{}/sessions.db"}


@pytest.fixture(params=WHERE)
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return WHERE[request.param].format(tmp_path / "sub")


@pytest.fixture
def store(where: str) -> Iterator[Store]:
    with open_store(where) as opened:
        yield opened


def _add(store: Store, key: str, *contents: str) -> None:
    for content in contents:
        store.add_message(key, "user", content)


def _contents(store: Store, key: str) -> list[Any]:
    return [message.content for message in store.get_history(key)]


def _together(*works: Callable[[], None]) -> None:
    """Run these at once; what one of them raised is raised here."""
    failures: list[BaseException] = []

    def run(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised below
            failures.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


# --- opening ---------------------------------------------------------------------------------


def test_new_jsonl_store_creates_directory(tmp_path: Path) -> None:
    with open_store(tmp_path / "nested"):
        assert (tmp_path / "nested" / "sessions").is_dir()


def test_open_creates_database(tmp_path: Path) -> None:
    with open_store(f"sqlite:{tmp_path}/sub/sessions.db") as store:
        assert (tmp_path / "sub" / "sessions.db").is_file()
        assert store.list_sessions() == []


def test_open_existing_database(where: str) -> None:
    with open_store(where) as store:
        store.add_message("s1", "user", "hello")
    with open_store(where) as store:
        assert _contents(store, "s1") == ["hello"]


def test_persistence_across_instances(where: str) -> None:
    with open_store(where) as store:
        store.add_message("persist", "user", "remember me")
        store.set_summary("persist", "a test session")
    with open_store(where) as store:
        assert _contents(store, "persist") == ["remember me"]
        assert store.get_summary("persist") == "a test session"


# --- messages --------------------------------------------------------------------------------


def test_add_message_basic_roundtrip(store: Store) -> None:
    store.add_message("s1", "user", "hi")
    store.add_message("s1", "assistant", "hello")
    found = [(m.role, m.content) for m in store.get_history("s1")]
    assert found == [("user", "hi"), ("assistant", "hello")]


def test_add_message_auto_creates_session(store: Store) -> None:
    store.add_message("new-session", "user", "first")
    assert len(store.get_history("new-session")) == 1


def test_add_full_message_with_tool_calls(store: Store) -> None:
    call = {
        "id": "call_123",
        "type": "function",
        "function": {"name": "web_search", "arguments": '{"query":"test"}'},
    }
    message = {"role": "assistant", "content": "Let me search.", "tool_calls": [call]}
    store.add_full_message("s1", message)
    assert [m.to_dict() for m in store.get_history("s1")] == [message]


def test_add_full_message_tool_call_id(store: Store) -> None:
    message = {"role": "tool", "content": "search result here", "tool_call_id": "call_123"}
    store.add_full_message("s1", message)
    assert store.get_history("s1")[0].tool_call_id == "call_123"


def test_get_history_empty_session(store: Store) -> None:
    assert store.get_history("nonexistent") == []


def test_get_history_ordering(store: Store) -> None:
    _add(store, "s1", *"abcdefghij")
    assert _contents(store, "s1") == list("abcdefghij")


def test_multiple_sessions_isolation(store: Store) -> None:
    _add(store, "s1", "msg for s1")
    _add(store, "s2", "msg for s2")
    assert (_contents(store, "s1"), _contents(store, "s2")) == (["msg for s1"], ["msg for s2"])


def test_colon_in_key(store: Store, tmp_path: Path, where: str) -> None:
    _add(store, "telegram:123", "hi")
    assert _contents(store, "telegram:123") == ["hi"]
    # There, the file is telegram_123.jsonl, and `telegram_123` is the same session.
    assert _contents(store, "telegram_123") == []
    if not where.startswith("sqlite:"):
        assert (tmp_path / "sub" / "sessions" / "telegram%3A123.jsonl").exists()


# --- summary, truncation, replacement --------------------------------------------------------


def test_set_summary_get_summary(store: Store) -> None:
    assert store.get_summary("s1") == ""
    store.set_summary("s1", "User asked about Go.")
    assert store.get_summary("s1") == "User asked about Go."
    store.set_summary("s1", "Updated.")
    assert store.get_summary("s1") == "Updated."


def test_truncate_history_keep_last(store: Store) -> None:
    _add(store, "s1", *"abcdefghij")
    store.truncate_history("s1", 4)
    assert _contents(store, "s1") == list("ghij")


def test_truncate_history_keep_zero(store: Store) -> None:
    _add(store, "s1", *["msg"] * 5)
    store.truncate_history("s1", 0)
    assert _contents(store, "s1") == []


def test_truncate_history_keep_more_than_exists(store: Store) -> None:
    _add(store, "few", *["msg"] * 3)
    store.truncate_history("few", 100)
    assert len(_contents(store, "few")) == 3


def test_set_history_replaces_all(store: Store) -> None:
    _add(store, "s1", *["old"] * 5)
    new = [
        {"role": "system", "content": "You are helpful."},
        {"role": "user", "content": "new question"},
        {"role": "assistant", "content": "new answer"},
    ]
    store.set_history("s1", new)
    assert [m.to_dict() for m in store.get_history("s1")] == new


def test_set_history_resets_skip(store: Store) -> None:
    _add(store, "skip-reset", *["old"] * 10)
    store.truncate_history("skip-reset", 3)
    store.set_history("skip-reset", [{"role": "user", "content": "fresh"}])
    assert _contents(store, "skip-reset") == ["fresh"]


# --- compaction ------------------------------------------------------------------------------


def test_compact_removes_skipped_messages(store: Store) -> None:
    _add(store, "compact", *"abcdefghij")
    store.truncate_history("compact", 3)
    assert store.info("compact").archived == 0
    assert store.compact("compact").archived == 7
    assert _contents(store, "compact") == list("hij")
    # There they are destroyed; here they are out of the live log, and not of the world.
    assert [m.content for m in store.get_history("compact", full=True)] == list("abcdefghij")


def test_compact_no_op_when_no_skip(store: Store) -> None:
    _add(store, "noop", *["msg"] * 5)
    assert store.compact("noop").archived == 0
    assert len(_contents(store, "noop")) == 5


def test_compact_then_append(store: Store) -> None:
    _add(store, "cap", *"abcdefgh")
    store.truncate_history("cap", 2)
    store.compact("cap")
    _add(store, "cap", "new")
    assert _contents(store, "cap") == ["g", "h", "new"]


# --- crashes and races -----------------------------------------------------------------------


def test_crash_recovery_partial_line(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        _add(store, "crash", "valid")
    with (tmp_path / "sessions" / "crash.jsonl").open("ab") as log:
        log.write(
            b'{"kind":"message","seq":2,"at":"2026-11-15T12:00:00.000000Z","body":{"role":"us'
        )
    with open_store(tmp_path) as store:
        assert _contents(store, "crash") == ["valid"]
        # There, the next message is glued to the torn bytes and lost with them.
        _add(store, "crash", "after the crash")
        assert _contents(store, "crash") == ["valid", "after the crash"]


def test_concurrent_add_and_read(store: Store) -> None:
    def write() -> None:
        _add(store, "concurrent", *["msg"] * 20)

    def read() -> None:
        for _ in range(20):
            store.get_history("concurrent")

    _together(*[write] * 10, *[read] * 10)
    assert len(store.get_history("concurrent")) == 200


def test_concurrent_summarize_race(store: Store) -> None:
    _add(store, "race", *["seed"] * 20)

    def talk() -> None:
        _add(store, "race", *(f"new {number}" for number in range(50)))

    def summarise() -> None:
        for _ in range(10):
            store.set_summary("race", "summary")
            store.truncate_history("race", 5)

    _together(talk, summarise)
    assert store.get_summary("race") == "summary"
    everything = [m.content for m in store.get_history("race", full=True)]
    assert everything == ["seed"] * 20 + [f"new {number}" for number in range(50)]


def test_concurrent_summarize_race_by_seq(store: Store) -> None:
    """What the reference's test does not ask: nothing is hidden that the summary has not seen."""
    _add(store, "race", *["seed"] * 20)

    def talk() -> None:
        _add(store, "race", *(f"new {number}" for number in range(50)))

    def summarise() -> None:
        for _ in range(10):
            seen = store.get_history("race")
            if len(seen) < 5:
                continue
            upto = seen[-5].seq
            store.checkpoint("race", summary=f"up to {upto}", upto=upto)

    _together(talk, summarise)
    floor = store.info("race").floor
    assert store.get_summary("race") == f"up to {floor}"
    assert [m.seq for m in store.get_history("race")] == list(range(floor + 1, 71))
