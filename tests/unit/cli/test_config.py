"""`steno config`: what it shows and writes, and how wrong settings are told."""

import json
import os
import stat
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from stenolog.cli.chat_input import InputHistory
from stenolog.settings.fields import commented_file
from stenolog.settings.loading import load_effective_settings
from stenolog.settings.values import Settings
from support.cli import InTerminal

Steno = Callable[..., Result]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The config file, in a folder that is not there yet, named by the environment."""
    file = tmp_path / "new" / "folder" / "config.toml"
    monkeypatch.setenv("STENO_CONFIG", str(file))
    return file


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    file.chmod(0o600)


def test_init_creates_a_private_file(steno: Steno, file: Path) -> None:
    result = steno("config", "init")
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == f"Created {file}\n"
    assert file.read_text() == commented_file()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert load_effective_settings().settings == Settings(
        keys=load_effective_settings().settings.keys
    )


def test_init_keeps_an_existing_file(steno: Steno, file: Path) -> None:
    _write(file, "mine")
    result = steno("config", "init")
    assert (result.exit_code, file.read_text()) == (1, "mine")
    assert f"{file} exists already" in result.stderr


def test_init_reports_a_write_error(steno: Steno, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = steno("config", "init", "--config", str(tmp_path / "file" / "config.toml"))
    assert result.exit_code == 1
    assert "Error: Cannot write" in result.stderr or "already" in result.stderr


def test_init_can_write_to_stdout(steno: Steno, file: Path) -> None:
    result = steno("config", "init", "--stdout")
    assert (result.stdout, file.exists()) == (commented_file(), False)


def test_path_prints_only_the_path_for_another_program(steno: Steno, file: Path) -> None:
    missing = steno("config", "path")
    assert (missing.exit_code, missing.stdout, missing.stderr) == (0, f"{file}\n", "")
    _write(file, "")
    there = steno("config", "path")
    assert (there.stdout, there.stderr) == (f"{file}\n", "")
    assert steno("config", "path", "--config", "other.toml").stdout == "other.toml\n"


def test_show_prints_toml_with_sources(
    steno: Steno, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write(file, "[agent]\nmodel = 'local'\n[models.m]\nkey = 'hush'\n")
    monkeypatch.setenv("STENO_AGENT__MAX_ITERATIONS", "3")
    monkeypatch.setenv("SOME_API_KEY", "hush")
    result = steno("config", "show")
    assert result.exit_code == 0
    assert f'agent.model = "local"  # {file}\n' in result.stdout
    assert "agent.max_iterations = 3  # STENO_AGENT__MAX_ITERATIONS\n" in result.stdout
    assert "agent.tool_timeout = 60.0  # default\n" in result.stdout
    assert f'models.m.key = "***"  # {file}\n' in result.stdout
    assert tomllib.loads(result.stdout)["agent"]["model"] == "local"
    assert result.stderr == f"Config file: {file}\nRead from the environment: SOME_API_KEY\n"
    assert "hush" not in result.output


def test_show_json_has_the_same_values(steno: Steno, file: Path) -> None:
    _write(file, "[agent]\nsystem = '''" + "long " * 100 + "'''\n[models.m]\nheaders = {A = 'b'}")
    whole = json.loads(steno("config", "show", "--json").stdout)
    assert (whole["file"], whole["found"], whole["keys"]) == (str(file), True, [])
    assert whole["settings"]["agent.system"] == {"value": "long " * 100, "source": str(file)}
    assert whole["settings"]["models.m.headers"]["value"] == {"A": "***"}
    assert whole["settings"]["memory.zone"] == {"value": "", "source": "default"}
    shown = steno("config", "show").stdout
    assert "long …" in shown
    assert "long " * 100 not in shown


def test_show_reads_the_default_file(steno: Steno) -> None:
    result = steno("config", "show")
    own = Path(os.environ["XDG_CONFIG_HOME"], "stenolog", "config.toml")
    assert (result.exit_code, result.stderr) == (
        0,
        f"No config file at {own}; defaults are used.\n",
    )


def test_all_invalid_settings_are_listed(
    steno: Steno, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write(file, "[cli]\nmarkdwn = true\n")
    monkeypatch.setenv("STENO_AGENT__MAX_ITERATIONS", "many")
    result = steno("config", "show")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.splitlines() == [
        "Error: 2 settings are invalid:",
        f"{file}: cli.markdwn: unknown setting; known ones are markdown, show_reasoning.",
        "STENO_AGENT__MAX_ITERATIONS: agent.max_iterations: must be a whole number from "
        "1 to 1,000.",
    ]


def test_missing_config_file_is_reported(steno: Steno) -> None:
    result = steno("config", "show", "--config", "nowhere.toml")
    assert (result.exit_code, result.stderr) == (1, "Error: nowhere.toml: there is no such file.\n")


def test_readable_api_key_file_gives_a_warning(steno: Steno, file: Path) -> None:
    _write(file, "[models.m]\nkey = 'sk'\n")
    file.chmod(0o644)
    result = steno("config", "show")
    assert result.exit_code == 0
    assert "Warning: " in result.stderr
    assert "contains models.m.key and can be read by other users" in result.stderr


def test_setting_value_cannot_control_the_terminal(steno: Steno, file: Path) -> None:
    _write(file, '[agent]\nsystem = "\\u001b[31m\\u202e"\n')
    shown = steno("config", "show").stdout
    assert 'agent.system = "\\u001b[31m\\u202e"' in shown
    assert "\x1b" not in shown


def test_p11_created_config_folders_are_private_with_any_umask(steno: Steno, file: Path) -> None:
    before = os.umask(0)
    try:
        assert steno("config", "init").exit_code == 0
        InputHistory(file.parents[1] / "state" / "stenolog" / "history").store_string("hello")
    finally:
        os.umask(before)
    made = [path for path in file.parents[1].rglob("*") if path.is_dir()]
    assert len(made) == 3
    for folder in (file.parents[1], *made):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700, folder


@pytest.mark.parametrize("command", ["view", "serve", "open"])
def test_invalid_option_is_reported_with_its_name(steno: Steno, command: str) -> None:
    result = steno(command, "--port", "99999")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == ("Error: --port: must be a whole number from 0 to 65,535.\n")


def test_path_in_a_terminal_says_that_the_file_is_missing(
    in_terminal: InTerminal, file: Path
) -> None:
    assert "The file does not exist." in in_terminal("config", "path")[1]
    _write(file, "")
    assert "not exist" not in in_terminal("config", "path")[1]
