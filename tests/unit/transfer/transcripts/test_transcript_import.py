"""Import of transcripts: complete, once, and again after the file has grown."""

import json
import os
import re
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from stenolog.catalog.indexing import read_state
from stenolog.catalog.message_metadata import is_copied
from stenolog.stores.base import Store
from stenolog.stores.json_file import NotASession
from stenolog.stores.open_store import open_store
from stenolog.transfer.transcripts import transcript_import
from stenolog.transfer.transcripts.chat_exports import ClaudeAI
from stenolog.transfer.transcripts.claude_code import ClaudeCode
from stenolog.transfer.transcripts.codex import Codex
from stenolog.transfer.transcripts.gemini_cli import GeminiCLI
from stenolog.transfer.transcripts.opencode import OpenCode
from stenolog.transfer.transcripts.programs import PROGRAMS
from stenolog.transfer.transcripts.transcript import TranscriptReader
from stenolog.transfer.transcripts.transcript_import import TranscriptReport, import_transcript
from support.transcripts import SAMPLES

NAME = "-home-ada-harbour/20c7a18b-7d9d-457e-bc34-7dfb461f0515.jsonl"
KEY = "claude-code:20c7a18b-7d9d-457e-bc34-7dfb461f0515"


@pytest.fixture(params=["jsonl", "sqlite"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    place = tmp_path / "store"
    with open_store(place if request.param == "jsonl" else f"sqlite:{place}.db") as opened:
        yield opened


def run(reader: TranscriptReader, path: Path, store: Store) -> list[TranscriptReport]:
    return [import_transcript(reader, file, store) for file in reader.find(path)]


def bodies(store: Store, key: str, *, full: bool = True) -> list[dict[str, Any]]:
    return [message.to_dict() for message in store.get_history(key, full=full)]


def test_messages_hidden_ones_summary_title_and_facts_are_stored(store: Store) -> None:
    run(ClaudeCode(), SAMPLES / "claude-code" / "projects", store)
    info = store.info(KEY)
    assert info.meta["title"] == "Add a tide table to the harbour page"
    assert info.meta["transcript"]["folders"] == ["/home/ada/harbour"]
    assert info.summary.startswith("1. Primary Request")
    assert len(bodies(store, KEY)) == 28
    assert [body["content"][:25] for body in bodies(store, KEY, full=False)] == [
        "`nosuchfile.txt` does not",
        "<local-command-caveat>The",
        "<command-name>/compact</c",
        "<local-command-stdout>Com",
        "[file: /home/ada/harbour/",
        "What did we do so far?",
        "We added a tide table to ",
    ]
    assert store.get_history(KEY, full=True)[0].at.isoformat() == "2026-11-16T11:50:00.737000+00:00"


def test_a_second_import_reads_no_file(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    path = SAMPLES / "claude-code" / "projects"
    run(ClaudeCode(), path, store)
    before = {key: bodies(store, key) for key in store.list_sessions()}
    monkeypatch.setattr(ClaudeCode, "read", None)
    assert all(report.is_unchanged for report in run(ClaudeCode(), path, store))
    assert {key: bodies(store, key) for key in store.list_sessions()} == before


def test_a_file_that_has_grown_adds_only_what_is_new(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "projects" / NAME
    path.parent.mkdir(parents=True)
    shutil.copy(SAMPLES / "claude-code" / "earlier" / "projects" / NAME, path)
    (first,) = run(ClaudeCode(), path, store)
    assert (first.added, first.messages) == (20, 20)
    shutil.copy(SAMPLES / "claude-code" / "projects" / NAME, path)
    (second,) = run(ClaudeCode(), path, store)
    assert (second.added, second.messages) == (8, 28)
    run(ClaudeCode(), SAMPLES / "claude-code" / "projects" / NAME, store)
    with open_store(tmp_path / "fresh") as fresh:
        run(ClaudeCode(), SAMPLES / "claude-code" / "projects" / NAME, fresh)
        assert bodies(store, KEY) == bodies(fresh, KEY)
        assert bodies(store, KEY, full=False) == bodies(fresh, KEY, full=False)


@pytest.mark.quick(1)
def test_usage_of_a_file_read_in_the_middle_of_an_answer_counts_once(
    store: Store, tmp_path: Path
) -> None:
    lines = (SAMPLES / "claude-code" / "projects" / NAME).read_bytes().splitlines(keepends=True)
    path = tmp_path / "session.jsonl"
    for end in range(1, len(lines) + 1):
        path.write_bytes(b"".join(lines[:end]))
        run(ClaudeCode(), path, store)
    notes = [body["stenolog"] for body in bodies(store, "claude-code:session")]
    assert sum(one["usage"]["answer"] for one in notes if "usage" in one) == 554
    assert len(notes) == 28


@pytest.mark.parametrize("batch", [1, 3])
def test_an_import_that_was_killed_is_continued(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    path = tmp_path / "projects" / NAME
    path.parent.mkdir(parents=True)
    shutil.copy(SAMPLES / "claude-code" / "earlier" / "projects" / NAME, path)
    run(ClaudeCode(), path, store)
    shutil.copy(SAMPLES / "claude-code" / "projects" / NAME, path)
    monkeypatch.setattr(transcript_import, "MAX_BATCH_MESSAGES", batch)
    add_messages = type(store).add_messages
    calls = 0

    def killed_later(*args: Any, **options: Any) -> list[int]:
        nonlocal calls
        calls += 1
        if calls % 3 == 0:
            raise KeyboardInterrupt
        return add_messages(*args, **options)

    monkeypatch.setattr(type(store), "add_messages", killed_later)
    runs = 0
    while True:
        runs += 1
        try:
            run(ClaudeCode(), path, store)
            break
        except KeyboardInterrupt:
            continue
    assert runs > 1
    identities = [body["stenolog"]["id"] for body in bodies(store, KEY)]
    assert len(identities) == len(set(identities)) == 28
    assert len(bodies(store, KEY, full=False)) == 7


@pytest.mark.parametrize(
    ("reader", "place", "fork", "source", "texts"),
    [
        (
            ClaudeCode,
            "claude-code/projects",
            "claude-code:9e1eb1be-32e7-4220-a0bf-a63df7f38f75",
            KEY,
            ["We added a tide table to ", "What did we do, in the fo", "We added a tide table to "],
        ),
        (
            Codex,
            "codex/sessions",
            "codex:01a1e437-98be-7321-aa57-4921f92b0243",
            "codex:01a1e437-7030-7230-8002-8dfe870f6794",
            ["count.md has the number.", "and now, in the fork?", "In the fork: 3 lighthouse"],
        ),
    ],
    ids=["claude-code", "codex"],
)
def test_a_fork_has_the_copied_messages_and_counts_their_usage_once(
    store: Store,
    reader: Callable[[], TranscriptReader],
    place: str,
    fork: str,
    source: str,
    texts: list[str],
) -> None:
    run(reader(), SAMPLES / place, store)
    assert store.info(fork).meta["transcript"]["forked_from"] == source
    shown = bodies(store, fork, full=False)
    assert [body["content"][:25] for body in shown[-3:]] == texts
    copied = [body for body in bodies(store, fork) if is_copied(body)]
    assert copied
    assert not any("usage" in body["stenolog"] for body in copied)


def test_copied_messages_are_not_added_behind_a_fork(store: Store, tmp_path: Path) -> None:
    for path in (SAMPLES / "codex" / "sessions").rglob("*98be*.jsonl"):
        shutil.copy(path, tmp_path)
    (fork,) = run(Codex(), tmp_path, store)
    assert fork.added == 2
    for path in (SAMPLES / "codex" / "sessions").rglob("*7030*.jsonl"):
        shutil.copy(path, tmp_path)
    path = next(tmp_path.glob("*98be*"))
    path.write_text(path.read_text() + "\n")
    run(Codex(), tmp_path, store)
    assert len(bodies(store, fork.key)) == 2


def test_a_fork_without_messages_of_its_own_is_no_session(store: Store, tmp_path: Path) -> None:
    path = SAMPLES / "claude-code" / "projects" / NAME
    shutil.copy(path, tmp_path / "a.jsonl")
    shutil.copy(path, tmp_path / "b.jsonl")
    run(ClaudeCode(), tmp_path, store)
    assert store.list_sessions() == ["claude-code:a"]


def test_a_title_that_the_user_gave_here_stays(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "session.jsonl"
    shutil.copy(SAMPLES / "claude-code" / "earlier" / "projects" / NAME, path)
    run(ClaudeCode(), path, store)
    store.set_meta("claude-code:session", title="Mine")
    shutil.copy(SAMPLES / "claude-code" / "projects" / NAME, path)
    run(ClaudeCode(), path, store)
    assert store.info("claude-code:session").meta["title"] == "Mine"


def test_a_session_that_continued_here_gets_new_messages_and_hides_none(
    store: Store, tmp_path: Path
) -> None:
    path = tmp_path / "session.jsonl"
    shutil.copy(SAMPLES / "claude-code" / "earlier" / "projects" / NAME, path)
    run(ClaudeCode(), path, store)
    store.add_message("claude-code:session", "user", "continued in stenolog")
    shutil.copy(SAMPLES / "claude-code" / "projects" / NAME, path)
    run(ClaudeCode(), path, store)
    shown = bodies(store, "claude-code:session", full=False)
    assert shown[0]["content"] == "Add a tide table to the harbour page"
    assert "continued in stenolog" in [body["content"] for body in shown]
    assert len(shown) == 29


# --- messages that a program changed -------------------------------------------------------------


def edited(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


def test_a_changed_message_replaces_its_older_version(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "conversations.json"
    shutil.copy(SAMPLES / "claude-ai-export" / "conversations.json", path)
    run(ClaudeAI(), path, store)
    key = "claude-ai:7c000000-0000-4000-8000-00000000000a"
    before = bodies(store, key)
    edited(path, "A double sheet bend.", "A triple sheet bend.")
    report, _ = run(ClaudeAI(), path, store)
    assert (report.added, report.changed) == (0, 1)
    assert bodies(store, key)[: len(before)] == before
    shown = [body["content"] for body in bodies(store, key, full=False)]
    assert "A double sheet bend." not in shown
    assert shown[-1] == "A triple sheet bend."
    edited(path, "A triple sheet bend.", "A double sheet bend.")
    report, _ = run(ClaudeAI(), path, store)
    assert (report.added, report.changed) == (0, 1)
    shown = [body["content"] for body in bodies(store, key, full=False)]
    assert [text for text in shown if "sheet bend" in str(text)] == ["A double sheet bend."]


def test_messages_without_an_id_are_imported_once(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "conversations.json"
    chats = json.loads((SAMPLES / "claude-ai-export" / "conversations.json").read_bytes())
    for message in chats[0]["chat_messages"][:2]:
        del message["uuid"]
    *_, last = chats[0]["chat_messages"]
    for added in range(3):
        path.write_text(json.dumps(chats), encoding="utf-8")
        report, _ = run(ClaudeAI(), path, store)
        if added:
            assert (report.added, report.changed) == (1, 0)
        chats[0]["chat_messages"].append({**last, "uuid": f"new {added}"})


def test_an_import_that_was_killed_before_it_hid_an_older_version(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "conversations.json"
    shutil.copy(SAMPLES / "claude-ai-export" / "conversations.json", path)
    run(ClaudeAI(), path, store)
    edited(path, "A double sheet bend.", "A triple sheet bend.")

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(type(store.admin), "hide", killed)
        with pytest.raises(KeyboardInterrupt):
            run(ClaudeAI(), path, store)
    run(ClaudeAI(), path, store)
    key = "claude-ai:7c000000-0000-4000-8000-00000000000a"
    shown = [body["content"] for body in bodies(store, key, full=False)]
    assert [text for text in shown if "sheet bend" in str(text)] == ["A triple sheet bend."]


def test_a_call_of_gemini_that_was_imported_early_is_completed(
    store: Store, tmp_path: Path
) -> None:
    (sample,) = (SAMPLES / "gemini-cli").rglob("session-*.jsonl")
    lines = sample.read_bytes().splitlines(keepends=True)
    path = tmp_path / sample.name
    for end in range(1, len(lines) + 1):
        path.write_bytes(b"".join(lines[:end]))
        run(GeminiCLI(), path, store)
    key = "gemini-cli:bc11d78f-298e-484c-9c84-3ae9fd87ba3f"
    with open_store(tmp_path / "fresh") as fresh:
        run(GeminiCLI(), path, fresh)
        expected = bodies(fresh, key, full=False)
    found = bodies(store, key, full=False)

    def contents(listed: list[dict[str, Any]]) -> list[str]:
        return sorted(transcript_import.content_digest(body) for body in listed)

    assert contents(found) == contents(expected)
    tokens = [
        body["stenolog"]["usage"]["answer"]
        for body in bodies(store, key)
        if "usage" in body["stenolog"]
    ]
    assert sum(tokens) == sum(
        b["stenolog"]["usage"]["answer"] for b in expected if "usage" in b["stenolog"]
    )


def migrated(line: str, number: int) -> list[dict[str, Any]]:
    """Return what `codex migrate-rollouts` makes of a line of a legacy file."""
    record = json.loads(line)
    payload = record["payload"]
    if payload.get("type") == "ghost_snapshot":
        return []
    if record["type"] == "session_meta":
        record["payload"] = {**payload, "history_mode": "paginated", "session_id": payload["id"]}
    twins = {"user_message": "UserMessage", "agent_message": "AgentMessage"}
    if record["type"] == "event_msg" and payload["type"] in twins:
        item = {"type": twins[payload["type"]], "id": f"item-{number}"}
        record["payload"] = {"type": "item_completed", "item": item}
    return [{"timestamp": record["timestamp"], "ordinal": number, **record}]


def test_a_codex_file_that_was_migrated_adds_nothing(store: Store, tmp_path: Path) -> None:
    (sample,) = (SAMPLES / "codex" / "legacy").rglob("rollout-*.jsonl")
    path = tmp_path / sample.name
    shutil.copy(sample, path)
    (first,) = run(Codex(), path, store)
    before = bodies(store, first.key), bodies(store, first.key, full=False)
    lines = sample.read_text(encoding="utf-8").splitlines()
    records = [one for number, line in enumerate(lines) for one in migrated(line, number)]
    path.write_text("".join(json.dumps(one) + "\n" for one in records), encoding="utf-8")
    (second,) = run(Codex(), path, store)
    assert (second.added, second.changed, second.messages) == (0, 0, first.messages)
    assert (bodies(store, first.key), bodies(store, first.key, full=False)) == before


def test_a_codex_file_that_was_compressed_or_archived_adds_nothing(
    store: Store, tmp_path: Path
) -> None:
    (sample,) = (SAMPLES / "codex" / "sessions").rglob("*ad28*.jsonl")
    folder = tmp_path / "codex" / "sessions"
    folder.mkdir(parents=True)
    shutil.copy(sample, folder)
    (first,) = run(Codex(), tmp_path / "codex", store)
    before = bodies(store, first.key)
    (folder / sample.name).unlink()
    archived = tmp_path / "codex" / "archived_sessions"
    archived.mkdir()
    (packed,) = (SAMPLES / "codex" / "compressed").rglob("*.zst")
    shutil.copy(packed, archived)
    (second,) = run(Codex(), tmp_path / "codex", store)
    assert (second.added, second.changed, second.messages) == (0, 0, first.messages)
    assert bodies(store, first.key) == before


def test_a_reverted_thread_of_codex_hides_what_was_reverted(store: Store, tmp_path: Path) -> None:
    first, second = sorted((SAMPLES / "codex" / "sessions").rglob("*f8fe*.jsonl"))
    first, second = sorted((first, second), key=lambda path: len(path.name))
    shutil.copy(first, tmp_path)
    run(Codex(), tmp_path, store)
    shutil.copy(second, tmp_path)
    (report,) = run(Codex(), tmp_path, store)
    assert report.changed == 0
    with open_store(tmp_path / "fresh") as fresh:
        run(Codex(), tmp_path, fresh)
        assert bodies(store, report.key, full=False) == bodies(fresh, report.key, full=False)
        assert len(bodies(store, report.key)) == len(bodies(fresh, report.key))


def test_new_rows_in_the_log_of_a_database_are_imported(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "opencode.db"
    shutil.copy(SAMPLES / "opencode" / "opencode.db", path)
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA journal_mode=wal")
    run(OpenCode(), path, store)
    size = path.stat().st_size
    connection.execute("UPDATE part SET data=replace(data, 'There are 2 gates.', 'Two gates.')")
    connection.commit()
    assert path.stat().st_size == size
    reports = run(OpenCode(), path, store)
    connection.close()
    assert sum(report.changed for report in reports) == 1
    assert sum(report.added for report in reports) == 0


def test_two_imports_at_the_same_time_store_each_message_once(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = (SAMPLES / "claude-code" / "projects" / NAME).read_bytes().splitlines(keepends=True)
    path = tmp_path / "session.jsonl"
    path.write_bytes(b"".join(lines[:10]))
    run(ClaudeCode(), path, store)
    both_have_read = threading.Barrier(2)
    append = transcript_import._StoredMessages.append

    def append_after_both_have_read(*args: Any) -> int:
        # While one import holds the lease, the other cannot read: nobody comes.
        with suppress(threading.BrokenBarrierError):
            both_have_read.wait(timeout=0.5)
        return append(*args)

    monkeypatch.setattr(transcript_import._StoredMessages, "append", append_after_both_have_read)

    def grow(end: int) -> None:
        # Each process has seen the file at another moment.
        copy = tmp_path / str(end) / "session.jsonl"
        copy.parent.mkdir()
        copy.write_bytes(b"".join(lines[:end]))
        run(ClaudeCode(), copy, store)

    threads = [threading.Thread(target=grow, args=(end,)) for end in (len(lines), 60)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    identities = [body["stenolog"]["id"] for body in bodies(store, "claude-code:session")]
    assert len(identities) == len(set(identities)) == 28


# --- many transcripts ----------------------------------------------------------------------------


def copies(folder: Path, count: int) -> None:
    """Write this many sessions with ids of their own."""
    text = (SAMPLES / "claude-code" / "projects" / NAME).read_bytes()
    folder.mkdir()
    for number in range(count):
        ids = re.sub(rb"([0-9a-f]{8})-[0-9a-f]{4}-4", rb"\1-%04x-4" % number, text)
        (folder / f"session-{number}.jsonl").write_bytes(ids)


def test_new_sessions_are_stored_in_batches_with_few_syncs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies(tmp_path / "project", 70)
    syncs = 0

    def counted(sync: Callable[..., None]) -> Callable[..., None]:
        def call(descriptor: Any) -> None:
            nonlocal syncs
            syncs += 1
            sync(descriptor)

        return call

    with open_store(tmp_path / "store") as store:
        monkeypatch.setattr(os, "fsync", counted(os.fsync))
        monkeypatch.setattr(os, "fdatasync", counted(os.fdatasync))
        reader = ClaudeCode()
        importer = transcript_import.TranscriptImport(reader, store)
        for file in reader.find(tmp_path / "project"):
            importer.add(file)
        importer.flush()
        assert [report.added for report in importer.reports] == [28] * 70
        # One for each session, and a few for the folder.
        assert syncs < 70 + 20
        again = transcript_import.TranscriptImport(reader, store)
        monkeypatch.setattr(ClaudeCode, "read", None)
        for file in reader.find(tmp_path / "project"):
            again.add(file)
        again.flush()
        assert all(report.is_unchanged for report in again.reports)
        assert len(again.reports) == 70


def test_two_files_of_one_session_in_a_batch(store: Store, tmp_path: Path) -> None:
    for folder, name in (("a", "earlier/projects"), ("b", "projects")):
        (tmp_path / folder).mkdir()
        shutil.copy(SAMPLES / "claude-code" / name / NAME, tmp_path / folder)
    reader = ClaudeCode()
    importer = transcript_import.TranscriptImport(reader, store)
    for file in reader.find(tmp_path):
        importer.add(file)
    importer.flush()
    assert [report.added for report in importer.reports] == [20, 8]
    assert len(bodies(store, KEY)) == 28


def test_another_process_imports_a_session_of_the_batch(store: Store, tmp_path: Path) -> None:
    copies(tmp_path / "project", 3)
    reader = ClaudeCode()
    importer = transcript_import.TranscriptImport(reader, store)
    files = list(reader.find(tmp_path / "project"))
    for file in files:
        importer.add(file)
    import_transcript(ClaudeCode(), files[1], store)
    importer.flush()
    assert [report.added for report in importer.reports] == [28, 0, 28]
    assert all(len(bodies(store, key)) == 28 for key in store.list_sessions())


def test_half_an_emoji_in_arguments_is_imported(store: Store, tmp_path: Path) -> None:
    call = {"type": "tool_use", "id": "t", "name": "Bash", "input": {"command": "echo \ud83d"}}
    record = {
        "type": "assistant",
        "uuid": "u",
        "parentUuid": None,
        "sessionId": "s",
        "timestamp": "2026-01-01T00:00:00Z",
        "message": {"id": "m", "role": "assistant", "model": "x", "content": [call]},
    }
    path = tmp_path / "11111111-1111-4111-8111-111111111111.jsonl"
    path.write_text(json.dumps(record) + "\n")
    (report,) = run(ClaudeCode(), path, store)
    (body,) = bodies(store, report.key)
    arguments = body["tool_calls"][0]["function"]["arguments"]
    assert json.loads(arguments) == call["input"]


def test_a_file_of_an_unknown_shape_is_rejected_with_the_reason(tmp_path: Path) -> None:
    message = {"author": {"role": "user"}, "content": {"content_type": "text", "parts": ["hello"]}}
    nodes = {"a": {"id": "a", "parent": ["not", "an", "id"], "message": message | {"id": "a"}}}
    path = tmp_path / "conversations.json"
    path.write_text(json.dumps([{"id": "c", "mapping": nodes, "current_node": "a"}]))
    reader = PROGRAMS["chatgpt"]()
    (file,) = reader.find(path)
    with pytest.raises(NotASession, match="unknown shape"):
        reader.read(file)


def test_a_turn_that_a_compaction_of_codex_hid_is_not_interrupted(
    store: Store, tmp_path: Path
) -> None:
    path = tmp_path / "rollout-2026-11-16T12-30-00-01a1e437-7030-7230-8002-8dfe870f6794.jsonl"

    def message(role: str, text: str) -> dict[str, Any]:
        kind = "output_text" if role == "assistant" else "input_text"
        return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}

    prompt, answer = message("user", "Count the boats"), message("assistant", "Three.")
    kept = {"message": "There are three.", "replacement_history": [prompt]}
    records = [("response_item", prompt), ("response_item", answer), ("compacted", kept)]
    states = []
    for end in (1, 3):
        lines = [
            json.dumps({"timestamp": f"2026-11-16T12:30:0{n}Z", "type": type_, "payload": payload})
            for n, (type_, payload) in enumerate(records[:end])
        ]
        path.write_text("".join(f"{line}\n" for line in lines))
        (report,) = run(Codex(), path, store)
        states.append(read_state(store, store.info(report.key))[0])
    assert [body["content"] for body in bodies(store, report.key, full=False)] == [
        "Count the boats"
    ]
    assert states == ["interrupted", "idle"]
