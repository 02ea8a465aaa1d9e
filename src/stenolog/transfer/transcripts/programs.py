"""The programs whose transcripts can be read, and functions that detect the program of a file."""

import itertools
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from stenolog.stores.json_file import NotASession
from stenolog.transfer.transcripts import sqlite_file
from stenolog.transfer.transcripts.chat_exports import ChatGPT, ClaudeAI, OpenWebUI
from stenolog.transfer.transcripts.claude_code import ClaudeCode, is_web_session
from stenolog.transfer.transcripts.codex import Codex
from stenolog.transfer.transcripts.gemini_cli import GeminiCLI
from stenolog.transfer.transcripts.llm_logs import LLMLogs
from stenolog.transfer.transcripts.opencode import OpenCode
from stenolog.transfer.transcripts.transcript import TranscriptReader, as_dict, read_json_lines

PROGRAMS: Final[dict[str, Callable[[], TranscriptReader]]] = {
    "claude-code": ClaudeCode,
    "codex": Codex,
    "chatgpt": ChatGPT,
    "llm": LLMLogs,
    "gemini-cli": GeminiCLI,
    "opencode": OpenCode,
    "claude-ai": ClaudeAI,
    "open-webui": OpenWebUI,
}
"""The class that reads the transcripts of each program, by program name."""
_FILE_PATTERNS: Final = {
    "codex": ("rollout-*.jsonl*", "*/*/*/rollout-*.jsonl*", "*/*/*/*/rollout-*.jsonl*"),
    "gemini-cli": ("chats/session-*.json*", "*/chats/session-*.json*", "tmp/*/chats/session-*"),
}
MAX_TRIES: Final = 20
"""Maximum number of lines or files that are examined to recognize a program."""


def find_transcripts_path(program: str) -> Path | None:
    """Return the path of a program's transcripts, even if unreadable; None if missing."""
    try:
        return PROGRAMS[program]().default_folder()
    except PermissionError as error:
        return Path(error.filename)


def detect_program(path: Path) -> str | None:
    """Return the program whose transcripts are in a folder or file, or None if unknown."""
    if path.is_dir():
        return _detect_in_folder(path)
    if not path.is_file():
        return None  # reading a pipe or device may never end
    if path.name.startswith("rollout-"):
        return "codex"
    if sqlite_file.is_sqlite_file(path):
        return _detect_in_database(path)
    if path.suffix == ".json" and is_web_session(path):
        return "claude-code"
    if zipfile.is_zipfile(path) or path.suffix == ".json":
        return _detect_in_export(path)
    return _detect_in_lines(path)


def _detect_in_folder(folder: Path) -> str | None:
    for name in ("logs.db", "opencode.db", "conversations.json"):
        path = folder / name
        if path.is_file() and (program := detect_program(path)) is not None:
            return program
    # Only folders that the programs create are searched.
    for program, patterns in _FILE_PATTERNS.items():
        if any(next(folder.glob(pattern), None) is not None for pattern in patterns):
            return program
    for pattern in ("projects/*/*.jsonl", "*/*.jsonl", "*.jsonl"):
        for file in itertools.islice(filter(os.path.isfile, folder.glob(pattern)), MAX_TRIES):
            if _detect_in_lines(file) == "claude-code":
                return "claude-code"
    for file in itertools.islice(filter(os.path.isfile, sorted(folder.glob("*.json"))), MAX_TRIES):
        if (program := detect_program(file)) is not None:
            return program
    return None


def _detect_in_lines(path: Path) -> str | None:
    for record in _read_first_records(path):
        fields = as_dict(record)
        if fields.get("type") == "session_meta" or "record_type" in fields:
            return "codex"
        if "sessionId" in fields and "projectHash" in fields:
            return "gemini-cli"
        if isinstance(fields.get("sessionId"), str) and ("message" in fields or "type" in fields):
            return "claude-code"
    return None


def _read_first_records(path: Path) -> list[Any]:
    """Return the first records of a file; an empty list if it has a line that is too long."""
    try:
        return [record for _, record in itertools.islice(read_json_lines(path), MAX_TRIES)]
    except OSError as error:
        if error.errno is not None:
            raise
        return []


def _detect_in_export(path: Path) -> str | None:
    for program in ("chatgpt", "claude-ai", "open-webui"):
        reader = PROGRAMS[program]()
        try:
            file = next(iter(reader.find(path)), None)
            if file is not None and reader.read(file).messages:
                return program
        except (OSError, KeyError):
            continue
    return None


def _detect_in_database(path: Path) -> str | None:
    try:
        with sqlite_file.connect(path) as connection:
            rows = connection.execute("SELECT name FROM sqlite_master WHERE type='table'")
            tables = {name.decode() for (name,) in rows}
    except (NotASession, OSError):
        return None
    if {"session", "message", "part"} <= tables:
        return "opencode"
    return "llm" if {"conversations", "responses"} <= tables else None
