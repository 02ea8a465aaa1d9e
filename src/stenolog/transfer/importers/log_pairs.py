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


class LogPair(Struct, frozen=True):
    """The current names of a log and its meta file; one of them may be missing."""

    stem: str
    log: str | None
    meta: str | None


def find_pairs(names: Set[str]) -> Iterator[LogPair]:
    """Yield every log with its meta file, then meta files without a log; oldest endings first."""
    logs, metas, migrated = (
        _suffixes_by_stem(names, which) for which in (_LOG, _META, _MIGRATED_META)
    )
    for stem in sorted({*logs, *metas}):
        log_suffixes, meta_suffixes = logs.get(stem, []), metas.get(stem, [])
        unpaired = [suffix for suffix in meta_suffixes if suffix not in log_suffixes]
        for suffix in log_suffixes:
            meta = suffix if suffix in meta_suffixes else _matching_meta_suffix(suffix, unpaired)
            if meta in unpaired:
                unpaired.remove(meta)
            if meta is None and stem in migrated:
                meta = migrated[stem][-1]
            name = None if meta is None else stem + META_SUFFIX + meta
            yield LogPair(stem, stem + LOG_SUFFIX + suffix, name)
        for suffix in unpaired:
            yield LogPair(stem, None, stem + META_SUFFIX + suffix)


def has_import_suffix(name: str) -> bool:
    """Return whether a file has an ending of a running import."""
    return original_name(name) != name


def original_name(name: str) -> str:
    """Return the name that a file had before the import renamed it."""
    found = _LOG.fullmatch(name) or _META.fullmatch(name)
    return name if found is None else name.removesuffix(found[2])


def import_suffix(name: str) -> str:
    """Return the ending of a file that the import renamed; empty for any other."""
    return name[len(original_name(name)) :]


def import_suffixes() -> Iterator[str]:
    """Yield the endings that a pair may get, in order of preference."""
    yield IMPORTING
    number = 1
    while True:
        number += 1
        yield f"{IMPORTING}-{number}"


def _suffixes_by_stem(names: Set[str], which: re.Pattern[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name in names:
        if match := which.fullmatch(name):
            found.setdefault(match[1], []).append(match[2])
    return {stem: sorted(suffixes, key=_suffix_age) for stem, suffixes in found.items()}


def _suffix_age(suffix: str) -> tuple[bool, int]:
    """Return a sort key by number; a file with its original name is the newest."""
    return (not suffix, int(suffix.partition("-")[2] or 1))


def _matching_meta_suffix(suffix: str, unpaired: list[str]) -> str | None:
    """Return the ending of the meta file that belongs to a log with this ending."""
    if suffix:
        return "" if "" in unpaired else None
    return next((other for other in reversed(unpaired)), None)
