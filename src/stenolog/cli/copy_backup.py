"""`steno copy` and `steno backup`, and the progress and report of both."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import click

from stenolog.cli.output import PARTIAL, json_text, one_line, plural, progress_bar, sentence
from stenolog.cli.workspace import check_exists, display_name, workspace_option
from stenolog.stores.open_store import address
from stenolog.transfer.backup import BackupCheck, back_up, restore, verify
from stenolog.transfer.copy import CopyStep
from stenolog.transfer.copy_all import CopyReport, OnProgress, copy_place

_PHASES: Final = {"copying": "Copying", "last pass": "Final pass", "comparing": "Comparing"}


@click.command("copy")
@click.argument("source", metavar="SRC")
@click.argument("target", metavar="DST")
@click.option("--dry-run", is_flag=True, help="Show what would be done, without doing it.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as a JSON object.")
@click.pass_context
def copy_command(
    ctx: click.Context, source: str, target: str, dry_run: bool, as_json: bool
) -> None:
    """Copy all sessions from one workspace or database to another.

    SRC and DST are written as for -w: a folder, sqlite:FILE or postgresql://…. Everything is
    copied: messages, summaries, undo steps, titles, tags, archives, notes, the sessions of all
    agents, and the trash. Then everything is read back and compared.

    SRC may be in use. Run the command again to finish an interrupted copy or to copy later changes.
    Sessions that were changed in DST are never overwritten.

    Copy only your own data: an agent started on DST resumes the unfinished turns of SRC, sends the
    answers to the chats that SRC names, and recalls its notes. To get sessions from somebody else,
    import a file written by `steno export`.

    Prints one line per session that could not be copied, and a summary to stderr.

    Example: steno copy workspace sqlite:steno.db

    Exit codes: 0 done, 1 failed, 2 wrong usage, 3 some sessions could not be copied and are
    unchanged in DST.
    """
    with show_progress(shown=not dry_run) as watch:
        copied = copy_place(source, target, dry_run=dry_run, on_progress=watch)
    if as_json:
        click.echo(json_text(report_fields(copied), indent=2))
    else:
        for line in problem_lines(copied):
            click.echo(line)
        for words in report_lines(copied, "Would copy" if dry_run else "Copied"):
            click.echo(words, err=True)
    ctx.exit(PARTIAL if copied.problems else 0)


# --- progress --------------------------------------------------------------------------------


@contextmanager
def show_progress(*, shown: bool = True) -> Iterator[OnProgress | None]:
    """Show progress: a bar in a terminal, otherwise one line per pass."""
    if not shown:
        yield None
    elif sys.stderr.isatty():
        with _progress_bar() as watch:
            yield watch
    else:
        yield _ProgressLines().tell


@contextmanager
def _progress_bar() -> Iterator[OnProgress]:
    with progress_bar("{task.fields[messages]:,} messages") as progress:
        task = progress.add_task("Copying", total=None, messages=0)

        def watch(namespace: str, step: CopyStep) -> None:
            progress.update(
                task,
                description=f"{_PHASES[step.phase]} {one_line(namespace)}",
                completed=step.done,
                total=step.total,
                messages=step.messages,
            )

        yield watch


class _ProgressLines:
    """Progress as one line at the start of each pass."""

    def __init__(self) -> None:
        self._told: tuple[str, str, int] | None = None

    def tell(self, namespace: str, step: CopyStep) -> None:
        now = namespace, step.phase, step.number
        if step.total and now != self._told:
            self._told = now
            words = f"{_PHASES[step.phase]}: {one_line(namespace)}, {plural(step.total, 'session')}"
            click.echo(words, err=True)


# --- report ----------------------------------------------------------------------------------


def report_fields(copied: CopyReport) -> dict[str, Any]:
    """Return the report as a JSON object."""
    return {
        "sessions": copied.sessions,
        "deleted": copied.deleted,
        "written": copied.written,
        "messages": copied.messages,
        "seconds": round(copied.seconds, 3),
        "messages_per_second": _rate(copied),
        "digest": copied.digest,
        "dry_run": copied.dry_run,
        "not_compared": copied.not_compared,
        "unlocked": copied.unlocked,
        "lost": sum(one.lost for found in copied.namespaces.values() for one in found.copied),
        "namespaces": {
            name: {
                "sessions": len(found.copied),
                "messages": found.messages,
                "digest": found.digest(name),
                "problems": [
                    {"key": one.key, "uid": one.uid, "reason": one.reason, "newer": one.newer}
                    for one in found.problems
                ],
                "only_there": list(found.only_in_target),
            }
            for name, found in copied.namespaces.items()
        },
    }


def problem_lines(copied: CopyReport, *, newer: bool = True) -> Iterator[str]:
    """Yield a line for each session that could not be copied.

    Without `newer`, sessions that are newer in the destination are skipped. A line without a key is
    about a namespace.
    """
    for name, found in copied.namespaces.items():
        for one in found.problems:
            if newer or not one.newer:
                words = sentence(one.reason.removeprefix(f"{one.key!r}: "))
                yield f"{one_line(name)}\t{one_line(one.key)}\t{words}"


def report_lines(copied: CopyReport, done: str) -> Iterator[str]:
    """Yield the summary of the report as sentences."""
    written = plural(copied.messages, "message")
    if not copied.sessions and not copied.deleted and not copied.problems:
        yield "There are no sessions to copy."
        return
    if copied.dry_run:
        there = copied.sessions + copied.deleted - copied.written
        yield f"{done} {plural(copied.written, 'session')}, {written}; {there:,} are up to date."
        return
    compared = copied.sessions + copied.deleted - copied.not_compared
    if compared or not copied.not_compared:
        trash = f" ({copied.deleted:,} in the trash)" if copied.deleted else ""
        yield (
            f"{done} {plural(copied.written, 'session')}, {written} ({_rate(copied):,} per second)."
        )
        yield f"Verified {plural(compared, 'session')}{trash}: identical on both sides."
    if copied.not_compared:
        yield (
            f"{plural(copied.not_compared, 'session')} unchanged since last time, not read again."
        )
    yield f"Digest {copied.digest}."
    if copied.unlocked:
        yield (
            "The source could not be locked. Each session is consistent, but newer messages may be "
            "missing."
        )
    for found in copied.namespaces.values():
        for one in found.copied:
            if one.lost:
                yield (
                    f"{one_line(one.key)} is damaged in the source: {plural(one.lost, 'message')} "
                    "could not be read. Run `steno doctor` on the source for details."
                )
    only = sum(len(found.only_in_target) for found in copied.namespaces.values())
    if only:
        yield f"The destination has {plural(only, 'other session')}, not changed."


def _rate(copied: CopyReport) -> int:
    return round(copied.messages / copied.seconds) if copied.seconds > 0 else 0


# --- backup ---------------------------------------------------------------------------------------
# `steno backup`: a copy in plain text that is updated, verified and restored.


@click.command("backup")
@click.argument("folder", metavar="DIR")
@click.option("--verify", "verifying", is_flag=True, help="Check the backup in DIR for damage.")
@click.option("--restore", "restoring", is_flag=True, help="Copy missing sessions back from DIR.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as a JSON object.")
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
    """Back up all sessions to DIR, also while they are in use.

    DIR is a workspace of plain text files, whatever the store is. Run the same command again to
    update it; unchanged sessions are not read again. backup.json contains a digest of each session.

    --verify reads all of DIR and compares it with backup.json. --restore verifies DIR, then copies
    to the store of -w every session that the store does not have. Newer sessions of the store are
    kept, and damaged ones of DIR are skipped.

    Prints one line per session that is damaged or could not be copied, and a summary to stderr.

    Example: steno backup ~/backups/steno

    Exit codes: 0 done, 1 failed or --verify found damage, 2 wrong usage, 3 some sessions could not
    be copied.
    """
    if address(folder).engine != "jsonl":
        raise click.UsageError("DIR must be a folder. Name the store to back up with -w.", ctx)
    if verifying and restoring:
        raise click.UsageError("--restore verifies the backup itself; leave out --verify.", ctx)
    if verifying:
        ctx.exit(_verify(folder, as_json=as_json))
    ctx.exit((_restore if restoring else _back_up)(folder, workspace, as_json=as_json))


def _back_up(folder: str, workspace: str, *, as_json: bool) -> int:
    check_exists(workspace)
    with show_progress() as watch:
        taken = back_up(workspace, folder, on_progress=watch)
    if as_json:
        click.echo(json_text({**report_fields(taken), "kept": taken.kept}, indent=2))
    else:
        for line in problem_lines(taken):
            click.echo(line)
        for words in report_lines(taken, "Backed up"):
            click.echo(words, err=True)
        if taken.kept:
            click.echo(f"Kept {plural(taken.kept, 'session')} of earlier backups.", err=True)
    return PARTIAL if taken.problems else 0


def _verify(folder: str, *, as_json: bool) -> int:
    with show_progress() as watch:
        found = verify(folder, on_progress=watch)
    if as_json:
        click.echo(json_text(_check_fields(found), indent=2))
    else:
        for line in _finding_lines(found):
            click.echo(line)
        when = f"finished at {found.taken}" if found.taken else "interrupted; run it again"
        words = f"Verified {plural(found.sessions, 'session')}, {plural(found.messages, 'message')}"
        wrong = f": {plural(len(found.findings), 'problem')} found" if found.findings else ""
        click.echo(f"{words}{wrong}. The last backup was {when}.", err=True)
    return 1 if found.findings else 0


def _restore(folder: str, workspace: str, *, as_json: bool) -> int:
    with show_progress() as watch:
        copied, checked = restore(folder, workspace, on_progress=watch)
    newer = sum(one.newer for found in copied.namespaces.values() for one in found.problems)
    if as_json:
        report = {**report_fields(copied), "newer": newer, "backup": _check_fields(checked)}
        click.echo(json_text(report, indent=2))
    else:
        for line in (*_finding_lines(checked), *problem_lines(copied, newer=False)):
            click.echo(line)
        for words in report_lines(copied, "Restored"):
            click.echo(words, err=True)
        if newer:
            where = one_line(display_name(workspace))
            click.echo(f"Kept {plural(newer, 'newer session')} in {where}.", err=True)
    return PARTIAL if checked.findings or copied.problems > newer else 0


def _finding_lines(found: BackupCheck) -> list[str]:
    return [
        f"{one_line(one.namespace)}\t{one_line(one.key)}\t{sentence(one.reason)}"
        for one in found.findings
    ]


def _check_fields(found: BackupCheck) -> dict[str, Any]:
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
