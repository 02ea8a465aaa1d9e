"""`steno hook`: the settings that it prints, and the import when a session ends."""

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from stenolog.stores.open_store import open_store
from support import needs
from support.cli import Steno
from support.transcripts import SAMPLES

PROJECT = SAMPLES / "claude-code" / "projects" / "-home-ada-harbour"
SESSION = "20c7a18b-7d9d-457e-bc34-7dfb461f0515"
WITH_SUBAGENT = "cbdd2046-99ed-4655-8da0-7133a40fa66b"


@pytest.fixture(autouse=True)
def claude(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Claude Code's folder, which does not exist yet."""
    monkeypatch.setenv("CLAUDE_CONFIG_DIR", str(tmp_path / "claude"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "claude"


def command_in(settings: str) -> str:
    """Return the command of the only hook in settings."""
    value = json.loads(settings)
    assert list(value) == ["hooks"]
    assert list(value["hooks"]) == ["SessionEnd"]
    [entry] = value["hooks"]["SessionEnd"]
    [hook] = entry["hooks"]
    assert hook["type"] == "command"
    return str(hook["command"])


def printed_command(steno: Steno, *arguments: str) -> str:
    """Return the command in the settings that `steno hook` prints."""
    done = steno("hook", *arguments)
    assert done.exit_code == 0
    return command_in(done.stdout)


def test_printed_settings_are_json_and_nothing_is_changed(steno: Steno, claude: Path) -> None:
    done = steno("hook")
    assert command_in(done.stdout) == (
        f"{sys.executable} -P -m stenolog hook run claude-code -w {Path.cwd() / 'workspace'}"
    )
    assert f"Paste this into {claude / 'settings.json'}." in done.stderr
    assert not claude.exists()
    assert list(Path.cwd().iterdir()) == []


def test_hook_has_the_chosen_workspace_and_agent(steno: Steno) -> None:
    command = printed_command(steno, "-w", "my talks", "--agent", "ada")
    assert command.endswith(f" -w '{Path.cwd() / 'my talks'}' --agent ada")


@pytest.mark.parametrize("words", [["install", "claude-code"], ["run"], ["--file", "x"]])
def test_other_words_are_wrong_usage(steno: Steno, words: list[str]) -> None:
    assert steno("hook", *words).exit_code == 2


@pytest.mark.parametrize("name", ["steno", "stenolog"])
def test_console_script_prints_itself_as_the_hook(name: str) -> None:
    script = shutil.which(name, path=str(Path(sys.executable).parent))
    if script is None:
        needs.lacking(f"the console script {name} is not installed")
    printed = subprocess.run(
        [script, "hook"], timeout=60, check=True, capture_output=True, text=True
    )
    command = command_in(printed.stdout)
    assert command == f"{script} hook run claude-code -w {Path.cwd() / 'workspace'}"
    # An empty input is wrong usage of the hook: the command starts, and logs that.
    done = run_hook(command, "")
    assert (done.returncode, done.stderr) == (0, "")
    assert "without a transcript_path" in log()


# --- the hook itself ----------------------------------------------------------------------------


def run_hook(command: str, text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["/bin/sh", "-c", command], cwd="/", input=text, capture_output=True, text=True, check=False
    )


def log() -> str:
    path = Path(os.environ["XDG_STATE_HOME"]) / "stenolog" / "hook.log"
    return path.read_text() if path.exists() else ""


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    "workspace",
    ["talks", "a b", "a'b", 'a"b', "$(touch pwned)", "a\nb; touch pwned", "é\u202e", "%s"],
)
def test_printed_command_imports_the_session_that_ended(
    steno: Steno, claude: Path, workspace: str
) -> None:
    command = printed_command(steno, "-w", workspace)
    project = claude / "projects" / "-home-ada-harbour"
    shutil.copytree(PROJECT, project)
    facts = {"session_id": SESSION, "transcript_path": str(project / f"{SESSION}.jsonl")}
    done = run_hook(command, json.dumps(facts))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    with open_store(Path(workspace)) as store:
        # The import runs in the background.
        next(store.follow(f"claude-code:{SESSION}", timeout=60))
        assert len(store.get_history(f"claude-code:{SESSION}", full=True)) == 28
        assert store.list_sessions() == [f"claude-code:{SESSION}"]
    assert [path.name for path in Path.cwd().iterdir()] == [workspace]
    assert log() == ""


def test_subagents_are_imported_with_their_session(steno: Steno) -> None:
    path = PROJECT / f"{WITH_SUBAGENT}.jsonl"
    assert steno("hook", "run", "claude-code", "--file", str(path)).exit_code == 0
    with open_store("workspace") as store:
        assert store.list_sessions() == [
            f"claude-code:{WITH_SUBAGENT}",
            f"claude-code:{WITH_SUBAGENT}:a7371e2533c617445",
        ]


@pytest.mark.parametrize("text", ["", "not JSON", "[]", '{"transcript_path": 7}'])
def test_hook_that_is_called_wrongly_does_not_fail_the_session(steno: Steno, text: str) -> None:
    done = run_hook(printed_command(steno), text)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert "without a transcript_path" in log()


def test_import_that_fails_is_in_the_log(steno: Steno, tmp_path: Path) -> None:
    done = steno("hook", "run", "claude-code", "--file", str(tmp_path / "gone.jsonl"))
    assert done.exit_code == 0
    (tmp_path / "file").touch()
    path = PROJECT / f"{SESSION}.jsonl"
    done = steno("hook", "run", "claude-code", "-w", str(tmp_path / "file"), "--file", str(path))
    assert (done.exit_code, done.output) == (0, "")
    first, second = log().splitlines()
    assert "gone.jsonl was not imported" in first
    assert f"{SESSION}.jsonl was not imported" in second
    path = Path(os.environ["XDG_STATE_HOME"]) / "stenolog" / "hook.log"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_folders_of_the_log_are_private_whatever_the_umask(
    steno: Steno, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    old_umask = os.umask(0)
    try:
        steno("hook", "run", "claude-code", "--file", "gone.jsonl")
    finally:
        os.umask(old_umask)
    path = tmp_path / ".local" / "state" / "stenolog" / "hook.log"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    folders = [folder for folder in path.parents if folder.is_relative_to(tmp_path / ".local")]
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in folders] == [0o700] * 3


def test_workspace_that_is_not_utf8_is_refused(steno: Steno) -> None:
    result = steno("hook", "-w", "/srv/\udcff")
    assert (result.exit_code, "is not UTF-8" in result.stderr) == (1, True)


def test_hook_does_not_load_sqlite() -> None:
    """Claude Code waits for the hook, so the hook imports only what it needs."""
    program = (
        "import sys, stenolog.cli.hook, stenolog.transfer.transcripts.claude_code, "
        "stenolog.transfer.transcripts.transcript_import; sys.exit('sqlite3' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
