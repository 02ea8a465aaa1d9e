"""`steno hook`: import sessions of a coding agent as soon as they end."""

import difflib
import os
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import click

from stenolog.cli.output import format_time, one_line, sentence
from stenolog.cli.workspace import Location, display_name, location_options
from stenolog.stores.open_store import open_store, parse_address
from stenolog.transfer.transcripts.claude_settings import (
    HOOK_ARGUMENTS,
    add_hook,
    remove_hook,
    replace_settings,
    settings_file,
)
from stenolog.transfer.transcripts.transcript import as_dict, as_text, parse_json

MAX_INPUT_BYTES: Final = 16 * 1024 * 1024
"""Maximum number of bytes that are read from the program that calls the hook."""
MAX_LOG_BYTES: Final = 1024 * 1024
"""Maximum size of the log of failed imports, in bytes. A larger log is emptied."""
_program_argument: Final = click.argument("program", type=click.Choice(["claude-code"]))


@click.group("hook")
def hook_command() -> None:
    """Import sessions of a coding agent as soon as they end."""


@hook_command.command("install")
@_program_argument
@click.option("--dry-run", is_flag=True, help="Print what would change, without changing it.")
@location_options
def install_command(program: str, dry_run: bool, location: Location) -> None:
    """Import each session of PROGRAM when it ends.

    Adds a SessionEnd hook to Claude Code's settings.json in $CLAUDE_CONFIG_DIR or ~/.claude; other
    settings are not changed. Each session is then imported into the workspace in the background, so
    Claude Code does not wait. If an import fails, the error is written to hook.log in
    $XDG_STATE_HOME/stenolog or ~/.local/state/stenolog. To import sessions that have already ended,
    use `steno import claude-code`.

    \b
    Examples:
      steno hook install claude-code --dry-run
      steno hook install claude-code -w ~/conversations

    Exit codes: 0 done, 1 the settings cannot be read or written, 2 wrong usage.
    """  # noqa: D301 -- click does not rewrap a block after \b
    del program
    path = settings_file()
    if not path.parent.is_dir():
        raise click.ClickException(
            f"There is no folder {one_line(str(path.parent))}. Start Claude Code once, or set "
            "CLAUDE_CONFIG_DIR."
        )
    if display_name(location.workspace) != location.workspace:
        raise click.ClickException(
            "The address of the workspace has a password, which would be written to "
            f"{one_line(str(path))}. Remove it from the address, and put it into ~/.pgpass."
        )
    old_content = _read_settings(path)
    command = shlex.join(_hook_words(location))
    workspace = one_line(_absolute_address(location.workspace))
    try:
        command.encode()
    except UnicodeEncodeError:
        raise click.ClickException(
            f"The path {workspace} is not UTF-8, so it cannot be written to {one_line(str(path))}."
        ) from None
    new_text = add_hook(_decode_settings(old_content, path), command, path)
    if _write_settings(path, old_content, new_text, dry_run=dry_run):
        verb = "Would install" if dry_run else "Installed"
        click.echo(
            f"{verb} the hook in {one_line(str(path))}. New sessions of Claude Code are imported "
            f"into {workspace} when they end.",
            err=True,
        )
    else:
        click.echo(f"The hook is already in {one_line(str(path))}.", err=True)


@hook_command.command("remove")
@_program_argument
@click.option("--dry-run", is_flag=True, help="Print what would change, without changing it.")
def remove_command(program: str, dry_run: bool) -> None:
    """Remove the hook that imports sessions of PROGRAM. Imported sessions stay.

    Exit codes: 0 done, 1 the settings cannot be read or written, 2 wrong usage.
    """
    del program
    path = settings_file()
    old_content = _read_settings(path)
    new_text = "" if old_content is None else remove_hook(_decode_settings(old_content, path), path)
    if old_content is not None and _write_settings(path, old_content, new_text, dry_run=dry_run):
        verb = "Would remove" if dry_run else "Removed"
        click.echo(f"{verb} the hook from {one_line(str(path))}.", err=True)
    else:
        click.echo(f"There is no hook of stenolog in {one_line(str(path))}.", err=True)


@hook_command.command("run", hidden=True)
@_program_argument
@click.option("--file", type=click.Path(path_type=Path), help="Import this transcript and wait.")
@location_options
def run_command(program: str, file: Path | None, location: Location) -> None:
    """Import the session that ended. Claude Code passes the session as JSON on stdin.

    Prints nothing, so that a failed import does not disturb Claude Code.

    Exit codes: 0 always.
    """
    del program
    try:
        if file is None:
            hook_input = sys.stdin.buffer.read(MAX_INPUT_BYTES)
            transcript = as_text(as_dict(parse_json(hook_input)).get("transcript_path"))
            if not transcript:
                _write_log("the hook was called without a transcript_path")
                return
            _start_import(Path(transcript).expanduser(), location)
        else:
            _import_transcript(file, location)
    except Exception as error:  # noqa: BLE001 -- an error must not fail the session
        _write_log(f"{'the session' if file is None else file} was not imported: {error}")


def _start_import(path: Path, location: Location) -> None:
    """Start a process that imports a transcript, because Claude Code kills slow hooks."""
    subprocess.Popen(
        [*_hook_words(location), "--file", str(path)],
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _import_transcript(path: Path, location: Location) -> None:
    """Import a session and its subagents. Raises OSError and the errors of the store."""
    # The process that Claude Code waits for does not need these imports.
    from stenolog.transfer.transcripts.claude_code import ClaudeCode
    from stenolog.transfer.transcripts.transcript_import import import_transcript

    path.stat()
    reader = ClaudeCode()
    place = location.place
    subagents = path.with_suffix("") / "subagents"
    with open_store(place.where, namespace=place.namespace) as store:
        for source in (path, subagents) if subagents.is_dir() else (path,):
            for file in reader.find(source):
                for problem in import_transcript(reader, file, store).problems:
                    _write_log(f"{file.key}: {problem}")


# --- the command line of the hook ---------------------------------------------------------------


def _hook_words(location: Location) -> list[str]:
    """Return the words of the command that runs the hook from any folder."""
    script = Path(sys.argv[0]).absolute()
    # With -P, Python does not import a folder named stenolog in the current folder.
    words = [sys.executable, "-P", "-m", "stenolog"]
    if script.name in ("steno", "stenolog") and os.access(script, os.X_OK):
        words = [str(script)]
    words += [*HOOK_ARGUMENTS.split(), "-w", _absolute_address(location.workspace)]
    words += [] if location.agent is None else ["--agent", location.agent]
    return words + ([] if location.namespace is None else ["--namespace", location.namespace])


def _absolute_address(workspace: str) -> str:
    """Return the address of a workspace with an absolute path."""
    address = parse_address(workspace)
    if address.engine == "jsonl":
        return str(Path(address.path).absolute())
    return f"sqlite:{Path(address.path).absolute()}" if address.engine == "sqlite" else workspace


# --- files --------------------------------------------------------------------------------------


def _read_settings(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _decode_settings(content: bytes | None, path: Path) -> str:
    if content is None or not content.strip():
        return "{}\n"
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        error_text = sentence(f"{path} is not UTF-8, so it was not changed")
        raise click.ClickException(error_text) from error


def _write_settings(path: Path, old_content: bytes | None, new_text: str, *, dry_run: bool) -> bool:
    """Write the new settings; with `dry_run`, print the difference.

    Return whether old and new settings differ.
    """
    if new_text.encode() == old_content:
        return False
    if dry_run:
        old_lines, new_lines = (old_content or b"").decode().splitlines(), new_text.splitlines()
        name = str(path)
        for line in difflib.unified_diff(old_lines, new_lines, name, name, lineterm="", n=2):
            click.echo(one_line(line))
    else:
        replace_settings(path, old_content, new_text)
    return True


def log_file() -> Path:
    """Return the path of the log of failed imports."""
    state_folder = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state_folder, "stenolog", "hook.log")


def _write_log(text: str) -> None:
    """Write a line to the log of failed imports. Errors are ignored."""
    path = log_file()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        is_full = path.exists() and path.stat().st_size > MAX_LOG_BYTES
        open_flags = os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if is_full else os.O_APPEND)
        line = f"{format_time(datetime.now(UTC))} {one_line(text)}\n"
        with os.fdopen(os.open(path, open_flags, 0o600), "wb") as log:
            log.write(line.encode(errors="replace"))
    except OSError:
        pass
