"""`steno copy` and `steno backup`, and the progress and report of both."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import click

from stenolog.cli.output import (
    EXIT_PARTIAL,
    attributes_of,
    one_line,
    plural,
    print_json,
    print_notice,
    progress_bar,
    sentence,
)
from stenolog.cli.workspace import (
    check_workspace_exists,
    json_option,
    workspace_option,
)
from stenolog.stores.open_store import parse_address
from stenolog.transfer.copy import CopyReport, CopyStep, OnProgress, copy_place

_json_option: Final = json_option("the report as a JSON object")
_PHASE_LABELS: Final = {"copying": "Copying", "comparing": "Comparing"}


@click.command("copy")
@click.argument("source", metavar="SRC")
@click.argument("target", metavar="DST")
@_json_option
def copy_command(source: str, target: str) -> int:
    """Copy all sessions from one workspace or database to another.

    SRC and DST are a folder, sqlite:FILE or postgresql://…. Everything is copied: messages,
    summaries, undo steps, titles, tags, archives, notes, the sessions of all agents, and the trash.
    Then the copy is read and compared with SRC.

    SRC may be in use. Sessions that DST has are not changed: equal ones are skipped, the others are
    reported. Run the command again to finish an interrupted copy.

    Copy only your own data. An agent that uses DST resumes the unfinished turns of SRC, sends their
    answers to chat apps, and recalls the notes of SRC. To get a session from another person, import
    a file of `steno export`.

    Prints one line per session that could not be copied or is different in DST, and a summary to
    stderr.

    Example: steno copy workspace sqlite:steno.db

    Exit codes: 0 done, 1 failed, 2 wrong usage, 3 some sessions could not be copied or are
    different in DST.
    """
    return _copy(source, target)


def _copy(source: str, target: str) -> int:
    """Copy all sessions, print the report, and return the exit code."""
    with _show_copy_progress() as on_progress:
        report = copy_place(source, target, on_progress=on_progress)
    if not print_json(_report_fields(report), indent=2):
        for line in _problem_lines(report):
            click.echo(line)
        print_notice(*_report_lines(report))
    return EXIT_PARTIAL if report.problems else 0


@contextmanager
def _show_copy_progress() -> Iterator[OnProgress | None]:
    """Yield a function that shows progress; None outside a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    with progress_bar("{task.fields[messages]:,} messages") as progress:
        task = progress.add_task("Copying", total=None, messages=0)

        def update_bar(namespace: str, step: CopyStep) -> None:
            progress.update(
                task,
                description=f"{_PHASE_LABELS[step.phase]} {one_line(namespace)}",
                completed=step.done,
                total=step.total,
                messages=step.messages,
            )

        yield update_bar


# --- report ----------------------------------------------------------------------------------


def _report_fields(report: CopyReport) -> dict[str, Any]:
    """Return the report as a JSON object."""
    return {
        **attributes_of(report, "sessions", "deleted", "written", "messages"),
        "lost": sum(session.lost for session in report.copied_sessions()),
        "namespaces": {
            name: {
                "sessions": len(result.copied),
                "messages": result.messages,
                "problems": [
                    attributes_of(problem, "key", "uid", "reason") for problem in result.problems
                ],
            }
            for name, result in report.namespaces.items()
        },
    }


def _problem_lines(report: CopyReport) -> Iterator[str]:
    """Yield a line for each session that could not be copied.

    A line without a key is about a whole namespace.
    """
    for name, result in report.namespaces.items():
        for problem in result.problems:
            reason = sentence(problem.reason.removeprefix(f"{problem.key!r}: "))
            yield f"{one_line(name)}\t{one_line(problem.key)}\t{reason}"


def _report_lines(report: CopyReport) -> Iterator[str]:
    """Yield sentences that summarize the report."""
    if not report.sessions and not report.deleted and not report.problems:
        yield "There are no sessions to copy."
        return
    written_text = f"{plural(report.written, 'session')}, {plural(report.messages, 'message')}"
    sessions = plural(report.sessions + report.deleted, "session")
    trash_text = f" ({report.deleted:,} in the trash)" if report.deleted else ""
    yield f"Copied {written_text}."
    yield f"Verified {sessions}{trash_text}: identical on both sides."
    for session in report.copied_sessions():
        if session.lost:
            yield (
                f"{one_line(session.key)} is damaged in the source: "
                f"{plural(session.lost, 'message')} could not be read. "
                "Run `steno doctor` on the source for details."
            )


# --- backup ---------------------------------------------------------------------------------------


@click.command("backup")
@click.argument("folder", metavar="DIR")
@_json_option
@workspace_option
def backup_command(folder: str, workspace: str) -> int:
    """Copy all sessions to a new folder of plain text files.

    DIR must be empty or missing. It becomes a workspace, even if the sessions are in a database:
    `steno list -w DIR` reads the backup, and `steno copy DIR DST` copies the sessions back. The
    store may be in use.

    Prints one line per session that could not be copied, and a summary to stderr.

    Example: steno backup ~/backups/monday

    Exit codes: 0 done, 1 failed, 2 wrong usage, 3 some sessions could not be copied.
    """
    address = parse_address(folder)
    if address.engine != "jsonl":
        raise click.UsageError("DIR must be a folder. Name the store to back up with -w.")
    if any(Path(address.path).glob("*")):
        raise click.UsageError("DIR must be empty. Give a new folder for each backup.")
    check_workspace_exists(workspace)
    return _copy(workspace, folder)
