"""`steno copy` and `steno backup`, and the progress and report of both."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any, Final

import click
from msgspec import to_builtins

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
    display_name,
    dry_run_option,
    json_option,
    workspace_option,
)
from stenolog.stores.open_store import parse_address
from stenolog.transfer.backup import BackupCheck, back_up, restore, verify
from stenolog.transfer.copy import CopiedSession, CopyStep
from stenolog.transfer.copy_all import CopyReport, OnProgress, copy_place

_json_option: Final = json_option("the report as a JSON object")
_PHASE_LABELS: Final = {"copying": "Copying", "last pass": "Final pass", "comparing": "Comparing"}


@click.command("copy")
@click.argument("source", metavar="SRC")
@click.argument("target", metavar="DST")
@dry_run_option
@_json_option
def copy_command(source: str, target: str, dry_run: bool) -> int:
    """Copy all sessions from one workspace or database to another.

    SRC and DST are a folder, sqlite:FILE or postgresql://…. Everything is copied: messages,
    summaries, undo steps, titles, tags, archives, notes, the sessions of all agents, and the trash.
    Then the copy is read and compared with SRC.

    SRC may be in use. Run the command again to finish an interrupted copy or to copy later changes.
    Sessions that were changed in DST are never overwritten.

    Copy only your own data. An agent that uses DST resumes the unfinished turns of SRC, sends their
    answers to chat apps, and recalls the notes of SRC. To get a session from another person, import
    a file of `steno export`.

    Prints one line per session that could not be copied, and a summary to stderr.

    Example: steno copy workspace sqlite:steno.db

    Exit codes: 0 done, 1 failed, 2 wrong usage, 3 some sessions could not be copied and are
    unchanged in DST.
    """
    with _show_copy_progress(enabled=not dry_run) as on_progress:
        report = copy_place(source, target, dry_run=dry_run, on_progress=on_progress)
    notices = report_lines(report, "Would copy" if dry_run else "Copied")
    _print_report(report_fields(report), problem_lines(report), notices)
    return EXIT_PARTIAL if report.problems else 0


def _print_report(fields: Any, lines: Iterable[str], notices: Iterable[str]) -> None:
    if not print_json(fields, indent=2):
        for line in lines:
            click.echo(line)
        print_notice(*notices)


@contextmanager
def _show_copy_progress(*, enabled: bool = True) -> Iterator[OnProgress | None]:
    """Yield a function that shows progress: a bar in a terminal, otherwise one line per pass.

    If not `enabled`, yield None.
    """
    if not enabled:
        yield None
        return
    if not sys.stderr.isatty():
        previous_pass: tuple[str, str, int] | None = None

        def print_new_pass(namespace: str, step: CopyStep) -> None:
            nonlocal previous_pass
            this_pass = (namespace, step.phase, step.number)
            if step.total and this_pass != previous_pass:
                previous_pass = this_pass
                sessions = plural(step.total, "session")
                print_notice(f"{_PHASE_LABELS[step.phase]}: {one_line(namespace)}, {sessions}")

        yield print_new_pass
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


def report_fields(report: CopyReport) -> dict[str, Any]:
    """Return the report as a JSON object."""
    return {
        **attributes_of(report, "sessions", "deleted", "written", "messages"),
        "seconds": round(report.seconds, 3),
        "messages_per_second": _messages_per_second(report),
        **attributes_of(report, "digest", "dry_run", "not_compared", "unlocked"),
        "lost": sum(session.lost for session in _copied_sessions(report)),
        "namespaces": {
            name: {
                "sessions": len(result.copied),
                "messages": result.messages,
                "digest": result.digest(name),
                "problems": [
                    attributes_of(problem, "key", "uid", "reason", "newer")
                    for problem in result.problems
                ],
                "only_there": result.only_in_target,
            }
            for name, result in report.namespaces.items()
        },
    }


def problem_lines(report: CopyReport, *, include_newer: bool = True) -> Iterator[str]:
    """Yield a line for each session that could not be copied.

    Without `include_newer`, sessions that are newer in the destination are left out. A line without
    a key is about a whole namespace.
    """
    for name, result in report.namespaces.items():
        for problem in result.problems:
            if include_newer or not problem.newer:
                reason = sentence(problem.reason.removeprefix(f"{problem.key!r}: "))
                yield f"{one_line(name)}\t{one_line(problem.key)}\t{reason}"


def report_lines(report: CopyReport, verb: str) -> Iterator[str]:
    """Yield sentences that summarize the report. `verb` names the action, such as `Copied`."""
    if not report.sessions and not report.deleted and not report.problems:
        yield "There are no sessions to copy."
        return
    messages = plural(report.messages, "message")
    written_text = f"{verb} {plural(report.written, 'session')}, {messages}"
    if report.dry_run:
        unchanged_count = report.sessions + report.deleted - report.written
        yield f"{written_text}; {unchanged_count:,} are up to date."
        return
    compared_count = report.sessions + report.deleted - report.not_compared
    if compared_count or not report.not_compared:
        trash_text = f" ({report.deleted:,} in the trash)" if report.deleted else ""
        yield f"{written_text} ({_messages_per_second(report):,} per second)."
        yield f"Verified {plural(compared_count, 'session')}{trash_text}: identical on both sides."
    if report.not_compared:
        sessions = plural(report.not_compared, "session")
        yield f"{sessions} unchanged since last time, not read again."
    yield f"Digest {report.digest}."
    if report.unlocked:
        yield (
            "The source could not be locked. Each session is consistent, but newer messages may be "
            "missing."
        )
    for session in _copied_sessions(report):
        if session.lost:
            yield (
                f"{one_line(session.key)} is damaged in the source: "
                f"{plural(session.lost, 'message')} could not be read. "
                "Run `steno doctor` on the source for details."
            )
    other_count = sum(len(result.only_in_target) for result in report.namespaces.values())
    if other_count:
        yield f"The destination has {plural(other_count, 'other session')}, not changed."


def _copied_sessions(report: CopyReport) -> Iterator[CopiedSession]:
    return chain.from_iterable(result.copied for result in report.namespaces.values())


def _messages_per_second(report: CopyReport) -> int:
    return round(report.messages / report.seconds) if report.seconds > 0 else 0


# --- backup ---------------------------------------------------------------------------------------


@click.command("backup")
@click.argument("folder", metavar="DIR")
@click.option("--verify", "verifying", is_flag=True, help="Check the backup in DIR for damage.")
@click.option("--restore", "restoring", is_flag=True, help="Copy missing sessions back from DIR.")
@_json_option
@workspace_option
def backup_command(folder: str, verifying: bool, restoring: bool, workspace: str) -> int:
    """Back up all sessions to DIR, also while they are in use.

    DIR is a workspace of plain text files, even if the sessions are in a database. Run the command
    again to update DIR; unchanged sessions are not read again. backup.json contains a digest of
    each session.

    --verify reads all files in DIR and compares them with backup.json. --restore verifies DIR and
    then copies missing sessions from DIR to the workspace or database of -w. Newer sessions there
    are not changed, and damaged sessions in DIR are skipped.

    Prints one line per session that is damaged or could not be copied, and a summary to stderr.

    Example: steno backup ~/backups/steno

    Exit codes: 0 done, 1 failed or --verify found damage, 2 wrong usage, 3 some sessions could not
    be copied.
    """
    if parse_address(folder).engine != "jsonl":
        raise click.UsageError("DIR must be a folder. Name the store to back up with -w.")
    if verifying and restoring:
        raise click.UsageError("--restore already verifies the backup. Leave out --verify.")
    if verifying:
        return _verify_backup(folder)
    return (_restore_backup if restoring else _back_up)(folder, workspace)


def _back_up(folder: str, workspace: str) -> int:
    check_workspace_exists(workspace)
    with _show_copy_progress() as on_progress:
        report = back_up(workspace, folder, on_progress=on_progress)
    notices = [*report_lines(report, "Backed up")]
    if report.kept:
        notices.append(f"Kept {plural(report.kept, 'session')} that the store no longer has.")
    fields = {**report_fields(report), "kept": report.kept}
    _print_report(fields, problem_lines(report), notices)
    return EXIT_PARTIAL if report.problems else 0


def _verify_backup(folder: str) -> int:
    with _show_copy_progress() as on_progress:
        check = verify(folder, on_progress=on_progress)
    status = f"finished at {check.taken}" if check.taken else "interrupted; run it again"
    text = f"Verified {plural(check.sessions, 'session')}, {plural(check.messages, 'message')}"
    if check.findings:
        text += f": {plural(len(check.findings), 'problem')} found"
    notice = f"{text}. The last backup was {status}."
    _print_report(to_builtins(check), _finding_lines(check), [notice])
    return 1 if check.findings else 0


def _restore_backup(folder: str, workspace: str) -> int:
    with _show_copy_progress() as on_progress:
        report, check = restore(folder, workspace, on_progress=on_progress)
    problems = chain.from_iterable(result.problems for result in report.namespaces.values())
    newer_count = sum(problem.newer for problem in problems)
    notices = [*report_lines(report, "Restored")]
    if newer_count:
        place = one_line(display_name(workspace))
        notices.append(f"Kept {plural(newer_count, 'newer session')} in {place}.")
    fields = {**report_fields(report), "newer": newer_count, "backup": to_builtins(check)}
    lines = [*_finding_lines(check), *problem_lines(report, include_newer=False)]
    _print_report(fields, lines, notices)
    return EXIT_PARTIAL if check.findings or report.problems > newer_count else 0


def _finding_lines(check: BackupCheck) -> list[str]:
    return [
        f"{one_line(finding.namespace)}\t{one_line(finding.key)}\t{sentence(finding.reason)}"
        for finding in check.findings
    ]
