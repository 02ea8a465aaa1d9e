"""Execution of retention rules (retention.py), recorded in a log."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Final, Literal

from msgspec import Struct
from msgspec.structs import replace

from stenolog.catalog import Catalog, Entry, open_catalog
from stenolog.catalog.searchable_text import tags_from
from stenolog.errors import NoSuchSession, StenologError, StoreBusy
from stenolog.maintenance.retention_rules import MARK, Rule, Step, plan, trash_entries
from stenolog.records import SessionInfo, Trashed, timestamp
from stenolog.sessions.folders import find_place, others_in
from stenolog.stores import log_reports
from stenolog.stores.base import PurgingStore, Store
from stenolog.stores.disk import overwrite_lines, sync_file, write_all
from stenolog.stores.jsonl.directory import store_error
from stenolog.stores.open_store import address, open_store
from stenolog.stores.snapshots import SnapshotMark, SnapshotStore

LOG: Final = "retention.log"
"""Log file in a workspace: one line per action, with tab-separated columns."""
_PAGE: Final = 1_000
_TTL: Final = 60.0

Outcome = Literal["planned", "begins", "done", "skipped", "failed"]
"""Result of a step.

`begins` only occurs in the log: without a later line for the same session, the run was interrupted
there.
"""


class RetentionResult(Struct, frozen=True, kw_only=True):
    """Result of a step."""

    step: Step
    agent: str | None
    """Agent of the session; None: the unnamed agent."""
    namespace: str
    outcome: Outcome
    words: str = ""
    """The reason for a failure, or the amount of data."""


def carry_out(
    store: Store, step: Step, begins: Callable[[], None] = lambda: None
) -> tuple[Outcome, str]:
    """Execute a step if the session is unchanged since it was planned, and return the result.

    `begins` is called immediately before something is deleted.
    """
    try:
        if step.action == "purge":
            return _purge_deleted(store, step, begins)
        with store.lease(step.key, ttl=_TTL, wait=0):
            info = store.info(step.key)
            if info.uid != step.uid or info.updated != step.updated:
                return "skipped", "it was changed meanwhile"
            if step.action == "archive":
                moved = store.compact(step.key).archived
                if not moved:
                    return "skipped", "what could be archived was said together with what stays"
                return "done", f"{moved:,} messages moved into the archive"
            if info.lost or info.damaged:
                return "skipped", "it is damaged; `steno doctor` tells more"
            begins()
            # A separate write: an interruption here has deleted nothing.
            store.set_meta(step.key, **{MARK: timestamp(datetime.now(UTC))})
            gone = store.delete(step.key)
            if gone.count != info.count:
                # Another process wrote at this moment: restore the session with the new messages.
                store.restore(step.key, uid=gone.uid)
                return "skipped", "it was changed meanwhile"
    except StoreBusy:
        return "skipped", "somebody has the turn in it"
    except NoSuchSession:
        return "skipped", "it is gone already"
    except StenologError as error:
        return "failed", str(error)
    return "done", "it is in the trash"


def _purge_deleted(store: Store, step: Step, begins: Callable[[], None]) -> tuple[Outcome, str]:
    """Purge the sessions of this key, if all are in the trash and the trash is as planned."""
    if step.unfinished and isinstance(store, PurgingStore):
        begins()
        store.finish_purge(step.uid)
        return "done", "a purge that was interrupted is ended"
    entries = trash_entries(step.key, store.list_trash())
    own = (step.uid, step.updated)
    if own not in entries:
        return "skipped", "it is not in the trash"
    # Fewer are acceptable: others of this key may have just been purged.
    if not step.in_trash or not set(entries) <= set(step.trash_entries):
        return "skipped", "what the trash has of this key was changed meanwhile"
    try:
        store.info(step.key)
    except NoSuchSession:
        begins()
        if isinstance(store, PurgingStore):
            # Only the checked session: another process may create a session of this key right now.
            gone = store.purge_trash(step.key, [own])
        else:
            gone = store.purge(step.key)
        return "done", f"{gone.messages:,} messages deleted for good"
    return "skipped", "there is a session of this key again"


def apply_rules(
    workspace: str,
    rules: Sequence[Rule],
    *,
    agent: str | None = None,
    namespace: str | None = None,
    dry_run: bool = False,
    confirm: Callable[[Sequence[RetentionResult]], bool] = lambda _: True,
    progress: Callable[[], None] = lambda: None,
    until: Callable[[], bool] = lambda: False,
) -> list[RetentionResult]:
    """Execute the rules in a workspace: on the sessions of every agent, or of the given one.

    With `dry_run` nothing is done and the steps are returned as planned; otherwise `confirm` is
    called first. Actions are logged in retention.log in the workspace, or in the program's log if
    the workspace is not a folder. `until` is called before each step; True stops the run. Raises
    UsageError, StoreUnavailable.
    """
    planned: list[RetentionResult] = []
    if any(rule.says_something for rule in rules):
        for who, name in _whose(workspace, agent, namespace):
            # An interrupted purge of an unknown session is found in every namespace.
            ended_once = any(one.step.unfinished and not one.step.uid for one in planned)
            planned += (
                one
                for one in _planned(workspace, rules, who, name)
                if not (ended_once and one.step.unfinished and not one.step.uid)
            )
    if dry_run or not planned or not confirm(planned):  # guard: retention-dry-run
        return planned
    ended: list[RetentionResult] = []
    with _log_of(workspace) as tell:
        begun: list[RetentionResult] = []

        def begins(one: RetentionResult) -> None:
            begun[:] = [one]
            tell(replace(one, outcome="begins"))

        for one in _carried_out(workspace, planned, until, begins):
            # A skipped step would be skipped again in an hour and fill the log.
            if one.outcome != "skipped" or begun:
                tell(one)
            begun.clear()
            ended.append(one)
            progress()
    return ended


def apply_rules_everywhere(
    places: Iterable[str], rules: Sequence[Rule], *, until: Callable[[], bool] = lambda: False
) -> list[RetentionResult]:
    """Execute the rules in each of these places without confirmation, for a daemon.

    A failure in one place is logged and does not affect the others.
    """
    ended: list[RetentionResult] = []
    for place in dict.fromkeys(places):
        whose = _one_by_one(place)
        while not until():
            try:
                agent, namespace = next(whose)
                ended += apply_rules(place, rules, agent=agent, namespace=namespace, until=until)
            except StopIteration:
                break
            except StenologError as error:
                log_reports.warning("retention: nothing was done: %s", error)
            except Exception as error:  # noqa: BLE001 - a fault here is none elsewhere
                kind = type(error).__name__
                log_reports.warning("retention: nothing was done: %s: %s", kind, error)
    for one in ended:
        if one.outcome == "failed":
            log_reports.warning("retention: %s", _line(one))
    return ended


def _one_by_one(place: str) -> Iterator[tuple[str | None, str | None]]:
    """Yield each agent and namespace of a place, to be processed separately."""
    if address(place).engine == "memory":
        return
    yield None, find_place(place, None).namespace
    for name in others_in(place).agents:
        yield name, None


def _whose(
    workspace: str, agent: str | None, namespace: str | None
) -> list[tuple[str | None, str | None]]:
    if agent is not None or namespace is not None:
        return [(agent, namespace)]
    return [(None, None), *((name, None) for name in others_in(workspace).agents)]


def _planned(
    workspace: str, rules: Sequence[Rule], agent: str | None, namespace: str | None
) -> list[RetentionResult]:
    place = find_place(workspace, agent)
    name = namespace or place.namespace
    engine = address(place.where).engine
    if engine == "jsonl" and not Path(place.where, name).exists():
        return []  # nothing was ever stored there
    with open_store(place.where, namespace=name, read_only=True) as store:
        # The catalog of a PostgreSQL store is in the database, and this only reads.
        with open_catalog(store, keep=engine != "postgresql") as catalog:
            entries = list(_every(catalog))
        now = datetime.now(UTC)
        steps = plan(
            entries,
            store.list_trash(),
            rules,
            now=now,
            look=_looking(store),
            tags_of=_tags_in_trash(store),
            unfinished=store.unfinished_purges() if isinstance(store, PurgingStore) else (),
        )
    return [
        RetentionResult(step=step, agent=agent, namespace=name, outcome="planned") for step in steps
    ]


def _carried_out(
    workspace: str,
    planned: Sequence[RetentionResult],
    until: Callable[[], bool],
    begins: Callable[[RetentionResult], None],
) -> Iterator[RetentionResult]:
    for whose in dict.fromkeys((one.agent, one.namespace) for one in planned):
        agent, namespace = whose
        with open_store(find_place(workspace, agent).where, namespace=namespace) as store:
            for one in planned:
                if until():
                    return
                if (one.agent, one.namespace) == whose:
                    outcome, words = carry_out(store, one.step, partial(begins, one))
                    yield RetentionResult(
                        step=one.step,
                        agent=agent,
                        namespace=namespace,
                        outcome=outcome,
                        words=words,
                    )


def _every(catalog: Catalog) -> Iterator[Entry]:
    after = None
    while True:
        page = catalog.list(limit=_PAGE, after=after)
        yield from page.entries
        if page.after is None:
            return
        after = page.after


def _looking(store: Store) -> Callable[[str], SessionInfo | None]:
    def look(key: str) -> SessionInfo | None:
        try:
            return store.info(key)
        except StenologError:
            return None  # the doctor reports it

    return look


def _tags_in_trash(store: Store) -> Callable[[Trashed], Sequence[str] | None]:
    marks: dict[str, SnapshotMark] = {}

    def tags_of(one: Trashed) -> Sequence[str] | None:
        if not isinstance(store, SnapshotStore):
            return None
        try:
            if not marks:
                marks.update((mark.uid, mark) for mark in store.list_snapshots() if mark.deleted)
            mark = marks.get(one.uid)
            if mark is None:
                return None
            with store.read_snapshot(mark) as reading:
                return tags_from(reading.snapshot.meta)
        except StenologError:
            return None  # the doctor reports it

    return tags_of


# --- the log ---------------------------------------------------------------------------------


@contextmanager
def _log_of(workspace: str) -> Iterator[Callable[[RetentionResult], None]]:
    """Yield the function that logs a result.

    Raises StoreUnavailable: an action that cannot be logged is not executed.
    """
    found = address(workspace)
    if found.engine != "jsonl":
        yield lambda one: log_reports.info("retention: %s", _line(one))
        return
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    path = Path(found.path, LOG)
    try:
        descriptor = os.open(path, flags, 0o600)
    except OSError as error:
        raise store_error(error, f"opening {path}") from error

    def tell(one: RetentionResult) -> None:
        try:
            write_all(descriptor, f"{_line(one)}\n".encode("utf-8", "backslashreplace"))
            sync_file(descriptor)
        except OSError as error:
            raise store_error(error, f"writing to {path}") from error

    try:
        yield tell
    finally:
        os.close(descriptor)


def forget_in_log(workspace: str, is_meant: Callable[[str, str], bool]) -> int:
    """Mask the keys of purged sessions in the log and return the number of changed lines.

    `is_meant` gets the place and the key of a session, as they appear in the log. The lines stay,
    because action, time and rule are no secret. Raises StoreUnavailable, DamagedStore.
    """
    path = Path(address(workspace).path, LOG)

    def instead(line: bytes) -> bytes:
        parts = line.split(b"\t")
        if len(parts) < _PARTS:
            return line
        place, key = (part.decode("utf-8", "replace") for part in parts[_PLACE : _KEY + 1])
        if not is_meant(place, key):
            return line
        # Error messages may contain the key.
        gone = (_KEY, _PARTS - 1) if parts[1] != b"done" else (_KEY,)
        masked = [b"-" * len(part) if at in gone else part for at, part in enumerate(parts)]
        return b"\t".join(masked)

    try:
        return overwrite_lines(path, instead)
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise store_error(error, f"changing {path}") from error


def in_log(name: str) -> str:
    """Return a key or another name as it appears in the log; it may contain any character."""
    return name if name.isprintable() else ascii(name)[1:-1]


def place_in_log(agent: str | None, namespace: str) -> str:
    """Return the place of a session as it appears in the log."""
    return namespace if agent is None else f"agent {agent}"


_PLACE: Final = 4
_KEY: Final = 5
_PARTS: Final = 9
"""Number of columns in a line of the log; `_PLACE` and `_KEY` are indexes of columns."""


def _line(one: RetentionResult) -> str:
    step = one.step
    parts = (
        timestamp(datetime.now(UTC)),
        one.outcome,
        step.action,
        step.rule,
        place_in_log(one.agent, one.namespace),
        step.key,
        step.uid,
        f"last changed {timestamp(step.updated)}",
        one.words,
    )
    return "\t".join(map(in_log, parts))
