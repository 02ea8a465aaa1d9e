"""Doing what rules of retention say, and telling of it in a log; what they say: retention.py."""

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
from stenolog.catalog.texts import tags_from
from stenolog.errors import NoSuchSession, StenologError, StoreBusy
from stenolog.records import SessionInfo, Trashed, timestamp
from stenolog.sessions.folders import find_place, others_in
from stenolog.sessions.retention import MARK, Rule, Step, lives_of, plan
from stenolog.stores import reports
from stenolog.stores.base import PurgingStore, Store
from stenolog.stores.disk import overwrite_lines, sync_file, write_all
from stenolog.stores.jsonl.directory import explained
from stenolog.stores.opening import address, open_store
from stenolog.stores.snapshots import LifeMark, WholeStore

LOG: Final = "retention.log"
"""The file in a workspace that tells what was done: a line each, with tabs between."""
_PAGE: Final = 1_000
_TTL: Final = 60.0

Outcome = Literal["planned", "begins", "done", "skipped", "failed"]
"""`begins` stands in the log alone: without a line of the same session behind it, somebody was
interrupted there."""


class Done(Struct, frozen=True, kw_only=True):
    """What became of a step."""

    step: Step
    agent: str | None
    """Whose session it is; None: of the one that has no name."""
    namespace: str
    outcome: Outcome
    words: str = ""
    """Why not, or how much."""


def carry_out(
    store: Store, step: Step, begins: Callable[[], None] = lambda: None
) -> tuple[Outcome, str]:
    """Do what a step says, if the session still is as it was planned for; and what became of it.

    `begins` is called right before something is deleted.
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
            # Not together with deleting: whoever is cut short here has deleted nothing.
            store.set_meta(step.key, **{MARK: timestamp(datetime.now(UTC))})
            gone = store.delete(step.key)
            if gone.count != info.count:
                # Somebody wrote in this very moment: it is as it was, with what he wrote.
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
    """Delete for good what has this key, all of which is in the trash, and was when planned."""
    if step.unfinished and isinstance(store, PurgingStore):
        begins()
        store.finish_purge(step.uid)
        return "done", "a purge that was interrupted is ended"
    lives = lives_of(step.key, store.list_trash())
    own = (step.uid, step.updated)
    if own not in lives:
        return "skipped", "it is not in the trash"
    # Fewer there may be: others of this key have been purged just now.
    if not step.in_trash or not set(lives) <= set(step.lives):
        return "skipped", "what the trash has of this key was changed meanwhile"
    try:
        store.info(step.key)
    except NoSuchSession:
        begins()
        if isinstance(store, PurgingStore):
            # Only what was looked at: somebody may begin a session of this key right now.
            gone = store.purge_trash(step.key, [own])
        else:
            gone = store.purge(step.key)
        return "done", f"{gone.messages:,} messages deleted for good"
    return "skipped", "there is a session of this key again"


def keep_to(
    workspace: str,
    rules: Sequence[Rule],
    *,
    agent: str | None = None,
    namespace: str | None = None,
    dry_run: bool = False,
    confirm: Callable[[Sequence[Done]], bool] = lambda _: True,
    progress: Callable[[], None] = lambda: None,
    until: Callable[[], bool] = lambda: False,
) -> list[Done]:
    """Do what the rules say in a workspace: in the sessions of every agent, or of the one named.

    With `dry_run` nothing is done, and the steps are given as planned; else `confirm` is asked
    first. What is done is written to retention.log in the workspace, or to the program's log where
    that is no folder. `until` is asked before each step, and ends it. Raises UsageError,
    StoreUnavailable.
    """
    planned: list[Done] = []
    if any(rule.says_something for rule in rules):
        for who, name in _whose(workspace, agent, namespace):
            # An interrupted purge of which nobody knows whose it was is found in each namespace.
            ended_once = any(one.step.unfinished and not one.step.uid for one in planned)
            planned += (
                one
                for one in _planned(workspace, rules, who, name)
                if not (ended_once and one.step.unfinished and not one.step.uid)
            )
    if dry_run or not planned or not confirm(planned):  # guard: retention-dry-run
        return planned
    ended: list[Done] = []
    with _log_of(workspace) as tell:
        begun: list[Done] = []

        def begins(one: Done) -> None:
            begun[:] = [one]
            tell(replace(one, outcome="begins"))

        for one in _carried_out(workspace, planned, until, begins):
            # What is left alone is so again in an hour, and would fill the log.
            if one.outcome != "skipped" or begun:
                tell(one)
            begun.clear()
            ended.append(one)
            progress()
    return ended


def keep_all_to(
    places: Iterable[str], rules: Sequence[Rule], *, until: Callable[[], bool] = lambda: False
) -> list[Done]:
    """Do what the rules say in each of these places, for a daemon: nobody is asked.

    What cannot be done in one of them is logged, and keeps no other from being looked at.
    """
    ended: list[Done] = []
    for place in dict.fromkeys(places):
        whose = _one_by_one(place)
        while not until():
            try:
                agent, namespace = next(whose)
                ended += keep_to(place, rules, agent=agent, namespace=namespace, until=until)
            except StopIteration:
                break
            except StenologError as error:
                reports.warning("retention: nothing was done: %s", error)
            except Exception as error:  # noqa: BLE001 - a fault here is none elsewhere
                kind = type(error).__name__
                reports.warning("retention: nothing was done: %s: %s", kind, error)
    for one in ended:
        if one.outcome == "failed":
            reports.warning("retention: %s", _line(one))
    return ended


def _one_by_one(place: str) -> Iterator[tuple[str | None, str | None]]:
    """Whose sessions there are, each as an agent and a namespace that are looked at alone."""
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
) -> list[Done]:
    place = find_place(workspace, agent)
    name = namespace or place.namespace
    engine = address(place.where).engine
    if engine == "jsonl" and not Path(place.where, name).exists():
        return []  # nothing was ever stored there
    with open_store(place.where, namespace=name, read_only=True) as store:
        # The catalog of a PostgreSQL store is in the database, which is only read here.
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
    return [Done(step=step, agent=agent, namespace=name, outcome="planned") for step in steps]


def _carried_out(
    workspace: str,
    planned: Sequence[Done],
    until: Callable[[], bool],
    begins: Callable[[Done], None],
) -> Iterator[Done]:
    for whose in dict.fromkeys((one.agent, one.namespace) for one in planned):
        agent, namespace = whose
        with open_store(find_place(workspace, agent).where, namespace=namespace) as store:
            for one in planned:
                if until():
                    return
                if (one.agent, one.namespace) == whose:
                    outcome, words = carry_out(store, one.step, partial(begins, one))
                    yield Done(
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
            return None  # the doctor tells of it

    return look


def _tags_in_trash(store: Store) -> Callable[[Trashed], Sequence[str] | None]:
    marks: dict[str, LifeMark] = {}

    def tags_of(one: Trashed) -> Sequence[str] | None:
        if not isinstance(store, WholeStore):
            return None
        try:
            if not marks:
                marks.update((mark.uid, mark) for mark in store.lives() if mark.deleted)
            mark = marks.get(one.uid)
            if mark is None:
                return None
            with store.read_life(mark) as reading:
                return tags_from(reading.life.meta)
        except StenologError:
            return None  # the doctor tells of it

    return tags_of


# --- the log ---------------------------------------------------------------------------------


@contextmanager
def _log_of(workspace: str) -> Iterator[Callable[[Done], None]]:
    """Where each is told of. Raises StoreUnavailable: what cannot be told is not done."""
    found = address(workspace)
    if found.engine != "jsonl":
        yield lambda one: reports.info("retention: %s", _line(one))
        return
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    path = Path(found.path, LOG)
    try:
        descriptor = os.open(path, flags, 0o600)
    except OSError as error:
        raise explained(error, f"opening {path}") from error

    def tell(one: Done) -> None:
        try:
            write_all(descriptor, f"{_line(one)}\n".encode("utf-8", "backslashreplace"))
            sync_file(descriptor)
        except OSError as error:
            raise explained(error, f"writing to {path}") from error

    try:
        yield tell
    finally:
        os.close(descriptor)


def forget_in_log(workspace: str, is_meant: Callable[[str, str], bool]) -> int:
    """Make the log name no more what was purged elsewhere; in how many lines that was.

    `is_meant` is told where a session was and its key, as the log has them. The lines stay: what
    was done, when and by which rule is no secret. Raises StoreUnavailable, DamagedStore.
    """
    path = Path(address(workspace).path, LOG)

    def instead(line: bytes) -> bytes:
        parts = line.split(b"\t")
        if len(parts) < _PARTS:
            return line
        place, key = (part.decode("utf-8", "replace") for part in parts[_PLACE : _KEY + 1])
        if not is_meant(place, key):
            return line
        # What went wrong is told with the key in it.
        gone = (_KEY, _PARTS - 1) if parts[1] != b"done" else (_KEY,)
        masked = [b"-" * len(part) if at in gone else part for at, part in enumerate(parts)]
        return b"\t".join(masked)

    try:
        return overwrite_lines(path, instead)
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise explained(error, f"changing {path}") from error


def in_log(name: str) -> str:
    """A key or another name as the log has it: it may hold anything, a line end too."""
    return name if name.isprintable() else ascii(name)[1:-1]


def place_in_log(agent: str | None, namespace: str) -> str:
    """Where a session is, as the log has it."""
    return namespace if agent is None else f"agent {agent}"


_PLACE: Final = 4
_KEY: Final = 5
_PARTS: Final = 9
"""How many parts a line of the log has, and which of them are the place and the key."""


def _line(one: Done) -> str:
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
