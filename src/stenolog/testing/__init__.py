"""Tests that any implementation of `Store` must pass, for pytest. Subclass the contracts.

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

from stenolog.testing.contract import (  # noqa: E402 - after the registration above
    DamageContract,
    DamagedRecord,
    StoreContract,
)
from stenolog.testing.crash import CrashContract  # noqa: E402

__all__ = ["CrashContract", "DamageContract", "DamagedRecord", "StoreContract"]
