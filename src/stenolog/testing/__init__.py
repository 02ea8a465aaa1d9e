"""Tests for implementations of `Store`, and models that follow a script.

Subclass the contracts and run them with pytest:

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

The contracts need pytest and hypothesis (extra `[testing]`); the models do not.
"""

import sys
from typing import TYPE_CHECKING

from stenolog.lazy_loading import lazy_exports

# The contracts are imported on first use, so that the models work without pytest.
if pytest := sys.modules.get("pytest"):
    pytest.register_assert_rewrite("stenolog.testing.contract", "stenolog.testing.crash")

if TYPE_CHECKING:
    from stenolog.testing.contract import DamageContract as DamageContract
    from stenolog.testing.contract import DamagedRecord as DamagedRecord
    from stenolog.testing.contract import StoreContract as StoreContract
    from stenolog.testing.crash import CrashContract as CrashContract
    from stenolog.testing.model_server import ModelServer as ModelServer
    from stenolog.testing.model_server import ScriptedResponse as ScriptedResponse
    from stenolog.testing.scripted_model import ScriptedCompletion as ScriptedCompletion
    from stenolog.testing.scripted_model import ScriptedModel as ScriptedModel
    from stenolog.testing.scripted_model import tool_call as tool_call
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "stenolog.testing.contract": "DamageContract DamagedRecord StoreContract",
            "stenolog.testing.crash": "CrashContract",
            "stenolog.testing.model_server": "ModelServer ScriptedResponse",
            "stenolog.testing.scripted_model": "ScriptedCompletion ScriptedModel tool_call",
        },
    )
