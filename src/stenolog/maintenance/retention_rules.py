"""Retention rules decide which sessions are archived, deleted or purged.

The age of a session is the time since its last stored change; file times do not count. Rules do not
apply to a session with a running turn. If a user restores a session, the restoration counts as the
last change, so that no rule deletes the session again at once; a rule without `older_than` never
deletes it again. An imported session is no older than its import. Purge rules apply only to
sessions in the trash, and also complete interrupted purges. `exclude_tag` also protects sessions in
the trash.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Final, Literal

from msgspec import Struct
from msgspec.structs import replace

from stenolog.catalog.entries import Entry
from stenolog.errors import StenologError
from stenolog.records import SessionInfo, TrashedSession, timestamp
from stenolog.stores.base import Store
from stenolog.transfer.merge import IMPORT_TIME, receipts_of_imports

Action = Literal["archive", "delete", "purge"]

RESTORED_FIELD: Final = "restored"
"""Meta field with the time at which a user restored the session from the trash."""
_STRENGTH: Final[Mapping[Action, int]] = {"archive": 0, "delete": 1, "purge": 2}


class Rule(Struct, frozen=True, kw_only=True):
    """An action, and the conditions that a session must meet for the action."""

    name: str
    action: Action = "archive"
    older_than: timedelta | None = None
    """Minimum time since the last change."""
    keep_newest: int = 0
    """Number of newest sessions to keep, of those with the rule's prefix and tag."""
    larger_than: int = 0
    """Size in bytes that the live log must exceed; 0 for any size."""
    tag: str = ""
    prefix: str = ""
    exclude_tag: str = ""
    """The rule does not apply to sessions with this tag."""

    @property
    def has_condition(self) -> bool:
        """Whether the rule has the conditions it needs; if not, it applies to no session.

        A purge rule needs `older_than` and no uncheckable condition. For other rules, `prefix` and
        `exclude_tag` alone are not enough.
        """
        if self.action == "purge":
            return self.older_than is not None and not self.has_uncheckable_condition
        return bool(self.older_than or self.keep_newest or self.larger_than or self.tag)

    @property
    def has_uncheckable_condition(self) -> bool:
        """Whether a purge rule has conditions that cannot be checked for deleted sessions."""
        return self.action == "purge" and bool(self.keep_newest or self.larger_than or self.tag)


class RetentionStep(Struct, frozen=True, kw_only=True):
    """An action on one session."""

    action: Action
    rule: str
    key: str
    uid: str
    messages: int
    updated: datetime
    """Time of the last change; for a purge, the time of the deletion."""
    unfinished: bool = False
    """Whether the step completes an interrupted purge."""


def find_steps(
    entries: Sequence[Entry],
    trash: Sequence[TrashedSession],
    rules: Sequence[Rule],
    *,
    now: datetime,
    read_info: Callable[[str], SessionInfo | None],
    may_purge: Callable[[TrashedSession, str], bool],
    unfinished: Sequence[TrashedSession] = (),
) -> list[RetentionStep]:
    """Return the steps that the rules require: archive first, purge last, one step per session.

    If rules require different actions for a session, the strongest action wins: purge, then delete,
    then archive. `read_info` returns details of a session. `may_purge` returns whether a deleted
    session is intact and does not have the given tag; False also if the session is busy, gone or
    unreadable, or the store has no snapshots. `read_info` and `may_purge` are called only if a rule
    needs their results. `unfinished` are sessions whose purge was interrupted.
    """
    steps: dict[str, RetentionStep] = {}
    for rule in rules:
        if not rule.has_condition:
            continue
        if rule.action == "purge":
            rule_steps = _find_purges(rule, trash, unfinished, now, may_purge)
        else:
            rule_steps = _find_archives_and_deletions(rule, entries, now, read_info)
        for step in rule_steps:
            other_step = steps.get(step.uid)
            if other_step is None or _STRENGTH[other_step.action] < _STRENGTH[step.action]:
                steps[step.uid] = step
    return sorted(steps.values(), key=lambda step: (_STRENGTH[step.action], step.updated, step.key))


def _find_archives_and_deletions(
    rule: Rule,
    entries: Sequence[Entry],
    now: datetime,
    read_info: Callable[[str], SessionInfo | None],
) -> Iterator[RetentionStep]:
    matching_entries = [
        (entry.updated, entry)
        for entry in entries
        if entry.updated is not None and _matches_filters(rule, entry)
    ]
    matching_entries.sort(key=lambda pair: (pair[0], pair[1].key), reverse=True)
    for updated, entry in matching_entries[rule.keep_newest :]:
        if entry.state == "running" or rule.exclude_tag in entry.tags:
            continue
        if not _is_old(rule, updated, now):
            continue
        info = read_info(entry.key)
        if info is None or info.uid != entry.uid or not _applies_to_session(rule, info, now):
            continue
        if rule.action == "delete" and (entry.lost or entry.damaged):
            continue  # the catalog may know of damage that reading `info` did not find
        yield _make_step(rule, entry, updated)


def _matches_filters(rule: Rule, entry: Entry) -> bool:
    has_tag = not rule.tag or rule.tag in entry.tags
    return entry.problem is None and has_tag and entry.key.startswith(rule.prefix)


def _is_old(rule: Rule, changed_at: datetime, now: datetime) -> bool:
    return rule.older_than is None or now - changed_at > rule.older_than


def _applies_to_session(rule: Rule, info: SessionInfo, now: datetime) -> bool:
    """Return whether a session meets the rule's conditions that the catalog cannot check."""
    if rule.larger_than and info.bytes <= rule.larger_than:
        return False
    imported_at = _last_import_time(info)
    if imported_at is not None and not _is_old(rule, imported_at, now):
        return False
    if rule.action == "archive":
        return info.floor > info.archived
    if info.lost or info.damaged:
        return False  # a damaged session cannot be repaired in the trash
    restored_at = _parse_time(info.meta.get(RESTORED_FIELD))
    if restored_at is None:
        return True
    return rule.older_than is not None and _is_old(rule, restored_at, now)


def _last_import_time(info: SessionInfo) -> datetime | None:
    """Return the time of the last import into the session; None without an import.

    An import without a time counts as a new import, unless messages were added after the import.
    """
    times = []
    for receipt in receipts_of_imports(info.meta):
        import_time = _parse_time(receipt.get(IMPORT_TIME))
        if import_time is not None:
            times.append(import_time)
        elif receipt.get("last_seq") == info.last_seq:
            times.append(datetime.max.replace(tzinfo=UTC))
    return max(times, default=None)


def _parse_time(value: object) -> datetime | None:
    """Return the time in a meta field; None if the value is not a time."""
    try:
        time = datetime.fromisoformat(value) if isinstance(value, str) else None
    except ValueError:
        return None
    return time if time is None or time.utcoffset() is not None else time.replace(tzinfo=UTC)


def _find_purges(
    rule: Rule,
    trash: Sequence[TrashedSession],
    unfinished: Iterable[TrashedSession],
    now: datetime,
    may_purge: Callable[[TrashedSession, str], bool],
) -> Iterator[RetentionStep]:
    """Yield a step for each session that was deleted long enough ago.

    Then yield the steps that complete interrupted purges, for sessions of any age.
    """
    for session in trash:
        if (
            session.key.startswith(rule.prefix)
            and _is_old(rule, session.deleted, now)
            and may_purge(session, rule.exclude_tag)
        ):
            yield _make_step(rule, session, session.deleted)
    for session in unfinished:
        if not session.key or session.key.startswith(rule.prefix):
            yield replace(_make_step(rule, session, session.deleted), unfinished=True)


def _make_step(rule: Rule, entry: Entry | TrashedSession, updated: datetime) -> RetentionStep:
    return RetentionStep(
        action=rule.action,
        rule=rule.name,
        key=entry.key,
        uid=entry.uid,
        messages=entry.count,
        updated=updated,
    )


# --- restored sessions -----------------------------------------------------------------------


def restore_for_user(store: Store, key: str, *, uid: str | None, as_key: str | None) -> None:
    """Restore a session, and record that a user wants to keep it. Raises like `Store.restore`."""
    store.restore(key, uid=uid, as_key=as_key)
    # Without the record, the session is restored all the same, and a rule may delete it again.
    with suppress(StenologError):
        store.set_meta(as_key or key, **{RESTORED_FIELD: timestamp(datetime.now(UTC))})
