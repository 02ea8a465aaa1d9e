"""Records of other programs are rebuilt from the messages that were made of them."""

import json
import sqlite3
from base64 import b64encode
from contextlib import closing
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from stenolog.transfer.transcripts.programs import PROGRAMS
from stenolog.transfer.transcripts.transcript import keep_record, make_tool_call
from support.transcripts import SAMPLES, rebuild_records, restore_record, write_llm_rows

LONG_TEXT = "a text that is long enough to be stored only once, in the message"


def test_gemini_cli() -> None:
    (path,) = (SAMPLES / "gemini-cli").rglob("session-*.jsonl")
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    records += [one for record in records for one in record.get("$set", {}).get("messages", ())]
    rebuilt = rebuild_records(PROGRAMS["gemini-cli"](), path)
    assert rebuilt
    assert all(record in records for record in rebuilt)


def test_opencode() -> None:
    path = SAMPLES / "opencode" / "opencode.db"
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        parts = [json.loads(data) for (data,) in connection.execute("SELECT data FROM part")]
        messages = [json.loads(data) for (data,) in connection.execute("SELECT data FROM message")]
    rebuilt = rebuild_records(PROGRAMS["opencode"](), path, separator=":")
    assert all(record["part"] in parts for record in rebuilt)
    assert all(one in [record.get("message") for record in rebuilt] for one in messages)


def test_open_webui() -> None:
    (path,) = (SAMPLES / "open-webui").glob("*.json")
    (chat,) = json.loads(path.read_text(encoding="utf-8"))
    records = chat["chat"]["history"]["messages"]
    rebuilt = rebuild_records(PROGRAMS["open-webui"](), path)
    assert {record["id"]: record for record in rebuilt} == records


def test_claude_ai() -> None:
    path = SAMPLES / "claude-ai-export" / "conversations.json"
    chats = json.loads(path.read_text(encoding="utf-8"))
    records = {one["uuid"]: one for chat in chats for one in chat["chat_messages"]}
    rebuilt = rebuild_records(PROGRAMS["claude-ai"](), path)
    assert {record["uuid"]: record for record in rebuilt} == records


def test_long_texts_and_arguments_are_stored_once() -> None:
    arguments = {"path": "a.txt", "text": LONG_TEXT.upper()}
    calls = [make_tool_call("1", "write", arguments)]
    message = {"role": "assistant", "content": LONG_TEXT, "tool_calls": calls}
    record = {"text": LONG_TEXT, "input": arguments, "copies": [LONG_TEXT.upper()]}
    keep_record([message], "a-program", record)
    assert LONG_TEXT not in str(message["a_program"])
    assert LONG_TEXT.upper() not in str(message["a_program"])
    assert restore_record([message], "a-program") == record


def test_a_picture_is_stored_once() -> None:
    data = b64encode(bytes(range(100))).decode()
    url = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    message = {"role": "user", "content": [url]}
    record = {"source": {"data": data}}
    keep_record([message], "program", record)
    assert data not in str(message["program"])
    assert restore_record([message], "program") == record


def test_a_record_that_is_nested_too_deeply_is_stored_as_it_is() -> None:
    record: Any = [LONG_TEXT]
    for _ in range(5_000):
        record = [record]
    message: dict[str, Any] = {"role": "user", "content": LONG_TEXT}
    keep_record([message], "program", record)
    assert message["program"] is record


_TEXTS = st.sampled_from(["", "short", LONG_TEXT, LONG_TEXT[3:60], LONG_TEXT.upper()])
_VALUES = st.recursive(
    _TEXTS | st.none() | st.integers() | st.booleans(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["$text", "text", "input"]), inner, max_size=3)
    ),
)


@given(record=_VALUES, content=_TEXTS | st.lists(_VALUES, max_size=2), arguments=_VALUES)
def test_any_record_is_restored_from_any_messages(
    record: Any, content: Any, arguments: Any
) -> None:
    first = {"role": "user", "content": content, "reasoning_content": LONG_TEXT}
    calls = [make_tool_call("1", "tool", arguments)]
    second = {"role": "assistant", "content": None, "tool_calls": calls}
    keep_record([first, second], "program", record)
    assert json.dumps(restore_record([first, second], "program")) == json.dumps(record)


def test_llm(tmp_path: Path) -> None:
    path = tmp_path / "logs.db"
    path.write_bytes((SAMPLES / "llm-logs" / "logs.db").read_bytes())
    write_llm_rows(path)
    rebuilt = rebuild_records(PROGRAMS["llm"](), path)
    with closing(sqlite3.connect(path)) as connection:
        connection.row_factory = sqlite3.Row
        rows = list(map(dict, connection.execute("SELECT * FROM parts")))
    for row in rows:
        row["payload"] = json.loads(row["payload"] or "null")
    kept = [part for record in rebuilt for part in record.get("parts", ())]
    assert rows
    assert all({name: row[name] for name in row if row[name] is not None} in kept for row in rows)
