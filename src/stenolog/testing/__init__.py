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

from stenolog.lazy_exports import lazy_exports

# The contracts are imported on first use, so that the models work without pytest.
if pytest := sys.modules.get("pytest"):
    pytest.register_assert_rewrite("stenolog.testing.contract", "stenolog.testing.crash")

if TYPE_CHECKING:
    from stenolog.testing.contract import DamageContract, DamagedRecord, StoreContract
    from stenolog.testing.crash import CrashContract
    from stenolog.testing.model_server import ModelServer
    from stenolog.testing.model_server_plays import ScriptedResponse
    from stenolog.testing.scripted_model import ScriptedCompletion, ScriptedModel, tool_call
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "CrashContract": "stenolog.testing.crash",
            "DamageContract": "stenolog.testing.contract",
            "DamagedRecord": "stenolog.testing.contract",
            "ModelServer": "stenolog.testing.model_server",
            "ScriptedCompletion": "stenolog.testing.scripted_model",
            "ScriptedModel": "stenolog.testing.scripted_model",
            "ScriptedResponse": "stenolog.testing.model_server_plays",
            "StoreContract": "stenolog.testing.contract",
            "tool_call": "stenolog.testing.scripted_model",
        },
    )

__all__ = [
    "CrashContract",
    "DamageContract",
    "DamagedRecord",
    "ModelServer",
    "ScriptedCompletion",
    "ScriptedModel",
    "ScriptedResponse",
    "StoreContract",
    "tool_call",
]
