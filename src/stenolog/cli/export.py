"""`steno export`: write sessions as JSON lines, Markdown, or self-contained HTML pages."""

import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import click

from stenolog.cli.completion import complete_key
from stenolog.cli.export_all import ExportAllReport, export_all
from stenolog.cli.output import (
    PARTIAL,
    TimeType,
    json_text,
    one_line,
    plural,
    printable,
    sentence,
)
from stenolog.cli.show import damage_lines, find_session, messages_are
from stenolog.cli.workspace import Location, location_options, open_read_only
from stenolog.records import Message, SessionInfo
from stenolog.redaction.redact import SharingRedactor
from stenolog.transfer.export.formats import DOCUMENT_FORMATS, ExportFormat, text_export_pieces

_SUFFIXES: Final[dict[str, ExportFormat]] = {
    ".md": "markdown",
    ".markdown": "markdown",
    ".html": "html",
    ".htm": "html",
    ".jsonl": "jsonl",
}
"""Format by file suffix, used if no format is given."""


class _FormatType(click.Choice[str]):
    """The type of `--format`: a format or its file suffix."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        named = _SUFFIXES.get(f".{value}", value) if isinstance(value, str) else value
        return super().convert(named, param, ctx)


@click.command("export")
@click.argument("key", required=False, shell_complete=complete_key)
@click.option(
    "--all",
    "full",
    is_flag=True,
    help="Include hidden and archived messages. Without KEY: export all sessions.",
)
@click.option(
    "--format",
    "form",
    type=_FormatType(["jsonl", "openai", "markdown", "html"]),
    help="Output format.  [default: by the suffix of FILE, otherwise jsonl]",
)
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=click.Path(),
    help="Write to this file.  [default: stdout] With --all and without KEY: to this folder.",
)
@click.option("--since", type=TimeType(), help="With --all: only sessions with later messages.")
@click.option("--prefix", default="", help="With --all: only sessions whose key starts with this.")
@click.option("--force", is_flag=True, help="Overwrite FILE if it exists.")
@click.option(
    "--redact/--no-redact",
    default=None,
    help="Replace secrets.  [default: yes, except for jsonl]",
)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object that describes FILE.")
@location_options
@click.pass_context
def export_command(
    ctx: click.Context,
    key: str | None,
    full: bool,
    form: ExportFormat | None,
    output: str | None,
    since: datetime | None,
    prefix: str,
    force: bool,
    redact: bool | None,
    as_json: bool,
    where: Location,
) -> None:
    """Export the messages of the session KEY to stdout or a file, or all sessions to a folder.

    \b
    jsonl     one JSON object per line, exactly as stored
    openai    like jsonl, with only the fields of the OpenAI API
    markdown  a document for reading
    html      a self-contained page without scripts; #m12 links to message 12

    In all formats except jsonl, known secrets are replaced: API keys and fields such as "password".
    The number is printed to stderr. Secrets in plain sentences are not recognized, so read a file
    before you share it.

    Without KEY, --all writes each session to a file in the folder of -o, and for html an index.html
    with links to them. Files of an earlier export are replaced: run it again if it was stopped.

    Examples: steno export telegram:123 -o chat.html; steno export --all --format html -o archive

    Exit codes: 0 done, 1 failed, 2 wrong usage, 3 some sessions cannot be read.
    """  # noqa: D301 -- click knows a block by this character
    to_stdout = output in (None, "-")
    if key is None:
        _check_all(full=full, to_stdout=to_stdout)
    elif since is not None or prefix:
        raise click.UsageError("--since and --prefix select sessions of --all: omit KEY.")
    elif Path(output or "").is_dir() and output:
        raise click.UsageError(f"{one_line(output)} is a folder. Name a file.")
    if as_json and to_stdout:
        raise click.UsageError("--json requires a file: add -o FILE.")
    form = _choose_format(output, form) if key is not None else form or "jsonl"
    # guard: export-redacted
    sharing = SharingRedactor(enabled=form != "jsonl" if redact is None else redact)
    if key is None:
        found = _export_all(where, Path(str(output)), form, sharing, since, prefix, force=force)
        _report_all(found, str(output), form, sharing, as_json=as_json)
        ctx.exit(PARTIAL if found.problems else 0)
    if not to_stdout and not force and os.path.lexists(str(output)):
        words = f"{one_line(str(output))} exists already. Use --force to overwrite it."
        raise click.ClickException(words)
    with open_read_only(where) as store:
        info = find_session(store, key)
        messages = store.get_history(info.key, full=full)
        written = _pieces(form, info, messages, sharing)
        if to_stdout:
            _print(written)
        else:
            _write(Path(str(output)), written)
            done = plural(len(messages), "message")
            click.echo(f"Wrote {done} to {one_line(str(output))}.", err=True)
        if as_json:
            fields: dict[str, Any] = {"key": info.key, "file": str(output), "format": form}
            fields |= {"messages": len(messages), "redacted": sharing.count}
            click.echo(json_text(fields))
        if sharing.enabled and (sharing.count or form in DOCUMENT_FORMATS):
            click.echo(_redaction_text(sharing.count), err=True)
        if form in DOCUMENT_FORMATS and not full and info.count > info.visible:
            hidden = messages_are(info.count - info.visible)
            click.echo(f"{hidden} hidden. Use --all to include them.", err=True)
        for words in damage_lines(find_session(store, info.key), where.workspace):
            click.echo(words, err=True)


def _check_all(*, full: bool, to_stdout: bool) -> None:
    if not full:
        raise click.UsageError(
            "Missing argument 'KEY'. To export all sessions, use --all with -o FOLDER."
        )
    if to_stdout:
        raise click.UsageError("--all without KEY requires a folder: add -o FOLDER.")


def _export_all(
    where: Location,
    folder: Path,
    form: ExportFormat,
    sharing: SharingRedactor,
    since: datetime | None,
    prefix: str,
    *,
    force: bool,
) -> ExportAllReport:
    with open_read_only(where) as store:
        return export_all(
            store,
            folder,
            form,
            sharing,
            since=since,
            prefix=prefix,
            force=force,
            pieces=_pieces,
            write=_write,
        )


def _report_all(
    found: ExportAllReport, folder: str, form: str, sharing: SharingRedactor, *, as_json: bool
) -> None:
    for key, problem in found.problems.items():
        click.echo(f"{one_line(key)}: {sentence(problem)}", err=True)
    count = sum(one.messages for one in found.sessions)
    done = f"{plural(len(found.sessions), 'session')} with {plural(count, 'message')}"
    click.echo(f"Wrote {done} to {one_line(folder)}.", err=True)
    if as_json:
        fields: dict[str, Any] = {"folder": folder, "format": form, "messages": count}
        fields |= {"sessions": len(found.sessions), "redacted": sharing.count}
        click.echo(json_text({**fields, "problems": found.problems}))
    if sharing.enabled and (sharing.count or form in DOCUMENT_FORMATS):
        click.echo(_redaction_text(sharing.count, "files"), err=True)


def _pieces(
    form: ExportFormat, info: SessionInfo, messages: Sequence[Message], sharing: SharingRedactor
) -> Iterator[bytes]:
    if form != "html":
        return text_export_pieces(form, info, messages, sharing)
    # Imported late: slow, and only needed for pages.
    from stenolog.gateway.viewer.export_page import export_pieces

    return export_pieces(form, info, messages, sharing)


def _redaction_text(taken_out: int, files: str = "file") -> str:
    if not taken_out:
        pronoun = "it" if files == "file" else "them"
        return f"No known forms of secrets found. Read the {files} before you share {pronoun}."
    return f"Replaced {plural(taken_out, 'secret')}. Use --no-redact to keep them."


def _choose_format(output: str | None, form: ExportFormat | None) -> ExportFormat:
    """Return the format to write. Raises UsageError if the file suffix is unknown."""
    suffix = Path(output or "").suffix.lower()
    if form is not None:
        return form
    if suffix and suffix not in _SUFFIXES:
        known = ", ".join(_SUFFIXES)
        words = (
            f"The format of {one_line(str(output))} is unknown. Known suffixes: {known}. "
            "Otherwise use --format."
        )
        raise click.UsageError(words)
    return _SUFFIXES.get(suffix, "jsonl")


# --- output ----------------------------------------------------------------------------------


def _print(pieces: Iterable[bytes]) -> None:
    for piece in pieces:
        if sys.stdout.isatty():
            click.echo(printable(piece.decode()), nl=False)
        else:
            click.echo(piece, nl=False)


def _write(path: Path, pieces: Iterable[bytes]) -> None:
    if path.exists() and not path.is_file():
        # Write to a pipe or a device; do not replace it by a file.
        with path.open("wb") as file:
            file.writelines(pieces)
        return
    # Replace the target of a symbolic link, not the link.
    with (
        _new_file(path.resolve()) as descriptor,
        os.fdopen(descriptor, "wb", closefd=False) as file,
    ):
        file.writelines(pieces)


@contextmanager
def _new_file(path: Path) -> Iterator[int]:
    """Create a private file that gets its name only when it is complete."""
    try:
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        raise click.ClickException(
            f"Cannot write {one_line(str(path))}: {error.strerror}"
        ) from error
    try:
        yield descriptor
        os.fsync(descriptor)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
