"""`steno import claude-code`: import transcripts of coding agents and chat exports."""

import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import click

from stenolog.cli.output import PARTIAL, json_text, one_line, plural, print_table, table_console
from stenolog.errors import StoreBusy
from stenolog.stores.base import Store
from stenolog.stores.json_file import NotASession
from stenolog.transfer.transcripts.programs import PROGRAMS
from stenolog.transfer.transcripts.transcript import TranscriptFile, TranscriptReader
from stenolog.transfer.transcripts.transcript_import import (
    TranscriptImport,
    TranscriptReport,
    import_transcript,
)

LARGE: Final = 1024 * 1024
"""Size in bytes from which a progress bar is shown."""
WATCH_SECONDS: Final = 2.0
"""Seconds between two looks at watched files."""
MAX_ROWS: Final = 40
"""Maximum number of sessions in the table of a terminal."""


def default_place(program: str) -> Path:
    """Return where a program keeps its transcripts. Raises ClickException if it is not there."""
    path = PROGRAMS[program]().default_folder()
    if path is None:
        raise click.ClickException(
            f"No transcripts of {program} in the usual place; "
            f"name their folder: steno import --from {program} FOLDER"
        )
    return path


class TranscriptsCommand:
    """One run of `steno import` for the transcripts of a program."""

    def __init__(self, program: str, path: Path, store: Store | None) -> None:
        self._reader: TranscriptReader = PROGRAMS[program]()
        self._program = program
        self._path = path
        self._store = store
        self.reports: list[TranscriptReport] = []
        self.problems: list[str] = []

    def files(self) -> list[TranscriptFile]:
        """Return the transcripts that are there."""
        try:
            return list(self._reader.find(self._path))
        except (NotASession, OSError) as error:
            self.problems.append(f"{one_line(str(self._path))} cannot be read: {error}")
            return []

    def run(self) -> None:
        """Import everything that is new."""
        files = self.files()
        new = None if self._store is None else TranscriptImport(self._reader, self._store)
        with _progress(sum(file.size for file in files)) as advance:
            for file in files:
                self._import(file, new)
                advance(file.size)
            if new is not None:
                new.flush()
                self._add(new.reports)

    def _add(self, reports: list[TranscriptReport]) -> None:
        self.reports += reports
        for one in reports:
            self.problems += [f"{one_line(one.key)}: {problem}" for problem in one.problems]

    def _import(self, file: TranscriptFile, new: TranscriptImport | None = None) -> None:
        try:
            if new is not None:
                new.add(file)
            elif self._store is not None:
                self._add([import_transcript(self._reader, file, self._store)])
            else:
                transcript = self._reader.read(file, is_complete=False)
                count = len(transcript.messages)
                report = TranscriptReport(
                    key=file.key,
                    messages=count,
                    added=count,
                    left_out=transcript.left_out,
                    problems=transcript.problems,
                )
                self._add([report])
        except (NotASession, StoreBusy, OSError) as error:
            self.problems.append(f"{one_line(str(file.paths[0]))} was skipped: {error}")

    def watch(self) -> None:
        """Import new messages as the program writes them, until Ctrl-C."""
        click.echo("Watching for new messages. Press Ctrl-C to stop.", err=True)
        seen: dict[str, tuple[int, int]] = {}
        while True:
            for file in self.files():
                if seen.get(file.key) != (file.size, file.modified):
                    seen[file.key] = file.size, file.modified
                    before = len(self.reports)
                    self._import(file)
                    for report in self.reports[before:]:
                        if report.added or report.changed:
                            click.echo(f"{one_line(report.key)}\t{report.added}")
            self.reports.clear()
            for problem in self.problems:
                click.echo(problem, err=True)
            self.problems.clear()
            time.sleep(WATCH_SECONDS)

    # --- output ------------------------------------------------------------------------------

    def show(self, *, as_json: bool, color: bool, dry_run: bool = False) -> None:
        """Print a row for each session with new messages."""
        changed = self._changed()
        if as_json:
            for report in self.reports:
                click.echo(json_text(self._fields(report)))
        elif sys.stdout.isatty():
            columns: dict[str, dict[str, Any]] = {
                "key": {"overflow": "fold"},
                "added": {"justify": "right"},
                "messages": {"justify": "right"},
            }
            rows = [
                [(one_line(one.key), "cyan"), str(one.added), str(one.messages)]
                for one in changed[:MAX_ROWS]
            ]
            if rows:
                print_table(table_console(color=color), columns, rows)
            if len(changed) > MAX_ROWS:
                click.echo(f"… and {plural(len(changed) - MAX_ROWS, 'more session')}", err=True)
        else:
            for report in changed:
                click.echo(f"{one_line(report.key)}\t{report.added}\t{report.messages}")
        for problem in self.problems:
            click.echo(problem, err=True)
        click.echo(self._summary(dry_run=dry_run), err=True)

    def _changed(self) -> list[TranscriptReport]:
        return [report for report in self.reports if report.added or report.changed]

    def _fields(self, report: TranscriptReport) -> dict[str, Any]:
        return {
            "key": report.key,
            "program": self._program,
            "added": report.added,
            "changed": report.changed,
            "messages": report.messages,
            "unchanged": report.is_unchanged,
            "left_out_bytes": report.left_out,
            "problems": report.problems,
        }

    def _summary(self, *, dry_run: bool) -> str:
        changed = self._changed()
        added = sum(report.added for report in changed)
        done = "Would import" if dry_run else "Imported"
        words = [f"{done} {plural(added, 'message')} in {plural(len(changed), 'session')}"]
        if renewed := sum(report.changed for report in changed):
            words.append(f"{plural(renewed, 'changed message')} replaced an older version")
        if rest := len(self.reports) - len(changed):
            words.append(f"{plural(rest, 'session')} without new messages")
        left: Counter[str] = Counter()
        for report in self.reports:
            left.update(report.left_out)
        if size := sum(left.values()):
            words.append(f"{size / 1e6:,.1f} MB of prompts, schemas and other records left out")
        return "; ".join(words) + "."

    @property
    def exit_code(self) -> int:
        """0 if all was imported, 1 if there is no transcript, 3 if something was not imported."""
        if self.problems:
            return PARTIAL
        return 0 if self.reports else 1


@contextmanager
def _progress(size: int) -> Iterator[Any]:
    if size < LARGE or not sys.stderr.isatty():
        yield lambda _: None
        return
    with click.progressbar(length=size, label="Importing", file=sys.stderr) as bar:
        yield bar.update
