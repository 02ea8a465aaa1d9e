"""Tests that no byte of purged messages stays in the file, in its log, or next to it."""

from collections.abc import Callable, Iterator
from pathlib import Path

import apsw
import pytest

from stenolog import NoSuchSession, SQLiteStore
from stenolog.errors import NothingToUndo
from stenolog.maintenance.workspace_check import examine
from stenolog.stores.sqlite.database import Database


def _bytes(file: Path) -> bytes:
    """Return all bytes in the folder. Only call it after closing, or SQLite loses its locks."""
    return b"".join(path.read_bytes() for path in sorted(file.parent.iterdir()))


def _talk(store: SQLiteStore, key: str, word: str, *, count: int = 40) -> None:
    """Store messages of all sizes, so that they fill pages, parts of pages and overflow pages."""
    for number in range(count):
        size = (1, 40, 400, 3000, 9000)[number % 5]
        store.add_message(key, "user", f"{word} {number} " * size, once=f"{word}-token-{number}")


def test_no_bytes_of_a_purged_session_remain(file: Path) -> None:
    with SQLiteStore(file) as store:
        _talk(store, "keep", "harmless")
        _talk(store, "secret-key", "confidential")
        store.set_summary("secret-key", "classified " * 900)
        store.set_summary("secret-key", "secluded " * 900)
        store.set_meta("secret-key", title="undisclosed")
        store.lease("secret-key", ttl=60).release()
        store.delete("secret-key")
        _talk(store, "keep", "innocent")
        _talk(store, "secret-key", "restricted")
        found = store.admin.purge("secret-key")
        assert (found.messages, found.first, found.last, found.not_reached) == (80, 1, 40, ())
        with pytest.raises(NoSuchSession):
            store.admin.purge("secret-key")
        # A kill now would leave the same files; closing removes nothing more.
        alive = _beside(file)
        assert len(store.get_history("keep")) == 80
    left = _bytes(file)
    assert b"harmless" in left
    for word in _SECRETS:
        assert word not in left, word
    assert alive["sessions.db-wal"] < 64 * 1024


_SECRETS = (
    b"confidential",
    b"secret-key",
    b"classified",
    b"secluded",
    b"undisclosed",
    b"restricted",
)


def _beside(file: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in file.parent.iterdir()}


def test_no_bytes_of_purged_messages_remain_and_the_session_stays_usable(file: Path) -> None:
    with SQLiteStore(file) as store:
        _talk(store, "a", "confidential")
        store.checkpoint("a", summary="classified " * 900, upto=20)
        store.set_summary("a", "harmless")
        store.compact("a")
        _talk(store, "a", "innocent")
        found = store.admin.purge("a", before=41)
        assert (found.messages, found.first, found.last) == (40, 1, 40)
        assert any("summary" in left for left in found.not_reached)
        assert [message.seq for message in store.get_history("a", full=True)] == list(range(41, 81))
        with pytest.raises(NothingToUndo):
            store.undo("a")
        assert store.add_message("a", "user", "x", once="confidential-token-3") == 81
        info = store.info("a")
        assert (info.floor, info.count, info.visible, info.archived) == (40, 41, 41, 0)
        assert store.admin.purge("a", before=41).messages == 0
    left = _bytes(file)
    assert b"innocent" in left
    assert b"confidential 1" not in left
    assert b"classified" not in left


def test_long_undo_step_works_after_a_purge(file: Path) -> None:
    with SQLiteStore(file) as store:
        store.add_messages("a", [{"role": "user", "content": n} for n in range(1200)])
        store.set_summary("a", "classified")
        messages = [{"role": "user", "content": n} for n in range(1200) if n < 600 or n % 2]
        store.set_history("a", messages)
        hidden = sum(message.hidden for message in store.get_history("a", full=True))
        store.admin.purge("a", before=10)
        assert store.info("a").undoable == 2
        undone = store.undo("a")
        assert (undone.op, undone.shown) == ("replace", hidden)
        assert len(store.get_history("a")) == 1200 - 9


@pytest.fixture
def cut_short(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Make `rewrite` fail as a kill would: the rows are deleted, but not their bytes."""

    def die(_: Database) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Database, "rewrite", die)
    yield monkeypatch.undo
    monkeypatch.undo()


def test_deleted_rows_are_overwritten_even_if_the_purge_stops(
    file: Path, cut_short: Callable[[], None]
) -> None:
    with SQLiteStore(file) as store:
        for number in range(20):
            # Beyond the first page of its row, in overflow pages.
            store.add_message("a", "user", f"{'x' * 6000} confidential {number} {'x' * 6000}")
        with pytest.raises(KeyboardInterrupt):
            store.admin.purge("a")
    assert b"confidential" not in _bytes(file)
    cut_short()


def test_next_purge_finishes_an_interrupted_one(file: Path, cut_short: Callable[[], None]) -> None:
    with SQLiteStore(file) as store:
        _talk(store, "a", "confidential")
        with pytest.raises(KeyboardInterrupt):
            store.admin.purge("a")
    cut_short()
    with SQLiteStore(file) as store:
        assert store.list_sessions() == []
        assert any("purge" in problem for problem in store.admin.health().problems)
        assert store.admin.purge("a").messages == 0
        assert store.admin.health().problems == ()
        with pytest.raises(NoSuchSession):
            store.admin.purge("a")
    assert b"confidential" not in _bytes(file)


def test_purge_reports_that_the_log_remains_while_a_reader_uses_it(file: Path) -> None:
    with SQLiteStore(file, busy_timeout=0.1) as store:
        _talk(store, "a", "confidential")
        with store.database.read_transaction() as transaction:
            list(transaction.execute("SELECT * FROM session"))
            [left] = store.admin.purge("a").not_reached
            assert "purge again" in left
        assert store.admin.purge("a").not_reached == ()
    assert b"confidential" not in _bytes(file)


@pytest.mark.parametrize("is_deleted", [False, True])
def test_p8_purge_reports_rows_that_a_damaged_session_id_hides(
    file: Path, *, is_deleted: bool
) -> None:
    with SQLiteStore(file) as store:
        store.add_message("keep", "user", "harmless")
        store.add_message("a", "user", "confidential 1")
        store.add_message("a", "user", "confidential 2")
        if is_deleted:
            store.delete("a")
    connection = apsw.Connection(str(file))
    connection.execute(
        "PRAGMA foreign_keys = OFF; UPDATE session SET id = 777 WHERE key = 'a'"
    ).fetchall()
    connection.close()
    with SQLiteStore(file) as store:
        [told] = store.admin.purge("a").not_reached
        assert "steno doctor" in told
        assert "rows of" in told
        assert "belong to no session" in told
        assert len(store.get_history("keep")) == 1
    assert b"confidential" in _bytes(file)
    assert "stray row" in {finding.kind for finding in examine(f"sqlite:{file}").findings}
