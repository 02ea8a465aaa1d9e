"""Claude Code's transcripts, message by message, and back to the records they came from."""

import json
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from stenolog.catalog.message_metadata import is_copied
from stenolog.stores.json_file import NotASession
from stenolog.transfer.read_only_stores import TranscriptStore
from stenolog.transfer.transcripts.claude_code import ClaudeCode
from stenolog.transfer.transcripts.program_messages import program_line
from stenolog.transfer.transcripts.programs import detect_program
from stenolog.transfer.transcripts.transcript import Transcript
from support.transcripts import SAMPLES, outline, rebuild_records

CLAUDE_CODE = SAMPLES / "claude-code"
PROJECT = CLAUDE_CODE / "projects" / "-home-ada-harbour"
FILES = sorted(CLAUDE_CODE.rglob("*.jsonl"))


def read(path: Path) -> Transcript:
    reader = ClaudeCode()
    (file,) = reader.find(path)
    return reader.read(file)


@pytest.mark.quick(4)
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem[:12])
def test_each_record_can_be_rebuilt_from_its_messages(path: Path) -> None:
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        with suppress(ValueError):  # the torn last line
            records.append(json.loads(line))
    rebuilt = rebuild_records(ClaudeCode(), path)
    assert all(record in records for record in rebuilt)
    # history.jsonl has only prompts, and the file of ccusage only token counts.
    assert rebuilt or path.name in ("history.jsonl", "chat.jsonl")


def test_transcript_with_parallel_calls_resume_and_compaction_is_read() -> None:
    transcript = read(PROJECT / "20c7a18b-7d9d-457e-bc34-7dfb461f0515.jsonl")
    assert transcript.title == "Add a tide table to the harbour page"
    assert transcript.summary.startswith("1. Primary Request and Intent:")
    assert outline(transcript) == [
        "- user Add a tide table to the harb",
        "- assistant thinking",
        "- assistant I'll look at the page first.",
        "- assistant Read() [107]",
        "- tool 1 # Harbour 2 3 Opening hour",
        "- assistant Two quick checks side by sid",
        "- assistant Bash()",
        "- assistant Bash()",
        "- assistant Grep() [141]",
        "- tool No files found",
        "- tool 1970",
        "- tool boats.txt page.md",
        "- assistant Edit() [87]",
        "- tool The file /home/ada/harbour/p",
        "- assistant The page now has a **tide ta [49]",
        "- user I think the table is wrong,",
        "- assistant thinking",
        "- assistant Bash() [93]",
        "- tool Exit code 3 cat: nosuchfile. failed",
        # The compaction preserved the last answer.
        "+ assistant `nosuchfile.txt` does not ex [42]",
        "- system compaction",
        "- user summary This session is being contin",
        "+ user injected <local-command-caveat>The co",
        "+ user command <command-name>/compact</comm",
        "+ user command <local-command-stdout>Compac",
        "+ user injected [file: /home/ada/harbour/pag",
        "+ user What did we do so far?",
        "+ assistant We added a tide table to pag [35]",
    ]


def _write_user_record(path: Path, *blocks: dict[str, Any]) -> None:
    message = {"role": "user", "content": list(blocks)}
    record = {"type": "user", "uuid": "u1", "parentUuid": None, "sessionId": "s"}
    path.write_text(json.dumps({**record, "message": message}) + "\n")


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def test_texts_of_the_program_before_a_prompt_are_messages_of_their_own(tmp_path: Path) -> None:
    opened, reminder = "<ide_opened_file>a.md</ide_opened_file>", "<system-reminder>b</x>"
    path = tmp_path / "s.jsonl"
    _write_user_record(path, _text(opened), _text(reminder), _text("Count"), _text("boats"))
    transcript = read(path)
    assert outline(transcript) == ["+ user injected text text", "+ user text text"]
    assert program_line(transcript.messages[0].body) == "File open in the editor, Reminder"
    assert transcript.title == "Count boats"
    [record] = rebuild_records(ClaudeCode(), path)
    assert record == json.loads(path.read_text())
    [head] = TranscriptStore([(ClaudeCode(), tmp_path)]).heads(["claude-code:s"])
    assert head.prompt == "Count\n\nboats"


def test_session_without_a_prompt_is_named_after_its_command(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    _write_user_record(
        path,
        _text("<local-command-caveat>Not sent.</local-command-caveat>"),
        _text("<command-name>/model</command-name><command-args>opus</command-args>"),
    )
    assert read(path).title == "/model opus"


def test_tool_result_beside_an_interruption_stays_a_tool_result(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    result = {"type": "tool_result", "tool_use_id": "1", "content": "aborted"}
    _write_user_record(path, result, _text("[Request interrupted by user for tool use]"))
    assert outline(read(path)) == ["+ tool aborted", "+ user interruption text"]


def test_usage_counts_once_per_response() -> None:
    transcript = read(PROJECT / "20c7a18b-7d9d-457e-bc34-7dfb461f0515.jsonl")
    notes = [one.body["stenolog"] for one in transcript.messages]
    assert sum(one["usage"]["answer"] for one in notes if "usage" in one) == 554
    assert transcript.facts["reported_cost"] == pytest.approx(0.048672)


def test_a_prompt_typed_during_a_turn_is_a_user_message_and_a_rewound_one_is_hidden() -> None:
    transcript = read(PROJECT / "6faa0341-9272-4be7-9ccd-3b246d219330.jsonl")
    assert transcript.title == "Tides of Sunday"
    lines = outline(transcript)
    assert "+ user And mind the tides of Sunday" in lines
    assert lines[-4:] == [
        "- user This prompt will be edited",
        "- assistant Fine, as you say. [31]",
        "+ user This prompt was edited",
        "+ assistant Fine, the other way then. [33]",
    ]


def test_a_subagent_is_linked_to_the_call_that_started_it() -> None:
    keys = {file.key: file for file in ClaudeCode().find(PROJECT)}
    session = "claude-code:cbdd2046-99ed-4655-8da0-7133a40fa66b"
    transcript = ClaudeCode().read(keys[f"{session}:a7371e2533c617445"])
    assert transcript.title == "Count the boats"
    assert transcript.facts["parent"]["key"] == session
    assert outline(transcript) == [
        "+ user HELPER-JOB: count the boats",
        "+ assistant Bash() [62]",
        "+ tool 3",
        "+ assistant There are 3 boats. [31]",
    ]
    parent = ClaudeCode().read(keys[session])
    calls = [c["id"] for one in parent.messages for c in one.body.get("tool_calls", ())]
    assert transcript.facts["parent"]["tool_call_id"] in calls


@pytest.mark.parametrize("names", ["ab", "ba"])
def test_copied_record_without_a_time_stays_in_the_older_session(
    tmp_path: Path, names: str
) -> None:
    def record(number: int, text: str, time: str | None = None) -> str:
        uuids = [f"{n:08}-0000-4000-8000-000000000000" if n else None for n in (number - 1, number)]
        message = {"role": "user", "content": text}
        fields = {"parentUuid": uuids[0], "type": "user", "message": message, "uuid": uuids[1]}
        return json.dumps(fields | ({"timestamp": time} if time else {}), separators=(",", ":"))

    older, fork = (tmp_path / f"{name}.jsonl" for name in names)
    copied = record(1, "first")
    older.write_text(f"{copied}\n{record(2, 'second', '2026-01-01T10:00:00Z')}\n")
    fork.write_text(f"{copied}\n{record(3, 'in the fork', '2026-01-02T10:00:00Z')}\n")
    texts = [
        message.body["content"]
        for path in (older, fork)
        for message in read(path).messages
        if not is_copied(message.body)
    ]
    assert texts == ["first", "second", "in the fork"]


def test_messages_copied_by_a_fork_are_marked() -> None:
    path = PROJECT / "9e1eb1be-32e7-4220-a0bf-a63df7f38f75.jsonl"
    fork = read(path)
    assert [is_copied(message.body) for message in fork.messages] == [True] * 9 + [False] * 2
    assert fork.facts["forked_from"] == "claude-code:20c7a18b-7d9d-457e-bc34-7dfb461f0515"
    assert outline(fork)[9:] == [
        "+ user What did we do, in the fork?",
        "+ assistant We added a tide table to pag [35]",
    ]


def test_pictures_are_image_parts() -> None:
    transcript = read(PROJECT / "3e8d741c-2790-4051-a4b2-2193523199c0.jsonl")
    part = transcript.messages[0].body["content"][1]
    assert part["type"] == "image_url"
    assert part["image_url"]["url"].startswith("data:image/png;base64,")


def test_a_torn_last_line_is_not_read() -> None:
    transcript = read(next((CLAUDE_CODE / "torn").rglob("*.jsonl")))
    assert len(transcript.messages) == 3
    assert transcript.problems == []


def test_working_directory_branch_model_and_version_are_read() -> None:
    transcript = read(PROJECT / "3e8d741c-2790-4051-a4b2-2193523199c0.jsonl")
    assert transcript.facts["folders"] == ["/home/ada/harbour"]
    assert transcript.facts["branches"] == ["main"]
    assert transcript.facts["models"] == ["claude-sonnet-4-5-20250929"]
    assert transcript.facts["versions"] == ["2.1.325"]


def test_copies_of_prompts_are_left_out() -> None:
    path = PROJECT / "3e8d741c-2790-4051-a4b2-2193523199c0.jsonl"
    assert "prompt_snapshot" in path.read_text()
    assert not any("prompt_snapshot" in str(message.body) for message in read(path).messages)


def test_a_file_with_only_token_counts_has_no_messages() -> None:
    (path,) = (CLAUDE_CODE / "ccusage").rglob("*.jsonl")
    transcript = read(path)
    assert transcript.messages == []
    assert transcript.problems == ["it has only token counts, and no messages"]


def test_lines_that_are_not_json_are_one_problem(tmp_path: Path) -> None:
    path = tmp_path / "notes.jsonl"
    path.write_text("one\n" + "two\n" * 1234)
    assert read(path).problems == ["1,235 lines are not JSON objects; the first is b'one\\n'"]
    path.write_text("one\n")
    assert read(path).problems == ["1 line is not a JSON object: b'one\\n'"]


def web_session(path: Path) -> Path:
    usage = {"input_tokens": 5, "output_tokens": 7}
    call = {"type": "tool_use", "id": "t1", "name": "Bash", "input": {"command": "ls"}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "tides.md"}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "List the files"},
        {"role": "assistant", "id": "m1", "model": "x", "content": [call], "usage": usage},
        {"role": "user", "content": [result]},
        {"role": "assistant", "id": "m2", "model": "x", "content": [{"type": "text", "text": "1"}]},
    ]
    records = [
        {"type": m["role"], "timestamp": f"2026-01-01T10:00:0{n}.000Z", "message": m}
        for n, m in enumerate(messages)
    ]
    path.write_text(json.dumps({"loglines": records}, indent=2), encoding="utf-8")
    return path


def test_a_session_of_claude_code_on_the_web_is_read(tmp_path: Path) -> None:
    path = web_session(tmp_path / "session_01.json")
    (tmp_path / "other.json").write_text("{}")
    assert detect_program(path) == detect_program(tmp_path) == "claude-code"
    (file,) = ClaudeCode().find(tmp_path)
    assert file.key == "claude-code:session_01"
    transcript = read(path)
    assert transcript.title == "List the files"
    assert outline(transcript) == [
        "+ user List the files",
        "+ assistant Bash() [7]",
        "+ tool tides.md",
        "+ assistant 1",
    ]
    assert transcript.messages[0].at == datetime(2026, 1, 1, 10, tzinfo=UTC)


def test_another_json_file_is_not_a_session(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text('{"messages": ["loglines"]}')
    with pytest.raises(NotASession, match="not a session of Claude Code"):
        read(path)
    assert detect_program(path) is None


def test_a_rewind_to_before_a_compaction_shows_the_messages_again(tmp_path: Path) -> None:
    def record(number: int, parent: int | None, kind: str, text: str, **more: Any) -> str:
        fields = {
            "uuid": str(number),
            "parentUuid": None if parent is None else str(parent),
            "type": kind,
            "timestamp": f"2026-01-01T10:00:{number:02d}Z",
            **({"content": text} if kind == "system" else {}),
            **({} if kind == "system" else {"message": {"role": kind, "content": text}}),
        }
        return json.dumps(fields | more) + "\n"

    path = tmp_path / "s.jsonl"
    before = record(1, None, "user", "one") + record(2, 1, "assistant", "two")
    compaction = record(3, None, "system", "", subtype="compact_boundary")
    compaction += record(4, 3, "user", "Summary:\nOne and two.", isCompactSummary=True)
    path.write_text(before + compaction + record(5, 4, "user", "three"))
    compacted = read(path)
    assert compacted.summary == "One and two."
    assert [m.body["content"] for m in compacted.messages if not m.hidden] == ["three"]
    with path.open("a") as file:
        file.write(record(6, 2, "user", "another three"))
    rewound = read(path)
    assert rewound.summary == ""
    visible = [m.body["content"] for m in rewound.messages if not m.hidden]
    assert visible == ["one", "two", "another three"]
