"""The command group `steno`.

The module of a command is imported when the command is used, so `steno --version` does not load the
stores.
"""

import atexit
import gc
import logging
import os
import sys
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from typing import Any, Final

import click

from stenolog.cli.output import error_sentence, sentence
from stenolog.errors import StenologError

_HELP_TEXT: Final = """\
Usage: steno COMMAND [OPTIONS] [ARGS]...

Talk to AI agents; list, search, repair and move their conversations.

Chat      chat        Talk to an agent         ask       Ask one question
          serve       Run the HTTP gateway     open      Open the viewer
Browse    view        Show all in a browser    list      List sessions
          show        Show a session           search    Search all messages
          tail        Follow new messages      stats     Count tokens and cost
Edit      rename      Set the title            tag       Add or remove tags
          fork        Copy into a new session  undo      Undo the last change
          summarize   Summarize old messages
Maintain  doctor      Find and repair damage   backup    Back up all sessions
          delete      Move to the trash        restore   Restore from the trash
          purge       Delete permanently       archive   Archive old messages
          retention   Apply retention rules
Transfer  import      Import from other apps   export    Export sessions
          copy        Copy to another store    hook      Import as sessions end
Set up    memory      Manage notes             config    Show the settings
          token       Print the gateway key

Sessions are in ./workspace, unless -w after the command names another place.
steno COMMAND --help describes a command; steno --version prints the version.
"""
"""Help of `steno`. It fits a terminal of 24 lines and 80 columns."""
_COMMANDS_BY_MODULE: Final = {
    "ask": ("ask",),
    "chat": ("chat",),
    "config": ("config",),
    "copy_backup": ("backup", "copy"),
    "deletion": ("delete", "purge", "restore", "retention"),
    "doctor": ("doctor",),
    "edit": ("archive", "fork", "rename", "summarize", "tag", "undo"),
    "export": ("export",),
    "hook": ("hook",),
    "import_sessions": ("import",),
    "list_search": ("list", "search"),
    "memory_commands": ("memory",),
    "serve": ("open", "serve", "token", "view"),
    "show": ("show", "tail"),
    "stats": ("stats",),
}
COMMANDS: Final = {name: module for module, names in _COMMANDS_BY_MODULE.items() for name in names}
"""Module of each command."""

COMMAND_OPTIONS: Final = ("-w", "--workspace", "--agent", "--namespace")
"""Options that users often put before the command."""
EXIT_BROKEN_PIPE: Final = 128 + 13
"""Exit code that a shell shows for a program ended by SIGPIPE."""


class Steno(click.Group):
    """Command group that imports commands on demand and reports store errors in one sentence."""

    def __call__(self, *args: Any, **extra: Any) -> Any:
        """Run `steno` as the main program of this process."""
        # Imports create many objects and no reference cycles, so do not look for cycles yet.
        gc.set_threshold(100_000)
        # Without `gc.freeze`, Python would search for cycles at exit, which takes 10 ms.
        atexit.register(gc.freeze)
        return super().__call__(*args, **extra)

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run `steno` with the given arguments."""
        # If the shell closed a stream (`>&-`), Python sets the stream to None.
        # Libraries do not expect that a stream is None.
        if sys.stdout is None:
            sys.stdout = _open_devnull()
        if sys.stderr is None:
            sys.stderr = _open_devnull()
        return super().main(*args, **extra)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands."""
        del ctx
        return sorted(COMMANDS)

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the help: all commands on one screen."""
        del ctx
        formatter.write(_HELP_TEXT)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command of this name, or None."""
        del ctx
        if cmd_name not in COMMANDS:
            return None
        module = import_module(f"stenolog.cli.{COMMANDS[cmd_name]}")
        command: click.Command = getattr(module, f"{cmd_name}_command")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command. The UsageError for an unknown name suggests a similar name."""
        name = args[0]
        if name not in COMMANDS and not ctx.resilient_parsing:
            # This import is only needed for an unknown command.
            from difflib import get_close_matches

            for similar_name in get_close_matches(name, COMMANDS, 1):
                ctx.fail(f"There is no command {name!r}. Did you mean {similar_name!r}?")
        return super().resolve_command(ctx, args)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the options before the command. Raises UsageError."""
        if args[:1] == ["help"]:
            # `steno help list` is another form of `steno list --help`.
            args = [*args[1:], "--help"]
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if error.option_name not in COMMAND_OPTIONS:
                raise
            name = error.option_name
            advice = f"Put {name} after the command, for example: steno list {name} …"
            raise click.UsageError(advice, ctx) from error

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command, and exit with the code that it returns.

        Raises ClickException for errors of a store, and for each OSError except a broken pipe.
        """
        try:
            exit_code = super().invoke(ctx)
        except StenologError as error:
            raise click.ClickException(error_sentence(error)) from error
        except BrokenPipeError:
            # The reader of the pipe, for example `head`, has closed the pipe. This is not an error.
            _discard_output()
            ctx.exit(EXIT_BROKEN_PIPE)
        except OSError as error:
            if error.filename is None:  # it comes from writing the output
                _discard_output()
            text = f"{error.filename or 'Cannot write the output'}: {error.strerror or error}"
            raise click.ClickException(sentence(text)) from error
        ctx.exit(exit_code or 0)


def _open_devnull() -> TextIOWrapper:
    return Path(os.devnull).open("w", encoding="utf-8")


def _discard_output() -> None:
    """Discard the output that is still buffered."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())
    os.close(devnull)


@click.group(cls=Steno, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="stenolog", message="steno %(version)s")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Talk to AI agents; list, search, repair and move their conversations."""
    if os.environ.get("NO_COLOR"):
        ctx.color = False
    # Messages may contain lone surrogates, or characters that the terminal's encoding lacks.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    # Commands report problems themselves; the stores' log lines are not printed.
    logging.getLogger("stenolog").addHandler(logging.NullHandler())
