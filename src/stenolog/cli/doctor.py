"""`steno doctor`: examine a workspace, print the findings, and repair them on request."""

import os
import shlex
import shutil
import sys
import textwrap
from collections.abc import Sequence
from functools import partial
from typing import TextIO

import click
import msgspec

from stenolog.cli.output import (
    error_sentence,
    one_line,
    plural,
    print_json,
    print_notice,
)
from stenolog.cli.workspace import (
    check_workspace_exists,
    choose_workspace,
    json_option,
    transcripts_hint,
    workspace_option,
)
from stenolog.errors import StenologError
from stenolog.maintenance.repair import accept, repair
from stenolog.maintenance.workspace_check import examine
from stenolog.sessions.folders import NAMESPACE
from stenolog.stores.admin import Finding, RepairResult, Report
from stenolog.stores.open_store import parse_address


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
@json_option("the report as a JSON object")
@partial(workspace_option, error_type=CheckFailed)
def doctor_command(
    directory: str | None,
    repairing: bool,
    accepting: bool,
    workspace: str,
) -> int:
    """Check a workspace or database for damage, and repair it on request.

    Checks the sessions of all agents and namespaces, logs, archives, the trash, locks and file
    permissions. Each finding says what is wrong, what it means and what to do.

    Without options nothing is changed. --repair marks incomplete writes as invalid and moves unused
    files to the folder "aside" of the workspace; in a database, --repair changes nothing.
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
    except (StenologError, OSError) as error:
        raise CheckFailed(error_sentence(error)) from error

    fields = {**msgspec.to_builtins(report), "repairs": msgspec.to_builtins(repairs)}
    if not print_json(fields, indent=2):
        for result in repairs:
            _print_repair(result)
        for finding in report.findings:
            _print_finding(finding, place)
        print_notice(_wrap_line(_summary_text(report, repairs), sys.stderr))
    return 1 if report.findings else 0


def _print_repair(result: RepairResult) -> None:
    outcome = "fixed" if result.done else "not fixed"
    name, path = result.finding.key or result.finding.path, result.finding.path
    # Other agents may have a session with the same key, so their path is printed too.
    path_text = "" if path.startswith(f"{NAMESPACE}/") or name == path else f" ({path})"
    print_notice(one_line(f"{name}{path_text}: {result.finding.kind} {outcome}: {result.message}"))


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
