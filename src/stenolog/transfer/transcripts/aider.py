"""Aider's `.aider.chat.history.md`: a Markdown file with one chat after another.

Lines that start with `#### ` are prompts, lines that start with `> ` are output of Aider itself,
and all other lines are answers.
"""

import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from stenolog.transfer.transcripts.transcript import (
    Transcript,
    TranscriptFile,
    TranscriptReader,
    find_files_below,
)

LINES_FIELD: Final = "aider"
"""Field of a stored message with the original lines, if they differ from the usual form."""
FILE_NAME: Final = ".aider.chat.history.md"
_START_LINE: Final = re.compile(r"# aider chat started at (\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)\s*")
_MODEL_LINE: Final = re.compile(r"(?:Main m|M)odel: (\S+)")


class Aider(TranscriptReader):
    """Reader of Aider's chat history. Each project has its own file."""

    program = "aider"

    def find(self, path: Path) -> Iterator[TranscriptFile]:
        """Yield the chats of a file, or of the files below a folder. Raises OSError."""
        for file in [path] if path.is_file() else find_files_below(path, FILE_NAME):
            for start, _ in _read_chats(file):
                session_id = f"{file.resolve().parent.name}:{start.replace(' ', 'T')}"
                yield self.file_at(session_id, file, conversation_id=start)

    def fill(self, transcript: Transcript, file: TranscriptFile) -> None:
        """Read a chat. Raises OSError."""
        path = file.paths[0]
        lines = next(
            (lines for start, lines in _read_chats(path) if start == file.conversation_id), []
        )
        # The start time in the file is local time.
        at = datetime.fromisoformat(file.conversation_id).astimezone().isoformat()
        model = first_prompt = ""
        for number, (role, text, source_lines) in enumerate(_split_messages(lines)):
            if role == "system" and (match := _MODEL_LINE.search(text)):
                model = match[1]
            if role == "user" and not text.startswith("/"):
                first_prompt = first_prompt or text
            body: dict[str, Any] = {"role": role, "content": text}
            if source_lines != usual_lines(body):
                body[LINES_FIELD] = {"lines": source_lines}
            used_model = model if role == "assistant" else ""
            transcript.add(f"{file.conversation_id}:{number}", body, at=at, model=used_model)
        models, folders = [model] if model else [], [str(path.resolve().parent)]
        transcript.finish(first_prompt, folders=folders, models=models)


def _read_chats(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the start time and the lines of each chat."""
    start, lines = "", list[str]()
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        if match := _START_LINE.fullmatch(line):
            if start:
                yield start, lines
            start, lines = match[1], []
        else:
            lines.append(line)
    if start:
        yield start, lines


def _split_messages(lines: list[str]) -> Iterator[tuple[str, str, list[str]]]:
    """Yield the role, text and lines of each message: consecutive lines with the same role."""
    role, run_lines, source_lines = "", list[str](), list[str]()
    for line in lines:
        line_role, text = "assistant", line
        if line.startswith("#### "):
            line_role, text = "user", line.removeprefix("#### ").rstrip()
        elif line.startswith("> "):
            line_role, text = "system", line.removeprefix("> ").rstrip()
        elif not line.strip() and role != "assistant":
            source_lines.append(line)
            continue
        if line_role != role:
            if "\n".join(run_lines).strip("\n"):
                yield role, "\n".join(run_lines).strip("\n"), source_lines
                source_lines = []
            role, run_lines = line_role, []
        run_lines.append(text)
        source_lines.append(line)
    if "\n".join(run_lines).strip("\n"):
        yield role, "\n".join(run_lines).strip("\n"), source_lines


def usual_lines(body: Mapping[str, Any]) -> list[str]:
    """Return the lines that Aider usually writes for a message."""
    lines = body["content"].split("\n")
    match body["role"]:
        case "user":
            return [*(f"#### {line}  " for line in lines), ""]
        case "system":
            return [f"> {line}  " for line in lines]
    return [*lines, ""]
