"""Whatever stands in the files of others: a report, nothing half written, and never a traceback."""

import json
import os
import pickle
import shutil
import sqlite3
import struct
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import pytest
from click.testing import CliRunner
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stenolog.cli import main
from stenolog.stores.in_memory import InMemoryStore
from stenolog.stores.json_file import NotASession
from stenolog.transfer.importers.legacy_session import ALL_LAYOUTS
from stenolog.transfer.importers.sqlite_file import SQLiteFile, fetch_dicts, fetch_rows
from stenolog.transfer.migration import ImportReport, import_folder
from support import temporary_folders
from support.import_sources import (
    AGENT_TABLES,
    EPOCH,
    INSERT_ITEM,
    LAYOUTS,
    database,
    events,
    items,
    said,
    strands,
    words,
)
from support.resource_limits import MB, run_limited

DEEP: Final = "[" * 100_000 + "]" * 100_000
NESTED: Final = (
    json.dumps({"role": "user", "content": "x"})[:-1] + ', "a": ' + "[" * 300 + "]" * 300
)
BAD_TEXTS: Final = {
    "not JSON": "this is not JSON",
    "cut": '{"role": "user", "content": "hel',
    "nan": '{"role": "user", "content": "x", "score": NaN}',
    "infinity": '{"role": "user", "content": "x", "score": 1e999}',
    "deep": DEEP,
    "nested": NESTED + "}",
    "number": "7",
    "list": "[1, 2]",
    "null": "null",
    "no role": '{"content": "x"}',
    "role of another kind": '{"role": 7, "content": "x"}',
    "empty": "",
    "digits": '{"role": "user", "n": ' + "9" * 5_000 + "}",
}


@pytest.fixture
def place() -> Iterator[Path]:
    with temporary_folders.folder() as path:
        yield path


def copied(source: Path, store: InMemoryStore) -> ImportReport:
    folder, only = (source, None) if source.is_dir() else (source.parent, source.name)
    return import_folder(folder, store, only=only, rename_files=False, layouts=ALL_LAYOUTS)


def contents(store: InMemoryStore, key: str) -> list[Any]:
    return [message.content for message in store.get_history(key, full=True)]


# --- one bad message among good ones ---------------------------------------------------------


def _items(place: Path, bad: str) -> Path:
    return items(place, [{"role": "user", "content": "a"}, bad, {"role": "user", "content": "b"}])


def _events(place: Path, bad: str) -> Path:
    return events(place, [said(0, {"text": "a"}), bad, said(2, {"text": "b"})])


def _message_store(place: Path, bad: str) -> Path:
    good = [json.dumps({"type": "human", "data": {"content": word}}) for word in "ab"]
    script = "CREATE TABLE message_store (id INTEGER PRIMARY KEY, session_id TEXT, message TEXT);"
    insert = "INSERT INTO message_store (session_id, message) VALUES ('k', ?)"
    return database(place, "h.db", script, [(insert, (text,)) for text in (good[0], bad, good[1])])


def _nanobot(place: Path, bad: str) -> Path:
    place.mkdir(parents=True, exist_ok=True)
    head = '{"_type": "metadata", "key": "k"}'
    good = [json.dumps({"role": "user", "content": word}) for word in "ab"]
    (place / "k.jsonl").write_text("\n".join([head, good[0], bad or "x", good[1], ""]))
    return place / "k.jsonl"


def _plain_lines(place: Path, bad: str) -> Path:
    place.mkdir(parents=True, exist_ok=True)
    good = [json.dumps({"role": "user", "content": word, "x": 1}) for word in "ab"]
    (place / "k.jsonl").write_text("\n".join([good[0], bad or "x", good[1], ""]))
    return place / "k.jsonl"


def _strands(place: Path, bad: str) -> Path:
    source = strands(place, 3)
    messages = source / "session_k/agents/agent_default/messages"
    for name, word in ((0, "a"), (2, "b")):
        message = {"role": "user", "content": [{"text": word}]}
        (messages / f"message_{name}.json").write_text(json.dumps({"message": message}))
    (messages / "message_1.json").write_text(bad)
    return source


WITH_BAD: Final[dict[str, tuple[Callable[[Path, str], Path], str]]] = {
    "openai-agents": (_items, "k"),
    "adk": (_events, "a:u:s"),
    "langchain-sql": (_message_store, "k"),
    "nanobot": (_nanobot, "k"),
    "plain-lines": (_plain_lines, "k"),
    "strands": (_strands, "k"),
}


@pytest.mark.parametrize("bad", BAD_TEXTS)
@pytest.mark.parametrize("layout", WITH_BAD)
def test_p3_bad_message_is_skipped_and_reported(place: Path, layout: str, bad: str) -> None:
    write, key = WITH_BAD[layout]
    if layout == "adk" and bad in ("no role", "role of another kind"):
        return  # there, nothing but its parts is a message's
    source = write(place / "old", BAD_TEXTS[bad])
    with InMemoryStore() as store:
        [taken] = copied(source, store).imported
        assert contents(store, key) == ["a", "b"]
        assert taken.dropped == 1
        assert len(taken.problems) == 1
        assert len(taken.problems[0]) < 400
        again = copied(source, store)
        assert again.messages == 0
        assert again.imported[0].problems == taken.problems


def test_invalid_utf8_affects_only_its_message(place: Path) -> None:
    bad = '{"role": "user", "content": "\xff"}'.encode("latin-1")
    source = items(place / "old", [{"role": "user", "content": "a"}, bad, 7])
    with closing(sqlite3.connect(source)) as connection, connection:
        connection.execute("UPDATE agent_messages SET message_data = CAST(message_data AS TEXT)")
    with InMemoryStore() as store:
        [taken] = copied(source, store).imported
        assert contents(store, "k") == ["a"]
        assert taken.dropped == 2
        assert "is not JSON" in taken.problems[0]


@pytest.mark.parametrize("encoding", ["utf-16", "latin-1", "utf-8-sig"])
def test_file_in_another_encoding_is_reported(place: Path, encoding: str) -> None:
    text = json.dumps([{"role": "user", "content": "Zürich"}], ensure_ascii=False)
    (place / "k.json").write_text(text, encoding)
    with InMemoryStore() as store:
        migrated = copied(place / "k.json", store)
        if encoding == "utf-8-sig":
            assert contents(store, "k") == ["Zürich"]
        else:
            assert store.list_sessions() == []
            assert "it is not JSON" in migrated.skipped[0].reason


BY_LINES: Final = ("nanobot", "plain-lines")

# --- cut, damaged, and not what it seems -----------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_p10_truncated_file_gives_prefix_or_reason(place: Path, layout: str) -> None:
    write, key = LAYOUTS[layout]
    source = write(place / "old", 4)
    files = [path for path in (place / "old").rglob("*") if path.is_file()]
    whole = max(files, key=lambda path: path.stat().st_size)
    if layout == "strands":
        whole = source / "session_k/agents/agent_default/messages/message_3.json"
    text = whole.read_bytes()
    cuts = range(0, len(text), max(1, len(text) // 60))
    for cut in cuts:
        whole.write_bytes(text[:cut])
        with InMemoryStore() as store:
            migrated = copied(source, store)
            found = contents(store, key)
            assert found == words(4)[: len(found)]
            # Lines that were cut between two messages are whole; an empty file is a reason.
            assert len(found) == 4 or migrated.skipped or migrated.dropped or layout in BY_LINES
            assert "importing" not in (store.info(key).meta if found else {})


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_damaged_database_is_reported_without_traceback(data: st.DataObject) -> None:
    with temporary_folders.folder() as place:
        source = items(place / "old", [{"role": "user", "content": "x" * 900}] * 20)
        text = bytearray(source.read_bytes())
        for _ in range(data.draw(st.integers(1, 30))):
            text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
        source.write_bytes(text)
        with InMemoryStore() as store:
            migrated = copied(source, store)
            assert all("Traceback" not in one.reason for one in migrated.skipped)


def test_missing_database_page_is_reported(place: Path) -> None:
    source = items(place / "old", [{"role": "user", "content": "x" * 900}] * 20)
    text = bytearray(source.read_bytes())
    text[-4096:] = bytes(4096)
    source.write_bytes(text)
    with InMemoryStore() as store:
        migrated = copied(source, store)
        told = [*(words for one in migrated.imported for words in one.problems)]
        told += [left.reason for left in migrated.skipped]
        assert any("damaged" in words or "malformed" in words for words in told)


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    *("role", "content", "type", "data", "parts", "text", "tool_calls", "call_id"),
                    *("toolUse", "toolResult", "toolUseId", "function_call", "function_response"),
                    *("actions", "compaction", "start_timestamp", "message", "output", "name"),
                    *("args", "arguments", "image", "source", "bytes", "timestamp", "summary"),
                ]
            )
            | st.text(max_size=3),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
_shaped = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool"]) | _json},
    optional={
        "type": st.sampled_from(
            ["message", "function_call", "function_call_output", "reasoning", "ai", "human", "x"]
        ),
        "content": _json,
        "data": _json,
        "message": st.fixed_dictionaries({"role": _json}, optional={"content": st.lists(_json)}),
        "parts": _json,
    },
)


@settings(max_examples=150, deadline=None)
@given(found=st.lists(_shaped | _json, min_size=1, max_size=4))
@example(found=[2**63, -(2**63) - 1])
def test_any_content_is_imported_or_reported(found: list[Any]) -> None:
    with temporary_folders.folder() as place, InMemoryStore() as store:
        sources = [items(place / "a", found), events(place / "b", [_text(one) for one in found])]
        (place / "c.json").write_text(_text(found))
        (place / "d.jsonl").write_text("".join(_text(one) + "\n" for one in found))
        tree = strands(place / "tree", len(found))
        messages = tree / "session_k/agents/agent_default/messages"
        for number, one in enumerate(found):
            (messages / f"message_{number}.json").write_text(_text(one))
        for source in (*sources, place / "c.json", place / "d.jsonl", tree):
            migrated = copied(source, store)
            # A log of ours in its first moment is empty, too.
            blank = source.is_file() and not source.read_bytes().strip()
            assert blank or len(migrated.imported) + len(migrated.skipped) == 1
            for taken in migrated.imported:
                assert taken.messages == taken.added + (
                    0 if not taken.already_imported else taken.messages
                )
            assert copied(source, store).messages == 0


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


# --- pickled, encrypted, huge ----------------------------------------------------------------


class Bomb:
    """Leaves a file behind when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.path),))


def test_pickled_actions_are_never_loaded(place: Path) -> None:
    script = """
        CREATE TABLE sessions (app_name TEXT, user_id TEXT, id TEXT, state TEXT,
            create_time DATETIME, update_time DATETIME);
        CREATE TABLE events (id TEXT, app_name TEXT, user_id TEXT, session_id TEXT,
            invocation_id TEXT, author TEXT, actions BLOB, branch TEXT, timestamp DATETIME,
            content TEXT, error_code TEXT, partial BOOLEAN);
        INSERT INTO sessions VALUES ('a', 'u', 's', '{}', '2026-11-15 09:16:10', NULL);
    """
    loaded = place / "loaded"
    bomb = pickle.dumps(Bomb(loaded))
    insert = "INSERT INTO events VALUES (?, 'a', 'u', 's', 'i', ?, ?, NULL, ?, ?, NULL, NULL)"
    content = [
        {"role": "user", "parts": [{"text": "hi"}]},
        {"role": "model", "parts": [{"text": "hello"}]},
    ]
    rows = [
        (insert, (str(n), author, bomb, f"2026-11-15 09:16:1{n}.5", json.dumps(content[n])))
        for n, author in enumerate(("user", "agent"))
    ]
    source = database(place / "old", "adk.db", script, rows)
    with InMemoryStore() as store:
        [taken] = copied(source, store).imported
        assert contents(store, "a:u:s") == ["hi", "hello"]
        assert [m.role for m in store.get_history("a:u:s")] == ["user", "assistant"]
        assert "are pickled and were not read" in taken.problems[0]
    assert not loaded.exists()
    pickle.loads(bomb)
    assert loaded.exists()


def test_encrypted_items_are_counted_once(place: Path) -> None:
    envelope = {"__enc__": 1, "v": 1, "kid": "hkdf-v1", "payload": "gAAAA"}
    given = [{"role": "user", "content": "a"}, *[envelope] * 3]
    with InMemoryStore() as store:
        [taken] = copied(items(place / "old", given), store).imported
        assert contents(store, "k") == ["a"]
        assert taken.dropped == 3
        words = "'k': 3 messages are encrypted and cannot be imported"
        assert taken.problems == (words,)
    with InMemoryStore() as store:
        migrated = copied(items(place / "all", [envelope]), store)
        assert "1 message is encrypted" in migrated.skipped[0].reason
        assert store.list_sessions() == []


def test_oversized_state_is_skipped_and_session_imported(place: Path) -> None:
    source = strands(place / "old", 2)
    about = source / "session_k/agents/agent_default/agent.json"
    for state in ('"' + "x" * 20_000 + '"', "1e999"):
        about.write_text('{"state": ' + state + "}")
        with InMemoryStore() as store:
            [taken] = copied(source, store).imported
            assert contents(store, "k") == words(2)
            assert "the state of strands was skipped" in taken.problems[0]
            assert "strands" not in store.info("k").meta


def test_missing_and_redacted_messages_of_a_tree_are_reported(place: Path) -> None:
    source = strands(place / "old", 5)
    messages = source / "session_k/agents/agent_default/messages"
    (messages / "message_1.json").unlink()
    redacted = json.loads((messages / "message_2.json").read_text())
    redacted["redact_message"] = {"role": "user", "content": [{"text": "[gone]"}]}
    (messages / "message_2.json").write_text(json.dumps(redacted))
    manager = {"removed_message_count": 3, "summary_message": {"content": [{"text": "so far"}]}}
    about = messages.parent / "agent.json"
    about.write_text(json.dumps({"conversation_manager_state": manager}))
    (source / "session_k/multi_agents/x").mkdir(parents=True)
    with InMemoryStore() as store:
        [taken] = copied(source, store).imported
        assert [m.content for m in store.get_history("k")] == ["word 3", "word 4"]
        assert contents(store, "k") == ["word 0", "[gone]", "word 3", "word 4"]
        assert store.get_summary("k") == "so far"
        assert taken.problems == (
            "message_2.json was redacted: the replacement text is imported",
            "of message_0.json … message_4.json, 1 is missing",
            "multi_agents was skipped: it contains no conversation",
        )
        assert taken.dropped == 1


def test_links_in_a_tree_are_not_followed(place: Path) -> None:
    source = strands(place / "old", 2)
    secret = place / "secret.json"
    secret.write_text('{"message": {"role": "user", "content": [{"text": "secret"}]}}')
    link = source / "session_k/agents/agent_default/messages/message_1.json"
    link.unlink()
    link.symlink_to(secret)
    with InMemoryStore() as store:
        migrated = copied(source, store)
        assert store.list_sessions() == []
        assert len(migrated.skipped) == 1


# --- databases of all sorts ------------------------------------------------------------------


def test_wal_file_is_read_and_no_files_are_created(place: Path) -> None:
    source = items(place / "live", [])
    with closing(sqlite3.connect(source)) as writer:
        writer.execute("PRAGMA journal_mode=WAL")
        writer.execute("PRAGMA wal_autocheckpoint=0")
        writer.execute(INSERT_ITEM, ("k", '{"role": "user", "content": "in the log"}', None))
        writer.commit()
        # As it stands while its program runs, and as a copy made meanwhile has it.
        (place / "copy").mkdir()
        for name in (source.name, f"{source.name}-wal"):
            shutil.copyfile(place / "live" / name, place / "copy" / name)
        for folder in (place / "live", place / "copy"):
            before = sorted(path.name for path in folder.iterdir())
            with InMemoryStore() as store:
                copied(folder / source.name, store)
                assert contents(store, "k") == ["in the log"]
            assert sorted(path.name for path in folder.iterdir()) == before
    # And when its program has ended, and left the mode.
    assert [path.name for path in (place / "live").iterdir()] == [source.name]
    with InMemoryStore() as store:
        copied(source, store)
        assert contents(store, "k") == ["in the log"]
    assert [path.name for path in (place / "live").iterdir()] == [source.name]


def test_read_only_folder_can_be_imported(place: Path) -> None:
    source = items(place / "old", [{"role": "user", "content": "a"}])
    with closing(sqlite3.connect(source)) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
    (place / "old").chmod(0o500)
    try:
        with InMemoryStore() as store:
            copied(source, store)
            assert contents(store, "k") == ["a"]
    finally:
        (place / "old").chmod(0o700)


def test_tables_of_other_names_and_branches(place: Path) -> None:
    script = AGENT_TABLES.replace("agent_sessions", 'my "sessions"').replace("DELETE FROM", "-- ")
    script = script.replace('my "sessions"', '"my ""sessions"').replace(
        "agent_messages", '"my msgs"'
    )
    insert = INSERT_ITEM.replace("agent_messages", '"my msgs"')
    rows: list[tuple[str, Any]] = [
        (insert, ("k", json.dumps({"role": "user", "content": word}), None)) for word in "abc"
    ]
    rows.append(("""INSERT INTO "my ""sessions" VALUES ('k', '2026-01-02', '2026-01-03')""", ()))
    source = database(place / "old", "x.db", script, rows)
    with InMemoryStore() as store:
        copied(source, store)
        assert contents(store, "k") == list("abc")
        assert store.info("k").created.isoformat() == "2026-01-02T00:00:00+00:00"
    branches = """CREATE TABLE message_structure (id INTEGER PRIMARY KEY, session_id TEXT,
        message_id INTEGER, branch_id TEXT, sequence_number INTEGER);"""
    place_of = "INSERT INTO message_structure VALUES (NULL, 'k', ?, ?, ?)"
    more: list[tuple[str, Any]] = [
        (place_of, given) for given in ((1, "main", 1), (2, "main", 2), (1, "b", 1), (3, "b", 2))
    ]
    database(place / "old", "x.db", branches, more)
    with InMemoryStore() as store:
        copied(source, store)
        assert contents(store, "k") == ["a", "b"]
        assert contents(store, "k:b") == ["a", "c"]


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("CREATE TABLE x (a);", "without tables of a known program"),
        (
            "CREATE TABLE events (id, app_name, user_id, session_id, timestamp, event_data);",
            "without",
        ),
        (f"PRAGMA application_id = {0x53544E4F};", "it is a stenolog database"),
    ],
)
def test_database_of_another_program_is_reported(place: Path, script: str, reason: str) -> None:
    source = database(place / "old", "x.db", script + "CREATE TABLE y (b);", [])
    result = CliRunner().invoke(main, ["import", str(source), "-w", str(place / "ws")])
    assert result.exit_code == 1
    assert reason in result.stderr
    assert not (place / "ws").exists()


def test_invalid_times_are_replaced_by_file_time(place: Path) -> None:
    given = [said(0, {"text": "a"}, timestamp="x"), said(1, {"text": "b"}, timestamp=1e300)]
    with InMemoryStore() as store:
        copied(events(place / "old", given), store)
        assert contents(store, "a:u:s") == ["a", "b"]
        [one, two] = store.get_history("a:u:s")
        assert one.at.timestamp() == two.at.timestamp() == EPOCH


# --- files made to be expensive --------------------------------------------------------------

EXPENSIVE: Final = {
    "computed column": """
        CREATE TABLE agent_sessions (session_id TEXT PRIMARY KEY, created_at, updated_at);
        CREATE TABLE agent_messages (id INTEGER PRIMARY KEY, session_id TEXT,
            message_data TEXT, created_at, x AS (hex(zeroblob(300000000))) NOT NULL);
        INSERT INTO agent_sessions VALUES ('k', 1, 1);
        INSERT INTO agent_messages (session_id, message_data) VALUES ('k', '[]');
    """,
    "computed time": """
        CREATE TABLE agent_sessions (session_id TEXT PRIMARY KEY, created_at, updated_at,
            x AS (hex(zeroblob(300000000))) NOT NULL);
        CREATE TABLE agent_messages (id INTEGER PRIMARY KEY, session_id TEXT,
            message_data TEXT, created_at);
        INSERT INTO agent_sessions VALUES ('k', 1, 1);
        INSERT INTO agent_messages (session_id, message_data) VALUES ('k', '[]');
    """,
}


@pytest.mark.parametrize("name", EXPENSIVE)
def test_small_hostile_database_does_not_use_much_memory(place: Path, name: str) -> None:
    source = place / "small.db"
    with closing(sqlite3.connect(source)) as connection, connection:
        connection.executescript(EXPENSIVE[name])
    assert source.stat().st_size < 50_000

    def import_it() -> None:
        with InMemoryStore() as store:
            copied(source, store)

    run_limited(import_it, cpu=60, memory=200 * MB)


def test_database_with_rows_that_share_pages_is_rejected(place: Path) -> None:
    source = place / "joined.db"
    with closing(sqlite3.connect(source)) as connection, connection:
        connection.execute("CREATE TABLE a (x)")
        connection.execute("CREATE TABLE b (y)")
        connection.execute("INSERT INTO a VALUES (zeroblob(1000000))")
        connection.executemany("INSERT INTO b VALUES (?)", [(n,) for n in range(1_000)])
    with SQLiteFile(source) as file, file.connect() as connection:
        size = source.stat().st_size
        assert len(fetch_rows(connection.execute("SELECT x FROM a"), size)) == 1
        with pytest.raises(NotASession, match="more data than the file"):
            fetch_rows(connection.execute("SELECT x FROM a, b"), size)


def test_endless_query_is_stopped(place: Path) -> None:
    source = place / "endless.db"
    with closing(sqlite3.connect(source)) as connection, connection:
        connection.execute("CREATE TABLE a (x)")
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT max(i) FROM n"

    def ask() -> None:
        with (
            SQLiteFile(source) as file,
            pytest.raises(NotASession, match="interrupted"),
            file.connect() as connection,
        ):
            fetch_rows(connection.execute(endless), source.stat().st_size)

    run_limited(ask, cpu=120)


def test_size_that_a_wal_file_claims_does_not_raise_the_limit(tmp_path: Path) -> None:
    """The last page in the WAL file claims that the database has a million pages."""
    source, copy = tmp_path / "logs.db", tmp_path / "copy.db"
    with closing(sqlite3.connect(source)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("CREATE TABLE a (x)")
        connection.commit()
        shutil.copyfile(source, copy)
        wal = (tmp_path / "logs.db-wal").read_bytes()
    (tmp_path / "copy.db-wal").write_bytes(_claim_pages(wal, 1_000_000))

    large = (
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION SELECT i + 1 FROM n WHERE i < 100) "
        "SELECT zeroblob(1000000) FROM n"
    )
    with SQLiteFile(copy) as file, file.connect() as reader:
        assert reader.execute("PRAGMA page_count").fetchone() == (1_000_000,)
        with pytest.raises(NotASession, match="many times more data than the file"):
            fetch_dicts(reader, large)


def _claim_pages(wal: bytes, page_count: int) -> bytes:
    """Return a WAL file that claims another size of the database (sqlite.org/walformat.html)."""
    header_bytes, frame_header_bytes = 32, 24
    page_size = int.from_bytes(wal[8:12], "big")
    words = ">I" if wal[3] & 1 else "<I"

    def add_checksum(data: bytes, first: int, second: int) -> tuple[int, int]:
        numbers = [number for (number,) in struct.iter_unpack(words, data)]
        for one, two in zip(numbers[::2], numbers[1::2], strict=True):
            first = (first + one + second) & 0xFFFFFFFF
            second = (second + two + first) & 0xFFFFFFFF
        return first, second

    sums = struct.unpack(">II", wal[24:32])
    result = wal[:header_bytes]
    for start in range(header_bytes, len(wal), frame_header_bytes + page_size):
        frame = wal[start : start + frame_header_bytes + page_size]
        old_count = int.from_bytes(frame[4:8], "big")
        head = frame[:4] + struct.pack(">I", page_count if old_count else 0)
        page = frame[frame_header_bytes:]
        if frame[:4] == struct.pack(">I", 1):
            page = page[:28] + struct.pack(">I", page_count) + page[32:]
        sums = add_checksum(page, *add_checksum(head, *sums))
        result += head + frame[8:16] + struct.pack(">II", *sums) + page
    return result
