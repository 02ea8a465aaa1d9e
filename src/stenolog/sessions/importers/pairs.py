"""The files of old logs by their names alone: which log and which meta belong together. Pure.

A log may be called what ours is to be called. Then it and its meta get an ending that keeps them
out of the way while they are taken in: `.importing`, or `.importing-2` and so on where the first
name is still taken. A pair has the same ending, but for who was killed between the two renames.
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
    """A log and its meta, as they are called now; one of them may be missing."""

    stem: str
    log: str | None
    meta: str | None


def pairs(names: Set[str]) -> Iterator[Pair]:
    """Every log with its meta, and then each meta that is alone; of one name the oldest first."""
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
    """Whether a file has the ending that keeps it out of the way."""
    return plain_name(name) != name


def plain_name(name: str) -> str:
    """What a file was called before it was set aside."""
    found = _LOG.fullmatch(name) or _META.fullmatch(name)
    return name if found is None else name.removesuffix(found[2])


def ending(name: str) -> str:
    """The ending of a file that was set aside; empty for any other."""
    return name[len(plain_name(name)) :]


def endings() -> Iterator[str]:
    """What a pair may get as an ending, the first that is free."""
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
    """By number; a file that has its own name is the newest."""
    return (not end, int(end.partition("-")[2] or 1))


def _other_half(end: str, loose: list[str]) -> str | None:
    """The ending of a meta that was to have this one."""
    if end:
        return "" if "" in loose else None
    return next((other for other in reversed(loose)), None)
