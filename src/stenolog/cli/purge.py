"""`steno purge`: permanently delete sessions, or everything of one person."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import click
from msgspec import Struct

from stenolog.cli.completion import complete_key
from stenolog.cli.delete_restore import check_somebody, json_option, list_lines, yes_option
from stenolog.cli.edit import dry_run_option, open_to_change, progress
from stenolog.cli.output import NOT_ALL, count, json_text, one_line, printable, say, sentence
from stenolog.cli.purge_traces import (
    copies_of,
    deleted_snapshots,
    forget_logged,
    forget_typed,
    forks_of,
    other_names,
    said_in,
    typed_history,
)
from stenolog.cli.show import info_of
from stenolog.cli.workspace import Where, check_there, open_to_read, where_options
from stenolog.errors import DamagedStore, InvalidKey, NoSuchSession, StenologError
from stenolog.maintenance.retention_runs import escaped_for_log, place_in_log
from stenolog.memory.notes import Notes
from stenolog.memory.scopes import MARK_PREFIX, Scope, mark_uid, scope_from_key
from stenolog.records import Trashed
from stenolog.sessions.aliases import Aliases
from stenolog.sessions.folders import CHANNELS, NAMESPACE, NOTES, other_namespaces
from stenolog.sessions.keys import owner_in_key
from stenolog.stores.base import PurgingStore, Store
from stenolog.stores.state import not_reached
from stenolog.transfer.copy_all import namespaces_of, opened_read_only, opened_store

MAIN: Final = "main"
"""Name of the default agent in the notes."""
_WARNING: Final = "This cannot be undone."


class _Target(Struct, frozen=True, kw_only=True):
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
    def of_notes(self) -> bool:
        """Whether it contains notes, not a conversation."""
        return self.namespace == NOTES

    @property
    def is_mark(self) -> bool:
        """Whether it only records the progress of consolidating a session."""
        return self.of_notes and self.key.startswith(MARK_PREFIX)

    @property
    def to_type(self) -> str:
        """Return the text to type as confirmation: the key, or the uid if it is not printable."""
        return self.key if _can_be_typed(self.key) else self.uid or ascii(self.key)

    @property
    def name(self) -> str:
        """Return the name that is printed."""
        if not self.of_notes:
            return self.key
        if self.is_mark:
            return "progress of consolidation"
        scope = scope_from_key(self.key)
        agent = "" if scope.agent == MAIN else f" (agent {scope.agent})"
        return f"notes of {scope.name}{agent}"

    @property
    def words(self) -> str:
        """Describe everything that would be deleted."""
        place = "" if self.namespace is None or self.of_notes else f" in {self.namespace}"
        what = "note" if self.of_notes else "message"
        upto = "" if self.before is None else f" before seq {self.before}"
        trash = (
            f", and {count(self.deleted, 'session')} of this key in the trash with "
            f"{count(self.in_trash, what)}"
            if self.deleted
            else ""
        )
        trash += ", and the rest of an interrupted purge" if self.unfinished else ""
        if self.unfinished and not self.uid:
            return one_line(f"{self.name}{place}: the rest of an interrupted purge")
        if not self.readable:
            return one_line(f"{self.name}{place}: unreadable{trash}")
        return one_line(f"{self.name}{place}: {count(self.messages, what)}{upto}{trash}")


class _Gone(Struct, frozen=True, kw_only=True):
    """Result of purging a target."""

    target: _Target
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
@where_options
@click.pass_context
def purge_command(
    ctx: click.Context,
    keys: tuple[str, ...],
    before: int | None,
    who: str | None,
    yes: bool,
    dry_run: bool,
    as_json: bool,
    where: Where,
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
        check_somebody(yes, "This deletes permanently")
    if who is not None:
        targets = _of_person(where.workspace, who)
        if not targets:
            raise click.ClickException(f"There is no data about {one_line(who)} here.")
    else:
        targets = _of_keys(where, keys, before)
    lines = [target.words for target in _worth_naming(targets)]
    if dry_run:
        list_lines("Would be deleted permanently:", lines)
        gone = list(_would_go(where, targets))
        _print_gone(gone, as_json=as_json, dry_run=True)
        for words in _forks_that_stay(gone):
            say(f"Would not be deleted: {sentence(words)}")
        return
    if not yes:
        list_lines("To be deleted permanently:", lines)
        say(_WARNING)
        by_name = who is not None and _can_be_typed(who)
        _ask_for([who] if who and by_name else [one.to_type for one in _worth_naming(targets)])
    typed = typed_history()
    # First, while the messages can still be read: a repeated purge could not read them any more.
    kept = forget_typed(typed, _said(where, targets)) if typed is not None else ""
    gone = list(_purged(where, targets, who))
    _print_gone(gone, as_json=as_json, dry_run=False)
    for words in (*_not_reached(where, gone, who), *_traces(where, gone, who, typed, kept)):
        say(f"Not deleted: {sentence(words)}")
    ctx.exit(NOT_ALL if any(one.problem for one in gone) else 0)


def _ask_for(names: Iterable[str]) -> None:
    """Ask the user to type each name. Raises ClickException if another text is typed."""
    for name in names:
        wanted = one_line(printable(name)).strip()
        typed = click.prompt(f"Type {wanted} to confirm", default="", show_default=False, err=True)
        if not wanted or typed.strip() != wanted:  # guard: purge-asks
            raise click.ClickException(f"You did not type {wanted}. Nothing was deleted.")


def _can_be_typed(name: str) -> bool:
    """Return whether a name is printable and not blank, so that a user can type it."""
    return bool(name.strip()) and name.isprintable()


def _of_keys(where: Where, keys: Sequence[str], before: int | None) -> list[_Target]:
    """Return the targets of these keys. Raises ClickException if a key has nothing to purge."""
    with open_to_read(where) as store:
        trash = store.list_trash()
        left = _left_in(store) if before is None else []
        aliases = Aliases(store)
        found = {}
        for name in keys:
            key = aliases.own_key(name)
            target = _target(store, None, key, trash, before, left)
            if target is None and any(not one.key for one in left):
                # The key of an interrupted purge is no longer known; assume that the same purge is
                # repeated.
                target = _Target(namespace=None, key=key, unfinished=True)
            if target is None:
                # Raises the usual error about an unknown session.
                info_of(store, name)
                continue
            found[key] = target
    return list(found.values())


def _left_in(store: Store) -> list[Trashed]:
    """Return the remains of interrupted purges."""
    return store.unfinished_purges() if isinstance(store, PurgingStore) else []


def _target(
    store: Store,
    namespace: str | None,
    key: str,
    trash: Sequence[Trashed],
    before: int | None = None,
    left: Sequence[Trashed] = (),
) -> _Target | None:
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
    return _Target(
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


def _of_person(workspace: str, who: str) -> list[_Target]:
    """Find everything of a person: sessions of every agent, live and deleted, and notes."""
    check_there(workspace)
    found: list[_Target] = []
    unknown = ""
    for namespace in namespaces_of(workspace):
        if namespace in (CHANNELS, NOTES):
            continue  # channels contain no messages; notes are found through the sessions
        with opened_read_only(workspace, namespace) as store:
            assert isinstance(store, Store), "what is copied is a store"
            trash, left = store.list_trash(), _left_in(store)
            unknown = namespace if any(not one.key for one in left) else unknown
            every = [*store.list_sessions(), *(one.key for one in (*trash, *left) if one.key)]
            names = other_names(store)
            keys = [
                key
                for key in every
                if any(_is_of(name, who) for name in (key, *names.get(key, ())))
            ]
            targets = [
                _target(store, namespace, key, trash, left=left) for key in dict.fromkeys(keys)
            ]
            found += [target for target in targets if target is not None]
    found += _notes_of_person(workspace, who, found)
    if unknown and not found:
        # Any purge in this namespace completes it, and this may be the one that was interrupted.
        found.append(_Target(namespace=unknown, key=who, unfinished=True))
    return found


def _notes_of_person(workspace: str, who: str, sessions: Sequence[_Target]) -> list[_Target]:
    """Find the notes of a person, and how far these sessions of theirs were consolidated."""
    if NOTES not in namespaces_of(workspace):
        return []
    uids = {uid for target in sessions for uid in target.uids}
    with opened_read_only(workspace, NOTES) as store:
        assert isinstance(store, Store), "what is copied is a store"
        trash, left = store.list_trash(), _left_in(store)
        every = [*store.list_sessions(), *(one.key for one in (*trash, *left) if one.key)]
        targets = [
            _target(store, NOTES, key, trash, left=left)
            for key in dict.fromkeys(every)
            if _has_notes_of(key, who) or mark_uid(key) in uids or _is_mark_of(store, key, who)
        ]
    return [target for target in targets if target is not None]


def _has_notes_of(key: str, who: str) -> bool:
    try:
        return _is_of(scope_from_key(key).who, who)
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
    return any(isinstance(session, str) and _is_of(session, who) for session in sessions)


def _is_of(key: str, who: str) -> bool:
    return who in (key, owner_in_key(key))


def _purged(where: Where, targets: Sequence[_Target], who: str | None) -> Iterator[_Gone]:
    """Delete them permanently, and yield the result of each.

    The notes of a person are looked for again once the sessions are gone: a consolidation in
    progress may have added some. After that it adds none (see `Notes.guarded`).
    """
    sessions = [target for target in targets if who is None or not target.of_notes]
    with progress("Deleting", len(targets), shown=len(targets) > 1) as step:
        for target in sessions:
            yield _purge(where, target, alone=len(targets) == 1)
            step()
        if who is not None:
            found = _notes_of_person(where.workspace, who, sessions)
            for target in {target.key: target for target in (*targets, *found)}.values():
                if target.of_notes:
                    yield _purge(where, target, alone=len(targets) == 1)
                    step()


def _purge(where: Where, target: _Target, *, alone: bool) -> _Gone:
    try:
        with _opened(where, target.namespace, to_read=False) as store:
            done = store.purge(target.key, before=target.before)
    except NoSuchSession:
        return _Gone(target=target)  # purged by another process
    except StenologError as error:
        if alone:
            raise
        # Purge as much as possible.
        return _Gone(target=target, problem=str(error))
    return _Gone(target=target, messages=done.messages, not_reached=done.not_reached)


def _would_go(where: Where, targets: Sequence[_Target]) -> Iterator[_Gone]:
    """Yield what a purge would delete, with the forks that it would report."""
    for namespace in dict.fromkeys(target.namespace for target in targets):
        here = [target for target in targets if target.namespace == namespace]
        with _opened(where, namespace) as store:
            forks = forks_of(store, {target.key for target in here})
        for one in here:
            told = not_reached(one.key, forks=forks.get(one.key, []))
            messages = one.messages + one.in_trash + one.left
            yield _Gone(target=one, messages=messages, not_reached=told)


@contextmanager
def _opened(where: Where, namespace: str | None, *, to_read: bool = True) -> Iterator[Store]:
    """Open the store of a namespace, or the one given by the options."""
    if namespace is None:
        with open_to_read(where) if to_read else open_to_change(where) as store:
            yield store
        return
    with (opened_read_only if to_read else opened_store)(where.workspace, namespace) as whole:
        assert isinstance(whole, Store), "what is copied is a store"
        yield whole


def _said(where: Where, targets: Sequence[_Target]) -> set[str]:
    """Return the user messages that will be purged, to remove them from the input history too."""
    said = set[str]()
    for target in targets:
        if not target.of_notes:
            with suppress(StenologError), _opened(where, target.namespace) as store:
                said.update(said_in(store, target.key, target.before))
    return said


def _traces(
    where: Where, gone: Sequence[_Gone], who: str | None, typed: Path | None, kept: str
) -> Iterator[str]:
    """Remove other traces of purged sessions; yield a phrase for each one that remains."""
    whole = {
        escaped_for_log(one.target.key)
        for one in gone
        if one.problem is None and one.target.before is None and not one.target.of_notes
    }
    place = place_in_log(where.agent, where.namespace or NAMESPACE)

    def is_meant(at: str, key: str) -> bool:
        if who is not None:
            return key in whole or _is_of(key, who)
        return key in whole and at == place

    if whole:
        left = forget_logged(where.workspace, is_meant)
        # For a single session, retention may never have logged anything.
        if left and (who is not None or "program's log" not in left):
            yield left
    if kept:
        yield kept
    elif typed is not None and who is not None:
        yield (f"other chat input in {one_line(str(typed))}; the file does not record who typed it")


def _worth_naming(targets: Sequence[_Target]) -> list[_Target]:
    """Leave out progress records, unless there is nothing else."""
    return [target for target in targets if not target.is_mark] or list(targets)


def _print_gone(gone: Sequence[_Gone], *, as_json: bool, dry_run: bool) -> None:
    named = _worth_naming([one.target for one in gone])
    for one in gone:
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
            say(f"{one_line(target.name)}: {sentence(one.problem)}")
        elif not dry_run and target in named:
            what = "note" if target.of_notes else "message"
            say(f"Deleted permanently: {one_line(target.name)}, {count(one.messages, what)}.")


def _not_reached(where: Where, gone: Sequence[_Gone], who: str | None) -> Iterator[str]:
    """Yield a phrase for each place that may still contain purged data, without repetition."""
    purged = {one.target.key for one in gone if one.problem is None}
    yield from _forks_that_stay(gone)
    if who is not None:
        yield f"messages of {one_line(who)} in other sessions, such as group chats"
    else:
        for key in sorted(purged):
            notes = _notes_of(where, key)
            if notes:
                yield (
                    f"{count(notes, 'note')} about {one_line(key)}; `steno purge --scope` deletes "
                    "notes too"
                )
    agents = (
        (None, *other_namespaces(where.workspace).agents) if who is not None else (where.agent,)
    )
    for agent in agents if where.namespace in (None, NAMESPACE) else ():
        yield from copies_of(
            where.workspace,
            agent,
            lambda key: key in purged if who is None else _is_of(key, who),
        )
    yield "earlier backups and copies"


def _forks_that_stay(gone: Sequence[_Gone]) -> Iterator[str]:
    """Yield the places that a purge did not reach, except forks that are purged too."""
    purged = {one.target.key for one in gone if one.problem is None}
    also = tuple(f"the fork {key!r} has " for key in purged)
    told = dict.fromkeys(words for one in gone for words in one.not_reached)
    yield from (words for words in told if not words.startswith(also))


def _notes_of(where: Where, key: str) -> int:
    """Return the number of notes about the owner of a session; 0 if they cannot be read."""
    try:
        if NOTES not in namespaces_of(where.workspace):
            return 0
        with opened_read_only(where.workspace, NOTES) as store:
            assert isinstance(store, Store), "what is copied is a store"
            agent, person = where.agent or MAIN, owner_in_key(key)
            scopes = {
                Scope(agent=agent, who=key),
                Scope(agent=agent, who=person),
                Scope(agent=agent, who=person, of="sender"),
            }
            return sum(len(Notes(store).list(scope, full=True)) for scope in scopes)
    except StenologError:
        return 0
