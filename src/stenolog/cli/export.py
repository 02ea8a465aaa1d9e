"""`steno export`: write sessions as JSON lines, Markdown, or self-contained HTML pages."""

import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, NamedTuple

import click

from stenolog.cli.output import (
    EXIT_PARTIAL,
    TimeType,
    one_line,
    plural,
    print_json,
    print_notice,
    printable,
    sentence,
    wants_json,
)
from stenolog.cli.workspace import (
    Location,
    damage_lines,
    find_session,
    find_session_to_read,
    json_option,
    location_options,
    messages_with_verb,
    read_each_session,
)
from stenolog.records import Message, SessionInfo
from stenolog.redaction.redact import SharingRedactor
from stenolog.stores.base import Store
from stenolog.transfer.export.formats import (
    DOCUMENT_FORMATS,
    ExportFormat,
    document_title,
    export_as_text,
    exports_hidden_messages,
)

_FORMAT_BY_SUFFIX: Final[dict[str, ExportFormat]] = {
    ".md": "markdown",
    ".markdown": "markdown",
    ".html": "html",
    ".htm": "html",
    ".jsonl": "jsonl",
}
"""Format by file suffix, used if no format is given."""
_SUFFIX_BY_FORMAT: Final = {"jsonl": "jsonl", "openai": "jsonl", "markdown": "md", "html": "html"}
"""File suffix by format, used if all sessions are exported."""
_MAX_TITLE_LENGTH: Final = 60
"""Maximum number of characters of the title in a file name."""
_INDEX_NAME: Final = "index.html"
_GENERATOR_TAG: Final = b'<meta name="generator" content="stenolog">'
"""HTML tag by which an index.html of this command is recognized."""


class _FormatType(click.Choice[str]):
    """Click type of `--format`: the name of a format or its file suffix."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        format_name = _FORMAT_BY_SUFFIX.get(f".{value}", value) if isinstance(value, str) else value
        return super().convert(format_name, param, ctx)


@click.command("export")
@click.argument("key", required=False)
@click.option(
    "--all/--visible-only",
    "include_hidden",
    default=None,
    help="With KEY: include all hidden and archived messages, or none. Without KEY, --all exports "
    "all sessions, with their hidden messages.",
)
@click.option(
    "--format",
    "export_format",
    type=_FormatType(list(_SUFFIX_BY_FORMAT)),
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
    include_hidden: bool | None,
    export_format: ExportFormat | None,
    output: str | None,
    since: datetime | None,
    prefix: str,
    force: bool,
    redact: bool | None,
    location: Location,
) -> int:
    """Export the messages of the session KEY to stdout or a file, or all sessions to a folder.

    \b
    jsonl     one JSON object per line, exactly as stored
    openai    like jsonl, with only the fields of OpenAI's chat API; messages in
              the format of another API are refused
    markdown  a document for reading
    html      a self-contained page without scripts; #m12 links to message 12

    In a terminal, the start or end of KEY, or the start of a part after a colon, is enough if only
    one session matches.

    Hidden messages are exported only with --all. An html page also has the messages that a summary
    replaced, behind a divider, unless these are more than 10,000 messages or 20 MB. Markdown and
    html of a session of another program have all its messages, within the same limits.

    In all formats except jsonl, known forms of secrets are replaced: API keys and fields such as
    "password". The number of replaced secrets is printed to stderr. Other secrets are not
    recognized, so read a file before you share it.

    Control sequences, such as terminal colours, are removed, except in jsonl and openai with
    --no-redact.

    Without KEY, --all writes each session to a file in the folder of -o, and for html an index.html
    with links to the files. Files of an earlier export are replaced.

    Examples: steno export telegram:123 -o chat.html; steno export --all --format html -o archive

    Exit codes: 0 done, 1 failed, 2 wrong usage, 3 some sessions cannot be read.
    """  # noqa: D301 -- click does not rewrap a block after \b
    output = None if output == "-" else output
    if key is None:
        if not include_hidden:
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
    if wants_json() and output is None:
        raise click.UsageError("--json requires a file: add -o FILE.")
    export_format = export_format or ("jsonl" if key is None else _format_of_file(output))
    # guard: export-redacted
    redactor = SharingRedactor(enabled=export_format != "jsonl" if redact is None else redact)
    if key is None:
        folder = str(output)
        with location.open() as store:
            _prepare_folder(Path(folder), export_format, force=force)
            return _export_all(store, folder, export_format, redactor, since, prefix)
    if output is not None and not force and os.path.lexists(output):
        raise _file_exists_error(output)
    with location.open() as store:
        info = find_session_to_read(store, key)
        if include_hidden is None and exports_hidden_messages(export_format, info):
            from stenolog.gateway.viewer.hidden_messages import read_shared_messages

            messages = read_shared_messages(store, info)
        else:
            messages = store.get_history(info.key, full=bool(include_hidden))
        chunks = _render_chunks(export_format, info, messages, redactor)
        if output is None:
            for chunk in chunks:
                click.echo(printable(chunk.decode()) if sys.stdout.isatty() else chunk, nl=False)
        else:
            _write_file(Path(output), chunks)
            print_notice(f"Wrote {plural(len(messages), 'message')} to {one_line(output)}.")
        fields: dict[str, Any] = {"key": info.key, "file": output, "format": export_format}
        print_json({**fields, "messages": len(messages), "redacted": redactor.count})
        _print_redaction_notice(export_format, redactor, len(messages), "file", "it")
        if export_format in DOCUMENT_FORMATS and not include_hidden and info.count > len(messages):
            hidden_text = messages_with_verb(info.count - len(messages))
            print_notice(f"{hidden_text} hidden. Use --all to include all messages.")
        print_notice(*damage_lines(find_session(store, info.key), location.workspace))
    return 0


def _format_of_file(output: str | None) -> ExportFormat:
    """Return the format by the file suffix. Raises UsageError if the suffix is unknown."""
    suffix = Path(output or "").suffix.lower()
    if suffix and suffix not in _FORMAT_BY_SUFFIX:
        suffixes = ", ".join(_FORMAT_BY_SUFFIX)
        raise click.UsageError(
            f"The format of {one_line(str(output))} is unknown. Known suffixes: {suffixes}. "
            "Otherwise use --format."
        )
    return _FORMAT_BY_SUFFIX.get(suffix, "jsonl")


def _render_chunks(
    export_format: ExportFormat,
    info: SessionInfo,
    messages: Sequence[Message],
    redactor: SharingRedactor,
) -> Iterator[bytes]:
    if export_format != "html":
        return export_as_text(export_format, info, messages, redactor)
    # This import is slow and only needed for pages.
    from stenolog.gateway.viewer.export_page import export_pieces

    return export_pieces(export_format, info, messages, redactor)


def _print_redaction_notice(
    export_format: ExportFormat,
    redactor: SharingRedactor,
    message_count: int,
    noun: str,
    pronoun: str,
) -> None:
    if redactor.enabled and redactor.count:
        print_notice(f"Replaced {plural(redactor.count, 'secret')}. Use --no-redact to keep them.")
    elif redactor.enabled and export_format in DOCUMENT_FORMATS:
        advice = f"Read the {noun} before you share {pronoun}."
        count_text = plural(message_count, "message")
        print_notice(f"No known forms of secrets found in {count_text}. {advice}")


# --- all sessions ----------------------------------------------------------------------------


class _ExportedSession(NamedTuple):
    """An exported session, as listed in index.html."""

    title: str
    key: str
    file: str
    messages: int
    last: datetime


def _export_all(
    store: Store,
    folder: str,
    export_format: ExportFormat,
    redactor: SharingRedactor,
    since: datetime | None,
    prefix: str,
) -> int:
    """Write each session to a separate file, print a report, and return the exit code."""
    exported: list[_ExportedSession] = []

    def export_session(key: str) -> None:
        info = store.info(key)
        messages = store.get_history(key, full=True)
        if messages and (since is None or messages[-1].at >= since):
            session = _describe_session(info, messages, export_format, redactor)
            path = Path(folder, session.file)
            _remove_link(path)
            _write_file(path, _render_chunks(export_format, info, messages, redactor))
            exported.append(session)

    problems = read_each_session("Exporting", store.list_sessions(prefix=prefix), export_session)
    if export_format == "html":
        # This import is slow and only needed for pages.
        from stenolog.gateway.viewer.export_page import index_page

        exported.sort(key=lambda session: session.last, reverse=True)
        _write_file(Path(folder, _INDEX_NAME), [index_page(exported)])
    print_notice(*(f"{one_line(key)}: {sentence(problem)}" for key, problem in problems.items()))
    message_count = sum(session.messages for session in exported)
    exported_text = f"{plural(len(exported), 'session')} with {plural(message_count, 'message')}"
    print_notice(f"Wrote {exported_text} to {one_line(folder)}.")
    fields: dict[str, Any] = {"folder": folder, "format": export_format}
    fields |= {"messages": message_count, "sessions": len(exported)}
    print_json({**fields, "redacted": redactor.count, "problems": problems})
    _print_redaction_notice(export_format, redactor, message_count, "files", "them")
    return EXIT_PARTIAL if problems else 0


def _prepare_folder(folder: Path, export_format: ExportFormat, *, force: bool) -> None:
    """Create the folder. Raises ClickException if it cannot be created.

    Without `force`, this error is also raised if the export would overwrite an index.html of
    another program.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        index = folder / _INDEX_NAME
        if export_format == "html" and not force and os.path.lexists(index):
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
    info: SessionInfo,
    messages: Sequence[Message],
    export_format: ExportFormat,
    redactor: SharingRedactor,
) -> _ExportedSession:
    # `redactor` counts secrets when the document is written.
    # A second redactor for title and key avoids counting the same secret twice.
    name_redactor = SharingRedactor(enabled=redactor.enabled)
    title = " ".join(document_title(info, messages, name_redactor).split())
    return _ExportedSession(
        title=title,
        key=name_redactor(info.key),
        file=_file_name(title, info.key, _SUFFIX_BY_FORMAT[export_format]),
        messages=len(messages),
        last=messages[-1].at,
    )


def _file_name(title: str, key: str, suffix: str) -> str:
    """Return a file name from words of the title and a digest of the key."""
    ascii_title = title.encode("ascii", "ignore").decode()
    title_words = re.sub(r"[^\w]+", "-", ascii_title)[:_MAX_TITLE_LENGTH].strip("-_")
    digest = sha256(key.encode(errors="surrogatepass")).hexdigest()[:10]
    return f"{title_words.lower() or 'session'}-{digest}.{suffix}"


# --- output ----------------------------------------------------------------------------------


def _file_exists_error(path: str) -> click.ClickException:
    return click.ClickException(f"{one_line(path)} exists already. Use --force to overwrite it.")


def _write_error(target: str, error: OSError) -> click.ClickException:
    return click.ClickException(f"Cannot write {one_line(target)}: {error.strerror}")


def _write_file(path: Path, chunks: Iterable[bytes]) -> None:
    if path.exists() and not path.is_file():
        # Write to an existing pipe or device; do not replace the pipe or device by a file.
        with path.open("wb") as file:
            file.writelines(chunks)
        return
    # Replace the target of a symbolic link, not the link.
    path = path.resolve()
    try:
        descriptor, temporary_name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        raise _write_error(str(path), error) from error
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.writelines(chunks)
            file.flush()
            os.fsync(descriptor)
        Path(temporary_name).replace(path)
    except BaseException:
        Path(temporary_name).unlink(missing_ok=True)
        raise
