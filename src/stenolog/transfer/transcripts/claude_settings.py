"""Claude Code's `settings.json`: its place, and when Claude Code deletes transcripts."""

import json
import os
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from stenolog.transfer.transcripts.transcript import (
    TranscriptFile,
    TranscriptReader,
    as_dict,
)

MAX_CLEANUP_DAYS: Final = 1_000_000
"""Larger settings count as this number of days, so that dates do not overflow."""
DEFAULT_CLEANUP_DAYS: Final = 30
"""Days after which Claude Code deletes a transcript, unless its settings say otherwise."""


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
