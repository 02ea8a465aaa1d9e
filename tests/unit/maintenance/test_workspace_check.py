"""Tests the doctor's examination of a folder: findings outside of logs, and no writes."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from binascii import crc32
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from click.testing import CliRunner

from stenolog.cli import main
from stenolog.errors import DamagedStore, UsageError
from stenolog.maintenance.log_damage import Kind
from stenolog.maintenance.repair import accept, repair
from stenolog.maintenance.workspace_check import examine
from stenolog.stores.admin import Finding
from stenolog.stores.jsonl import JSONLStore
from stenolog.stores.open_store import open_store
from support import needs

KEY = "telegram:123"
NAME = "telegram%3A123.jsonl"


def _findings(workspace: Path) -> list[tuple[str, str]]:
    return [(finding.kind, finding.path) for finding in examine(workspace).findings]


def _only(workspace: Path) -> Finding:
    (finding,) = examine(workspace).findings
    return finding


def _archives(workspace: Path) -> list[Path]:
    return sorted((workspace / "sessions" / "archive").glob("*/*"))


def _bytes(workspace: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(workspace)): path.read_bytes()
        for path in workspace.rglob("*")
        if path.is_file()
    }


def test_a_healthy_workspace_has_no_findings(compacted: Path) -> None:
    with open_store(compacted) as store:
        store.add_message("x" * 900, "user", "a key too long for a file name")

    report = examine(compacted)

    assert report.findings == ()
    assert report.sessions == 2


def test_workspace_without_sessions_is_healthy(tmp_path: Path) -> None:
    report = examine(tmp_path)
    assert (report.sessions, report.findings) == (0, ())


def test_missing_workspace_raises_clear_error(tmp_path: Path, workspace: Path) -> None:
    with pytest.raises(UsageError, match="no workspace at"):
        examine(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="give the workspace, which is its parent folder"):
        examine(workspace / "sessions")


def test_p11_symlinked_sessions_folder_is_not_followed(tmp_path: Path, workspace: Path) -> None:
    other = tmp_path / "other"
    other.mkdir(mode=0o700)
    (other / "sessions").symlink_to(workspace / "sessions")
    with pytest.raises(DamagedStore, match=r"symbolic link|is at this path"):
        examine(other)


def test_examine_writes_nothing(compacted: Path) -> None:
    log = compacted / "sessions" / NAME
    log.write_bytes(log.read_bytes() + b"{")
    (compacted / "sessions" / "empty.jsonl").touch(mode=0o600)
    before = _bytes(compacted)

    assert len(examine(compacted).findings) == 2

    assert _bytes(compacted) == before


@pytest.mark.parametrize("what", ["symlink", "folder", "pipe"])
def test_p11_non_file_in_place_of_a_log_is_reported(workspace: Path, what: str) -> None:
    place = workspace / "sessions" / "other.jsonl"
    match what:
        case "symlink":
            place.symlink_to(workspace / "sessions" / NAME)
        case "folder":
            place.mkdir()
        case _:
            os.mkfifo(place, 0o600)

    finding = _only(workspace)

    assert (finding.kind, finding.key) == (Kind.NOT_A_FILE, "other")
    assert ("symbolic link" in finding.meaning) == (what == "symlink")
    assert not finding.repairable


@pytest.mark.parametrize("name", ["archive", "trash", "locks"])
@pytest.mark.parametrize("what", ["file", "symlink"])
def test_p11_folder_of_stenolog_that_is_a_file_or_link_is_reported_and_not_followed(
    tmp_path: Path, workspace: Path, name: str, what: str
) -> None:
    (tmp_path / "outside").mkdir()
    place = workspace / "sessions" / name
    place.symlink_to(tmp_path / "outside") if what == "symlink" else place.write_bytes(b"")
    finding = _only(workspace)
    assert (finding.kind, finding.path) == (Kind.NOT_A_FILE, f"sessions/{name}")
    assert ("symbolic link" in finding.meaning) == (what == "symlink")


def test_other_files_next_to_the_logs_are_not_reported(workspace: Path) -> None:
    (workspace / "sessions" / "README.txt").write_text("mine")
    (workspace / "notes").mkdir()
    assert _findings(workspace) == []


def test_unreadable_log_is_reported(workspace: Path, log: Path) -> None:
    log.chmod(0)
    # Root may read everything, so the program becomes another user.
    program = (
        "import os; from stenolog.maintenance.workspace_check import examine\n"
        "if os.geteuid() == 0: os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "print(*[f'{f.kind}|{f.meaning}' for f in examine('workspace').findings])"
    )
    if os.geteuid() == 0:
        for place in (log, log.parent, workspace, workspace.parent):
            os.chown(place, 65534, 65534)

    ended = subprocess.run(
        [sys.executable, "-c", program],
        cwd=workspace.parent,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )

    assert ended.stdout.startswith("unreadable|The file or folder could not be read")
    assert "Permission denied" in ended.stdout


def test_p6_copied_log_is_reported(workspace: Path, log: Path) -> None:
    shutil.copy2(log, log.with_name("copy.jsonl"))
    finding = _only(workspace)
    assert (finding.kind, finding.key) == (Kind.WRONG_FILE_NAME, KEY)
    assert finding.path == "sessions/copy.jsonl"


# --- archives --------------------------------------------------------------------------------


def test_missing_archive_is_reported_with_its_seqs(compacted: Path) -> None:
    older, newer = _archives(compacted)
    newer.unlink()

    finding = _only(compacted)

    assert (finding.kind, finding.key, finding.lost) == (Kind.MISSING_ARCHIVE, KEY, ((5, 7),))
    assert finding.path == str(newer.relative_to(compacted))
    assert older.exists()


@pytest.mark.parametrize("damage", ["cut", "flipped", "not gzip", "symlink"])
def test_damaged_archive_is_reported(compacted: Path, damage: str) -> None:
    archive = _archives(compacted)[-1]
    packed = archive.read_bytes()
    match damage:
        case "cut":
            archive.write_bytes(packed[:-20])
        case "flipped":
            middle = len(packed) // 2
            archive.write_bytes(
                packed[:middle] + bytes([packed[middle] ^ 255]) + packed[middle + 1 :]
            )
        case "not gzip":
            archive.write_bytes(b"plain text")
        case _:
            archive.rename(compacted / "elsewhere")
            archive.symlink_to(compacted / "elsewhere")

    kinds = [kind for kind, _ in _findings(compacted)]

    assert kinds == [Kind.DAMAGED_ARCHIVE]


def test_p4_archives_of_a_missing_log_are_reported_and_not_moved(compacted: Path) -> None:
    (compacted / "sessions" / NAME).unlink()
    before = _bytes(compacted)

    assert [kind for kind, _ in _findings(compacted)] == [Kind.UNREFERENCED_ARCHIVE] * 2
    assert repair(compacted) == []

    assert _bytes(compacted) == before
    assert len(_findings(compacted)) == 2


@pytest.mark.parametrize("length", [0, 15, 41])
@pytest.mark.parametrize("is_deleted", [False, True])
def test_p3_log_cut_in_its_first_line_beside_its_archives_is_reported_as_damage(
    compacted: Path, length: int, *, is_deleted: bool
) -> None:
    path = compacted / "sessions" / NAME
    if is_deleted:
        with open_store(compacted) as store:
            store.delete(KEY)
        [path] = (compacted / "sessions" / "trash").iterdir()
    os.truncate(path, length)
    before = _bytes(compacted)

    log_finding, *archive_findings = examine(compacted).findings

    assert (log_finding.kind, log_finding.repairable) == (Kind.DAMAGED_LINE, False)
    assert "no message in this file can be read" in log_finding.meaning
    assert [finding.kind for finding in archive_findings] == [Kind.UNREFERENCED_ARCHIVE] * 2
    assert repair(compacted) == []
    assert _bytes(compacted) == before


def test_p3_log_cut_in_its_first_line_in_the_trash_is_reported_as_damage(workspace: Path) -> None:
    with open_store(workspace) as store:
        uid = store.delete(KEY).uid
    [log] = (workspace / "sessions" / "trash").iterdir()
    os.truncate(log, 41)

    finding = _only(workspace)

    assert (finding.kind, finding.repairable) == (Kind.DAMAGED_LINE, False)
    assert f"`steno purge {uid}`" in finding.advice
    assert repair(workspace) == []
    with open_store(workspace) as store:
        store.admin.purge(uid)
    assert examine(workspace).findings == ()
    assert not log.exists()


@pytest.mark.parametrize(
    "obscure", ["a newer log", "an unknown folder", "an odd log in the trash", "an unreadable log"]
)
def test_archives_of_unreadable_sessions_are_left_alone(compacted: Path, obscure: str) -> None:
    log = compacted / "sessions" / NAME
    match obscure:
        case "a newer log":
            log.write_bytes(_newer(log.read_bytes()))
        case "an unknown folder":
            log.parent.joinpath("elsewhere").mkdir(mode=0o700)
            log.rename(log.parent / "elsewhere" / NAME)
        case "an odd log in the trash":
            log.parent.joinpath("trash").mkdir(mode=0o700)
            log.rename(log.parent / "trash" / NAME)
        case _:
            log.rename(compacted / "elsewhere")
            log.symlink_to(compacted / "elsewhere")

    kinds = {kind for kind, _ in _findings(compacted)}

    assert Kind.UNREFERENCED_ARCHIVE not in kinds


def _newer(text: bytes) -> bytes:
    def signed(line: bytes) -> bytes:
        body = line.rpartition(b',"crc":"')[0].replace(b'"format":1', b'"format":2')
        return b'%b,"crc":"%08x"}\n' % (body, crc32(body))

    return b"".join(map(signed, text.splitlines()))


def test_temporary_files_of_an_interrupted_write_are_no_findings(compacted: Path) -> None:
    folder = compacted / "sessions"
    for path in (folder / f".{NAME}.new", _archives(compacted)[0].parent / ".8-9.jsonl.gz.new"):
        path.write_bytes(b"half")
    assert examine(compacted).findings == ()


def test_p7_write_in_progress_is_not_a_torn_tail(workspace: Path, log: Path) -> None:
    """A writer that holds the lock finishes its line while the doctor waits."""
    program = """
import fcntl, sys
with open(sys.argv[1], "r+b") as log:
    text = log.read()
    fcntl.flock(log, fcntl.LOCK_EX)
    log.truncate(len(text) - 20)
    print("half", flush=True)
    sys.stdin.readline()
    log.seek(len(text) - 20)
    log.write(text[-20:])
"""
    with (
        subprocess.Popen(
            [sys.executable, "-c", program, str(log)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as writer,
        ThreadPoolExecutor() as pool,
    ):
        assert writer.stdout is not None
        assert writer.stdin is not None
        assert writer.stdout.readline() == "half\n"
        report = pool.submit(examine, workspace)
        with pytest.raises(TimeoutError):
            report.result(timeout=0.3)
        writer.stdin.write("go on\n")
        writer.stdin.flush()

        assert report.result().findings == ()
    assert writer.returncode == 0


def test_p7_no_findings_during_writes_and_compaction(workspace: Path) -> None:
    ended = threading.Event()

    def talk() -> None:
        with JSONLStore(workspace, busy_timeout=60) as store:
            while not ended.is_set():
                store.add_messages(KEY, [{"role": "user", "content": "x" * 500}] * 3)

    def compact() -> None:
        with JSONLStore(workspace, busy_timeout=60) as store:
            while not ended.is_set():
                store.truncate_history(KEY, 2)
                store.compact(KEY)

    with ThreadPoolExecutor() as pool:
        others = [pool.submit(talk), pool.submit(compact)]
        try:
            found = [finding for _ in range(8) for finding in examine(workspace).findings]
        finally:
            ended.set()
        for other in others:
            other.result()

    assert found == []
    assert examine(workspace).findings == ()


# --- the trash, the locks, the index ---------------------------------------------------------


def _trashed(workspace: Path) -> Path:
    [path] = (workspace / "sessions" / "trash").glob("*.jsonl")
    return path


def test_a_deleted_session_is_examined_with_its_archives(compacted: Path) -> None:
    with open_store(compacted) as store:
        store.delete(KEY)
        store.add_message(KEY, "user", "the next life")
        store.lease(KEY, ttl=60).release()
    for name in ("catalog.db", "catalog.db-journal", "catalog.db.lock"):
        (compacted / "sessions" / name).touch(mode=0o600)

    report = examine(compacted)

    assert report.findings == ()
    assert report.sessions == 2


def test_damage_in_a_deleted_session_is_reported(compacted: Path) -> None:
    with open_store(compacted) as store:
        store.delete(KEY)
    log = _trashed(compacted)
    log.write_bytes(log.read_bytes().replace(b'"newest"', b'"edited"'))
    _archives(compacted)[0].unlink()

    found = {finding.kind: finding for finding in examine(compacted).findings}

    assert found.keys() == {Kind.HAND_EDIT, Kind.MISSING_ARCHIVE}
    assert all(finding.key == KEY for finding in found.values())
    assert found[Kind.HAND_EDIT].path == str(log.relative_to(compacted))
    assert found[Kind.MISSING_ARCHIVE].path.startswith("sessions/archive/")


def test_interrupted_write_in_a_deleted_session_is_not_a_finding(workspace: Path) -> None:
    log = workspace / "sessions" / NAME
    log.write_bytes(log.read_bytes() + b'{"kind":"message","se')
    with open_store(workspace) as store:
        store.delete(KEY)
    assert _findings(workspace) == []


def test_many_foreign_logs_are_one_finding_with_one_command(
    tmp_path: Path,
) -> None:
    place = tmp_path / "workspace" / "sessions"
    place.mkdir(parents=True, mode=0o700)
    place.parent.chmod(0o700)
    for name in ("a_1", "b_2", "c_3"):
        log = place / f"{name}.jsonl"
        log.write_text('{"role":"user","content":"x"}\n')
        log.chmod(0o600)
    report = examine(place.parent)
    [finding] = report.findings
    assert report.sessions == 3
    assert (finding.kind, finding.key) == (Kind.FOREIGN_LOG, None)
    assert (finding.path, finding.where) == ("sessions/a_1.jsonl", "and 2 more")
    command = re.search("`steno (.+)` imports them", finding.advice)
    assert command is not None

    assert CliRunner().invoke(main, shlex.split(command[1])).exit_code == 0
    with open_store(place.parent) as store:
        assert len(store.list_sessions()) == 3


def test_foreign_log_finding_names_the_import_command(
    tmp_path: Path,
) -> None:
    place = tmp_path / "my workspace" / "sessions"
    place.mkdir(parents=True, mode=0o700)
    place.parent.chmod(0o700)
    log = place / "a_1.jsonl"
    log.write_text('{"role":"user","content":"x"}\n')
    log.chmod(0o600)
    [finding] = examine(place.parent).findings
    assert finding.kind is Kind.FOREIGN_LOG
    with open_store(place.parent) as store, pytest.raises(DamagedStore) as caught:
        store.add_message("a_1", "user", "y")
    told = [re.search("`steno (.+)`", words) for words in (finding.advice, str(caught.value))]
    assert told[0] is not None
    assert told[1] is not None
    assert told[0][1] == told[1][1]

    assert CliRunner().invoke(main, shlex.split(told[0][1])).exit_code == 0
    with open_store(place.parent) as store:
        assert [message.content for message in store.get_history("a_1")] == ["x"]
    assert examine(place.parent).findings == ()


def test_database_path_is_not_examined_as_folder(tmp_path: Path) -> None:
    needs.package("apsw")
    file = tmp_path / "a.db"
    open_store(f"sqlite:{file}").close()
    for wrong in (examine, open_store):
        with pytest.raises(UsageError, match=f"use sqlite:{file}"):
            wrong(str(file))
    (tmp_path / "b.db").write_bytes(b"something else")
    with pytest.raises(UsageError, match=r"b.db is a file, not a folder"):
        examine(tmp_path / "b.db")


# --- agents and namespaces -------------------------------------------------------------------


def test_p3_damaged_log_of_an_agent_is_reported_and_repaired(workspace: Path, log: Path) -> None:
    for place, namespace in ((workspace / "agents" / "ada", "sessions"), (workspace, "notes")):
        with open_store(place, namespace=namespace) as store:
            store.add_message(KEY, "user", "one")
        with (place / namespace / NAME).open("ab") as file:
            file.write(b'{"kind":"mess')
    log.with_name("empty.jsonl").touch(mode=0o600)

    report = examine(workspace)

    assert report.sessions == 3 + 1
    assert [(f.kind, f.path) for f in report.findings] == [
        (Kind.EMPTY_FILE, "sessions/empty.jsonl"),
        (Kind.TORN_TAIL, f"notes/{NAME}"),
        (Kind.TORN_TAIL, f"agents/ada/sessions/{NAME}"),
    ]
    assert [one.done for one in repair(workspace)] == [True] * 3
    assert examine(workspace).findings == ()


def test_hand_edit_in_log_of_an_agent_is_accepted(workspace: Path) -> None:
    with open_store(workspace / "agents" / "ada") as store:
        store.add_message(KEY, "user", "one")
    log = workspace / "agents" / "ada" / "sessions" / NAME
    log.write_bytes(log.read_bytes().replace(b'"one"', b'"uno"'))
    (settled,) = accept(workspace)
    assert settled.message.startswith("accepted; the previous log is agents/ada/sessions/aside/")
    assert examine(workspace).findings == ()


def test_archives_of_a_deleted_session_of_an_agent_are_not_unreferenced(workspace: Path) -> None:
    with open_store(workspace / "agents" / "ada") as store:
        for content in ("one", "two"):
            store.add_message(KEY, "user", content)
        store.checkpoint(KEY, summary="one", upto=1)
        store.compact(KEY)
        store.delete(KEY)
    assert examine(workspace).findings == ()
    (archive,) = (workspace / "agents" / "ada" / "sessions" / "archive").glob("*/*.gz")
    archive.unlink()
    (missing,) = examine(workspace).findings
    assert missing.path.startswith("agents/ada/sessions/archive/")


def test_p11_symlinked_folder_of_an_agent_is_reported(workspace: Path, tmp_path: Path) -> None:
    (workspace / "agents" / "ada").mkdir(parents=True, mode=0o700)
    (workspace / "agents").chmod(0o700)
    (workspace / "agents" / "ada" / "sessions").symlink_to(tmp_path)
    (found,) = examine(workspace).findings
    assert (found.kind, found.path) == (Kind.UNREADABLE, "agents/ada/sessions")


def test_p11_each_folder_that_others_may_read_is_one_finding_with_command(workspace: Path) -> None:
    for place, namespace in ((workspace / "agents" / "ada", "sessions"), (workspace, "notes")):
        with open_store(place, namespace=namespace) as store:
            store.add_message(KEY, "user", "one")
    folders = (workspace, workspace / "notes", workspace / "agents" / "ada")
    for folder in folders:
        folder.chmod(0o750)
    findings = examine(workspace).findings
    assert {finding.kind for finding in findings} == {Kind.WIDE_PERMISSIONS}
    assert sorted((finding.meaning, finding.advice) for finding in findings) == sorted(
        (f"{folder} has mode 0750, so others may read your sessions.", f"chmod 700 {folder}")
        for folder in folders
    )


def test_wide_modes_of_another_program_are_not_reported(tmp_path: Path) -> None:
    folder = tmp_path / ".codex" / "sessions"
    folder.mkdir(parents=True, mode=0o755)
    (folder / "2026").mkdir(mode=0o755)
    assert examine(folder.parent).findings == ()


def test_p3_damage_in_any_namespace_of_a_database_is_reported(tmp_path: Path) -> None:
    needs.package("apsw")
    import apsw

    where = f"sqlite:{tmp_path}/steno.db"
    for namespace in ("sessions", "agents.ada", "notes"):
        with open_store(where, namespace=namespace) as store:
            store.add_message(KEY, "user", "one")
    connection = apsw.Connection(str(tmp_path / "steno.db"))
    connection.execute("UPDATE message SET crc = crc + 1")
    connection.close()
    report = examine(where)
    assert report.sessions == 3
    assert [f.kind for f in report.findings if f.kind == "damaged message"] == [
        "damaged message"
    ] * 3
