"""Executes retention rules (retention_rules.py), and records each action in a log."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from typing import Final, Literal

from msgspec import Struct
from msgspec.structs import replace

from stenolog.catalog import open_catalog
from stenolog.catalog.searchable_text import tags_from
from stenolog.errors import NoSuchSession, StenologError, StoreBusy
from stenolog.maintenance.retention_rules import (
    RETENTION_FIELD,
    RetentionStep,
    Rule,
    deleted_sessions_of_key,
    plan_retention,
)
from stenolog.records import SessionInfo, TrashedSession, timestamp
from stenolog.sessions.folders import locate_sessions, other_namespaces
from stenolog.stores import log_reports
from stenolog.stores.base import PurgingStore, Store
from stenolog.stores.disk import overwrite_lines, sync_file, write_all
from stenolog.stores.jsonl.directory import system_errors
from stenolog.stores.open_store import open_store, parse_address
from stenolog.stores.snapshots import SnapshotMark, SnapshotStore

LOG_NAME: Final = "retention.log"
"""Log file in a workspace: one line per action, with tab-separated columns."""
_LEASE_SECONDS: Final = 60.0
"""Lifetime of the lease that is held while a session is archived or deleted."""

# The outcome `begins` occurs only in the log.
# If `begins` is the last outcome of a session, the run was interrupted at that step.
Outcome = Literal["planned", "begins", "done", "skipped", "failed"]


class RetentionResult(Struct, frozen=True, kw_only=True):
    """A step and its outcome."""

    step: RetentionStep
    agent: str | None
    """Agent of the session; None for the unnamed agent."""
    namespace: str
    outcome: Outcome
    words: str = ""
    """What was done, or the reason why the step was skipped or failed."""


def execute_step(
    store: Store, step: RetentionStep, on_start: Callable[[], None] = lambda: None
) -> tuple[Outcome, str]:
    """Execute a step if the session is unchanged since the plan was made.

    Return the outcome, and a text for `RetentionResult.words`. `on_start` is called immediately
    before data is deleted.
    """
    try:
        if step.action == "purge":
            return _purge_deleted_sessions(store, step, on_start)
        with store.lease(step.key, ttl=_LEASE_SECONDS, wait=0):
            info = store.info(step.key)
            if info.uid != step.uid or info.updated != step.updated:
                return "skipped", "the session changed after the plan was made"
            if step.action == "archive":
                archived_count = store.compact(step.key).archived
                if not archived_count:
                    return "skipped", "hidden and visible messages are in the same batch"
                return "done", f"{archived_count:,} messages moved into the archive"
            if info.lost or info.damaged:
                return "skipped", "the session is damaged; run `steno doctor`"
            on_start()
            # If the process is killed after this write, later runs treat the session as restored.
            store.set_meta(step.key, **{RETENTION_FIELD: timestamp(datetime.now(UTC))})
            trashed = store.delete(step.key)
            if trashed.count != info.count:
                # Another process has just added messages, so restore the session.
                store.restore(step.key, uid=trashed.uid)
                return "skipped", "the session changed after the plan was made"
    except StoreBusy:
        return "skipped", "a turn is in progress"
    except NoSuchSession:
        return "skipped", "the session was already deleted"
    except StenologError as error:
        return "failed", str(error)
    return "done", "moved to the trash"


def _purge_deleted_sessions(
    store: Store, step: RetentionStep, on_start: Callable[[], None]
) -> tuple[Outcome, str]:
    """Purge a deleted session, if all sessions with its key are in the trash and were planned."""
    if step.unfinished and isinstance(store, PurgingStore):
        on_start()
        store.finish_purge(step.uid)
        return "done", "completed an interrupted purge"
    deleted_sessions = deleted_sessions_of_key(step.key, store.list_trash())
    planned_session = (step.uid, step.updated)
    if planned_session not in deleted_sessions:
        return "skipped", "the session is not in the trash"
    # The trash may have fewer sessions than planned: another process may have purged some.
    if not step.in_trash or not set(deleted_sessions) <= set(step.trash_entries):
        return "skipped", "the trash changed after the plan was made"
    try:
        store.info(step.key)
    except NoSuchSession:
        on_start()
        if isinstance(store, PurgingStore):
            # Purge only the checked session: another process may create one with this key now.
            purge_result = store.purge_trash(step.key, [planned_session])
        else:
            purge_result = store.purge(step.key)
        return "done", f"{purge_result.messages:,} messages deleted permanently"
    return "skipped", "a new session with this key exists"


def apply_rules(
    workspace: str,
    rules: Sequence[Rule],
    *,
    agent: str | None = None,
    namespace: str | None = None,
    dry_run: bool = False,
    confirm: Callable[[Sequence[RetentionResult]], bool] = lambda _: True,
    progress: Callable[[], None] = lambda: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> list[RetentionResult]:
    """Execute the rules on the sessions of every agent of a workspace, or of one agent.

    With `dry_run`, or if `confirm` rejects the plan, nothing is changed, and the planned steps are
    returned. Actions are logged in retention.log in the workspace, or in the program's log if the
    workspace is not a folder. `should_stop` is called before each step; True stops the run.
    `progress` is called after each step. Raises UsageError, StoreUnavailable.
    """
    plan: list[RetentionResult] = []
    if any(rule.has_condition for rule in rules):
        agents = [(agent, namespace)]
        if agent is None and namespace is None:
            agents += ((name, None) for name in other_namespaces(workspace).agents)
        for agent_name, agent_namespace in agents:
            # Every namespace lists an interrupted purge of an unknown session; plan it only once.
            has_unknown_purge = any(
                result.step.unfinished and not result.step.uid for result in plan
            )
            plan += (
                result
                for result in _plan_for_agent(workspace, rules, agent_name, agent_namespace)
                if not (has_unknown_purge and result.step.unfinished and not result.step.uid)
            )
    if dry_run or not plan or not confirm(plan):
        return plan
    results: list[RetentionResult] = []
    with _open_log(workspace) as log_result:
        started_results: list[RetentionResult] = []

        def on_start(result: RetentionResult) -> None:
            started_results[:] = [result]
            log_result(replace(result, outcome="begins"))

        for result in _execute_steps(workspace, plan, should_stop, on_start):
            # A step that was skipped before it began is not logged: each run would log it again.
            if result.outcome != "skipped" or started_results:
                log_result(result)
            started_results.clear()
            results.append(result)
            progress()
    return results


def apply_rules_everywhere(
    places: Iterable[str], rules: Sequence[Rule], *, should_stop: Callable[[], bool] = lambda: False
) -> list[RetentionResult]:
    """Execute the rules in these workspaces and databases without confirmation, for a daemon.

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
    for result in results:
        if result.outcome == "failed":
            log_reports.warning("retention: %s", _format_line(result))
    return results


def _list_agents(place: str) -> Iterator[tuple[str | None, str | None]]:
    """Yield each agent of a place with its namespace. None stands for the default."""
    if parse_address(place).engine == "memory":
        return
    yield None, locate_sessions(place, None).namespace
    for name in other_namespaces(place).agents:
        yield name, None


def _plan_for_agent(
    workspace: str, rules: Sequence[Rule], agent: str | None, namespace: str | None
) -> list[RetentionResult]:
    location = locate_sessions(workspace, agent)
    store_namespace = namespace or location.namespace
    engine = parse_address(location.where).engine
    if engine == "jsonl" and not Path(location.where, store_namespace).exists():
        return []  # the place has no sessions yet
    with open_store(location.where, namespace=store_namespace, read_only=True) as store:
        # The catalog of a PostgreSQL store is in the database. Planning must not write to it, so
        # this catalog is kept in memory.
        with open_catalog(store, keep=engine != "postgresql") as catalog:
            entries = catalog.list(limit=1 << 62).entries
        steps = plan_retention(
            entries,
            store.list_trash(),
            rules,
            now=datetime.now(UTC),
            read_info=partial(_read_info, store),
            may_purge=cache(partial(_may_purge, store)),  # rules may ask for the same session
            unfinished=store.unfinished_purges() if isinstance(store, PurgingStore) else (),
        )
    return [
        RetentionResult(step=step, agent=agent, namespace=store_namespace, outcome="planned")
        for step in steps
    ]


def _execute_steps(
    workspace: str,
    plan: Sequence[RetentionResult],
    should_stop: Callable[[], bool],
    on_start: Callable[[RetentionResult], None],
) -> Iterator[RetentionResult]:
    for agent, namespace in dict.fromkeys((result.agent, result.namespace) for result in plan):
        with open_store(locate_sessions(workspace, agent).where, namespace=namespace) as store:
            for result in plan:
                if should_stop():
                    return
                if (result.agent, result.namespace) == (agent, namespace):
                    outcome, detail = execute_step(store, result.step, partial(on_start, result))
                    yield replace(result, outcome=outcome, words=detail)


def _read_info(store: Store, key: str) -> SessionInfo | None:
    with suppress(StenologError):  # the doctor reports the problem
        return store.info(key)
    return None


def _may_purge(store: Store, session: TrashedSession, exclude_tag: str) -> bool:
    if isinstance(store, SnapshotStore):
        mark = SnapshotMark(key=session.key, uid=session.uid, stamp="")
        with suppress(StenologError), store.read_snapshot(mark) as reading:
            # Test the tag first: `is_damaged` reads all messages.
            return exclude_tag not in tags_from(reading.snapshot.meta) and not reading.is_damaged()
    return False


# --- the log ---------------------------------------------------------------------------------


@contextmanager
def _open_log(workspace: str) -> Iterator[Callable[[RetentionResult], None]]:
    """Yield the function that logs a result.

    Raises StoreUnavailable if the log cannot be opened: without a log, no action is executed.
    """
    address = parse_address(workspace)
    if address.engine != "jsonl":
        yield lambda result: log_reports.info("retention: %s", _format_line(result))
        return
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    path = Path(address.path, LOG_NAME)
    with system_errors(f"opening {path}"):
        descriptor = os.open(path, flags, 0o600)

    def log_result(result: RetentionResult) -> None:
        with system_errors(f"writing to {path}"):
            write_all(descriptor, f"{_format_line(result)}\n".encode("utf-8", "backslashreplace"))
            sync_file(descriptor)

    try:
        yield log_result
    finally:
        os.close(descriptor)


def mask_keys_in_log(workspace: str, is_purged: Callable[[str, str], bool]) -> int:
    """Mask the keys of purged sessions in the log and return the number of changed lines.

    `is_purged` is called with the place and the key of a session, as they appear in the log. The
    lines stay, because action, time and rule are not secret. Raises StoreUnavailable, DamagedStore.
    """
    path = Path(parse_address(workspace).path, LOG_NAME)

    def mask_line(line: bytes) -> bytes:
        columns = line.split(b"\t")
        if len(columns) < _COLUMN_COUNT:
            return line
        place, key = (columns[i].decode("utf-8", "replace") for i in (_PLACE_COLUMN, _KEY_COLUMN))
        if not is_purged(place, key):
            return line
        # The text in the last column may contain the key, unless the outcome is `done`.
        for column in (_KEY_COLUMN, _COLUMN_COUNT - 1) if columns[1] != b"done" else (_KEY_COLUMN,):
            columns[column] = b"-" * len(columns[column])
        return b"\t".join(columns)

    with system_errors(f"changing {path}"):
        try:
            return overwrite_lines(path, mask_line)
        except FileNotFoundError:
            return 0


def escape_for_log(name: str) -> str:
    """Return a key or another name, with special characters escaped as in the log."""
    return name if name.isprintable() else ascii(name)[1:-1]


def format_place(agent: str | None, namespace: str) -> str:
    """Return the place of a session as it appears in the log."""
    return namespace if agent is None else f"agent {agent}"


_PLACE_COLUMN: Final = 4
_KEY_COLUMN: Final = 5
_COLUMN_COUNT: Final = 9
"""Number of columns in a line of the log; the constants above are indexes of columns."""


def _format_line(result: RetentionResult) -> str:
    step = result.step
    columns = (
        timestamp(datetime.now(UTC)),
        result.outcome,
        step.action,
        step.rule,
        format_place(result.agent, result.namespace),
        step.key,
        step.uid,
        f"last changed {timestamp(step.updated)}",
        result.words,
    )
    return "\t".join(map(escape_for_log, columns))
