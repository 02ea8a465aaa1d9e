"""Codex's transcripts, message by message, and back to the records they came from."""

import json
from pathlib import Path

import pytest

from stenolog.catalog.message_metadata import is_copied
from stenolog.transfer.transcripts.codex import Codex
from stenolog.transfer.transcripts.transcript import Transcript, TranscriptFile
from support.transcripts import SAMPLES, outline, rebuild_records

ROLLOUTS = SAMPLES / "codex"
FILES = sorted(path for path in ROLLOUTS.rglob("rollout-*.jsonl"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem[-12:])
def test_each_record_can_be_rebuilt_from_its_message(path: Path) -> None:
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    # The oldest files have no envelope.
    records += [{"type": "response_item", "payload": record} for record in records]
    rebuilt = rebuild_records(Codex(), path, include_copies=False)
    assert rebuilt
    assert all(record in records for record in rebuilt)


def test_transcript_with_calls_reasoning_and_a_patch_is_read() -> None:
    (path,) = ROLLOUTS.rglob("*7030*.jsonl")
    (file,) = Codex().find(path)
    transcript = Codex().read(file)
    assert transcript.title == "Count the lighthouses"
    assert outline(transcript) == [
        "+ system injected text text",
        "+ user injected <environment_context> <cwd>/",
        "+ user Count the lighthouses",
        "+ assistant thinking",
        "+ assistant I'll look at the list first.",
        "+ assistant exec_command() [60]",
        "+ tool Chunk ID: 94c8f2 Wall time:",
        "+ assistant exec_command()",
        "+ assistant exec_command() [60]",
        "+ tool Chunk ID: 0021ad Wall time:",
        "+ tool Chunk ID: 5a1a7d Wall time: failed",
        "+ assistant There are **3** lighthouses. [60]",
        "+ user and write it down",
        "+ assistant apply_patch() [60]",
        "+ tool Exit code: 0 Wall time: 0 se",
        "+ assistant count.md has the number. [60]",
    ]


def test_a_reverted_and_compacted_thread_of_two_files_is_one_session() -> None:
    reader = Codex()
    (file,) = (one for one in reader.find(ROLLOUTS / "sessions") if "f8fe" in one.key)
    assert len(file.paths) == 2
    transcript = reader.read(file)
    assert transcript.title == "Coast talk"
    assert transcript.summary == "The user counted lighthouses: 3. count.md was written."
    assert outline(transcript)[5:] == [
        "+ user Wait for the tide",
        "- assistant I wait.",
        "- assistant exec_command() [60]",
        "- tool Wall time: 3.9 seconds abort failed",
        "- system interruption <turn_aborted> The previous",
        "- user This is the first wording",
        "- assistant Answer to the first wording. [60]",
        "+ user This is the second wording",
        "- assistant Answer to the second wording [60]",
        "- assistant summary The user counted lighthouses [60]",
        "+ user Where do they stand, again",
        "+ assistant On the coast. [60]",
    ]


@pytest.mark.parametrize(
    ("kept_texts", "rolled_back_turns", "expected"),
    [
        # Of two messages with the same text, the newer one stays visible.
        (["Count the lighthouses", "go on"], 0, [0, 4]),
        (["Count the lighthouses", "go on", "go on"], 0, [0, 2, 4]),
        (["Count the lighthouses", "go on"], 1, [0, 2]),
    ],
)
def test_messages_without_ids_that_a_summary_kept_stay_visible(
    tmp_path: Path, kept_texts: list[str], rolled_back_turns: int, expected: list[int]
) -> None:
    def message(role: str, text: str) -> dict[str, object]:
        kind = "output_text" if role == "assistant" else "input_text"
        return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}

    prompts = ["Count the lighthouses", "go on", "go on"]
    items = [item for text in prompts for item in (message("user", text), message("assistant", ""))]
    kept = [message("user", text) for text in (*kept_texts, "The summary")]
    records: list[tuple[str, object]] = [("response_item", item) for item in items]
    rollback = {"type": "thread_rolled_back", "num_turns": rolled_back_turns}
    records.append(("event_msg", rollback))
    records.append(("compacted", {"message": "The summary", "replacement_history": kept}))
    path = tmp_path / "rollout-2026-11-16T12-30-00-01a1e437-7030-7230-8002-8dfe870f6794.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for number, (kind, payload) in enumerate(records):
            record = {"timestamp": f"2026-11-16T12:30:{number:02}Z", "type": kind}
            file.write(json.dumps({**record, "payload": payload}) + "\n")
    (transcript,) = map(_read, Codex().find(path))
    visible = [number for number, message in enumerate(transcript.messages) if not message.hidden]
    assert visible == expected


def test_a_fork_refers_to_its_parent() -> None:
    reader = Codex()
    (file,) = (one for one in reader.find(ROLLOUTS / "sessions") if "98be" in one.key)
    fork = reader.read(file)
    assert fork.facts["forked_from"] == "codex:01a1e437-7030-7230-8002-8dfe870f6794"
    assert outline(fork)[16:] == [
        "+ user and now, in the fork?",
        "+ assistant In the fork: 3 lighthouses. [60]",
    ]
    assert [is_copied(message.body) for message in fork.messages] == [True] * 16 + [False] * 2


def test_a_subagent_is_linked_to_its_parent() -> None:
    (transcript,) = (
        one for one in map(_read, Codex().find(ROLLOUTS / "sessions")) if "c1b6" in one.key
    )
    assert transcript.facts["parent"]["key"] == "codex:01a1e437-c149-7580-a29a-003dd9970142"
    assert transcript.title == "SCOUT-JOB: read lighthouses.txt"


def test_layouts_of_older_versions_are_read() -> None:
    (legacy,) = map(_read, Codex().find(ROLLOUTS / "legacy"))
    assert legacy.title == "Name the islands"
    assert [line for line in outline(legacy) if "[60]" in line] == [
        "+ assistant shell_command() [60]",
        "+ assistant Three islands with lights. 🏝 [60]",
        "+ assistant apply_patch() [60]",
        "+ assistant islands.md is there. [60]",
    ]
    (oldest,) = map(_read, Codex().find(ROLLOUTS / "oldest"))
    assert outline(oldest) == ["+ user Which of them is the hardest", "+ assistant Granit."]


def test_a_compressed_file_is_the_same_session() -> None:
    pytest.importorskip("zstandard")
    (packed,) = map(_read, Codex().find(ROLLOUTS / "compressed"))
    (plain,) = (one for one in map(_read, Codex().find(ROLLOUTS / "sessions")) if "ad28" in one.key)
    assert packed.key == plain.key
    assert outline(packed) == outline(plain)


def test_damaged_compressed_file_is_reported(tmp_path: Path) -> None:
    pytest.importorskip("zstandard")
    (packed,) = (ROLLOUTS / "compressed").rglob("*.zst")
    content = bytearray(packed.read_bytes())
    content[20:24] = b"zzzz"
    (tmp_path / packed.name).write_bytes(content)
    with pytest.raises(OSError, match="the compressed file is damaged"):
        list(map(_read, Codex().find(tmp_path)))


def _read(file: TranscriptFile) -> Transcript:
    return Codex().read(file)
