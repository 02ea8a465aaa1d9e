"""Input history of the chat, for the arrow keys: a private file with one JSON string per line."""

import json
import os
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Final

from prompt_toolkit.history import History

from stenolog.stores.disk import make_private, overwrite_lines

_MAX_BYTES: Final = 1 << 20
"""Maximum size of the file in bytes. Above it, the older half is removed."""


def history_file() -> Path:
    """Return the path of the history in the user's state folder, outside any workspace."""
    from platformdirs import user_state_path

    return user_state_path("stenolog", appauthor=False) / "chat-history.jsonl"


class InputHistory(History):
    """Persistent input history. If the disk fails, the history is lost, but the chat works."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self._file = file

    def load_history_strings(self) -> Iterable[str]:
        """Return the entries, newest first."""
        try:
            self._shorten()
            text = self._file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            return []
        return list(_entries(text))[::-1]

    def store_string(self, string: str) -> None:
        """Append an entry."""
        line = f"{json.dumps(string)}\n".encode()
        try:
            make_private(self._file.parent)
            # guard: chat-history-mode
            descriptor = os.open(self._file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                os.write(descriptor, line)
            finally:
                os.close(descriptor)
        except OSError:
            return

    def _shorten(self) -> None:
        if self._file.stat().st_size <= _MAX_BYTES:
            return
        kept = self._file.read_bytes()[-_MAX_BYTES // 2 :].partition(b"\n")[2]
        beside = self._file.with_suffix(".new")
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(kept)
        beside.replace(self._file)


def remove_entries(file: Path, said: Collection[str]) -> int:
    """Overwrite matching entries with spaces and return their number. Raises OSError."""

    def instead(line: bytes) -> bytes:
        entries = _entries(line.decode("utf-8", "replace"))
        meant = any(words in said for entry in entries for words in _possible_messages(entry))
        return b" " * len(line) if meant else line

    return overwrite_lines(file, instead)


def _possible_messages(entry: str) -> Iterator[str]:
    """Yield the messages that an entry may have been sent as."""
    plain = entry.strip()
    yield plain
    yield plain.removeprefix("/edit").strip()
    # A second slash turns a command into a message.
    yield plain.removeprefix("/")


def _entries(text: str) -> Iterator[str]:
    for line in text.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, str):
            yield entry
