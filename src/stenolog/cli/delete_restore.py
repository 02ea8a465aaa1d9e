"""`steno delete` and `steno restore`: move sessions to the trash and back."""

import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final

import click

from stenolog.cli.completion import complete_deleted, complete_key
from stenolog.cli.edit import dry_run_option, open_writable
from stenolog.cli.output import (
    PARTIAL,
    error_sentence,
    format_age,
    format_time,
    json_text,
    one_line,
    plural,
    print_notice,
    print_result,
    print_table,
    table_console,
)
from stenolog.cli.show import find_session
from stenolog.cli.workspace import Location, location_hint, location_options, open_read_only
from stenolog.errors import NoSuchSession, StenologError
from stenolog.records import Trashed

_MAX_LISTED: Final = 20
"""Maximum number of sessions listed before the question."""

yes_option = click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object per session."
)


def require_confirmation(yes: bool, what: str) -> None:
    """Raise UsageError if a confirmation is needed and there is no terminal to ask in."""
    if not yes and (sys.stdin is None or not sys.stdin.isatty()):
        raise click.UsageError(f"{what}. Without a terminal to confirm, add --yes.")


# --- delete ----------------------------------------------------------------------------------


@click.command("delete")
@click.argument("keys", metavar="KEY...", nargs=-1, required=True, shell_complete=complete_key)
@yes_option
@dry_run_option
@json_option
@location_options
@click.pass_context
def delete_command(
    ctx: click.Context,
    keys: tuple[str, ...],
    yes: bool,
    dry_run: bool,
    as_json: bool,
    where: Location,
) -> None:
    """Move sessions to the trash.

    `steno restore` brings them back unchanged; `steno purge` deletes them permanently. Without a
    terminal, --yes is required.

    Example: steno delete telegram:123 --dry-run

    Exit codes: 0 done, 1 failed or not confirmed, 2 wrong usage, 3 some sessions could not be
    deleted.
    """
    with (open_read_only if dry_run else open_writable)(where) as store:
        infos = list({(info := find_session(store, key)).key: info for key in keys}.values())
        lines = [f"{one_line(info.key)}: {plural(info.count, 'message')}" for info in infos]
        if dry_run:
            for info in infos:
                if as_json:
                    click.echo(json_text(_deletion_fields(info.key, info.uid, info.count)))
            list_lines("Would be moved to the trash:", lines)
            return
        if not yes:
            require_confirmation(yes, "This moves sessions to the trash")
            list_lines("To be moved to the trash (`steno restore` brings them back):", lines)
            click.confirm(f"Delete {plural(len(infos), 'session')}?", abort=True, err=True)
        failed = False
        for info in infos:
            try:
                gone = store.delete(info.key)
            except StenologError as error:
                if len(infos) == 1:
                    raise
                failed = True
                print_notice(error_sentence(error))
                continue
            back = one_line(f"`steno restore {shlex.quote(info.key)}{location_hint()}`")
            words = f"Moved {one_line(info.key)} to the trash. {back} brings it back."
            print_result(
                _deletion_fields(info.key, gone.uid, gone.count, gone), words, as_json=as_json
            )
    ctx.exit(PARTIAL if failed else 0)


def _deletion_fields(
    key: str, uid: str, messages: int, gone: Trashed | None = None
) -> dict[str, Any]:
    return {
        "key": key,
        "uid": uid,
        "messages": messages,
        "deleted": None if gone is None else format_time(gone.deleted),
        "dry_run": gone is None,
    }


def list_lines(head: str, lines: Sequence[str]) -> None:
    """List the first sessions, and the number of further ones."""
    print_notice(head)
    for line in lines[:_MAX_LISTED]:
        print_notice(f"  {line}")
    if len(lines) > _MAX_LISTED:
        print_notice(f"  … and {len(lines) - _MAX_LISTED:,} more")


# --- restore ---------------------------------------------------------------------------------


@click.command("restore")
@click.argument("key", metavar="[KEY]", required=False, shell_complete=complete_deleted)
@click.option("--list", "listing", is_flag=True, help="List the sessions in the trash.")
@click.option("--uid", metavar="UID", help="Restore the session with this uid.")
@click.option("--as", "as_key", metavar="KEY", help="Restore it under this key.")
@json_option
@location_options
@click.pass_context
def restore_command(
    ctx: click.Context,
    key: str | None,
    listing: bool,
    uid: str | None,
    as_key: str | None,
    as_json: bool,
    where: Location,
) -> None:
    """Restore the session KEY from the trash.

    Messages, summary, archives and undo steps are restored. If several deleted sessions had this
    key, the one deleted last is restored, unless --uid selects another.

    With --list, prints one line per deleted session, last deleted first, separated by tabs: key,
    uid, number of messages, time of deletion. In a terminal it prints a table.

    Exit codes: 0 done, 1 failed, for example because the key is in use, 2 wrong usage.
    """
    if listing:
        if uid is not None or as_key is not None:
            raise click.UsageError("--list cannot be combined with --uid or --as.")
        _print_trash(key, as_json=as_json, where=where, color=ctx.color is not False)
        return
    if key is None:
        raise click.UsageError(
            "KEY is missing. `steno restore --list` lists the sessions in the trash."
        )
    with open_writable(where) as store:
        try:
            store.restore(key, uid=uid, as_key=as_key)
        except NoSuchSession:
            raise click.ClickException(
                f"There is no session {one_line(key)!r}"
                + (f" with uid {one_line(uid)}" if uid is not None else "")
                + " in the trash. `steno restore --list` lists the sessions in it."
            ) from None
        info = store.info(as_key or key)
    fields = {"key": info.key, "uid": info.uid, "was": key, "messages": info.count}
    words = f"Restored {one_line(info.key)}: {plural(info.count, 'message')}."
    print_result(fields, words, as_json=as_json)


def _print_trash(key: str | None, *, as_json: bool, where: Location, color: bool) -> None:
    with open_read_only(where) as store:
        found = [one for one in store.list_trash() if key in (None, one.key)]
    if found and not as_json and sys.stdout.isatty():
        _print_table(found, color=color)
        return
    for one in found:
        if as_json:
            fields = {
                "key": one.key,
                "uid": one.uid,
                "messages": one.count,
                "deleted": format_time(one.deleted),
            }
            click.echo(json_text(fields))
        else:
            click.echo(
                "\t".join((one_line(one.key), one.uid, str(one.count), format_time(one.deleted)))
            )
    if not found:
        print_notice(
            "The trash is empty." if key is None else f"{one_line(key)!r} is not in the trash."
        )


def _print_table(found: Sequence[Trashed], *, color: bool) -> None:
    console = table_console(color=color)
    number = {"justify": "right", "no_wrap": True}
    # Users copy key and uid: both are wrapped, never shortened.
    columns = {
        "key": {"overflow": "fold", "max_width": max(10, console.width // 2)},
        "uid": {"overflow": "fold", "min_width": 16},
        "messages": number,
        "deleted": number,
    }
    now = datetime.now(UTC)
    rows = (
        (
            (one_line(one.key), "cyan"),
            one.uid,
            f"{one.count:,}",
            (format_age(one.deleted, now), "dim"),
        )
        for one in found
    )
    print_table(console, columns, rows)
