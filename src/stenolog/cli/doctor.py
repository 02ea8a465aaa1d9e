"""`steno doctor`: examine a workspace, print the findings, and repair them on request."""

import os
import shlex
import shutil
import sys
import textwrap
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Final, TextIO

import click
import msgspec
from msgspec.structs import replace

from stenolog.cli.output import error_sentence, json_text, one_line, plural
from stenolog.cli.workspace import (
    Location,
    check_exists,
    choose_workspace,
    open_existing,
    workspace_option,
)
from stenolog.errors import StenologError
from stenolog.maintenance.environment_check import (
    CheckNote,
    check_notes,
    low_disk,
    purged_but_in_fallback,
    unindexed_sessions,
)
from stenolog.maintenance.repair import accept, repair
from stenolog.maintenance.workspace_check import examine
from stenolog.sessions.folders import NAMESPACE, other_namespaces
from stenolog.stores.findings import Finding, RepairResult, Report
from stenolog.stores.open_store import address

if TYPE_CHECKING:
    from stenolog.transfer.transcripts.transcript import TranscriptFile, TranscriptReader

WARNING_DAYS: Final = 7
"""Days before a program deletes a transcript from which the doctor names it."""


class CheckFailed(click.ClickException):
    """The workspace could not be examined completely."""

    exit_code = 3


@click.command("doctor")
@click.argument("directory", metavar="[DIR]", required=False)
@click.option(
    "--repair",
    "repairing",
    is_flag=True,
    help="Repair what can be repaired, without deleting anything.",
)
@click.option(
    "--accept", "accepting", is_flag=True, help="Accept log lines that were edited by hand."
)
@click.option("-v", "--verbose", is_flag=True, help="Also print notes that are not faults.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as a JSON object.")
@partial(workspace_option, wrong=CheckFailed)
@click.pass_context
def doctor_command(
    ctx: click.Context,
    directory: str | None,
    repairing: bool,
    accepting: bool,
    verbose: bool,
    as_json: bool,
    workspace: str,
) -> None:
    """Check a workspace or database for damage, and repair it on request.

    Checks everything: the sessions of all agents and namespaces, logs, archives, the trash, locks,
    file permissions and free disk space. Each finding says what is wrong, what it means and what to
    do. With -v, or in a terminal, notes that are not faults are printed to stderr: interrupted
    turns, an outdated index, a temporary or network disk, versions, and transcripts of Claude Code
    that it deletes within a week and that are not imported yet.

    Without options nothing is written. --repair marks incomplete writes as void and moves leftover
    files to the folder aside; in a database it rebuilds damaged state. --accept keeps lines that
    were edited by hand and saves the original log in aside. Nothing is ever deleted.

    Example: steno doctor --repair

    Exit codes: 0 no findings, 1 findings (after --repair or --accept: some remain), 2 wrong usage,
    3 the check failed.
    """
    place = choose_workspace(ctx, directory, workspace)
    settled: list[RepairResult] = []
    try:
        check_exists(place)
        if accepting:
            settled += accept(place)
        if repairing:
            settled += repair(place)
        report = examine(place)
        more = (*unindexed_sessions(place), *purged_but_in_fallback(place), *low_disk(place))
        report = replace(report, findings=(*report.findings, *more))
        with_notes = verbose or (sys.stderr.isatty() and not as_json)
        notes = []
        if with_notes:
            notes = [*check_notes(place), *_mixed_notes(place), *_expiring_notes(place)]
    except (StenologError, OSError) as error:
        raise CheckFailed(error_sentence(error)) from error

    if as_json:
        fields = {**msgspec.to_builtins(report), "settled": msgspec.to_builtins(settled)}
        fields |= {"notes": msgspec.to_builtins(notes)} if verbose else {}
        click.echo(json_text(fields, indent=2))
    else:
        for one in settled:
            _print_repair(one)
        for finding in report.findings:
            _print_finding(finding, _path_prefix(place))
        for note in notes:
            words = one_line(f"{note.meaning} {note.advice}".strip())
            click.echo(_wrap_line(f"{note.kind}: {words}", sys.stderr), err=True)
        click.echo(_wrap_line(_summary(report, settled), sys.stderr), err=True)
    ctx.exit(1 if report.findings else 0)


def _mixed_notes(place: str) -> list[CheckNote]:
    """Return notes about memory notes of older versions that no session recalls."""
    # Imported late: needed only if notes are printed.
    from stenolog.memory.mixed_scopes import mixed_scopes

    return [
        CheckNote(
            kind="mixed notes",
            meaning=(
                f"An older version made {plural(one.notes, 'note')} of {one.scope.name} from "
                f"several sessions ({', '.join(one.sessions[:5])}), possibly of different users. "
                "They are not recalled."
            ),
            advice=(
                f"`steno memory list --all --who {shlex.quote(one.scope.name)}` lists them, "
                "`steno memory forget ID` removes one."
            ),
        )
        for one in mixed_scopes(place)
    ]


def _expiring_notes(place: str) -> list[CheckNote]:
    """Return a note on the transcripts that Claude Code deletes soon and that are not imported."""
    # Imported late: needed only if notes are printed.
    from stenolog.transfer.transcripts.claude_code import ClaudeCode
    from stenolog.transfer.transcripts.claude_settings import (
        cleanup_days,
        expiring_transcripts,
        has_hook,
        settings_file,
    )
    from stenolog.transfer.transcripts.transcript_import import is_imported

    reader = ClaudeCode()
    now = datetime.now(UTC)
    soon = expiring_transcripts(reader, now, within=timedelta(days=WARNING_DAYS))
    agents = other_namespaces(place).agents if soon else ()
    for agent in (None, *agents):
        with (
            suppress(StenologError),
            open_existing(Location(workspace=place, agent=agent), read_only=True) as store,
        ):
            soon = [(end, file) for end, file in soon if not is_imported(file, store)]
    soon = [one for one in soon if _has_messages(reader, one[1])]
    if not soon:
        return []
    end, first = soon[0]
    when = "at its next start" if end <= now else f"on {end:%Y-%m-%d}"
    are = "is" if len(soon) == 1 else "are"
    hook = (
        ""
        if has_hook()
        else (" `steno hook install claude-code` imports new sessions when they end.")
    )
    return [
        CheckNote(
            kind="transcripts",
            meaning=(
                f"{plural(len(soon), 'transcript')} of Claude Code {are} not imported, and Claude "
                f"Code deletes them within {WARNING_DAYS} days. The oldest is {first.paths[0]}, "
                f"deleted {when}. Claude Code keeps transcripts for "
                f"{plural(cleanup_days(settings_file()), 'day')} (cleanupPeriodDays)."
            ),
            advice=f"`steno import claude-code` keeps them here.{hook}",
        )
    ]


def _has_messages(reader: "TranscriptReader", file: "TranscriptFile") -> bool:
    """Return whether an import would add something: a file may hold only a title."""
    try:
        return bool(reader.read(file, is_complete=False).messages)
    except OSError:
        return False  # it was deleted meanwhile


def _print_repair(one: RepairResult) -> None:
    done = "fixed" if one.done else "not fixed"
    name, path = one.finding.key or one.finding.path, one.finding.path
    # Several agents may have a session with the same key.
    where = "" if path.startswith(f"{NAMESPACE}/") or name == path else f" ({path})"
    line = f"{name}{where}: {one.finding.kind} {done}: {one.words}"
    click.echo(one_line(line), err=True)


def _path_prefix(place: str) -> str:
    """Return the folder that completes the paths of findings; empty for a database."""
    found = address(place)
    return f"{os.fspath(found.path).rstrip('/')}/" if found.engine == "jsonl" else ""


def _print_finding(finding: Finding, folder: str) -> None:
    of = "" if finding.key is None else f" · {one_line(finding.key)}"
    click.secho(finding.kind, bold=True, nl=False)
    click.echo(of)
    path = finding.path if finding.path.startswith("/") else f"{folder}{finding.path}"
    click.echo(f"  {one_line(path)}" + (f", {finding.where}" if finding.where else ""))
    click.echo(_wrap_line(f"  {one_line(finding.meaning)}", sys.stdout))
    click.echo(_wrap_line(f"  What to do: {one_line(finding.advice)}", sys.stdout) + "\n")


def _wrap_line(line: str, stream: TextIO) -> str:
    """Return a line unchanged, or wrapped at words in a terminal."""
    if not stream.isatty():
        return line
    width = max(20, shutil.get_terminal_size().columns)
    indent = "  " if line.startswith("  ") else ""
    return textwrap.fill(
        line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _summary(report: Report, settled: Sequence[RepairResult]) -> str:
    examined = plural(report.sessions, "log")
    if not report.findings:
        if not report.sessions and not settled:
            return f"There are no sessions in {report.workspace} yet."
        return f"Checked {examined}: no problems found."
    words = f"Checked {examined}: {plural(len(report.findings), 'problem')} found"
    repairable = sum(finding.repairable for finding in report.findings)
    if not repairable:
        return f"{words}."
    command = one_line(f"steno doctor {shlex.quote(report.workspace)} --repair")
    return f"{words}, {repairable:,} repairable with `{command}`."
