"""The time zone of the users."""

import os
from datetime import datetime, tzinfo
from pathlib import Path
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from stenolog.errors import UsageError


def zone_of(name: str) -> tzinfo:
    """The zone of this name, as in `Europe/Berlin`; empty: this machine's. Raises UsageError."""
    if not name:
        return _of_machine()
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise UsageError(f"zone {name!r}: there is no such time zone; try Europe/Berlin") from error


def _of_machine() -> tzinfo:
    # An offset alone would be wrong after the clocks were changed.
    named = os.environ.get("TZ", "").removeprefix(":")
    try:
        if named:
            return ZoneInfo(named)
        with Path("/etc/localtime").open("rb") as file:
            return ZoneInfo.from_file(file)
    except (KeyError, OSError, ValueError):
        here = datetime.now().astimezone().tzinfo
        assert here is not None
        return here
