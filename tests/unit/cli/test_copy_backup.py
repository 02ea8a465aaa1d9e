"""`steno copy` and `steno backup`: what they say, and with which exit code they end."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from stenolog.stores.open_store import open_store
from support.cli import InTerminal, Steno
from support.copied_stores import digests
from support.file_modes import obey_modes

__all__ = ["obey_modes"]


def _told(where: str) -> dict[str, tuple[str, str | None, str]]:
    with open_store(where) as store:
        return digests(store)


def _limited(command: str, *, blocks: int) -> subprocess.CompletedProcess[str]:
    """Run `steno` where no file may become longer than so many blocks of 1,024 bytes."""
    program = f"{sys.executable} -c \"from stenolog.cli import main; main(prog_name='steno')\""
    return subprocess.run(
        ["bash", "-c", f"ulimit -f {blocks}; {program} {command}"],
        check=False,
        capture_output=True,
        text=True,
    )


@pytest.mark.usefixtures("place", "obey_modes")
@pytest.mark.parametrize("command", [("backup", "b"), ("copy", "workspace", "sqlite:new.db")])
def test_unreadable_session_is_reported_and_the_others_are_copied(
    steno: Steno, command: tuple[str, ...]
) -> None:
    Path("workspace/sessions/telegram%3A123.jsonl").chmod(0)
    result = steno(*command)
    assert result.exit_code == 3
    [line] = result.stdout.splitlines()
    assert line.startswith("sessions\ttelegram:123\topening workspace/sessions/telegram%3A123")
    assert "Permission denied" in line
    assert "Verified 2 sessions: identical on both sides" in result.stderr


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("target", ["other", "sqlite:other.db"])
@pytest.mark.slow
def test_copy_continues_after_a_full_disk(target: str) -> None:
    with open_store("workspace") as store:
        store.add_messages("large", [{"n": "x" * 1000} for _ in range(2_000)])
    result = _limited(f"copy workspace {target}", blocks=400)
    assert result.returncode == 1
    assert "Nothing of it was stored" in result.stderr
    there = _told(target) if Path("other").exists() or Path("other.db").exists() else {}
    assert there.items() <= _told("workspace").items()
    assert "large" not in {key for key, _, _ in there.values()}
    assert [path.name for path in Path().rglob("*.copy")] == []
    assert _limited(f"copy workspace {target}", blocks=100_000).returncode == 0
    assert _told(target) == _told("workspace")


@pytest.mark.usefixtures("place")
def test_read_only_source_is_copied(steno: Steno) -> None:
    steno("copy", "workspace", "sqlite:one.db")
    folders = [Path("workspace"), Path("workspace/sessions")]
    for path in (*folders, *Path("workspace/sessions").iterdir(), Path("one.db")):
        path.chmod(0o500 if path.is_dir() else 0o400)
    try:
        assert steno("copy", "workspace", "two").exit_code == 0
        assert steno("copy", "sqlite:one.db", "three").exit_code == 0
    finally:
        for path in folders:
            path.chmod(0o700)
    assert _told("two") == _told("three")


@pytest.mark.usefixtures("place")
def test_terminal_shows_a_transient_progress_bar(in_terminal: InTerminal) -> None:
    code, shown = in_terminal("copy", "workspace", "other")
    assert code == 0
    assert "messages" in shown
    assert "Verified 3 sessions: identical on both sides" in shown
    assert "\x1b[2K" in shown or "\x1b[K" in shown or "\x1b[1A" in shown


# --- backup ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("place")
def test_backup_is_a_copy_that_is_copied_back(steno: Steno) -> None:
    made = steno("backup", "kept")
    assert (made.exit_code, made.stdout) == (0, "")
    assert "Copied 3 sessions, 7 messages" in made.stderr
    assert "Verified 3 sessions: identical on both sides." in made.stderr
    assert _told("kept") == _told("workspace")
    with open_store("workspace") as store:
        store.admin.purge("telegram:123")
    restored = steno("copy", "kept", "workspace")
    assert (restored.exit_code, restored.stdout) == (0, "")
    assert "Copied 1 session, " in restored.stderr
    assert _told("kept") == _told("workspace")


def test_p3_copy_reports_a_damaged_session(steno: Steno, tmp_path: Path) -> None:
    with open_store(tmp_path / "w") as store:
        for text in ("one", "Ada", "three"):
            store.add_message("k", "user", text)
    log = tmp_path / "w" / "sessions" / "k.jsonl"
    log.write_bytes(log.read_bytes().replace(b"Ada", b"Eve"))
    result = steno("copy", str(tmp_path / "w"), f"sqlite:{tmp_path}/x.db")
    assert "k is damaged in the source: 1 message could not be read" in result.stderr
    examined = steno("doctor", "-w", f"sqlite:{tmp_path}/x.db")
    assert examined.exit_code == 1
    assert "lost message" in examined.stdout
    told = json.loads(
        steno("copy", str(tmp_path / "w"), f"sqlite:{tmp_path}/y.db", "--json").stdout
    )
    assert told["lost"] == 1
