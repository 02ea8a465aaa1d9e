"""`steno import` of coding agents' transcripts and chat exports."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from stenolog.cli.import_sessions import TRANSCRIPTS
from stenolog.stores.open_store import open_store
from stenolog.transfer.transcripts.programs import PROGRAMS, detect_program
from support.transcripts import SAMPLES

Steno = Callable[..., Result]
KEY = "claude-code:20c7a18b-7d9d-457e-bc34-7dfb461f0515"


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def test_the_command_knows_every_program() -> None:
    assert set(TRANSCRIPTS) == set(PROGRAMS)


def test_a_program_is_imported_from_its_usual_folder(
    steno: Steno, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(SAMPLES / "claude-code" / "projects", tmp_path / "claude" / "projects")
    monkeypatch.setenv("CLAUDE_CONFIG_DIR", str(tmp_path / "claude"))
    done = steno("import", "claude-code")
    assert done.exit_code == 0
    assert f"{KEY}\t28\t28\n" in done.stdout
    assert "Imported 62 messages in 6 sessions" in done.stderr
    assert "left out" in done.stderr
    again = steno("import", "claude-code")
    assert (again.exit_code, again.stdout) == (0, "")
    assert "Imported 0 messages in 0 sessions; 6 sessions without new messages." in again.stderr
    with open_store("workspace") as store:
        assert store.info(KEY).meta["title"] == "Add a tide table to the harbour page"


def test_a_program_without_transcripts_is_an_error(
    steno: Steno, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CODEX_HOME", str(tmp_path))
    done = steno("import", "codex")
    assert done.exit_code == 1
    assert "steno import --from codex FOLDER" in done.stderr
    assert not Path("workspace").exists()


@pytest.mark.parametrize(
    ("place", "messages"),
    [
        ("codex/sessions", 52),
        ("chatgpt-export", 16),
        ("llm-logs", 15),
        ("gemini-cli", 10),
        ("opencode", 20),
        ("claude-ai-export", 8),
        ("open-webui", 5),
        ("aider", 9),
    ],
)
def test_the_program_of_a_path_is_detected(steno: Steno, place: str, messages: int) -> None:
    done = steno("import", str(SAMPLES / place))
    assert done.exit_code == 0
    assert f"Imported {messages} messages" in done.stderr


def test_a_dry_run_writes_nothing(steno: Steno) -> None:
    done = steno("import", str(SAMPLES / "codex" / "sessions"), "--dry-run")
    assert "Would import 52 messages in 6 sessions" in done.stderr
    assert not Path("workspace").exists()


def test_json_has_one_object_per_session(steno: Steno) -> None:
    done = steno("import", str(SAMPLES / "gemini-cli"), "--json")
    (fields,) = map(json.loads, done.stdout.splitlines())
    assert fields["program"] == "gemini-cli"
    assert (fields["added"], fields["messages"], fields["unchanged"]) == (10, 10, False)


def test_options_of_other_imports_are_rejected(steno: Steno) -> None:
    done = steno("import", str(SAMPLES / "codex"), "--map", "a=b")
    assert done.exit_code == 2
    assert "do not apply to transcripts" in done.stderr


@pytest.mark.parametrize(
    "name",
    ["picoclaw", "picoclaw-legacy", "zeroclaw", "nanobot", "strands", "langchain-history.json"],
)
def test_sessions_of_other_programs_are_not_taken_for_transcripts(name: str) -> None:
    assert detect_program(SAMPLES.parent / name) is None


@pytest.mark.parametrize("name", ["openai-agents.db", "adk.db"])
def test_databases_of_frameworks_are_not_taken_for_transcripts(name: str) -> None:
    assert detect_program(SAMPLES.parent / name) is None


def test_other_sessions_in_a_folder_come_before_transcripts(steno: Steno, tmp_path: Path) -> None:
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    (mixed / "cli_a.json").write_text('[{"role": "user", "content": "hello"}]')
    shutil.copy(SAMPLES / "aider" / ".aider.chat.history.md", mixed)
    done = steno("import", str(mixed))
    assert done.exit_code == 0
    assert "Imported 1 session, 1 message" in done.stderr
    assert "Imported 9 messages" in steno("import", "--from", "aider", str(mixed)).stderr


def test_names_alone_do_not_make_transcripts(tmp_path: Path) -> None:
    (tmp_path / ".aider.chat.history.md").touch()
    (tmp_path / "logs.db").touch()
    (tmp_path / "sub" / "deeper").mkdir(parents=True)
    (tmp_path / "sub" / "deeper" / "rollout-1.jsonl").touch()
    assert detect_program(tmp_path) is None


def test_a_folder_without_transcripts_of_the_program(steno: Steno, tmp_path: Path) -> None:
    done = steno("import", "--from", "codex", str(tmp_path))
    assert done.exit_code == 1
    assert "Imported 0 messages in 0 sessions." in done.stderr
