"""`steno copy`: all sessions of a place to another one; and how a copy is shown while it runs."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import click

from stenolog.cli.text import json_text, one_line, sentence
from stenolog.sessions.places import Copied, Watch, copy_place
from stenolog.sessions.transfer import Step

NOT_ALL: Final = 3
"""The exit code where something could not be copied."""

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

    One line for each session that could not be copied; stderr has the sum.

    Exit code: 0 all is there, 1 it could not be done, 2 wrong usage, 3 some sessions could not be
    copied, and DST has them as they were.
    """
    with watching(shown=not dry_run) as watch:
        copied = copy_place(source, target, dry_run=dry_run, watch=watch)
    if as_json:
        click.echo(json_text(as_object(copied), indent=2))
    else:
        for line in problem_lines(copied):
            click.echo(line)
        for words in in_words(copied, "would be copied" if dry_run else "copied"):
            click.echo(words, err=True)
    ctx.exit(NOT_ALL if copied.problems else 0)


# --- while it runs ---------------------------------------------------------------------------


@contextmanager
def watching(*, shown: bool = True) -> Iterator[Watch | None]:
    """A bar in the terminal, or a line for each pass elsewhere."""
    if not shown:
        yield None
    elif sys.stderr.isatty():
        with _bar() as watch:
            yield watch
    else:
        yield _Lines().tell


@contextmanager
def _bar() -> Iterator[Watch]:
    # Slow to import, and only a terminal needs it.
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[messages]:,} messages"),
    )
    console = Console(file=sys.stderr, highlight=False)
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("Copying", total=None, messages=0)

        def watch(namespace: str, step: Step) -> None:
            progress.update(
                task,
                description=f"{_PHASES[step.phase]} {one_line(namespace)}",
                completed=step.done,
                total=step.total,
                messages=step.messages,
            )

        yield watch


class _Lines:
    """One line at the beginning of each pass."""

    def __init__(self) -> None:
        self._told: tuple[str, str, int] | None = None

    def tell(self, namespace: str, step: Step) -> None:
        now = namespace, step.phase, step.number
        if step.total and now != self._told:
            self._told = now
            words = f"{_PHASES[step.phase]}: {one_line(namespace)}, {count(step.total, 'session')}"
            click.echo(words, err=True)


# --- what became of it -----------------------------------------------------------------------


def as_object(copied: Copied) -> dict[str, Any]:
    """The report as JSON has it."""
    return {
        "sessions": copied.sessions,
        "deleted": copied.deleted,
        "written": copied.written,
        "messages": copied.messages,
        "seconds": round(copied.seconds, 3),
        "messages_per_second": _rate(copied),
        "digest": copied.digest,
        "dry_run": copied.dry_run,
        "unlocked": copied.unlocked,
        "lost": sum(one.lost for found in copied.namespaces.values() for one in found.carried),
        "namespaces": {
            name: {
                "sessions": len(found.carried),
                "messages": found.messages,
                "digest": found.digest(name),
                "problems": [
                    {"key": one.key, "uid": one.uid, "reason": one.reason, "newer": one.newer}
                    for one in found.problems
                ],
                "only_there": list(found.only_there),
            }
            for name, found in copied.namespaces.items()
        },
    }


def problem_lines(copied: Copied, *, newer: bool = True) -> Iterator[str]:
    """A line for each session that could not be copied; without `newer`, but for those.

    One without a key is a namespace.
    """
    for name, found in copied.namespaces.items():
        for one in found.problems:
            if newer or not one.newer:
                words = sentence(one.reason.removeprefix(f"{one.key!r}: "))
                yield f"{one_line(name)}\t{one_line(one.key)}\t{words}"


def in_words(copied: Copied, done: str) -> Iterator[str]:
    """The sum, in sentences."""
    trash = f" and {count(copied.deleted, 'deleted one')}" if copied.deleted else ""
    written = count(copied.messages, "message")
    if not copied.sessions and not copied.deleted and not copied.problems:
        yield "There are no sessions to copy."
        return
    if copied.dry_run:
        there = copied.sessions + copied.deleted - copied.written
        yield f"{count(copied.written, 'session')} {done}, {written}; {there:,} are there already."
        return
    same = f"{count(copied.sessions, 'session')}{trash} {'is' if copied.sessions == 1 else 'are'}"
    yield (
        f"{same} equal on both sides: {count(copied.written, 'session')} {done}, {written} "
        f"({_rate(copied):,} per second)."
    )
    yield f"Digest {copied.digest}."
    if copied.unlocked:
        yield (
            "The source could not be locked: each session is as it was at one moment, and some may "
            "have gone on since."
        )
    for found in copied.namespaces.values():
        for one in found.carried:
            if one.lost:
                yield (
                    f"{one_line(one.key)} came with its damage: {count(one.lost, 'message')} of it "
                    f"cannot be read in the source, where `steno doctor` says more."
                )
    only = sum(len(found.only_there) for found in copied.namespaces.values())
    if only:
        yield f"The destination has {count(only, 'other session')}, left as they are."


def _rate(copied: Copied) -> int:
    return round(copied.messages / copied.seconds) if copied.seconds > 0 else 0


def count(number: int, what: str) -> str:
    """So many of them, in words."""
    return f"{number:,} {what}" + ("" if number == 1 else "s")
