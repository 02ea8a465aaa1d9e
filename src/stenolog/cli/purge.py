"""`steno purge`: permanently delete sessions, or everything of one person."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from shlex import quote
from typing import Final

import click
from msgspec import Struct

from stenolog.cli.output import (
    EXIT_PARTIAL,
    attributes_of,
    one_line,
    plural,
    print_first_lines,
    print_json,
    print_notice,
    printable,
    sentence,
    show_progress,
)
from stenolog.cli.workspace import (
    Location,
    check_workspace_exists,
    dry_run_option,
    find_session,
    json_option,
    location_options,
    require_terminal,
    seq_option,
    yes_option,
)
from stenolog.errors import DamagedStore, InvalidKey, NoSuchSession, StenologError
from stenolog.memory.notes import Notes
from stenolog.memory.scopes import MARK_PREFIX, Scope, mark_uid, scope_from_key
from stenolog.records import Message
from stenolog.sessions.aliases import NO_ALIASES, Aliases, alias_mark, aliases_in
from stenolog.sessions.folders import CHANNELS, NAMESPACE, NOTES, locate_sessions, other_namespaces
from stenolog.sessions.keys import owner_in_key
from stenolog.stores.base import PurgingStore, Store
from stenolog.stores.snapshots import SnapshotReading, SnapshotStore
from stenolog.stores.state import describe_remaining
from stenolog.transfer.copy_all import list_namespaces, opened_read_only, opened_store
from stenolog.transfer.fallback import list_fallback_sessions

MAIN_AGENT: Final = "main"
"""Name of the default agent in the notes."""


class _Target(Struct, frozen=True, kw_only=True):
    """Target of a purge: all sessions with one key in one namespace, live and deleted."""

    namespace: str | None
    """None means the namespace that the command's options select."""
    key: str
    uid: str = ""
    """Uid of the live session, or of the session deleted last; empty if unknown."""
    uids: frozenset[str] = frozenset()
    """Uids of the live, deleted and partly purged sessions with this key."""
    messages: int = 0
    """Number of messages of the live session that are purged."""
    deleted_sessions: int = 0
    """Number of sessions with this key in the trash."""
    deleted_messages: int = 0
    """Number of messages of the sessions with this key in the trash."""
    before: int | None = None
    """Only messages with a smaller seq are purged; None: all messages."""
    is_readable: bool = True
    has_unfinished_purge: bool = False
    """Whether an earlier purge of this key was interrupted."""
    unfinished_messages: int = 0
    """Number of messages that the interrupted purge did not delete."""

    @property
    def has_notes(self) -> bool:
        """Whether the target contains notes instead of a conversation."""
        return self.namespace == NOTES

    @property
    def is_progress_record(self) -> bool:
        """Whether this is a progress record: how far a session was consolidated into notes."""
        return self.has_notes and self.key.startswith(MARK_PREFIX)

    @property
    def confirmation(self) -> str:
        """Return what to type to confirm: the key, or the uid if the key cannot be typed."""
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

    def count_text(self, count: int) -> str:
        """Return the count with its noun: messages or notes."""
        return plural(count, "note" if self.has_notes else "message")

    @property
    def description(self) -> str:
        """Describe everything that would be deleted."""
        parts = []
        if self.uid or not self.has_unfinished_purge:
            before_text = "" if self.before is None else f" before seq {self.before}"
            count_text = self.count_text(self.messages)
            parts.append(f"{count_text}{before_text}" if self.is_readable else "unreadable")
        if self.deleted_sessions:
            parts.append(
                f"{plural(self.deleted_sessions, 'session')} of this key in the trash with "
                f"{self.count_text(self.deleted_messages)}"
            )
        if self.has_unfinished_purge:
            parts.append("files of an interrupted purge")
        place_text = "" if self.namespace is None or self.has_notes else f" in {self.namespace}"
        return one_line(f"{self.name}{place_text}: {', and '.join(parts)}")


class _Result(Struct, frozen=True, kw_only=True):
    """Result of purging a target."""

    target: _Target
    message_count: int = 0
    not_reached: tuple[str, ...] = ()
    problem: str | None = None


@click.command("purge")
@click.argument("keys", metavar="[KEY]...", nargs=-1)
@seq_option("--before", help="Delete only the messages before this seq, and keep the session.")
@click.option(
    "--scope",
    "person",
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
    person: str | None,
    yes: bool,
    dry_run: bool,
    location: Location,
) -> int:
    """Delete sessions permanently, or everything about one person.

    A session is deleted with its archives, its index entries, and all sessions with the same key in
    the trash. --scope WHO deletes all sessions of a person in the workspace, of all agents and
    under all aliases, and all notes about the person. Entries in the input history of chats are
    removed too. Data that cannot be deleted is listed on stderr: forks,
    summaries, imported files.

    To confirm, you must type the key or WHO (or the uid, if the key cannot be typed). Without a
    terminal, --yes is required. If a purge is interrupted, run the command again to complete the
    purge.

    Example: steno purge --scope telegram:123 --dry-run

    Exit codes: 0 done, 1 failed or not confirmed, 2 wrong usage, 3 some data could not be deleted.
    """
    if (person is None) == (not keys):
        raise click.UsageError("Give either a KEY or --scope WHO.")
    if person is not None and (before is not None or location.agent or location.namespace):
        raise click.UsageError("--scope cannot be combined with --before, --agent or --namespace.")
    if not dry_run and not yes:
        require_terminal("This deletes permanently")
    if person is not None:
        targets = _targets_of_person(location.workspace, person)
        if not targets:
            raise click.ClickException(f"There is no data about {one_line(person)} here.")
    else:
        targets = _targets_of_keys(location, keys, before)
    listed_targets = _without_progress_records(targets)
    lines = [target.description for target in listed_targets]
    if dry_run:
        print_first_lines("Would be deleted permanently:", lines)
        results = list(_expected_results(location, targets))
        _print_results(results, dry_run=True)
        places = _unreached_places(results)
        print_notice(*(f"Would not be deleted: {sentence(place)}" for place in places))
        return 0
    if not yes:
        print_first_lines("To be deleted permanently:", lines)
        print_notice("This cannot be undone.")
        names_to_type = [target.confirmation for target in listed_targets]
        _ask_to_type([person] if person is not None and _is_typable(person) else names_to_type)
    # Clear the input history first: this needs the messages, which the purge deletes.
    history_phrase = _clear_input_history(location, targets, person)
    results = list(_purge_all(location, targets, person))
    _print_results(results, dry_run=False)
    remaining_phrases = [
        *_remaining_data_phrases(location, results, person),
        *filter(None, [history_phrase]),
    ]
    print_notice(*(f"Not deleted: {sentence(phrase)}" for phrase in remaining_phrases))
    return EXIT_PARTIAL if any(result.problem for result in results) else 0


def _ask_to_type(names: Iterable[str]) -> None:
    """Ask the user to type each name. Raises ClickException if another text is typed."""
    for name in names:
        expected_text = one_line(printable(name)).strip()
        question = f"Type {expected_text} to confirm"
        typed_text = click.prompt(question, default="", show_default=False, err=True)
        if not expected_text or typed_text.strip() != expected_text:
            raise click.ClickException(f"You did not type {expected_text}. Nothing was deleted.")


def _is_typable(name: str) -> bool:
    """Return whether a name is printable and not blank, so that a user can type it."""
    return bool(name.strip()) and name.isprintable()


# --- targets ---------------------------------------------------------------------------------


class _NamespaceContents:
    """Everything that can be purged in one namespace: live, deleted and partly purged sessions."""

    def __init__(self, store: Store, namespace: str | None) -> None:
        self.store = store
        self._namespace = namespace
        self._trash = store.list_trash()
        self._unfinished_purges = (
            store.unfinished_purges() if isinstance(store, PurgingStore) else []
        )

    @property
    def has_remains_without_key(self) -> bool:
        """Whether an interrupted purge left data of a session whose key is unknown."""
        return any(not session.key for session in self._unfinished_purges)

    def all_keys(self) -> list[str]:
        """Return the keys of all sessions, including deleted and partly purged sessions."""
        removed_keys = (session.key for session in (*self._trash, *self._unfinished_purges))
        return list(dict.fromkeys([*self.store.list_sessions(), *filter(None, removed_keys)]))

    def find_targets(self, keys: Iterable[str]) -> list[_Target]:
        """Return the targets with these keys."""
        return list(filter(None, map(self.find_target, keys)))

    def find_target(self, key: str, before: int | None = None) -> _Target | None:
        """Return the target with this key, or None if there is nothing to purge."""
        trashed_sessions = [session for session in self._trash if session.key == key]
        unfinished_purges = [session for session in self._unfinished_purges if session.key == key]
        uids = {session.uid for session in (*trashed_sessions, *unfinished_purges)}
        uid, messages, is_readable = trashed_sessions[0].uid if trashed_sessions else "", 0, True
        if before is not None:
            # With `before`, only messages of the live session are purged.
            trashed_sessions = unfinished_purges = []
        try:
            info = self.store.info(key)
            uid, messages = info.uid, info.count
            if before is not None:
                history = self.store.get_history(key, full=True)
                messages = sum(message.seq < before for message in history)
        except NoSuchSession:
            if not (trashed_sessions or unfinished_purges):
                return None
        except DamagedStore:
            # A damaged session is purged too; the number of its messages is unknown.
            is_readable = False
        return _Target(
            namespace=self._namespace,
            key=key,
            uid=uid,
            uids=frozenset(uids | {uid}) - {""},
            messages=messages,
            deleted_sessions=len(trashed_sessions),
            deleted_messages=sum(session.count for session in trashed_sessions),
            before=before,
            is_readable=is_readable,
            has_unfinished_purge=bool(unfinished_purges),
            unfinished_messages=sum(session.count for session in unfinished_purges),
        )


def _targets_of_keys(location: Location, keys: Sequence[str], before: int | None) -> list[_Target]:
    """Return the targets with these keys. Raises ClickException if a key has nothing to purge."""
    with location.open() as store:
        contents = _NamespaceContents(store, None)
        aliases = Aliases(store)
        targets = {}
        for name in keys:
            key = aliases.resolve_key(name)
            target = contents.find_target(key, before)
            if target is None and before is None and contents.has_remains_without_key:
                # Assume that the user repeats an interrupted purge whose key is unknown.
                target = _Target(namespace=None, key=key, has_unfinished_purge=True)
            if target is None:
                # `find_session` raises the usual error about an unknown session.
                find_session(store, name)
                continue
            targets[key] = target
    return list(targets.values())


def _targets_of_person(workspace: str, person: str) -> list[_Target]:
    """Find all data of a person: notes, and live and deleted sessions of all agents."""
    check_workspace_exists(workspace)
    targets: list[_Target] = []
    unfinished_namespace = ""
    for name in list_namespaces(workspace):
        if name in (CHANNELS, NOTES):
            continue  # Channels have no messages, and notes are searched below.
        with _open_namespace(Location(workspace=workspace), name) as store:
            contents = _NamespaceContents(store, name)
            if contents.has_remains_without_key:
                unfinished_namespace = name
            aliases = _collect_aliases(store)
            targets += contents.find_targets(
                key
                for key in contents.all_keys()
                if any(_belongs_to(alias, person) for alias in (key, *aliases.get(key, ())))
            )
    targets += _note_targets_of_person(workspace, person, targets)
    if unfinished_namespace and not targets:
        # An interrupted purge may be about this person. Any purge in the namespace completes it.
        name = unfinished_namespace
        return [_Target(namespace=name, key=person, has_unfinished_purge=True)]
    return targets


def _note_targets_of_person(
    workspace: str, person: str, session_targets: Sequence[_Target]
) -> list[_Target]:
    """Find a person's notes, and the progress records of `session_targets`."""
    if NOTES not in list_namespaces(workspace):
        return []
    uids = {uid for target in session_targets for uid in target.uids}
    with _open_namespace(Location(workspace=workspace), NOTES) as store:
        contents = _NamespaceContents(store, NOTES)
        return contents.find_targets(
            key
            for key in contents.all_keys()
            if _is_notes_key_of(key, person)
            or mark_uid(key) in uids
            or _is_progress_record_of(store, key, person)
        )


def _is_notes_key_of(key: str, person: str) -> bool:
    try:
        return _belongs_to(scope_from_key(key).who, person)
    except InvalidKey:
        return False  # not notes of stenolog


def _is_progress_record_of(store: Store, key: str, person: str) -> bool:
    """Return whether a progress record of an older version of stenolog names this person."""
    if not key.startswith(MARK_PREFIX):
        return False
    try:
        metas = [store.info(key).meta]
    except StenologError:
        metas = [reading.snapshot.meta for reading in _read_trash(store, key)]
    names = [meta.get("session") for meta in metas]
    return any(isinstance(name, str) and _belongs_to(name, person) for name in names)


def _belongs_to(key: str, person: str) -> bool:
    return person in (key, owner_in_key(key))


def _collect_aliases(store: Store) -> Mapping[str, Collection[str]]:
    """Return the aliases by session key, including aliases of deleted sessions."""
    if alias_mark(store) == NO_ALIASES:
        return {}
    aliases = {key: set(names) for key, names in Aliases(store).aliases_by_session().items()}
    for reading in _read_trash(store):
        session = reading.snapshot
        if session.forked_from is None and aliases_in(session.meta):
            aliases.setdefault(session.key, set()).update(aliases_in(session.meta))
    return aliases


def _read_trash(store: Store, key: str | None = None) -> Iterator[SnapshotReading]:
    """Yield the readable sessions in the trash; with `key`, only sessions with this key."""
    if not isinstance(store, SnapshotStore):
        return
    for snapshot in store.list_snapshots():
        if snapshot.deleted is not None and key in (None, snapshot.key):
            with suppress(StenologError), store.read_snapshot(snapshot) as reading:
                yield reading


@contextmanager
def _open_namespace(
    location: Location, namespace: str | None, *, writable: bool = False
) -> Iterator[Store]:
    """Open the store of a namespace; if it is None, the store that the options select."""
    if namespace is None:
        with location.open(writable=writable) as store:
            yield store
        return
    open_named = opened_store if writable else opened_read_only
    with open_named(location.workspace, namespace) as namespace_store:
        assert isinstance(namespace_store, Store), "every namespace is a Store"
        yield namespace_store


# --- purging ---------------------------------------------------------------------------------


def _purge_all(
    location: Location, targets: Sequence[_Target], person: str | None
) -> Iterator[_Result]:
    """Delete the targets permanently, and yield the result of each target.

    The notes of a person are searched again after the sessions were deleted, because a
    consolidation in progress may have added notes in the meantime (see `Notes.guarded`).
    """
    session_targets = [target for target in targets if person is None or not target.has_notes]
    raise_errors = len(targets) == 1
    with show_progress("Deleting", len(targets), enabled=not raise_errors) as advance:
        for target in session_targets:
            yield _purge_target(location, target, raise_errors=raise_errors)
            advance()
        if person is not None:
            note_targets = _note_targets_of_person(location.workspace, person, session_targets)
            for target in {target.key: target for target in (*targets, *note_targets)}.values():
                if target.has_notes:
                    yield _purge_target(location, target, raise_errors=raise_errors)
                    advance()


def _purge_target(location: Location, target: _Target, *, raise_errors: bool) -> _Result:
    try:
        with _open_namespace(location, target.namespace, writable=True) as store:
            report = store.purge(target.key, before=target.before)
    except NoSuchSession:
        return _Result(target=target)  # purged by another process
    except StenologError as error:
        if raise_errors:
            raise
        # Continue with the other targets, to purge as much as possible.
        return _Result(target=target, problem=str(error))
    return _Result(target=target, message_count=report.messages, not_reached=report.not_reached)


def _expected_results(location: Location, targets: Sequence[_Target]) -> Iterator[_Result]:
    """Yield the results that a purge of these targets would have."""
    for namespace in dict.fromkeys(target.namespace for target in targets):
        namespace_targets = [target for target in targets if target.namespace == namespace]
        with _open_namespace(location, namespace) as store:
            forks = _forks_by_source(store)
        for target in namespace_targets:
            not_reached = describe_remaining(target.key, forks=forks.get(target.key, []))
            count = target.messages + target.deleted_messages + target.unfinished_messages
            yield _Result(target=target, message_count=count, not_reached=not_reached)


def _forks_by_source(store: Store) -> Mapping[str, list[str]]:
    """Return the keys of forks by the key of their source, including readable deleted forks."""
    forks = defaultdict[str, list[str]](list)
    for key in store.list_sessions():
        with suppress(StenologError):
            if (source_key := store.info(key).forked_from) is not None:
                forks[source_key].append(key)
    for reading in _read_trash(store):
        if (source_key := reading.snapshot.forked_from) is not None:
            forks[source_key].append(reading.snapshot.key)
    return forks


def _without_progress_records(targets: Sequence[_Target]) -> list[_Target]:
    """Return the targets that are not progress records; all targets if all are such records."""
    return [target for target in targets if not target.is_progress_record] or list(targets)


def _print_results(results: Sequence[_Result], *, dry_run: bool) -> None:
    listed_targets = _without_progress_records([result.target for result in results])
    for result in results:
        target = result.target
        fields = {
            **attributes_of(target, "key", "namespace"),
            "messages": result.message_count,
            "before": target.before,
            **attributes_of(result, "not_reached", "problem"),
            "dry_run": dry_run,
        }
        if print_json(fields):
            continue
        if result.problem is not None:
            print_notice(f"{one_line(target.name)}: {sentence(result.problem)}")
        elif not dry_run and target in listed_targets:
            count_text = target.count_text(result.message_count)
            print_notice(f"Deleted permanently: {one_line(target.name)}, {count_text}.")


# --- remaining data --------------------------------------------------------------------------


def _remaining_data_phrases(
    location: Location, results: Sequence[_Result], person: str | None
) -> Iterator[str]:
    """Yield a phrase for each place that may still contain purged data."""
    purged_keys = {result.target.key for result in results if result.problem is None}
    yield from _unreached_places(results)
    agents: Sequence[str | None] = (location.agent,)
    if person is not None:
        yield f"messages of {one_line(person)} in other sessions, such as group chats"
        yield "lines about the sessions in the program's log"
        agents = (None, *other_namespaces(location.workspace).agents)
    else:
        for key in sorted(purged_keys):
            if note_count := _count_notes(location, key):
                notes_text = f"{plural(note_count, 'note')} about {one_line(key)}"
                yield f"{notes_text}; `steno purge --scope` deletes notes too"
    for agent in agents if location.namespace in (None, NAMESPACE) else ():
        place = locate_sessions(location.workspace, agent)
        for namespace, key in sorted(list_fallback_sessions(place)):
            if key in purged_keys if person is None else _belongs_to(key, person):
                option = "" if namespace == NAMESPACE else f" --namespace {quote(namespace)}"
                command = f"steno purge {quote(key)} -w {quote(str(place.fallback))}{option}"
                yield one_line(
                    f"messages of {key} in the fallback folder {place.fallback}/{namespace}; "
                    f"delete them with `{command}`"
                )
    yield "earlier backups and copies"


def _unreached_places(results: Sequence[_Result]) -> Iterator[str]:
    """Yield the forks and other places that no purge reached."""
    purged_keys = {result.target.key for result in results if result.problem is None}
    purged_fork_prefixes = tuple(f"the fork {key!r} has " for key in purged_keys)
    places = dict.fromkeys(place for result in results for place in result.not_reached)
    yield from (place for place in places if not place.startswith(purged_fork_prefixes))


def _count_notes(location: Location, key: str) -> int:
    """Return the number of notes about the owner of a session; 0 if the notes are unreadable."""
    make_scope = partial(Scope, agent=location.agent or MAIN_AGENT)
    person = owner_in_key(key)
    scopes = {make_scope(who=key), make_scope(who=person), make_scope(who=person, of="sender")}
    with suppress(StenologError):
        if NOTES in list_namespaces(location.workspace):
            with _open_namespace(location, NOTES) as store:
                return sum(len(Notes(store).list(scope, full=True)) for scope in scopes)
    return 0


# --- input history ---------------------------------------------------------------------------


def _clear_input_history(location: Location, targets: Sequence[_Target], person: str | None) -> str:
    """Remove messages of the targets from the input history of chats.

    Return a phrase about input that may remain; empty if none can remain.
    """
    # This import is slow and only needed for a purge.
    from stenolog.cli.chat_input import history_file, remove_history_entries

    file = history_file()
    try:
        if not file.stat().st_size:
            return ""
    except OSError:
        return ""
    user_messages = set[str]()
    for target in targets:
        if not target.has_notes:
            with suppress(StenologError), _open_namespace(location, target.namespace) as store:
                user_messages.update(_user_message_texts(store, target))
    try:
        remove_history_entries(file, user_messages)
    except OSError as error:
        return f"chat input in {one_line(str(file))}: {error.strerror}"
    if person is None:
        return ""
    return f"other chat input in {one_line(str(file))}; the file does not record who typed it"


def _user_message_texts(store: Store, target: _Target) -> Iterator[str]:
    """Yield the texts of the readable user messages of a target."""
    with suppress(StenologError):
        for message in store.get_history(target.key, full=True):
            if target.before is None or message.seq < target.before:
                yield from _text_if_from_user(message)
    if target.before is None:
        for reading in _read_trash(store, target.key):
            with suppress(StenologError):
                for message in reading.messages:
                    yield from _text_if_from_user(message)


def _text_if_from_user(message: Message) -> Iterator[str]:
    message_dict = message.to_dict()
    content = message_dict.get("content")
    if message_dict.get("role") == "user" and isinstance(content, str):
        yield content.strip()
