"""`steno import`: sessions that other programs kept, taken in, and what could not be."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import click

from stenolog.cli.text import one_line, sentence
from stenolog.cli.workspace import open_to_read, workspace_option
from stenolog.sessions.importers.folder import LOG_SUFFIX
from stenolog.sessions.migration import Migrated, Progress, Taken, take_in
from stenolog.stores.base import Store
from stenolog.stores.in_memory import InMemoryStore
from stenolog.stores.json_file import META_SUFFIX
from stenolog.stores.jsonl import JSONLStore
from stenolog.stores.opening import open_store

LONG: Final = 1024 * 1024
"""From so many bytes on there is a bar to look at."""
NOT_ALL: Final = 3
"""The exit code where something could not be carried."""


@click.command("import")
@click.argument("source", type=click.Path(exists=True, path_type=Path))
@click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing.")
@workspace_option
@click.pass_context
def import_command(ctx: click.Context, source: Path, dry_run: bool, workspace: str) -> None:
    """Take in the sessions that another program kept in SOURCE, a folder or one file.

    It knows picoclaw's sessions (.jsonl with .meta.json, and the older .json) and zeroclaw's
    (.jsonl). They are copied, and SOURCE stays as it is; importing twice adds nothing. Only where
    SOURCE is the workspace's own folder of sessions, the files are renamed to .migrated, because
    they stand where the new ones go.

    One line for each session, with tabs between: its key here, how many messages were added, how
    many there are in the file, the layout, and the file. In a terminal it is a table.

    Exit code: 0 all is in, now or since an earlier import, 1 there is nothing to take in or it
    could not be done, 2 wrong usage, 3 something could not be carried; stderr says what and why.
    """
    folder, only = _place_of(source)
    with (_open_to_look if dry_run else open_store)(workspace) as store:
        in_place = isinstance(store, JSONLStore) and store.folder.samefile(folder)
        with _bar(folder, only, shown=not dry_run) as progress:
            migrated = take_in(
                folder, store, only=only, renaming=in_place, dry_run=dry_run, progress=progress
            )
    if sys.stdout.isatty() and migrated.taken:
        _print_table(migrated, color=ctx.color is not False)
    else:
        for one in migrated.taken:
            click.echo("\t".join(_row(one)))
    problems = list(_problems(migrated))
    for words in (*problems, *_in_words(migrated, source, dry_run=dry_run)):
        click.echo(words, err=True)
    if not migrated.taken and not migrated.migrated:
        ctx.exit(1)
    ctx.exit(NOT_ALL if problems else 0)


def _row(one: Taken) -> Sequence[str]:
    cells = (one.key, one.added, one.messages, one.layout, one.file)
    return [one_line(str(cell)) for cell in cells]


def _print_table(migrated: Migrated, *, color: bool) -> None:
    # Slow to import, and only a table in a terminal needs it.
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("key", overflow="fold")
    for name in ("added", "messages"):
        table.add_column(name, no_wrap=True, justify="right")
    table.add_column("layout", no_wrap=True)
    table.add_column("file", overflow="fold")
    for one in migrated.taken:
        key, *counts, layout, _ = _row(one)
        file = one_line(Path(one.file).name)
        table.add_row(Text(key, style="cyan"), *counts, layout, Text(file, style="dim"))
    Console(color_system="auto" if color else None, highlight=False).print(table)


def _place_of(source: Path) -> tuple[Path, str | None]:
    """The folder to look in, and the one file in it where one was named."""
    if source.is_dir():
        inside = source / "sessions"
        return (inside if inside.is_dir() else source), None
    name = source.name
    if name.endswith(META_SUFFIX):
        name = name.removesuffix(META_SUFFIX) + LOG_SUFFIX
    return source.parent, name


def _open_to_look(workspace: str) -> Store:
    """The store without the right to write; an empty one where there is none yet."""
    place = workspace.partition("?")[0].removeprefix("sqlite:").removeprefix("jsonl:")
    return open_to_read(workspace) if Path(place).expanduser().exists() else InMemoryStore()


@contextmanager
def _bar(folder: Path, only: str | None, *, shown: bool) -> Iterator[Progress | None]:
    """A bar in the terminal, where it takes long enough to look at one."""
    files = [folder / only] if only is not None else list(folder.iterdir())
    size = sum(path.stat().st_size for path in files if path.is_file())
    if not shown or size < LONG or not sys.stderr.isatty():
        yield None
        return
    with click.progressbar(length=size, label="Taking in", file=sys.stderr) as bar:
        done = 0.0

        def progress(step: float) -> None:
            nonlocal done
            done += step
            bar.update(int(done) - bar.pos)

        yield progress


def _problems(migrated: Migrated) -> Iterator[str]:
    for one in migrated.taken:
        for words in one.problems:
            yield f"{one_line(one.file)}: {sentence(words)}"
    for left in migrated.left:
        yield f"{one_line(left.file)} is left out: {sentence(left.reason)}"


def _in_words(migrated: Migrated, source: Path, *, dry_run: bool) -> Iterator[str]:
    if migrated.migrated and not migrated.taken:
        yield f"Already taken in: {_count(migrated.migrated, 'file')} *.migrated."
    if migrated.taken or migrated.left:
        yield _sum(migrated, dry_run=dry_run)
    elif not migrated.migrated:
        place = one_line(str(source))
        yield f"There is no session in {place} of a layout that is known here."


def _sum(migrated: Migrated, *, dry_run: bool) -> str:
    would = "would be " if dry_run else ""
    words = f"{_count(migrated.sessions, 'session')} {would}taken in"
    words += f", {_count(migrated.messages, 'message')}"
    known = len(migrated.taken) - migrated.sessions
    if known:
        words += f"; {_count(known, 'file')} had been taken in before"
    if migrated.left:
        words += f"; {_count(len(migrated.left), 'file')} left out"
    if migrated.dropped:
        words += f"; {_count(migrated.dropped, 'message')} could not be carried"
    return f"{words}."


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")
