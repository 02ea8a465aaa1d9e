"""Runs the store contract on the JSONL store: API, damage and crashes."""

from pathlib import Path
from typing import ClassVar

import pytest

import stenolog
from stenolog.stores.base import Store
from support.contract import CrashContract, DamageContract, DamagedRecord, StoreContract


class TestJSONLStore(StoreContract):
    leases_expire: ClassVar[bool] = False

    def make_store(self, path: Path) -> Store:
        return stenolog.open_store(path)


class TestJSONLStoreIsKilled(CrashContract):
    factory: ClassVar[str] = "stenolog:open_store"


class TestJSONLStoreIsDamaged(DamageContract):
    def make_store(self, path: Path) -> Store:
        self._path = path
        return stenolog.open_store(path)

    def damage(self, store: Store, record: DamagedRecord, key: str) -> Store:
        sessions = self._path / "sessions"
        if record == "change":
            # After a new state, so that only undo needs the change.
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr("stenolog.stores.jsonl.writer.STATE_EVERY_LINES", 1)
                store.set_meta(key, title="A talk", tags=["x"])
        if record == "trash":
            [file] = [one for one in (sessions / "trash").iterdir() if _holds(one, key)]
        else:
            [file] = [one for one in sessions.glob("*.jsonl") if _holds(one, key)]
        store.close()
        lines = file.read_bytes().splitlines(keepends=True)
        kind = "state" if record == "trash" else record
        chosen = [at for at, line in enumerate(lines) if b'"kind":"%b"' % kind.encode() in line]
        wanted = {"change": chosen[-2:-1], "message": chosen[1:2]}.get(record, chosen)
        assert wanted
        for at in wanted:
            lines[at] = lines[at].replace(b'"at":', b'"xx"#')
        file.write_bytes(b"".join(lines))
        return stenolog.open_store(self._path)


def _holds(file: Path, key: str) -> bool:
    return b'"key":"%b"' % key.encode() in file.read_bytes()
