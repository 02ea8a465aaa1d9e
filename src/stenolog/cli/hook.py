"""`steno hook`: import sessions of a coding agent as soon as they end."""

import json
import os
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import click

from stenolog.cli.output import format_time, one_line
from stenolog.cli.workspace import Location, display_name, location_options
from stenolog.stores.disk import create_private_folder
from stenolog.stores.open_store import open_store, parse_address
from stenolog.transfer.transcripts.transcript import as_dict, as_text, parse_json

MAX_INPUT_BYTES: Final = 16 * 1024 * 1024
"""Maximum number of bytes that are read from the program that calls the hook."""
MAX_LOG_BYTES: Final = 1024 * 1024
"""Maximum size of the log of failed imports, in bytes. A larger log is emptied."""
_RUN_WORDS: Final = ("run", "claude-code")
"""Words after `steno hook` with which Claude Code calls the hook."""


@click.command("hook")
@click.argument("words", nargs=-1, metavar="")
@click.option("--file", type=click.Path(path_type=Path), hidden=True)
@location_options
def hook_command(words: tuple[str, ...], file: Path | None, location: Location) -> None:
    """Print settings with which Claude Code imports each session when it ends.

    The settings are JSON on stdout. Paste them into Claude Code's settings.json, whose path is on
    stderr; nothing is changed. Claude Code then runs `steno hook run claude-code`, which imports
    the session into the workspace in the background, so that Claude Code does not wait. If an
    import fails, the error is written to hook.log in $XDG_STATE_HOME/stenolog or
    ~/.local/state/stenolog. To import sessions that have already ended, use
    `steno import claude-code`.

    Example: steno hook -w ~/conversations

    Exit codes: 0 done, 1 the settings would have a password, or a path that is not UTF-8, 2 wrong
    usage.
    """
    if words == _RUN_WORDS:
        _run_hook(file, location)
    elif words or file is not None:
        raise click.UsageError("`steno hook` has only options. It prints the settings of the hook.")
    else:
        _print_settings(location)


def _print_settings(location: Location) -> None:
    folder = Path(os.environ.get("CLAUDE_CONFIG_DIR") or Path.home() / ".claude")
    path = one_line(str(folder / "settings.json"))
    if display_name(location.workspace) != location.workspace:
        raise click.ClickException(
            "The address of the workspace has a password, which would be written to "
            f"{path}. Remove it from the address, and put it into ~/.pgpass."
        )
    command = shlex.join(_hook_words(location))
    workspace = one_line(_absolute_address(location.workspace))
    try:
        command.encode()
    except UnicodeEncodeError:
        raise click.ClickException(
            f"The path {workspace} is not UTF-8, so it cannot be written to {path}."
        ) from None
    entry = {"hooks": [{"type": "command", "command": command}]}
    click.echo(json.dumps({"hooks": {"SessionEnd": [entry]}}, indent=2))
    click.echo(
        f"Paste this into {path}. If the file has settings, add only what they lack. New sessions "
        f"of Claude Code are then imported into {workspace} when they end.",
        err=True,
    )


def _run_hook(file: Path | None, location: Location) -> None:
    """Import the session that ended. Claude Code passes the session as JSON on stdin.

    With `file`, import this transcript and wait. Prints nothing and raises nothing, so that a
    failed import does not disturb Claude Code.
    """
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
    words += ["hook", *_RUN_WORDS, "-w", _absolute_address(location.workspace)]
    words += [] if location.agent is None else ["--agent", location.agent]
    return words + ([] if location.namespace is None else ["--namespace", location.namespace])


def _absolute_address(workspace: str) -> str:
    """Return the address of a workspace with an absolute path."""
    address = parse_address(workspace)
    if address.engine == "jsonl":
        return str(Path(address.path).absolute())
    return f"sqlite:{Path(address.path).absolute()}" if address.engine == "sqlite" else workspace


# --- the log ------------------------------------------------------------------------------------


def log_file() -> Path:
    """Return the path of the log of failed imports."""
    state_folder = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state_folder, "stenolog", "hook.log")


def _write_log(text: str) -> None:
    """Write a line to the log of failed imports. Errors are ignored."""
    path = log_file()
    try:
        create_private_folder(path.parent)
        is_full = path.exists() and path.stat().st_size > MAX_LOG_BYTES
        open_flags = os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if is_full else os.O_APPEND)
        line = f"{format_time(datetime.now(UTC))} {one_line(text)}\n"
        with os.fdopen(os.open(path, open_flags, 0o600), "wb") as log:
            log.write(line.encode(errors="replace"))
    except OSError:
        pass
