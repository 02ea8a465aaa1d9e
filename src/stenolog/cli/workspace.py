"""Options that select the workspace of a command, and opening it read-only."""

import os
import shlex
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, Final, TypeVar

import click
from msgspec import Struct
from msgspec.structs import replace

from stenolog.errors import UsageError
from stenolog.sessions.folders import SessionsLocation, check_workspace, locate_sessions
from stenolog.stores.base import Store
from stenolog.stores.in_memory import InMemoryStore
from stenolog.stores.open_store import address, open_store

DEFAULT: Final = "./workspace"
WORKSPACE_HELP: Final = (
    "Workspace folder, sqlite:FILE or postgresql://…  "
    f"[default: agent.sessions in the config file, otherwise {DEFAULT}]"
)
"""Help text of `--workspace`."""

_Command = TypeVar("_Command", bound=Callable[..., Any])


def display_name(workspace: str) -> str:
    """Return a workspace in printable form, without the password of a URL."""
    if "://" not in workspace and "password" not in workspace:
        return workspace
    # Imported late: only needed for databases.
    from stenolog.settings.secrets import without_password

    return without_password(workspace)  # guard: workspace-name-redacted


class Location(Struct, frozen=True, kw_only=True):
    """The store that the options select: a workspace, and an agent or namespace in it."""

    workspace: str
    agent: str | None = None
    namespace: str | None = None

    @property
    def shown(self) -> str:
        """Return the workspace in printable form."""
        return display_name(self.workspace)

    @property
    def place(self) -> SessionsLocation:
        """Return the place of the store. Raises UsageError."""
        found = locate_sessions(self.workspace, self.agent)
        return found if self.namespace is None else replace(found, namespace=self.namespace)


def workspace_option(
    command: _Command, *, wrong: type[click.ClickException] = click.ClickException
) -> _Command:
    """Add `--workspace` to a command. Wrong settings raise `wrong`."""

    def in_force(ctx: click.Context, _: click.Parameter, given: str | None) -> str:
        if given is not None:
            return given
        # With DIR given, the settings are not needed, even if they are wrong.
        if ctx.params.get("directory") is not None or ctx.resilient_parsing:
            return DEFAULT
        try:
            return _workspace_in_settings(ctx.params.get("agent"))
        except click.ClickException as error:
            raise wrong(error.message) from error

    return click.option(
        "-w",
        "--workspace",
        metavar="DIR",
        callback=in_force,
        help=WORKSPACE_HELP,
    )(command)


def _workspace_in_settings(agent: str | None) -> str:
    """Return where the settings store the sessions of an agent. Raises ClickException."""
    # Imported late: slow, and not needed with -w; the second import only if settings exist.
    from stenolog.settings.file import is_anything_set

    if not is_anything_set(os.environ):
        return DEFAULT
    from stenolog.cli.config import read_settings

    settings = read_settings(None)
    return settings.agents.get(agent or "", settings.agent).sessions


def location_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--workspace`, `--agent` and `--namespace` to a command, passed as Where."""

    @wraps(command)
    def bundled(
        *arguments: Any, workspace: str, agent: str | None, namespace: str | None, **others: Any
    ) -> Any:
        if agent is not None and namespace is not None:
            raise click.UsageError("Use either --agent or --namespace, not both.")
        where = Location(workspace=workspace, agent=agent, namespace=namespace)
        return command(*arguments, where=where, **others)

    bundled = click.option(
        "--namespace", metavar="NAME", help="Namespace in the workspace.  [default: sessions]"
    )(bundled)
    bundled = click.option("--agent", metavar="NAME", help="Use the sessions of this agent.")(
        bundled
    )
    return workspace_option(bundled)


def location_hint() -> str:
    """Return the options that selected the workspace, to append to a suggested command."""
    ctx = click.get_current_context(silent=True)
    parts = []
    for option, name in (("-w", "workspace"), ("--agent", "agent"), ("--namespace", "namespace")):
        if ctx is None or name not in ctx.params:
            continue
        if ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            parts.append(f" {option} {shlex.quote(display_name(ctx.params[name]))}")
    return "".join(parts)


def choose_workspace(ctx: click.Context, directory: str | None, workspace: str) -> str:
    """Return the workspace of a command that also accepts DIR. Raises UsageError for both."""
    if directory is None:
        return workspace
    if ctx.get_parameter_source("workspace") is click.core.ParameterSource.COMMANDLINE:
        raise click.UsageError("Name the workspace only once: as DIR or with -w.")
    return directory


def check_exists(workspace: str) -> None:
    """Raise UsageError if there is no such workspace, StoreUnavailable if it is inaccessible."""
    found = address(workspace)
    if found.engine != "jsonl":
        return
    if workspace == DEFAULT and not Path(workspace).exists():
        raise UsageError(f"there is no folder {DEFAULT} here; name a workspace with -w DIR")
    check_workspace(Path(found.path))


def open_read_only(where: Location | str) -> Store:
    """Open the store read-only. Raises UsageError, StoreUnavailable."""
    if isinstance(where, str):
        where = Location(workspace=where)
    check_exists(where.workspace)
    return open_existing(where, read_only=True)


def open_existing(where: Location, *, read_only: bool) -> Store:
    """Open the store; return an empty one if nothing was ever stored there."""
    place = where.place
    folder = Path(place.where, place.namespace)
    if address(place.where).engine == "jsonl" and not folder.exists():
        # An empty store behaves the same and creates no files.
        return InMemoryStore()
    return open_store(place.where, namespace=place.namespace, read_only=read_only)
