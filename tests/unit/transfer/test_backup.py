"""Backups: what changed is taken, damage is told, and nothing newer is overwritten."""

import json
import shutil
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest

from stenolog import DamagedStore, JSONLStore, SQLiteStore, StoreBusy, UsageError
from stenolog.stores.base import Store
from stenolog.stores.open_store import open_store
from stenolog.stores.snapshots import SnapshotStore
from stenolog.transfer import backup
from stenolog.transfer.backup import MANIFEST, back_up, restore, verify
from stenolog.transfer.copy import CopyStep
from stenolog.transfer.copy_all import copy_place, list_namespaces
from support import temporary_folders
from support.copied_stores import digests, everything, fill, go_on
from support.postgres_server import Databases


@pytest.fixture
def place() -> Iterator[Path]:
    with temporary_folders.folder() as path:
        yield path


@pytest.fixture
def where(place: Path) -> str:
    """A database with all that a session can have, notes, and an agent with a name."""
    found = f"sqlite:{place}/store.db"
    with open_store(found) as store:
        fill(store)
    with open_store(found, namespace="notes") as store:
        store.add_message("x", "user", "a note")
    with open_store(found, namespace="agents.ada") as store:
        store.add_message("a", "user", "to ada")
    return found


def _of(where: str, namespace: str = "sessions") -> dict[str, tuple[str, str | None, str]]:
    with open_store(where, namespace=namespace) as store:
        return digests(store)


def _tear(folder: Path, text: bytes) -> Path:
    """Damage the one file of a backup that says this."""
    [log] = [path for path in folder.rglob("*.jsonl") if text in path.read_bytes()]
    log.write_bytes(log.read_bytes().replace(text, text.swapcase()))
    return log


def test_a_backup_is_a_workspace_of_plain_text(place: Path, where: str) -> None:
    taken = back_up(where, str(place / "b"))
    assert (taken.problems, taken.kept) == (0, 0)
    folder = f"jsonl:{place}/b"
    assert list_namespaces(folder) == ["sessions", "notes", "agents.ada"]
    assert _of(folder) == _of(where)
    with open_store(folder) as store, open_store(where) as source:
        assert everything(store) == everything(source)
    with JSONLStore(place / "b/agents/ada") as store:
        assert [m.content for m in store.get_history("a")] == ["to ada"]
    found = verify(str(place / "b"))
    assert (found.findings, found.sessions) == ((), taken.sessions + taken.deleted)


def test_manifest_keeps_the_time_at_which_the_backup_started(
    place: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = (f"2026-01-01T00:00:{second:02}Z" for second in range(60))
    monkeypatch.setattr(backup, "_now", lambda: next(times))
    manifest_file = place / "backup" / MANIFEST
    started = list[str]()

    def note_start(_namespace: str, _step: CopyStep) -> None:
        started.append(json.loads(manifest_file.read_text())["begun"])

    back_up(where, str(place / "backup"), on_progress=note_start)
    manifest = json.loads(manifest_file.read_text())
    assert {manifest["begun"]} == set(started)
    assert manifest["begun"] < manifest["finished"]


def test_files_of_a_backup_are_private(place: Path, where: str) -> None:
    back_up(where, str(place / "b"))
    modes = {oct(path.stat().st_mode & 0o777) for path in (place / "b", *(place / "b").rglob("*"))}
    assert modes == {"0o700", "0o600"}


@pytest.mark.parametrize("engine", ["jsonl", "sqlite"])
def test_second_backup_reads_only_changed_sessions(place: Path, engine: str) -> None:
    where = f"jsonl:{place}/store" if engine == "jsonl" else f"sqlite:{place}/store.db"
    with open_store(where) as store:
        fill(store)
    back_up(where, str(place / "b"))
    looked: list[int] = []

    def watch(_: str, step: CopyStep) -> None:
        looked.append(step.total)

    assert back_up(where, str(place / "b"), on_progress=watch).written == 0
    assert max(looked) == 0
    with open_store(where) as store:
        go_on(store)
    taken = back_up(where, str(place / "b"))
    assert 0 < taken.written < taken.sessions + taken.deleted
    assert _of(f"jsonl:{place}/b") == _of(where)
    assert verify(str(place / "b")).findings == ()


def test_purged_session_stays_in_the_backup_and_is_counted(place: Path, where: str) -> None:
    back_up(where, str(place / "b"))
    with open_store(where) as store:
        store.purge("b/\u00e9:X")
    assert back_up(where, str(place / "b")).kept == 3
    assert verify(str(place / "b")).findings == ()


def test_damaged_session_is_reported_and_repaired_by_next_backup(place: Path, where: str) -> None:
    back_up(where, str(place / "b"))
    log = _tear(place / "b", b"a long key")
    [finding] = verify(str(place / "b")).findings
    assert (finding.namespace, finding.key[:3]) == ("sessions", "KKK")
    assert "damaged" in finding.reason
    log.unlink()
    [finding] = verify(str(place / "b")).findings
    assert "missing" in finding.reason
    back_up(where, str(place / "b"))
    assert verify(str(place / "b")).findings == ()


def test_changed_time_in_a_backup_is_damage(place: Path, where: str) -> None:
    back_up(where, str(place / "b"))
    shutil.rmtree(place / "b/notes")
    [finding] = verify(str(place / "b")).findings
    assert (finding.namespace, finding.reason) == ("notes", "the session is missing")


def test_damaged_manifest_is_reported(place: Path, where: str) -> None:
    back_up(where, str(place / "b"))
    manifest = place / "b" / MANIFEST
    text = json.loads(manifest.read_text())
    text["namespaces"]["notes"] = {}
    manifest.write_text(json.dumps(text))
    with pytest.raises(DamagedStore, match="is damaged"):
        verify(str(place / "b"))
    manifest.write_text("{")
    with pytest.raises(DamagedStore, match="is damaged"):
        back_up(where, str(place / "b"))
    manifest.write_text('{"format": 2, "source": "", "begun": ""}')
    with pytest.raises(DamagedStore, match="newer"):
        verify(str(place / "b"))


def test_interrupted_backup_is_reported_and_continued(place: Path, where: str) -> None:
    class CutError(Exception):
        pass

    def cut(namespace: str, step: CopyStep) -> None:
        if namespace == "sessions" and step.phase == "comparing":
            raise CutError

    back_up(where, str(place / "b"))
    with open_store(where) as store:
        go_on(store)
    with pytest.raises(CutError):
        back_up(where, str(place / "b"), on_progress=cut)
    found = verify(str(place / "b"))
    assert found.taken == ""
    assert {"interrupted" in finding.reason for finding in found.findings} == {True}
    back_up(where, str(place / "b"))
    assert verify(str(place / "b")).findings == ()


@pytest.mark.parametrize("there", ["jsonl:{}/restored", "sqlite:{}/restored.db"])
def test_backup_is_restored_completely_into_empty_store(
    place: Path, where: str, there: str
) -> None:
    back_up(where, str(place / "b"))
    target = there.format(place)
    copied, checked = restore(str(place / "b"), target)
    assert (copied.problems, checked.findings) == (0, ())
    assert _of(target) == _of(where)
    assert _of(target, "notes") == _of(where, "notes")
    with open_store(where) as one, open_store(target) as other:
        assert everything(other) == everything(one)


def test_restore_adds_missing_sessions_and_keeps_newer_ones(place: Path, where: str) -> None:
    back_up(where, str(place / "b"))
    with open_store(where) as store:
        store.purge("a")
        store.add_message("purged", "user", "newer")
        store.set_summary("fork", "newer")
        store.delete(LONG)
        before = digests(store)
    copied, _ = restore(str(place / "b"), where)
    problems = copied.namespaces["sessions"].problems
    assert {problem.key for problem in problems} == {"purged", "fork", LONG}
    assert all(problem.newer for problem in problems)
    after = _of(where)
    assert before.items() <= after.items()
    assert [key for uid, (key, _, _) in after.items() if uid not in before] == ["a"]


LONG = "K" * 900


def test_restore_skips_damaged_sessions(place: Path, where: str) -> None:
    back_up(where, str(place / "b"))
    _tear(place / "b", b"a long key")
    copied, checked = restore(str(place / "b"), f"jsonl:{place}/restored")
    assert ([finding.key for finding in checked.findings], copied.problems) == ([LONG], 0)
    restored = _of(f"jsonl:{place}/restored")
    assert {key for key, _, _ in _of(where).values()} - {k for k, _, _ in restored.values()} == {
        LONG
    }


def test_messages_lost_in_the_source_stay_in_its_backup(place: Path) -> None:
    where = f"jsonl:{place}/store"
    with open_store(where) as store:
        store.add_message("a", "user", "one")
        store.add_message("a", "user", "two")
    back_up(where, str(place / "b"))
    _tear(place / "store", b"one")
    with open_store(where) as store:
        store.add_message("a", "user", "three")
    [problem] = back_up(where, str(place / "b")).namespaces["sessions"].problems
    assert "lost messages" in problem.reason
    assert verify(str(place / "b")).findings == ()
    with JSONLStore(place / "b", read_only=True) as store:
        assert [m.content for m in store.get_history("a")] == ["one", "two"]


def test_backup_into_folder_with_other_files_is_rejected(place: Path, where: str) -> None:
    (place / "x").mkdir(mode=0o700)
    (place / "x/letter.txt").write_text("dear")
    with pytest.raises(UsageError, match="something else, not a backup"):
        back_up(where, str(place / "x"))
    with JSONLStore(place / "w") as store:
        store.add_message("a", "user", "one")
    with pytest.raises(UsageError, match="a workspace, not a backup"):
        back_up(where, str(place / "w"))
    with pytest.raises(UsageError, match="no backup in"):
        verify(str(place / "w"))
    assert (place / "x/letter.txt").read_text() == "dear"


def test_two_backups_into_one_folder_wait_for_each_other(
    place: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backup, "_LOCK_TIMEOUT", 0.01)
    refused: list[str] = []

    def watch(*_: object) -> None:
        if not refused:
            with pytest.raises(StoreBusy, match="another backup") as error:
                back_up(where, str(place / "b"))
            refused.append(str(error.value))

    assert back_up(where, str(place / "b"), on_progress=watch).problems == 0
    assert refused


def test_another_store_with_equal_stamps_is_not_mistaken_for_the_first(place: Path) -> None:
    for name in ("one", "two"):
        with SQLiteStore(place / f"{name}.db") as store:
            store.add_message(name, "user", "x")
    back_up(f"sqlite:{place}/one.db", str(place / "b"))
    taken = back_up(f"sqlite:{place}/two.db", str(place / "b"))
    assert (taken.written, taken.kept) == (1, 1)
    with JSONLStore(place / "b", read_only=True) as store:
        assert store.list_sessions() == ["one", "two"]


def test_aliases_open_their_session_in_a_copy(place: Path) -> None:
    from stenolog.sessions.aliases import Aliases

    def opens(store: Store) -> str:
        return Aliases(store).resolve_key("another name")

    source, target = f"jsonl:{place}/one", f"sqlite:{place}/two.db"
    with open_store(source) as store:
        store.update_marker("aliases")  # type: ignore[attr-defined]
        store.set_meta("a", aliases=["another name"])
        assert opens(store) == "a"
    with open_store(target) as store:
        known = Aliases(store)
        assert known.resolve_key("another name") == "another name"

        def look(*_: object) -> None:
            # Before anything was written: what is found is remembered.
            found.append(known.resolve_key("another name"))

        found: list[str] = []
        copy_place(source, target, on_progress=look)
        assert found[0] == "another name"
        assert known.resolve_key("another name") == "a"


@pytest.mark.parametrize("anew", [False, True], ids=["purged", "another file"])
def test_messages_written_after_restore_are_backed_up(place: Path, anew: bool) -> None:
    where, folder = f"sqlite:{place}/store.db", str(place / "b")
    with open_store(where) as store:
        store.add_message("a", "user", "one")
        store.set_summary("a", "first")
    back_up(where, folder)
    if anew:
        for path in place.glob("store.db*"):
            path.unlink()
    else:
        with open_store(where) as store:
            store.purge("a")
    assert restore(folder, where)[0].problems == 0
    with open_store(where) as store:
        store.set_summary("a", "second")
    assert back_up(where, folder).written == 1
    with open_store(where) as store:
        store.purge("a")
    restore(folder, where)
    with open_store(where) as store:
        store.add_message("a", "user", "two")
    assert back_up(where, folder).messages == 1
    assert _of(f"jsonl:{folder}") == _of(where)


def test_rejected_folder_is_unchanged(place: Path, where: str) -> None:
    (place / "x").mkdir(mode=0o700)
    (place / "x/letter.txt").write_text("dear")
    with pytest.raises(UsageError, match="something else"):
        back_up(where, str(place / "x"))
    assert [path.name for path in (place / "x").iterdir()] == ["letter.txt"]


@pytest.mark.parametrize("folder", ["sessions", "sessions/b", "notes/b", "agents/x", "others/b"])
def test_backup_inside_workspace_is_rejected(place: Path, folder: str) -> None:
    for name in ("sessions", "others"):
        with open_store(f"jsonl:{place}/w", namespace=name) as store:
            store.add_message("a", "user", "one")
    before = sorted(place.rglob("*"))
    (place / "link").symlink_to(place / "w")
    for root in ("w", "link"):
        with pytest.raises(UsageError, match="is inside the workspace"):
            back_up(f"jsonl:{place}/w", str(place / root / folder))
    (place / "link").unlink()
    assert sorted(place.rglob("*")) == before
    assert back_up(f"jsonl:{place}/w", str(place / "w/backup")).problems == 0
    assert list_namespaces(f"jsonl:{place}/w") == ["sessions", "others"]


def test_unopenable_namespace_does_not_stop_the_others(place: Path, where: str) -> None:
    long = "n" * 300
    with open_store(where, namespace=long) as store:
        store.add_message("a", "user", "one")
    for found in (
        copy_place(where, f"jsonl:{place}/w"),
        copy_place(where, f"jsonl:{place}/w", dry_run=True),
        back_up(where, str(place / "b")),
        back_up(where, str(place / "b")),
    ):
        [problem] = found.namespaces[long].problems
        assert (found.problems, problem.key, problem.uid) == (1, "", "")
        assert problem.reason
    for folder in ("w", "b"):
        for name in ("sessions", "notes"):
            assert _of(f"jsonl:{place}/{folder}", name) == _of(where, name)
    assert verify(str(place / "b")).findings == ()


@pytest.mark.slow
def test_server_stamps_are_not_reused_after_restore(place: Path, own_databases: Databases) -> None:
    where, folder = own_databases.new(), str(place / "b")

    def changed(summaries: str) -> Iterator[str]:
        with open_store(where) as store:
            for summary in summaries:
                store.set_summary("a", summary)
                assert isinstance(store, SnapshotStore)
                yield from (mark.stamp for mark in store.list_snapshots())

    with open_store(where) as store:
        store.add_message("a", "user", "one")
    before = set(changed("1234"))
    back_up(where, folder)
    with open_store(where) as store:
        store.purge("a")
    restore(folder, where)
    assert before.isdisjoint(changed("5678"))
    assert back_up(where, folder).written == 1
    assert _of(f"jsonl:{folder}") == _of(where)


def test_read_only_server_is_copied_during_writes(place: Path, own_databases: Databases) -> None:
    where = own_databases.new()
    reader = f"{where}?options=-c%20default_transaction_read_only%3Don"
    with open_store(where) as store:
        store.add_message("a", "user", "one")

        def write(_: str, step: CopyStep) -> None:
            if step.phase == "copying" and step.done:
                store.add_message("a", "user", "more")

        found = copy_place(reader, f"jsonl:{place}/w", on_progress=write)
    assert (found.problems, found.unlocked) == (0, True)
    assert _of(f"jsonl:{place}/w") == _of(where)


def test_p11_the_manifest_does_not_depend_on_the_password(
    place: Path, own_databases: Databases
) -> None:
    url = own_databases.new()
    with open_store(url) as store:
        store.add_message("a", "user", "x")
    back_up(url, str(place / "b"))
    source = json.loads((place / "b" / MANIFEST).read_text())["source"]
    user, _, rest = url.partition("://")[2].partition(":")
    password, _, host = rest.partition("@")
    texts = {
        f"{scheme}://{user}:{word}@{host}"
        for scheme in ("postgresql", "postgres")
        for word in (password, "other")
    }
    assert source not in {sha256(text.encode()).hexdigest() for text in texts}
    in_query = f"postgresql://{user}@{host}?password={password}"
    assert _read_again(in_query, place / "b") == 0
    own_databases.leave(url)


def test_backup_of_a_version_that_hashed_the_password_is_continued(
    place: Path, own_databases: Databases, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = own_databases.new()
    with open_store(url) as store:
        store.add_message("a", "user", "x")
    with monkeypatch.context() as earlier:
        earlier.setattr(backup, "_source_digest", lambda where: sha256(where.encode()).hexdigest())
        back_up(url, str(place / "b"))
    assert _read_again(url, place / "b") == 0
    own_databases.leave(url)


def _read_again(where: str, folder: Path) -> int:
    taken = back_up(where, str(folder))
    return taken.sessions + taken.deleted - taken.not_compared


def test_backup_report_counts_sessions_that_were_not_compared(place: Path, where: str) -> None:
    first = back_up(where, str(place / "b"))
    total = first.sessions + first.deleted
    assert (first.not_compared, first.written) == (0, total)
    with open_store(where) as store:
        store.add_message("new", "user", "x")
    second = back_up(where, str(place / "b"))
    assert (second.not_compared, second.written) == (total, 1)
