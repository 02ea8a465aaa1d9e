"""`steno completion`: the scripts, and what they are answered, in a real bash too."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.shell_completion import ShellComplete
from click.testing import Result

from stenolog.cli import main
from stenolog.cli.completion import COMPLETION_VARIABLE, BashCompletion
from stenolog.stores.open_store import open_store
from support import needs

Steno = Callable[..., Result]

pytestmark = pytest.mark.usefixtures("place")


def _values(*words: str, writing: str = "") -> list[str]:
    shell = ShellComplete(main, {}, "steno", COMPLETION_VARIABLE)
    return [item.value for item in shell.get_completions(list(words), writing)]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script_uses_the_variable_of_click(steno: Steno, shell: str) -> None:
    result = steno("completion", shell)
    assert (result.exit_code, result.stderr) == (0, "")
    assert f"{COMPLETION_VARIABLE}={shell}_complete" in result.stdout
    assert "steno" in result.stdout


def test_another_shell_is_wrong_usage(steno: Steno) -> None:
    assert steno("completion", "csh").exit_code == 2


def test_commands_options_and_choices_are_completed() -> None:
    assert _values(writing="re") == ["rename", "restore", "retention"]
    assert "--before" in _values("purge", writing="--")
    assert _values("completion", writing="z") == ["zsh"]


@pytest.mark.parametrize(
    "command",
    [
        "show",
        "tail",
        "rename",
        "tag",
        "fork",
        "undo",
        "summarize",
        "archive",
        "delete",
        "purge",
        "export",
        "stats",
    ],
)
def test_keys_are_completed_for_every_command_with_a_key(command: str) -> None:
    assert _values(command, writing="tele") == ["telegram:123"]
    assert _values(command, writing="telegram:1") == ["telegram:123"]
    assert _values(command, writing="nothing") == []


def test_completion_uses_the_option_then_the_settings(
    monkeypatch: pytest.MonkeyPatch, place: Path
) -> None:
    with open_store("sqlite:other.db") as store:
        store.add_message("slack:9", "user", "hello")
    assert _values("show", "-w", "sqlite:other.db") == ["slack:9"]
    assert _values("summarize", "-w", "sqlite:other.db") == ["slack:9"]
    monkeypatch.setenv("STENO_AGENT__SESSIONS", f"sqlite:{place}/other.db")
    assert _values("show") == ["slack:9"]
    with open_store("workspace/agents/ada") as store:
        store.add_message("hers", "user", "hello")
    assert _values("show", "-w", "workspace", "--agent", "ada") == ["hers"]


def test_restore_completes_keys_in_the_trash(steno: Steno) -> None:
    assert _values("restore") == []
    assert steno("delete", "telegram:123", "--yes").exit_code == 0
    assert _values("restore", writing="t") == ["telegram:123"]
    assert _values("show", writing="t") == []


@pytest.mark.parametrize(
    "where", ["nowhere", "sqlite:nowhere.db", "postgresql://127.0.0.1:1/x?busy_timeout=0"]
)
def test_unreadable_store_completes_nothing(where: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert _values("show", "-w", where) == []
    assert capfd.readouterr() == ("", "")


def test_key_that_needs_quoting_is_not_offered() -> None:
    with open_store("workspace") as store:
        for key in ("q:a b", "q:$(id)", "q:`x`", "q:'x", "q;x", "q:\x1b[31m", "q:fine", "-q"):
            store.add_message(key, "user", "hello")
    assert _values("show", writing="q") == ["q:fine"]
    assert "-q" not in _values("show", writing="")


def test_bash_completion_returns_the_part_after_the_last_colon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def answered(line: str, breaks: str = ":=") -> list[str]:
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_BREAKS", breaks)
        return BashCompletion(main, {}, "steno", COMPLETION_VARIABLE).complete().splitlines()

    assert answered("steno show tele") == ["plain,telegram:123"]
    assert answered("steno show telegram:1") == ["plain,123"]
    assert answered("steno show telegram:1", breaks=" ") == ["plain,telegram:123"]
    assert answered("steno sho") == ["plain,show"]
    assert "plain,show" in answered("steno ")
    assert answered("steno show telegram:123 --a") == ["plain,--all", "plain,--at", "plain,--agent"]


def test_a_real_bash_completes_a_key_with_a_colon(place: Path, steno: Steno) -> None:
    needs.tool("bash")
    (place / "bin").mkdir()
    program = place / "bin" / "steno"
    program.write_text(
        f"#!{sys.executable}\nfrom stenolog.cli import main\nmain(prog_name='steno')\n"
    )
    program.chmod(0o755)
    script = steno("completion", "bash").stdout
    asking = script + (
        "COMP_LINE='steno show telegram:1'; COMP_POINT=${#COMP_LINE}\n"
        "COMP_WORDS=(steno show telegram : 1); COMP_CWORD=4\n"
        "_steno_completion steno 1 :\n"
        'printf "%s\\n" "${COMPREPLY[@]}"\n'
    )
    ended = subprocess.run(
        ["bash", "--norc", "-c", asking],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, "PATH": f"{place / 'bin'}:{os.environ['PATH']}"},
    )
    assert (ended.stdout, ended.stderr) == ("123\n", "")


def test_every_key_argument_has_completion() -> None:
    context = click.Context(main)
    without = {
        name
        for name in main.list_commands(context)
        if (command := main.get_command(context, name)) is not None
        for param in command.params
        if param.name in ("key", "keys")
        and isinstance(param, click.Argument)
        and param._custom_shell_complete is None
    }
    assert without <= {"chat"}
