"""`steno export`: write a session as JSON lines, Markdown, or a self-contained HTML page."""

import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import click

from stenolog.cli.completion import complete_key
from stenolog.cli.output import count, json_text, one_line, printable
from stenolog.cli.show import damage_words, info_of, messages_are
from stenolog.cli.workspace import Where, open_to_read, where_options
from stenolog.redaction.redact import SharingRedactor
from stenolog.transfer.export.formats import DOCUMENT_FORMATS, ExportFormat, export_pieces

_SUFFIXES: Final[dict[str, ExportFormat]] = {
    ".md": "markdown",
    ".markdown": "markdown",
    ".html": "html",
    ".htm": "html",
    ".jsonl": "jsonl",
}
"""Format by file suffix, used if no format is given."""


class _Form(click.Choice[str]):
    """The type of `--format`: a format or its file suffix."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        named = _SUFFIXES.get(f".{value}", value) if isinstance(value, str) else value
        return super().convert(named, param, ctx)


@click.command("export")
@click.argument("key", shell_complete=complete_key)
@click.option("--all", "full", is_flag=True, help="Hidden and archived messages too.")
@click.option(
    "--format",
    "form",
    type=_Form(["jsonl", "openai", "markdown", "html"]),
    help="What to write; else what the name of FILE says, else jsonl.",
)
@click.option(
    "-o", "--output", metavar="FILE", type=click.Path(dir_okay=False), help="Write into this file."
)
@click.option("--force", is_flag=True, help="Replace FILE where it is there already.")
@click.option(
    "--redact/--no-redact",
    default=None,
    help="Take out secrets; done unless told otherwise, but for jsonl.",
)
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object: what FILE holds.")
@where_options
def export_command(
    key: str,
    full: bool,
    form: ExportFormat | None,
    output: str | None,
    force: bool,
    redact: bool | None,
    as_json: bool,
    where: Where,
) -> None:
    """Write the messages of the session KEY, to stdout or into a file.

    As jsonl: one JSON object a line, each exactly what was given to the store. As openai: the
    same with only the fields that OpenAI's API knows. As markdown: a document to read. As html:
    one page that needs nothing else, light or dark, with tools folded and a link to each message
    (#m12); it holds no script and loads nothing. With --all, hidden messages are marked there.

    But for jsonl, a stub stands for each secret that is known by its form, as an API key, or by
    the name of its field, as "password"; stderr tells how many. A secret in plain words stays:
    read what you share.

    Exit code: 0 written, 1 there is no such session, or it cannot be written, 2 wrong usage.
    """
    to_stdout = output in (None, "-")
    if as_json and to_stdout:
        raise click.UsageError("--json tells of a file: name it with -o.")
    form = _form_of(output, form)
    # guard: export-redacted
    sharing = SharingRedactor(enabled=form != "jsonl" if redact is None else redact)
    if not to_stdout and not force and os.path.lexists(str(output)):
        words = f"{one_line(str(output))} is there already; --force replaces it."
        raise click.ClickException(words)
    with open_to_read(where) as store:
        info = info_of(store, key)
        messages = store.get_history(info.key, full=full)
        written = export_pieces(form, info, messages, sharing)
        if to_stdout:
            _print(written)
        else:
            _write(Path(str(output)), written)
            done = count(len(messages), "message")
            click.echo(f"{one_line(str(output))}: {done} written.", err=True)
        if as_json:
            told: dict[str, Any] = {"key": info.key, "file": str(output), "format": form}
            told |= {"messages": len(messages), "redacted": sharing.count}
            click.echo(json_text(told))
        if sharing.enabled and (sharing.count or form in DOCUMENT_FORMATS):
            click.echo(_in_words(sharing.count), err=True)
        if form in DOCUMENT_FORMATS and not full and info.count > info.visible:
            hidden = messages_are(info.count - info.visible)
            click.echo(f"{hidden} hidden; --all writes them too.", err=True)
        for words in damage_words(info_of(store, info.key), where.workspace):
            click.echo(words, err=True)


def _in_words(taken_out: int) -> str:
    if not taken_out:
        return "No known forms of secrets found. Read it before you share it."
    stubs = "1 secret was" if taken_out == 1 else f"{taken_out:,} secrets were"
    return f"{stubs} taken out; --no-redact leaves them in."


def _form_of(output: str | None, form: ExportFormat | None) -> ExportFormat:
    """Return the format to write. Raises UsageError if the file suffix is unknown."""
    suffix = Path(output or "").suffix.lower()
    if form is not None:
        return form
    if suffix and suffix not in _SUFFIXES:
        known = ", ".join(_SUFFIXES)
        words = f"What is {one_line(str(output))} to be? Known are {known}; or say --format."
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
