"""Tests P3 and P8 on SQLite: an invalid text or time only hides the record it belongs to."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from stenolog import DamagedStore, SQLiteStore
from stenolog.catalog import open_catalog
from stenolog.maintenance.workspace_check import examine

NO_TEXT = b"2026-\xff"
TIMES = (NO_TEXT, b"2026-x1-15T19:48:55.775171Z", b"2026-11-15T19:48:55.7751711", b"", b"\0")
"""Invalid times: invalid UTF-8, a wrong letter, no time zone, empty."""


@pytest.fixture
def store(file: Path) -> Iterator[SQLiteStore]:
    """Yield a store with sessions a and b, and two deleted sessions."""
    with SQLiteStore(file) as opened:
        opened.add_messages("a", [{"role": "user", "content": f"word {n}"} for n in range(1, 6)])
        opened.add_message("b", "user", "of another session")
        for key in ("c", "d"):
            opened.add_message(key, "user", "deleted")
            opened.delete(key)
        yield opened


def _spoil(store: SQLiteStore, sql: str, value: bytes) -> None:
    with store.database.write_transaction() as transaction:
        transaction.execute(sql, (value,))


def _spoil_row(store: SQLiteStore, key: str, column: str, value: bytes) -> None:
    _spoil(store, f"UPDATE session SET {column} = CAST(? AS TEXT) WHERE key = '{key}'", value)  # noqa: S608


def _found(file: Path) -> list[tuple[str, str | None]]:
    return [(one.kind, one.key) for one in examine(f"sqlite:{file}").findings]


@pytest.mark.parametrize("time", TIMES)
def test_p3_message_with_damaged_time_hides_only_itself(
    store: SQLiteStore, file: Path, time: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    _spoil(store, "UPDATE message SET at = CAST(? AS TEXT) WHERE session = 1 AND seq = 3", time)
    for full in (False, True):
        assert [m.seq for m in store.get_history("a", full=full)] == [1, 2, 4, 5]
        assert [m.seq for m in store.get_history("a", last=3, full=full)] == [2, 4, 5]
    assert all(message.at.tzinfo for message in store.get_history("a"))
    assert caplog.text.count("skipped message 3,") == 1
    assert (store.info("a").lost, store.info("a").count) == (1, 4)
    assert [message.seq for message in store.follow("a", timeout=0)] == [1, 2, 4, 5]
    with open_catalog(store) as catalog:
        assert {one.key: one.count for one in catalog.list().entries} == {"a": 4, "b": 1}
    assert store.add_message("a", "user", "more") == 6
    [finding] = examine(f"sqlite:{file}").findings
    assert (finding.kind, finding.key, finding.lost) == ("damaged message", "a", ((3, 3),))


@pytest.mark.parametrize("column", ["created", "updated"])
@pytest.mark.parametrize("time", TIMES)
def test_p8_error_names_a_session_with_damaged_times(
    store: SQLiteStore, file: Path, column: str, time: bytes
) -> None:
    _spoil_row(store, "a", column, time)
    with pytest.raises(DamagedStore, match=r"'a'.*steno doctor"):
        store.info("a")
    assert store.list_sessions() == ["a", "b"]
    assert len(store.get_history("b")) == 1
    assert store.info("b").count == 1
    with open_catalog(store) as catalog:
        assert "b" in [one.key for one in catalog.list().entries]
    assert _found(file) == [("damaged session", "a")]


@pytest.mark.parametrize("column", ["uid", "created", "updated", "fork_of"])
def test_p8_every_call_names_a_session_with_damaged_text(
    store: SQLiteStore, file: Path, column: str
) -> None:
    _spoil_row(store, "a", column, NO_TEXT)
    for ask in (store.get_history, store.get_summary, store.info, store.clear, store.undo):
        with pytest.raises(DamagedStore, match="'a'"):
            ask("a")
    assert set(store.admin.stamps()) == {"a", "b"}
    assert store.add_message("b", "user", "more") == 2
    assert _found(file) == [("damaged session", "a")]


def test_p3_damaged_key_hides_only_its_own_session(
    store: SQLiteStore, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store.add_message("e", "user", "x")
    _spoil_row(store, "b", "key", b"b\xff")
    for _ in range(2):
        assert store.list_sessions() == ["a", "e"]
        assert store.list_sessions(limit=1) == ["a"]
        assert store.list_sessions(after="a") == store.list_sessions(prefix="e") == ["e"]
        assert set(store.admin.stamps()) == {"a", "e"}
    assert caplog.text.count(r"the session with the key b'b\xff' cannot be read") == 1
    with open_catalog(store) as catalog:
        assert {one.key for one in catalog.list().entries} == {"a", "e"}
    assert _found(file) == [("damaged session", r"b\xff")]


@pytest.mark.parametrize(
    ("column", "value", "finding"),
    [
        *(("deleted", time, ("damaged session", "c")) for time in TIMES),
        ("uid", b"\xff", ("damaged session", "c")),
        ("key", b"\xff", ("damaged session", r"\xff")),
    ],
)
def test_p3_trash_omits_only_damaged_sessions(
    store: SQLiteStore,
    file: Path,
    column: str,
    value: bytes,
    finding: tuple[str, str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    _spoil_row(store, "c", column, value)
    assert [one.key for one in store.admin.list_trash() + store.admin.list_trash()] == ["d", "d"]
    assert caplog.text.count("the deleted session with the key b") == 1
    assert _found(file) == [finding]
    store.admin.restore("d")
    assert len(store.get_history("d")) == 1


def test_p8_deleted_session_with_damaged_state_is_listed(store: SQLiteStore) -> None:
    _spoil(store, "UPDATE state SET body = ? WHERE session = 3", b"{}")
    assert [(one.key, one.count) for one in store.admin.list_trash()] == [("d", 1), ("c", 1)]


def test_p8_source_of_a_fork_with_damaged_key_can_be_purged(
    store: SQLiteStore,
) -> None:
    store.fork("a", "fork")
    _spoil_row(store, "fork", "key", b"fork\xff")
    assert store.admin.purge("a").messages == 5
