"""The contract on the JSONL store: both halves."""

from pathlib import Path
from typing import ClassVar

import stenolog
from stenolog.stores.base import Store
from stenolog.testing import CrashContract, StoreContract


class TestJSONLStore(StoreContract):
    leases_expire: ClassVar[bool] = False

    def make_store(self, path: Path) -> Store:
        return stenolog.open_store(path)


class TestJSONLStoreIsKilled(CrashContract):
    factory: ClassVar[str] = "stenolog:open_store"
