"""Tests P3 on SQLite: a changed message is left out, counted and reported."""

from pathlib import Path

import apsw
import pytest

from stenolog import SQLiteStore
from stenolog.catalog import open_catalog
from stenolog.maintenance.workspace_check import examine
from stenolog.stores.sqlite import connections
from stenolog.stores.sqlite.transactions import SQL, Transaction, checksum


@pytest.fixture
def spoilt(file: Path) -> Path:
    """Create a database of six messages with a changed letter in one of them."""
    with SQLiteStore(file) as store:
        store.add_messages("a", [_said(f"word {number}") for number in range(1, 7)])
        store.add_message("b", "user", "of another session")
    _change_letter(file, b"word 5", b"ward 5")
    return file


def _said(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _change_letter(file: Path, before: bytes, after: bytes) -> None:
    image = file.read_bytes()
    assert image.count(before) == 1
    file.write_bytes(image.replace(before, after))


def _texts(store: SQLiteStore, **how: int | bool) -> list[str]:
    return [message.content for message in store.get_history("a", **how)]  # type: ignore[arg-type]


def test_p3_a_damaged_message_hides_only_itself_and_is_reported(
    spoilt: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with SQLiteStore(spoilt) as store:
        intact = ["word 1", "word 2", "word 3", "word 4", "word 6"]
        assert _texts(store) == _texts(store, full=True) == intact
        assert caplog.text.count("skipped message 5,") == 1
        assert "steno doctor" in caplog.text
        info = store.info("a")
        assert (info.lost, info.damaged, info.visible, info.count, info.last_seq) == (1, 1, 5, 5, 6)
        assert info.visible_spans == ((1, 4), (6, 6))
        assert (store.info("b").lost, len(store.get_history("b"))) == (0, 1)
        assert store.add_message("a", "user", "word 7") == 7
        assert _texts(store) == [*intact, "word 7"]


def test_p3_last_n_skips_a_damaged_message_and_returns_an_earlier_one(spoilt: Path) -> None:
    with SQLiteStore(spoilt) as store:
        assert _texts(store, last=2) == _texts(store, last=2, full=True) == ["word 4", "word 6"]
        assert _texts(store, last=2, after=3) == ["word 4", "word 6"]
        popped = [store.pop("a"), store.pop("a")]
        assert [message and message.seq for message in popped] == [6, 4]


@pytest.mark.parametrize("serial_type", [b"\x00", b"\x0f"], ids=["null", "text"])
def test_p3_doctor_examines_all_sessions_if_a_seq_is_no_number(
    file: Path, serial_type: bytes
) -> None:
    with SQLiteStore(file) as store:
        store.add_messages("a", [_said(f"word {number}") for number in range(1, 4)])
        store.add_message("b", "user", "of another session")
    # The index entry of seq 2: header size, types of session, seq and rowid, then seq and rowid.
    _change_letter(file, b"\x04\x09\x01\x01\x02\x02", b"\x04\x09" + serial_type + b"\x01\x02\x02")
    report = examine(f"sqlite:{file}")
    assert report.sessions == 2
    assert {finding.kind for finding in report.findings} == {"damaged database", "missing message"}


@pytest.fixture
def emptied(file: Path) -> Path:
    """Create a database of nine messages, three of which are missing."""
    with SQLiteStore(file) as store:
        store.add_messages("a", [_said(f"word {number}") for number in range(1, 10)])
        with store.database.write_transaction() as transaction:
            transaction.execute("DELETE FROM message WHERE seq IN (5, 6, 8)")
    return file


def test_p3_p7_missing_message_is_counted_and_reported_once(
    emptied: Path, caplog: pytest.LogCaptureFixture
) -> None:
    left = ["word 1", "word 2", "word 3", "word 4", "word 7", "word 9"]
    with SQLiteStore(emptied) as store:
        for _ in range(3):
            assert _texts(store) == _texts(store, full=True) == left
            assert _texts(store, last=3) == _texts(store, last=3, full=True) == left[-3:]
            assert _texts(store, after=7) == _texts(store, after=7, full=True) == ["word 9"]
        reported = [record.getMessage().partition("skipped ")[2] for record in caplog.records]
        assert [one.partition(",")[0] for one in reported] == ["messages 5 to 6", "message 8"]
        info = store.info("a")
        assert (info.lost, info.damaged, info.visible, info.count, info.last_seq) == (3, 3, 6, 6, 9)
        assert info.visible_spans == ((1, 4), (7, 7), (9, 9))
        assert [message.seq for message in store.follow("a", timeout=0)] == [1, 2, 3, 4, 7, 9]


def test_p9_missing_rows_cause_no_second_read(
    emptied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    class Counting(Transaction):
        def __init__(self, connection: apsw.Connection) -> None:
            super().__init__(connection)
            execute = connection.execute
            self.execute = lambda *call: asked.append(call[0]) or execute(*call)  # type: ignore[func-returns-value]

    monkeypatch.setattr(connections, "Transaction", Counting)
    with SQLiteStore(emptied) as store:
        for full in (False, True):
            asked.clear()
            store.get_history("a", full=full)
            assert asked == [SQL["find_session"], SQL["messages"]]


def test_p9_damaged_last_seq_does_not_slow_down_reads(emptied: Path) -> None:
    with SQLiteStore(emptied) as store:
        with store.database.write_transaction() as transaction:
            transaction.execute("UPDATE session SET last_seq = 1000000000000")
        assert len(store.get_history("a")) == 6
        for full in (False, True):
            assert _texts(store, last=2, full=full) == ["word 7", "word 9"]
        assert store.info("a").lost == 1_000_000_000_000 - 6


def test_p3_restored_message_is_no_longer_counted_as_damaged(spoilt: Path) -> None:
    with SQLiteStore(spoilt) as store:
        assert len(_texts(store)) == 5
        with store.database.write_transaction() as transaction:
            transaction.execute(
                "UPDATE message "
                "SET body = CAST(replace(CAST(body AS TEXT), 'ward', 'word') AS BLOB)"
            )
        assert len(_texts(store)) == 6
        assert (store.info("a").lost, store.info("a").visible) == (0, 6)


def test_catalog_contains_the_readable_messages(spoilt: Path) -> None:
    with SQLiteStore(spoilt) as store, open_catalog(store) as catalog:
        for _ in range(2):
            [entry] = catalog.list(prefix="a").entries
            assert (entry.visible, entry.count, entry.lost) == (
                len(store.get_history("a")),
                len(store.get_history("a", full=True)),
                1,
            )
            assert [hit.seq for hit in catalog.search("ward").hits] == []
            store.add_message("a", "user", "more")


def test_p3_every_way_to_store_a_message_stores_its_crc(file: Path) -> None:
    with SQLiteStore(file) as store:
        store.add_message("a", "user", "1")
        store.add_message("a", "user", "one more")
        store.add_message("a", "user", "2", once="token")
        store.add_messages("a", [_said("3"), _said("4")])
        store.add_messages("a", [_said("5"), _said("6")], once="batch")
        store.set_history("a", [_said("1"), _said("7")])
        store.fork("a", "b")
        store.delete("b")
        store.admin.restore("b", as_key="c")
        with store.database.read_transaction() as transaction:
            rows = list(transaction.execute("SELECT seq, body, crc FROM message"))
    assert len(rows) == 10
    assert all(crc == checksum(body, seq) for seq, body, crc in rows)


def test_p3_every_flipped_bit_is_detected() -> None:
    body = b'{"role":"user","content":"hello"}'
    right = checksum(body, 7)
    for place in range(len(body) * 8):
        spoilt = bytearray(body)
        spoilt[place // 8] ^= 1 << place % 8
        assert checksum(bytes(spoilt), 7) != right
    assert checksum(body, 8) != right
