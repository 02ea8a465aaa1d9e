"""`steno copy` and `steno backup`, and the progress and report of both."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import click

from stenolog.cli.output import NOT_ALL, count, json_text, one_line, progress_bar, sentence
from stenolog.cli.workspace import check_there, shown, workspace_option
from stenolog.stores.open_store import address
from stenolog.transfer.backup import BackupCheck, back_up, restore, verify
from stenolog.transfer.copy import CopyStep
from stenolog.transfer.copy_all import CopyReport, OnProgress, copy_place

_PHASES: Final = {"copying": "Copying", "last pass": "Last pass", "comparing": "Comparing"}


@click.command("copy")
@click.argument("source", metavar="SRC")
@click.argument("target", metavar="DST")
@click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing.")
@click.option("--json", "as_json", is_flag=True, help="Write the report as one JSON object.")
@click.pass_context
def copy_command(
    ctx: click.Context, source: str, target: str, dry_run: bool, as_json: bool
) -> None:
    """Copy all sessions from one place to another, whole.

    SRC and DST are places as -w takes them: a folder, sqlite:FILE or postgresql://…. All of it is
    copied: messages with their seqs and times, summaries, what is hidden, undo steps, titles and
    tags, archives, forks, tokens, notes, the sessions of every agent, and the trash.

    SRC may be written to meanwhile: what changes is copied again, and last of all under the lock
    of its session. Then everything is read back and compared. A copy that was cut short, or one
    after which SRC went on, is brought up to date by the same command. Nothing in DST is ever
    overwritten but an earlier copy of the same session that nobody wrote to since.

    Copy only what is yours: unfinished turns of SRC are answered in DST, the answers are sent to
    the chats that SRC names, and its notes are recalled. Of others, import what steno export wrote.

    One line for each session that could not be copied; stderr has the sum.

    Exit code: 0 all is there, 1 it could not be done, 2 wrong usage, 3 some sessions could not be
    copied, and DST has them as they were.
    """
    with watching(shown=not dry_run) as watch:
        copied = copy_place(source, target, dry_run=dry_run, on_progress=watch)
    if as_json:
        click.echo(json_text(as_object(copied), indent=2))
    else:
        for line in problem_lines(copied):
            click.echo(line)
        for words in in_words(copied, "would be copied" if dry_run else "copied"):
            click.echo(words, err=True)
    ctx.exit(NOT_ALL if copied.problems else 0)


# --- progress --------------------------------------------------------------------------------


@contextmanager
def watching(*, shown: bool = True) -> Iterator[OnProgress | None]:
    """Show progress: a bar in a terminal, otherwise one line per pass."""
    if not shown:
        yield None
    elif sys.stderr.isatty():
        with _bar() as watch:
            yield watch
    else:
        yield _Lines().tell


@contextmanager
def _bar() -> Iterator[OnProgress]:
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


class _Lines:
    """Progress as one line at the start of each pass."""

    def __init__(self) -> None:
        self._told: tuple[str, str, int] | None = None

    def tell(self, namespace: str, step: CopyStep) -> None:
        now = namespace, step.phase, step.number
        if step.total and now != self._told:
            self._told = now
            words = f"{_PHASES[step.phase]}: {one_line(namespace)}, {count(step.total, 'session')}"
            click.echo(words, err=True)


# --- report ----------------------------------------------------------------------------------


def as_object(copied: CopyReport) -> dict[str, Any]:
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


def in_words(copied: CopyReport, done: str) -> Iterator[str]:
    """Yield the summary of the report as sentences."""
    written = count(copied.messages, "message")
    if not copied.sessions and not copied.deleted and not copied.problems:
        yield "There are no sessions to copy."
        return
    if copied.dry_run:
        there = copied.sessions + copied.deleted - copied.written
        yield f"{count(copied.written, 'session')} {done}, {written}; {there:,} are there already."
        return
    compared = copied.sessions + copied.deleted - copied.not_compared
    if compared or not copied.not_compared:
        trash = f", {copied.deleted:,} of all in the trash" if copied.deleted else ""
        yield (
            f"{count(compared, 'session')}{trash} {'is' if compared == 1 else 'are'} equal on both "
            f"sides: {count(copied.written, 'session')} {done}, {written} "
            f"({_rate(copied):,} per second)."
        )
    if copied.not_compared:
        have = "has" if copied.not_compared == 1 else "have"
        yield (
            f"{count(copied.not_compared, 'session')} {have} not changed since the last time, and "
            f"{'was' if copied.not_compared == 1 else 'were'} not read again."
        )
    yield f"Digest {copied.digest}."
    if copied.unlocked:
        yield (
            "The source could not be locked: each session is as it was at one moment, and some may "
            "have gone on since."
        )
    for found in copied.namespaces.values():
        for one in found.copied:
            if one.lost:
                yield (
                    f"{one_line(one.key)} came with its damage: {count(one.lost, 'message')} of it "
                    f"cannot be read in the source, where `steno doctor` says more."
                )
    only = sum(len(found.only_in_target) for found in copied.namespaces.values())
    if only:
        yield f"The destination has {count(only, 'other session')}, left as they are."


def _rate(copied: CopyReport) -> int:
    return round(copied.messages / copied.seconds) if copied.seconds > 0 else 0


# --- backup ---------------------------------------------------------------------------------------
# `steno backup`: a copy in plain text that is updated, verified and restored.


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
        taken = back_up(workspace, folder, on_progress=watch)
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
        found = verify(folder, on_progress=watch)
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
        copied, checked = restore(folder, workspace, on_progress=watch)
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


def _finding_lines(found: BackupCheck) -> list[str]:
    return [
        f"{one_line(one.namespace)}\t{one_line(one.key)}\t{sentence(one.reason)}"
        for one in found.findings
    ]


def _as_object(found: BackupCheck) -> dict[str, Any]:
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
