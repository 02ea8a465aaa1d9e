"""The group itself: version, help, unknown words, and what it does not import."""

import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import click
import pytest
from click.shell_completion import ShellComplete

from stenolog.cli import main
from stenolog.errors import install_command
from support import needs
from support.cli import Steno


def test_version_option_prints_the_package_version(steno: Steno) -> None:
    result = steno("--version")
    assert (result.exit_code, result.stdout) == (0, f"steno {version('stenolog')}\n")


def test_pyproject_declares_both_console_scripts() -> None:
    project = Path(__file__).parents[3] / "pyproject.toml"
    scripts = tomllib.loads(project.read_text())["project"]["scripts"]
    assert scripts == {"steno": "stenolog.__main__:main", "stenolog": "stenolog.__main__:main"}


@pytest.mark.parametrize("name", ["steno", "stenolog"])
def test_installed_console_script_prints_the_version(name: str) -> None:
    script = shutil.which(name, path=str(Path(sys.executable).parent))
    if script is None:
        needs.lacking(f"the console script {name} is not installed")
    ended = subprocess.run(
        [script, "--version"], capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout == f"steno {version('stenolog')}\n"


def test_missing_package_of_the_command_line_is_reported_in_one_line() -> None:
    script = (
        "import sys; sys.modules['starlette'] = None; sys.argv[1:] = ['serve', '--port', '0']\n"
        "from stenolog.__main__ import main; main()"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == f"steno needs the package starlette. Run: {install_command('app')}\n"


def test_shell_completes_commands_and_options() -> None:
    completion = ShellComplete(main, {}, "steno", "_STENO_COMPLETE")
    commands = completion.get_completions([], "re")
    assert [item.value for item in commands] == ["rename", "restore", "retention"]
    assert "--before" in [item.value for item in completion.get_completions(["purge"], "--")]


def test_limit_of_a_list_has_the_same_names_in_every_command() -> None:
    limited = {}
    for name in main.list_commands(click.Context(main)):
        command = main.get_command(click.Context(main), name)
        assert command is not None
        for option in command.params:
            if {"-n", "--limit", "--last"} & set(option.opts):
                limited[name] = option.opts
    assert limited == {key: ["-n", "--limit"] for key in ("list", "search", "tail")}


def test_help_lists_every_command_on_one_screen(steno: Steno) -> None:
    result = steno("--help")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert len(lines) < 24
    assert max(map(len, lines)) < 80
    commands = "\n".join(lines[4:-3])
    for name in main.list_commands(click.Context(main)):
        assert commands.count(f"  {name} ") == 1, name


@pytest.mark.parametrize("words", [(), ("list",), ("memory", "list")])
def test_help_command_prints_the_help_of_a_command(steno: Steno, words: tuple[str, ...]) -> None:
    result = steno("help", *words)
    assert (result.exit_code, result.stdout) == (0, steno(*words, "--help").stdout)
    assert "help" not in main.list_commands(click.Context(main))


@pytest.mark.parametrize("option", ["--version", "--help"])
def test_version_and_help_do_not_import_commands(option: str) -> None:
    program = (
        "import sys; from stenolog.cli import main\n"
        f"main(['{option}'], standalone_mode=False)\n"
        "slow = {'rich', 'prompt_toolkit', 'markdown_it', 'httpx2', 'stenolog.agent.loop'}\n"
        "slow |= {'stenolog.maintenance.workspace_check', 'stenolog.maintenance.repair'}\n"
        "print('imported:', *slow & set(sys.modules))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout.splitlines()[-1] == "imported:"


@pytest.mark.parametrize("option", ["-w", "--workspace", "--agent"])
def test_option_before_the_command_gets_a_hint(steno: Steno, option: str) -> None:
    result = steno(option, "X", "list")
    assert result.exit_code == 2
    assert (
        f"Error: Put {option} after the command, for example: steno list {option} …"
        in result.stderr
    )
    assert "No such option" in steno("--nothing", "list").stderr


def test_misspelt_command_gets_a_suggestion(steno: Steno) -> None:
    result = steno("chatt")
    assert result.exit_code == 2
    assert "There is no command 'chatt'. Did you mean 'chat'?" in result.stderr
    assert "No such command 'zzz'" in steno("zzz").stderr
