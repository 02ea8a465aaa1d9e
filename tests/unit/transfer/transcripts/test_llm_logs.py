"""llm's logs: threads of the new tables and conversations of the old ones."""

import sqlite3
from base64 import b64encode
from contextlib import closing
from pathlib import Path

import pytest

from stenolog.transfer.transcripts.llm_logs import LLMLogs
from stenolog.transfer.transcripts.transcript import Transcript
from support.transcripts import (
    FRAGMENT,
    OLD_CONVERSATION,
    PICTURE,
    SAMPLES,
    THREAD,
    outline,
    write_llm_rows,
)

LOGS = SAMPLES / "llm-logs" / "logs.db"


def read(path: Path) -> dict[str, Transcript]:
    reader = LLMLogs()
    return {file.conversation_id: reader.read(file) for file in reader.find(path)}


def test_thread_with_a_tool_is_read() -> None:
    transcript = read(LOGS)["01m7j3t3mg9az72jtakew0mbzj"]
    assert outline(transcript) == [
        "+ system You are a harbour master",
        '+ user {"tool_calls": [{"name": "co',
        '+ assistant { "prompt": "use the tool", count_boats() [18]',
        "+ tool 3",
        '+ assistant { "prompt": "", "system": "Y [41]',
    ]
    call = transcript.messages[2].body["tool_calls"][0]
    assert transcript.messages[3].body["tool_call_id"] == call["id"]


def test_messages_have_the_time_of_the_turn_that_added_them() -> None:
    transcript = read(LOGS)["01m7j3t21e48phq4ggandkj075"]
    assert [str(one.at)[11:19] for one in transcript.messages] == [
        "12:02:47",
        "12:02:47",
        "12:02:48",
        "12:02:48",
    ]


def test_reasoning_is_kept_apart_from_the_answer() -> None:
    transcript = read(LOGS)["01m7j3t4cze2csq776qx51gxws"]
    assert transcript.messages[1].body["reasoning_content"].startswith("First I consider")


def test_conversation_of_the_old_tables_is_read() -> None:
    transcript = read(LOGS)["01m7j3t0s2rwxe3vzm80jsxhwb"]
    assert transcript.title == "Old layout: how tall is Mount E…"
    assert outline(transcript) == [
        "+ user Old layout: how tall is Moun",
        '+ assistant { "prompt": "Old layout: how',
        "+ user and K2?",
        '+ assistant { "prompt": "and K2?", "syst',
    ]


def test_a_conversation_that_was_continued_is_read_from_its_thread(tmp_path: Path) -> None:
    path = tmp_path / "logs.db"
    path.write_bytes(LOGS.read_bytes())
    with closing(sqlite3.connect(path)) as connection:
        old = "01m7j3t0s2rwxe3vzm80jsxhwb"
        new = "01m7j3t21e48phq4ggandkj075"
        connection.execute("PRAGMA foreign_keys=OFF")
        connection.execute("UPDATE threads SET id=? WHERE id=?", (old, new))
        connection.execute("UPDATE turns SET thread_id=? WHERE thread_id=?", (old, new))
        connection.commit()
    found = read(path)
    assert len(found) == 3
    # The name of the old conversation is the better title.
    assert found[old].title == "Old layout: how tall is Mount E…"
    assert outline(found[old])[0] == "+ user How many bridges are there?"


@pytest.fixture
def filled_logs(tmp_path: Path) -> Path:
    path = tmp_path / "logs.db"
    path.write_bytes(LOGS.read_bytes())
    write_llm_rows(path)
    return path


def test_fragments_and_attachments_are_part_of_the_message(filled_logs: Path) -> None:
    found = read(filled_logs)
    old, new = found[OLD_CONVERSATION], found[THREAD]
    assert outline(old) == [
        "+ system The tides of the harbour, me",
        "+ user text image_url file",
        "+ assistant I look it up. thinking tide() [5]",
        "+ tool 4 failed",
        "+ assistant At 4.",
    ]
    kinds = [part["type"] for part in new.messages[0].body["content"]]
    assert kinds == ["text", "image_url", "file", "image_url", "text"]
    picture = f"data:image/png;base64,{b64encode(PICTURE).decode()}"
    for transcript, separator, prompt in (
        (old, "\n", "When is high water?"),
        (new, "", "What is in these pictures?"),
    ):
        parts = next(one for one in transcript.messages if one.body["role"] == "user").body
        assert parts["content"][0]["text"] == f"{FRAGMENT}{separator}{prompt}"
        assert parts["content"][1]["image_url"]["url"] == picture


def test_old_result_without_an_id_belongs_to_the_call_before_it(filled_logs: Path) -> None:
    messages = [one.body for one in read(filled_logs)[OLD_CONVERSATION].messages]
    (result,) = (one for one in messages if one["role"] == "tool")
    (call,) = (call for one in messages for call in one.get("tool_calls", ()))
    assert result["tool_call_id"] == call["id"]


def test_database_of_a_version_without_tools_is_read(tmp_path: Path) -> None:
    path = tmp_path / "logs.db"
    path.write_bytes(LOGS.read_bytes())
    with closing(sqlite3.connect(path)) as connection:
        for table in ("tool_calls", "tool_results", "fragments", "attachments", "threads"):
            connection.execute(f"DROP TABLE {table}")
        connection.commit()
    (transcript,) = read(path).values()
    assert len(transcript.messages) == 4


def test_a_cycle_of_messages_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "logs.db"
    path.write_bytes(LOGS.read_bytes())
    with closing(sqlite3.connect(path)) as connection:
        tip = "b2:494ca4ee6363ca4d4458704df38a4e8c"
        connection.execute("PRAGMA foreign_keys=OFF")
        connection.execute("UPDATE messages SET parent_hash=? WHERE parent_hash IS NULL", (tip,))
        connection.commit()
    assert len(read(path)["01m7j3t21e48phq4ggandkj075"].messages) == 4
