"""Executes retention rules (retention_rules.py), and logs each action."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from typing import Final, Literal

from msgspec import Struct

from stenolog.catalog import open_catalog
from stenolog.catalog.searchable_text import tags_from
from stenolog.errors import NoSuchSession, StenologError, StoreBusy
from stenolog.maintenance.retention_rules import RetentionStep, Rule, find_steps
from stenolog.records import SessionInfo, TrashedSession, timestamp
from stenolog.sessions.folders import locate_sessions, other_namespaces
from stenolog.stores import log_reports
from stenolog.stores.base import PurgingStore, Store
from stenolog.stores.open_store import open_store, parse_address
from stenolog.stores.snapshots import SnapshotMark, SnapshotStore

_LEASE_SECONDS: Final = 60.0
"""Lifetime of the lease that is held while a session is archived or deleted."""

Outcome = Literal["due", "done", "skipped", "failed"]
"""Outcome of a step; `due` means that a dry run did not execute it."""


class RetentionResult(Struct, frozen=True, kw_only=True):
    """A step and its outcome."""

    step: RetentionStep
    agent: str | None
    """Agent of the session; None for the unnamed agent."""
    namespace: str
    outcome: Outcome
    words: str = ""
    """What was done, or the reason why the step was skipped or failed."""


def execute_step(store: Store, step: RetentionStep) -> tuple[Outcome, str]:
    """Execute a step if the session has not changed since the step was found.

    Return the outcome, and a text for `RetentionResult.words`.
    """
    assert isinstance(store, PurgingStore), "every engine that `open_store` opens is one"
    try:
        if step.unfinished:
            store.finish_purge(step.uid)
            return "done", "completed an interrupted purge"
        if step.action == "purge":
            # Only this session, and only if it was not restored and deleted again.
            purge_result = store.purge_trash(step.key, [(step.uid, step.updated)])
            return "done", f"{purge_result.messages:,} messages deleted permanently"
        with store.lease(step.key, ttl=_LEASE_SECONDS, wait=0):
            info = store.info(step.key)
            if info.uid != step.uid or info.updated != step.updated:
                return "skipped", "the session has just changed"
            if step.action == "archive":
                archived_count = store.compact(step.key).archived
                if not archived_count:
                    return "skipped", "hidden and visible messages are in the same batch"
                return "done", f"{archived_count:,} messages moved into the archive"
            if info.lost or info.damaged:
                return "skipped", "the session is damaged; run `steno doctor`"
            # guard: retention-deletes-unchanged
            if store.delete_unchanged(info) is None:
                return "skipped", "the session has just changed"
    except StoreBusy:
        return "skipped", "a turn is in progress"
    except NoSuchSession:
        place = "in the trash" if step.action == "purge" else "there"
        return "skipped", f"the session is not {place} any more"
    except StenologError as error:
        return "failed", str(error)
    return "done", "moved to the trash"


def apply_rules(
    workspace: str,
    rules: Sequence[Rule],
    *,
    agent: str | None = None,
    namespace: str | None = None,
    dry_run: bool = False,
    should_stop: Callable[[], bool] = lambda: False,
) -> list[RetentionResult]:
    """Execute the rules on the sessions of every agent of a workspace, or of one agent.

    With `dry_run`, nothing is changed, and the steps are returned that are due. Each executed step
    is logged. `should_stop` is called before each step; True stops the run. Raises UsageError,
    StoreUnavailable.
    """
    if not any(rule.has_condition for rule in rules):
        return []
    agents = [(agent, namespace)]
    if agent is None and namespace is None:
        agents += ((name, None) for name in other_namespaces(workspace).agents)
    results: list[RetentionResult] = []
    for agent_name, agent_namespace in agents:
        for result in _apply_to_agent(
            workspace, rules, agent_name, agent_namespace, dry_run=dry_run, should_stop=should_stop
        ):
            # In a dry run, every namespace lists an interrupted purge of an unknown session.
            is_repeated = result.step.unfinished and not result.step.uid
            if not is_repeated or all(other.step != result.step for other in results):
                results.append(result)
    return results


def apply_rules_everywhere(
    places: Iterable[str], rules: Sequence[Rule], *, should_stop: Callable[[], bool] = lambda: False
) -> list[RetentionResult]:
    """Execute the rules in these workspaces and databases, for a daemon.

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
        steps = find_steps(
            entries,
            store.list_trash(),
            rules,
            now=datetime.now(UTC),
            read_info=partial(_read_info, store),
            may_purge=cache(partial(_may_purge, store)),  # rules may ask for the same session
            unfinished=store.unfinished_purges() if isinstance(store, PurgingStore) else (),
        )
        for step in steps:
            if should_stop():
                return
            outcome: Outcome = "due"
            words = ""
            if not dry_run:
                outcome, words = execute_step(store, step)
            result = RetentionResult(
                step=step, agent=agent, namespace=store_namespace, outcome=outcome, words=words
            )
            # A skipped step is not logged: each run would log it again.
            if outcome in ("done", "failed"):
                report = log_reports.info if outcome == "done" else log_reports.warning
                report("retention: %s", _format_line(result))
            yield result


def _read_info(store: Store, key: str) -> SessionInfo | None:
    with suppress(StenologError):  # the doctor reports the problem
        return store.info(key)
    return None


def _may_purge(store: Store, session: TrashedSession, exclude_tag: str) -> bool:
    if isinstance(store, SnapshotStore):
        mark = SnapshotMark(key=session.key, uid=session.uid)
        with suppress(StenologError), store.read_snapshot(mark) as reading:
            # Test the tag first: `is_damaged` reads all messages.
            return exclude_tag not in tags_from(reading.snapshot.meta) and not reading.is_damaged()
    return False


def _format_line(result: RetentionResult) -> str:
    step = result.step
    place = result.namespace if result.agent is None else f"agent {result.agent}"
    columns = (
        result.outcome,
        step.action,
        step.rule,
        place,
        step.key,
        step.uid,
        f"last changed {timestamp(step.updated)}",
        result.words,
    )
    return "\t".join(text if text.isprintable() else ascii(text)[1:-1] for text in columns)
