"""`steno purge`: permanently delete sessions, or everything of one person."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from shlex import quote
from typing import Final

import click
from msgspec import Struct

from stenolog.cli.completion import complete_key
from stenolog.cli.delete_restore import json_option, list_lines, require_confirmation, yes_option
from stenolog.cli.edit import dry_run_option, open_writable, progress
from stenolog.cli.output import (
    PARTIAL,
    json_text,
    one_line,
    plural,
    print_notice,
    printable,
    sentence,
)
from stenolog.cli.show import find_session
from stenolog.cli.workspace import Location, check_exists, location_options, open_read_only
from stenolog.errors import DamagedStore, InvalidKey, NoSuchSession, StenologError
from stenolog.maintenance.retention_runs import escaped_for_log, mask_keys_in_log, place_in_log
from stenolog.memory.notes import Notes
from stenolog.memory.scopes import MARK_PREFIX, Scope, mark_uid, scope_from_key
from stenolog.records import Message, Trashed
from stenolog.sessions.aliases import NO_ALIASES, Aliases, alias_mark, aliases_in
from stenolog.sessions.folders import CHANNELS, NAMESPACE, NOTES, locate_sessions, other_namespaces
from stenolog.sessions.keys import owner_in_key
from stenolog.stores.base import PurgingStore, Store
from stenolog.stores.open_store import address
from stenolog.stores.snapshots import Snapshot, SnapshotStore
from stenolog.stores.state import not_reached
from stenolog.transfer.copy_all import namespaces_of, opened_read_only, opened_store
from stenolog.transfer.fallback import copies_in_fallback

MAIN: Final = "main"
"""Name of the default agent in the notes."""
_WARNING: Final = "This cannot be undone."


class _PurgeTarget(Struct, frozen=True, kw_only=True):
    """Target of a purge: everything with one key in one namespace."""

    namespace: str | None
    """None: the namespace given by the command's options."""
    key: str
    uid: str = ""
    """Uid of the live session, otherwise of the one deleted last; empty if unknown."""
    uids: frozenset[str] = frozenset()
    """Uids of the live session and the deleted ones."""
    messages: int = 0
    """Number of messages of the live session."""
    deleted: int = 0
    """Number of sessions with this key in the trash."""
    in_trash: int = 0
    """Number of messages of those sessions."""
    before: int | None = None
    readable: bool = True
    unfinished: bool = False
    """Whether an earlier purge of it was interrupted."""
    left: int = 0
    """Number of messages that the interrupted purge left."""

    @property
    def is_notes(self) -> bool:
        """Whether it contains notes, not a conversation."""
        return self.namespace == NOTES

    @property
    def is_progress(self) -> bool:
        """Whether it only records the progress of consolidating a session."""
        return self.is_notes and self.key.startswith(MARK_PREFIX)

    @property
    def confirmation(self) -> str:
        """Return the text to type as confirmation: the key, or the uid if it is not printable."""
        return self.key if _is_typable(self.key) else self.uid or ascii(self.key)

    @property
    def name(self) -> str:
        """Return the name that is printed."""
        if not self.is_notes:
            return self.key
        if self.is_progress:
            return "progress of consolidation"
        scope = scope_from_key(self.key)
        agent = "" if scope.agent == MAIN else f" (agent {scope.agent})"
        return f"notes of {scope.name}{agent}"

    @property
    def description(self) -> str:
        """Describe everything that would be deleted."""
        place = "" if self.namespace is None or self.is_notes else f" in {self.namespace}"
        what = "note" if self.is_notes else "message"
        upto = "" if self.before is None else f" before seq {self.before}"
        trash = (
            f", and {plural(self.deleted, 'session')} of this key in the trash with "
            f"{plural(self.in_trash, what)}"
            if self.deleted
            else ""
        )
        trash += ", and the rest of an interrupted purge" if self.unfinished else ""
        if self.unfinished and not self.uid:
            return one_line(f"{self.name}{place}: the rest of an interrupted purge")
        if not self.readable:
            return one_line(f"{self.name}{place}: unreadable{trash}")
        return one_line(f"{self.name}{place}: {plural(self.messages, what)}{upto}{trash}")


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
@json_option
@location_options
@click.pass_context
def purge_command(
    ctx: click.Context,
    keys: tuple[str, ...],
    before: int | None,
    who: str | None,
    yes: bool,
    dry_run: bool,
    as_json: bool,
    where: Location,
) -> None:
    """Delete sessions permanently, or everything about one person.

    A session is deleted with its archives, its index entries, and all sessions of the same key in
    the trash. --scope WHO deletes all sessions of a person in the workspace, of all agents and
    under all aliases, and all notes about them. Entries in the retention log and in the input
    history of chats are removed too. What cannot be deleted is listed on stderr: forks, summaries,
    imported files.

    You are asked to type the key (or WHO) to confirm, or the uid if the key cannot be typed.
    Without a terminal, --yes is required. An interrupted purge is completed by running it again.

    Example: steno purge --scope telegram:123 --dry-run

    Exit codes: 0 done, 1 failed or not confirmed, 2 wrong usage, 3 some data could not be deleted.
    """
    if (who is None) == (not keys):
        raise click.UsageError("Give either a KEY or --scope WHO.")
    if who is not None and (before is not None or where.agent or where.namespace):
        raise click.UsageError("--scope cannot be combined with --before, --agent or --namespace.")
    if not dry_run:
        require_confirmation(yes, "This deletes permanently")
    if who is not None:
        targets = _targets_of_person(where.workspace, who)
        if not targets:
            raise click.ClickException(f"There is no data about {one_line(who)} here.")
    else:
        targets = _targets_of_keys(where, keys, before)
    lines = [target.description for target in _without_progress_records(targets)]
    if dry_run:
        list_lines("Would be deleted permanently:", lines)
        results = list(_plan_results(where, targets))
        _print_results(results, as_json=as_json, dry_run=True)
        for words in _remaining_forks(results):
            print_notice(f"Would not be deleted: {sentence(words)}")
        return
    if not yes:
        list_lines("To be deleted permanently:", lines)
        print_notice(_WARNING)
        by_name = who is not None and _is_typable(who)
        _confirm_names(
            [who]
            if who and by_name
            else [one.confirmation for one in _without_progress_records(targets)]
        )
    typed = input_history_file()
    # First, while the messages can still be read: a repeated purge could not read them any more.
    kept = remove_input_history(typed, _user_messages(where, targets)) if typed is not None else ""
    results = list(_purge_all(where, targets, who))
    _print_results(results, as_json=as_json, dry_run=False)
    for words in (
        *_remaining_data(where, results, who),
        *_remove_traces(where, results, who, typed, kept),
    ):
        print_notice(f"Not deleted: {sentence(words)}")
    ctx.exit(PARTIAL if any(one.problem for one in results) else 0)


def _confirm_names(names: Iterable[str]) -> None:
    """Ask the user to type each name. Raises ClickException if another text is typed."""
    for name in names:
        wanted = one_line(printable(name)).strip()
        typed = click.prompt(f"Type {wanted} to confirm", default="", show_default=False, err=True)
        if not wanted or typed.strip() != wanted:  # guard: purge-asks
            raise click.ClickException(f"You did not type {wanted}. Nothing was deleted.")


def _is_typable(name: str) -> bool:
    """Return whether a name is printable and not blank, so that a user can type it."""
    return bool(name.strip()) and name.isprintable()


def _targets_of_keys(
    where: Location, keys: Sequence[str], before: int | None
) -> list[_PurgeTarget]:
    """Return the targets of these keys. Raises ClickException if a key has nothing to purge."""
    with open_read_only(where) as store:
        trash = store.list_trash()
        left = _unfinished_purges(store) if before is None else []
        aliases = Aliases(store)
        found = {}
        for name in keys:
            key = aliases.resolve_key(name)
            target = _target(store, None, key, trash, before, left)
            if target is None and any(not one.key for one in left):
                # The key of an interrupted purge is no longer known; assume that the same purge is
                # repeated.
                target = _PurgeTarget(namespace=None, key=key, unfinished=True)
            if target is None:
                # Raises the usual error about an unknown session.
                find_session(store, name)
                continue
            found[key] = target
    return list(found.values())


def _unfinished_purges(store: Store) -> list[Trashed]:
    """Return the remains of interrupted purges."""
    return store.unfinished_purges() if isinstance(store, PurgingStore) else []


def _target(
    store: Store,
    namespace: str | None,
    key: str,
    trash: Sequence[Trashed],
    before: int | None = None,
    left: Sequence[Trashed] = (),
) -> _PurgeTarget | None:
    """Return the target of a key, or None if there is nothing to purge."""
    deleted = [one for one in trash if one.key == key]
    unfinished = [one for one in left if one.key == key]
    uid, messages, readable = deleted[0].uid if deleted else "", 0, True
    uids = {one.uid for one in (*deleted, *unfinished)}
    try:
        info = store.info(key)
        uid, messages = info.uid, info.count
        if before is not None:
            every = store.get_history(key, full=True)
            messages = sum(message.seq < before for message in every)
    except NoSuchSession:
        if before is not None or not (deleted or unfinished):
            return None
    except DamagedStore:
        # A damaged session is purged too; the number of its messages is unknown.
        readable = False
    return _PurgeTarget(
        namespace=namespace,
        key=key,
        uid=uid,
        uids=frozenset(uids | {uid}) - {""},
        messages=messages,
        deleted=0 if before is not None else len(deleted),
        in_trash=0 if before is not None else sum(one.count for one in deleted),
        before=before,
        readable=readable,
        unfinished=bool(unfinished),
        left=sum(one.count for one in unfinished),
    )


def _targets_of_person(workspace: str, who: str) -> list[_PurgeTarget]:
    """Find everything of a person: sessions of every agent, live and deleted, and notes."""
    check_exists(workspace)
    found: list[_PurgeTarget] = []
    unknown = ""
    for namespace in namespaces_of(workspace):
        if namespace in (CHANNELS, NOTES):
            continue  # channels contain no messages; notes are found through the sessions
        with opened_read_only(workspace, namespace) as store:
            assert isinstance(store, Store), "every namespace is a Store"
            trash, left = store.list_trash(), _unfinished_purges(store)
            unknown = namespace if any(not one.key for one in left) else unknown
            every = [*store.list_sessions(), *(one.key for one in (*trash, *left) if one.key)]
            names = aliases_by_session(store)
            keys = [
                key
                for key in every
                if any(_belongs_to(name, who) for name in (key, *names.get(key, ())))
            ]
            targets = [
                _target(store, namespace, key, trash, left=left) for key in dict.fromkeys(keys)
            ]
            found += [target for target in targets if target is not None]
    found += _note_targets_of_person(workspace, who, found)
    if unknown and not found:
        # Any purge in this namespace completes it, and this may be the one that was interrupted.
        found.append(_PurgeTarget(namespace=unknown, key=who, unfinished=True))
    return found


def _note_targets_of_person(
    workspace: str, who: str, sessions: Sequence[_PurgeTarget]
) -> list[_PurgeTarget]:
    """Find the notes of a person, and how far these sessions of theirs were consolidated."""
    if NOTES not in namespaces_of(workspace):
        return []
    uids = {uid for target in sessions for uid in target.uids}
    with opened_read_only(workspace, NOTES) as store:
        assert isinstance(store, Store), "every namespace is a Store"
        trash, left = store.list_trash(), _unfinished_purges(store)
        every = [*store.list_sessions(), *(one.key for one in (*trash, *left) if one.key)]
        targets = [
            _target(store, NOTES, key, trash, left=left)
            for key in dict.fromkeys(every)
            if _has_notes_of(key, who) or mark_uid(key) in uids or _is_mark_of(store, key, who)
        ]
    return [target for target in targets if target is not None]


def _has_notes_of(key: str, who: str) -> bool:
    try:
        return _belongs_to(scope_from_key(key).who, who)
    except InvalidKey:
        return False  # not notes of stenolog


def _is_mark_of(store: Store, key: str, who: str) -> bool:
    """Return whether a progress record, as older versions wrote it, names this person."""
    if not key.startswith(MARK_PREFIX):
        return False
    try:
        metas = [store.info(key).meta]
    except StenologError:
        metas = [snapshot.meta for snapshot in deleted_snapshots(store) if snapshot.key == key]
    sessions = [meta.get("session") for meta in metas]
    return any(isinstance(session, str) and _belongs_to(session, who) for session in sessions)


def _belongs_to(key: str, who: str) -> bool:
    return who in (key, owner_in_key(key))


def _purge_all(
    where: Location, targets: Sequence[_PurgeTarget], who: str | None
) -> Iterator[_PurgeResult]:
    """Delete them permanently, and yield the result of each.

    The notes of a person are looked for again once the sessions are gone: a consolidation in
    progress may have added some. After that it adds none (see `Notes.guarded`).
    """
    sessions = [target for target in targets if who is None or not target.is_notes]
    with progress("Deleting", len(targets), shown=len(targets) > 1) as step:
        for target in sessions:
            yield _purge(where, target, alone=len(targets) == 1)
            step()
        if who is not None:
            found = _note_targets_of_person(where.workspace, who, sessions)
            for target in {target.key: target for target in (*targets, *found)}.values():
                if target.is_notes:
                    yield _purge(where, target, alone=len(targets) == 1)
                    step()


def _purge(where: Location, target: _PurgeTarget, *, alone: bool) -> _PurgeResult:
    try:
        with _open_namespace(where, target.namespace, to_read=False) as store:
            done = store.purge(target.key, before=target.before)
    except NoSuchSession:
        return _PurgeResult(target=target)  # purged by another process
    except StenologError as error:
        if alone:
            raise
        # Purge as much as possible.
        return _PurgeResult(target=target, problem=str(error))
    return _PurgeResult(target=target, messages=done.messages, not_reached=done.not_reached)


def _plan_results(where: Location, targets: Sequence[_PurgeTarget]) -> Iterator[_PurgeResult]:
    """Yield what a purge would delete, with the forks that it would report."""
    for namespace in dict.fromkeys(target.namespace for target in targets):
        here = [target for target in targets if target.namespace == namespace]
        with _open_namespace(where, namespace) as store:
            forks = forks_of(store, {target.key for target in here})
        for one in here:
            remaining = not_reached(one.key, forks=forks.get(one.key, []))
            messages = one.messages + one.in_trash + one.left
            yield _PurgeResult(target=one, messages=messages, not_reached=remaining)


@contextmanager
def _open_namespace(
    where: Location, namespace: str | None, *, to_read: bool = True
) -> Iterator[Store]:
    """Open the store of a namespace, or the one given by the options."""
    if namespace is None:
        with open_read_only(where) if to_read else open_writable(where) as store:
            yield store
        return
    with (opened_read_only if to_read else opened_store)(where.workspace, namespace) as store:
        assert isinstance(store, Store), "every namespace is a Store"
        yield store


def _user_messages(where: Location, targets: Sequence[_PurgeTarget]) -> set[str]:
    """Return the user messages that will be purged, to remove them from the input history too."""
    said = set[str]()
    for target in targets:
        if not target.is_notes:
            with suppress(StenologError), _open_namespace(where, target.namespace) as store:
                said.update(user_texts(store, target.key, target.before))
    return said


def _remove_traces(
    where: Location,
    results: Sequence[_PurgeResult],
    who: str | None,
    typed: Path | None,
    kept: str,
) -> Iterator[str]:
    """Remove other traces of purged sessions; yield a phrase for each one that remains."""
    purged_keys = {
        escaped_for_log(one.target.key)
        for one in results
        if one.problem is None and one.target.before is None and not one.target.is_notes
    }
    place = place_in_log(where.agent, where.namespace or NAMESPACE)

    def is_meant(at: str, key: str) -> bool:
        if who is not None:
            return key in purged_keys or _belongs_to(key, who)
        return key in purged_keys and at == place

    if purged_keys:
        left = remove_log_entries(where.workspace, is_meant)
        # For a single session, retention may never have logged anything.
        if left and (who is not None or "program's log" not in left):
            yield left
    if kept:
        yield kept
    elif typed is not None and who is not None:
        yield (f"other chat input in {one_line(str(typed))}; the file does not record who typed it")


def _without_progress_records(targets: Sequence[_PurgeTarget]) -> list[_PurgeTarget]:
    """Leave out progress records, unless there is nothing else."""
    return [target for target in targets if not target.is_progress] or list(targets)


def _print_results(results: Sequence[_PurgeResult], *, as_json: bool, dry_run: bool) -> None:
    named = _without_progress_records([one.target for one in results])
    for one in results:
        target = one.target
        if as_json:
            fields = {
                "key": target.key,
                "namespace": target.namespace,
                "messages": one.messages,
                "before": target.before,
                "not_reached": list(one.not_reached),
                "problem": one.problem,
                "dry_run": dry_run,
            }
            click.echo(json_text(fields))
        elif one.problem is not None:
            print_notice(f"{one_line(target.name)}: {sentence(one.problem)}")
        elif not dry_run and target in named:
            what = "note" if target.is_notes else "message"
            print_notice(
                f"Deleted permanently: {one_line(target.name)}, {plural(one.messages, what)}."
            )


def _remaining_data(
    where: Location, results: Sequence[_PurgeResult], who: str | None
) -> Iterator[str]:
    """Yield a phrase for each place that may still contain purged data, without repetition."""
    purged = {one.target.key for one in results if one.problem is None}
    yield from _remaining_forks(results)
    if who is not None:
        yield f"messages of {one_line(who)} in other sessions, such as group chats"
    else:
        for key in sorted(purged):
            notes = _count_notes(where, key)
            if notes:
                yield (
                    f"{plural(notes, 'note')} about {one_line(key)}; `steno purge --scope` deletes "
                    "notes too"
                )
    agents = (
        (None, *other_namespaces(where.workspace).agents) if who is not None else (where.agent,)
    )
    for agent in agents if where.namespace in (None, NAMESPACE) else ():
        yield from fallback_copies(
            where.workspace,
            agent,
            lambda key: key in purged if who is None else _belongs_to(key, who),
        )
    yield "earlier backups and copies"


def _remaining_forks(results: Sequence[_PurgeResult]) -> Iterator[str]:
    """Yield the places that a purge did not reach, except forks that are purged too."""
    purged = {one.target.key for one in results if one.problem is None}
    also = tuple(f"the fork {key!r} has " for key in purged)
    places = dict.fromkeys(words for one in results for words in one.not_reached)
    yield from (words for words in places if not words.startswith(also))


def _count_notes(where: Location, key: str) -> int:
    """Return the number of notes about the owner of a session; 0 if they cannot be read."""
    try:
        if NOTES not in namespaces_of(where.workspace):
            return 0
        with opened_read_only(where.workspace, NOTES) as store:
            assert isinstance(store, Store), "every namespace is a Store"
            agent, person = where.agent or MAIN, owner_in_key(key)
            scopes = {
                Scope(agent=agent, who=key),
                Scope(agent=agent, who=person),
                Scope(agent=agent, who=person, of="sender"),
            }
            return sum(len(Notes(store).list(scope, full=True)) for scope in scopes)
    except StenologError:
        return 0


# --- other traces ---------------------------------------------------------------------------------


def aliases_by_session(store: Store) -> Mapping[str, Collection[str]]:
    """Return the aliases of each session that has any, including deleted sessions."""
    if alias_mark(store) == NO_ALIASES:
        return {}
    found = {key: set(names) for key, names in Aliases(store).aliases_by_session().items()}
    for snapshot in deleted_snapshots(store):
        if snapshot.forked_from is None and aliases_in(snapshot.meta):
            found.setdefault(snapshot.key, set()).update(aliases_in(snapshot.meta))
    return found


def forks_of(store: Store, keys: Collection[str]) -> Mapping[str, list[str]]:
    """Return the forks of these sessions, including deleted ones, if they can be read."""
    found: dict[str, list[str]] = {}
    for key in store.list_sessions():
        with suppress(StenologError):
            source = store.info(key).forked_from
            if source in keys and source is not None:
                found.setdefault(source, []).append(key)
    for snapshot in deleted_snapshots(store):
        if snapshot.forked_from in keys and snapshot.forked_from is not None:
            found.setdefault(snapshot.forked_from, []).append(snapshot.key)
    return found


def deleted_snapshots(store: Store) -> Iterator[Snapshot]:
    """Yield the sessions in the trash that can be read."""
    if not isinstance(store, SnapshotStore):
        return
    for mark in store.list_snapshots():
        if mark.deleted is not None:
            with suppress(StenologError), store.read_snapshot(mark) as reading:
                yield reading.snapshot


def fallback_copies(
    workspace: str, agent: str | None, is_meant: Callable[[str], bool]
) -> Iterator[str]:
    """Yield a phrase for each session that the fallback folder still contains."""
    place = locate_sessions(workspace, agent)
    for namespace, key in sorted(copies_in_fallback(place)):
        if is_meant(key):
            other = "" if namespace == NAMESPACE else f" --namespace {quote(namespace)}"
            command = f"steno purge {quote(key)} -w {quote(str(place.fallback))}{other}"
            yield one_line(
                f"messages of {key} in the fallback folder {place.fallback}/{namespace}; delete "
                f"them with `{command}`"
            )


# --- input history ---------------------------------------------------------------------------


def input_history_file() -> Path | None:
    """Return the input history of chats, or None if it is missing or empty."""
    # Imported late: slow, and only needed for a purge.
    from stenolog.cli.chat_input import history_file

    file = history_file()
    with suppress(OSError):
        if file.stat().st_size:
            return file
    return None


def user_texts(store: Store, key: str, before: int | None) -> Iterator[str]:
    """Yield the readable user messages with this key, below seq `before` if it is given."""
    with suppress(StenologError):
        yield from _texts(store.get_history(key, full=True), before)
    if before is None and isinstance(store, SnapshotStore):
        for mark in store.list_snapshots():
            if mark.deleted is not None and mark.key == key:
                with suppress(StenologError), store.read_snapshot(mark) as reading:
                    yield from _texts(reading.messages, None)


def _texts(messages: Iterable[Message], before: int | None) -> Iterator[str]:
    for message in messages:
        meant = before is None or message.seq < before
        body = message.to_dict() if meant else {}
        content = body.get("content")
        if body.get("role") == "user" and isinstance(content, str):
            yield content.strip()


def remove_input_history(file: Path, said: Collection[str]) -> str:
    """Remove messages from the input history; return a phrase about the failure, or nothing."""
    from stenolog.cli.chat_input import remove_entries

    try:
        remove_entries(file, said)
    except OSError as error:
        return f"chat input in {one_line(str(file))}: {error.strerror}"
    return ""


# --- the log of retention --------------------------------------------------------------------


def remove_log_entries(workspace: str, is_meant: Callable[[str, str], bool]) -> str:
    """Remove sessions from the log of retention; return a phrase about what remains, or nothing."""
    if address(workspace).engine != "jsonl":
        return "entries about it that retention wrote to the program's log"
    try:
        mask_keys_in_log(workspace, is_meant)
    except StenologError as error:
        return f"entries in the retention log: {error}"
    return ""
