"""Which workspace a command looks at: the one named, or that of the settings."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stenolog.memory.notes import Draft, Notes
from stenolog.memory.scopes import Scope
from stenolog.stores.open_store import open_store
from stenolog.transfer.open_sessions import open_sessions
from support.cli import Steno


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A config file, and two places with a session and a note each: ours and Ada's."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "cli_9.jsonl").write_text('{"role":"user","content":"taken in"}\n')
    for where, agent in (("sqlite:ours.db", None), ("adas", "ada")):
        sessions = open_sessions(where, agent=agent)
        sessions.add_message(f"cli:of-{agent}", "user", "What about hazelnuts?")
        sessions.close()
        with open_store(where, namespace="notes") as notes:
            scope = Scope(agent=agent or "main", who="cli:1")
            Notes(notes).add(scope, [Draft(kind="core", text=f"A note of {agent}.")])
    file = tmp_path / "config.toml"
    file.write_text("[agent]\nsessions = 'sqlite:ours.db'\n[agents.ada]\nsessions = 'adas'\n")
    file.chmod(0o600)
    monkeypatch.setenv("STENO_CONFIG", str(file))
    return file


def test_every_command_uses_the_workspace_of_the_settings(steno: Steno, config: Path) -> None:
    assert config.exists()
    assert steno("list").stdout.startswith("cli:of-None\t1\t1\t")
    assert "hazelnuts" in steno("search", "hazelnuts").stdout
    assert "hazelnuts" in steno("show", "cli:of-None").stdout
    assert "hazelnuts" in steno("export", "cli:of-None").stdout
    assert "A note of None." in steno("memory", "list").stdout
    assert steno("doctor").stderr == "Checked 2 logs: no problems found.\n"
    assert steno("import", "old").exit_code == 0
    assert "taken in" in steno("list").stdout
    assert not Path("workspace").exists()


def test_agent_uses_the_workspace_of_its_settings(steno: Steno, config: Path) -> None:
    assert config.exists()
    assert steno("list", "--agent", "ada").stdout.startswith("cli:of-ada\t")
    assert "hazelnuts" in steno("search", "hazelnuts", "--agent", "ada").stdout
    assert "A note of ada." in steno("memory", "list", "--agent", "ada").stdout
    assert steno("memory", "list", "--agent", "main").stdout.count("A note of None.") == 1


def test_workspace_option_overrides_the_settings(steno: Steno, config: Path) -> None:
    assert "A note of ada." in steno("memory", "list", "-w", "adas").stdout
    config.write_text("agent.sessions = 3\n")
    # Where it is named, nobody needs the settings, right or wrong.
    for words in (("list", "adas"), ("list", "-w", "adas"), ("doctor", "adas"), ("list", "--help")):
        assert steno(*words).exit_code == 0, words


def test_workspace_can_be_set_by_a_variable(
    steno: Steno, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("STENO_CONFIG")
    monkeypatch.setenv("STENO_AGENT__SESSIONS", "sqlite:ours.db")
    assert config.exists()
    assert steno("list").stdout.startswith("cli:of-None\t")


@pytest.mark.parametrize(
    ("words", "code"), [("list", 1), ("search x", 1), ("memory list", 1), ("doctor", 3)]
)
def test_wrong_settings_are_reported_in_one_sentence(
    steno: Steno, config: Path, words: str, code: int
) -> None:
    config.write_text("[memory]\nzon = true\n")
    result = steno(*words.split())
    known = "known ones are consolidation, half_life_days, recall_tokens, zone"
    told = f"Error: {config}: memory.zon: unknown setting; {known}.\n"
    assert (result.exit_code, result.stdout, result.stderr) == (code, "", told)


def test_in_memory_sessions_cannot_be_listed(steno: Steno, config: Path) -> None:
    config.write_text("[agent]\nsessions = 'memory:'\n")
    result = steno("list")
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1


_AFTER = (
    "import sys\n"
    "from stenolog.cli import main\n"
    "try:\n    main(['list'], prog_name='steno')\n"
    "except SystemExit:\n    pass\n"
    "print([name for name in sys.modules if name.startswith('stenolog.settings.')])\n"
)


def test_settings_are_not_loaded_if_nothing_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for variable in [name for name in os.environ if name.startswith("STENO_")]:
        monkeypatch.delenv(variable)
    open_store("workspace").close()
    done = subprocess.run(
        [sys.executable, "-c", _AFTER], capture_output=True, text=True, check=True
    )
    assert done.stdout == "['stenolog.settings.file']\n"
    assert "There are no sessions" in done.stderr
