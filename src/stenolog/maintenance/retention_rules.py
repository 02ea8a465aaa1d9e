"""Retention rules decide which sessions are deleted or purged.

A rule selects sessions by age and tag. `delete` moves sessions to the trash. `purge` applies only
to sessions in the trash, whose age starts at the deletion. The age of a live session is the time
since its last stored change; file times do not count. An imported session is no older than its
import. If a user restores a session, the restoration counts as the last change, so that no rule
deletes the session again at once; a rule without `older_than` never deletes it again. This module
reads no session.
"""

from collections.abc import Collection
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Final, Literal

from msgspec import Struct

from stenolog.catalog.entries import Entry
from stenolog.catalog.searchable_text import tags_from
from stenolog.errors import StenologError
from stenolog.records import SessionInfo, timestamp
from stenolog.stores.base import Store
from stenolog.transfer.merge import IMPORT_TIME, receipts_of_imports

Action = Literal["delete", "purge"]

RESTORED_FIELD: Final = "restored"
"""Meta field with the time at which a user restored the session from the trash."""


class Rule(Struct, frozen=True, kw_only=True):
    """An action, and the conditions that a session must meet for the action."""

    name: str
    action: Action = "delete"
    older_than: timedelta | None = None
    """Minimum time since the last change; for a purge, since the deletion."""
    tag: str = ""
    exclude_tag: str = ""
    """The rule does not apply to sessions with this tag."""

    @property
    def has_condition(self) -> bool:
        """Whether the rule has the conditions it needs; if not, it applies to no session.

        A purge rule needs an age, any other rule an age or a tag.
        """
        return bool(self.older_than or (self.tag and self.action != "purge"))

    def includes_age(self, changed_at: datetime, now: datetime) -> bool:
        """Return whether a session with this last change is old enough."""
        return self.older_than is None or now - changed_at > self.older_than

    def includes_tags(self, tags: Collection[str]) -> bool:
        """Return whether the rule applies to a session with these tags."""
        return self.exclude_tag not in tags and (not self.tag or self.tag in tags)


def may_delete(rule: Rule, entry: Entry, now: datetime) -> bool:
    """Return whether a rule may delete a session, as far as the catalog knows the session."""
    if entry.problem is not None or entry.updated is None or entry.state == "running":
        return False
    # The catalog may know of damage that reading the info of the session does not find.
    is_intact = not entry.lost and not entry.damaged
    is_selected = rule.includes_age(entry.updated, now) and rule.includes_tags(entry.tags)
    return is_intact and is_selected


def must_delete(rule: Rule, info: SessionInfo, now: datetime) -> bool:
    """Return whether a rule deletes a live session."""
    if info.lost or info.damaged:
        return False  # a damaged session cannot be repaired in the trash
    imported_at = _last_import_time(info)
    changed_at = info.updated if imported_at is None else max(info.updated, imported_at)
    if not rule.includes_age(changed_at, now) or not rule.includes_tags(tags_from(info.meta)):
        return False
    restored_at = _parse_time(info.meta.get(RESTORED_FIELD))
    if restored_at is None:
        return True
    return rule.older_than is not None and rule.includes_age(restored_at, now)


def _last_import_time(info: SessionInfo) -> datetime | None:
    """Return the time of the last import into the session; None without an import."""
    receipts = receipts_of_imports(info.meta)
    times = (_parse_time(receipt.get(IMPORT_TIME)) for receipt in receipts)
    return max((time for time in times if time is not None), default=None)


def _parse_time(value: object) -> datetime | None:
    """Return the time in a meta field; None if the value is not a time."""
    try:
        time = datetime.fromisoformat(value) if isinstance(value, str) else None
    except ValueError:
        return None
    return time if time is None or time.utcoffset() is not None else time.replace(tzinfo=UTC)


def restore_for_user(store: Store, key: str, *, uid: str | None, as_key: str | None) -> None:
    """Restore a session for a user who wants to keep it. Raises like `StoreAdmin.restore`."""
    store.admin.restore(key, uid=uid, as_key=as_key)
    # Without the record, the session is restored all the same, and a rule may delete it again.
    with suppress(StenologError):
        store.set_meta(as_key or key, **{RESTORED_FIELD: timestamp(datetime.now(UTC))})
