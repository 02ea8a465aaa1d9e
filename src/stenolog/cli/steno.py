"""The command group `steno`.

The module of a command is imported when the command is used, so `steno --version` does not load the
stores.
"""

import logging
import os
import sys
from difflib import get_close_matches
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from typing import Any, Final

import click

from stenolog.cli.output import error_sentence, sentence
from stenolog.errors import StenologError

GROUPS: Final = {
    "Talk": ("chat", "ask", "serve", "open"),
    "Look": ("list", "show", "tail", "search", "stats"),
    "Change": ("rename", "tag", "fork", "undo", "compact"),
    "Keep": ("doctor", "backup", "archive", "delete", "restore", "purge", "retention"),
    "Carry": ("export", "import", "copy"),
    "Set up": ("memory", "config", "completion"),
}
"""All commands, grouped as in the help."""
COMMANDS: Final = {
    "archive": "stenolog.cli.edit",
    "ask": "stenolog.cli.ask",
    "backup": "stenolog.cli.copy_backup",
    "chat": "stenolog.cli.chat",
    "compact": "stenolog.cli.edit",
    "completion": "stenolog.cli.completion",
    "config": "stenolog.cli.config",
    "copy": "stenolog.cli.copy_backup",
    "delete": "stenolog.cli.delete_restore",
    "doctor": "stenolog.cli.doctor",
    "export": "stenolog.cli.export",
    "fork": "stenolog.cli.edit",
    "import": "stenolog.cli.import_sessions",
    "list": "stenolog.cli.list_sessions",
    "memory": "stenolog.cli.memory_commands",
    "open": "stenolog.cli.serve",
    "purge": "stenolog.cli.purge",
    "rename": "stenolog.cli.edit",
    "restore": "stenolog.cli.delete_restore",
    "retention": "stenolog.cli.retention",
    "search": "stenolog.cli.search",
    "serve": "stenolog.cli.serve",
    "show": "stenolog.cli.show",
    "stats": "stenolog.cli.stats",
    "tag": "stenolog.cli.edit",
    "tail": "stenolog.cli.show",
    "undo": "stenolog.cli.edit",
}

OF_COMMANDS: Final = ("-w", "--workspace", "--agent", "--namespace")
"""Options that users often put before the command."""
_WHOLE: Final = 1_000
"""More characters than the first sentence of any help text."""
_COMPLETES: Final = "_STENO_COMPLETE"
"""Environment variable with which a shell requests completions."""
READER_GONE: Final = 128 + 13
"""Exit code that a shell shows for a program ended by SIGPIPE."""


class Steno(click.Group):
    """Command group that imports commands on demand and reports store errors in one sentence."""

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run as a program."""
        # If the shell closed a stream (`>&-`), Python sets it to None, which libraries do not
        # expect.
        if sys.stdout is None:
            sys.stdout = _nowhere()
        if sys.stderr is None:
            sys.stderr = _nowhere()
        if _COMPLETES in os.environ:
            # Imported late: only needed for completion.
            from stenolog.cli.completion import register

            register()
        return super().main(*args, **extra)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands."""
        del ctx
        return sorted(COMMANDS)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands in groups, each with its full first sentence."""
        longest = max(map(len, COMMANDS))
        for title, names in GROUPS.items():
            found = [(name, self.get_command(ctx, name)) for name in names]
            with formatter.section(title):
                formatter.write_dl(
                    [
                        (name.ljust(longest), command.get_short_help_str(_WHOLE))
                        for name, command in found
                        if command is not None
                    ],
                )

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command of this name, or None."""
        del ctx
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = getattr(import_module(COMMANDS[cmd_name]), f"{cmd_name}_command")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command. Raises UsageError with a suggestion for a similar name."""
        name = args[0]
        near = get_close_matches(name, COMMANDS, 1)
        if name not in COMMANDS and near and not ctx.resilient_parsing:
            ctx.fail(f"There is no command {name!r}; did you mean {near[0]!r}?")
        return super().resolve_command(ctx, args)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the options before the command. Raises UsageError."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if error.option_name not in OF_COMMANDS:
                raise
            name = error.option_name
            words = f"Put {name} behind the command, as in: steno list {name} …"
            raise click.UsageError(words, ctx) from error

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. Raises ClickException for errors of a store."""
        try:
            return super().invoke(ctx)
        except StenologError as error:
            raise click.ClickException(error_sentence(error)) from error
        except BrokenPipeError:
            # The reader has closed the pipe, as `head` does: not an error to report.
            _stop_writing()
            ctx.exit(READER_GONE)
        except OSError as error:
            raise click.ClickException(sentence(f"Cannot write the output: {error}")) from error


def _nowhere() -> TextIOWrapper:
    return Path(os.devnull).open("w", encoding="utf-8")


def _stop_writing() -> None:
    """Discard the output that is still buffered."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


@click.group(cls=Steno, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="stenolog", message="steno %(version)s")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Look at the conversations of agents, and after their health.

    A workspace is the folder that holds them: ./workspace, or the one that
    -w names (after the command).
    """
    if os.environ.get("NO_COLOR"):
        ctx.color = False
    # Messages may contain lone surrogates, or characters that the terminal's encoding lacks.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    # Commands report problems themselves; the stores' log lines are not printed.
    logging.getLogger("stenolog").addHandler(logging.NullHandler())
