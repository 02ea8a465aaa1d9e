"""Whole JSON files: picoclaw's older sessions, and those that our SessionManager wrote."""

from datetime import datetime
from typing import Final

from stenolog.sessions.importers.old import OldSession, dated
from stenolog.stores import json_file

FIELDS: Final = ("key", "summary", "created", "updated", "stenolog")
"""What stands there beside the messages."""


def read(text: bytes, *, name: str, changed: datetime) -> OldSession:
    """The session in a file of this name, last changed then. Raises NotASession."""
    kept = json_file.parse(text)
    stem = name.removesuffix(json_file.SUFFIX)
    created = kept.created or kept.updated or changed
    updated = kept.updated or changed
    return OldSession(
        layout="stenolog-json" if kept.ours else "picoclaw-legacy",
        key=kept.key or stem,
        messages=dated(kept.messages, created, updated),
        summary=kept.summary,
        began_with=kept.began_with,
        aliases=() if kept.ours or kept.key in (None, stem) else (stem,),
        created=created,
        updated=updated,
        dropped=kept.dropped,
        problems=kept.problems,
    )
