"""Import of transcripts: complete, once, and again after the file has grown."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stenolog.stores.base import Store
from stenolog.stores.open_store import open_store
from stenolog.transfer.transcripts import transcript_import
from stenolog.transfer.transcripts.claude_code import ClaudeCode
from stenolog.transfer.transcripts.codex import Codex
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
    monkeypatch.setattr(transcript_import, "MAX_BATCH", batch)
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


def test_forked_messages_are_stored_once(store: Store) -> None:
    run(ClaudeCode(), SAMPLES / "claude-code" / "projects", store)
    fork = store.info("claude-code:9e1eb1be-32e7-4220-a0bf-a63df7f38f75")
    assert fork.meta["transcript"]["forked_from"] == KEY
    assert len(bodies(store, fork.key)) == 2


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


def test_codex_threads_are_imported(store: Store) -> None:
    reports = run(Codex(), SAMPLES / "codex" / "sessions", store)
    assert sum(report.added for report in reports) == 52
    info = store.info("codex:01a1e437-f8fe-7d63-b58e-5b07d6b939fb")
    assert info.summary == "The user counted lighthouses: 3. count.md was written."
    assert len(bodies(store, info.key, full=False)) == 4
