"""Sample transcripts of other programs, rows of llm, and an outline of a transcript."""

import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from stenolog.catalog.message_metadata import is_copied
from stenolog.transfer.transcripts.transcript import (
    Transcript,
    TranscriptReader,
    record_field_name,
    texts_of,
)

SAMPLES = Path(__file__).parents[1] / "samples" / "transcripts"


def outline(transcript: Transcript) -> list[str]:
    """Return a line per message: visible or hidden, role, kind, text, tools, tokens, failure."""
    lines = []
    for one in transcript.messages:
        body, notes = one.body, one.body["stenolog"]
        content = body.get("content")
        text = content if isinstance(content, str) else " ".join(p["type"] for p in content or [])
        words = [
            "-" if one.hidden else "+",
            body["role"],
            notes.get("kind", ""),
            " ".join(text.split())[:28],
            "thinking" if body.get("reasoning_content") else "",
            *(f"{call['function']['name']}()" for call in body.get("tool_calls", ())),
            f"[{notes['usage']['answer']}]" if "usage" in notes else "",
            "failed" if notes.get("failed") else "",
        ]
        lines.append(" ".join(" ".join(words).split()))
    return lines


def rebuild_records(
    reader: TranscriptReader, path: Path, *, separator: str = "#", include_copies: bool = True
) -> list[Any]:
    """Return the records that the messages of all transcripts were made of."""
    rebuilt = []
    for file in reader.find(path):
        groups: dict[str, list[dict[str, Any]]] = {}
        for one in reader.read(file).messages:
            if not include_copies and is_copied(one.body):
                continue
            groups.setdefault(one.identity.partition(separator)[0], []).append(one.body)
        rebuilt += [restore_record(messages, reader.program) for messages in groups.values()]
    return rebuilt


def restore_record(messages: Sequence[Mapping[str, Any]], program: str) -> Any:
    """Return the record from which these messages were made."""
    return _resolve_references(messages[0][record_field_name(program)], texts_of(messages))


def _resolve_references(value: Any, texts: Sequence[str]) -> Any:
    if isinstance(value, dict):
        target = value["$text"] if value.keys() == {"$text"} else value
        if isinstance(target, int):
            return texts[target]
        return {name: _resolve_references(item, texts) for name, item in target.items()}
    if isinstance(value, list):
        return [_resolve_references(item, texts) for item in value]
    return value


# --- llm ---------------------------------------------------------------------------------------

OLD_CONVERSATION = "01a0000000000000000000old0"
THREAD = "01a00000000000000000thread"
FRAGMENT = "The tides of the harbour, measured every hour of a week.\n" * 3
PICTURE = b"\x89PNG\r\n\x1a\n" + bytes(range(64))

_LLM_ROWS: dict[str, list[dict[str, Any]]] = {
    "conversations": [{"id": OLD_CONVERSATION, "name": "Tides", "model": "old-model"}],
    "fragments": [
        {"id": 1, "hash": "f1", "content": FRAGMENT, "datetime_utc": "2025-01-01", "source": "t.md"}
    ],
    "attachments": [
        {"id": "a1", "type": "image/png", "content": PICTURE},
        {"id": "a2", "type": "application/pdf", "content": b"%PDF-1.7 \xff"},
        {"id": "a3", "type": "image/png", "url": "https://example.com/a.png"},
        {"id": "a4", "type": "image/png", "path": "pictures/a.png"},
    ],
    "responses": [
        {
            "id": "r1",
            "model": "old-model",
            "prompt": "When is high water?",
            "system": "You are a harbour master who answers briefly and exactly.",
            "response": "I look it up.",
            "reasoning": "The table has a row for each hour of the week.",
            "options_json": '{"temperature": 0.5}',
            "conversation_id": OLD_CONVERSATION,
            "duration_ms": 1500,
            "datetime_utc": "2025-01-01T00:00:01",
            "input_tokens": 10,
            "output_tokens": 5,
            "token_details": '{"cached": 2}',
        },
        {
            "id": "r2",
            "model": "old-model",
            "prompt": "",
            "system": "You are a harbour master who answers briefly and exactly.",
            "response": "At 4.",
            "conversation_id": OLD_CONVERSATION,
            "datetime_utc": "2025-01-01T00:00:02",
        },
    ],
    "prompt_fragments": [{"response_id": "r1", "fragment_id": 1, "order": 0}],
    "system_fragments": [
        {"response_id": "r1", "fragment_id": 1, "order": 0},
        {"response_id": "r2", "fragment_id": 1, "order": 0},
    ],
    "prompt_attachments": [
        {"response_id": "r1", "attachment_id": "a1", "order": 0},
        {"response_id": "r1", "attachment_id": "a2", "order": 1},
    ],
    "tool_calls": [
        {"id": 1, "response_id": "r1", "tool_id": 1, "name": "tide", "arguments": '{"day": 1}'}
    ],
    "tool_results": [
        {
            "id": 1,
            "response_id": "r2",
            "tool_id": 1,
            "name": "tide",
            "output": "4",
            "exception": "E",
        }
    ],
    "threads": [
        {
            "id": THREAD,
            "name": "Pictures",
            "tip_message_hash": "m2",
            "forked_from": "01m7j3t21e48phq4ggandkj075",
            "datetime_utc": "2026-01-01 00:00:00+00:00",
        }
    ],
    "messages": [
        {"hash": "m1", "role": "user"},
        {
            "hash": "m2",
            "parent_hash": "m1",
            "role": "assistant",
            "provider_metadata": '{"cache": true}',
        },
    ],
    "turns": [
        {
            "id": "t1",
            "thread_id": THREAD,
            "parent_message_hash": "m1",
            "tip_message_hash": "m2",
            "model": "new-model",
            "resolved_model": "new-model-2",
            "input_tokens": 7,
            "output_tokens": 3,
            "token_details": '{"cached": 1}',
            "duration_ms": 20,
            "datetime_utc": "2026-01-01T00:00:01+00:00",
            "response_json": '{"id": "response"}',
        }
    ],
    "turn_fragments": [{"turn_id": "t1", "fragment_id": 1, "order": 0, "kind": "prompt"}],
    "parts": [
        {
            "id": 101,
            "message_hash": "m1",
            "position": 0,
            "type": "text",
            "payload": '{"text_ref": [{"fragment": 1}, {"literal": "What is in these pictures?"}]}',
        },
        *(
            {
                "id": 101 + number,
                "message_hash": "m1",
                "position": number,
                "type": "attachment",
                "payload": f'{{"attachment": {{"id": "a{number}"}}}}',
            }
            for number in (1, 2, 3, 4)
        ),
        {
            "id": 110,
            "message_hash": "m2",
            "position": 0,
            "type": "reasoning",
            "text": "Each picture shows a harbour at another time of the day.",
        },
        {"id": 111, "message_hash": "m2", "position": 1, "type": "text", "text": "Boats."},
        {"id": 112, "message_hash": "m2", "position": 2, "type": "text", "text": "And gulls."},
    ],
    "part_fragments": [{"part_id": 101, "fragment_id": 1, "order": 0}],
    "part_attachments": [{"part_id": 102, "attachment_id": "a1", "order": 0}],
}
"""Rows that the sample does not have: fragments, attachments, and tools of the old tables."""


def write_llm_rows(path: Path) -> None:
    """Add a conversation of the old tables and a thread of the new ones to a `logs.db`."""
    with closing(sqlite3.connect(path)) as connection:
        for table, rows in _LLM_ROWS.items():
            for row in rows:
                columns = ", ".join(f'"{name}"' for name in row)
                values = ", ".join("?" * len(row))
                sql = f"INSERT INTO {table} ({columns}) VALUES ({values})"  # noqa: S608
                connection.execute(sql, list(row.values()))
        connection.commit()
