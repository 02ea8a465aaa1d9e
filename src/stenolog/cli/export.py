"""`steno export`: write a session as JSON lines, Markdown, or a self-contained HTML page."""

import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import click

from stenolog.cli.completion import complete_key
from stenolog.cli.output import json_text, one_line, plural, printable
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
@click.argument("key", shell_complete=complete_key)
@click.option("--all", "full", is_flag=True, help="Include hidden and archived messages.")
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
    type=click.Path(dir_okay=False),
    help="Write to this file.  [default: stdout]",
)
@click.option("--force", is_flag=True, help="Overwrite FILE if it exists.")
@click.option(
    "--redact/--no-redact",
    default=None,
    help="Replace secrets.  [default: yes, except for jsonl]",
)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object that describes FILE.")
@location_options
def export_command(
    key: str,
    full: bool,
    form: ExportFormat | None,
    output: str | None,
    force: bool,
    redact: bool | None,
    as_json: bool,
    where: Location,
) -> None:
    """Export the messages of the session KEY to stdout or a file.

    \b
    jsonl     one JSON object per line, exactly as stored
    openai    like jsonl, with only the fields of the OpenAI API
    markdown  a document for reading
    html      a self-contained page without scripts; #m12 links to message 12

    In all formats except jsonl, known secrets are replaced: API keys and fields such as "password".
    The number is printed to stderr. Secrets in plain sentences are not recognized, so read a file
    before you share it.

    Example: steno export telegram:123 -o chat.html

    Exit codes: 0 done, 1 failed, 2 wrong usage.
    """  # noqa: D301 -- click knows a block by this character
    to_stdout = output in (None, "-")
    if as_json and to_stdout:
        raise click.UsageError("--json requires a file: add -o FILE.")
    form = _choose_format(output, form)
    # guard: export-redacted
    sharing = SharingRedactor(enabled=form != "jsonl" if redact is None else redact)
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


def _pieces(
    form: ExportFormat, info: SessionInfo, messages: Sequence[Message], sharing: SharingRedactor
) -> Iterator[bytes]:
    if form != "html":
        return text_export_pieces(form, info, messages, sharing)
    # Imported late: slow, and only needed for pages.
    from stenolog.gateway.viewer.export_page import export_pieces

    return export_pieces(form, info, messages, sharing)


def _redaction_text(taken_out: int) -> str:
    if not taken_out:
        return "No known forms of secrets found. Read the file before you share it."
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
