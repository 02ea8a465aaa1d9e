"""Claude Code's `settings.json`: when transcripts are deleted, and the hook that imports sessions.

Changes are made in the text, so that the rest of the file stays the same, byte for byte.
"""

import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from json.decoder import JSONDecoder
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, Final

from msgspec import Struct

from stenolog.errors import UsageError
from stenolog.transfer.transcripts.transcript import (
    TranscriptFile,
    TranscriptReader,
    as_dict,
    as_text,
    list_or_empty,
)

HOOK_EVENT: Final = "SessionEnd"
HOOK_ARGUMENTS: Final = "hook run claude-code"
"""Arguments by which the hook is recognized, even if the path of `steno` has changed."""
MAX_CLEANUP_DAYS: Final = 1_000_000
"""Larger settings count as this number of days, so that dates do not overflow."""
DEFAULT_CLEANUP_DAYS: Final = 30
"""Days after which Claude Code deletes a transcript, unless its settings say otherwise."""
_SPACE: Final = re.compile(r"[ \t\r\n]*")
_decode_json_at: Final = JSONDecoder().raw_decode


def settings_file() -> Path:
    """Return the path of the user's settings; the file may be missing."""
    return Path(os.environ.get("CLAUDE_CONFIG_DIR") or Path.home() / ".claude") / "settings.json"


def read_cleanup_days(path: Path) -> int:
    """Return the number of days after which Claude Code deletes an unchanged transcript."""
    with suppress(OSError, ValueError, RecursionError):
        days = as_dict(json.loads(path.read_text("utf-8-sig"))).get("cleanupPeriodDays")
        if isinstance(days, int) and not isinstance(days, bool) and days >= 0:
            return days
    return DEFAULT_CLEANUP_DAYS


def find_expiring_transcripts(
    reader: TranscriptReader, now: datetime, *, within: timedelta
) -> list[tuple[datetime, TranscriptFile]]:
    """Return deletion time and file of each transcript that is deleted before `now + within`."""
    folder = reader.default_folder()
    if folder is None:
        return []
    max_age = timedelta(days=min(read_cleanup_days(settings_file()), MAX_CLEANUP_DAYS))
    expiring_files = []
    with suppress(PermissionError):
        for file in reader.find(folder):
            deleted_at = datetime.fromtimestamp(file.modified / 1e9, UTC) + max_age
            if deleted_at <= now + within:
                expiring_files.append((deleted_at, file))
    return sorted(expiring_files, key=lambda pair: (pair[0], pair[1].key))


def has_hook() -> bool:
    """Return whether the settings have the hook that imports each session at its end."""
    path = settings_file()
    with suppress(OSError, UnicodeDecodeError, UsageError):
        return any(_stenolog_commands(_read_hook_entries(path.read_text("utf-8"), path)))
    return False


def add_hook(text: str, command: str, path: Path) -> str:
    """Return the settings with the hook. Raises UsageError if the settings are invalid."""
    if list(_stenolog_commands(_read_hook_entries(text, path))) == [command]:
        return text
    text = remove_hook(text, path)
    entry = {"hooks": [{"type": "command", "command": command}]}
    settings = _container_at(text)
    if "hooks" not in settings.indexes:
        return settings.insert({HOOK_EVENT: [entry]}, "hooks")
    hooks = settings.container_at("hooks")
    if HOOK_EVENT not in hooks.indexes:
        return hooks.insert([entry], HOOK_EVENT)
    return hooks.container_at(HOOK_EVENT).insert(entry)


def remove_hook(text: str, path: Path) -> str:
    """Return the settings without the hook. Raises UsageError if the settings are invalid."""
    while True:
        entries = _read_hook_entries(text, path)
        entry_indexes = (n for n, entry in enumerate(entries) if any(_stenolog_commands([entry])))
        entry_index = next(entry_indexes, None)
        if entry_index is None:
            return text
        hooks = _container_at(text, "hooks")
        commands = entries[entry_index]["hooks"]
        if len(commands) > 1:
            # The user added other commands to the entry. Only the command of stenolog is removed.
            command_array = _container_at(text, "hooks", HOOK_EVENT, entry_index, "hooks")
            text = command_array.remove(next(n for n, c in enumerate(commands) if _is_our_hook(c)))
        elif len(entries) > 1:
            text = hooks.container_at(HOOK_EVENT).remove(entry_index)
        elif len(hooks.items) > 1:
            text = hooks.remove(HOOK_EVENT)
        else:
            text = _container_at(text).remove("hooks")


def replace_settings(path: Path, old_content: bytes | None, text: str) -> None:
    """Write the settings by replacing the file. The mode of the file is kept.

    Raises OSError, and UsageError if the content of the file is no longer `old_content`.
    """
    target = path.resolve()  # if `path` is a link, only its target is replaced
    mode = 0o600 if old_content is None else target.stat().st_mode & 0o7777
    with NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}.", delete=False) as file:
        try:
            file.write(text.encode())
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
            _check_unchanged(target, old_content)
            Path(file.name).replace(target)
        except BaseException:
            with suppress(OSError):
                Path(file.name).unlink()
            raise


def _check_unchanged(path: Path, old_content: bytes | None) -> None:
    if (path.read_bytes() if path.exists() else None) != old_content:
        raise UsageError(f"{path} was changed at the same time; try again")


def _read_hook_entries(text: str, path: Path) -> list[Any]:
    """Return the entries of HOOK_EVENT. Raises UsageError for settings of an unknown form."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not valid JSON, so it was not changed: {error}") from error
    if not isinstance(value, dict):
        raise UsageError(f"{path} is not a JSON object, so it was not changed")
    hooks = value.get("hooks", {})
    entries = hooks.get(HOOK_EVENT, []) if isinstance(hooks, dict) else None
    if not isinstance(entries, list):
        raise UsageError(f"the hooks in {path} have an unknown form, so it was not changed")
    return entries


def _stenolog_commands(entries: list[Any]) -> Iterator[str]:
    for entry in entries:
        hooks = list_or_empty(as_dict(entry).get("hooks"))
        yield from (hook["command"] for hook in hooks if _is_our_hook(hook))


def _is_our_hook(hook: Any) -> bool:
    command = as_text(as_dict(hook).get("command"))
    return f" {HOOK_ARGUMENTS} " in f"{command} "


# --- changes of a JSON text ---------------------------------------------------------------------


class _Item(Struct, frozen=True):
    """Positions of an item in the text. In an object, an item starts with its name."""

    start: int
    value_start: int
    end: int


class _Container:
    """Positions of an object or array, and of its items, in a valid JSON text.

    `outer_space` is the white space before each item of the enclosing object or array.
    """

    def __init__(self, text: str, start: int, outer_space: str = "") -> None:
        self._text = text
        self._start = start
        self._outer_space = outer_space
        self.items: list[_Item] = []
        self.indexes: dict[str | int, int] = {}
        """Index of each item, by name and by index. The last item of the same name counts."""
        position = _skip_space(text, start + 1)
        while text[position] not in "]}":
            item_start = position
            index = len(self.items)
            self.indexes[index] = index
            if text[start] == "{":
                name, position = _decode_json_at(text, position)
                self.indexes[name] = index
                position = _skip_space(text, _skip_space(text, position) + 1)
            value_start = position
            _, position = _decode_json_at(text, position)
            self.items.append(_Item(item_start, value_start, position))
            position = _skip_space(text, position)
            if text[position] == ",":
                position = _skip_space(text, position + 1)
        self._end = position
        if self.items:
            self._leading_space = text[start + 1 : self.items[0].start]
        elif outer_space:
            self._leading_space = outer_space + "  " if "\n" in outer_space else ""
        else:
            self._leading_space = "\n  "

    def container_at(self, name_or_index: str | int) -> "_Container":
        """Return the object or array in an item."""
        item = self.items[self.indexes[name_or_index]]
        return _Container(self._text, item.value_start, self._leading_space)

    def insert(self, value: Any, name: str | None = None) -> str:
        """Return the text with a new item at the end."""
        text, space = self._text, self._leading_space
        is_multiline = "\n" in space
        item_text = json.dumps(value, ensure_ascii=False, indent=2 if is_multiline else None)
        item_text = item_text.replace("\n", space)
        item_text = item_text if name is None else f"{json.dumps(name)}: {item_text}"
        if self.items:
            position = self.items[-1].end
            return f"{text[:position]},{space or ' '}{item_text}{text[position:]}"
        closing_space = self._outer_space or ("\n" if is_multiline else "")
        return f"{text[: self._start + 1]}{space}{item_text}{closing_space}{text[self._end :]}"

    def remove(self, name_or_index: str | int) -> str:
        """Return the text without an item."""
        index = self.indexes[name_or_index]
        if index > 0:
            start, end = self.items[index - 1].end, self.items[index].end
        elif len(self.items) > 1:
            start, end = self.items[0].start, self.items[1].start
        else:
            start, end = self._start + 1, self._end
        return self._text[:start] + self._text[end:]


def _container_at(text: str, *path: str | int) -> _Container:
    """Return the object or array at a path of names and indexes; without a path, the outermost."""
    container = _Container(text, _skip_space(text, 0))
    for name_or_index in path:
        container = container.container_at(name_or_index)
    return container


def _skip_space(text: str, position: int) -> int:
    """Return the next position that is not white space."""
    match = _SPACE.match(text, position)
    return position if match is None else match.end()
