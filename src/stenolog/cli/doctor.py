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

from stenolog.cli.output import (
    error_sentence,
    one_line,
    plural,
    print_json,
    print_notice,
    wants_json,
)
from stenolog.cli.workspace import (
    Location,
    check_workspace_exists,
    choose_workspace,
    json_option,
    transcripts_hint,
    workspace_option,
)
from stenolog.errors import StenologError
from stenolog.maintenance.environment_check import (
    CheckNote,
    check_disk_space,
    check_indexing,
    list_notes,
)
from stenolog.maintenance.repair import accept, repair
from stenolog.maintenance.workspace_check import examine
from stenolog.sessions.folders import NAMESPACE, NOTES, other_namespaces
from stenolog.stores.findings import Finding, RepairResult, Report
from stenolog.stores.open_store import open_store, parse_address

if TYPE_CHECKING:
    from stenolog.memory.notes import Note
    from stenolog.memory.scopes import Scope
    from stenolog.transfer.transcripts.transcript import TranscriptFile, TranscriptReader

WARNING_DAYS: Final = 7
"""The doctor warns this many days before a transcript is deleted."""


class CheckFailed(click.ClickException):
    """The workspace could not be examined completely."""

    exit_code = 3


@click.command("doctor")
@click.argument("directory", metavar="[DIR]", required=False)
@click.option(
    "--repair",
    "repairing",
    is_flag=True,
    help="Repair damage if possible, without deleting anything.",
)
@click.option(
    "--accept", "accepting", is_flag=True, help="Accept log lines that were edited by hand."
)
@click.option("-v", "--verbose", is_flag=True, help="Also print facts that are not errors.")
@json_option("the report as a JSON object")
@partial(workspace_option, error_type=CheckFailed)
def doctor_command(
    directory: str | None,
    repairing: bool,
    accepting: bool,
    verbose: bool,
    workspace: str,
) -> int:
    """Check a workspace or database for damage, and repair it on request.

    Checks the sessions of all agents and namespaces, logs, archives, the trash, locks, file
    permissions and free disk space. Each finding says what is wrong, what it means and what to do.
    With -v, or in a terminal, facts that are not errors are printed to stderr: interrupted turns,
    an outdated index, a temporary or network disk, versions, and transcripts that are not imported
    yet and that Claude Code will delete within a week.

    Without options nothing is changed. --repair marks incomplete writes as invalid and moves unused
    files to the folder "aside" of the workspace; in a database, --repair rebuilds damaged data.
    --accept accepts lines that were edited by hand, and keeps a copy of the log in "aside". Nothing
    is ever deleted.

    Example: steno doctor --repair

    Exit codes: 0 no findings, 1 findings (after --repair or --accept: some remain), 2 wrong usage,
    3 the check failed.
    """
    place = choose_workspace(directory, workspace)
    repairs: list[RepairResult] = []
    try:
        check_workspace_exists(place)
        if accepting:
            repairs += accept(place)
        if repairing:
            repairs += repair(place)
        report = examine(place)
        findings = (*check_indexing(place), *check_disk_space(place))
        report = replace(report, findings=(*report.findings, *findings))
        notes = []
        if verbose or (sys.stderr.isatty() and not wants_json()):
            notes = [
                *list_notes(place),
                *_hints_about_unrecalled_notes(place),
                *_hints_about_expiring_transcripts(place),
            ]
    except (StenologError, OSError) as error:
        raise CheckFailed(error_sentence(error)) from error

    fields = {**msgspec.to_builtins(report), "settled": msgspec.to_builtins(repairs)}
    fields |= {"notes": msgspec.to_builtins(notes)} if verbose else {}
    if not print_json(fields, indent=2):
        for result in repairs:
            _print_repair(result)
        for finding in report.findings:
            _print_finding(finding, place)
        for note in notes:
            text = one_line(f"{note.meaning} {note.advice}".strip())
            print_notice(_wrap_line(f"{note.kind}: {text}", sys.stderr))
        print_notice(_wrap_line(_summary_text(report, repairs), sys.stderr))
    return 1 if report.findings else 0


def _hints_about_unrecalled_notes(place: str) -> list[CheckNote]:
    """Return hints about notes that older versions made in scopes shared by several sessions.

    These mixed notes are never recalled.
    """
    # These imports are only needed if hints are printed.
    from stenolog.memory.notes import Notes
    from stenolog.transfer.copy_all import list_namespaces

    try:
        if NOTES not in list_namespaces(place):
            return []
        with open_store(place, namespace=NOTES, read_only=True) as store:
            notes = Notes(store)
            return [
                _mixed_notes_hint(scope, mixed_notes)
                for scope in notes.scopes()
                if (mixed_notes := [note for note in notes.list(scope, full=True) if note.mixed])
            ]
    except StenologError:
        return []  # the report says why the notes cannot be read


def _mixed_notes_hint(scope: "Scope", mixed_notes: Sequence["Note"]) -> CheckNote:
    sessions = list(dict.fromkeys(note.session for note in mixed_notes if note.session))
    return CheckNote(
        kind="mixed notes",
        meaning=(
            f"An older version made {plural(len(mixed_notes), 'note')} of {scope.name} from "
            f"several sessions ({', '.join(sessions[:5])}), possibly of different users. "
            "These notes are not recalled."
        ),
        advice=(
            f"`steno memory list --all --who {shlex.quote(scope.name)}` lists them, "
            "`steno memory forget ID` removes one."
        ),
    )


def _hints_about_expiring_transcripts(place: str) -> list[CheckNote]:
    """Return a hint if Claude Code will soon delete transcripts that are not imported yet."""
    # These imports are only needed if hints are printed.
    from stenolog.transfer.transcripts.claude_code import ClaudeCode
    from stenolog.transfer.transcripts.claude_settings import (
        find_expiring_transcripts,
        read_cleanup_days,
        settings_file,
    )
    from stenolog.transfer.transcripts.transcript_import import is_imported

    reader = ClaudeCode()
    now = datetime.now(UTC)
    expiring = find_expiring_transcripts(reader, now, within=timedelta(days=WARNING_DAYS))
    agents = other_namespaces(place).agents if expiring else ()
    for agent in (None, *agents):
        with (
            suppress(StenologError),
            Location(workspace=place, agent=agent).open_existing() as store,
        ):
            expiring = [entry for entry in expiring if not is_imported(entry[1], store)]
    expiring = [entry for entry in expiring if _has_messages(reader, entry[1])]
    if not expiring:
        return []
    deleted_at, first_file = expiring[0]
    deletion_text = "when Claude Code starts" if deleted_at <= now else f"on {deleted_at:%Y-%m-%d}"
    verb = "is" if len(expiring) == 1 else "are"
    return [
        CheckNote(
            kind="transcripts",
            meaning=(
                f"{plural(len(expiring), 'transcript')} of Claude Code {verb} not imported and "
                f"will be deleted within {WARNING_DAYS} days. The oldest is {first_file.paths[0]}, "
                f"to be deleted {deletion_text}. Claude Code keeps transcripts for "
                f"{plural(read_cleanup_days(settings_file()), 'day')} (cleanupPeriodDays)."
            ),
            advice=(
                "`steno import claude-code` imports them. `steno hook` prints settings with which "
                "each new session is imported when it ends."
            ),
        )
    ]


def _has_messages(reader: "TranscriptReader", file: "TranscriptFile") -> bool:
    """Return whether a transcript has messages. Some files contain only a title."""
    try:
        return bool(reader.read(file, include_copies=False).messages)
    except OSError:
        return False  # the file was deleted meanwhile


def _print_repair(result: RepairResult) -> None:
    outcome = "fixed" if result.done else "not fixed"
    name, path = result.finding.key or result.finding.path, result.finding.path
    # Other agents may have a session with the same key, so their path is printed too.
    path_text = "" if path.startswith(f"{NAMESPACE}/") or name == path else f" ({path})"
    print_notice(one_line(f"{name}{path_text}: {result.finding.kind} {outcome}: {result.words}"))


def _print_finding(finding: Finding, place: str) -> None:
    click.secho(finding.kind, bold=True, nl=False)
    click.echo("" if finding.key is None else f" · {one_line(finding.key)}")
    path, address = finding.path, parse_address(place)
    if address.engine == "jsonl" and not path.startswith("/"):
        path = f"{os.fspath(address.path).rstrip('/')}/{path}"
    click.echo(f"  {one_line(path)}" + (f", {finding.where}" if finding.where else ""))
    click.echo(_wrap_line(f"  {one_line(finding.meaning)}", sys.stdout))
    click.echo(_wrap_line(f"  What to do: {one_line(finding.advice)}", sys.stdout) + "\n")


def _wrap_line(line: str, stream: TextIO) -> str:
    """Return a line, wrapped at words if the stream is a terminal."""
    if not stream.isatty():
        return line
    width = max(20, shutil.get_terminal_size().columns)
    indent = "  " if line.startswith("  ") else ""
    return textwrap.fill(
        line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _summary_text(report: Report, repairs: Sequence[RepairResult]) -> str:
    if not (report.findings or report.sessions or repairs):
        hint = transcripts_hint(report.workspace)
        text = f"There are no sessions in {report.workspace} yet."
        return f"{text} {error_sentence(hint)}" if hint else text
    text = f"Checked {plural(report.sessions, 'log')}:"
    if not report.findings:
        return f"{text} no problems found."
    text += f" {plural(len(report.findings), 'problem')} found"
    repairable_count = sum(finding.repairable for finding in report.findings)
    if not repairable_count:
        return f"{text}."
    command = one_line(f"steno doctor {shlex.quote(report.workspace)} --repair")
    return f"{text}, {repairable_count:,} repairable with `{command}`."
