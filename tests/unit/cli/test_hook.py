"""`steno hook`: changes of Claude Code's settings, and the import when a session ends."""

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

SETTINGS = [
    "{}",
    "{}\n",
    '{\n  "model": "opus"\n}\n',
    '{"model":"opus","n":1.50,"e":1e5,"text":"\\u00e9 é"}',
    '{\r\n\t"hooks": {\r\n\t\t"Stop": []\r\n\t},\r\n\t"z" : [1,\r\n2]\r\n}\r\n',
    '{\n    "hooks": {\n        "SessionEnd": [\n            {"hooks": [{"type": "command", '
    '"command": "say bye"}]}\n        ]\n    }\n}',
    '{"a": 1, "a": 2, "hooks": {"Stop": [], "SessionEnd": [{"hooks": []}]}}',
]


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "claude"
    folder.mkdir()
    monkeypatch.setenv("CLAUDE_CONFIG_DIR", str(folder))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return folder / "settings.json"


def commands(settings: Path) -> list[str]:
    entries = json.loads(settings.read_text())["hooks"]["SessionEnd"]
    return [hook["command"] for entry in entries for hook in entry["hooks"]]


@pytest.mark.parametrize("text", SETTINGS)
def test_the_rest_of_the_settings_stays_byte_for_byte(
    steno: Steno, settings: Path, text: str
) -> None:
    settings.write_bytes(text.encode())
    settings.chmod(0o640)
    assert steno("hook", "install", "claude-code").exit_code == 0
    changed = settings.read_bytes()
    assert [one for one in commands(settings) if one != "say bye"] == [
        f"{sys.executable} -P -m stenolog hook run claude-code -w {Path.cwd() / 'workspace'}"
    ]
    before, after = json.loads(text), json.loads(changed)
    assert {**after, "hooks": None} == {**before, "hooks": None}
    assert stat.S_IMODE(settings.stat().st_mode) == 0o640
    assert list(settings.parent.iterdir()) == [settings]
    again = steno("hook", "install", "claude-code")
    assert (again.exit_code, settings.read_bytes()) == (0, changed)
    assert "already" in again.stderr
    assert "Removed" in steno("hook", "remove", "claude-code").stderr
    assert settings.read_bytes() == text.encode()
    assert "no hook" in steno("hook", "remove", "claude-code").stderr


def test_settings_that_do_not_exist_are_created_for_their_owner(
    steno: Steno, settings: Path
) -> None:
    assert steno("hook", "install", "claude-code", "-w", "my talks").exit_code == 0
    assert stat.S_IMODE(settings.stat().st_mode) == 0o600
    assert commands(settings)[0].endswith(f"-w '{Path.cwd() / 'my talks'}'")


def test_a_hook_for_another_workspace_replaces_the_first(steno: Steno, settings: Path) -> None:
    settings.write_text('{"hooks": {"SessionEnd": [{"hooks": [{"command": "say bye"}]}]}}')
    steno("hook", "install", "claude-code", "-w", "a")
    steno("hook", "install", "claude-code", "-w", "b")
    assert [command.split()[-1] for command in commands(settings)] == [
        "bye",
        str(Path("b").absolute()),
    ]


def test_commands_that_the_user_added_to_the_entry_stay(steno: Steno, settings: Path) -> None:
    steno("hook", "install", "claude-code")
    value = json.loads(settings.read_text())
    value["hooks"]["SessionEnd"][0]["hooks"].append({"type": "command", "command": "say bye"})
    settings.write_text(json.dumps(value))
    steno("hook", "remove", "claude-code")
    assert commands(settings) == ["say bye"]


def test_a_dry_run_prints_the_difference(steno: Steno, settings: Path) -> None:
    settings.write_text('{\n  "model": "opus"\n}\n')
    done = steno("hook", "install", "claude-code", "--dry-run")
    assert done.exit_code == 0
    assert '+  "hooks": {' in done.stdout
    assert "Would install" in done.stderr
    assert settings.read_text() == '{\n  "model": "opus"\n}\n'


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"hooks": []}', '{"hooks": {"SessionEnd": {}}}', "// x\n{}", "\ufeff{}"]
)
@pytest.mark.parametrize("action", ["install", "remove"])
def test_settings_of_an_unknown_form_are_not_changed(
    steno: Steno, settings: Path, text: str, action: str
) -> None:
    settings.write_text(text)
    done = steno("hook", action, "claude-code")
    assert done.exit_code == 1
    assert "not changed" in done.stderr
    assert settings.read_text() == text


def test_a_link_to_the_settings_stays_a_link(steno: Steno, settings: Path, tmp_path: Path) -> None:
    (tmp_path / "dotfiles.json").write_text("{}")
    settings.symlink_to(tmp_path / "dotfiles.json")
    steno("hook", "install", "claude-code")
    assert settings.is_symlink()
    assert "SessionEnd" in (tmp_path / "dotfiles.json").read_text()


def test_a_password_is_not_written_to_the_settings(steno: Steno, settings: Path) -> None:
    done = steno("hook", "install", "claude-code", "-w", "postgresql://ada:secret@localhost/db")
    assert done.exit_code == 1
    assert ".pgpass" in done.stderr
    assert not settings.exists()


def test_without_claude_code_nothing_is_created(steno: Steno, settings: Path) -> None:
    settings.parent.rmdir()
    done = steno("hook", "install", "claude-code")
    assert done.exit_code == 1
    assert "CLAUDE_CONFIG_DIR" in done.stderr
    assert not settings.parent.exists()


@pytest.mark.parametrize("name", ["steno", "stenolog"])
def test_a_console_script_installs_itself_as_the_hook(settings: Path, name: str) -> None:
    script = shutil.which(name, path=str(Path(sys.executable).parent))
    if script is None:
        needs.lacking(f"the console script {name} is not installed")
    subprocess.run(
        [script, "hook", "install", "claude-code"], timeout=60, check=True, capture_output=True
    )
    workspace = Path.cwd() / "workspace"
    assert commands(settings) == [f"{script} hook run claude-code -w {workspace}"]
    # An empty input is wrong usage of the hook: the command starts, and logs that.
    done = run_hook(commands(settings)[0], "")
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


def test_the_installed_command_imports_the_session_that_ended(
    steno: Steno, settings: Path, tmp_path: Path
) -> None:
    steno("hook", "install", "claude-code")
    project = tmp_path / "claude" / "projects" / "-home-ada-harbour"
    shutil.copytree(PROJECT, project)
    facts = {"session_id": SESSION, "transcript_path": str(project / f"{SESSION}.jsonl")}
    done = run_hook(commands(settings)[0], json.dumps(facts))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    with open_store("workspace") as store:
        # The import runs in the background.
        next(store.follow(f"claude-code:{SESSION}", timeout=60))
        assert len(store.get_history(f"claude-code:{SESSION}", full=True)) == 28
        assert store.list_sessions() == [f"claude-code:{SESSION}"]
    assert log() == ""


def test_subagents_are_imported_with_their_session(steno: Steno, settings: Path) -> None:
    del settings
    path = PROJECT / f"{WITH_SUBAGENT}.jsonl"
    assert steno("hook", "run", "claude-code", "--file", str(path)).exit_code == 0
    with open_store("workspace") as store:
        assert store.list_sessions() == [
            f"claude-code:{WITH_SUBAGENT}",
            f"claude-code:{WITH_SUBAGENT}:a7371e2533c617445",
        ]


@pytest.mark.parametrize("text", ["", "not JSON", "[]", '{"transcript_path": 7}'])
def test_a_hook_that_is_called_wrongly_does_not_fail_the_session(
    steno: Steno, settings: Path, text: str
) -> None:
    steno("hook", "install", "claude-code")
    done = run_hook(commands(settings)[0], text)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert "without a transcript_path" in log()


def test_an_import_that_fails_is_in_the_log(steno: Steno, settings: Path, tmp_path: Path) -> None:
    del settings
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


def test_workspace_that_is_not_utf8_is_refused(steno: Steno, settings: Path) -> None:
    settings.write_text("{}")
    result = steno("hook", "install", "claude-code", "-w", "/srv/\udcff")
    assert (result.exit_code, "is not UTF-8" in result.stderr) == (1, True)
    assert settings.read_text() == "{}"


def test_hook_does_not_load_sqlite() -> None:
    """Claude Code waits for the hook, so the hook imports only what it needs."""
    program = (
        "import sys, stenolog.cli.hook, stenolog.transfer.transcripts.claude_code, "
        "stenolog.transfer.transcripts.transcript_import; sys.exit('sqlite3' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
