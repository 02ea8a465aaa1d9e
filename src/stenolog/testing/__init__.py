"""For others who write a store: the contract as tests, to be run by pytest.

class TestMyStore(StoreContract):
    def make_store(self, path: Path) -> Store:
        return MyStore(path)


class TestMyStoreIsKilled(CrashContract):
    factory = "my_package:open_my_store"
"""

import pytest

pytest.register_assert_rewrite("stenolog.testing.contract", "stenolog.testing.crash")

from stenolog.testing.contract import StoreContract  # noqa: E402 - rewritten from here on
from stenolog.testing.crash import CrashContract  # noqa: E402

__all__ = ["CrashContract", "StoreContract"]
