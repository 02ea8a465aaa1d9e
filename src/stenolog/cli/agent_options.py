"""The options of commands that open an agent."""

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import click
from msgspec import Struct

from stenolog.cli.config import config_option
from stenolog.cli.workspace import OF_SETTINGS


class Options(Struct, frozen=True, kw_only=True):
    """What the options of a command say; None was not given."""

    config: Path | None = None
    workspace: str | None = None
    agent: str | None = None
    model: str | None = None


def agent_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command `--model`, `--agent`, `--workspace` and `--config`; it gets Options."""

    @wraps(command)
    def bundled(
        *arguments: Any,
        config: Path | None,
        workspace: str | None,
        agent: str | None,
        model: str | None,
        **others: Any,
    ) -> Any:
        options = Options(config=config, workspace=workspace, agent=agent, model=model)
        return command(*arguments, options=options, **others)

    bundled = config_option(bundled)
    bundled = click.option(
        "-w",
        "--workspace",
        metavar="DIR",
        show_default=OF_SETTINGS,
        help="The workspace, sqlite:FILE, or postgresql://…",
    )(bundled)
    bundled = click.option("--agent", metavar="NAME", help="Which agent answers.")(bundled)
    return click.option(
        "-m",
        "--model",
        metavar="NAME",
        help="Which model: scripted, local, ollama/NAME, openai/NAME … or one of your settings.",
    )(bundled)
