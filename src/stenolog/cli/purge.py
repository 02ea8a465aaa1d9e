"""`steno purge`: permanently delete sessions, or everything of one person."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from shlex import quote

import click
from msgspec import Struct

from stenolog.cli.memory_commands import scope_name
from stenolog.cli.output import (
    EXIT_PARTIAL,
    attributes_of,
    one_line,
    plural,
    print_first_lines,
    print_json,
    print_notice,
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
from stenolog.errors import DamagedStore, NoSuchSession, StenologError, UsageError
from stenolog.memory.scopes import scope_from_key
from stenolog.sessions.aliases import NO_ALIASES, Aliases, alias_mark, aliases_in
from stenolog.sessions.folders import (
    CHANNELS,
    NAMESPACE,
    NOTES,
    agent_in_namespace,
    agent_namespace,
    locate_sessions,
    other_namespaces,
)
from stenolog.sessions.keys import owner_in_key
from stenolog.stores.base import Store
from stenolog.transfer.copy_all import list_namespaces
from stenolog.transfer.fallback import list_fallback_sessions


class _Target(Struct, frozen=True, kw_only=True):
    """Everything that can be purged under one key of a store: live and deleted sessions."""

    location: Location
    key: str
    content: str
    """What the target contains, in words."""
    messages: int
    """Number of messages, as far as they can be counted."""

    @property
    def name(self) -> str:
        """The name of the target as it is printed."""
        location = self.location
        if location.namespace == NOTES:
            with suppress(UsageError):
                return f"notes of {scope_name(scope_from_key(self.key))}"
        if location.agent is not None:
            return f"{self.key} (agent {location.agent})"
        return f"{self.key} in {location.namespace}" if location.namespace else self.key

    @property
    def namespace(self) -> str:
        """The namespace of the target in the workspace."""
        if self.location.agent is not None:
            return agent_namespace(self.location.agent)
        return self.location.namespace or NAMESPACE


class _Result(Struct, frozen=True, kw_only=True):
    """Result of purging a target."""

    target: _Target
    messages: int = 0
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
    under all aliases, and all notes about the person.

    Places that may still contain the text are listed on stderr: forks, summaries, imported files,
    the input history of chats, logs, exports and backups. Delete them yourself.

    Without a terminal, --yes is required. If a purge is interrupted, run the command again to
    complete the purge.

    Example: steno purge --scope telegram:123 --dry-run

    Exit codes: 0 done, 1 failed or not confirmed, 2 wrong usage, 3 some data could not be deleted.
    """
    if (person is None) == (not keys):
        raise click.UsageError("Give either a KEY or --scope WHO.")
    if person is not None and (before is not None or location.agent or location.namespace):
        raise click.UsageError("--scope cannot be combined with --before, --agent or --namespace.")
    if not dry_run and not yes:
        require_terminal("This deletes permanently")
    if person is None:
        targets = _find_targets(location, keys, before)
    else:
        check_workspace_exists(location.workspace)
        targets = [
            *_find_targets_of_person(location.workspace, person, notes=False),
            *_find_targets_of_person(location.workspace, person, notes=True),
        ]
        if not targets:
            raise click.ClickException(f"There is no data about {one_line(person)} here.")
    lines = [one_line(f"{target.name}: {target.content}") for target in targets]
    if dry_run:
        print_first_lines("Would be deleted permanently:", lines)
        for target in targets:
            _print_result(_Result(target=target, messages=target.messages), before, dry_run=True)
        return 0
    if not yes:
        print_first_lines("To be deleted permanently:", lines)
        click.confirm("Delete permanently? This cannot be undone.", abort=True, err=True)
    results = []
    for result in _purge_all(location, targets, person, before):
        _print_result(result, before, dry_run=False)
        results.append(result)
    places = _list_remaining_places(location, results, person)
    print_notice(*(f"Not deleted: {sentence(place)}" for place in places))
    return EXIT_PARTIAL if any(result.problem for result in results) else 0


def _print_result(result: _Result, before: int | None, *, dry_run: bool) -> None:
    target = result.target
    fields = {
        **attributes_of(target, "key", "namespace"),
        "messages": result.messages,
        "before": before,
        **attributes_of(result, "not_reached", "problem"),
        "dry_run": dry_run,
    }
    if print_json(fields) or dry_run:
        return
    if result.problem is not None:
        print_notice(f"{one_line(target.name)}: {sentence(result.problem)}")
    else:
        count_text = _count_text(target.location, result.messages)
        print_notice(f"Deleted permanently: {one_line(target.name)}, {count_text}.")


def _count_text(location: Location, count: int) -> str:
    return plural(count, "note" if location.namespace == NOTES else "message")


# --- targets ---------------------------------------------------------------------------------


class _Contents:
    """Everything that can be purged in one store: live, deleted and partly purged sessions."""

    def __init__(self, store: Store, location: Location) -> None:
        self._store = store
        self._location = location
        self._trash = store.admin.list_trash()
        self._unfinished = store.admin.list_trash(unfinished=True)

    def find_target(self, key: str, before: int | None = None) -> _Target | None:
        """Return the target with this key, or None if there is nothing to purge.

        With `before`, only messages of the live session are purged.
        """
        trashed = [session for session in self._trash if session.key == key and before is None]
        unfinished = [one for one in self._unfinished if one.key == key and before is None]
        contents: list[str] = []
        messages = sum(session.count for session in (*trashed, *unfinished))
        try:
            count, before_text = self._store.info(key).count, ""
            if before is not None:
                history = self._store.get_history(key, full=True)
                count, before_text = sum(m.seq < before for m in history), f" before seq {before}"
            messages += count
            contents.append(_count_text(self._location, count) + before_text)
        except NoSuchSession:
            pass
        except DamagedStore:
            contents.append("unreadable")  # it is purged too
        if trashed:
            count_text = _count_text(self._location, sum(session.count for session in trashed))
            contents.append(
                f"{plural(len(trashed), 'session')} of this key in the trash with {count_text}"
            )
        if unfinished:
            contents.append("files of an interrupted purge")
        if not contents:
            return None
        content = ", and ".join(contents)
        return _Target(location=self._location, key=key, content=content, messages=messages)

    def find_remains(self, key: str) -> _Target | None:
        """Return what an interrupted purge left if its key is unknown; any purge completes it."""
        if all(session.key for session in self._unfinished):
            return None
        content = "files of an interrupted purge"
        return _Target(location=self._location, key=key, content=content, messages=0)

    def find_targets_of_person(self, person: str) -> Iterator[_Target]:
        """Yield the targets that belong to a person."""
        removed_keys = [session.key for session in (*self._trash, *self._unfinished)]
        aliases = {} if self._location.namespace == NOTES else _collect_aliases(self._store)
        for key in dict.fromkeys([*self._store.list_sessions(), *filter(None, removed_keys)]):
            if self._location.namespace == NOTES:
                owners = [_owner_of_notes(key)]
            else:
                owners = [key, *aliases.get(key, ())]
            if any(_belongs_to(owner, person) for owner in owners):
                target = self.find_target(key)
                if target is not None:
                    yield target


def _find_targets(location: Location, keys: Sequence[str], before: int | None) -> list[_Target]:
    """Return the targets with these keys. Raises ClickException if a key has nothing to purge."""
    with location.open() as store:
        contents = _Contents(store, location)
        aliases = Aliases(store)
        targets = {}
        for name in keys:
            key = aliases.resolve_key(name)
            target = contents.find_target(key, before)
            if target is None and before is None:
                # Assume that the user repeats an interrupted purge whose key is unknown.
                target = contents.find_remains(key)
            if target is None:
                # `find_session` raises the usual error about an unknown session.
                find_session(store, name)
                continue
            targets[key] = target
    return list(targets.values())


def _find_targets_of_person(workspace: str, person: str, *, notes: bool) -> list[_Target]:
    """Find the notes or the sessions of a person, live and deleted, of all agents."""
    targets: list[_Target] = []
    remains: list[_Target | None] = []
    for namespace in list_namespaces(workspace):
        # Channels have no messages.
        if namespace == CHANNELS or (namespace == NOTES) != notes:
            continue
        agent = agent_in_namespace(namespace)
        is_named = agent is None and namespace != NAMESPACE
        location = Location(
            workspace=workspace, agent=agent, namespace=namespace if is_named else None
        )
        with location.open() as store:
            contents = _Contents(store, location)
            targets += contents.find_targets_of_person(person)
            remains.append(contents.find_remains(person))
    # An interrupted purge whose key is unknown may be about this person.
    return targets or list(filter(None, remains))


def _owner_of_notes(key: str) -> str:
    """Return the person or session that notes are about; empty if the key has no notes."""
    try:
        return scope_from_key(key).who
    except UsageError:
        return ""


def _belongs_to(key: str, person: str) -> bool:
    return person in (key, owner_in_key(key))


def _collect_aliases(store: Store) -> Mapping[str, Collection[str]]:
    """Return the aliases by session key, including aliases of deleted sessions."""
    if alias_mark(store) == NO_ALIASES:
        return {}
    aliases = {key: set(names) for key, names in Aliases(store).aliases_by_session().items()}
    for snapshot in store.admin.list_snapshots():
        if snapshot.deleted is not None:
            with suppress(StenologError), store.admin.read_snapshot(snapshot) as reading:
                session = reading.snapshot
                if session.forked_from is None:
                    aliases.setdefault(session.key, set()).update(aliases_in(session.meta))
    return aliases


# --- purging ---------------------------------------------------------------------------------


def _purge_all(
    location: Location, targets: Sequence[_Target], person: str | None, before: int | None
) -> Iterator[_Result]:
    """Delete the targets permanently, and yield the result of each target.

    The notes of a person are searched again after the sessions were deleted, because a
    consolidation in progress may have added notes in the meantime (see `Notes.guarded`).
    """
    raise_errors = len(targets) == 1
    with show_progress("Deleting", len(targets), enabled=not raise_errors) as advance:
        for target in targets:
            if person is None or target.location.namespace != NOTES:
                yield _purge_target(target, before, raise_errors=raise_errors)
                advance()
        if person is not None:
            for target in _find_targets_of_person(location.workspace, person, notes=True):
                yield _purge_target(target, before, raise_errors=raise_errors)
                advance()


def _purge_target(target: _Target, before: int | None, *, raise_errors: bool) -> _Result:
    try:
        with target.location.open(writable=True) as store:
            report = store.admin.purge(target.key, before=before)
    except NoSuchSession:
        return _Result(target=target)  # purged by another process
    except StenologError as error:
        if raise_errors:
            raise
        # Continue with the other targets, to purge as much as possible.
        return _Result(target=target, problem=str(error))
    return _Result(target=target, messages=report.messages, not_reached=report.not_reached)


# --- remaining data --------------------------------------------------------------------------


def _list_remaining_places(
    location: Location, results: Sequence[_Result], person: str | None
) -> Iterator[str]:
    """Yield each place that may still contain purged text."""
    purged_keys = {result.target.key for result in results if result.problem is None}
    purged_forks = tuple(f"the fork {key!r} has " for key in purged_keys)
    places = dict.fromkeys(place for result in results for place in result.not_reached)
    yield from (place for place in places if not place.startswith(purged_forks))
    if person is not None:
        yield f"messages of {one_line(person)} in other sessions, such as group chats"
    elif location.namespace != NOTES and NOTES in list_namespaces(location.workspace):
        yield "notes that were made of the messages; `steno purge --scope` deletes notes too"
    yield from _list_fallback_places(location, purged_keys, person)
    # This import is slow and only needed for a purge.
    from stenolog.cli.chat_input import history_file

    file = history_file()
    with suppress(OSError):
        if file.exists():
            yield f"chat input in {one_line(str(file))}"
    yield "lines in logs of programs"
    yield "exports, backups and copies"


def _list_fallback_places(
    location: Location, purged_keys: Collection[str], person: str | None
) -> Iterator[str]:
    """Yield each fallback folder with messages of the purged keys, or of the person."""
    agents: Sequence[str | None] = (location.agent,)
    if person is not None:
        agents = (None, *other_namespaces(location.workspace).agents)
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
