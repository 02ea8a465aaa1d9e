"""`steno export`: write sessions as JSON lines, Markdown, or self-contained HTML pages."""

import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, NamedTuple

import click

from stenolog.cli.options import json_option, optional_key_argument
from stenolog.cli.output import (
    EXIT_PARTIAL,
    TimeType,
    json_text,
    one_line,
    plural,
    print_notice,
    print_notices,
    printable,
    sentence,
    show_progress,
)
from stenolog.cli.workspace import (
    Location,
    damage_lines,
    find_session,
    find_session_to_read,
    location_options,
    messages_are,
    open_read_only,
)
from stenolog.errors import ForeignLog, NoSuchSession, StenologError
from stenolog.records import Message, SessionInfo
from stenolog.redaction.redact import SharingRedactor
from stenolog.stores.base import Store
from stenolog.transfer.export.formats import (
    DOCUMENT_FORMATS,
    ExportFormat,
    document_title,
    text_export_pieces,
)

_FORMATS: Final[dict[str, ExportFormat]] = {
    ".md": "markdown",
    ".markdown": "markdown",
    ".html": "html",
    ".htm": "html",
    ".jsonl": "jsonl",
}
"""Format by file suffix, used if no format is given."""
_SUFFIXES: Final = {"jsonl": "jsonl", "openai": "jsonl", "markdown": "md", "html": "html"}
"""File suffix by format, used if all sessions are exported."""
_MAX_TITLE_LENGTH: Final = 60
"""Maximum number of characters of the title in a file name."""
_INDEX_NAME: Final = "index.html"
_GENERATOR_TAG: Final = b'<meta name="generator" content="stenolog">'
"""HTML tag in an index that this command wrote."""


class _FormatType(click.Choice[str]):
    """The type of `--format`: a format or its file suffix."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        format_name = _FORMATS.get(f".{value}", value) if isinstance(value, str) else value
        return super().convert(format_name, param, ctx)


class _ExportCommand(click.Command):
    """The command `export`. It suggests `--format html` if the user types `--html`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            name = error.option_name.removeprefix("--")
            if f".{name}" not in _FORMATS and name not in _SUFFIXES:
                raise
            options = [f"--format {name}"]
            raise click.NoSuchOption(error.option_name, possibilities=options, ctx=ctx) from error


@click.command("export", cls=_ExportCommand)
@optional_key_argument
@click.option(
    "--all/--visible-only",
    "full",
    default=None,
    help="With KEY: include all hidden and archived messages, or none. Without KEY, --all exports "
    "all sessions, with their hidden messages.",
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
    help="File; with --all and without KEY, folder for all sessions.  [default: stdout]",
)
@click.option(
    "--since", type=TimeType(), help="With --all: only sessions with messages since TIME."
)
@click.option("--prefix", default="", help="With --all: only sessions whose key starts with TEXT.")
@click.option("--force", is_flag=True, help="Overwrite FILE if it exists.")
@click.option(
    "--redact/--no-redact", default=None, help="Replace secrets.  [default: yes, except for jsonl]"
)
@json_option("a JSON object that describes FILE")
@location_options
def export_command(
    key: str | None,
    full: bool | None,
    form: ExportFormat | None,
    output: str | None,
    since: datetime | None,
    prefix: str,
    force: bool,
    redact: bool | None,
    as_json: bool,
    where: Location,
) -> int:
    """Export the messages of the session KEY to stdout or a file, or all sessions to a folder.

    \b
    jsonl     one JSON object per line, exactly as stored
    openai    like jsonl, with only the fields of the OpenAI API
    markdown  a document for reading
    html      a self-contained page without scripts; #m12 links to message 12

    In a terminal, the start or end of KEY, or the start of a part after a colon, is enough if only
    one session matches.

    Hidden messages are exported only with --all. An html page also has the messages that a summary
    replaced, behind a divider, unless these are more than 10,000 messages or 20 MB.

    In all formats except jsonl, known secrets are replaced: API keys and fields such as "password".
    The number of replaced secrets is printed to stderr. Secrets in plain sentences are not
    recognized, so read a file before you share it.

    Without KEY, --all writes each session to a file in the folder of -o, and for html an index.html
    with links to the files. Files of an earlier export are replaced.

    Examples: steno export telegram:123 -o chat.html; steno export --all --format html -o archive

    Exit codes: 0 done, 1 failed, 2 wrong usage, 3 some sessions cannot be read.
    """  # noqa: D301 -- click knows a block by this character
    output = None if output == "-" else output
    if key is None:
        if not full:
            raise click.UsageError(
                "Missing argument 'KEY'. To export all sessions, use --all with -o FOLDER."
            )
        if output is None:
            raise click.UsageError("--all without KEY requires a folder: add -o FOLDER.")
        if Path(output).is_file():
            raise click.UsageError(
                f"{one_line(output)} is a file. --all writes into a folder: name a folder."
            )
    elif since is not None or prefix:
        raise click.UsageError("--since and --prefix select sessions of --all: omit KEY.")
    elif output and Path(output).is_dir():
        raise click.UsageError(f"{one_line(output)} is a folder. Name a file.")
    if as_json and output is None:
        raise click.UsageError("--json requires a file: add -o FILE.")
    form = _choose_format(output, form) if key is not None else form or "jsonl"
    # guard: export-redacted
    redactor = SharingRedactor(enabled=form != "jsonl" if redact is None else redact)
    if key is None:
        folder = str(output)
        with open_read_only(where) as store:
            _prepare_folder(Path(folder), form, force=force)
            problems = _export_all(store, folder, form, redactor, since, prefix, as_json=as_json)
        return EXIT_PARTIAL if problems else 0
    if output is not None and not force and os.path.lexists(output):
        raise _file_exists_error(output)
    with open_read_only(where) as store:
        info = find_session_to_read(store, key)
        if form == "html" and full is None:
            # This import is slow and only needed for pages.
            from stenolog.gateway.viewer.export_page import read_shared_messages

            messages = read_shared_messages(store, info)
        else:
            messages = store.get_history(info.key, full=bool(full))
        pieces = _render_pieces(form, info, messages, redactor)
        if output is None:
            _print_pieces(pieces)
        else:
            _write_file(Path(output), pieces)
            print_notice(f"Wrote {plural(len(messages), 'message')} to {one_line(output)}.")
        if as_json:
            fields: dict[str, Any] = {"key": info.key, "file": output, "format": form}
            fields |= {"messages": len(messages), "redacted": redactor.count}
            click.echo(json_text(fields))
        _print_redactions(form, redactor, "file", "it")
        if form in DOCUMENT_FORMATS and not full and info.count > len(messages):
            hidden = messages_are(info.count - len(messages))
            print_notice(f"{hidden} hidden. Use --all to include them.")
        print_notices(damage_lines(find_session(store, info.key), where.workspace))
    return 0


def _choose_format(output: str | None, form: ExportFormat | None) -> ExportFormat:
    """Return the format to write. Raises UsageError if the file suffix is unknown."""
    suffix = Path(output or "").suffix.lower()
    if form is not None:
        return form
    if suffix and suffix not in _FORMATS:
        suffixes = ", ".join(_FORMATS)
        raise click.UsageError(
            f"The format of {one_line(str(output))} is unknown. Known suffixes: {suffixes}. "
            "Otherwise use --format."
        )
    return _FORMATS.get(suffix, "jsonl")


def _render_pieces(
    form: ExportFormat, info: SessionInfo, messages: Sequence[Message], redactor: SharingRedactor
) -> Iterator[bytes]:
    if form != "html":
        return text_export_pieces(form, info, messages, redactor)
    # This import is slow and only needed for pages.
    from stenolog.gateway.viewer.export_page import export_pieces

    return export_pieces(form, info, messages, redactor)


def _print_redactions(
    form: ExportFormat, redactor: SharingRedactor, files: str, pronoun: str
) -> None:
    if redactor.enabled and redactor.count:
        print_notice(f"Replaced {plural(redactor.count, 'secret')}. Use --no-redact to keep them.")
    elif redactor.enabled and form in DOCUMENT_FORMATS:
        advice = f"Read the {files} before you share {pronoun}."
        print_notice(f"No known forms of secrets found. {advice}")


# --- all sessions ----------------------------------------------------------------------------


class _ExportedSession(NamedTuple):
    """A session in the index of an export."""

    title: str
    key: str
    file: str
    messages: int
    last: datetime


def _export_all(
    store: Store,
    folder: str,
    form: ExportFormat,
    redactor: SharingRedactor,
    since: datetime | None,
    prefix: str,
    *,
    as_json: bool,
) -> dict[str, str]:
    """Write each session to a separate file, and print a report.

    Return the keys of the sessions that cannot be read, each with the reason.
    """
    exported: list[_ExportedSession] = []
    problems: dict[str, str] = {}
    keys = store.list_sessions(prefix=prefix)
    with show_progress("Exporting", len(keys), enabled=len(keys) > 1) as step:
        for key in keys:
            try:
                info = store.info(key)
                messages = store.get_history(key, full=True)
                if messages and (since is None or messages[-1].at >= since):
                    session = _describe_session(info, messages, form, redactor)
                    path = Path(folder, session.file)
                    _remove_link(path)
                    _write_file(path, _render_pieces(form, info, messages, redactor))
                    exported.append(session)
            except (NoSuchSession, ForeignLog):
                pass  # The session was just deleted, or the file belongs to another program.
            except StenologError as error:
                problems[key] = str(error)
            step()
    if form == "html":
        _write_file(Path(folder, _INDEX_NAME), _render_index(exported))
    print_notices(f"{one_line(key)}: {sentence(problem)}" for key, problem in problems.items())
    message_count = sum(session.messages for session in exported)
    exported_text = f"{plural(len(exported), 'session')} with {plural(message_count, 'message')}"
    print_notice(f"Wrote {exported_text} to {one_line(folder)}.")
    if as_json:
        fields: dict[str, Any] = {"folder": folder, "format": form, "messages": message_count}
        fields |= {"sessions": len(exported), "redacted": redactor.count, "problems": problems}
        click.echo(json_text(fields))
    _print_redactions(form, redactor, "files", "them")
    return problems


def _prepare_folder(folder: Path, form: ExportFormat, *, force: bool) -> None:
    """Create the folder. Raises ClickException if it contains the index of another program."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        index = folder / _INDEX_NAME
        if form == "html" and not force and os.path.lexists(index):
            with index.open("rb") as file:
                if _GENERATOR_TAG not in file.read(2_000):
                    raise _file_exists_error(str(index))
    except OSError as error:
        raise _write_error(f"to {folder}", error) from error


def _remove_link(path: Path) -> None:
    """Remove a symbolic link at this path, because writing would overwrite its target."""
    if path.is_symlink():
        try:
            path.unlink()
        except OSError as error:
            raise _write_error(str(path), error) from error


def _describe_session(
    info: SessionInfo, messages: Sequence[Message], form: ExportFormat, redactor: SharingRedactor
) -> _ExportedSession:
    # `redactor` counts secrets when the document is written.
    # A second redactor for title and key avoids counting the same secret twice.
    name_redactor = SharingRedactor(enabled=True)
    title = " ".join(document_title(info, messages, name_redactor).split())
    return _ExportedSession(
        title=title,
        key=name_redactor(info.key) if redactor.enabled else info.key,
        file=_file_name(title, info.key, _SUFFIXES[form]),
        messages=len(messages),
        last=messages[-1].at,
    )


def _file_name(title: str, key: str, suffix: str) -> str:
    """Return a safe file name that is unique for the key: words of the title, and a digest."""
    ascii_title = title.encode("ascii", "ignore").decode()
    words = re.sub(r"[^\w]+", "-", ascii_title)[:_MAX_TITLE_LENGTH].strip("-_")
    digest = sha256(key.encode(errors="surrogatepass")).hexdigest()[:10]
    return f"{words.lower() or 'session'}-{digest}.{suffix}"


def _render_index(sessions: Sequence[_ExportedSession]) -> Iterator[bytes]:
    # This import is slow and only needed for pages.
    from stenolog.gateway.viewer.export_page import index_page

    yield index_page(sorted(sessions, key=lambda session: session.last, reverse=True))


# --- output ----------------------------------------------------------------------------------


def _file_exists_error(path: str) -> click.ClickException:
    return click.ClickException(f"{one_line(path)} exists already. Use --force to overwrite it.")


def _write_error(place: str, error: OSError) -> click.ClickException:
    return click.ClickException(f"Cannot write {one_line(place)}: {error.strerror}")


def _print_pieces(pieces: Iterable[bytes]) -> None:
    for piece in pieces:
        if sys.stdout.isatty():
            click.echo(printable(piece.decode()), nl=False)
        else:
            click.echo(piece, nl=False)


def _write_file(path: Path, pieces: Iterable[bytes]) -> None:
    if path.exists() and not path.is_file():
        # Write to an existing pipe or device; do not replace the pipe or device by a file.
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
    """Create a file that only its owner can read, and give it its name when it is complete."""
    try:
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        raise _write_error(str(path), error) from error
    try:
        yield descriptor
        os.fsync(descriptor)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
