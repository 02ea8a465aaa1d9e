"""`steno doctor sqlite:FILE`, and a workspace with other files next to the logs."""

import shutil
from pathlib import Path

import apsw
from click.testing import CliRunner, Result

import stenolog
from stenolog.cli import main

SAMPLES = Path(__file__).parents[2] / "samples"


def doctor(place: str, *more: str) -> Result:
    return CliRunner().invoke(main, ["doctor", place, *more])


def test_p3_missing_rows_are_reported_and_the_database_is_unchanged(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    file = tmp_path / "steno.db"
    with stenolog.open_store(f"sqlite:{file}") as store:
        store.add_messages("a", [{"role": "user", "content": "x"}] * 3)
    connection = apsw.Connection(str(file))
    connection.execute("DELETE FROM message WHERE seq = 2")
    connection.close()
    before = file.read_bytes()
    for more in ([], ["--repair"]):
        ended = doctor(f"sqlite:{file}", *more)
        assert ended.exit_code == 1
        assert "a" in ended.stdout.splitlines()[0]
        assert "What to do:" in ended.stdout
    assert file.read_bytes() == before


def test_missing_database_is_not_created(tmp_path: Path) -> None:
    ended = doctor(f"sqlite:{tmp_path / 'nothing.db'}")
    assert ended.exit_code == 3
    assert "there is no such file" in ended.stderr
    assert list(tmp_path.iterdir()) == []


def test_other_files_next_to_logs_are_not_findings(tmp_path: Path) -> None:
    workspace = tmp_path / "workspace"
    shutil.copytree(SAMPLES / "picoclaw", workspace / "sessions")
    workspace.chmod(0o700)
    (workspace / "sessions").chmod(0o700)
    stenolog.open_sessions(workspace).close()
    with stenolog.open_store(workspace) as store:
        key = store.list_sessions()[0]
        store.lease(key, ttl=5).release()
        store.fork(key, "fork")
        store.delete("fork")
    for command in (["list", str(workspace)], ["search", "a", "-w", str(workspace)]):
        CliRunner().invoke(main, command)
    ended = doctor(str(workspace))
    kinds = {line for line in ended.stdout.splitlines() if line and not line.startswith(" ")}
    assert kinds <= {"wide permissions"}, ended.stdout
