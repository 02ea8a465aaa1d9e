"""`steno export --all -o FOLDER`: write each session to a separate file."""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from typing import Final

import click
from msgspec import Struct

from stenolog.cli.edit import progress
from stenolog.cli.output import one_line
from stenolog.errors import ForeignLog, NoSuchSession, StenologError
from stenolog.records import Message, SessionInfo
from stenolog.redaction.redact import SharingRedactor
from stenolog.stores.base import Store
from stenolog.transfer.export.formats import ExportFormat, document_title

_SUFFIXES: Final = {"jsonl": "jsonl", "openai": "jsonl", "markdown": "md", "html": "html"}
_UNSAFE: Final = re.compile(r"[^\w]+")
_MAX_NAME: Final = 60
_INDEX: Final = "index.html"
_GENERATOR: Final = b'<meta name="generator" content="stenolog">'
"""Mark of an index that this command wrote."""

Pieces = Callable[[ExportFormat, SessionInfo, Sequence[Message], SharingRedactor], Iterable[bytes]]
Write = Callable[[Path, Iterable[bytes]], None]


class ExportedSession(Struct, frozen=True, kw_only=True):
    """A session in the index of an export."""

    title: str
    key: str
    file: str
    messages: int
    first: datetime
    last: datetime


class ExportAllReport(Struct, kw_only=True):
    """The result of an export of all sessions."""

    sessions: list[ExportedSession] = []
    problems: dict[str, str] = {}
    """Sessions that could not be read, with the reason."""


def export_all(
    store: Store,
    folder: Path,
    form: ExportFormat,
    clean: SharingRedactor,
    *,
    since: datetime | None,
    prefix: str,
    force: bool,
    pieces: Pieces,
    write: Write,
) -> ExportAllReport:
    """Write all sessions to the folder, each to a file that is complete or not there."""
    _prepare(folder, form, force=force)
    report = ExportAllReport()
    keys = store.list_sessions(prefix=prefix)
    with progress("Exporting", len(keys), shown=len(keys) > 1) as step:
        for key in keys:
            try:
                info = store.info(key)
                messages = store.get_history(key, full=True)
                if messages and (since is None or messages[-1].at >= since):
                    one = _exported(info, messages, form, clean)
                    _remove_link(folder / one.file)
                    write(folder / one.file, pieces(form, info, messages, clean))
                    report.sessions.append(one)
            except (NoSuchSession, ForeignLog):
                pass  # deleted since it was listed, or a file of another program
            except StenologError as error:
                report.problems[key] = str(error)
            step()
    if form == "html":
        write(folder / _INDEX, _index(report.sessions))
    return report


def _prepare(folder: Path, form: ExportFormat, *, force: bool) -> None:
    """Create the folder. Raises ClickException if that fails or would replace another index."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        index = folder / _INDEX
        if form == "html" and not force and os.path.lexists(index):
            with index.open("rb") as file:
                if _GENERATOR not in file.read(2_000):
                    words = f"{one_line(str(index))} exists already. Use --force to overwrite it."
                    raise click.ClickException(words)
    except OSError as error:
        words = f"Cannot write to {one_line(str(folder))}: {error.strerror}"
        raise click.ClickException(words) from error


def _remove_link(path: Path) -> None:
    """Remove a link with the name of an exported file: what it leads to is not overwritten."""
    if path.is_symlink():
        try:
            path.unlink()
        except OSError as error:
            words = f"Cannot write {one_line(str(path))}: {error.strerror}"
            raise click.ClickException(words) from error


def _exported(
    info: SessionInfo, messages: Sequence[Message], form: ExportFormat, clean: SharingRedactor
) -> ExportedSession:
    # The document counts the secrets. A file name is always without them.
    uncounted = SharingRedactor(enabled=True)
    title = " ".join(document_title(info, messages, uncounted).split())
    return ExportedSession(
        title=title,
        key=uncounted(info.key) if clean.enabled else info.key,
        file=file_name(title, info.key, _SUFFIXES[form]),
        messages=len(messages),
        first=messages[0].at,
        last=messages[-1].at,
    )


def file_name(title: str, key: str, suffix: str) -> str:
    """Return a safe file name that is unique for the key: words of the title, and a digest."""
    words = _UNSAFE.sub("-", title.encode("ascii", "ignore").decode())[:_MAX_NAME].strip("-_")
    digest = sha256(key.encode(errors="surrogatepass")).hexdigest()[:10]
    return f"{words.lower() or 'session'}-{digest}.{suffix}"


def _index(sessions: Sequence[ExportedSession]) -> Iterator[bytes]:
    # Imported late: slow, and only needed for pages.
    from stenolog.gateway.viewer.export_page import index_page

    yield index_page(sorted(sessions, key=lambda one: one.last, reverse=True))
