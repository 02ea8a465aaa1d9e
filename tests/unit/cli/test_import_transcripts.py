"""`steno import` of coding agents' transcripts and chat exports."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stenolog.cli import import_transcripts
from stenolog.cli.import_sessions import NEEDED_PATHS, TRANSCRIPT_PROGRAMS
from stenolog.stores.jsonl.store import JSONLStore
from stenolog.stores.open_store import open_store
from stenolog.transfer.transcripts.programs import PROGRAMS
from support.cli import InTerminal, Steno, documented_columns
from support.file_modes import modes_of_root
from support.transcripts import SAMPLES

__all__ = ["modes_of_root"]

KEY = "claude-code:20c7a18b-7d9d-457e-bc34-7dfb461f0515"


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def test_the_command_knows_every_program() -> None:
    assert set(TRANSCRIPT_PROGRAMS) == set(PROGRAMS)


def test_very_long_source_is_cut_in_the_error(steno: Steno) -> None:
    failed = steno("import", "n" * 5_000)
    assert failed.exit_code == 2
    assert f" {'n' * 200}: there is no such file or folder. Known programs: " in failed.stderr
    assert len(failed.stderr) < 600


def test_every_other_program_has_a_usual_place() -> None:
    inherited = {name for name, reader in PROGRAMS.items() if "default_folder" not in vars(reader)}
    assert inherited == set(TRANSCRIPT_PROGRAMS) & set(NEEDED_PATHS)


def test_a_program_is_imported_from_its_usual_folder(
    steno: Steno, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(SAMPLES / "claude-code" / "projects", tmp_path / "claude" / "projects")
    monkeypatch.setenv("CLAUDE_CONFIG_DIR", str(tmp_path / "claude"))
    done = steno("import", "claude-code")
    assert done.exit_code == 0
    assert f"{KEY}\t28\t28\n" in done.stdout
    assert "Imported 71 messages in 6 sessions" in done.stderr
    again = steno("import", "claude-code")
    assert (again.exit_code, again.stdout) == (0, "")
    assert "Imported 0 messages in 0 sessions; 6 sessions without new messages." in again.stderr
    with open_store("workspace") as store:
        assert store.info(KEY).meta["title"] == "Add a tide table to the harbour page"


def test_help_names_each_column_of_a_pipe(steno: Steno) -> None:
    shown = steno("import", "--help").stdout
    transcripts = documented_columns(shown, "Columns of transcripts:")
    words = ["key", "messages added", "messages in the transcript"]
    assert len(transcripts) == len(words)
    assert all(word in column for word, column in zip(words, transcripts, strict=True))
    done = steno("import", str(SAMPLES / "claude-code" / "projects"))
    assert {row.count("\t") + 1 for row in done.stdout.splitlines()} == {len(transcripts)}

    others = documented_columns(shown, "Columns of other programs:")
    words = ["key", "messages added", "messages in the file", "layout", "file"]
    assert len(others) == len(words)
    assert all(word in column for word, column in zip(words, others, strict=True))
    Path("talk.json").write_text('[{"role": "user", "content": "hello"}]')
    done = steno("import", "talk.json")
    assert {row.count("\t") + 1 for row in done.stdout.splitlines()} == {len(others)}


def test_a_dry_run_counts_only_what_an_import_would_add(steno: Steno, tmp_path: Path) -> None:
    place = tmp_path / "projects"
    shutil.copytree(SAMPLES / "claude-code" / "projects", place)
    later = next(place.rglob("20c7a18b*.jsonl"))
    complete = later.read_bytes()
    shutil.copy(next((SAMPLES / "claude-code" / "earlier").rglob("20c7a18b*.jsonl")), later)
    new = next(place.rglob("cbdd2046*.jsonl"))
    moved = new.rename(tmp_path / new.name)
    steno("import", str(place))
    done = steno("import", str(place), "--dry-run")
    assert (done.exit_code, done.stdout) == (0, "")
    assert "Would import 0 messages in 0 sessions; 5 sessions without new messages." in done.stderr

    later.write_bytes(complete)
    moved.rename(new)
    before = {path: path.read_bytes() for path in Path("workspace").rglob("*") if path.is_file()}
    would = steno("import", str(place), "--dry-run", "--json")
    assert before == {path: path.read_bytes() for path in before}
    imported = steno("import", str(place), "--json")
    assert would.stdout == imported.stdout
    assert would.stderr == imported.stderr.replace("Imported", "Would import")
    assert "Would import 16 messages in 2 sessions" in would.stderr


def test_dry_run_counts_a_transcript_that_is_found_twice_once(steno: Steno, tmp_path: Path) -> None:
    place = tmp_path / "projects"
    shutil.copytree(SAMPLES / "claude-code" / "projects", place)
    later = next(place.rglob("20c7a18b*.jsonl"))
    copy = place / "zz" / later.name
    copy.parent.mkdir()
    shutil.copy2(later, copy)
    would = steno("import", str(place), "--dry-run")
    imported = steno("import", str(place))
    assert would.stdout == imported.stdout
    assert would.stderr == "Would import 71 messages in 6 sessions.\n"
    assert imported.stderr == "Imported 71 messages in 6 sessions.\n"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder with transcripts of Claude Code and Codex."""
    shutil.copytree(SAMPLES / "claude-code" / "projects", tmp_path / ".claude" / "projects")
    shutil.copytree(SAMPLES / "codex" / "sessions", tmp_path / ".codex" / "sessions")
    for name in ("CLAUDE_CONFIG_DIR", "CODEX_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.usefixtures("modes_of_root")
@pytest.mark.parametrize(
    ("program", "closed", "named"),
    [
        ("claude-code", ".claude/projects", ".claude/projects"),
        ("claude-code", ".claude", ".claude/projects"),
        ("codex", ".codex/sessions", ".codex/sessions"),
    ],
)
def test_unreadable_folder_is_named(
    steno: Steno, home: Path, program: str, closed: str, named: str
) -> None:
    (home / closed).chmod(0)
    done = steno("import", program)
    (home / closed).chmod(0o700)
    assert done.exit_code == 3
    assert done.stderr.splitlines() == [
        f"{home / named} cannot be read: Permission denied",
        "Imported 0 messages in 0 sessions.",
    ]
    assert not Path("workspace").exists()


@pytest.mark.usefixtures("modes_of_root")
@pytest.mark.parametrize("program", ["claude-code", "codex"])
def test_unreadable_subfolder_does_not_hide_the_others(
    steno: Steno, home: Path, program: str
) -> None:
    places = {"claude-code": ".claude/projects", "codex": ".codex/sessions"}
    closed = home / places[program] / "a-folder"
    closed.mkdir(0)
    done = steno("import", program)
    assert done.exit_code == 3
    assert f"{closed} cannot be read: Permission denied\n" in done.stderr
    assert " in 6 sessions" in done.stderr


@pytest.mark.usefixtures("modes_of_root")
def test_unreadable_transcript_is_named_once(steno: Steno, home: Path) -> None:
    closed = next(home.rglob("20c7a18b*.jsonl"))
    closed.chmod(0)
    done = steno("import", "claude-code")
    assert done.exit_code == 3
    assert f"{closed} was skipped: Permission denied\n" in done.stderr
    assert done.stderr.count(str(closed)) == 1


def test_a_large_import_shows_its_progress_in_a_terminal(
    in_terminal: InTerminal, tmp_path: Path
) -> None:
    text = (PROJECT / f"{SESSION}.jsonl").read_bytes()
    for number in range(12):
        append(tmp_path / "p" / f"{SESSION[:-2]}{number:02}.jsonl", _other_ids(text, number))
    code, shown = in_terminal("import", "--from", "claude-code", str(tmp_path / "p"))
    assert code == 0
    assert "Importing ━━━" in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown)
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
    return json.loads(re.sub(r', "usage": \{"prompt"[^}]*\}', "", text))  # type: ignore[no-any-return]


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
    # A fork that appears later has copies of records of the first session.
    append(folder / PROJECT.name / f"{FORK}.jsonl", (PROJECT / f"{FORK}.jsonl").read_bytes())
    assert running.event() == f"claude-code:{FORK}\t11"
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


def test_watch_imports_an_unchanged_file_when_the_session_is_no_longer_leased(
    steno: Steno,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = (PROJECT / f"{SESSION}.jsonl").read_bytes().splitlines(keepends=True)
    folder = tmp_path / "projects"
    path = folder / PROJECT.name / f"{SESSION}.jsonl"
    append(path, b"".join(lines[:60]))
    steno("import", "--from", "claude-code", str(folder))
    append(path, b"".join(lines[60:]))
    with JSONLStore("workspace", busy_timeout=0) as store, JSONLStore("workspace") as other:
        command = import_transcripts.TranscriptsCommand("claude-code", folder, store)
        lease = other.lease(KEY, ttl=60)
        printed: list[str] = []

        def pause(_seconds: float) -> None:
            printed.append(capsys.readouterr().out)
            lease.release()
            if len(printed) == 3:
                raise KeyboardInterrupt

        monkeypatch.setattr(import_transcripts, "time", SimpleNamespace(sleep=pause))
        with pytest.raises(KeyboardInterrupt):
            command.watch()
    assert printed == ["", f"{KEY}\t9\n", ""]


@pytest.mark.parametrize(
    ("error", "tries"), [(OSError("the file is damaged"), 1), (PermissionError(13, "denied"), 3)]
)
def test_watch_tries_an_unchanged_file_again_only_if_that_may_help(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError, tries: int
) -> None:
    append(tmp_path / f"{SESSION}.jsonl", (PROJECT / f"{SESSION}.jsonl").read_bytes())
    calls: list[str] = []

    def fail(*_arguments: object) -> None:
        calls.append("import")
        raise error

    def pause(_seconds: float) -> None:
        calls.append("pause")
        if calls.count("pause") == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(import_transcripts, "import_transcript", fail)
    monkeypatch.setattr(import_transcripts, "time", SimpleNamespace(sleep=pause))
    with JSONLStore("workspace") as store, pytest.raises(KeyboardInterrupt):
        import_transcripts.TranscriptsCommand("claude-code", tmp_path, store).watch()
    assert calls.count("import") == tries


def _other_ids(text: bytes, number: int) -> bytes:
    """Return a transcript whose records have other uuids."""
    return re.sub(rb"([0-9a-f]{8})(-[0-9a-f]{4}-4)", rb"\g<1>%b" % (b"-%04x-4" % number), text)
