"""Aider's `.aider.chat.history.md`: a Markdown file with one chat after another.

`#### ` lines are the user's, `> ` lines are Aider's own output, everything else is the answer.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from stenolog.transfer.transcripts.transcript import (
    Transcript,
    TranscriptFile,
    TranscriptMessage,
    annotated,
    file_at,
    files_below,
    filled,
    one_line,
    time_from,
)

PROGRAM: Final = "aider"
FIELD: Final = "aider"
"""Field of a stored message that holds its lines, unless they have the usual form."""
NAME: Final = ".aider.chat.history.md"
_START: Final = re.compile(r"# aider chat started at (\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)\s*")
_MODEL: Final = re.compile(r"(?:Main m|M)odel: (\S+)")


class Aider:
    """Reader of Aider's chat history."""

    program = PROGRAM

    def default_folder(self) -> Path | None:
        """Return None: each project has its own file."""
        return None

    def find(self, path: Path) -> Iterator[TranscriptFile]:
        """Yield the chats of a file, or of the files below a folder. Raises OSError."""
        for file in [path] if path.is_file() else files_below(path, NAME):
            for start, _ in _chats(file):
                key = f"{PROGRAM}:{file.resolve().parent.name}:{start.replace(' ', 'T')}"
                yield file_at(PROGRAM, key, file, item=start)

    def read(self, file: TranscriptFile, *, is_complete: bool = True) -> Transcript:  # noqa: ARG002
        """Read a chat. Raises OSError."""
        path = file.paths[0]
        lines = next((found for start, found in _chats(path) if start == file.item), [])
        transcript = Transcript(program=PROGRAM, key=file.key)
        # The time in the file is local.
        at = time_from(datetime.fromisoformat(file.item).astimezone().isoformat())
        model = ""
        first = ""
        for number, (role, text, source) in enumerate(_messages(lines)):
            if role == "system" and (found := _MODEL.search(text)):
                model = found[1]
            if role == "user" and not first and not text.startswith("/"):
                first = text
            identity = f"{file.item}:{number}"
            notes: dict[str, Any] = {"model": model} if role == "assistant" and model else {}
            body: dict[str, Any] = {"role": role, "content": text}
            if source != _lines(body):
                body[FIELD] = {"lines": source}
            message = annotated(body, identity, **notes)
            transcript.messages.append(TranscriptMessage(identity=identity, message=message, at=at))
        transcript.title = one_line(first)
        transcript.source = filled(
            {
                "program": PROGRAM,
                "path": str(path),
                "folders": [str(path.resolve().parent)],
                "models": [model] if model else [],
            }
        )
        return transcript


def _chats(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the start time and the lines of each chat."""
    start, lines = "", list[str]()
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        if found := _START.fullmatch(line):
            if start:
                yield start, lines
            start, lines = found[1], []
        else:
            lines.append(line)
    if start:
        yield start, lines


def _messages(lines: list[str]) -> Iterator[tuple[str, str, list[str]]]:
    """Yield role and text of each message: runs of lines of the same kind, and their lines."""
    role, run, source = "", list[str](), list[str]()
    for line in lines:
        now, text = "assistant", line
        if line.startswith("#### "):
            now, text = "user", line.removeprefix("#### ").rstrip()
        elif line.startswith("> "):
            now, text = "system", line.removeprefix("> ").rstrip()
        elif not line.strip() and role != "assistant":
            source.append(line)
            continue
        if now != role:
            if "\n".join(run).strip("\n"):
                yield role, "\n".join(run).strip("\n"), source
                source = []
            role, run = now, []
        run.append(text)
        source.append(line)
    if "\n".join(run).strip("\n"):
        yield role, "\n".join(run).strip("\n"), source


def lines_of(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the lines of the chat that these messages were made of."""
    found: list[str] = []
    for body in messages:
        found += body[FIELD]["lines"] if FIELD in body else _lines(body)
    return found


def _lines(body: Mapping[str, Any]) -> list[str]:
    """Return the lines that Aider usually writes for a message."""
    lines = body["content"].split("\n")
    match body["role"]:
        case "user":
            return [*(f"#### {line}  " for line in lines), ""]
        case "system":
            return [f"> {line}  " for line in lines]
    return [*lines, ""]
