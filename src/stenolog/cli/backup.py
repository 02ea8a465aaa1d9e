"""`steno backup`: a copy in plain text that is kept up to date, verified, and brought back."""

from typing import Any

import click

from stenolog.cli.copying import NOT_ALL, as_object, count, in_words, problem_lines, watching
from stenolog.cli.text import json_text, one_line, sentence
from stenolog.cli.workspace import check_there, shown, workspace_option
from stenolog.sessions.backup import Verified, back_up, restore, verify
from stenolog.stores.opening import address


@click.command("backup")
@click.argument("folder", metavar="DIR")
@click.option("--verify", "verifying", is_flag=True, help="Read all of it, and tell of damage.")
@click.option("--restore", "restoring", is_flag=True, help="Bring back what the store lacks.")
@click.option("--json", "as_json", is_flag=True, help="Write the report as one JSON object.")
@workspace_option
@click.pass_context
def backup_command(
    ctx: click.Context,
    folder: str,
    verifying: bool,
    restoring: bool,
    as_json: bool,
    workspace: str,
) -> None:
    """Keep a backup of all sessions in DIR, while they are written to.

    DIR becomes a workspace of plain text files, whatever the store is, and is brought up to date
    by the same command: what has not changed is not read again. Each session is as it was at one
    moment. A manifest, backup.json, has a digest of each.

    --verify reads all of DIR and compares it with the manifest. --restore does so first, and then
    copies back what the store that -w names does not have; what it has newer stays, and what is
    damaged in DIR is left out.

    One line for each session that is damaged or could not be copied; stderr has the sum.

    Exit code: 0 all is well, 1 it could not be done, or --verify found damage, 2 wrong usage, 3
    some sessions could not be copied.
    """
    if address(folder).engine != "jsonl":
        raise click.UsageError("DIR is a folder; the store to back up is named with -w.", ctx)
    if verifying and restoring:
        raise click.UsageError("--restore verifies first; leave --verify out.", ctx)
    if verifying:
        ctx.exit(_verify(folder, as_json=as_json))
    ctx.exit((_restore if restoring else _back_up)(folder, workspace, as_json=as_json))


def _back_up(folder: str, workspace: str, *, as_json: bool) -> int:
    check_there(workspace)
    with watching() as watch:
        taken = back_up(workspace, folder, watch=watch)
    if as_json:
        click.echo(json_text({**as_object(taken), "kept": taken.kept}, indent=2))
    else:
        for line in problem_lines(taken):
            click.echo(line)
        for words in in_words(taken, "backed up"):
            click.echo(words, err=True)
        if taken.kept:
            click.echo(f"{count(taken.kept, 'session')} of earlier backups kept.", err=True)
    return NOT_ALL if taken.problems else 0


def _verify(folder: str, *, as_json: bool) -> int:
    with watching() as watch:
        found = verify(folder, watch=watch)
    if as_json:
        click.echo(json_text(_as_object(found), indent=2))
    else:
        for line in _finding_lines(found):
            click.echo(line)
        when = f"taken {found.taken}" if found.taken else "cut short; run it again"
        words = f"{count(found.sessions, 'session')} verified, {count(found.messages, 'message')}"
        wrong = f"; {count(len(found.findings), 'finding')}" if found.findings else ""
        click.echo(f"{words}{wrong}. The last backup was {when}.", err=True)
    return 1 if found.findings else 0


def _restore(folder: str, workspace: str, *, as_json: bool) -> int:
    with watching() as watch:
        copied, checked = restore(folder, workspace, watch=watch)
    newer = sum(one.newer for found in copied.namespaces.values() for one in found.problems)
    if as_json:
        report = {**as_object(copied), "newer": newer, "backup": _as_object(checked)}
        click.echo(json_text(report, indent=2))
    else:
        for line in (*_finding_lines(checked), *problem_lines(copied, newer=False)):
            click.echo(line)
        for words in in_words(copied, "restored"):
            click.echo(words, err=True)
        if newer:
            are = "is" if newer == 1 else "are"
            where = one_line(shown(workspace))
            click.echo(f"{count(newer, 'session')} {are} newer in {where} and left so.", err=True)
    return NOT_ALL if checked.findings or copied.problems > newer else 0


def _finding_lines(found: Verified) -> list[str]:
    return [
        f"{one_line(one.namespace)}\t{one_line(one.key)}\t{sentence(one.reason)}"
        for one in found.findings
    ]


def _as_object(found: Verified) -> dict[str, Any]:
    return {
        "sessions": found.sessions,
        "messages": found.messages,
        "taken": found.taken,
        "findings": [
            {
                "namespace": one.namespace,
                "key": one.key,
                "uid": one.uid,
                "reason": one.reason,
            }
            for one in found.findings
        ],
    }
