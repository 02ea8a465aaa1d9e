"""`steno import` of coding agents' transcripts and chat exports."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from stenolog.cli.import_sessions import TRANSCRIPTS
from stenolog.stores.open_store import open_store
from stenolog.transfer.transcripts.programs import PROGRAMS, detect_program
from support.transcripts import SAMPLES

Steno = Callable[..., Result]
InTerminal = Callable[..., tuple[int, str]]
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


def test_a_large_import_shows_its_progress_in_a_terminal(
    in_terminal: InTerminal, tmp_path: Path
) -> None:
    text = (PROJECT / f"{SESSION}.jsonl").read_bytes()
    for number in range(12):
        append(tmp_path / "p" / f"{SESSION[:-2]}{number:02}.jsonl", _other_ids(text, number))
    code, shown = in_terminal("import", "--from", "claude-code", str(tmp_path / "p"))
    assert code == 0
    assert "Importing  [####" in shown
    assert "100%" in shown


# --- --watch -------------------------------------------------------------------------------------

PROJECT = SAMPLES / "claude-code" / "projects" / "-home-ada-harbour"
SESSION = "20c7a18b-7d9d-457e-bc34-7dfb461f0515"
FORK = "9e1eb1be-32e7-4220-a0bf-a63df7f38f75"


class Watching:
    """A process that runs `steno import --watch`; each line that it prints is an event."""

    def __init__(self, *arguments: str) -> None:
        # The interval only makes the test quick.
        program = (
            "from stenolog.cli import import_transcripts, main;"
            "import_transcripts.WATCH_SECONDS = 0.02; main(prog_name='steno')"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-c", program, "import", *arguments, "--watch"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if line.startswith("Watching"):
                return
        pytest.fail("it does not watch")

    def event(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def watch() -> Iterator[Callable[..., Watching]]:
    running: list[Watching] = []

    def start(*arguments: str) -> Watching:
        running.append(Watching(*arguments))
        return running[-1]

    yield start
    for one in running:
        one.kill()


def stored(place: str | Path) -> dict[str, Any]:
    """Return everything in a workspace that a second import would have to repeat exactly."""
    with open_store(place, read_only=True) as store:
        return {
            key: (
                [(one.at, one.to_dict()) for one in store.get_history(key, full=True)],
                [one.to_dict() for one in store.get_history(key)],
                store.get_summary(key),
                store.info(key).meta,
            )
            for key in store.list_sessions()
        }


def append(path: Path, text: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(text)


def without_usage(found: dict[str, Any]) -> dict[str, Any]:
    """Usage is on the last record of a response that was there when it was imported."""
    text = json.dumps(found, default=str)
    return json.loads(re.sub(r', "usage": \{[^}]*\}, "response": "[^"]*"', "", text))  # type: ignore[no-any-return]


def test_a_growing_file_is_imported_as_it_grows(
    watch: Callable[..., Watching], steno: Steno, tmp_path: Path
) -> None:
    lines = (PROJECT / f"{SESSION}.jsonl").read_bytes().splitlines(keepends=True)
    folder = tmp_path / "projects"
    folder.mkdir()
    path = folder / PROJECT.name / f"{SESSION}.jsonl"
    running = watch("--from", "claude-code", str(folder))
    # The file appears later, and its last line is not complete yet.
    append(path, b"".join(lines[:20]) + lines[20][:50])
    key, count = running.event().split("\t")
    assert key == KEY
    total = int(count)
    append(path, lines[20][50:] + b"".join(lines[21:60]))
    while total < 19:
        total += int(running.event().split("\t")[1])
    assert total == 19
    append(path, b"".join(lines[60:]))
    while total < 28:
        total += int(running.event().split("\t")[1])
    # A fork that appears later repeats records of the first session, and adds only its own.
    append(folder / PROJECT.name / f"{FORK}.jsonl", (PROJECT / f"{FORK}.jsonl").read_bytes())
    assert running.event() == f"claude-code:{FORK}\t2"
    running.kill()
    steno("import", "--from", "claude-code", str(folder), "-w", "fresh")
    assert without_usage(stored("workspace")) == without_usage(stored("fresh"))


def test_a_watch_that_was_killed_is_continued_by_the_next_import(
    watch: Callable[..., Watching], steno: Steno, tmp_path: Path
) -> None:
    folder = tmp_path / "projects"
    copies = [folder / PROJECT.name / f"{SESSION[:-2]}{n:02}.jsonl" for n in range(8)]
    text = (PROJECT / f"{SESSION}.jsonl").read_bytes()
    folder.mkdir()
    running = watch("--from", "claude-code", str(folder))
    for number, path in enumerate(copies):
        # Each one is another conversation, with other ids.
        append(path, _other_ids(text, number))
    running.event()
    running.event()
    running.kill()
    assert steno("import", "--from", "claude-code", str(folder)).exit_code == 0
    steno("import", "--from", "claude-code", str(folder), "-w", "fresh")
    found = stored("workspace")
    assert len(found) == 8
    assert without_usage(found) == without_usage(stored("fresh"))


def _other_ids(text: bytes, number: int) -> bytes:
    """Return a transcript whose records have other uuids."""
    return re.sub(rb"([0-9a-f]{8})(-[0-9a-f]{4}-4)", rb"\g<1>%b" % (b"-%04x-4" % number), text)
