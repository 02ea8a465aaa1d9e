"""`steno delete`, `restore`, `purge` and `retention`: the trash, and permanent deletion."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, Final

import click
from msgspec import Struct
from msgspec.structs import asdict

from stenolog.cli.config import config_option, read_settings
from stenolog.cli.output import (
    EXIT_PARTIAL,
    attributes_of,
    error_sentence,
    format_age,
    format_time,
    one_line,
    plural,
    print_first_lines,
    print_json,
    print_notice,
    print_result,
    print_rows,
    print_table,
    sentence,
    show_progress,
    terminal_console,
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
    session_command,
    yes_option,
)
from stenolog.errors import DamagedStore, NoSuchSession, StenologError, UsageError
from stenolog.memory.scopes import scope_from_key
from stenolog.records import TrashedSession
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
from stenolog.transfer.copy import list_namespaces

if TYPE_CHECKING:
    from stenolog.maintenance.retention_rules import Rule
    from stenolog.maintenance.retention_runs import RetentionResult

# --- delete ----------------------------------------------------------------------------------


@click.command("delete")
@click.argument("keys", metavar="KEY...", nargs=-1, required=True)
@yes_option
@dry_run_option
@json_option("one JSON object per session")
@location_options
def delete_command(keys: tuple[str, ...], yes: bool, dry_run: bool, location: Location) -> int:
    """Move sessions to the trash.

    `steno restore` restores sessions from the trash; `steno purge` deletes them permanently.
    Without a terminal, --yes is required.

    Example: steno delete telegram:123 --dry-run

    Exit codes: 0 done, 1 failed or not confirmed, 2 wrong usage, 3 some sessions could not be
    deleted.
    """
    with location.open(writable=not dry_run) as store:
        infos = list({(info := find_session(store, key)).key: info for key in keys}.values())
        lines = [f"{one_line(info.key)}: {plural(info.count, 'message')}" for info in infos]
        if dry_run:
            for info in infos:
                fields = {"key": info.key, "uid": info.uid, "messages": info.count}
                print_json({**fields, "deleted": None, "dry_run": True})
            print_first_lines("Would be moved to the trash:", lines)
            return 0
        if not yes:
            require_terminal("This moves sessions to the trash")
            print_first_lines("To be moved to the trash (`steno restore` brings them back):", lines)
            click.confirm(f"Delete {plural(len(infos), 'session')}?", abort=True, err=True)
        exit_code = 0
        for info in infos:
            try:
                session = store.delete(info.key)
            except StenologError as error:
                if len(infos) == 1:
                    raise
                exit_code = EXIT_PARTIAL
                print_notice(error_sentence(error))
                continue
            command = session_command("restore", info.key)
            text = f"Moved {one_line(info.key)} to the trash. `{command}` brings it back."
            print_result({**_trash_fields(session), "dry_run": False}, text)
    return exit_code


def _trash_fields(session: TrashedSession) -> dict[str, Any]:
    fields = attributes_of(session, "key", "uid")
    return {**fields, "messages": session.count, "deleted": session.deleted}


def _trash_cells(session: TrashedSession) -> Sequence[object]:
    return session.key, session.uid, session.count, format_time(session.deleted)


# --- restore ---------------------------------------------------------------------------------


@click.command("restore")
@click.argument("key", metavar="[KEY]", required=False)
@click.option("--list", "listing", is_flag=True, help="List the sessions in the trash.")
@click.option("--uid", metavar="UID", help="Restore the session with this uid.")
@click.option("--as", "as_key", metavar="KEY", help="Restore the session under this key.")
@json_option("one JSON object per session")
@location_options
def restore_command(
    key: str | None,
    listing: bool,
    uid: str | None,
    as_key: str | None,
    location: Location,
) -> None:
    """Restore the session KEY from the trash.

    Messages, summary, archives and undo steps are restored. If several deleted sessions have this
    key, the last deleted session is restored. --uid selects another session.

    With --list, prints one line per deleted session, last deleted first, separated by tabs: key,
    uid, number of messages, time of deletion. In a terminal the command prints a table.

    Exit codes: 0 done, 1 failed, for example because the key is in use, 2 wrong usage.
    """
    if listing:
        if uid is not None or as_key is not None:
            raise click.UsageError("--list cannot be combined with --uid or --as.")
        with location.open() as store:
            sessions = [
                session for session in store.admin.list_trash() if key in (None, session.key)
            ]
        print_rows(sessions, fields=_trash_fields, cells=_trash_cells, table=_print_trash_table)
        if not sessions:
            print_notice(
                "The trash is empty." if key is None else f"{one_line(key)!r} is not in the trash."
            )
        return
    hint = "`steno restore --list` lists the sessions in"
    if key is None:
        raise click.UsageError(f"KEY is missing. {hint} the trash.")
    # Imported here, because the other commands of this module do not need it.
    from stenolog.maintenance.retention_rules import restore_for_user

    with location.open(writable=True) as store:
        try:
            restore_for_user(store, key, uid=uid, as_key=as_key)
        except NoSuchSession:
            name = f"{one_line(key)!r}" + (f" with uid {one_line(uid)}" if uid is not None else "")
            text = f"There is no session {name} in the trash. {hint} it."
            raise click.ClickException(text) from None
        info = store.info(as_key or key)
    fields = {"key": info.key, "uid": info.uid, "was": key, "messages": info.count}
    text = f"Restored {one_line(info.key)}: {plural(info.count, 'message')}."
    print_result(fields, text)


def _print_trash_table(sessions: Sequence[TrashedSession]) -> None:
    console = terminal_console()
    number_style = {"justify": "right", "no_wrap": True}
    # Users copy key and uid: both are wrapped, never shortened.
    columns = {
        "key": {"overflow": "fold", "max_width": max(10, console.width // 2)},
        "uid": {"overflow": "fold", "min_width": 16},
        "messages": number_style,
        "deleted": number_style,
    }
    now = datetime.now(UTC)

    def trash_row(session: TrashedSession) -> Sequence[object]:
        age = format_age(session.deleted, now)
        return (one_line(session.key), "cyan"), session.uid, f"{session.count:,}", (age, "dim")

    print_table(columns, map(trash_row, sessions), console=console)


# --- purge ----------------------------------------------------------------------------------


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
            # The imports within functions of this module are slow, and `steno delete` needs none.
            from stenolog.cli.memory_commands import scope_name

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


# --- what is purged --------------------------------------------------------------------------


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
    from stenolog.transfer.fallback import list_fallback_sessions

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


# --- retention --------------------------------------------------------------------------------


_NO_RULES_TEXT: Final = (
    "There are no rules: all sessions are kept. `steno config init` creates a config file with an "
    "example, [retention.old]."
)
_ACTION_PARTICIPLES: Final = {
    "delete": "moved to the trash",
    "purge": "deleted permanently",
}


@click.group("retention")
def retention_command() -> None:
    """Delete or purge old sessions by rules.

    A rule is a table in the config file, for example [retention.old] with action = "delete" and
    older_than_days = 365. Purge rules apply only to sessions in the trash. Without rules, all
    sessions are kept. `steno serve` applies the rules once an hour.
    """


@retention_command.command("run")
@dry_run_option
@json_option("one JSON object per session")
@config_option
@location_options
def run_command(dry_run: bool, config: Path | None, location: Location) -> int:
    """Apply the rules for all agents, or only for --agent NAME.

    Sessions with a turn in progress and sessions that change during the run are skipped. Damaged
    sessions are not deleted. The age of a session counts from its last change or from its import,
    and in the trash from its deletion. `steno restore` restores deleted sessions. Purge rules
    delete permanently and also complete interrupted purges. Nothing is asked: --dry-run shows what
    the rules would do.

    Prints one line per session, separated by tabs: action, rule, key, number of messages, time of
    the last change.

    Example: steno retention run --dry-run

    Exit codes: 0 done, or nothing to do, 1 failed, 2 wrong usage, 3 some sessions failed.
    """
    from stenolog.maintenance.retention_runs import apply_rules
    from stenolog.settings.conversion import rules_of

    rules = rules_of(read_settings(config))
    check_workspace_exists(location.workspace)
    for rule in rules:
        if not rule.has_condition:
            print_notice(f"Rule {rule.name} matches no session: {_missing_condition(rule)}.")

    results = apply_rules(
        location.workspace,
        rules,
        agent=location.agent,
        namespace=location.namespace,
        dry_run=dry_run,
    )
    print_rows(results, fields=asdict, cells=_result_cells)
    print_notice(*_run_remarks(rules, results, dry_run=dry_run))
    return EXIT_PARTIAL if any(result.outcome == "failed" for result in results) else 0


def _run_remarks(
    rules: Sequence["Rule"], results: Sequence["RetentionResult"], *, dry_run: bool
) -> Iterator[str]:
    if not rules:
        yield _NO_RULES_TEXT
        return
    for result in results:
        if result.outcome in ("skipped", "failed"):
            prefix = "skipped, " if result.outcome == "skipped" else ""
            yield f"{one_line(result.key)}: {sentence(f'{prefix}{result.message}')}"
    applied_results = [result for result in results if result.outcome in ("due", "done")]
    totals_text = _totals_text(applied_results, "would be " if dry_run else "")
    yield totals_text if applied_results else "There is nothing to do."


def _totals_text(results: Sequence["RetentionResult"], auxiliary: str) -> str:
    counts = Counter[str](result.action for result in results)
    parts = [
        f"{plural(counts[action], 'session')} {auxiliary}{participle}"
        for action, participle in _ACTION_PARTICIPLES.items()
        if counts[action]
    ]
    return f"{', '.join(parts)}."


def _result_cells(result: "RetentionResult") -> list[str]:
    key = result.key or "-"
    shown_key = key if result.agent is None else f"{result.agent}/{key}"
    action = result.action if result.outcome in ("due", "done") else result.outcome
    return [action, result.rule, shown_key, str(result.messages), format_time(result.updated)]


def _missing_condition(rule: "Rule") -> str:
    """Explain why a rule selects no session."""
    return "a purge rule needs an age" if rule.action == "purge" else "the rule has no age or tag"
