"""`steno config`, and the options and settings of commands that open an agent."""

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

import click
from msgspec import Struct

from stenolog.cli.output import (
    one_line,
    print_json,
    print_notice,
    sentence,
)
from stenolog.cli.workspace import WORKSPACE_HELP, json_option, options_as_struct
from stenolog.errors import Problem, WrongSettings
from stenolog.settings.fields import commented_file, to_toml
from stenolog.settings.file import config_path
from stenolog.settings.loading import FLAGS_SOURCE, EffectiveSettings, load_effective_settings
from stenolog.settings.values import Settings
from stenolog.stores.disk import create_private_folder

config_option: Final = click.option(
    "--config",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Config file.  [default: $STENO_CONFIG, then ~/.config/stenolog/config.toml]",
)


def read_settings(
    config: Path | None, flags: Mapping[str, object] = MappingProxyType({})
) -> Settings:
    """Read the settings of a command; warnings go to stderr.

    `flags` are the command's options by the dotted name of the setting, such as `gateway.port`; an
    omitted option is None. Raises a ClickException that lists all wrong settings.
    """
    return _load_settings(config, flags).settings


def _load_settings(config: Path | None, flags: Mapping[str, object]) -> EffectiveSettings:
    try:
        effective_settings = load_effective_settings(config=config, flags=flags)
    except WrongSettings as error:
        lines = [sentence(_problem_text(problem)) for problem in error.problems]
        if len(lines) > 1:
            lines.insert(0, f"{len(lines)} settings are invalid:")
        raise click.ClickException("\n".join(lines)) from error
    print_notice(*(f"Warning: {sentence(warning)}" for warning in effective_settings.warnings))
    return effective_settings


class AgentOptions(Struct, frozen=True, kw_only=True):
    """Options of a command that opens an agent. An omitted option is None."""

    config: Path | None = None
    workspace: str | None = None
    agent: str | None = None
    model: str | None = None


agent_options: Final = options_as_struct(
    "options",
    AgentOptions,
    click.option(
        "-m",
        "--model",
        metavar="NAME",
        help="Model: openai/NAME, ollama/NAME, local, scripted, … or a name from the config file.  "
        "[default: agent.model in the config file, otherwise the first model found]",
    ),
    click.option("--agent", metavar="NAME", help="Agent to talk to.  [default: main]"),
    click.option("-w", "--workspace", metavar="DIR", help=WORKSPACE_HELP),
    config_option,
)


def _problem_text(problem: Problem) -> str:
    """Describe a wrong setting. If it comes from the command line, name the option: `--port`."""
    if problem.source != FLAGS_SOURCE:
        return str(problem)
    return f"--{problem.field.rpartition('.')[2]}: {problem.reason}"


@click.group("config")
def config_command() -> None:
    """Show the settings, or create a config file.

    Environment variables override the config file: STENO_AGENT__MODEL sets agent.model. Options of
    a command override the environment variables.
    """


@config_command.command("init")
@json_option("the path as a JSON object")
@config_option
def init_command(config: Path | None) -> None:
    """Create a config file that lists every setting.

    Each setting is commented out, with its default and a description. An existing file is never
    overwritten.

    Exit codes: 0 done, 1 failed, for example because the file exists, 2 wrong usage.
    """
    file = config_path(config, os.environ)
    try:
        create_private_folder(file.parent)
        _write_new_file(file, commented_file())
    except FileExistsError as error:
        text = f"{one_line(str(file))} exists already. It was not changed."
        raise click.ClickException(text) from error
    except OSError as error:
        text = f"Cannot write {file}: {error.strerror or error}"
        raise click.ClickException(sentence(text)) from error
    print_json({"file": str(file)})
    print_notice(f"Created {one_line(str(file))}")


def _write_new_file(file: Path, text: str) -> None:
    """Create a file that only its owner can read. If writing fails, remove the file again.

    Raises OSError.
    """
    # Other users must not read the file, because it may later contain an API key.
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as config_file:
            config_file.write(text.encode())
    except OSError:
        with contextlib.suppress(OSError):
            file.unlink()
        raise


@config_command.command("show")
@json_option()
@config_option
def show_command(config: Path | None) -> None:
    """Show every setting and where it comes from.

    Prints one line per setting, as TOML, with its source as a comment: default, the config file, or
    the environment variable. Secrets are shown as ***.

    Exit codes: 0 done, 1 a setting is invalid, 2 wrong usage.
    """
    effective_settings = _load_settings(config, {})
    variables = sorted(effective_settings.settings.keys)
    settings = {
        name: {"value": setting.value, "source": setting.source}
        for name, setting in effective_settings.values.items()
    }
    fields = {"file": str(effective_settings.file), "found": effective_settings.file_exists}
    if print_json({**fields, "settings": settings, "keys": variables}, indent=2):
        return
    for name, setting in effective_settings.values.items():
        click.echo(f"{name} = {to_toml(setting.value)}  # {one_line(setting.source)}")
    file = one_line(str(effective_settings.file))
    missing_file_text = f"No config file at {file}; defaults are used."
    print_notice(f"Config file: {file}" if effective_settings.file_exists else missing_file_text)
    if variables:
        print_notice(f"Read from the environment: {one_line(', '.join(variables))}")


@config_command.command("path")
@json_option()
@config_option
def path_command(config: Path | None) -> None:
    """Print the path of the config file.

    Exit codes: 0 done, even if the file does not exist, 2 wrong usage.
    """
    file = config_path(config, os.environ)
    if not print_json({"file": str(file), "found": file.exists()}):
        click.echo(one_line(str(file)))
