"""Old sessions are taken in: whole, once, never over newer data, and every file is kept."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stenolog.catalog import open_catalog
from stenolog.errors import NotStored, StoreUnavailable, UsageError
from stenolog.records import Message
from stenolog.sessions.session_manager import SessionManager
from stenolog.sessions.session_store import JSONLBackend
from stenolog.stores.base import Store
from stenolog.stores.in_memory import InMemoryAdmin, InMemoryStore
from stenolog.stores.jsonl import JSONLStore, log
from stenolog.stores.open_store import open_store
from stenolog.transfer import merge, session_import
from stenolog.transfer.importers.folder import Folder
from stenolog.transfer.migration import ImportReport, import_folder, migrate_from_json
from stenolog.transfer.session_import import BATCH_MESSAGES
from support import temporary_folders
from support.import_sources import picture

SAMPLES: Final = Path(__file__).parents[2] / "samples"
LAYOUTS: Final = ("picoclaw", "picoclaw-legacy", "zeroclaw")

TIMES: Final = {
    "created_at": "2025-03-04T05:06:07.123456Z",
    "updated_at": "2025-04-05T06:07:08.654321Z",
}

OPENED: Final[dict[str, Callable[[Path], Store]]] = {
    # The old files stand in `sessions` of the workspace: with JSONL, where our own logs are.
    "jsonl": open_store,
    "memory": lambda _: InMemoryStore(),
    "sqlite": lambda workspace: open_store(f"sqlite:{workspace}/steno.db"),
}


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """In memory: what is asked here is what is stored, not how safely."""
    with temporary_folders.folder() as path:
        yield path


@pytest.fixture(params=OPENED)
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """The folder of the old sessions, in a workspace."""
    folder = tmp_path / "sessions"
    folder.mkdir(mode=0o700)
    return folder


@pytest.fixture
def store(engine: str, place: Path) -> Iterator[Store]:
    with OPENED[engine](place.parent) as opened:
        yield opened


def put(place: Path, *layouts: str) -> None:
    for layout in layouts or LAYOUTS:
        shutil.copytree(SAMPLES / layout, place, dirs_exist_ok=True)


def legacy(place: Path, name: str, *contents: str, key: str = "k", **fields: Any) -> Path:
    """A file of the older picoclaw."""
    messages = [{"role": "user", "content": content} for content in contents]
    path = place / name
    path.write_text(json.dumps({"key": key, "messages": messages, **fields}))
    return path


def picoclaw(place: Path, stem: str, *contents: str, **meta: Any) -> None:
    """A log of the newer picoclaw, with its meta where one is given."""
    lines = [{"role": "user", "content": content} for content in contents]
    (place / f"{stem}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if meta:
        (place / f"{stem}.meta.json").write_text(json.dumps(meta))


def names(place: Path) -> list[str]:
    """What of others is in the folder; our own logs and locks stand beside."""
    return sorted(path.name for path in place.iterdir() if _is_old(path))


def _is_old(path: Path) -> bool:
    if path.is_dir() or path.name.startswith("."):
        return False
    return not (path.suffix == ".jsonl" and path.read_bytes().startswith(b'{"kind":"state"'))


def contents(store: Store, key: str = "k", *, full: bool = False) -> list[Any]:
    return [message.content for message in store.get_history(key, full=full)]


# --- every sample, message by message --------------------------------------------------------


def _lines(path: Path) -> list[Any]:
    found = []
    for line in path.read_bytes().splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def _microseconds(text: str) -> datetime:
    """A time with nanoseconds, cut by hand."""
    whole, fraction = re.fullmatch(r"(.+?)(?:\.(\d+))?Z", text).groups()  # type: ignore[union-attr]
    microsecond = int((fraction or "0").ljust(9, "0")[:6])
    return datetime.fromisoformat(whole).replace(microsecond=microsecond, tzinfo=UTC)


def _compare(found: Sequence[Message], expected: Sequence[Any], times: Sequence[datetime]) -> None:
    assert [message.to_dict() for message in found] == list(expected)
    assert [list(message.to_dict()) for message in found] == [list(one) for one in expected]
    assert [message.at for message in found] == list(times)
    assert [message.seq for message in found] == list(range(1, len(expected) + 1))


@pytest.mark.parametrize(
    ("stem", "key", "problems"),
    [
        ("telegram_1001", "telegram:1001", 0),
        ("slack_C1001_1700000000.000100", "slack:C1001/1700000000.000100", 0),
        ("cli_torn-1001", "cli:torn-1001", 1),
    ],
)
def test_samples_of_picoclaw(store: Store, place: Path, stem: str, key: str, problems: int) -> None:
    put(place, "picoclaw")
    meta = json.loads((place / f"{stem}.meta.json").read_bytes())
    expected = _lines(place / f"{stem}.jsonl")

    migrated = migrate_from_json(place, store)

    [taken] = [one for one in migrated.imported if one.key == key]
    assert (taken.layout, taken.messages, taken.added) == ("picoclaw", len(expected), len(expected))
    assert len(taken.problems) == problems
    assert migrated.skipped == ()
    found = store.get_history(key, full=True)
    _compare(found, expected, [_microseconds(line["created_at"]) for line in expected])
    assert [message.hidden for message in found] == [
        number < meta["skip"] for number in range(len(expected))
    ]
    info = store.info(key)
    assert (info.summary, info.floor) == (meta["summary"], meta["skip"])
    assert set(meta.get("aliases", [])) <= set(info.meta["aliases"])
    assert info.meta["imported"][0]["created"] == meta["created_at"][:26] + "Z"
    if "scope" in meta:
        assert (info.meta["agent"], info.meta["channel"]) == ("main", "slack")


@pytest.mark.parametrize("stem", ["telegram_91001", "discord_1001_77"])
def test_samples_of_the_older_picoclaw(store: Store, place: Path, stem: str) -> None:
    put(place, "picoclaw-legacy")
    old = json.loads((place / f"{stem}.json").read_bytes())

    migrated = migrate_from_json(place, store)

    assert (migrated.sessions, migrated.messages) == (2, 11)
    [left] = migrated.skipped
    assert left.file == str(place / "broken.json")
    created, updated = _microseconds(old["created"]), _microseconds(old["updated"])
    times = [created] * (len(old["messages"]) - 1) + [updated]
    _compare(store.get_history(old["key"], full=True), old["messages"], times)
    assert contents(store, old["key"]) == [message["content"] for message in old["messages"]]
    assert store.get_summary(old["key"]) == old.get("summary", "")
    assert names(place) == [
        "broken.json",
        "discord_1001_77.json.migrated",
        "telegram_91001.json.migrated",
    ]


def _unpacked_by_hand(line: dict[str, Any]) -> dict[str, Any]:
    """A line of zeroclaw as a message, read without our reader: its tool calls are JSON text."""
    if line["role"] == "user" or not line["content"].startswith("{"):
        return line
    inside = json.loads(line["content"])
    calls = [
        {
            "id": call["id"],
            "type": "function",
            "function": {"name": call["name"], "arguments": call["arguments"]},
        }
        for call in inside.get("tool_calls", [])
    ]
    message = {"role": line["role"], "content": inside.get("content")}
    if "tool_call_id" in inside:
        message["tool_call_id"] = inside["tool_call_id"]
    return message | ({"tool_calls": calls} if calls else {})


def test_sample_of_zeroclaw(store: Store, place: Path) -> None:
    put(place, "zeroclaw")
    changed = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
    moment = int(changed.timestamp()) * 10**9 + 678901000
    os.utime(place / "telegram_1001_alice.jsonl", ns=(moment, moment))

    migrated = migrate_from_json(place, store)

    [taken] = migrated.imported
    assert taken.key == "telegram_1001_alice"
    assert taken.problems == ("line 5 is not JSON: 'this is not valid json'",)
    call = {"id": "t1", "type": "function", "function": {"name": "get", "arguments": "{}"}}
    expected = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "42", "tool_call_id": "t1"},
        {"role": "assistant", "content": "forty-two"},
        {"role": "user", "content": "after the bad line"},
    ]
    found = store.get_history("telegram_1001_alice", full=True)
    _compare(found, expected, [changed] * 5)
    read = [_unpacked_by_hand(line) for line in _lines(SAMPLES / "zeroclaw" / taken.file[-25:])]
    assert [message.to_dict() for message in found] == read
    assert [message.hidden for message in found] == [False] * 5
    info = store.info("telegram_1001_alice")
    assert (info.summary, info.floor, info.count) == ("", 0, 5)
    assert store.info("telegram_1001_alice").meta["aliases"] == ["telegram:1001:alice"]
    assert names(place) == ["telegram_1001_alice.jsonl.migrated"]


def test_imported_session_has_times_of_its_conversation(store: Store, place: Path) -> None:
    picoclaw(place, "old", "a", "b", "c", key="k", skip=2, summary="s", **TIMES)
    migrate_from_json(place, store)
    began, ended = (_microseconds(time) for time in TIMES.values())
    info = store.info("k")
    assert (info.created, info.updated) == (began, ended)
    with open_catalog(store) as catalog:
        [entry] = catalog.list().entries
        assert (entry.created, entry.updated) == (began, ended)

    store.undo("k")
    assert store.info("k").updated == ended
    before = datetime.now(UTC)
    store.add_message("k", "user", "d")
    info = store.info("k")
    assert info.created == began
    assert info.updated >= before
    store.fork("k", "fork")
    assert store.info("fork").created >= before


@pytest.mark.quick(5)
@pytest.mark.parametrize("imported", ["x", [7], [{}], [{"created": "x", "updated": 7}], [None]])
def test_metadata_that_is_not_a_receipt_does_not_change_times(store: Store, imported: Any) -> None:
    store.add_message("k", "user", "a")
    before = store.info("k").created
    store.set_meta("k", imported=imported)
    info = store.info("k")
    assert info.created == before <= info.updated


def test_all_layouts_in_one_folder(store: Store, place: Path) -> None:
    put(place)
    before = {path.name: path.read_bytes() for path in place.iterdir()}
    migrated = migrate_from_json(place, store)
    assert (migrated.sessions, migrated.messages) == (6, 52)
    assert len(store.list_sessions()) == 6
    after = {name.removesuffix(".migrated"): (place / name).read_bytes() for name in names(place)}
    assert after == before


# --- again -----------------------------------------------------------------------------------


def test_p4_reappearing_files_do_not_change_newer_data(
    store: Store, place: Path, engine: str
) -> None:
    # Under JSONL, zeroclaw's file would have to be put over our own log of that name.
    layouts = LAYOUTS[:2] if engine == "jsonl" else LAYOUTS
    put(place, *layouts)
    migrate_from_json(place, store)
    for key in store.list_sessions():
        store.add_message(key, "user", "newer")
        store.set_summary(key, "a newer summary")
        store.clear(key)
        store.add_message(key, "user", "newest")
    before = picture(store)
    for _ in range(2):
        put(place, *layouts)
        again = migrate_from_json(place, store)
        assert (again.sessions, again.messages) == (0, 0)
        assert len(again.imported) == len(before)
        assert picture(store) == before
    assert "telegram_1001.jsonl.migrated-3" in names(place)


def test_undone_hiding_is_not_repeated_by_reimport(store: Store, place: Path) -> None:
    picoclaw(place, "old", "a", "b", "c", key="k", skip=2, summary="a and b")
    migrate_from_json(place, store)
    store.undo("k")
    assert contents(store) == ["a", "b", "c"]
    # The same messages, but not the same bytes: no receipt fits.
    picoclaw(place, "old", "a", "b", "c", key="k", skip=2, summary="a and b", count=3)
    again = migrate_from_json(place, store)
    assert (again.messages, contents(store), store.get_summary("k")) == (0, ["a", "b", "c"], "")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_file_that_cannot_be_renamed_is_imported_once(
    store: Store, place: Path, layout: str, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(place, layout)
    rename = os.rename

    def refuse(source: str, target: str, **options: Any) -> None:
        if target.endswith(".migrated"):
            raise OSError(30, "Read-only file system")
        rename(source, target, **options)

    monkeypatch.setattr(os, "rename", refuse)
    first = migrate_from_json(place, store)
    assert {"could not be renamed" in left.reason for left in first.skipped} >= {True}
    assert first.sessions > 0
    before = picture(store)
    for key in before:
        store.add_message(key, "user", "newer")
    before = picture(store)
    again = migrate_from_json(place, store)
    assert (again.sessions, again.messages, picture(store)) == (0, 0, before)
    monkeypatch.undo()
    assert engine
    assert migrate_from_json(place, store).messages == 0
    assert all(name.endswith(".migrated") or name == "broken.json" for name in names(place))


def test_grown_file_adds_only_new_messages(store: Store, place: Path) -> None:
    legacy(place, "k.json", "a", "b", summary="s1")
    migrate_from_json(place, store)
    legacy(place, "k.json", "a", "b", "c", "d", summary="s2")
    again = migrate_from_json(place, store)
    assert (again.sessions, again.messages) == (1, 2)
    assert contents(store) == ["a", "b", "c", "d"]
    # The reference does not say which summary it began with, so the one here is not replaced.
    assert store.get_summary("k") == "s1"
    assert "summary was skipped" in again.imported[0].problems[0]


def test_p4_another_conversation_gets_a_separate_session(store: Store, place: Path) -> None:
    legacy(place, "k.json", "a", "b", updated="2026-05-06T07:08:09Z", summary="old")
    store.add_message("k", "user", "a")
    store.add_message("k", "user", "c")
    before = picture(store)["k"]

    migrated = migrate_from_json(place, store)

    [taken] = migrated.imported
    assert taken.key == "k (legacy 2026-05-06)"
    assert "'k' already contains another conversation" in taken.problems[0]
    assert picture(store)["k"] == before
    assert contents(store, taken.key) == ["a", "b"]
    assert store.get_summary(taken.key) == "old"

    legacy(place, "k.json", "x", updated="2026-05-06T07:08:09Z")
    assert migrate_from_json(place, store).imported[0].key == "k (legacy 2026-05-06 2)"
    legacy(place, "k.json", "a", "b", updated="2026-05-06T07:08:09Z", summary="old")
    again = migrate_from_json(place, store)
    assert (again.messages, again.imported[0].key) == (0, "k (legacy 2026-05-06)")
    assert len(store.list_sessions()) == 3


def test_separate_session_of_very_long_key_has_valid_key(store: Store, place: Path) -> None:
    key = "é" * 512
    legacy(place, "long.json", "a", key=key, updated="2026-05-06T07:08:09Z")
    store.add_message(key, "user", "b")
    [taken] = migrate_from_json(place, store).imported
    assert taken.key.endswith("é (legacy 2026-05-06)")
    assert len(taken.key.encode()) <= 1024


def test_session_deleted_after_the_import_stays_deleted(store: Store, place: Path) -> None:
    path = legacy(place, "k.json", "a")
    migrate_from_json(place, store)
    store.delete("k")
    (place / "k.json.migrated").rename(path)

    again = migrate_from_json(place, store)

    assert store.list_sessions() == []
    assert "was deleted" in again.imported[0].problems[0]
    assert (again.sessions, names(place)) == (0, ["k.json.migrated"])
    # Who asks for it gets it back.
    (place / "k.json.migrated").rename(path)
    assert import_folder(place, store, rename_files=False).messages == 1
    assert contents(store) == ["a"]


def test_log_of_a_key_precedes_its_source_file(store: Store, place: Path) -> None:
    """Picoclaw dates the messages it takes over; a stale `.json` beside is the same talk."""
    legacy(place, "k.json", "a", "b")
    lines = [
        {"role": "user", "content": content, "created_at": "2026-05-06T07:08:09Z"}
        for content in ("a", "b", "c")
    ]
    (place / "k.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (place / "k.meta.json").write_text('{"key":"k","skip":0,"count":3}')
    migrated = migrate_from_json(place, store)
    assert store.list_sessions() == ["k"]
    assert contents(store) == ["a", "b", "c"]
    assert [one.added for one in migrated.imported] == [3, 0]


# --- what is left alone ----------------------------------------------------------------------


def test_unreadable_files_are_left_and_reported(store: Store, place: Path) -> None:
    put(place, "picoclaw-legacy")
    texts = {
        "empty.json": "",
        "list.json": "[]",
        "binary.json": "\0\0",
        "nothing.jsonl": "\n\n",
        "words.jsonl": "these are\nwords\n",
        "lines.jsonl": '{"text": "no role"}\n',
        "later.jsonl": '{"role":"user","content":"x","timestamp":"2026"}\n',
        "bad.jsonl": "not one line of it\n",
        "bad.meta.json": '{"key":"bad","summary":"","skip":0}',
    }
    for name, text in texts.items():
        (place / name).write_text(text)
    (place / "folder.json").mkdir()
    (place / "link.json").symlink_to(SAMPLES / "picoclaw-legacy" / "telegram_91001.json")
    legacy(place, "key.json", "x", key="k" * 2000)

    migrated = migrate_from_json(place, store)

    assert migrated.sessions == 2
    left = {Path(one.file).name for one in migrated.skipped}
    assert left == {
        *(name for name in texts if name not in ("bad.meta.json", "list.json")),
        *("broken.json", "folder.json", "link.json", "key.json"),
    } - {"nothing.jsonl"} | ({"nothing.jsonl"} & left)
    assert all(one.reason for one in migrated.skipped)
    for name, text in texts.items():
        assert (place / name).read_text() == text
    assert (place / "link.json").is_symlink()
    assert len(store.list_sessions()) == 2


def test_stenolog_logs_are_not_imported(place: Path) -> None:
    with open_store(place.parent) as ours:
        for key in ("plain", "with:colon", "k" * 300):
            ours.add_message(key, "user", "x")
        before = {path.name: path.read_bytes() for path in place.glob("*.jsonl")}
        # A first line that is damaged does not make it another program's.
        damaged = place / "plain.jsonl"
        damaged.write_bytes(b"{" + damaged.read_bytes()[2:])
        for into in (ours, InMemoryStore()):
            assert migrate_from_json(place, into) == ImportReport()
            assert import_folder(place, into, rename_files=False) == ImportReport()
    assert {path.name for path in place.glob("*.jsonl")} == set(before)


def test_missing_folder_counts_as_empty(store: Store, tmp_path: Path) -> None:
    assert migrate_from_json(tmp_path / "nowhere", store) == ImportReport()


def test_meta_file_with_summary_is_a_session(store: Store, place: Path) -> None:
    (place / "a.meta.json").write_text('{"key":"a:1","summary":"they met"}')
    (place / "b.meta.json").write_text('{"key":"b:1","summary":""}')
    migrated = migrate_from_json(place, store)
    assert store.list_sessions() == ["a:1"]
    assert store.get_summary("a:1") == "they met"
    assert names(place) == ["a.meta.json.migrated", "b.meta.json.migrated"]
    assert (migrated.sessions, migrated.skipped) == (1, ())


def test_cleared_session_is_not_imported(store: Store, place: Path) -> None:
    picoclaw(place, "a", key="a:1", skip=0, summary="")
    legacy(place, "b.json", key="b:1")
    legacy(place, "c.json", key="c:1", messages=None)
    migrated = migrate_from_json(place, store)
    assert (migrated.sessions, migrated.skipped, store.list_sessions()) == (0, (), [])
    assert all(name.endswith(".migrated") for name in names(place))


def test_linked_folder_is_not_imported(store: Store, place: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    put(elsewhere, "picoclaw-legacy")
    (tmp_path / "link").symlink_to(elsewhere)
    [left] = migrate_from_json(tmp_path / "link", store).skipped
    assert left.file == str(tmp_path / "link")
    assert store.list_sessions() == []
    assert names(place) == []
    # Who names it as a source means it.
    assert import_folder(tmp_path / "link", store, rename_files=False).sessions == 2


def test_skip_counts_lines_that_cannot_be_read(store: Store, place: Path) -> None:
    lines = ['{"role":"user","content":"a"}', "bad", "", '{"role":"user","content":"b"}', "c"]
    (place / "k.jsonl").write_text("\n".join(lines))
    (place / "k.meta.json").write_text('{"key":"k","skip":2,"summary":"an a"}')
    migrate_from_json(place, store)
    assert contents(store) == ["b"]
    assert contents(store, full=True) == ["a", "b"]


def test_skip_counts_lines_of_spaces(store: Store, place: Path) -> None:
    picoclaw(place, "k", "one", "two", key="k", skip=2)
    log = place / "k.jsonl"
    log.write_bytes(log.read_bytes().replace(b"\n", b"\n  \n", 1))
    [taken] = migrate_from_json(place, store).imported
    assert (contents(store), taken.dropped, taken.problems) == (["two"], 0, ())


@pytest.mark.quick(5)
@pytest.mark.parametrize("skip", [-1, 1.5, True, "3", None])
def test_invalid_skip_hides_nothing(store: Store, place: Path, skip: object) -> None:
    picoclaw(place, "k", "a", "b", key="k", skip=skip)
    [taken] = migrate_from_json(place, store).imported
    assert contents(store) == ["a", "b"]
    assert "skip" in taken.problems[0]


def test_p10_message_that_cannot_be_stored_is_reported(store: Store, place: Path) -> None:
    text = '{"key":"k","messages":[{"role":"user","content":NaN},{"role":"user","content":"b"},3]}'
    (place / "k.json").write_text(text)
    [taken] = migrate_from_json(place, store).imported
    assert contents(store) == ["b"]
    assert len(taken.problems) == 2
    assert "NaN" in taken.problems[0].replace("nan", "NaN")


# --- failures --------------------------------------------------------------------------------


class FullDisk(JSONLStore):
    """A store whose disk is full after so many batches."""

    room = 0

    def add_messages(self, *arguments: Any, **options: Any) -> list[int]:
        self.room -= 1
        if self.room < 0:
            raise NotStored("no space left on device; free some space, then try again")
        return super().add_messages(*arguments, **options)


@pytest.mark.quick(5)
@pytest.mark.parametrize("room", range(6))
@pytest.mark.parametrize("elsewhere", [False, True])
def test_failed_import_keeps_every_original_file(
    place: Path, tmp_path: Path, elsewhere: bool, room: int
) -> None:
    put(place)
    before = {path.name: path.read_bytes() for path in place.iterdir()}
    workspace = tmp_path / "elsewhere" if elsewhere else place.parent

    with FullDisk(workspace) as full:
        full.room = room
        with pytest.raises(NotStored):
            migrate_from_json(place, full)

    if room == 5 and not elsewhere:
        # The last one: our own log has its very name by now (docs/decisions/0005).
        name = "telegram_1001_alice.jsonl"
        before[f"{name}.importing"] = before.pop(name)
    assert {name: (place / name).read_bytes() for name in names(place)} == before
    with open_store(workspace) as store:
        assert migrate_from_json(place, store).sessions == 6 - room
        found = picture(store)
    with InMemoryStore() as undisturbed:
        shutil.rmtree(place)
        place.mkdir()
        put(place)
        migrate_from_json(place, undisturbed)
        assert found == picture(undisturbed)


class FailingOnce(InMemoryStore):
    """A store in which one write fails: the one of this number."""

    writes_left = 0
    writes_first = False
    """Whether the write that fails is stored, as if a kill came right after it."""

    def write(self, write: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        self.writes_left -= 1
        if self.writes_left == 0:
            if self.writes_first:
                write(*arguments, **options)
            raise NotStored("no space left on device; free some space, then try again")
        return write(*arguments, **options)

    def add_messages(self, *arguments: Any, **options: Any) -> Any:
        return self.write(super().add_messages, *arguments, **options)

    def set_meta(self, key: str, /, **fields: Any) -> None:
        self.write(super().set_meta, key, **fields)

    def checkpoint(self, *arguments: Any, **options: Any) -> None:
        self.write(super().checkpoint, *arguments, **options)

    def set_summary(self, *arguments: Any) -> None:
        self.write(super().set_summary, *arguments)

    @property
    def admin(self) -> InMemoryAdmin:
        return _FailingAdmin(self)


class _FailingAdmin(InMemoryAdmin):
    def hide(self, *arguments: Any) -> None:
        self._store.write(super().hide, *arguments)  # type: ignore[attr-defined]


def _put_all_kinds(place: Path) -> None:
    """The samples, and what a SessionManager wrote that has seen all of them."""
    put(place)
    manager = SessionManager(place)
    manager.add_message("telegram:91001", "user", "to the manager")
    seen = manager.get_history("telegram:91001")
    manager.set_history("telegram:91001", [*seen[:3], *seen[4:]])
    manager.checkpoint("telegram:91001", summary="by the manager", upto=2)


@pytest.mark.parametrize("writes_first", [False, True])
def test_p2_next_run_completes_import_that_failed_at_any_step(
    place: Path, writes_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_import, "BATCH_MESSAGES", 5)
    _put_all_kinds(place)
    originals = {path.name: path.read_bytes() for path in place.iterdir()}
    with FailingOnce() as undisturbed:
        migrate_from_json(place, undisturbed)
        steps, expected = -undisturbed.writes_left, _without_tails(picture(undisturbed))
    assert steps > 20
    for step in range(1, steps + 1):
        shutil.rmtree(place)
        place.mkdir()
        for name, text in originals.items():
            (place / name).write_bytes(text)
            os.utime(place / name, (1_800_000_000, 1_800_000_000))
        with FailingOnce() as store:
            store.writes_left, store.writes_first = step, writes_first
            with pytest.raises(NotStored):
                migrate_from_json(place, store)
            migrate_from_json(place, store)
            assert _without_tails(picture(store)) == expected, step


@pytest.mark.parametrize("hidden", [0, 3])
def test_p5_session_manager_that_never_saw_the_log_hides_no_message(
    place: Path, hidden: int
) -> None:
    def begin(store: FailingOnce) -> None:
        for path in place.iterdir():
            path.unlink()
        manager = SessionManager(place)
        for number in range(4):
            manager.add_message("k", "user", f"to the manager {number}", once=f"t{number}")
        manager.checkpoint("k", summary="by the manager", upto=hidden)
        for number in range(10):
            store.add_message("k", "user", f"in the log {number}")

    def outcome(store: FailingOnce) -> tuple[list[str], str]:
        return [message.content for message in store.get_history("k")], store.get_summary("k")

    with FailingOnce() as undisturbed:
        begin(undisturbed)
        undisturbed.writes_left = 0
        migrate_from_json(place, undisturbed)
        steps, expected = -undisturbed.writes_left, outcome(undisturbed)
    assert steps > 3
    assert len(expected[0]) == 14
    for step in range(1, steps + 1):
        with FailingOnce() as store:
            begin(store)
            store.writes_left = step
            with pytest.raises(NotStored):
                migrate_from_json(place, store)
            migrate_from_json(place, store)
            assert outcome(store) == expected, step


def test_p5_resumed_merge_does_not_hide_newer_messages(place: Path) -> None:
    manager = SessionManager(place)
    for number in range(4):
        manager.add_message("k", "user", f"to the manager {number}", once=f"t{number}")
    manager.checkpoint("k", summary="by the manager", upto=3)
    with FailingOnce() as store:
        store.writes_left = 2  # the mark is there, and no message
        with pytest.raises(NotStored):
            migrate_from_json(place, store)
        store.add_message("k", "user", "meanwhile")
        migrated = migrate_from_json(place, store)
        assert "meanwhile" in [message.content for message in store.get_history("k")]
        assert any("was skipped" in words for words in migrated.imported[0].problems)


def _without_tails(found: dict[str, Any]) -> dict[str, Any]:
    """Without the times of files, which this test does not keep."""
    return {
        key: ([(*one[:2], one[3]) for one in messages], summary, floor, sorted(meta))
        for key, (messages, summary, floor, meta) in found.items()
    }


def test_damaged_session_does_not_prevent_import_of_others(place: Path) -> None:
    put(place, "picoclaw-legacy")
    (place / "telegram%3A91001.jsonl").write_text("somebody wrote this here\n")
    with open_store(place.parent) as store:
        migrated = migrate_from_json(place, store)
        assert store.list_sessions() == ["discord:1001:77"]
    assert {Path(one.file).name for one in migrated.skipped} == {
        *("broken.json", "telegram_91001.json", "telegram%3A91001.jsonl")
    }
    assert (place / "telegram_91001.json").exists()


def test_file_changed_during_import_keeps_its_name(place: Path, store: Store) -> None:
    path = legacy(place, "k.json", "a")

    class Slow(InMemoryStore):
        def set_meta(self, key: str, /, **fields: Any) -> None:
            super().set_meta(key, **fields)
            if "imported" in fields and len(fields["imported"]) == 1:
                legacy(place, "k.json", "a", "b")

    with Slow() as slow:
        first = migrate_from_json(place, slow)
        assert "the file changed after" in first.skipped[0].reason
        assert path.exists()
        second = migrate_from_json(place, slow)
        assert (second.messages, contents(slow)) == (1, ["a", "b"])
    assert store.list_sessions() == []
    assert names(place) == ["k.json.migrated"]


# --- a foreign log under our name ------------------------------------------------------------


def test_old_log_with_name_of_new_log_is_renamed(place: Path) -> None:
    put(place, "zeroclaw")
    original = (place / "telegram_1001_alice.jsonl").read_bytes()
    with open_store(place.parent) as store:
        migrate_from_json(place, store)
        assert len(contents(store, "telegram_1001_alice")) == 5
    assert (place / "telegram_1001_alice.jsonl").read_bytes().startswith(b'{"kind":"state"')
    assert (place / "telegram_1001_alice.jsonl.migrated").read_bytes() == original


def test_log_that_cannot_be_renamed_is_skipped_and_others_imported(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(place)
    rename = os.rename

    def refuse(source: str, target: str, **options: Any) -> None:
        if source == "telegram_1001.jsonl":
            raise OSError(1, "Operation not permitted")
        rename(source, target, **options)

    monkeypatch.setattr(os, "rename", refuse)
    with open_store(place.parent) as store:
        migrated = migrate_from_json(place, store)
        assert migrated.sessions == 5
        assert "telegram:1001" not in store.list_sessions()
    assert {Path(one.file).name for one in migrated.skipped} == {
        *("telegram_1001.jsonl", "broken.json")
    }
    assert "cannot be renamed: Operation not permitted" in "".join(
        one.reason for one in migrated.skipped
    )


def test_log_with_escaped_key_as_name_is_imported_when_thorough(
    place: Path,
) -> None:
    picoclaw(place, "a%3Ab", "x")
    (place / "a%3Ab.meta.json").unlink(missing_ok=True)
    with open_store(place.parent) as store:
        assert import_folder(place, store, thorough=False) == ImportReport()
        assert migrate_from_json(place, store).sessions == 1


@pytest.mark.parametrize("stem", ["whatsapp_12%34", "a%3Ab", "100%"])
def test_foreign_log_with_a_percent_sign_in_its_name_is_imported(place: Path, stem: str) -> None:
    picoclaw(place, stem, "x", key=f"key of {stem}")
    with open_store(place.parent) as store:
        assert import_folder(place, store, thorough=False).sessions == 1
        assert contents(store, f"key of {stem}") == ["x"]


@pytest.mark.parametrize(
    "hidden", ["[[1, null, null, 7]]", "[[1e999, null, null, {}]]", "[[1, null, null, null]]"]
)
def test_hand_edited_field_does_not_prevent_import(place: Path, hidden: str) -> None:
    ours = f'{{"tokens":[],"times":[],"hidden":{hidden},"began_with":"","first":1}}'
    (place / "k.json").write_text(f'{{"key":"k","messages":[],"stenolog":{ours}}}')
    with open_store(place.parent) as store:
        assert migrate_from_json(place, store) is not None


def test_p4_purge_reports_source_files_of_imported_session(store: Store, place: Path) -> None:
    picoclaw(place, "tg_1", "a secret", key="tg:1")
    migrate_from_json(place, store)
    told = store.admin.purge("tg:1").not_reached
    if not isinstance(store, InMemoryStore):
        assert any("tg_1.jsonl.migrated" in sentence for sentence in told)


def test_folders_in_place_of_files_leak_no_descriptors(place: Path) -> None:
    for name in ("x.jsonl", "x.json", "y.meta.json"):
        (place / name).mkdir()
    before = len(list(Path("/proc/self/fd").iterdir()))
    with open_store(place.parent) as store:
        migrate_from_json(place, store)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_two_logs_with_conflicting_names_are_imported(place: Path) -> None:
    picoclaw(place, "slack_C1_17.00", "pico", key="slack:C1/17.00")
    picoclaw(place, "slack_C1_17_00", "zero")
    with open_store(place.parent) as store:
        migrated = migrate_from_json(place, store)
        assert migrated.skipped == ()
        assert contents(store, "slack:C1/17.00") == ["pico"]
        assert contents(store, "slack_C1_17_00") == ["zero"]
    assert [name for name in names(place) if not name.endswith(".migrated")] == []


@pytest.mark.quick(5)
@pytest.mark.parametrize("log", ["", ".importing"])
@pytest.mark.parametrize("meta", ["", ".importing", ".migrated"])
def test_killed_import_is_continued(store: Store, place: Path, log: str, meta: str) -> None:
    put(place, "picoclaw")
    stem = "slack_C1001_1700000000.000100"
    (place / f"{stem}.jsonl").rename(place / f"{stem}.jsonl{log}")
    (place / f"{stem}.meta.json").rename(place / f"{stem}.meta.json{meta}")
    migrated = migrate_from_json(place, store)
    assert migrated.sessions == 3
    assert store.info("slack:C1001/1700000000.000100").floor == 24
    assert {name.rpartition(".")[2] for name in names(place)} == {"migrated"}
    assert len(names(place)) == 6


def test_renamed_log_and_new_log_of_same_name_are_both_imported(store: Store, place: Path) -> None:
    picoclaw(place, "old", "a", "b", key="k", skip=1, summary="an a")
    (place / "old.jsonl").rename(place / "old.jsonl.importing")
    (place / "old.meta.json").rename(place / "old.meta.json.importing")
    picoclaw(place, "old", "a", "b", "c", key="k", skip=0, summary="")
    migrate_from_json(place, store)
    assert contents(store, full=True) == ["a", "b", "c"]
    assert store.info("k").floor == 1
    assert all(".migrated" in name for name in names(place))


# --- what a SessionManager wrote -------------------------------------------------------------


def test_p12_messages_of_session_manager_are_merged_by_idempotency_key(
    store: Store, place: Path
) -> None:
    for content in "abc":
        store.add_message("k", "user", content, once=content)
    manager = SessionManager(place)
    for content in ("c", "hi", "hi"):
        manager.add_message("k", "user", content, once=None if content == "hi" else content)
    store.add_message("k", "user", "meanwhile")

    migrated = migrate_from_json(place, store)

    assert contents(store) == ["a", "b", "c", "meanwhile", "hi", "hi"]
    assert (migrated.sessions, migrated.messages) == (1, 2)
    # A redelivered message is known by its token, wherever it was first stored.
    assert store.add_message("k", "user", "c", once="c") == 3


def test_p12_resumed_import_repeats_no_message_whose_idempotency_key_is_forgotten(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "TOKEN_WINDOW", 5)
    monkeypatch.setattr(merge, "REMEMBERED_TOKENS", 5)
    manager = SessionManager(place)
    for number in range(20):
        manager.add_message("k", "user", f"message {number}")
    texts, added = contents(manager.store), JSONLStore.add_messages

    def dying(store: JSONLStore, key: str, messages: Any, **options: Any) -> list[int]:
        if messages[0].content == "message 18":
            raise KeyboardInterrupt
        return added(store, key, messages, **options)

    with JSONLStore(place.parent / "new") as store:
        with monkeypatch.context() as patched:
            patched.setattr(JSONLStore, "add_messages", dying)
            with pytest.raises(KeyboardInterrupt):
                migrate_from_json(place, store)
        migrate_from_json(place, store)
        assert contents(store) == texts


def test_conflicting_idempotency_key_loses_no_message(store: Store, place: Path) -> None:
    store.add_message("k", "user", "here", once="t")
    SessionManager(place).add_message("k", "user", "there", once="t")
    [taken] = migrate_from_json(place, store).imported
    assert contents(store) == ["here", "there"]
    assert "idempotency key" in taken.problems[0]


def test_p5_summary_and_floor_are_merged_if_session_manager_saw_all_messages(
    store: Store, place: Path
) -> None:
    legacy(place, "k.json", "a", "b", summary="s1")
    manager = SessionManager(place)
    manager.add_message("k", "user", "c")
    manager.set_history("k", [{"role": "user", "content": text} for text in ("a", "b", "x")])
    manager.checkpoint("k", summary="s2", upto=1)
    manager.set_history("k", [{"role": "user", "content": text} for text in ("b", "y")])

    migrate_from_json(place, store)

    everything = [(m.content, m.hidden) for m in store.get_history("k", full=True)]
    assert everything == [("a", True), ("b", False), ("c", True), ("x", True), ("y", False)]
    assert (store.get_summary("k"), store.info("k").floor) == ("s2", 1)


@pytest.mark.parametrize("newer", ["message", "summary"])
def test_p4_summary_and_floor_of_session_manager_never_replace_newer_ones(
    store: Store, place: Path, newer: str
) -> None:
    for content in "ab":
        store.add_message("k", "user", content)
    store.set_summary("k", "s1")
    manager = SessionManager(place)
    for content in "cd":
        manager.add_message("k", "user", content)
    manager.checkpoint("k", summary="s2", upto=1)
    if newer == "message":
        store.add_message("k", "user", "meanwhile")
    else:
        store.set_summary("k", "s3")
    before = contents(store)

    [taken] = migrate_from_json(place, store).imported

    assert contents(store) == [*before, "c", "d"]
    assert store.get_summary("k") == ("s1" if newer == "message" else "s3")
    assert any("summary was skipped" in words for words in taken.problems)
    assert any("visible here" in words for words in taken.problems)


def test_messages_of_session_manager_under_alias_are_merged_into_session(
    store: Store, place: Path
) -> None:
    picoclaw(place, "sk_v1_ab", "a", key="sk_v1_ab", aliases=["agent:main:direct:7"])
    migrate_from_json(place, store)
    SessionManager(place).add_message("agent:main:direct:7", "user", "b")
    migrate_from_json(place, store)
    assert store.list_sessions() == ["sk_v1_ab"]
    assert contents(store, "sk_v1_ab") == ["a", "b"]


def test_meta_of_session_manager_is_merged_unless_it_names_seqs(store: Store, place: Path) -> None:
    manager = SessionManager(place)
    manager.add_message("k", "user", "a")
    manager.store.set_meta("k", title="there", tags=["x"], compacted=7, requests={"1": 1})
    shutil.copytree(place, place.parent / "theirs")
    store.set_meta("k", title="here")
    migrate_from_json(place, store)
    meta = store.info("k").meta
    assert (meta["title"], meta["tags"], meta.keys() & {"compacted", "requests"}) == (
        "here",
        ["x"],
        set(),
    )
    with InMemoryStore() as other:
        import_folder(place.parent / "theirs", other)  # files of other people
        assert other.info("k").meta.keys() == {"imported"}


# --- many, and at once -----------------------------------------------------------------------


def test_long_session_is_imported_in_batches(store: Store, place: Path) -> None:
    texts = [f"message {number}" for number in range(2 * BATCH_MESSAGES + 7)]
    picoclaw(place, "k", *texts, key="k", skip=BATCH_MESSAGES + 3, summary="the first half")
    done: list[int] = []
    migrated = import_folder(place, store, progress=done.append)
    assert migrated.messages == len(texts)
    assert contents(store, full=True) == texts
    assert contents(store) == texts[BATCH_MESSAGES + 3 :]
    assert len(done) == 1
    size = (place / "k.jsonl.migrated").stat().st_size
    assert sum(done) == pytest.approx(size + (place / "k.meta.json.migrated").stat().st_size)


_MIGRATE = """
import sys
from stenolog import open_store
from stenolog.transfer import migrate_from_json

sys.stdin.readline()
with open_store(sys.argv[1]) as store:
    print(migrate_from_json(sys.argv[2], store).messages)
"""


@pytest.mark.parametrize("scheme", ["jsonl:{}", "sqlite:{}/steno.db"])
def test_p7_concurrent_starts_import_each_session_once(place: Path, scheme: str) -> None:
    put(place)
    texts = [f"message {number}" for number in range(3 * BATCH_MESSAGES)]
    picoclaw(place, "long", *texts, key="long:1")
    where = scheme.format(place.parent)
    children = [
        subprocess.Popen(
            [sys.executable, "-c", _MIGRATE, where, str(place)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    added = [int(child.communicate("go\n")[0]) for child in children]
    assert sorted(added) == [0, 0, 0, 52 + len(texts)]
    with open_store(where) as store:
        assert contents(store, "long:1") == texts
        assert len(store.list_sessions()) == 7
    assert all(name.endswith(".migrated") or name == "broken.json" for name in names(place))


def test_p7_import_waits_for_another_process_and_then_skips(
    store: Store, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(place)
    before = names(place)
    monkeypatch.setattr("stenolog.transfer.migration.LOCK_TIMEOUT", 0.05)
    with Folder(place) as busy:
        busy.lock(1)
        migrated = migrate_from_json(place, store)
        assert migrated.imported == ()
        assert "another process" in migrated.skipped[0].reason
        assert (names(place), store.list_sessions()) == (before, [])
        # A copy changes nothing in the folder, and need not wait.
        assert import_folder(place, InMemoryStore(), rename_files=False).sessions == 6
    assert migrate_from_json(place, store).sessions == 6


@settings(max_examples=50)
@given(
    here=st.lists(st.sampled_from("ab"), max_size=5),
    there=st.lists(st.sampled_from("ab"), max_size=3),
    said=st.lists(
        st.tuples(st.sampled_from("ab"), st.sampled_from([None, "1", "3", "5"])), max_size=4
    ),
)
def test_p4_any_merge_keeps_all_messages_of_both_sides(
    here: list[str],
    there: list[str],
    said: list[tuple[str, str | None]],
) -> None:
    """`there`: as the reference wrote them; `said`: what a SessionManager added, with tokens."""
    with temporary_folders.folder() as place:
        _merge_and_compare(place, here, there, said)


def _merge_and_compare(
    place: Path, here: list[str], there: list[str], said: list[tuple[str, str | None]]
) -> None:
    legacy(place, "k.json", *there)
    manager = SessionManager(place)
    new = [
        one
        for one in dict.fromkeys((*one, None if one[1] else n) for n, one in enumerate(said))
        if manager.add_message("k", "user", one[0], once=one[1]) is not None
    ]
    shown = [message.content for message in manager.get_history("k")]
    with InMemoryStore() as store:
        tokens = {}
        for number, content in enumerate(here):
            once = str(number) if number % 2 else None
            store.add_message("k", "user", content, once=once)
            tokens[once] = content
        same_talk = here[: len(there)] == there or there[: len(here)] == here
        added = [content for content, once, _ in new if not once or tokens.get(once) != content]

        [taken] = migrate_from_json(place, store).imported

        assert contents(store)[: len(here)] == here
        if same_talk:
            assert contents(store) == max(here, there, key=len) + added
        else:
            assert (contents(store), contents(store, taken.key)) == (here, shown)
        before = picture(store)
        (place / "k.json.migrated").rename(place / "k.json")
        assert migrate_from_json(place, store).messages == 0
        assert picture(store) == before


# --- aliases ---------------------------------------------------------------------------------


ALIASES: Final = {
    "slack_C1001_1700000000.000100": "slack:C1001/1700000000.000100",
    "agent:main:slack:1001": "slack:C1001/1700000000.000100",
    "telegram_1001": "telegram:1001",
    "telegram_91001": "telegram:91001",
    "telegram:1001:alice": "telegram_1001_alice",
    "telegram:77": "sk_v1_77",
    "agent:main:direct:77": "sk_v1_77",
}


@pytest.fixture
def migrated(store: Store, place: Path) -> Store:
    put(place)
    scope = {"version": 1, "agent_id": "main", "channel": "telegram", "dimensions": ["chat"]}
    scope["values"] = {"chat": "direct:77"}
    picoclaw(
        place, "sk_v1_77", "scoped", key="sk_v1_77", scope=scope, aliases=["agent:main:direct:77"]
    )
    migrate_from_json(place, store)
    return store


@pytest.mark.parametrize("alias", ALIASES)
def test_alias_opens_the_same_session(migrated: Store, alias: str) -> None:
    key = ALIASES[alias]
    keys = migrated.list_sessions()
    sessions = JSONLBackend(migrated)
    assert [m.seq for m in sessions.get_history(alias)] == [
        m.seq for m in migrated.get_history(key)
    ]
    seq = sessions.add_message(alias, "user", "by another name")
    assert seq == migrated.get_history(key)[-1].seq
    assert sessions.get_summary(alias) == migrated.get_summary(key)
    assert sessions.set_summary(alias, "named")
    assert migrated.get_summary(key) == "named"
    assert sessions.checkpoint(alias, summary="shorter", upto=1)
    assert sessions.truncate_history(alias, 1)
    assert sessions.set_history(alias, [{"role": "user", "content": "only"}])
    sessions.save(alias)
    assert contents(migrated, key) == ["only"]
    assert migrated.list_sessions() == keys
    # Another process, or the next start, has only the store.
    assert [m.content for m in JSONLBackend(migrated).get_history(alias)] == ["only"]


@pytest.mark.parametrize("aliases", [False, True])
def test_p9_new_keys_do_not_scan_all_sessions(
    store: Store, place: Path, aliases: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if aliases:
        picoclaw(place, "sk_v1_a", "a", key="sk_v1_a", aliases=["agent:main:main"])
        migrate_from_json(place, store)
    sessions = JSONLBackend(store)
    looks = []
    admin_type = type(store.admin)
    stamps = admin_type.stamps

    def counted(admin: Any) -> dict[str, str]:
        looks.append(1)
        return stamps(admin)

    monkeypatch.setattr(admin_type, "stamps", counted)
    for number in range(20):
        assert sessions.add_message(f"new:{number}", "user", "x") == 1
        assert sessions.get_history(f"unknown:{number}") == []
    assert len(looks) == aliases


def test_alias_follows_its_session_through_delete_and_restore(migrated: Store) -> None:
    sessions = JSONLBackend(migrated)
    migrated.fork("telegram:1001", "copy")
    assert len(sessions.get_history("telegram_1001")) == 5
    migrated.delete("telegram:1001")
    assert sessions.get_history("telegram_1001") == []
    migrated.admin.restore("telegram:1001", as_key="another")
    assert len(sessions.get_history("telegram_1001")) == 5
    assert sessions.add_message("telegram_1001", "user", "x") == 6
    assert migrated.info("another").last_seq == 6
    assert migrated.info("copy").last_seq == 5


def test_alias_of_several_sessions_opens_none(store: Store, place: Path) -> None:
    picoclaw(place, "sk_v1_a", "a", key="sk_v1_a", aliases=["agent:main:main", "only:a"])
    picoclaw(place, "sk_v1_b", "b", key="sk_v1_b", aliases=["agent:main:main"])
    taken = migrate_from_json(place, store).imported
    assert ["several sessions" in "".join(one.problems) for one in taken] == [True, True]
    picoclaw(place, "sk_v1_c", "c", key="sk_v1_c", aliases=["only:a"])
    [late] = migrate_from_json(place, store).imported
    assert "already opens 'sk_v1_a'" in late.problems[0]
    sessions = JSONLBackend(store)
    assert sessions.get_history("agent:main:main") == []
    assert [m.content for m in sessions.get_history("only:a")] == ["a"]


def test_number_of_aliases_in_meta_is_limited(store: Store, place: Path) -> None:
    aliases = [f"agent:main:direct:{number:0100}" for number in range(1000)]
    picoclaw(place, "k", "a", key="k", aliases=aliases)
    [taken] = migrate_from_json(place, store).imported
    assert 0 < len(store.info("k").meta["aliases"]) < 200
    assert "too many aliases" in taken.problems[-1]


def test_p8_unavailable_store_fails_the_import_and_keeps_the_file(place: Path) -> None:
    put(place, "picoclaw-legacy")

    class Busy(InMemoryStore):
        def set_meta(self, key: str, /, **fields: Any) -> None:
            raise StoreUnavailable(f"{key} {fields}")

    with Busy() as busy, pytest.raises(StoreUnavailable):
        migrate_from_json(place, busy)
    assert "telegram_91001.json" in names(place)


def test_session_store_facade_is_rejected_with_hint_to_its_store(place: Path) -> None:
    with pytest.raises(UsageError, match=r"migrate_from_json needs a Store.*\.store"):
        migrate_from_json(place, JSONLBackend(InMemoryStore()))  # type: ignore[arg-type]
