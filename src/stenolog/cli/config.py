"""`steno config`, and the options and settings of commands that open an agent."""

import contextlib
import os
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeVar

import click
from msgspec import Struct

from stenolog.cli.output import json_text, one_line, sentence
from stenolog.cli.workspace import WORKSPACE_HELP
from stenolog.errors import WrongSettings
from stenolog.settings.fields import commented_file, literal
from stenolog.settings.file import config_path
from stenolog.settings.loading import EffectiveSettings, load_effective
from stenolog.settings.values import Settings
from stenolog.stores.disk import make_private

_LONGEST: Final = 200
"""Maximum number of characters shown of a text. --json shows all of it."""

_Command = TypeVar("_Command", bound=Callable[..., Any])


def config_option(command: _Command) -> _Command:
    """Add `--config` to a command."""
    return click.option(
        "--config",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Config file.  [default: $STENO_CONFIG, then ~/.config/stenolog/config.toml]",
    )(command)


def settings_of(
    config: Path | None, flags: Mapping[str, object] = MappingProxyType({})
) -> Settings:
    """Read the settings of a command; warnings go to stderr.

    `flags` are the command's options by dotted name, None if not given. Raises ClickException with
    all wrong settings.
    """
    return _in_force(config, flags).settings


def _in_force(config: Path | None, flags: Mapping[str, object]) -> EffectiveSettings:
    try:
        found = load_effective(config=config, flags=flags)
    except WrongSettings as error:
        lines = [sentence(str(problem)) for problem in error.problems]
        if len(lines) > 1:
            lines.insert(0, f"{len(lines)} settings are invalid:")
        raise click.ClickException("\n".join(lines)) from error
    for words in found.warnings:
        click.echo(f"Warning: {sentence(words)}", err=True)
    return found


class Options(Struct, frozen=True, kw_only=True):
    """Options of a command; None if not given."""

    config: Path | None = None
    workspace: str | None = None
    agent: str | None = None
    model: str | None = None


def agent_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--model`, `--agent`, `--workspace` and `--config` to a command, passed as Options."""

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
    bundled = click.option("-w", "--workspace", metavar="DIR", help=WORKSPACE_HELP)(bundled)
    bundled = click.option("--agent", metavar="NAME", help="Agent to talk to.  [default: main]")(
        bundled
    )
    return click.option(
        "-m",
        "--model",
        metavar="NAME",
        help="Model: openai/NAME, ollama/NAME, local, scripted, … or a name from the config file.  "
        "[default: agent.model in the config file, otherwise the first one found]",
    )(bundled)


@click.group("config")
def config_command() -> None:
    """Show the settings, or create a config file.

    Settings are read from the config file and from environment variables, which take precedence:
    STENO_AGENT__MODEL sets agent.model. Options of a command override both.
    """


@config_command.command("init")
@click.option("--stdout", is_flag=True, help="Print the file instead of creating it.")
@click.option("--json", "as_json", is_flag=True, help="Print the path as a JSON object.")
@config_option
def init_command(stdout: bool, as_json: bool, config: Path | None) -> None:
    """Create a config file that lists every setting.

    Each setting is commented out, with its default and a description. An existing file is never
    overwritten.

    Exit codes: 0 done, 1 failed, for example because the file exists, 2 wrong usage.
    """
    if stdout:
        click.echo(commented_file(), nl=False)
        return
    file = config_path(config, os.environ)
    try:
        make_private(file.parent)
        _write_new(file, commented_file())
    except FileExistsError as error:
        words = f"{one_line(str(file))} exists already. It was not changed."
        raise click.ClickException(words) from error
    except OSError as error:
        words = f"Cannot write {file}: {error.strerror or error}"
        raise click.ClickException(sentence(words)) from error
    if as_json:
        click.echo(json_text({"file": str(file)}))
    click.echo(f"Created {one_line(str(file))}", err=True)


def _write_new(file: Path, text: str) -> None:
    """Create a file that only its owner can read, completely or not at all. Raises OSError."""
    # The file may later contain an API key.
    # guard: config-file-mode
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as opened:
            opened.write(text.encode())
    except OSError:
        with contextlib.suppress(OSError):
            file.unlink()
        raise


@config_command.command("show")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
@config_option
def show_command(as_json: bool, config: Path | None) -> None:
    """Show every setting and where it comes from.

    Prints one line per setting, as TOML, with its source as a comment: default, FILE:LINE, or the
    environment variable. Secrets are shown as ***.

    Exit codes: 0 done, 1 a setting is invalid, 2 wrong usage.
    """
    found = _in_force(config, {})
    keys = sorted(found.settings.keys)
    if as_json:
        shown = {
            name: {"value": each.value, "source": each.source} for name, each in found.shown.items()
        }
        whole = {"file": str(found.file), "found": found.found, "settings": shown, "keys": keys}
        click.echo(json_text(whole, indent=2))
        return
    for name, each in found.shown.items():
        click.echo(f"{name} = {literal(_shortened(each.value))}  # {one_line(each.source)}")
    file = one_line(str(found.file))
    click.echo(
        f"Config file: {file}" if found.found else f"No config file at {file}; defaults are used.",
        err=True,
    )
    if keys:
        click.echo(f"API keys in the environment: {one_line(', '.join(keys))}", err=True)


def _shortened(value: object) -> object:
    if isinstance(value, str) and len(value) > _LONGEST:
        return f"{value[:_LONGEST]}…"
    return value


@config_command.command("path")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
@config_option
def path_command(as_json: bool, config: Path | None) -> None:
    """Print the path of the config file.

    Exit codes: 0 done, even if the file does not exist, 2 wrong usage.
    """
    file = config_path(config, os.environ)
    found = file.exists()
    click.echo(json_text({"file": str(file), "found": found}) if as_json else one_line(str(file)))
    if not found:
        click.echo("The file does not exist. `steno config init` creates it.", err=True)
