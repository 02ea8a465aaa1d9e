"""What was typed into a chat, for the arrow keys: one private file of the user, a line an entry."""

import json
import os
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Final

from prompt_toolkit.history import History

from stenolog.stores.disk import make_private, overwrite_lines

_MOST: Final = 1 << 20
"""Past this size the older half is let go."""


def history_file() -> Path:
    """Where it is: among what programs note about this user, apart from any workspace."""
    from platformdirs import user_state_path

    return user_state_path("stenolog", appauthor=False) / "chat-history.jsonl"


class KeptHistory(History):
    """Entries that outlive the program. A disk that fails costs the history, not the chat."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self._file = file

    def load_history_strings(self) -> Iterable[str]:
        """The entries, the newest first."""
        try:
            self._shorten()
            text = self._file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            return []
        return list(_entries(text))[::-1]

    def store_string(self, string: str) -> None:
        """Keep one more."""
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
        if self._file.stat().st_size <= _MOST:
            return
        kept = self._file.read_bytes()[-_MOST // 2 :].partition(b"\n")[2]
        beside = self._file.with_suffix(".new")
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(kept)
        beside.replace(self._file)


def forget(file: Path, said: Collection[str]) -> int:
    """Take entries out of the file, where they stand; how many. Raises OSError."""

    def instead(line: bytes) -> bytes:
        entries = _entries(line.decode("utf-8", "replace"))
        meant = any(words in said for entry in entries for words in _sent(entry))
        return b" " * len(line) if meant else line

    return overwrite_lines(file, instead)


def _sent(entry: str) -> Iterator[str]:
    """What an entry may have become as a message."""
    plain = entry.strip()
    yield plain
    yield plain.removeprefix("/edit").strip()
    # A second slash makes a message of what would be a command.
    yield plain.removeprefix("/")


def _entries(text: str) -> Iterator[str]:
    for line in text.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, str):
            yield entry
