"""The file of an index may be lost, damaged, replaced or refused at any time; nobody notices."""

import os
import random
import resource
import shutil
import sqlite3
import stat
import subprocess
import sys
import threading
import traceback
from binascii import crc32
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import stenolog
from stenolog.catalog import Catalog, catalog_files, open_catalog, steps
from stenolog.catalog.catalog_database import CatalogBusy, CatalogDamaged, Transaction
from stenolog.catalog.catalog_files import MemoryDatabase
from stenolog.catalog.index import Progress, Refresher
from stenolog.catalog.indexing import CatalogWriter
from stenolog.maintenance.repair import accept
from stenolog.stores.base import Store
from stenolog.stores.catalog_file import CATALOG_NAME, journal_name, lock_name
from stenolog.stores.open_store import open_store
from support.catalog_scan import catalogued, differences, full_scan
from support.random_operations import fill_three_sessions

Harm = Callable[[Path, random.Random], None]


def _agree(store: Store, catalog: Catalog) -> None:
    assert differences(catalogued(catalog), full_scan(store)) == {}


def _folder(store: Store) -> Path:
    assert isinstance(store, stenolog.JSONLStore)
    return store.folder


# --- harm ------------------------------------------------------------------------------------


def _delete(folder: Path, _: random.Random) -> None:
    (folder / CATALOG_NAME).unlink()


def _delete_lock(folder: Path, _: random.Random) -> None:
    (folder / lock_name(CATALOG_NAME)).unlink(missing_ok=True)


def _truncate(folder: Path, chance: random.Random) -> None:
    os.truncate(folder / CATALOG_NAME, chance.randrange((folder / CATALOG_NAME).stat().st_size))


def _overwrite(folder: Path, chance: random.Random) -> None:
    with (folder / CATALOG_NAME).open("r+b") as file:
        file.seek(chance.randrange((folder / CATALOG_NAME).stat().st_size))
        file.write(chance.randbytes(chance.choice([1, 100, 10_000])))


def _replace_by_garbage(folder: Path, chance: random.Random) -> None:
    (folder / CATALOG_NAME).unlink()
    (folder / CATALOG_NAME).write_bytes(chance.randbytes(5_000))


def _replace_by_nothing(folder: Path, _: random.Random) -> None:
    (folder / CATALOG_NAME).write_bytes(b"")


def _replace_by_another_database(folder: Path, _: random.Random) -> None:
    (folder / CATALOG_NAME).unlink()
    other = sqlite3.connect(folder / CATALOG_NAME)
    other.execute("CREATE TABLE catalog_about (version TEXT)")
    other.close()


def _put_a_journal_beside(folder: Path, chance: random.Random) -> None:
    (folder / journal_name(CATALOG_NAME)).write_bytes(chance.randbytes(3_000))


HARM: list[Harm] = [
    _delete,
    _delete_lock,
    _truncate,
    _overwrite,
    _replace_by_garbage,
    _replace_by_nothing,
    _replace_by_another_database,
    _put_a_journal_beside,
]


@pytest.mark.parametrize("harm", HARM)
def test_next_read_is_correct_after_any_damage_to_the_file(logs: Store, harm: Harm) -> None:
    chance = random.Random(2)
    with open_catalog(logs) as catalog, open_catalog(logs) as beside:
        for round_ in range(6):
            _agree(logs, catalog)
            harm(_folder(logs), chance)
            if round_ % 2:
                logs.add_message("cli:default", "user", f"allmessages round {round_}")
            with open_catalog(logs) as opened_later:
                _agree(logs, opened_later)
                assert opened_later.problems == ()
            _agree(logs, beside)
            _agree(logs, catalog)
        assert catalog.problems == beside.problems == ()


def test_change_that_sqlite_does_not_notice_is_detected(logs: Store) -> None:
    with open_catalog(logs) as catalog:
        catalog.refresh()
    file = _folder(logs) / CATALOG_NAME
    changed = file.read_bytes().replace(b"allmessages hello", b"allmessages hallo")
    assert changed != file.read_bytes()
    with file.open("r+b") as opened:
        opened.write(changed)
    with open_catalog(logs) as catalog:
        _agree(logs, catalog)


def _write_much(transaction: Transaction) -> None:
    """With so little memory that some of it is in the file before the end."""
    transaction.execute("PRAGMA cache_size = 5")
    transaction.execute("UPDATE catalog_said SET text = replace(hex(zeroblob(9000)), '0', 'x')")
    transaction.execute("UPDATE catalog_session SET agent = 'bob'")


def _leave_a_journal(logs: Store) -> None:
    """What is left of a writer that was killed while it wrote."""

    def write() -> None:
        with (
            open_catalog(logs) as catalog,
            catalog._active.database.write_transaction() as transaction,
        ):
            _write_much(transaction)
            os._exit(0)

    with open_catalog(logs) as catalog:
        catalog.refresh()
    _in_a_child(write)
    assert (_folder(logs) / journal_name(CATALOG_NAME)).stat().st_size > 4096


def test_unfinished_write_of_a_killed_process_is_rolled_back(logs: Store) -> None:
    _leave_a_journal(logs)
    with open_catalog(logs) as catalog:
        _agree(logs, catalog)
        logs.add_message("cli:default", "user", "allmessages more")
        _agree(logs, catalog)
        assert catalog.problems == ()
    assert not (_folder(logs) / journal_name(CATALOG_NAME)).exists()


def test_journal_is_not_applied_to_the_next_database(logs: Store) -> None:
    _leave_a_journal(logs)
    (_folder(logs) / CATALOG_NAME).unlink()
    for _ in range(2):
        with open_catalog(logs) as catalog:
            _agree(logs, catalog)
            assert catalog.problems == ()
        logs.add_message("cli:default", "user", "allmessages more")


# --- damage while it is used -----------------------------------------------------------------


def test_older_copy_with_the_same_id_is_noticed_between_refresh_and_read(
    logs: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "older"
    with open_catalog(logs) as catalog:
        catalog.refresh()
        shutil.copy2(_folder(logs) / CATALOG_NAME, copy)
        refresher = catalog._active
        refresh = refresher.refresh

        def refresh_and_swap(progress: Progress | None = None) -> int | None:
            catalog_id = refresh(progress)
            if copy.exists():
                copy.replace(_folder(logs) / CATALOG_NAME)
            return catalog_id

        monkeypatch.setattr(refresher, "refresh", refresh_and_swap)
        logs.add_message("cli:default", "user", "xylophone")
        assert catalog.search("xylophone").count == 1
        assert catalog.problems == ()


@pytest.mark.parametrize("mode", ["ro", "rw"])
def test_file_removed_before_it_is_opened_is_built_again(
    logs: Store, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = catalog_files.connect_file
    removed: list[str] = []

    def remove_and_connect(path: Path, opened: str, *, timeout: float) -> Any:
        if opened == mode and path.name == CATALOG_NAME and not removed:
            removed.append(mode)
            path.unlink()
        return connect(path, opened, timeout=timeout)

    with open_catalog(logs) as catalog:
        catalog.refresh()
        logs.add_message("cli:default", "user", "xylophone")
        monkeypatch.setattr(catalog_files, "connect_file", remove_and_connect)
        with open_catalog(logs) as other:
            assert other.search("xylophone").count == 1
            assert (removed, other.problems) == ([mode], ())
        _agree(logs, catalog)


def test_older_copy_with_the_same_id_is_noticed_between_two_writes(
    logs: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "older"
    file = _folder(logs) / CATALOG_NAME
    with open_catalog(logs) as catalog:
        catalog.refresh()
        shutil.copy2(file, copy)
        flush, written_keys = CatalogWriter.flush, set[str]()

        def swap_and_flush(writer: CatalogWriter) -> None:
            keys = {step.key for step in writer._steps}
            if written_keys and keys - written_keys and copy.exists():
                copy.replace(file)
            written_keys.update(keys)
            flush(writer)

        monkeypatch.setattr(CatalogWriter, "flush", swap_and_flush)
        monkeypatch.setattr(steps, "MAX_MESSAGES", 1)
        for key in logs.list_sessions()[:2]:
            logs.add_message(key, "user", "xylophone")
        assert catalog.search("xylophone").count == 2
        assert not copy.exists()
        _agree(logs, catalog)


def test_copy_that_another_process_continued_is_not_taken_for_the_known_file(
    logs: Store, tmp_path: Path
) -> None:
    copy = tmp_path / "older"
    file = _folder(logs) / CATALOG_NAME
    with open_catalog(logs) as catalog:
        catalog.refresh()
        shutil.copy2(file, copy)
        logs.add_message("cli:default", "user", "allmessages known")
        _agree(logs, catalog)
        # Another process writes to the older copy as often as this one wrote to the known file.
        shutil.copy2(copy, file)
        with open_catalog(logs) as other:
            _agree(logs, other)
        logs.admin.hide("cli:default", 1, 1)
        _agree(logs, catalog)


@pytest.mark.parametrize("error", [CatalogDamaged, CatalogBusy])
def test_damage_that_is_copied_into_memory_is_built_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    refresh, found = Refresher.refresh, list[type]()

    def find_damage(refresher: Refresher, progress: Progress | None = None) -> int | None:
        """Find damage as often as another process wrecks the file, and in its copy once."""
        found.append(type(refresher.database))
        if found.count(MemoryDatabase) == 1:
            raise error("wrecked in memory")
        if not found.count(MemoryDatabase):
            raise CatalogDamaged("wrecked again")
        return refresh(refresher, progress)

    monkeypatch.setattr(Refresher, "refresh", find_damage)
    with open_store(tmp_path) as store, open_catalog(store) as catalog:
        store.add_message("cli:one", "user", "xylophone")
        assert catalog.search("xylophone").count == 1
        [problem] = catalog.problems
    assert "was built in memory: wrecked again" in problem


WRECKS = ("truncate", "garbage", "copy", "swap", "overwrite", "delete", "folder", "nothing")


def _wreck(file: Path, older: Path, chance: random.Random) -> None:
    """Do to the file what another program might do."""
    kind = chance.choice(WRECKS)
    if kind in ("swap", "overwrite") and not older.exists():
        kind = "copy"
    match kind:
        case "truncate":
            os.truncate(file, chance.randrange(file.stat().st_size))
        case "garbage":
            with file.open("r+b") as opened:
                opened.seek(chance.randrange(file.stat().st_size))
                opened.write(chance.randbytes(chance.choice([20, 3_000])))
        case "copy":
            shutil.copy2(file, older)
        case "swap":
            older.replace(file)
        case "overwrite":
            shutil.copy2(older, file)
        case "delete":
            file.unlink()
        case "folder":
            file.unlink()
            file.mkdir()


@pytest.mark.quick(1)
@pytest.mark.parametrize("where", ["{0}/w", "sqlite:{0}/s.db"])
def test_searches_are_right_while_the_file_is_wrecked_in_use(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(11)
    with open_store(where.format(tmp_path)) as store, ExitStack() as catalogs:
        fill_three_sessions(store)
        file = store.admin.place.catalog_file
        assert file is not None
        refresh = Refresher.refresh

        def refresh_and_wreck(refresher: Refresher, progress: Progress | None = None) -> int | None:
            catalog_id = refresh(refresher, progress)
            if chance.random() < 0.3 and file.is_file():
                _wreck(file, tmp_path / "older", chance)
            return catalog_id

        monkeypatch.setattr(Refresher, "refresh", refresh_and_wreck)
        opened = [catalogs.enter_context(open_catalog(store)) for _ in range(2)]
        for number in range(120):
            if file.is_dir():
                file.rmdir()
                # The catalogs that went to memory stay there.
                opened = [catalogs.enter_context(open_catalog(store)) for _ in range(2)]
            word = f"word{number}"
            seq = store.add_message(f"k:{number % 7}", "user", f"{word} allmessages")
            assert opened[number % 2].search(word).count == 1
            store.admin.hide(f"k:{number % 7}", seq, seq)
            assert [hit.hidden for hit in opened[chance.randrange(2)].search(word).hits] == [True]
        monkeypatch.undo()
        if file.is_dir():
            file.rmdir()
        with open_catalog(store) as catalog:
            _agree(store, catalog)


# --- where it is -----------------------------------------------------------------------------


def test_p11_catalog_file_is_private(logs: Store) -> None:
    before = os.umask(0)
    try:
        with open_catalog(logs) as catalog:
            catalog.refresh()
    finally:
        os.umask(before)
    for name in (CATALOG_NAME, lock_name(CATALOG_NAME)):
        assert stat.S_IMODE((_folder(logs) / name).stat().st_mode) == 0o600


@pytest.mark.parametrize("name", [CATALOG_NAME, lock_name(CATALOG_NAME)])
def test_p11_symlinked_catalog_is_not_followed(logs: Store, tmp_path: Path, name: str) -> None:
    (_folder(logs) / name).symlink_to(tmp_path / "elsewhere")
    with open_catalog(logs) as catalog:
        _agree(logs, catalog)
        assert len(catalog.problems) == 1
    assert not (tmp_path / "elsewhere").exists()


def test_read_only_store_gets_no_catalog_file(logs: Store, tmp_path: Path) -> None:
    logs.close()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with open_store(tmp_path / "w", read_only=True) as store, open_catalog(store) as catalog:
        _agree(store, catalog)
        assert catalog.problems == ()
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_read_only_store_uses_an_existing_catalog_file(logs: Store, tmp_path: Path) -> None:
    with open_catalog(logs) as catalog:
        catalog.refresh()
    with open_store(tmp_path / "w", read_only=True) as store, open_catalog(store) as catalog:
        _agree(store, catalog)
        assert type(catalog._active.database).__name__ == "FileDatabase"
        logs.add_message("cli:default", "user", "allmessages more")
        _agree(store, catalog)
        assert type(catalog._active.database).__name__ == "MemoryDatabase"
        assert catalog.problems == ()


@pytest.mark.usefixtures("logs")
def test_catalog_of_a_read_only_store_is_written_with_keep(tmp_path: Path) -> None:
    with open_store(tmp_path / "w", read_only=True) as store:
        with open_catalog(store, keep=True) as catalog:
            _agree(store, catalog)
        assert (_folder(store) / CATALOG_NAME).exists()


def _in_a_child(work: Callable[[], None]) -> None:
    """Do this in a forked child; what it asserts is asserted here."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:  # noqa: BLE001 - told, before the child ends here
            traceback.print_exc(file=sys.__stderr__)
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.parametrize("indexed", [False, True])
def test_catalog_in_a_read_only_folder_is_built_in_memory(
    logs: Store, tmp_path: Path, indexed: bool
) -> None:
    if indexed:
        with open_catalog(logs) as catalog:
            catalog.refresh()
        logs.add_message("cli:default", "user", "allmessages since")
    logs.close()
    folder = tmp_path / "w" / "sessions"
    for path in (tmp_path, *tmp_path.parents):
        if not path.stat().st_mode & 0o001:
            path.chmod(path.stat().st_mode | 0o011)

    def look() -> None:
        if os.geteuid() == 0:
            for path in (folder, folder.parent, *folder.iterdir()):
                os.chown(path, 65534, 65534)
            os.setegid(65534)
            os.seteuid(65534)
        folder.chmod(0o500)
        store = open_store(tmp_path / "w", read_only=True)
        with store, open_catalog(store, keep=True) as catalog:
            _agree(store, catalog)
            assert "in memory" in catalog.problems[0]
        folder.chmod(0o700)

    _in_a_child(look)


@pytest.mark.parametrize("room", [0, 4_096, 20_000, 60_000])
def test_catalog_on_a_full_disk_is_built_in_memory(logs: Store, room: int) -> None:
    expected = full_scan(logs)

    def look() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
        with open_catalog(logs) as catalog:
            assert catalogued(catalog) == expected
            assert "in memory" in catalog.problems[0]

    _in_a_child(look)
    with open_catalog(logs) as catalog:
        _agree(logs, catalog)
        assert catalog.problems == ()


def test_catalog_moves_to_memory_when_the_disk_becomes_full(logs: Store) -> None:
    def look() -> None:
        with open_catalog(logs) as catalog:
            catalog.refresh()
            size = (_folder(logs) / CATALOG_NAME).stat().st_size
            for number in range(50):
                logs.add_message("cli:default", "user", f"allmessages {number} {'word ' * 400}")
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
            _agree(logs, catalog)
            assert "in memory" in catalog.problems[0]

    _in_a_child(look)
    with open_catalog(logs) as catalog:
        _agree(logs, catalog)


_WITHOUT_DESCRIPTORS = """
import os, resource, sys
from stenolog import JSONLStore, StoreUnavailable
from stenolog.catalog import open_catalog
store = JSONLStore(sys.argv[1])
store.add_message("k", "user", "hello")
catalog = open_catalog(store)
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
free = os.open("/", os.O_RDONLY)
os.close(free)
resource.setrlimit(resource.RLIMIT_NOFILE, (free, most))
error = None
try:
    catalog.refresh()
except StoreUnavailable as caught:
    error = caught
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
print(error, catalog.search("hello").count)
"""


def test_p8_first_update_without_free_descriptors_raises_store_unavailable(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _WITHOUT_DESCRIPTORS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "the catalog cannot be" in done.stdout, done.stderr
    assert done.stdout.endswith(" 1\n")


# --- what cannot be read ---------------------------------------------------------------------


def test_p3_unreadable_session_is_listed_with_its_problem(logs: Store) -> None:
    log = _folder(logs) / "telegram%3A1.jsonl"
    before = log.read_bytes()
    with open_catalog(logs) as catalog:
        catalog.refresh()
        first = before.splitlines()[0].rpartition(b',"crc":"')[0]
        newer = first.replace(b'"format":1', b'"format":2')
        log.write_bytes(before + b'%b,"crc":"%08x"}\n' % (newer, crc32(newer)))

        entry = catalog.list().entries[-1]
        assert entry.key == "telegram:1"
        assert "newer stenolog" in (entry.problem or "")
        assert (entry.visible, entry.count, entry.updated) == (0, 0, None)
        assert catalog.search("telegram").count == 1

        log.write_bytes(before)
        _agree(logs, catalog)


def test_a_log_of_another_program_is_not_listed(logs: Store) -> None:
    foreign = _folder(logs) / "other.jsonl"
    foreign.write_bytes(b'{"role":"user","content":"allmessages hello"}\n')
    (_folder(logs) / "empty.jsonl").write_bytes(b"")
    (_folder(logs) / "not-ours.JSONL").write_bytes(b"x")
    with open_catalog(logs) as catalog:
        _agree(logs, catalog)
        foreign.unlink()
        logs.add_message("other", "user", "allmessages ours")
        _agree(logs, catalog)


def test_p3_damage_after_indexing_is_noticed(logs: Store) -> None:
    log = _folder(logs) / "telegram%3A1.jsonl"
    with open_catalog(logs) as catalog:
        catalog.refresh()
        log.write_bytes(log.read_bytes().replace(b"hello yourself", b"hello yourselX"))
    with open_store(_folder(logs).parent) as store, open_catalog(store) as catalog:
        _agree(store, catalog)
        [entry] = catalog.list(prefix="telegram:1").entries
        assert (entry.count, entry.lost) == (1, 1)


def _edited(line: bytes, *, signed: bool) -> bytes:
    """A line of a log in which one message says something else, as long as before."""
    body, _, crc = line.replace(b"hello yourself", b"hello xylophon").rpartition(b',"crc":"')
    return b'%b,"crc":"%b' % (body, b'%08x"}' % crc32(body) if signed else crc)


@pytest.mark.parametrize("accepted", [False, True])
def test_log_edited_by_hand_is_indexed_again(logs: Store, accepted: bool) -> None:
    with open_catalog(logs) as catalog:
        assert catalog.search("yourself").count == 3
    workspace, log = _folder(logs).parent, _folder(logs) / "telegram%3A1.jsonl"
    logs.close()
    lines = log.read_bytes().split(b"\n")
    edited = [
        _edited(line, signed=not accepted) if b"hello yourself" in line else line for line in lines
    ]
    log.write_bytes(b"\n".join(edited))
    if accepted:
        assert [one.done for one in accept(workspace)] == [True]
    with open_store(workspace) as store, open_catalog(store) as catalog:
        assert (catalog.search("yourself").count, catalog.search("xylophon").count) == (2, 1)
        _agree(store, catalog)


# --- purge -----------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [None, 2])
@pytest.mark.parametrize("where", ["{0}/w", "sqlite:{0}/w/s.db"])
def test_purged_text_leaves_no_trace_in_the_catalog(
    tmp_path: Path, where: str, before: int | None
) -> None:
    (tmp_path / "w").mkdir(mode=0o700)
    with open_store(where.format(tmp_path)) as store, open_catalog(store) as catalog:
        fill_three_sessions(store)
        store.add_message("secret:1", "user", "the xylophone is hidden")
        store.add_message("secret:1", "assistant", "allmessages noted")
        assert catalog.search("xylophone").count == 1
        store.admin.purge("secret:1", before=before)
        found = [
            path
            for path in tmp_path.rglob("*")
            if path.is_file() and b"xylophone" in path.read_bytes().lower()
        ]
        assert found == []
        assert catalog.search("xylophone").count == 0
        _agree(store, catalog)


def test_p4_refresh_that_read_before_a_purge_does_not_write_after_it(
    tmp_path: Path,
) -> None:
    with (
        stenolog.open_store(f"sqlite:{tmp_path / 's.db'}") as store,
        open_catalog(store) as catalog,
    ):
        catalog.refresh()
        store.add_message("secretkey", "user", "zebrasecret")
        history = store.get_history

        def purge_meanwhile(key: str, **options: object) -> list[stenolog.Message]:
            found = history(key, **options)  # type: ignore[arg-type]
            store.get_history = history  # type: ignore[method-assign]
            store.admin.purge("secretkey")
            return found

        store.get_history = purge_meanwhile  # type: ignore[method-assign]
        catalog.refresh()
        assert not catalog.list().entries
    content = b"".join(path.read_bytes() for path in tmp_path.iterdir() if path.is_file())
    assert b"zebrasecret" not in content


# --- threads and forks -----------------------------------------------------------------------


def test_threads_may_share_a_catalog(store: Store, catalog: Catalog) -> None:
    fill_three_sessions(store)
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for turn in range(8):
                store.add_message(f"k:{number}", "user", f"allmessages {turn}")
                counts = {entry.key: entry.count for entry in catalog.list().entries}
                assert counts[f"k:{number}"] == turn + 1
                assert catalog.search(f"allmessages {turn}", prefix=f"k:{number}").count >= 1
        except BaseException as error:  # noqa: BLE001 - raised below
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    _agree(store, catalog)


def test_a_forked_child_may_use_the_catalog_of_its_parent(logs: Store) -> None:
    with open_catalog(logs) as catalog:
        catalog.refresh()
        with catalog._active.database.write_transaction() as transaction:
            transaction.execute("UPDATE catalog_session SET title = 'not yet'")

            def look() -> None:
                logs.add_message("cli:default", "user", "allmessages by the child")

            _in_a_child(look)
            transaction.execute("UPDATE catalog_session SET title = 'committed'")
        assert catalog.list(prefix="telegram:1").entries[0].title == "committed"

        def look_again() -> None:
            logs.add_message("telegram:2", "user", "allmessages by the other child")
            assert catalog.list().entries[0].key == "telegram:2"
            assert catalog.problems == ()

        _in_a_child(look_again)
        assert catalog.list().entries[0].key == "telegram:2"
        assert catalog.problems == ()
