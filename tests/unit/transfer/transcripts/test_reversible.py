"""Records of other programs are rebuilt from the messages that were made of them."""

import json
import sqlite3
from typing import Any

from stenolog.transfer.transcripts import aider, claude_ai, gemini_cli, open_webui, opencode
from stenolog.transfer.transcripts.programs import PROGRAMS
from support.transcripts import SAMPLES


def groups(program: str, separator: str = "#") -> dict[str, list[dict[str, Any]]]:
    """Return the messages of each record by its id."""
    reader = PROGRAMS[program]()
    found: dict[str, list[dict[str, Any]]] = {}
    for file in reader.find(SAMPLES / {"claude-ai": "claude-ai-export"}.get(program, program)):
        for one in reader.read(file).messages:
            found.setdefault(one.identity.partition(separator)[0], []).append(one.message)
    return found


def test_gemini_cli() -> None:
    (path,) = (SAMPLES / "gemini-cli").rglob("session-*.jsonl")
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    changes = [one for record in records for one in record.get("$set", {}).get("messages", ())]
    for made in groups("gemini-cli").values():
        assert "record" not in made[0]["gemini_cli"]
        assert gemini_cli.record_of(made) in [*records, *changes]


def test_opencode() -> None:
    connection = sqlite3.connect(f"file:{SAMPLES / 'opencode' / 'opencode.db'}?mode=ro", uri=True)
    parts = dict(connection.execute("SELECT id, data FROM part"))
    connection.close()
    for name, made in groups("opencode", ":").items():
        assert "record" not in made[0]["opencode"]
        assert opencode.part_of(made) == json.loads(parts[name])


def test_open_webui() -> None:
    (path,) = (SAMPLES / "open-webui").glob("*.json")
    (chat,) = json.loads(path.read_text(encoding="utf-8"))
    records = chat["chat"]["history"]["messages"]
    for name, made in groups("open-webui").items():
        assert "record" not in made[0]["open_webui"]
        assert open_webui.record_of(made) == records[name]


def test_claude_ai() -> None:
    path = SAMPLES / "claude-ai-export" / "conversations.json"
    chats = json.loads(path.read_text(encoding="utf-8"))
    records = {one["uuid"]: one for chat in chats for one in chat["chat_messages"]}
    for name, made in groups("claude-ai").items():
        assert claude_ai.record_of(made) == records[name]


def test_aider() -> None:
    reader = PROGRAMS["aider"]()
    for file in reader.find(SAMPLES / "aider"):
        chats = dict(aider._chats(file.paths[0]))
        bodies = [one.message for one in reader.read(file).messages]
        lines = "\n".join(aider.lines_of(bodies)).rstrip("\n")
        assert lines == "\n".join(chats[file.item]).rstrip("\n")
