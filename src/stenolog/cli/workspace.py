"""Which workspace a command works on, and opening it to look at it only."""

from collections.abc import Callable
from typing import Any, Final, TypeVar

import click

from stenolog.sessions.verify import holds_sessions
from stenolog.stores.base import Store
from stenolog.stores.in_memory import InMemoryStore
from stenolog.stores.opening import open_store

DEFAULT: Final = "./workspace"

_Command = TypeVar("_Command", bound=Callable[..., Any])


def workspace_option(command: _Command) -> _Command:
    """Give a command `--workspace`."""
    return click.option(
        "-w",
        "--workspace",
        metavar="DIR",
        default=DEFAULT,
        show_default=True,
        help="The workspace, or sqlite:FILE.",
    )(command)


def chosen(ctx: click.Context, directory: str | None, workspace: str) -> str:
    """The workspace of a command that takes it as an argument too. Raises UsageError for two."""
    if directory is None:
        return workspace
    if ctx.get_parameter_source("workspace") is click.core.ParameterSource.COMMANDLINE:
        raise click.UsageError("Name the workspace once: as DIR, or with -w.")
    return directory


def open_to_read(workspace: str) -> Store:
    """The store, opened so that nothing is written. Raises UsageError, StoreUnavailable."""
    if workspace.startswith(("sqlite:", "jsonl:")):
        return open_store(workspace, read_only=True)
    # Where nothing was ever stored there is no folder to open, but an empty store says the same.
    return open_store(workspace, read_only=True) if holds_sessions(workspace) else InMemoryStore()
