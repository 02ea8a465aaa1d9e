"""For others who write a store: the contract as tests, to be run by pytest.

class TestMyStore(StoreContract):
    def make_store(self, path: Path) -> Store:
        return MyStore(path)


class TestMyStoreIsKilled(CrashContract):
    factory = "my_package:open_my_store"


class TestMyStoreIsDamaged(DamageContract):
    def make_store(self, path: Path) -> Store:
        return MyStore(path)

    def damage(self, store: Store, record: DamagedRecord, key: str) -> Store:
        ...  # make the record unreadable, and open the store again
"""

import pytest

pytest.register_assert_rewrite("stenolog.testing.contract", "stenolog.testing.crash")

from stenolog.testing.contract import (  # noqa: E402 - rewritten from here on
    DamageContract,
    DamagedRecord,
    StoreContract,
)
from stenolog.testing.crash import CrashContract  # noqa: E402

__all__ = ["CrashContract", "DamageContract", "DamagedRecord", "StoreContract"]
