"""Claude Code's `settings.json`: when transcripts are deleted, and the hook that imports sessions.

Changes are made in the text, so that the rest of the file stays as it is, byte for byte.
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

EVENT: Final = "SessionEnd"
HOOK_ARGUMENTS: Final = "hook run claude-code"
"""Arguments of `steno` by which its hook is recognized, also after stenolog has moved."""
MAX_DAYS: Final = 1_000_000
DEFAULT_DAYS: Final = 30
"""Days after which Claude Code deletes a transcript, unless its settings name another number."""
_SPACE: Final = re.compile(r"[ \t\r\n]*")
_scan: Final = JSONDecoder().raw_decode


def settings_file() -> Path:
    """Return the path of the user's settings; the file may be missing."""
    home = os.environ.get("CLAUDE_CONFIG_DIR")
    return (Path(home) if home else Path.home() / ".claude") / "settings.json"


def cleanup_days(path: Path) -> int:
    """Return after how many days without a change Claude Code deletes a transcript."""
    try:
        found = as_dict(json.loads(path.read_text("utf-8-sig"))).get("cleanupPeriodDays")
    except (OSError, ValueError, RecursionError):
        return DEFAULT_DAYS
    if not isinstance(found, int) or isinstance(found, bool) or found < 0:
        return DEFAULT_DAYS
    return found


def expiring_transcripts(
    reader: TranscriptReader, now: datetime, *, within: timedelta
) -> list[tuple[datetime, TranscriptFile]]:
    """Return the transcripts that Claude Code deletes soon, with the time, the first one first."""
    folder = reader.default_folder()
    if folder is None:
        return []
    age = timedelta(days=min(cleanup_days(settings_file()), MAX_DAYS))
    found = []
    for file in reader.find(folder):
        end = datetime.fromtimestamp(file.modified / 1e9, UTC) + age
        if end <= now + within:
            found.append((end, file))
    return sorted(found, key=lambda one: (one[0], one[1].key))


def has_hook() -> bool:
    """Return whether sessions are imported when they end."""
    path = settings_file()
    try:
        return any(_own_commands(_entries(path.read_text("utf-8"), path)))
    except (OSError, UnicodeDecodeError, UsageError):
        return False


def with_hook(text: str, command: str, path: Path) -> str:
    """Return the settings with the hook. Raises UsageError if they are not valid."""
    if list(_own_commands(_entries(text, path))) == [command]:
        return text
    text = without_hook(text, path)
    entry = {"hooks": [{"type": "command", "command": command}]}
    top = _Container(text, _skip(text, 0))
    hooks = top.inner(text, "hooks")
    listed = None if hooks is None else hooks.inner(text, EVENT)
    if hooks is None:
        return top.insert(text, {EVENT: [entry]}, "hooks")
    if listed is None:
        return hooks.insert(text, [entry], EVENT)
    return listed.insert(text, entry)


def without_hook(text: str, path: Path) -> str:
    """Return the settings without the hook. Raises UsageError if they are not valid."""
    while True:
        entries = _entries(text, path)
        number = next((n for n, one in enumerate(entries) if any(_own_commands([one]))), None)
        if number is None:
            return text
        top = _Container(text, _skip(text, 0))
        hooks = top.inner(text, "hooks")
        listed = None if hooks is None else hooks.inner(text, EVENT)
        assert hooks is not None, "an entry was found in it"
        assert listed is not None, "an entry was found in it"
        commands = entries[number]["hooks"]
        if len(commands) > 1:
            # The user added more commands to the entry: only ours is removed.
            array = listed.inner(text, number)
            array = None if array is None else array.inner(text, "hooks")
            assert array is not None, "its commands were found"
            text = array.remove(text, next(n for n, one in enumerate(commands) if _is_own(one)))
        elif len(entries) > 1:
            text = listed.remove(text, number)
        elif len(hooks.items) > 1:
            text = hooks.remove(text, hooks.members[EVENT])
        else:
            text = top.remove(text, top.members["hooks"])


def replace_settings(path: Path, before: bytes | None, text: str) -> None:
    """Write the settings by replacing the file; its mode stays.

    Raises OSError, and UsageError if the file is no longer `before`.
    """
    target = path.resolve()  # a link to the file stays a link
    mode = 0o600 if before is None else target.stat().st_mode & 0o7777
    with NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}.", delete=False) as file:
        try:
            file.write(text.encode())
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
            _check_unchanged(target, before)
            Path(file.name).replace(target)
        except BaseException:
            with suppress(OSError):
                Path(file.name).unlink()
            raise


def _check_unchanged(path: Path, before: bytes | None) -> None:
    if (path.read_bytes() if path.exists() else None) != before:
        raise UsageError(f"{path} was changed at the same time; try again")


def _entries(text: str, path: Path) -> list[Any]:
    """Return the hooks of the event. Raises UsageError for settings of an unknown form."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not valid JSON, so it was not changed: {error}") from error
    if not isinstance(value, dict):
        raise UsageError(f"{path} is not a JSON object, so it was not changed")
    hooks = value.get("hooks", {})
    entries = hooks.get(EVENT, []) if isinstance(hooks, dict) else None
    if not isinstance(entries, list):
        raise UsageError(f"the hooks in {path} have an unknown form, so it was not changed")
    return entries


def _own_commands(entries: list[Any]) -> Iterator[str]:
    for entry in entries:
        commands = as_dict(entry).get("hooks")
        for one in commands if isinstance(commands, list) else ():
            if _is_own(one):
                yield one["command"]


def _is_own(hook: Any) -> bool:
    command = as_text(as_dict(hook).get("command"))
    return f" {HOOK_ARGUMENTS} " in f"{command} "


# --- changes of a JSON text ---------------------------------------------------------------------


class _Item(Struct, frozen=True):
    """Positions of an item in the text. `start`: of its name, in an object."""

    start: int
    value: int
    end: int


class _Container:
    """Positions of an object or array, and of its items, in a valid JSON text."""

    def __init__(self, text: str, start: int, outer: str = "") -> None:
        self._start = start
        self._outer = outer
        self.items: list[_Item] = []
        self.members: dict[str, int] = {}
        """Number of the item of each name. As in JSON, the last item of a name counts."""
        place = _skip(text, start + 1)
        while text[place] not in "]}":
            first, name = place, None
            if text[start] == "{":
                name, place = _scan(text, place)
                place = _skip(text, _skip(text, place) + 1)
            value = place
            _, place = _scan(text, place)
            if name is not None:
                self.members[name] = len(self.items)
            self.items.append(_Item(first, value, place))
            place = _skip(text, place)
            if text[place] == ",":
                place = _skip(text, place + 1)
        self._end = place
        self._lead = self._find_lead(text)

    def _find_lead(self, text: str) -> str:
        """Return the white space before an item."""
        if self.items:
            return text[self._start + 1 : self.items[0].start]
        if not self._outer:
            return "\n  "
        return self._outer + "  " if "\n" in self._outer else ""

    def inner(self, text: str, which: str | int) -> "_Container | None":
        """Return the container that is the value of an item; None if there is no such item."""
        number = self.members.get(which) if isinstance(which, str) else which
        return None if number is None else _Container(text, self.items[number].value, self._lead)

    def insert(self, text: str, value: Any, name: str | None = None) -> str:
        """Return the text with a new item at the end."""
        in_lines = "\n" in self._lead
        new = json.dumps(value, ensure_ascii=False, indent=2 if in_lines else None)
        new = new.replace("\n", self._lead)
        new = new if name is None else f"{json.dumps(name)}: {new}"
        if self.items:
            place = self.items[-1].end
            return f"{text[:place]},{self._lead or ' '}{new}{text[place:]}"
        closing = self._outer or ("\n" if in_lines else "")
        return f"{text[: self._start + 1]}{self._lead}{new}{closing}{text[self._end :]}"

    def remove(self, text: str, number: int) -> str:
        """Return the text without an item."""
        if number > 0:
            start, end = self.items[number - 1].end, self.items[number].end
        elif len(self.items) > 1:
            start, end = self.items[0].start, self.items[1].start
        else:
            start, end = self._start + 1, self._end
        return text[:start] + text[end:]


def _skip(text: str, place: int) -> int:
    """Return the next position that is not white space."""
    found = _SPACE.match(text, place)
    return place if found is None else found.end()
