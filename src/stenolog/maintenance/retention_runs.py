"""Applies retention rules (retention_rules.py), and logs each action."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Final, Literal

from msgspec import Struct

from stenolog.catalog import open_catalog
from stenolog.catalog.entries import Entry
from stenolog.catalog.searchable_text import tags_from
from stenolog.errors import NoSuchSession, StenologError, StoreBusy
from stenolog.maintenance.retention_rules import Action, Rule, may_delete, must_delete
from stenolog.records import SessionInfo, TrashedSession, timestamp
from stenolog.sessions.folders import locate_sessions, other_namespaces
from stenolog.stores import log_reports
from stenolog.stores.base import Store
from stenolog.stores.open_store import open_store, parse_address
from stenolog.stores.snapshots import SnapshotMark

_LEASE_SECONDS: Final = 60.0
"""Lifetime of the lease that is held while a session is deleted."""

Outcome = Literal["due", "done", "skipped", "failed"]
"""What happened to a session; `due` means that a dry run did not change it."""


class RetentionResult(Struct, frozen=True, kw_only=True):
    """A session to which a rule applies, and what happened to the session."""

    action: Action
    rule: str
    agent: str | None
    """Agent of the session; None for the unnamed agent."""
    namespace: str
    key: str
    uid: str
    messages: int
    updated: datetime
    """Time of the last change; for a purge, time of the deletion."""
    outcome: Outcome
    message: str = ""
    """What was done, or the reason why the session was skipped or the action failed."""


def apply_rules(
    workspace: str,
    rules: Sequence[Rule],
    *,
    agent: str | None = None,
    namespace: str | None = None,
    dry_run: bool = False,
    should_stop: Callable[[], bool] = lambda: False,
) -> list[RetentionResult]:
    """Apply the rules to the sessions of every agent of a workspace, or of one agent.

    With `dry_run`, nothing is changed, and the results name the sessions that the rules select.
    Each action is logged. `should_stop` is called before each session that may be changed; True
    stops the run. Raises UsageError, StoreUnavailable.
    """
    rules = [rule for rule in rules if rule.has_condition]
    if not rules:
        return []
    has_agent = agent is not None or namespace is not None
    # All agents are listed first, so that nothing is done in a place that cannot be read.
    agents = [(agent, namespace)] if has_agent else list(_list_agents(workspace))
    results: list[RetentionResult] = []
    for agent_name, agent_namespace in agents:
        for result in _apply_to_agent(
            workspace, rules, agent_name, agent_namespace, dry_run=dry_run, should_stop=should_stop
        ):
            # In a dry run, every namespace lists an interrupted purge of an unknown session.
            if result.uid or all(result.updated != other.updated for other in results):
                results.append(result)
    return results


def apply_rules_everywhere(
    places: Iterable[str], rules: Sequence[Rule], *, should_stop: Callable[[], bool] = lambda: False
) -> list[RetentionResult]:
    """Apply the rules in these workspaces and databases, for a daemon.

    A failure in one place is logged and does not affect the other places.
    """
    results: list[RetentionResult] = []
    for place in dict.fromkeys(places):
        agents = _list_agents(place)
        while not should_stop():
            try:
                agent, namespace = next(agents)
                results += apply_rules(
                    place, rules, agent=agent, namespace=namespace, should_stop=should_stop
                )
            except StopIteration:
                break
            except Exception as error:  # noqa: BLE001 - must not affect other places
                name = "" if isinstance(error, StenologError) else f"{type(error).__name__}: "
                log_reports.warning("retention: nothing was done: %s%s", name, error)
    return results


def _list_agents(place: str) -> Iterator[tuple[str | None, str | None]]:
    """Yield each agent of a place with its namespace. None stands for the default."""
    if parse_address(place).engine == "memory":
        return
    yield None, locate_sessions(place, None).namespace
    for name in other_namespaces(place).agents:
        yield name, None


def _apply_to_agent(
    workspace: str,
    rules: Sequence[Rule],
    agent: str | None,
    namespace: str | None,
    *,
    dry_run: bool,
    should_stop: Callable[[], bool],
) -> Iterator[RetentionResult]:
    location = locate_sessions(workspace, agent)
    store_namespace = namespace or location.namespace
    engine = parse_address(location.where).engine
    if engine == "jsonl" and not Path(location.where, store_namespace).exists():
        return  # the place has no sessions yet
    with open_store(location.where, namespace=store_namespace, read_only=dry_run) as store:
        # The catalog of a PostgreSQL store is in the database. A dry run must not write to it, so
        # this catalog is kept in memory.
        with open_catalog(store, keep=not dry_run or engine != "postgresql") as catalog:
            entries = catalog.list(limit=1 << 62).entries
        run = _Run(store, rules, agent, store_namespace, dry_run, should_stop)
        # The trash comes first, so that no rule purges what another rule has just deleted.
        yield from run.purge_sessions()
        yield from run.delete_sessions(reversed(entries))


class _Run(Struct, frozen=True):
    """The application of rules to the sessions of one agent."""

    store: Store
    rules: Sequence[Rule]
    agent: str | None
    namespace: str
    dry_run: bool
    should_stop: Callable[[], bool]

    def purge_sessions(self) -> Iterator[RetentionResult]:
        """Purge sessions in the trash, and finish interrupted purges."""
        rules = [rule for rule in self.rules if rule.action == "purge"]
        store = self.store
        if not rules:
            return
        now = datetime.now(UTC)
        for session in reversed(store.admin.list_trash()):
            old_rules = [rule for rule in rules if rule.includes_age(session.deleted, now)]
            if not old_rules:
                continue
            if self.should_stop():
                return
            rule = self._find_rule_for_trash(session, old_rules)
            if rule is not None:
                yield self._apply(rule, session, session.deleted, partial(_purge, store, session))
        for session in store.admin.list_trash(unfinished=True):
            if self.should_stop():
                return
            yield self._apply(rules[0], session, session.deleted, partial(_finish, store, session))

    def delete_sessions(self, entries: Iterable[Entry]) -> Iterator[RetentionResult]:
        """Move sessions to the trash."""
        rules = [rule for rule in self.rules if rule.action == "delete"]
        now = datetime.now(UTC)
        for entry in entries:
            possible_rules = [rule for rule in rules if may_delete(rule, entry, now)]
            if not possible_rules:
                continue
            if self.should_stop():
                return
            try:
                info = self.store.info(entry.key)
            except StenologError:
                continue  # the doctor reports the problem
            rule = next((rule for rule in possible_rules if must_delete(rule, info, now)), None)
            if rule is not None:
                yield self._apply(rule, info, info.updated, partial(_delete, self.store, info))

    def _find_rule_for_trash(self, session: TrashedSession, rules: Sequence[Rule]) -> Rule | None:
        """Return the first rule that includes the tags of an intact session in the trash.

        Return None also if the session is busy, gone, damaged or unreadable.
        """
        mark = SnapshotMark(key=session.key, uid=session.uid)
        with suppress(StenologError), self.store.admin.read_snapshot(mark) as reading:
            tags = tags_from(reading.snapshot.meta)
            rule = next((rule for rule in rules if rule.includes_tags(tags)), None)
            # Test the tags first: `is_damaged` reads all messages.
            return None if rule is None or reading.is_damaged() else rule
        return None

    def _apply(
        self,
        rule: Rule,
        session: SessionInfo | TrashedSession,
        updated: datetime,
        action: Callable[[], tuple[Outcome, str]],
    ) -> RetentionResult:
        """Execute an action, log it, and return what happened. A dry run does neither."""
        outcome: Outcome = "due"
        message = ""
        if not self.dry_run:
            outcome, message = _execute(action)
        result = RetentionResult(
            action=rule.action,
            rule=rule.name,
            agent=self.agent,
            namespace=self.namespace,
            key=session.key,
            uid=session.uid,
            messages=session.count,
            updated=updated,
            outcome=outcome,
            message=message,
        )
        # A skipped session is not logged: each run would log it again.
        if outcome in ("done", "failed"):
            report = log_reports.info if outcome == "done" else log_reports.warning
            report("retention: %s", _format_line(result))
        return result


def _execute(action: Callable[[], tuple[Outcome, str]]) -> tuple[Outcome, str]:
    try:
        return action()
    except StoreBusy:
        return "skipped", "a turn is in progress"
    except NoSuchSession:
        return "skipped", "the session is not there any more"
    except StenologError as error:
        return "failed", str(error)


def _delete(store: Store, info: SessionInfo) -> tuple[Outcome, str]:
    with store.lease(info.key, ttl=_LEASE_SECONDS, wait=0):
        # guard: retention-deletes-unchanged
        if store.admin.delete_unchanged(info) is None:
            return "skipped", "the session has just changed"
    return "done", "moved to the trash"


def _purge(store: Store, session: TrashedSession) -> tuple[Outcome, str]:
    # Purge only this session, and only if it was not restored and deleted again.
    result = store.admin.purge(session.key, trash=[(session.uid, session.deleted)])
    return "done", f"{result.messages:,} messages deleted permanently"


def _finish(store: Store, session: TrashedSession) -> tuple[Outcome, str]:
    store.admin.finish_purge(session.uid)
    return "done", "completed an interrupted purge"


def _format_line(result: RetentionResult) -> str:
    place = result.namespace if result.agent is None else f"agent {result.agent}"
    columns = (
        result.outcome,
        result.action,
        result.rule,
        place,
        result.key,
        result.uid,
        f"last changed {timestamp(result.updated)}",
        result.message,
    )
    return "\t".join(text if text.isprintable() else ascii(text)[1:-1] for text in columns)
