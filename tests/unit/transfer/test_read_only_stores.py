"""Transcripts and several places as read-only stores: read in place, never written."""

import json
import os
import shutil
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest

from stenolog.catalog import open_catalog
from stenolog.catalog.message_metadata import has_failed
from stenolog.errors import NoSuchSession, ReadOnly, StoreUnavailable
from stenolog.stores.in_memory import InMemoryAdmin, InMemoryStore
from stenolog.transfer import read_only_stores
from stenolog.transfer.read_only_stores import CombinedStore, StorePlace, TranscriptStore
from stenolog.transfer.transcripts.claude_code import ClaudeCode
from stenolog.transfer.transcripts.codex import Codex
from stenolog.transfer.transcripts.opencode import OpenCode
from stenolog.transfer.transcripts.programs import PROGRAMS, detect_program
from support.transcripts import SAMPLES

KEY = "claude-code:20c7a18b-7d9d-457e-bc34-7dfb461f0515"
NAME = "-home-ada-harbour/20c7a18b-7d9d-457e-bc34-7dfb461f0515.jsonl"


@pytest.fixture
def places(tmp_path: Path) -> Path:
    shutil.copytree(SAMPLES / "claude-code" / "projects", tmp_path / "projects")
    shutil.copytree(SAMPLES / "codex" / "sessions", tmp_path / "sessions")
    return tmp_path


@pytest.fixture
def store(places: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TranscriptStore]:
    monkeypatch.setattr(read_only_stores, "LIST_SECONDS", -1.0)
    claude_code, codex = (ClaudeCode(), places / "projects"), (Codex(), places / "sessions")
    with TranscriptStore([claude_code, codex]) as opened:
        yield opened


def digest(place: Path) -> str:
    files = sorted(path for path in place.rglob("*") if path.is_file())
    state = [(str(path), path.stat().st_mtime_ns, path.read_bytes()) for path in files]
    return sha256(repr(state).encode()).hexdigest()


def test_sessions_of_all_programs_are_listed_and_read(store: TranscriptStore) -> None:
    keys = store.list_sessions()
    assert len(keys) == 6 + 6
    info = store.info(KEY)
    assert (info.count, info.visible, info.floor) == (28, 7, 19)
    assert info.meta["title"] == "Add a tide table to the harbour page"
    assert info.updated.isoformat() == "2026-11-16T11:50:08.648000+00:00"
    assert len(store.view(KEY).messages) == 7


def test_session_that_its_program_is_writing_is_running_not_interrupted(
    store: TranscriptStore, places: Path
) -> None:
    file = places / "projects" / NAME
    lines = file.read_text().splitlines(keepends=True)
    last_prompt = max(n for n, line in enumerate(lines) if '"type":"user"' in line)
    places_store = CombinedStore([StorePlace(store=store, prefix="p/")])
    with places_store as combined, open_catalog(combined) as catalog:

        def state() -> str:
            entry = catalog.entry(f"p/{KEY}")
            assert entry is not None
            [listed] = catalog.list(prefix=f"p/{KEY}", state=entry.state).entries
            return listed.state

        now = time.time()
        os.utime(file, (now, now))
        assert state() == "idle"
        file.write_text("".join(lines[: last_prompt + 1]))
        assert state() == "running"
        old = now - read_only_stores.RUNNING_SECONDS - 1
        os.utime(file, (old, old))
        assert state() == "interrupted"


def test_session_is_running_also_beside_a_file_that_cannot_be_read(
    store: TranscriptStore, places: Path
) -> None:
    written = places / "projects" / NAME
    lines = written.read_text().splitlines(keepends=True)
    last_prompt = max(n for n, line in enumerate(lines) if '"type":"user"' in line)
    written.write_text("".join(lines[: last_prompt + 1]))
    damaged = "00000000-0000-4000-8000-000000000000"
    (places / "sessions" / f"rollout-2026-11-16T10-00-00-{damaged}.jsonl.zst").write_bytes(b"no")
    damaged_key = f"codex:{damaged}"
    assert damaged_key in store.list_sessions()
    assert store.admin.leased([damaged_key, KEY]) == {KEY}


def test_new_export_of_a_chat_is_not_running(tmp_path: Path) -> None:
    """An export is no program that writes; its conversations share one file."""
    message = {"author": {"role": "user"}, "content": {"content_type": "text", "parts": ["hello"]}}
    node = {"id": "r", "parent": None, "message": message | {"create_time": 1}}
    chat = {"conversation_id": "c", "title": "t", "current_node": "r", "mapping": {"r": node}}
    (tmp_path / "conversations.json").write_text(json.dumps([chat]))
    with TranscriptStore([(PROGRAMS["chatgpt"](), tmp_path)]) as store:
        assert store.list_sessions() == ["chatgpt:c"]
        assert store.admin.leased(["chatgpt:c"]) == set()


def test_the_catalog_finds_words_in_transcripts(store: TranscriptStore) -> None:
    with open_catalog(store) as catalog:
        hits = catalog.search("lighthouses")
        assert {hit.key[:6] for hit in hits.hits} == {"codex:"}


@pytest.mark.parametrize(
    ("fork", "source", "messages", "output_tokens"),
    [
        ("claude-code:9e1eb1be-32e7-4220-a0bf-a63df7f38f75", KEY, 11, 35),
        (
            "codex:01a1e437-98be-7321-aa57-4921f92b0243",
            "codex:01a1e437-7030-7230-8002-8dfe870f6794",
            18,
            60,
        ),
    ],
)
def test_tokens_of_copied_answers_count_only_for_the_source_of_a_fork(
    store: TranscriptStore, fork: str, source: str, messages: int, output_tokens: int
) -> None:
    with open_catalog(store) as catalog:
        entry = catalog.entry(fork)
    assert entry is not None
    assert (entry.count, entry.output_tokens) == (messages, output_tokens)
    assert entry.forked_from == store.info(fork).forked_from == source


def test_failures_of_copied_tools_count_only_for_the_source_of_a_fork(
    store: TranscriptStore, places: Path
) -> None:
    # The fork of the samples begins after the only failure.
    source = places / "projects" / NAME
    fork = source.with_name("ffffffff-0000-4000-8000-000000000000.jsonl")
    shutil.copy(source, fork)
    with open_catalog(store) as catalog:
        entries = {entry.key: entry for entry in catalog.list(limit=50).entries}
    assert entries[KEY].failed == 1
    copy = entries[f"claude-code:{fork.stem}"]
    assert copy.forked_from == KEY
    assert (copy.count, copy.failed) == (28, 0)
    results = [message.to_dict() for message in store.get_history(copy.key, full=True)]
    assert [has_failed(result) for result in results].count(True) == 1, "the page still shows it"


@pytest.mark.parametrize("kind", ["folder", "link to itself", "pipe"])
def test_session_is_read_although_its_project_has_an_unreadable_file(
    store: TranscriptStore, places: Path, kind: str
) -> None:
    unreadable = (places / "projects" / NAME).with_name("0.jsonl")
    if kind == "pipe":
        os.mkfifo(unreadable)
    elif kind == "folder":
        unreadable.mkdir()
    else:
        unreadable.symlink_to(unreadable)
    assert store.info(KEY).count == 28


def test_reads_do_not_change_the_files(store: TranscriptStore, places: Path) -> None:
    before = digest(places)
    for key in store.list_sessions():
        store.view(key)
        store.get_history(key, full=True)
    assert digest(places) == before


def test_writes_are_rejected(store: TranscriptStore) -> None:
    with pytest.raises(ReadOnly, match="steno import"):
        store.add_message(KEY, "user", "hello")
    with pytest.raises(ReadOnly):
        store.delete(KEY)


def test_a_file_that_grows_is_read_again(store: TranscriptStore, places: Path) -> None:
    path = places / "projects" / NAME
    shutil.copy(SAMPLES / "claude-code" / "earlier" / "projects" / NAME, path)
    before = store.info(KEY)
    stamp = store.admin.stamps()[KEY]
    assert before.count == 20
    shutil.copy(SAMPLES / "claude-code" / "projects" / NAME, path)
    assert store.admin.stamps()[KEY] != stamp
    after = store.info(KEY)
    assert (after.count, after.uid) == (28, before.uid)


def test_deleted_file_is_not_a_session(store: TranscriptStore, places: Path) -> None:
    assert KEY in store.list_sessions()
    (places / "projects" / NAME).unlink()
    assert KEY not in store.list_sessions()
    with pytest.raises(NoSuchSession):
        store.info(KEY)


def test_unreadable_place_does_not_hide_the_others(tmp_path: Path) -> None:
    (tmp_path / "opencode.db").write_bytes(b"SQLite format 3\x00" + b"x" * 200)
    claude_code = (ClaudeCode(), SAMPLES / "claude-code" / "projects")
    with TranscriptStore([(OpenCode(), tmp_path), claude_code]) as opened:
        assert len(opened.list_sessions()) == 6


@pytest.mark.quick(5)
@pytest.mark.parametrize(
    ("program", "sample", "name"),
    [
        ("claude-code", "claude-code/projects", "0.jsonl"),
        ("codex", "codex", "rollout-2025-01-01T00-00-00-{}.jsonl"),
        ("gemini-cli", "gemini-cli", "session-0.json"),
        ("open-webui", "open-webui", "0.json"),
    ],
)
@pytest.mark.parametrize("kind", ["link to nothing", "pipe", "folder"])
def test_file_that_cannot_be_read_hides_no_other(
    program: str, sample: str, name: str, kind: str, tmp_path: Path
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(SAMPLES / sample, folder)
    with TranscriptStore([(PROGRAMS[program](), folder)]) as store:
        expected = store.list_sessions()
    assert expected
    # Open WebUI's exports are not searched in subfolders.
    added = folder if program == "open-webui" else folder / "0"
    added.mkdir(exist_ok=True)
    file = added / name.format("00000000-0000-0000-0000-000000000000")
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    else:
        file.symlink_to("nothing")
    assert detect_program(folder) == program
    with TranscriptStore([(PROGRAMS[program](), folder)]) as store:
        assert store.list_sessions() == expected
        assert len(list(store.heads(expected))) == len(expected)


# --- several places ---------------------------------------------------------------------------


def filled(*keys: str) -> InMemoryStore:
    store = InMemoryStore()
    for key in keys:
        store.add_message(key, "user", f"hello from {key}")
    return store


def test_keys_have_the_prefix_of_their_place() -> None:
    first, second = filled("cli:a", "cli:b"), filled("cli:a")
    second.fork("cli:a", "cli:c")
    first.set_meta("cli:b", transcript={"forked_from": "cli:a", "program": "codex"})
    places = [StorePlace(store=first, prefix="one/"), StorePlace(store=second, prefix="two/")]
    with CombinedStore(places) as store:
        assert store.list_sessions() == ["one/cli:a", "one/cli:b", "two/cli:a", "two/cli:c"]
        assert store.list_sessions(prefix="two/", limit=1) == ["two/cli:a"]
        assert store.list_sessions(after="one/cli:b") == ["two/cli:a", "two/cli:c"]
        info = store.info("two/cli:c")
        assert (info.key, info.forked_from) == ("two/cli:c", "two/cli:a")
        assert store.view("one/cli:b").key == "one/cli:b"
        facts = {"forked_from": "one/cli:a", "program": "codex"}
        assert store.info("one/cli:b").meta["transcript"] == facts
        assert [one.content for one in store.get_history("one/cli:b")] == ["hello from cli:b"]
        with second.lease("cli:a", ttl=10):
            assert store.admin.leased(["one/cli:a", "two/cli:a"]) == {"two/cli:a"}
        with pytest.raises(NoSuchSession):
            store.info("three/cli:a")


def test_writing_is_refused() -> None:
    with CombinedStore([StorePlace(store=filled("a"))]) as store:
        for write in (
            store.add_message,
            store.delete,
            store.set_meta,
            store.lease,
            store.admin.purge,
        ):
            with pytest.raises(ReadOnly):
                write("a")
        with pytest.raises(ReadOnly):
            store.admin.update_marker("aliases")


class _FailingStore(InMemoryStore):
    fails = False

    @property
    def admin(self) -> InMemoryAdmin:
        if self.fails:
            raise StoreUnavailable("not now")
        return super().admin


def test_place_that_cannot_be_read_keeps_its_sessions_until_it_is_gone() -> None:
    failing = _FailingStore()
    failing.add_message("a", "user", "hello")
    exists = True
    place = StorePlace(store=failing, prefix="one/", exists=lambda: exists)
    with CombinedStore([place, StorePlace(store=filled("b"), prefix="two/")]) as store:
        assert store.list_sessions() == ["one/a", "two/b"]
        failing.fails = True
        assert store.list_sessions() == ["one/a", "two/b"]
        assert store.admin.leased(["one/a", "two/b"]) == set()
        exists = False
        assert store.list_sessions() == ["two/b"]


def test_copy_that_continues_while_it_is_shown_replaces_its_transcript(
    store: TranscriptStore,
) -> None:
    copies = filled()
    body = {"role": "user", "content": "hello", "stenolog": {"id": "1"}}
    copies.add_full_message(KEY, body)
    copies.set_meta(KEY, transcript={"program": "claude-code"})
    places = [StorePlace(store=store), StorePlace(store=copies, prefix="work/")]
    with CombinedStore(places) as combined:
        keys = combined.list_sessions()
        assert (KEY in keys, f"work/{KEY}" in keys) == (True, False)
        copies.add_message(KEY, "user", "more")
        keys = combined.list_sessions()
        assert (KEY in keys, f"work/{KEY}" in keys) == (False, True)
        copies.delete(KEY)
        keys = combined.list_sessions()
        assert (KEY in keys, f"work/{KEY}" in keys) == (True, False)
