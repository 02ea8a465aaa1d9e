"""`steno import claude-code`: import transcripts of coding agents and chat exports."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import click

from stenolog.cli.output import (
    EXIT_PARTIAL,
    attributes_of,
    one_line,
    plural,
    print_notice,
    print_rows,
    print_table,
    show_import_progress,
    wants_json,
)
from stenolog.errors import StoreBusy
from stenolog.stores.base import Store
from stenolog.stores.json_file import NotASession
from stenolog.transfer.transcripts.programs import PROGRAMS
from stenolog.transfer.transcripts.transcript import (
    TranscriptFile,
    TranscriptReader,
    path_and_reason,
)
from stenolog.transfer.transcripts.transcript_import import (
    TranscriptImport,
    TranscriptReport,
    import_transcript,
)

WATCH_SECONDS: Final = 2.0
"""Seconds between two checks of watched files."""
MAX_TABLE_ROWS: Final = 40
"""Maximum number of sessions in a table that is printed in a terminal."""


class TranscriptsCommand:
    """One run of `steno import` for the transcripts of a program."""

    def __init__(self, program: str, path: Path, store: Store) -> None:
        self._reader: TranscriptReader = PROGRAMS[program]()
        self._program = program
        self._path = path
        self._store = store
        self._reports: list[TranscriptReport] = []
        self._problems: list[str] = []

    def find_files(self) -> list[TranscriptFile]:
        """Find the transcripts. An error ends the search and is recorded as a problem."""
        files: list[TranscriptFile] = []
        try:
            # Add files one by one, so that the files found before an error are imported.
            for file in self._reader.find(self._path):
                files.append(file)
        except (NotASession, OSError) as error:
            path, reason = path_and_reason(error, self._path)
            self._problems.append(f"{one_line(path)} cannot be read: {reason}")
        return files

    def run(self, *, dry_run: bool = False) -> int:
        """Import all new messages, print the result, and return the exit code.

        Exit codes: 0 everything was imported, 1 there is no transcript, 3 something was not
        imported.
        """
        files = self.find_files()
        batch = TranscriptImport(self._reader, self._store, dry_run=dry_run)
        with show_import_progress(sum(file.size for file in files)) as advance:
            for file in files:
                self._import_file(file, batch)
                advance(file.size)
            batch.flush()
            self._add_reports(batch.reports)
        self._print_rows()
        print_notice(*self._problems)
        print_notice(self._summary_text(dry_run=dry_run))
        if self._problems:
            return EXIT_PARTIAL
        return 0 if self._reports else 1

    def _add_reports(self, reports: list[TranscriptReport]) -> None:
        self._reports += reports
        for report in reports:
            self._problems += [f"{one_line(report.key)}: {problem}" for problem in report.problems]

    def _import_file(self, file: TranscriptFile, batch: TranscriptImport | None = None) -> bool:
        """Import a file, or add it to `batch`. Return False if a retry may succeed."""
        try:
            if batch is not None:
                batch.add(file)
            else:
                self._add_reports([import_transcript(self._reader, file, self._store)])
        except (NotASession, StoreBusy, OSError) as error:
            path, reason = path_and_reason(error, file.paths[0])
            self._problems.append(f"{one_line(path)} was skipped: {reason}")
            return not isinstance(error, StoreBusy) and getattr(error, "errno", None) is None
        return True

    def watch(self) -> None:
        """Import new messages as the program writes them, until Ctrl-C."""
        print_notice("Watching for new messages. Press Ctrl-C to stop.")
        self._reports.clear()
        seen_versions: dict[tuple[str, tuple[Path, ...]], tuple[int, int]] = {}
        printed_problems = set(self._problems)
        while True:
            for file in self.find_files():
                place, version = (file.key, file.paths), (file.size, file.modified)
                if seen_versions.get(place) != version:
                    if self._import_file(file):
                        seen_versions[place] = version
                    for report in self._changed_reports():
                        click.echo(f"{one_line(report.key)}\t{report.added}")
                    self._reports.clear()
            print_notice(*(text for text in self._problems if text not in printed_problems))
            printed_problems = set(self._problems)
            self._problems.clear()
            time.sleep(WATCH_SECONDS)

    # --- output ------------------------------------------------------------------------------

    def _print_rows(self) -> None:
        """Print a row for each session with new or changed messages; with --json, for all."""
        print_rows(
            self._reports if wants_json() else self._changed_reports(),
            fields=self._report_fields,
            cells=lambda report: (report.key, report.added, report.messages),
            table=_print_table,
        )

    def _changed_reports(self) -> list[TranscriptReport]:
        return [report for report in self._reports if report.added or report.changed]

    def _report_fields(self, report: TranscriptReport) -> dict[str, Any]:
        return {
            "key": report.key,
            "program": self._program,
            **attributes_of(report, "added", "changed", "messages"),
            "unchanged": report.is_unchanged,
            "problems": report.problems,
        }

    def _summary_text(self, *, dry_run: bool) -> str:
        changed_reports = self._changed_reports()
        added_count = sum(report.added for report in changed_reports)
        # A transcript that was found twice has two reports, so count distinct keys.
        session_count = len({report.key for report in changed_reports})
        verb = "Would import" if dry_run else "Imported"
        parts = [f"{verb} {plural(added_count, 'message')} in {plural(session_count, 'session')}"]
        if replaced_count := sum(report.changed for report in changed_reports):
            parts.append(f"{plural(replaced_count, 'changed message')} replaced an older version")
        if unchanged_count := len({report.key for report in self._reports}) - session_count:
            parts.append(f"{plural(unchanged_count, 'session')} without new messages")
        return "; ".join(parts) + "."


def _print_table(reports: Sequence[TranscriptReport]) -> None:
    right = {"justify": "right"}
    columns = {"key": {"overflow": "fold"}, "added": right, "messages": right}
    rows = [
        ((one_line(report.key), "cyan"), str(report.added), str(report.messages))
        for report in reports[:MAX_TABLE_ROWS]
    ]
    print_table(columns, rows)
    if len(reports) > MAX_TABLE_ROWS:
        print_notice(f"… and {plural(len(reports) - MAX_TABLE_ROWS, 'more session')}")
