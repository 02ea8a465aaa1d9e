"""Retention rules decide which sessions are archived, deleted or purged. Pure functions.

The age of a session is the time since its last stored change; file times do not count. A session
with a running turn is left alone. If a user restores a session that a rule deleted, the deletion
counts as the last change. Otherwise the rule would soon delete the session again. For the same
reason an imported session is no older than its import. A purge takes only sessions from the trash,
never sessions in use, and spares tagged sessions in the trash, too. The next purge completes an
interrupted purge.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final, Literal

from msgspec import Struct
from msgspec.structs import replace

from stenolog.catalog.entries import Entry
from stenolog.records import SessionInfo, Trashed
from stenolog.transfer.merge import IMPORT_TIME, import_receipts

Action = Literal["archive", "delete", "purge"]

RETENTION_FIELD: Final = "retention"
"""Meta field with the time at which a rule deleted the session."""
_STRENGTH: Final[Mapping[Action, int]] = {"archive": 0, "delete": 1, "purge": 2}


class Rule(Struct, frozen=True, kw_only=True):
    """An action, and conditions that a session must all meet."""

    name: str
    action: Action = "archive"
    older_than: timedelta | None = None
    """Minimum time since the last change."""
    keep_newest: int = 0
    """Number of newest sessions with this prefix and tag to keep; 0 for no such condition."""
    larger_than: int = 0
    """Minimum size of the live storage in bytes, exclusive; 0 for any size."""
    tag: str = ""
    prefix: str = ""
    exclude_tag: str = ""
    """Sessions with this tag are left alone."""

    @property
    def has_condition(self) -> bool:
        """Whether the rule has a condition; a rule without conditions applies to no session."""
        if self.action == "purge":
            return self.older_than is not None and not self.has_unknown_condition
        return bool(self.older_than or self.keep_newest or self.larger_than or self.tag)

    @property
    def has_unknown_condition(self) -> bool:
        """Whether a purge rule has conditions that are unknown for deleted sessions."""
        return self.action == "purge" and bool(self.keep_newest or self.larger_than or self.tag)


class RetentionStep(Struct, frozen=True, kw_only=True):
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
    """Uid and deletion time of every session of this key in the trash, for a purge."""
    unfinished: bool = False
    """Whether the step completes an interrupted purge."""


def plan_retention(
    entries: Sequence[Entry],
    trash: Sequence[Trashed],
    rules: Sequence[Rule],
    *,
    now: datetime,
    read_info: Callable[[str], SessionInfo | None],
    tags_of: Callable[[Trashed], Collection[str] | None] = lambda _: (),
    unfinished: Sequence[Trashed] = (),
) -> list[RetentionStep]:
    """Return the steps that the rules ask for: archive first, purge last, one step per session.

    If rules ask for different actions, the strongest action wins. `read_info` returns details of a
    session. `tags_of` returns the tags of a deleted session, None if unreadable. Both are called
    only if a rule needs them. `unfinished`: remains of interrupted purges.
    """
    steps: dict[str, RetentionStep] = {}
    for rule in rules:
        steps_of_rule = [
            *_steps_of_rule(rule, entries, trash, now=now, read_info=read_info, tags_of=tags_of)
        ]
        for step in (*steps_of_rule, *_unfinished_steps(rule, unfinished)):
            other = steps.get(step.uid)
            if other is None or _STRENGTH[other.action] < _STRENGTH[step.action]:
                steps[step.uid] = step
    return sorted(steps.values(), key=lambda step: (_STRENGTH[step.action], step.updated, step.key))


def _steps_of_rule(
    rule: Rule,
    entries: Sequence[Entry],
    trash: Sequence[Trashed],
    *,
    now: datetime,
    read_info: Callable[[str], SessionInfo | None],
    tags_of: Callable[[Trashed], Collection[str] | None],
) -> Iterator[RetentionStep]:
    if not rule.has_condition:  # guard: retention-rule-needs-condition
        return
    if rule.action == "purge":
        yield from _trash_steps(rule, entries, trash, now=now, tags_of=tags_of)
        return
    matching = [entry for entry in entries if _matches(rule, entry)]
    for entry in _without_newest(rule, matching):
        if entry.updated is None or entry.state == "running" or rule.exclude_tag in entry.tags:
            continue
        if not _is_old(rule, entry.updated, now):
            continue
        info = read_info(entry.key)
        if info is None or info.uid != entry.uid or not _applies(rule, info, now):
            continue
        if rule.action == "delete" and (entry.lost or entry.damaged):
            continue  # as in _fits: the catalog may know of more damage than this read found
        yield RetentionStep(
            action=rule.action,
            rule=rule.name,
            key=entry.key,
            uid=entry.uid,
            messages=entry.count,
            updated=entry.updated,
        )


def _matches(rule: Rule, entry: Entry) -> bool:
    readable = entry.problem is None and entry.updated is not None
    return (
        readable and entry.key.startswith(rule.prefix) and (not rule.tag or rule.tag in entry.tags)
    )


def _without_newest(rule: Rule, matching: Iterable[Entry]) -> list[Entry]:
    """Return all but the newest sessions, which are kept."""
    newest_first = sorted(
        matching, key=lambda entry: (entry.updated or datetime.max.replace(tzinfo=UTC), entry.key)
    )[::-1]
    return newest_first[rule.keep_newest :]


def _is_old(rule: Rule, at: datetime, now: datetime) -> bool:
    return rule.older_than is None or now - at > rule.older_than


def _applies(rule: Rule, info: SessionInfo, now: datetime) -> bool:
    """Return whether the rule applies, by data that only the session itself has."""
    if rule.larger_than and info.bytes <= rule.larger_than:
        return False
    imported_at = _last_import(info)
    if (
        rule.older_than is not None
        and imported_at is not None
        and not _is_old(rule, imported_at, now)
    ):
        return False
    if rule.action == "archive":
        return info.floor > info.archived
    if info.lost or info.damaged:
        return False  # a damaged session may still be repaired, but not in the trash
    restored_at = _deleted_by_rule(info)
    if restored_at is None:
        return True
    return rule.older_than is not None and _is_old(rule, restored_at, now)


def _deleted_by_rule(info: SessionInfo) -> datetime | None:
    return _parse_time(info.meta.get(RETENTION_FIELD))


def _last_import(info: SessionInfo) -> datetime | None:
    """Return the time of the last import into the session; None without an import.

    An import without a time counts as just made, unless the session has new messages since.
    """
    times = []
    for receipt in import_receipts(info.meta):
        at = _parse_time(receipt.get(IMPORT_TIME))
        if at is not None:
            times.append(at)
        elif receipt.get("last_seq") == info.last_seq:
            times.append(datetime.max.replace(tzinfo=UTC))
    return max(times, default=None)


def _parse_time(value: object) -> datetime | None:
    """Return a time from the meta, which any program may write; None if it is invalid."""
    try:
        at = datetime.fromisoformat(value) if isinstance(value, str) else None
    except ValueError:
        return None
    return at if at is None or at.utcoffset() is not None else at.replace(tzinfo=UTC)


def _trash_steps(
    rule: Rule,
    entries: Sequence[Entry],
    trash: Sequence[Trashed],
    *,
    now: datetime,
    tags_of: Callable[[Trashed], Collection[str] | None],
) -> Iterator[RetentionStep]:
    """Yield purges of deleted sessions, by the time of their deletion."""
    # A purge takes all deleted sessions of a key: all must be old, and no session may be in use or
    # spared.
    kept_keys = {item.key for item in entries}
    kept_keys |= {item.key for item in trash if not _is_old(rule, item.deleted, now)}
    if rule.exclude_tag:
        matching = [
            item for item in trash if item.key.startswith(rule.prefix) and item.key not in kept_keys
        ]
        kept_keys |= {item.key for item in matching if _is_spared(rule, tags_of(item))}
    for item in trash:
        if item.key.startswith(rule.prefix) and item.key not in kept_keys:
            yield replace(_purge_step(rule, item), trash_entries=trash_entries(item.key, trash))


def _is_spared(rule: Rule, tags: Collection[str] | None) -> bool:
    """Return whether a deleted session is spared.

    An unreadable session is spared, because it may be worth keeping.
    """
    return tags is None or rule.exclude_tag in tags


def _unfinished_steps(rule: Rule, unfinished: Iterable[Trashed]) -> Iterator[RetentionStep]:
    """Yield steps that complete interrupted purges at any age, as a rule already decided."""
    if rule.action != "purge" or not rule.has_condition:
        return
    for session in unfinished:
        if not session.key or session.key.startswith(rule.prefix):
            yield replace(_purge_step(rule, session), unfinished=True)


def _purge_step(rule: Rule, entry: Trashed) -> RetentionStep:
    return RetentionStep(
        action="purge",
        rule=rule.name,
        key=entry.key,
        uid=entry.uid,
        messages=entry.count,
        updated=entry.deleted,
        in_trash=True,
    )


def trash_entries(key: str, trash: Iterable[Trashed]) -> tuple[tuple[str, datetime], ...]:
    """Return uid and time of deletion of every session of this key in the trash."""
    return tuple(sorted((entry.uid, entry.deleted) for entry in trash if entry.key == key))
