"""Which workspace a command works on, and opening it to look at it only."""

import os
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, Final, TypeVar

import click
from msgspec import Struct
from msgspec.structs import replace

from stenolog.errors import UsageError
from stenolog.sessions.folders import Place, check_workspace, find_place
from stenolog.stores.base import Store
from stenolog.stores.in_memory import InMemoryStore
from stenolog.stores.opening import address, open_store

DEFAULT: Final = "./workspace"
OF_SETTINGS: Final = f"that of the settings, {DEFAULT} unless set"
"""What the help says of it."""

_Command = TypeVar("_Command", bound=Callable[..., Any])


def shown(workspace: str) -> str:
    """A workspace as it may be printed: without the password in the URL of a server."""
    if "://" not in workspace and "password" not in workspace:
        return workspace
    # Nobody else waits for it.
    from stenolog.settings.secrets import without_password

    return without_password(workspace)  # guard: workspace-name-redacted


class Where(Struct, frozen=True, kw_only=True):
    """What the options of a command name: a workspace, and whose sessions in it."""

    workspace: str
    agent: str | None = None
    namespace: str | None = None

    @property
    def shown(self) -> str:
        """The workspace as it may be printed."""
        return shown(self.workspace)

    @property
    def place(self) -> Place:
        """Where that store is. Raises UsageError."""
        found = find_place(self.workspace, self.agent)
        return found if self.namespace is None else replace(found, namespace=self.namespace)


def workspace_option(
    command: _Command, *, wrong: type[click.ClickException] = click.ClickException
) -> _Command:
    """Give a command `--workspace`. `wrong`: what is raised where the settings are wrong."""

    def in_force(ctx: click.Context, _: click.Parameter, given: str | None) -> str:
        if given is not None:
            return given
        # Who names the workspace as DIR needs no settings, right or wrong.
        if ctx.params.get("directory") is not None or ctx.resilient_parsing:
            return DEFAULT
        try:
            return _of_settings(ctx.params.get("agent"))
        except click.ClickException as error:
            raise wrong(error.message) from error

    return click.option(
        "-w",
        "--workspace",
        metavar="DIR",
        callback=in_force,
        show_default=OF_SETTINGS,
        help="The workspace, sqlite:FILE, or postgresql://…",
    )(command)


def _of_settings(agent: str | None) -> str:
    """Where the settings keep the sessions of an agent. Raises ClickException."""
    # Slow to import; who names a workspace needs neither, and who has no config file not both.
    from stenolog.settings.file import is_anything_set

    if not is_anything_set(os.environ):
        return DEFAULT
    from stenolog.cli.config import settings_of

    settings = settings_of(None)
    return settings.agents.get(agent or "", settings.agent).sessions


def where_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command `--workspace`, `--agent` and `--namespace`, and call it with a Where."""

    @wraps(command)
    def bundled(
        *arguments: Any, workspace: str, agent: str | None, namespace: str | None, **others: Any
    ) -> Any:
        if agent is not None and namespace is not None:
            raise click.UsageError("Name an agent or a namespace, not both.")
        where = Where(workspace=workspace, agent=agent, namespace=namespace)
        return command(*arguments, where=where, **others)

    bundled = click.option(
        "--namespace", metavar="NAME", help="Another namespace of the workspace than sessions."
    )(bundled)
    bundled = click.option(
        "--agent", metavar="NAME", help="The sessions of the agent of this name."
    )(bundled)
    return workspace_option(bundled)


def chosen(ctx: click.Context, directory: str | None, workspace: str) -> str:
    """The workspace of a command that takes it as an argument too. Raises UsageError for two."""
    if directory is None:
        return workspace
    if ctx.get_parameter_source("workspace") is click.core.ParameterSource.COMMANDLINE:
        raise click.UsageError("Name the workspace once: as DIR, or with -w.")
    return directory


def check_there(workspace: str) -> None:
    """Raise UsageError where there is no such workspace, StoreUnavailable where it is shut."""
    found = address(workspace)
    if found.engine != "jsonl":
        return
    if workspace == DEFAULT and not Path(workspace).exists():
        raise UsageError(f"there is no {DEFAULT} here; name a workspace with -w DIR")
    check_workspace(Path(found.path))


def open_to_read(where: Where | str) -> Store:
    """The store, opened so that nothing is written. Raises UsageError, StoreUnavailable."""
    if isinstance(where, str):
        where = Where(workspace=where)
    check_there(where.workspace)
    place = where.place
    folder = Path(place.where, place.namespace)
    if address(place.where).engine == "jsonl" and not folder.exists():
        # Where nothing was ever stored there is no folder, but an empty store says the same.
        return InMemoryStore()
    return open_store(place.where, namespace=place.namespace, read_only=True)
