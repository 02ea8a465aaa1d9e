"""Tests P8: a read-only store rejects every call that writes, and changes no file."""

from pathlib import Path

import pytest

from stenolog.errors import ReadOnly
from stenolog.stores.open_store import open_store
from support.contract.call_table import WRITE_CALLS, append_sample
from support.contract.open_store_base import append
from support.store_calls import Call

CALLS = [*WRITE_CALLS, Call("lease", ttl=60), Call("add_messages", [])]


def _states(folder: Path) -> dict[Path, tuple[int, int, int]]:
    """Return size and times of each file, except the files that SQLite needs to read."""
    states = {path: path.stat() for path in folder.rglob("*")}
    return {
        path: (state.st_size, state.st_mtime_ns, state.st_ctime_ns)
        for path, state in states.items()
        if path.suffix not in (".db-shm", ".db-wal")
    }


@pytest.mark.parametrize("engine", ["jsonl", "sqlite"])
def test_p8_read_only_store_rejects_writes_and_changes_no_file(tmp_path: Path, engine: str) -> None:
    folder = tmp_path / "workspace"
    address = {"jsonl": str(folder), "sqlite": f"sqlite:{folder}/s.db"}[engine]
    with open_store(address) as store:
        append_sample(store, "a")
        append(store, "b", "1")
        deleted = store.delete("b")
    if engine == "jsonl":
        with (folder / "sessions" / "a.jsonl").open("ab") as log:
            log.write(b'{"kind":"mess')
    before = _states(folder)
    with open_store(address, read_only=True) as store:
        for call in CALLS:
            for key in ("a", "b"):
                with pytest.raises(ReadOnly):
                    call.make(store, key)
        with pytest.raises(ReadOnly):
            store.admin.update_marker("changed")
        with pytest.raises(ReadOnly):
            store.admin.finish_purge("")
        with pytest.raises(ReadOnly), store.admin.snapshot_writer():
            pass
        assert [message.content for message in store.get_history("a")] == ["4", "6", "7"]
        assert store.info("a").void_bytes == (13 if engine == "jsonl" else 0)
        assert store.admin.list_trash() == [deleted]
        assert store.admin.health().ok
    assert _states(folder) == before
