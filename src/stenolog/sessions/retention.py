"""Which sessions are archived, deleted or purged, by rules that somebody switched on. Pure.

Age is counted from what the sessions themselves say of their last change, never from the times of
files. A session in which somebody has the turn is left alone. What a rule deleted and somebody
brought back counts as changed when it was deleted: or it would be gone again within the hour.
For the same reason what was taken in from another program is no older than that. Nothing that is
in use is deleted for good: purging takes what is in the trash, and nothing else. What was to be
spared is spared there, too. A purge that was interrupted is ended by the next one.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final, Literal

from msgspec import Struct
from msgspec.structs import replace

from stenolog.catalog.entries import Entry
from stenolog.records import SessionInfo, Trashed
from stenolog.sessions.merging import TAKEN, receipts

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
        if self.action == "purge":
            return self.older_than is not None and not self.asks_what_nobody_knows
        return bool(self.older_than or self.keep_newest or self.larger_than or self.tag)

    @property
    def asks_what_nobody_knows(self) -> bool:
        """Whether it is about the trash, and asks for more than how old that is, and its keys."""
        return self.action == "purge" and bool(self.keep_newest or self.larger_than or self.tag)


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
    lives: tuple[tuple[str, datetime], ...] = ()
    """Of the trash: every session of this key in it, by its uid and when it was deleted."""
    unfinished: bool = False
    """Whether it was purged before, and that was interrupted."""


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
    """What the rules ask for, archiving first and purging last; for each session one step.

    Where rules ask for different things, the strongest is done. `look` tells more of a session,
    and `tags_of` of a deleted one, None where it cannot be read; they are asked only where a rule
    needs it. `unfinished`: what interrupted purges left.
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
            continue  # as in _fits: an index may know more than was read now
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
    taken_in = _taken_in(info)
    if rule.older_than is not None and taken_in is not None and not _is_old(rule, taken_in, now):
        return False
    if rule.action == "archive":
        return info.floor > info.archived
    if info.lost or info.damaged:
        return False  # somebody may still repair it, and the doctor does not look into the trash
    brought_back = _mark_of(info)
    if brought_back is None:
        return True
    return rule.older_than is not None and _is_old(rule, brought_back, now)


def _mark_of(info: SessionInfo) -> datetime | None:
    return _moment(info.meta.get(MARK))


def _taken_in(info: SessionInfo) -> datetime | None:
    """When it was last taken in from another program; None where it was not.

    What does not tell when counts as just taken in, unless somebody went on with it here.
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
    """A time in a meta, which is anybody's to write; None where it is none."""
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
    """Deleted sessions, by how long ago that was."""
    # A purge takes every life of a key, so all of them must be old, and none be in use or spared.
    kept = {entry.key for entry in entries}
    kept |= {one.key for one in trash if not _is_old(rule, one.deleted, now)}
    if rule.spare:
        meant = [one for one in trash if one.key.startswith(rule.prefix) and one.key not in kept]
        kept |= {one.key for one in meant if _is_spared(rule, tags_of(one))}
    for one in trash:
        if one.key.startswith(rule.prefix) and one.key not in kept:
            yield replace(_purge_of(rule, one), lives=lives_of(one.key, trash))


def _is_spared(rule: Rule, tags: Collection[str] | None) -> bool:
    """What cannot be read may be what somebody wants to keep."""
    return tags is None or rule.spare in tags


def _of_unfinished(rule: Rule, unfinished: Iterable[Trashed]) -> Iterator[Step]:
    """What interrupted purges left, at any age: somebody has decided on it already."""
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


def lives_of(key: str, trash: Iterable[Trashed]) -> tuple[tuple[str, datetime], ...]:
    """Every session of this key in the trash, by its uid and when it was deleted."""
    return tuple(sorted((one.uid, one.deleted) for one in trash if one.key == key))
