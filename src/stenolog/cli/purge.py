"""`steno purge`: permanently delete sessions, or everything of one person."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from shlex import quote
from typing import Final

import click
from msgspec import Struct

from stenolog.cli.delete_restore import print_first_lines
from stenolog.cli.options import (
    complete_key,
    dry_run_option,
    json_option,
    require_terminal,
    yes_option,
)
from stenolog.cli.output import (
    EXIT_PARTIAL,
    json_text,
    one_line,
    plural,
    print_notice,
    print_notices,
    printable,
    sentence,
    show_progress,
)
from stenolog.cli.workspace import (
    Location,
    check_exists,
    find_session,
    location_options,
    open_read_only,
    open_writable,
)
from stenolog.errors import DamagedStore, InvalidKey, NoSuchSession, StenologError
from stenolog.maintenance.retention_runs import escaped_for_log, mask_keys_in_log, place_in_log
from stenolog.memory.notes import Notes
from stenolog.memory.scopes import MARK_PREFIX, Scope, mark_uid, scope_from_key
from stenolog.records import Message
from stenolog.sessions.aliases import NO_ALIASES, Aliases, alias_mark, aliases_in
from stenolog.sessions.folders import CHANNELS, NAMESPACE, NOTES, locate_sessions, other_namespaces
from stenolog.sessions.keys import owner_in_key
from stenolog.stores.base import PurgingStore, Store
from stenolog.stores.open_store import parse_address
from stenolog.stores.snapshots import SnapshotReading, SnapshotStore
from stenolog.stores.state import describe_remaining
from stenolog.transfer.copy_all import namespaces_of, opened_read_only, opened_store
from stenolog.transfer.fallback import copies_in_fallback

MAIN_AGENT: Final = "main"
"""Name of the default agent in the notes."""


class _PurgeTarget(Struct, frozen=True, kw_only=True):
    """Target of a purge: everything with one key in one namespace."""

    namespace: str | None
    """None: the namespace given by the command's options."""
    key: str
    uid: str = ""
    """Uid of the live session, or of the session deleted last; empty if unknown."""
    uids: frozenset[str] = frozenset()
    """Uids of the live session and of deleted sessions with this key."""
    messages: int = 0
    """Number of messages of the live session."""
    deleted_sessions: int = 0
    """Number of sessions with this key in the trash."""
    deleted_messages: int = 0
    """Number of messages of the sessions with this key in the trash."""
    before: int | None = None
    is_readable: bool = True
    is_unfinished: bool = False
    """Whether an earlier purge of this key was interrupted."""
    unfinished_messages: int = 0
    """Number of messages that the interrupted purge did not delete."""

    @property
    def has_notes(self) -> bool:
        """Whether the target contains notes instead of a conversation."""
        return self.namespace == NOTES

    @property
    def is_progress_record(self) -> bool:
        """Whether the target only records how far a session was consolidated into notes."""
        return self.has_notes and self.key.startswith(MARK_PREFIX)

    @property
    def confirmation(self) -> str:
        """Return the text to type to confirm: the key, or the uid if the key is not printable."""
        return self.key if _is_typable(self.key) else self.uid or ascii(self.key)

    @property
    def name(self) -> str:
        """Return the name of the target as it is printed."""
        if not self.has_notes:
            return self.key
        if self.is_progress_record:
            return "progress of consolidation"
        scope = scope_from_key(self.key)
        agent = "" if scope.agent == MAIN_AGENT else f" (agent {scope.agent})"
        return f"notes of {scope.name}{agent}"

    def count_text(self, number: int) -> str:
        """Return a number of messages or notes, with the noun."""
        return plural(number, "note" if self.has_notes else "message")

    @property
    def description(self) -> str:
        """Describe everything that would be deleted."""
        parts = []
        if self.uid or not self.is_unfinished:
            limit = "" if self.before is None else f" before seq {self.before}"
            count = self.count_text(self.messages)
            parts.append(f"{count}{limit}" if self.is_readable else "unreadable")
        if self.deleted_sessions:
            parts.append(
                f"{plural(self.deleted_sessions, 'session')} of this key in the trash with "
                f"{self.count_text(self.deleted_messages)}"
            )
        if self.is_unfinished:
            parts.append("files of an interrupted purge")
        place = "" if self.namespace is None or self.has_notes else f" in {self.namespace}"
        return one_line(f"{self.name}{place}: {', and '.join(parts)}")


class _PurgeResult(Struct, frozen=True, kw_only=True):
    """Result of purging a target."""

    target: _PurgeTarget
    messages: int = 0
    not_reached: tuple[str, ...] = ()
    problem: str | None = None


@click.command("purge")
@click.argument("keys", metavar="[KEY]...", nargs=-1, shell_complete=complete_key)
@click.option(
    "--before",
    metavar="SEQ",
    type=click.IntRange(min=1),
    help="Delete only the messages before this seq, and keep the session.",
)
@click.option(
    "--scope",
    "who",
    metavar="WHO",
    help="Delete everything about a person, for example telegram:123.",
)
@yes_option
@dry_run_option
@json_option("one JSON object per session")
@location_options
def purge_command(
    keys: tuple[str, ...],
    before: int | None,
    who: str | None,
    yes: bool,
    dry_run: bool,
    as_json: bool,
    where: Location,
) -> int:
    """Delete sessions permanently, or everything about one person.

    A session is deleted with its archives, its index entries, and all sessions with the same key in
    the trash. --scope WHO deletes all sessions of a person in the workspace, of all agents and
    under all aliases, and all notes about the person. Entries in the retention log and in the input
    history of chats are removed too. Data that cannot be deleted is listed on stderr: forks,
    summaries, imported files.

    To confirm, you must type the key or WHO (or the uid, if the key cannot be typed). Without a
    terminal, --yes is required. If a purge is interrupted, run the command again to complete the
    purge.

    Example: steno purge --scope telegram:123 --dry-run

    Exit codes: 0 done, 1 failed or not confirmed, 2 wrong usage, 3 some data could not be deleted.
    """
    if (who is None) == (not keys):
        raise click.UsageError("Give either a KEY or --scope WHO.")
    if who is not None and (before is not None or where.agent or where.namespace):
        raise click.UsageError("--scope cannot be combined with --before, --agent or --namespace.")
    if not dry_run and not yes:
        require_terminal("This deletes permanently")
    if who is not None:
        targets = _targets_of_person(where.workspace, who)
        if not targets:
            raise click.ClickException(f"There is no data about {one_line(who)} here.")
    else:
        targets = _targets_of_keys(where, keys, before)
    listed_targets = _without_progress_records(targets)
    lines = [target.description for target in listed_targets]
    if dry_run:
        print_first_lines("Would be deleted permanently:", lines)
        results = list(_plan_results(where, targets))
        _print_results(results, as_json=as_json, dry_run=True)
        forks = _remaining_forks(results)
        print_notices(f"Would not be deleted: {sentence(fork)}" for fork in forks)
        return 0
    if not yes:
        print_first_lines("To be deleted permanently:", lines)
        print_notice("This cannot be undone.")
        typed_names = [target.confirmation for target in listed_targets]
        _confirm_names([who] if who is not None and _is_typable(who) else typed_names)
    history = _input_history_file()
    # Clear the input history first: this needs the messages, which the purge deletes.
    history_problem = "" if history is None else _clear_history(history, where, targets)
    results = list(_purge_all(where, targets, who))
    _print_results(results, as_json=as_json, dry_run=False)
    remaining = [*_remaining_data(where, results, who), *_clear_retention_log(where, results, who)]
    if history_problem:
        remaining.append(history_problem)
    elif history is not None and who is not None:
        file = one_line(str(history))
        remaining.append(f"other chat input in {file}; the file does not record who typed it")
    print_notices(f"Not deleted: {sentence(phrase)}" for phrase in remaining)
    return EXIT_PARTIAL if any(result.problem for result in results) else 0


def _confirm_names(names: Iterable[str]) -> None:
    """Ask the user to type each name. Raises ClickException if another text is typed."""
    for name in names:
        wanted = one_line(printable(name)).strip()
        typed = click.prompt(f"Type {wanted} to confirm", default="", show_default=False, err=True)
        if not wanted or typed.strip() != wanted:
            raise click.ClickException(f"You did not type {wanted}. Nothing was deleted.")


def _is_typable(name: str) -> bool:
    """Return whether a name is printable and not blank, so that a user can type it."""
    return bool(name.strip()) and name.isprintable()


# --- targets ---------------------------------------------------------------------------------


class _Namespace:
    """Everything that can be purged in one namespace: live, deleted and partly purged sessions."""

    def __init__(self, store: Store, name: str | None) -> None:
        self.store = store
        self._namespace = name
        self._trash = store.list_trash()
        self._remains = store.unfinished_purges() if isinstance(store, PurgingStore) else []

    @property
    def has_unnamed_remains(self) -> bool:
        """Whether an interrupted purge left data whose key is no longer known."""
        return any(not session.key for session in self._remains)

    def all_keys(self) -> list[str]:
        """Return the keys of all sessions, including deleted and partly purged sessions."""
        removed = (session.key for session in (*self._trash, *self._remains))
        return list(dict.fromkeys([*self.store.list_sessions(), *filter(None, removed)]))

    def find_targets(self, keys: Iterable[str]) -> list[_PurgeTarget]:
        """Return the targets of these keys."""
        targets = map(self.find_target, keys)
        return [target for target in targets if target is not None]

    def find_target(self, key: str, before: int | None = None) -> _PurgeTarget | None:
        """Return the target of a key, or None if there is nothing to purge."""
        trashed = [session for session in self._trash if session.key == key]
        remains = [session for session in self._remains if session.key == key]
        uids = {session.uid for session in (*trashed, *remains)}
        uid, messages, is_readable = trashed[0].uid if trashed else "", 0, True
        if before is not None:
            # With `before`, the trash and the remains of other purges are not purged.
            trashed = remains = []
        try:
            info = self.store.info(key)
            uid, messages = info.uid, info.count
            if before is not None:
                history = self.store.get_history(key, full=True)
                messages = sum(message.seq < before for message in history)
        except NoSuchSession:
            if not (trashed or remains):
                return None
        except DamagedStore:
            # A damaged session is purged too; the number of its messages is unknown.
            is_readable = False
        return _PurgeTarget(
            namespace=self._namespace,
            key=key,
            uid=uid,
            uids=frozenset(uids | {uid}) - {""},
            messages=messages,
            deleted_sessions=len(trashed),
            deleted_messages=sum(session.count for session in trashed),
            before=before,
            is_readable=is_readable,
            is_unfinished=bool(remains),
            unfinished_messages=sum(session.count for session in remains),
        )


def _targets_of_keys(
    where: Location, keys: Sequence[str], before: int | None
) -> list[_PurgeTarget]:
    """Return the targets of these keys. Raises ClickException if a key has nothing to purge."""
    with open_read_only(where) as store:
        namespace = _Namespace(store, None)
        aliases = Aliases(store)
        targets = {}
        for name in keys:
            key = aliases.resolve_key(name)
            target = namespace.find_target(key, before)
            if target is None and before is None and namespace.has_unnamed_remains:
                # Assume that the user repeats an interrupted purge whose key is unknown.
                target = _PurgeTarget(namespace=None, key=key, is_unfinished=True)
            if target is None:
                # `find_session` raises the usual error about an unknown session.
                find_session(store, name)
                continue
            targets[key] = target
    return list(targets.values())


def _targets_of_person(workspace: str, who: str) -> list[_PurgeTarget]:
    """Find everything of a person: sessions of every agent, live and deleted, and notes."""
    check_exists(workspace)
    targets: list[_PurgeTarget] = []
    unfinished_namespace = ""
    for name in namespaces_of(workspace):
        if name in (CHANNELS, NOTES):
            continue  # Channels have no messages, and notes are searched below.
        with _open_namespace(Location(workspace=workspace), name) as store:
            namespace = _Namespace(store, name)
            if namespace.has_unnamed_remains:
                unfinished_namespace = name
            aliases = _aliases_by_session(store)
            targets += namespace.find_targets(
                key
                for key in namespace.all_keys()
                if any(_belongs_to(alias, who) for alias in (key, *aliases.get(key, ())))
            )
    targets += _note_targets_of_person(workspace, who, targets)
    if unfinished_namespace and not targets:
        # An interrupted purge may be about this person. Any purge in its namespace completes it.
        targets.append(_PurgeTarget(namespace=unfinished_namespace, key=who, is_unfinished=True))
    return targets


def _note_targets_of_person(
    workspace: str, who: str, sessions: Sequence[_PurgeTarget]
) -> list[_PurgeTarget]:
    """Find a person's notes, and the records of how far `sessions` were consolidated."""
    if NOTES not in namespaces_of(workspace):
        return []
    uids = {uid for target in sessions for uid in target.uids}
    with _open_namespace(Location(workspace=workspace), NOTES) as store:
        namespace = _Namespace(store, NOTES)
        return namespace.find_targets(
            key
            for key in namespace.all_keys()
            if _has_notes_of(key, who)
            or mark_uid(key) in uids
            or _is_progress_record_of(store, key, who)
        )


def _has_notes_of(key: str, who: str) -> bool:
    try:
        return _belongs_to(scope_from_key(key).who, who)
    except InvalidKey:
        return False  # not notes of stenolog


def _is_progress_record_of(store: Store, key: str, who: str) -> bool:
    """Return whether a progress record of an older version of stenolog names this person."""
    if not key.startswith(MARK_PREFIX):
        return False
    try:
        records = [store.info(key).meta]
    except StenologError:
        records = [reading.snapshot.meta for reading in _read_trash(store, key)]
    sessions = [meta.get("session") for meta in records]
    return any(isinstance(session, str) and _belongs_to(session, who) for session in sessions)


def _belongs_to(key: str, who: str) -> bool:
    return who in (key, owner_in_key(key))


def _aliases_by_session(store: Store) -> Mapping[str, Collection[str]]:
    """Return the aliases of each session that has any, including deleted sessions."""
    if alias_mark(store) == NO_ALIASES:
        return {}
    aliases = {key: set(names) for key, names in Aliases(store).aliases_by_session().items()}
    for reading in _read_trash(store):
        session = reading.snapshot
        if session.forked_from is None and aliases_in(session.meta):
            aliases.setdefault(session.key, set()).update(aliases_in(session.meta))
    return aliases


def _read_trash(store: Store, key: str | None = None) -> Iterator[SnapshotReading]:
    """Yield the readable sessions in the trash; with `key`, only those with this key."""
    if not isinstance(store, SnapshotStore):
        return
    for snapshot in store.list_snapshots():
        if snapshot.deleted is not None and key in (None, snapshot.key):
            with suppress(StenologError), store.read_snapshot(snapshot) as reading:
                yield reading


@contextmanager
def _open_namespace(
    where: Location, namespace: str | None, *, writable: bool = False
) -> Iterator[Store]:
    """Open the store of a namespace; without a namespace, the store that the options select."""
    if namespace is None:
        with (open_writable if writable else open_read_only)(where) as store:
            yield store
        return
    with (opened_store if writable else opened_read_only)(where.workspace, namespace) as opened:
        assert isinstance(opened, Store), "every namespace is a Store"
        yield opened


# --- purging ---------------------------------------------------------------------------------


def _purge_all(
    where: Location, targets: Sequence[_PurgeTarget], who: str | None
) -> Iterator[_PurgeResult]:
    """Delete the targets permanently, and yield the result of each target.

    The notes of a person are searched again after the sessions were deleted, because a
    consolidation in progress may have added notes in the meantime (see `Notes.guarded`).
    """
    sessions = [target for target in targets if who is None or not target.has_notes]
    is_only = len(targets) == 1
    with show_progress("Deleting", len(targets), enabled=not is_only) as step:
        for target in sessions:
            yield _purge_target(where, target, is_only=is_only)
            step()
        if who is not None:
            notes = _note_targets_of_person(where.workspace, who, sessions)
            for target in {target.key: target for target in (*targets, *notes)}.values():
                if target.has_notes:
                    yield _purge_target(where, target, is_only=is_only)
                    step()


def _purge_target(where: Location, target: _PurgeTarget, *, is_only: bool) -> _PurgeResult:
    try:
        with _open_namespace(where, target.namespace, writable=True) as store:
            report = store.purge(target.key, before=target.before)
    except NoSuchSession:
        return _PurgeResult(target=target)  # purged by another process
    except StenologError as error:
        if is_only:
            raise
        # Continue with the other targets, to purge as much as possible.
        return _PurgeResult(target=target, problem=str(error))
    return _PurgeResult(target=target, messages=report.messages, not_reached=report.not_reached)


def _plan_results(where: Location, targets: Sequence[_PurgeTarget]) -> Iterator[_PurgeResult]:
    """Yield the results that a purge would have, with the forks that it would report."""
    for namespace in dict.fromkeys(target.namespace for target in targets):
        group = [target for target in targets if target.namespace == namespace]
        with _open_namespace(where, namespace) as store:
            forks = _forks_of(store, {target.key for target in group})
        for target in group:
            remaining = describe_remaining(target.key, forks=forks.get(target.key, []))
            messages = target.messages + target.deleted_messages + target.unfinished_messages
            yield _PurgeResult(target=target, messages=messages, not_reached=remaining)


def _forks_of(store: Store, keys: Collection[str]) -> Mapping[str, list[str]]:
    """Return the forks of these sessions by key, including deleted forks that can be read."""
    forks: dict[str, list[str]] = {}

    def add(source: str | None, fork: str) -> None:
        if source in keys and source is not None:
            forks.setdefault(source, []).append(fork)

    for key in store.list_sessions():
        with suppress(StenologError):
            add(store.info(key).forked_from, key)
    for reading in _read_trash(store):
        add(reading.snapshot.forked_from, reading.snapshot.key)
    return forks


def _without_progress_records(targets: Sequence[_PurgeTarget]) -> list[_PurgeTarget]:
    """Return the targets that are not progress records. If there are none, return all targets."""
    return [target for target in targets if not target.is_progress_record] or list(targets)


def _print_results(results: Sequence[_PurgeResult], *, as_json: bool, dry_run: bool) -> None:
    listed_targets = _without_progress_records([result.target for result in results])
    for result in results:
        target = result.target
        if as_json:
            fields = {
                "key": target.key,
                "namespace": target.namespace,
                "messages": result.messages,
                "before": target.before,
                "not_reached": result.not_reached,
                "problem": result.problem,
                "dry_run": dry_run,
            }
            click.echo(json_text(fields))
        elif result.problem is not None:
            print_notice(f"{one_line(target.name)}: {sentence(result.problem)}")
        elif not dry_run and target in listed_targets:
            count = target.count_text(result.messages)
            print_notice(f"Deleted permanently: {one_line(target.name)}, {count}.")


# --- remaining data --------------------------------------------------------------------------


def _remaining_data(
    where: Location, results: Sequence[_PurgeResult], who: str | None
) -> Iterator[str]:
    """Yield a phrase for each place that may still contain purged data, without repetition."""
    purged_keys = {result.target.key for result in results if result.problem is None}
    yield from _remaining_forks(results)
    agents: Sequence[str | None] = (where.agent,)
    if who is not None:
        yield f"messages of {one_line(who)} in other sessions, such as group chats"
        agents = (None, *other_namespaces(where.workspace).agents)
    else:
        for key in sorted(purged_keys):
            if note_count := _count_notes(where, key):
                notes_text = f"{plural(note_count, 'note')} about {one_line(key)}"
                yield f"{notes_text}; `steno purge --scope` deletes notes too"
    for agent in agents if where.namespace in (None, NAMESPACE) else ():
        place = locate_sessions(where.workspace, agent)
        for namespace, key in sorted(copies_in_fallback(place)):
            if key in purged_keys if who is None else _belongs_to(key, who):
                option = "" if namespace == NAMESPACE else f" --namespace {quote(namespace)}"
                command = f"steno purge {quote(key)} -w {quote(str(place.fallback))}{option}"
                yield one_line(
                    f"messages of {key} in the fallback folder {place.fallback}/{namespace}; "
                    f"delete them with `{command}`"
                )
    yield "earlier backups and copies"


def _remaining_forks(results: Sequence[_PurgeResult]) -> Iterator[str]:
    """Yield the forks and other places that a purge did not reach, without purged forks."""
    purged_keys = {result.target.key for result in results if result.problem is None}
    purged_forks = tuple(f"the fork {key!r} has " for key in purged_keys)
    places = dict.fromkeys(place for result in results for place in result.not_reached)
    yield from (place for place in places if not place.startswith(purged_forks))


def _count_notes(where: Location, key: str) -> int:
    """Return the number of notes about the owner of a session; 0 if they cannot be read."""
    agent, person = where.agent or MAIN_AGENT, owner_in_key(key)
    scopes = {
        Scope(agent=agent, who=key),
        Scope(agent=agent, who=person),
        Scope(agent=agent, who=person, of="sender"),
    }
    with suppress(StenologError):
        if NOTES in namespaces_of(where.workspace):
            with _open_namespace(where, NOTES) as store:
                return sum(len(Notes(store).list(scope, full=True)) for scope in scopes)
    return 0


def _clear_retention_log(
    where: Location, results: Sequence[_PurgeResult], who: str | None
) -> Iterator[str]:
    """Remove purged sessions from the retention log; yield a phrase if entries remain."""
    purged_keys = {
        escaped_for_log(result.target.key)
        for result in results
        if result.problem is None and result.target.before is None and not result.target.has_notes
    }
    logged_place = place_in_log(where.agent, where.namespace or NAMESPACE)

    def is_purged(place: str, key: str) -> bool:
        if who is not None:
            return key in purged_keys or _belongs_to(key, who)
        return key in purged_keys and place == logged_place

    if not purged_keys:
        return
    if parse_address(where.workspace).engine == "jsonl":
        try:
            mask_keys_in_log(where.workspace, is_purged)
        except StenologError as error:
            yield f"entries in the retention log: {error}"
    elif who is not None:
        # If only keys are purged, no phrase is needed: retention may not have logged them.
        yield "entries about the session in the program's log"


# --- input history ---------------------------------------------------------------------------


def _input_history_file() -> Path | None:
    """Return the input history of chats, or None if it is missing or empty."""
    # This import is slow and only needed for a purge.
    from stenolog.cli.chat_input import history_file

    file = history_file()
    with suppress(OSError):
        if file.stat().st_size:
            return file
    return None


def _clear_history(file: Path, where: Location, targets: Sequence[_PurgeTarget]) -> str:
    """Remove messages from the input history; return a phrase about a failure, or an empty text."""
    from stenolog.cli.chat_input import remove_entries

    texts = set[str]()
    for target in targets:
        if not target.has_notes:
            with suppress(StenologError), _open_namespace(where, target.namespace) as store:
                texts.update(_user_texts(store, target))
    try:
        remove_entries(file, texts)
    except OSError as error:
        return f"chat input in {one_line(str(file))}: {error.strerror}"
    return ""


def _user_texts(store: Store, target: _PurgeTarget) -> Iterator[str]:
    """Yield the readable user messages of a target."""
    with suppress(StenologError):
        for message in store.get_history(target.key, full=True):
            if target.before is None or message.seq < target.before:
                yield from _user_text(message)
    if target.before is None:
        for reading in _read_trash(store, target.key):
            with suppress(StenologError):
                for message in reading.messages:
                    yield from _user_text(message)


def _user_text(message: Message) -> Iterator[str]:
    body = message.to_dict()
    content = body.get("content")
    if body.get("role") == "user" and isinstance(content, str):
        yield content.strip()
