"""Times as other programs write them: as text, in seconds, or as the clock on the wall showed."""

from datetime import UTC, datetime, timedelta
from typing import Any

from stenolog.stores.json_file import NO_TIME, time_of


def moment(value: Any) -> datetime | None:
    """A time as text (ISO 8601) or in seconds since 1970; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return time_of(value)
    try:
        found = datetime.fromtimestamp(0, UTC) + timedelta(seconds=value)
    except (OverflowError, ValueError):
        return None
    return found if found > NO_TIME else None


def local_time(text: Any) -> datetime | None:
    """A time as text; one without an offset is that of this machine's clock."""
    if not isinstance(text, str):
        return None
    try:
        found = datetime.fromisoformat(text).astimezone(UTC)
    except (ValueError, OverflowError, OSError):
        return None
    return found if found > NO_TIME else None
