"""Which sessions are archived, deleted or purged, by rules that somebody switched on. Pure.

Age is counted from what the sessions themselves say of their last change, never from the times of
files. A session in which somebody has the turn is left alone. What a rule deleted and somebody
brought back counts as changed when it was deleted: or it would be gone again within the hour.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final, Literal

from msgspec import Struct

from stenolog.catalog.entries import Entry
from stenolog.records import SessionInfo, Trashed

Action = Literal["archive", "delete", "purge"]

MARK: Final = "retention"
"""The field of meta with when a rule deleted the session."""
_STRENGTH: Final[Mapping[Action, int]] = {"archive": 0, "delete": 1, "purge": 2}


class Rule(Struct, frozen=True, kw_only=True):
    """What is done with which sessions: with those of which everything that it says is true."""

    name: str
    action: Action = "archive"
    older_than: timedelta | None = None
    """Nobody changed it for so long."""
    keep_newest: int = 0
    """There are so many that were changed later, of those with this prefix and tag; 0: any."""
    larger_than: int = 0
    """Its live storage has more bytes; 0: any."""
    tag: str = ""
    prefix: str = ""
    spare: str = ""
    """Sessions with this tag are left alone."""

    @property
    def says_something(self) -> bool:
        """Whether it says at all which sessions; one that does not takes none."""
        return bool(self.older_than or self.keep_newest or self.larger_than or self.tag)


class Step(Struct, frozen=True, kw_only=True):
    """What is to be done with one session."""

    action: Action
    rule: str
    key: str
    uid: str
    messages: int
    updated: datetime
    """When it was last changed, or deleted where it is in the trash."""
    in_trash: bool = False


def plan(
    entries: Sequence[Entry],
    trash: Sequence[Trashed],
    rules: Sequence[Rule],
    *,
    now: datetime,
    look: Callable[[str], SessionInfo | None],
) -> list[Step]:
    """What the rules ask for, archiving first and purging last; for each session one step.

    Where rules ask for different things, the strongest is done. `look` tells more of a session;
    it is asked only where a rule needs it.
    """
    steps: dict[str, Step] = {}
    for rule in rules:
        for step in _asked_by(rule, entries, trash, now=now, look=look):
            other = steps.get(step.uid)
            if other is None or _STRENGTH[other.action] < _STRENGTH[step.action]:
                steps[step.uid] = step
    return sorted(steps.values(), key=lambda one: (_STRENGTH[one.action], one.updated, one.key))


def _asked_by(
    rule: Rule,
    entries: Sequence[Entry],
    trash: Sequence[Trashed],
    *,
    now: datetime,
    look: Callable[[str], SessionInfo | None],
) -> Iterator[Step]:
    if not rule.says_something:
        return
    meant = [entry for entry in entries if _is_meant(rule, entry)]
    for entry in _beyond(rule, meant):
        if entry.updated is None or entry.state == "running" or rule.spare in entry.tags:
            continue
        if not _is_old(rule, entry.updated, now):
            continue
        info = look(entry.key)
        if info is None or info.uid != entry.uid or not _fits(rule, info, now):
            continue
        yield Step(
            action=rule.action,
            rule=rule.name,
            key=entry.key,
            uid=entry.uid,
            messages=entry.count,
            updated=entry.updated,
        )
    if rule.action == "purge":
        yield from _of_trash(rule, entries, trash, now=now)


def _is_meant(rule: Rule, entry: Entry) -> bool:
    readable = entry.problem is None and entry.updated is not None
    return (
        readable and entry.key.startswith(rule.prefix) and (not rule.tag or rule.tag in entry.tags)
    )


def _beyond(rule: Rule, meant: Iterable[Entry]) -> list[Entry]:
    """All but the newest that are to stay."""
    newest_first = sorted(
        meant, key=lambda entry: (entry.updated or datetime.max.replace(tzinfo=UTC), entry.key)
    )[::-1]
    return newest_first[rule.keep_newest :]


def _is_old(rule: Rule, at: datetime, now: datetime) -> bool:
    return rule.older_than is None or now - at > rule.older_than


def _fits(rule: Rule, info: SessionInfo, now: datetime) -> bool:
    """Whether the rule is right in what only the session itself tells."""
    if rule.larger_than and info.bytes <= rule.larger_than:
        return False
    if rule.action == "archive":
        return info.floor > info.archived
    brought_back = _mark_of(info)
    if brought_back is None:
        return True
    return rule.older_than is not None and _is_old(rule, brought_back, now)


def _mark_of(info: SessionInfo) -> datetime | None:
    told = info.meta.get(MARK)
    try:
        return datetime.fromisoformat(told) if isinstance(told, str) else None
    except ValueError:
        return None


def _of_trash(
    rule: Rule, entries: Sequence[Entry], trash: Sequence[Trashed], *, now: datetime
) -> Iterator[Step]:
    """Deleted sessions, by how long ago that was; their size and tags nobody knows any more."""
    if rule.older_than is None or rule.keep_newest or rule.larger_than or rule.tag:
        return
    # A purge takes every life of a key, so all of them must be old, and none be in use.
    kept = {entry.key for entry in entries}
    kept |= {one.key for one in trash if not _is_old(rule, one.deleted, now)}
    for one in trash:
        if one.key.startswith(rule.prefix) and one.key not in kept:
            yield Step(
                action="purge",
                rule=rule.name,
                key=one.key,
                uid=one.uid,
                messages=one.count,
                updated=one.deleted,
                in_trash=True,
            )
