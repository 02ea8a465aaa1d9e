"""`steno delete` and `steno restore`: move sessions to the trash and back."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import click

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
    terminal_console,
)
from stenolog.cli.workspace import (
    Location,
    dry_run_option,
    find_session,
    json_option,
    location_options,
    require_terminal,
    session_command,
    yes_option,
)
from stenolog.errors import NoSuchSession, StenologError
from stenolog.records import TrashedSession

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
