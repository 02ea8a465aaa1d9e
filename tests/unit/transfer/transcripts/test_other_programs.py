"""Gemini CLI and opencode, message by message."""

import shutil
import sqlite3
from datetime import UTC, datetime
from pathlib import Path

import pytest

from stenolog.stores.json_file import NotASession
from stenolog.transfer.transcripts.opencode import OpenCode
from stenolog.transfer.transcripts.programs import PROGRAMS
from stenolog.transfer.transcripts.transcript import Transcript
from support.transcripts import SAMPLES, outline


def read(program: str, path: Path) -> dict[str, Transcript]:
    reader = PROGRAMS[program]()
    return {file.key: reader.read(file) for file in reader.find(path)}


def test_gemini_cli_keeps_the_richest_version_of_each_message() -> None:
    (transcript,) = read("gemini-cli", SAMPLES / "gemini-cli").values()
    assert transcript.key == "gemini-cli:bc11d78f-298e-484c-9c84-3ae9fd87ba3f"
    assert transcript.facts["folders"] == ["/home/gil/river"]
    assert outline(transcript) == [
        "+ user injected <session_context> This is th",
        "+ user Count the bridges",
        "+ assistant thinking run_shell_command() read_file() [41]",
        "+ tool <untrusted_context> Output:",
        "+ tool Old Bridge New Bridge",
        "+ assistant There are 2 bridges. 橋 🌉 [41]",
        "+ user and write that down",
        "+ assistant write_file() [41]",
        "+ tool Successfully created and wro",
        "+ assistant count.md says 2 bridges. [41]",
    ]


def test_gemini_cli_messages_have_the_time_of_their_first_record() -> None:
    (transcript,) = read("gemini-cli", SAMPLES / "gemini-cli").values()
    times = [message.at for message in transcript.messages if message.at is not None]
    assert times == sorted(times)
    assert len(times) == len(transcript.messages)
    assert times[0] == datetime(2026, 11, 16, 11, 59, 47, 409_000, tzinfo=UTC)


def test_gemini_cli_messages_that_were_rewound_are_hidden(tmp_path: Path) -> None:
    (path,) = (SAMPLES / "gemini-cli").rglob("session-*.jsonl")
    copy = tmp_path / path.name
    rewound = '{"$rewindTo":"4b5741de-3d23-4075-a5b9-e82191850c92"}\n'
    copy.write_text(path.read_text(encoding="utf-8") + rewound, encoding="utf-8")
    (transcript,) = read("gemini-cli", copy).values()
    assert outline(transcript)[5:] == [
        "+ assistant There are 2 bridges. 橋 🌉 [41]",
        "- user and write that down",
        "- assistant write_file() [41]",
        "- tool Successfully created and wro",
        "- assistant count.md says 2 bridges. [41]",
    ]


def test_opencode_calls_results_and_subagents() -> None:
    found = read("opencode", SAMPLES / "opencode")
    gates = found["opencode:ses_e1bc54571ffeQCMUB5qfLoMXIy"]
    assert outline(gates) == [
        '+ user "Count the gates"',
        "+ assistant thinking",
        "+ assistant Counting.",
        "+ assistant bash()",
        "+ tool 2 gates.txt",
        "+ assistant read() [40]",
        "+ tool <path>/home/oz/town/gates.tx",
        "+ assistant There are 2 gates. 門 ⛩️ [40]",
        '+ user "and write that down"',
        "+ assistant write() [40]",
        "+ tool Wrote file successfully.",
        "+ assistant count.md says 2 gates. [40]",
    ]
    notes = [one.body["stenolog"] for one in gates.messages]
    # The prompt includes what came from the cache.
    assert [one["usage"]["prompt"] for one in notes if "usage" in one] == [900, 1000, 900, 1000]
    scout = found["opencode:ses_e1bc510f5ffe598806hN44YOUM"]
    assert scout.facts["parent"] == {"key": "opencode:ses_e1bc51be0ffeOyON8b7s1byLUU"}
    assert found["opencode:ses_e1bc51be0ffeOyON8b7s1byLUU"].title == '"Ask a scout"'


def test_opencode_reads_no_table_with_credentials(tmp_path: Path) -> None:
    path = tmp_path / "opencode.db"
    shutil.copy(SAMPLES / "opencode" / "opencode.db", path)
    connection = sqlite3.connect(path)
    tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master")]
    assert "credential" in tables
    connection.execute("DROP TABLE credential")
    connection.commit()
    connection.close()
    assert len(read("opencode", path)) == 3


def test_opencode_database_with_unwritten_changes_is_not_copied(tmp_path: Path) -> None:
    path = tmp_path / "opencode.db"
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA journal_mode=wal")
    connection.execute("CREATE TABLE session (id TEXT)")
    connection.commit()
    # As after a crash: the log is there, its index is not.
    left = tmp_path / "left"
    left.mkdir()
    shutil.copy(path, left / "opencode.db")
    shutil.copy(f"{path}-wal", left / "opencode.db-wal")
    connection.close()
    with pytest.raises(NotASession, match="unwritten changes"):
        list(OpenCode().find(left))
