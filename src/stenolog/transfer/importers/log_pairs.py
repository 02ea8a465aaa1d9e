"""Names of the files of old logs: which log and which meta file belong together. Pure.

An old log may have the name that our log needs. During the import it and its meta file then get a
different ending: `.importing`, or `.importing-2` and so on if the first name is taken. Both files
of a pair have the same ending, unless the import was killed between the two renames.
"""

import re
from collections.abc import Iterator, Set
from typing import Final

from msgspec import Struct

from stenolog.stores.json_file import META_SUFFIX

LOG_SUFFIX: Final = ".jsonl"
IMPORTING: Final = ".importing"
MIGRATED: Final = ".migrated"

_LOG: Final = re.compile(rf"(.*)\.jsonl((?:{re.escape(IMPORTING)}(?:-\d+)?)?)", re.DOTALL)
_META: Final = re.compile(rf"(.*)\.meta\.json((?:{re.escape(IMPORTING)}(?:-\d+)?)?)", re.DOTALL)
_MIGRATED_META: Final = re.compile(rf"(.*)\.meta\.json({re.escape(MIGRATED)}(?:-\d+)?)", re.DOTALL)


class Pair(Struct, frozen=True):
    """The current names of a log and its meta file; one of them may be missing."""

    stem: str
    log: str | None
    meta: str | None


def pairs(names: Set[str]) -> Iterator[Pair]:
    """Yield every log with its meta file, then meta files without a log; oldest endings first."""
    logs, metas, migrated = (_endings(names, which) for which in (_LOG, _META, _MIGRATED_META))
    for stem in sorted({*logs, *metas}):
        mine, beside = logs.get(stem, []), metas.get(stem, [])
        loose = [end for end in beside if end not in mine]
        for end in mine:
            meta = end if end in beside else _other_half(end, loose)
            if meta in loose:
                loose.remove(meta)
            if meta is None and stem in migrated:
                meta = migrated[stem][-1]
            name = None if meta is None else stem + META_SUFFIX + meta
            yield Pair(stem, stem + LOG_SUFFIX + end, name)
        for end in loose:
            yield Pair(stem, None, stem + META_SUFFIX + end)


def is_aside(name: str) -> bool:
    """Return whether a file has an ending of a running import."""
    return plain_name(name) != name


def plain_name(name: str) -> str:
    """Return the name that a file had before the import renamed it."""
    found = _LOG.fullmatch(name) or _META.fullmatch(name)
    return name if found is None else name.removesuffix(found[2])


def ending(name: str) -> str:
    """Return the ending of a file that the import renamed; empty for any other."""
    return name[len(plain_name(name)) :]


def endings() -> Iterator[str]:
    """Yield the endings that a pair may get, in order of preference."""
    yield IMPORTING
    number = 1
    while True:
        number += 1
        yield f"{IMPORTING}-{number}"


def _endings(names: Set[str], which: re.Pattern[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name in names:
        if match := which.fullmatch(name):
            found.setdefault(match[1], []).append(match[2])
    return {stem: sorted(ends, key=_age) for stem, ends in found.items()}


def _age(end: str) -> tuple[bool, int]:
    """Return a sort key by number; a file with its original name is the newest."""
    return (not end, int(end.partition("-")[2] or 1))


def _other_half(end: str, loose: list[str]) -> str | None:
    """Return the ending of the meta file that belongs to a log with this ending."""
    if end:
        return "" if "" in loose else None
    return next((other for other in reversed(loose)), None)
