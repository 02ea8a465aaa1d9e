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
)

HOOK_EVENT: Final = "SessionEnd"
HOOK_ARGUMENTS: Final = "hook run claude-code"
"""Arguments by which the hook is recognized, even if the path of `steno` has changed."""
MAX_DAYS: Final = 1_000_000
DEFAULT_DAYS: Final = 30
"""Days after which Claude Code deletes a transcript, unless its settings name another number."""
_SPACE: Final = re.compile(r"[ \t\r\n]*")
_decode_json_at: Final = JSONDecoder().raw_decode


def settings_file() -> Path:
    """Return the path of the user's settings; the file may be missing."""
    home = os.environ.get("CLAUDE_CONFIG_DIR")
    return (Path(home) if home else Path.home() / ".claude") / "settings.json"


def cleanup_days(path: Path) -> int:
    """Return the number of unchanged days after which Claude Code deletes a transcript."""
    try:
        days = as_dict(json.loads(path.read_text("utf-8-sig"))).get("cleanupPeriodDays")
    except (OSError, ValueError, RecursionError):
        return DEFAULT_DAYS
    if not isinstance(days, int) or isinstance(days, bool) or days < 0:
        return DEFAULT_DAYS
    return days


def expiring_transcripts(
    reader: TranscriptReader, now: datetime, *, within: timedelta
) -> list[tuple[datetime, TranscriptFile]]:
    """Return the transcripts that Claude Code deletes soon, by the time of their deletion."""
    folder = reader.default_folder()
    if folder is None:
        return []
    max_age = timedelta(days=min(cleanup_days(settings_file()), MAX_DAYS))
    expiring_files = []
    with suppress(PermissionError):
        for file in reader.find(folder):
            deleted_at = datetime.fromtimestamp(file.modified / 1e9, UTC) + max_age
            if deleted_at <= now + within:
                expiring_files.append((deleted_at, file))
    return sorted(expiring_files, key=lambda pair: (pair[0], pair[1].key))


def has_hook() -> bool:
    """Return whether the settings have the hook that imports sessions when they end."""
    path = settings_file()
    try:
        return any(_stenolog_commands(_hook_entries(path.read_text("utf-8"), path)))
    except (OSError, UnicodeDecodeError, UsageError):
        return False


def add_hook(text: str, command: str, path: Path) -> str:
    """Return the settings with the hook. Raises UsageError if the settings are invalid."""
    if list(_stenolog_commands(_hook_entries(text, path))) == [command]:
        return text
    text = remove_hook(text, path)
    entry = {"hooks": [{"type": "command", "command": command}]}
    settings = _Container(text, _skip_space(text, 0))
    hooks = settings.container_at(text, "hooks")
    event_hooks = None if hooks is None else hooks.container_at(text, HOOK_EVENT)
    if hooks is None:
        return settings.insert(text, {HOOK_EVENT: [entry]}, "hooks")
    if event_hooks is None:
        return hooks.insert(text, [entry], HOOK_EVENT)
    return event_hooks.insert(text, entry)


def remove_hook(text: str, path: Path) -> str:
    """Return the settings without the hook. Raises UsageError if the settings are invalid."""
    while True:
        entries = _hook_entries(text, path)
        entry_index = next(
            (index for index, entry in enumerate(entries) if any(_stenolog_commands([entry]))), None
        )
        if entry_index is None:
            return text
        settings = _Container(text, _skip_space(text, 0))
        hooks = settings.container_at(text, "hooks")
        event_hooks = None if hooks is None else hooks.container_at(text, HOOK_EVENT)
        assert hooks is not None, "an entry was found in it"
        assert event_hooks is not None, "an entry was found in it"
        commands = entries[entry_index]["hooks"]
        if len(commands) > 1:
            # The user added other commands to the entry. Only the command of stenolog is removed.
            array = event_hooks.container_at(text, entry_index)
            array = None if array is None else array.container_at(text, "hooks")
            assert array is not None, "its commands were found"
            text = array.remove(
                text, next(index for index, entry in enumerate(commands) if _is_our_hook(entry))
            )
        elif len(entries) > 1:
            text = event_hooks.remove(text, entry_index)
        elif len(hooks.items) > 1:
            text = hooks.remove(text, hooks.members[HOOK_EVENT])
        else:
            text = settings.remove(text, settings.members["hooks"])


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


def _hook_entries(text: str, path: Path) -> list[Any]:
    """Return the hooks of the event. Raises UsageError for settings of an unknown form."""
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
        commands = as_dict(entry).get("hooks")
        for hook in commands if isinstance(commands, list) else ():
            if _is_our_hook(hook):
                yield hook["command"]


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
    """Positions of an object or array, and of its items, in a valid JSON text."""

    def __init__(self, text: str, start: int, outer_space: str = "") -> None:
        self._start = start
        self._outer_space = outer_space
        self.items: list[_Item] = []
        self.members: dict[str, int] = {}
        """Index of each item, by name. If a name occurs twice, the last item counts."""
        position = _skip_space(text, start + 1)
        while text[position] not in "]}":
            item_start, name = position, None
            if text[start] == "{":
                name, position = _decode_json_at(text, position)
                position = _skip_space(text, _skip_space(text, position) + 1)
            value_start = position
            _, position = _decode_json_at(text, position)
            if name is not None:
                self.members[name] = len(self.items)
            self.items.append(_Item(item_start, value_start, position))
            position = _skip_space(text, position)
            if text[position] == ",":
                position = _skip_space(text, position + 1)
        self._end = position
        self._lead = self._find_leading_space(text)

    def _find_leading_space(self, text: str) -> str:
        """Return the white space before an item."""
        if self.items:
            return text[self._start + 1 : self.items[0].start]
        if not self._outer_space:
            return "\n  "
        return self._outer_space + "  " if "\n" in self._outer_space else ""

    def container_at(self, text: str, name_or_index: str | int) -> "_Container | None":
        """Return the object or array in an item; None if there is no item of this name."""
        number = (
            self.members.get(name_or_index) if isinstance(name_or_index, str) else name_or_index
        )
        return (
            None if number is None else _Container(text, self.items[number].value_start, self._lead)
        )

    def insert(self, text: str, value: Any, name: str | None = None) -> str:
        """Return the text with a new item at the end."""
        is_multiline = "\n" in self._lead
        item_text = json.dumps(value, ensure_ascii=False, indent=2 if is_multiline else None)
        item_text = item_text.replace("\n", self._lead)
        item_text = item_text if name is None else f"{json.dumps(name)}: {item_text}"
        if self.items:
            position = self.items[-1].end
            return f"{text[:position]},{self._lead or ' '}{item_text}{text[position:]}"
        closing_space = self._outer_space or ("\n" if is_multiline else "")
        return f"{text[: self._start + 1]}{self._lead}{item_text}{closing_space}{text[self._end :]}"

    def remove(self, text: str, number: int) -> str:
        """Return the text without an item."""
        if number > 0:
            start, end = self.items[number - 1].end, self.items[number].end
        elif len(self.items) > 1:
            start, end = self.items[0].start, self.items[1].start
        else:
            start, end = self._start + 1, self._end
        return text[:start] + text[end:]


def _skip_space(text: str, position: int) -> int:
    """Return the next position that is not white space."""
    match = _SPACE.match(text, position)
    return position if match is None else match.end()
