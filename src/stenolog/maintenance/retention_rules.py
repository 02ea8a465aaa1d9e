"""Retention rules: which sessions are archived, deleted or purged. Pure.

Age is counted from the sessions' own time of the last change, never from file times. A session with
a running turn is left alone. A session that a rule deleted and a user restored counts as changed
when it was deleted; otherwise the rule would soon delete it again. For the same reason an imported
session is no older than its import. Sessions in use are never purged: a purge only takes sessions
from the trash, and spares tagged ones there too. The next purge completes an interrupted one.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final, Literal

from msgspec import Struct
from msgspec.structs import replace

from stenolog.catalog.entries import Entry
from stenolog.records import SessionInfo, Trashed
from stenolog.transfer.merge import TAKEN, receipts

Action = Literal["archive", "delete", "purge"]

MARK: Final = "retention"
"""Meta field with the time at which a rule deleted the session."""
_STRENGTH: Final[Mapping[Action, int]] = {"archive": 0, "delete": 1, "purge": 2}


class Rule(Struct, frozen=True, kw_only=True):
    """An action, and conditions that a session must all meet."""

    name: str
    action: Action = "archive"
    older_than: timedelta | None = None
    """Minimum time since the last change."""
    keep_newest: int = 0
    """Number of the newest sessions with this prefix and tag to keep; 0: no condition."""
    larger_than: int = 0
    """Minimum size of the live storage in bytes, exclusive; 0: any size."""
    tag: str = ""
    prefix: str = ""
    spare: str = ""
    """Sessions with this tag are left alone."""

    @property
    def says_something(self) -> bool:
        """Whether the rule has a condition; a rule without one applies to no session."""
        if self.action == "purge":
            return self.older_than is not None and not self.asks_what_nobody_knows
        return bool(self.older_than or self.keep_newest or self.larger_than or self.tag)

    @property
    def asks_what_nobody_knows(self) -> bool:
        """Whether a purge rule has conditions that are unknown for deleted sessions."""
        return self.action == "purge" and bool(self.keep_newest or self.larger_than or self.tag)


class Step(Struct, frozen=True, kw_only=True):
    """An action on one session."""

    action: Action
    rule: str
    key: str
    uid: str
    messages: int
    updated: datetime
    """Time of the last change, or of the deletion if the session is in the trash."""
    in_trash: bool = False
    trash_entries: tuple[tuple[str, datetime], ...] = ()
    """For the trash: uid and time of deletion of every session of this key in it."""
    unfinished: bool = False
    """Whether it completes an interrupted purge."""


def plan(
    entries: Sequence[Entry],
    trash: Sequence[Trashed],
    rules: Sequence[Rule],
    *,
    now: datetime,
    look: Callable[[str], SessionInfo | None],
    tags_of: Callable[[Trashed], Collection[str] | None] = lambda _: (),
    unfinished: Sequence[Trashed] = (),
) -> list[Step]:
    """Return the steps that the rules ask for: archive first, purge last, one step per session.

    If rules ask for different actions, the strongest one wins. `look` returns details of a session,
    and `tags_of` the tags of a deleted one, None if unreadable; they are called only if a rule
    needs it. `unfinished`: remains of interrupted purges.
    """
    steps: dict[str, Step] = {}
    for rule in rules:
        asked = [*_asked_by(rule, entries, trash, now=now, look=look, tags_of=tags_of)]
        for step in (*asked, *_of_unfinished(rule, unfinished)):
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
    tags_of: Callable[[Trashed], Collection[str] | None],
) -> Iterator[Step]:
    if not rule.says_something:  # guard: retention-rule-needs-condition
        return
    if rule.action == "purge":
        yield from _of_trash(rule, entries, trash, now=now, tags_of=tags_of)
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
        if rule.action == "delete" and (entry.lost or entry.damaged):
            continue  # as in _fits: the catalog may know of more damage than this read found
        yield Step(
            action=rule.action,
            rule=rule.name,
            key=entry.key,
            uid=entry.uid,
            messages=entry.count,
            updated=entry.updated,
        )


def _is_meant(rule: Rule, entry: Entry) -> bool:
    readable = entry.problem is None and entry.updated is not None
    return (
        readable and entry.key.startswith(rule.prefix) and (not rule.tag or rule.tag in entry.tags)
    )


def _beyond(rule: Rule, meant: Iterable[Entry]) -> list[Entry]:
    """Return all but the newest sessions, which are kept."""
    newest_first = sorted(
        meant, key=lambda entry: (entry.updated or datetime.max.replace(tzinfo=UTC), entry.key)
    )[::-1]
    return newest_first[rule.keep_newest :]


def _is_old(rule: Rule, at: datetime, now: datetime) -> bool:
    return rule.older_than is None or now - at > rule.older_than


def _fits(rule: Rule, info: SessionInfo, now: datetime) -> bool:
    """Return whether the rule applies, by data that only the session itself has."""
    if rule.larger_than and info.bytes <= rule.larger_than:
        return False
    taken_in = _taken_in(info)
    if rule.older_than is not None and taken_in is not None and not _is_old(rule, taken_in, now):
        return False
    if rule.action == "archive":
        return info.floor > info.archived
    if info.lost or info.damaged:
        return False  # it may still be repaired, and the doctor does not examine the trash
    brought_back = _mark_of(info)
    if brought_back is None:
        return True
    return rule.older_than is not None and _is_old(rule, brought_back, now)


def _mark_of(info: SessionInfo) -> datetime | None:
    return _moment(info.meta.get(MARK))


def _taken_in(info: SessionInfo) -> datetime | None:
    """Return the time of the last import into the session; None if there was none.

    An import without a time counts as just made, unless the session has new messages since.
    """
    times = []
    for receipt in receipts(info.meta):
        at = _moment(receipt.get(TAKEN))
        if at is not None:
            times.append(at)
        elif receipt.get("last_seq") == info.last_seq:
            times.append(datetime.max.replace(tzinfo=UTC))
    return max(times, default=None)


def _moment(told: object) -> datetime | None:
    """Return a time from the meta, which any program may write; None if it is invalid."""
    try:
        at = datetime.fromisoformat(told) if isinstance(told, str) else None
    except ValueError:
        return None
    return at if at is None or at.utcoffset() is not None else at.replace(tzinfo=UTC)


def _of_trash(
    rule: Rule,
    entries: Sequence[Entry],
    trash: Sequence[Trashed],
    *,
    now: datetime,
    tags_of: Callable[[Trashed], Collection[str] | None],
) -> Iterator[Step]:
    """Yield purges of deleted sessions, by the time of their deletion."""
    # A purge takes all deleted sessions of a key: all must be old, and none in use or spared.
    kept = {entry.key for entry in entries}
    kept |= {one.key for one in trash if not _is_old(rule, one.deleted, now)}
    if rule.spare:
        meant = [one for one in trash if one.key.startswith(rule.prefix) and one.key not in kept]
        kept |= {one.key for one in meant if _is_spared(rule, tags_of(one))}
    for one in trash:
        if one.key.startswith(rule.prefix) and one.key not in kept:
            yield replace(_purge_of(rule, one), trash_entries=trash_entries(one.key, trash))


def _is_spared(rule: Rule, tags: Collection[str] | None) -> bool:
    """Return whether a deleted session is spared. An unreadable one may be worth keeping."""
    return tags is None or rule.spare in tags


def _of_unfinished(rule: Rule, unfinished: Iterable[Trashed]) -> Iterator[Step]:
    """Yield steps that complete interrupted purges, at any age: they were already decided."""
    if rule.action != "purge" or not rule.says_something:
        return
    for one in unfinished:
        if not one.key or one.key.startswith(rule.prefix):
            yield replace(_purge_of(rule, one), unfinished=True)


def _purge_of(rule: Rule, one: Trashed) -> Step:
    return Step(
        action="purge",
        rule=rule.name,
        key=one.key,
        uid=one.uid,
        messages=one.count,
        updated=one.deleted,
        in_trash=True,
    )


def trash_entries(key: str, trash: Iterable[Trashed]) -> tuple[tuple[str, datetime], ...]:
    """Return uid and time of deletion of every session of this key in the trash."""
    return tuple(sorted((one.uid, one.deleted) for one in trash if one.key == key))
