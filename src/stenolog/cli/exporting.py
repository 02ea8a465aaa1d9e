"""`steno export`: a session as JSON lines, as Markdown, or as one HTML page to share."""

import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from stenolog.catalog.texts import title_from
from stenolog.cli.completion import complete_key
from stenolog.cli.showing import damage_words, info_of, messages_are
from stenolog.cli.text import one_line, printable
from stenolog.cli.workspace import Where, open_to_read, where_options
from stenolog.records import Message, SessionInfo
from stenolog.sessions.exporting.reading import cleaned

_SUFFIXES: Final = {
    ".md": "markdown",
    ".markdown": "markdown",
    ".html": "html",
    ".htm": "html",
    ".jsonl": "jsonl",
}
"""What a file is by its name, where no format is said."""
_OF_OPENAI: Final = (
    "role",
    "content",
    "name",
    "tool_calls",
    "tool_call_id",
    "refusal",
    "audio",
    "function_call",
)
"""The fields of a message that OpenAI's API knows."""
_FOR_READERS: Final = ("markdown", "html")


@click.command("export")
@click.argument("key", shell_complete=complete_key)
@click.option("--all", "full", is_flag=True, help="Hidden and archived messages too.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["jsonl", "openai", "markdown", "html"]),
    help="What to write; else what the name of FILE says, else jsonl.",
)
@click.option(
    "-o", "--output", metavar="FILE", type=click.Path(dir_okay=False), help="Write into this file."
)
@click.option("--force", is_flag=True, help="Replace FILE where it is there already.")
@click.option(
    "--redact/--no-redact",
    default=None,
    help="Take out secrets; done for markdown and html unless told otherwise.",
)
@where_options
def export_command(
    key: str,
    full: bool,
    form: str | None,
    output: str | None,
    force: bool,
    redact: bool | None,
    where: Where,
) -> None:
    """Write the messages of the session KEY, to stdout or into a file.

    As jsonl: one JSON object a line, each exactly what was given to the store. As openai: the
    same with only the fields that OpenAI's API knows. As markdown: a document to read. As html:
    one page that needs nothing else, light or dark, with tools folded and a link to each message
    (#m12); it holds no script and loads nothing. With --all, hidden messages are marked there.

    In markdown and html a stub stands for each secret that is known by its form, as an API key;
    stderr tells how many. A secret in plain words stays: read what you share.

    Exit code: 0 written, 1 there is no such session, or it cannot be written, 2 wrong usage.
    """
    named = _SUFFIXES.get(Path(output).suffix.lower()) if output is not None else None
    form = form or named or "jsonl"
    redacted = _Redacted(wanted=form in _FOR_READERS if redact is None else redact)
    if output not in (None, "-") and not force and Path(str(output)).exists():
        words = f"{one_line(str(output))} is there already; --force replaces it."
        raise click.ClickException(words)
    with open_to_read(where) as store:
        info = info_of(store, key)
        messages = store.get_history(info.key, full=full)
        pieces = _pieces(form, info, messages, redacted)
        if output in (None, "-"):
            _print(pieces)
        else:
            _write(Path(str(output)), pieces)
            done = f"{len(messages):,} message{'' if len(messages) == 1 else 's'}"
            click.echo(f"{one_line(str(output))}: {done} written.", err=True)
        if redacted.wanted and (redacted.count or form in _FOR_READERS):
            click.echo(redacted.in_words(), err=True)
        if form in _FOR_READERS and not full and info.count > info.visible:
            hidden = messages_are(info.count - info.visible)
            click.echo(f"{hidden} hidden; --all writes them too.", err=True)
        for words in damage_words(info_of(store, info.key), where.workspace):
            click.echo(words, err=True)


class _Redacted:
    """Takes secrets out of texts, and counts them."""

    def __init__(self, *, wanted: bool) -> None:
        self.wanted = wanted
        self.count = 0

    def __call__(self, text: str) -> str:
        """The text as it may be shared."""
        if not self.wanted:
            return text
        # Slow to import, and only who shares needs it.
        from stenolog.memory.redaction import redact

        found = redact(text)
        self.count += found.count
        return found.text

    def in_words(self) -> str:
        if not self.count:
            return "No secrets were found in it."
        stubs = "1 secret was" if self.count == 1 else f"{self.count:,} secrets were"
        return f"{stubs} taken out; --no-redact leaves them in."


# --- what is written -------------------------------------------------------------------------


def _pieces(
    form: str, info: SessionInfo, messages: list[Message], redacted: _Redacted
) -> Iterator[bytes]:
    if form not in _FOR_READERS:
        for message in messages:
            yield _line(message, redacted, only_openai=form == "openai") + b"\n"
        return
    # Slow to import, and only for documents.
    from stenolog.sessions.exporting.markdown import as_markdown
    from stenolog.sessions.exporting.page import as_page
    from stenolog.sessions.exporting.reading import Conversation, read_all

    told = Conversation(
        key=cleaned(info.key, redacted),
        title=_title(info, messages, redacted),
        summary=cleaned(info.summary, redacted),
        created=info.created,
        updated=info.updated,
        said=tuple(read_all(messages, redacted)),
        hidden=info.count - info.visible,
    )
    for piece in as_page(told) if form == "html" else as_markdown(told):
        yield piece.encode()


def _line(message: Message, redacted: _Redacted, *, only_openai: bool) -> bytes:
    if not only_openai and not redacted.wanted:
        return message.to_json()
    body = message.to_dict()
    if only_openai:
        body = {name: value for name, value in body.items() if name in _OF_OPENAI}
    try:
        return msgspec.json.encode(_without_secrets(body, redacted))
    except UnicodeEncodeError:
        # Half a character is written as an escape, as the store has it; almost nobody meets one.
        from json import dumps

        return dumps(_without_secrets(body, redacted), separators=(",", ":")).encode()


def _without_secrets(value: Any, redacted: _Redacted) -> Any:
    match value:
        case str():
            return redacted(value)
        case list():
            return [_without_secrets(one, redacted) for one in value]
        case Mapping():
            return {name: _without_secrets(one, redacted) for name, one in value.items()}
    return value


def _title(info: SessionInfo, messages: Iterable[Message], redacted: _Redacted) -> str:
    given = title_from(info.meta, "")
    if given:
        return cleaned(given, redacted)
    # Before it is cut: half a secret is not known by its form. And it is counted where it was said.
    prompt = cleaned(_prompt(messages), _Redacted(wanted=redacted.wanted))
    return title_from({}, prompt) or cleaned(info.key, _Redacted(wanted=redacted.wanted))


def _prompt(messages: Iterable[Message]) -> str:
    """What the user said first."""
    for message in messages:
        body = message.to_dict()
        if body.get("role") == "user" and isinstance(body.get("content"), str):
            return str(body["content"])
    return ""


# --- where to --------------------------------------------------------------------------------


def _print(pieces: Iterable[bytes]) -> None:
    for piece in pieces:
        if sys.stdout.isatty():
            click.echo(printable(piece.decode()), nl=False)
        else:
            click.echo(piece, nl=False)


def _write(path: Path, pieces: Iterable[bytes]) -> None:
    with _new_file(path) as descriptor, os.fdopen(descriptor, "wb", closefd=False) as file:
        for piece in pieces:
            file.write(piece)


@contextmanager
def _new_file(path: Path) -> Iterator[int]:
    """A file that has its name only once it is whole; nobody else can read it."""
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
