"""The store contract: tests of the promises P1 to P13 in stores/base.py, for every engine.

The promises P1 (power loss), P9, P11 and P13 cannot be observed through the API of one process: the
crash contract and the tests of each engine cover them. Promise P3 (damage) has a separate contract,
because only the engine knows how to damage a record.
"""

from support.contract.append_contract import (
    Appends,
    IdempotencyKeys,
    Lossless,
    UnknownKeys,
)
from support.contract.concurrency_contract import Following, Leases, Writers
from support.contract.crash_contract import CrashContract
from support.contract.damage_contract import DamageContract, DamagedRecord
from support.contract.history_contract import (
    Checkpoints,
    Hiding,
    Reading,
    Replacing,
    Undoing,
)
from support.contract.lifecycle_contract import Forks, Purging, Trash
from support.contract.session_contract import Closing, Keys, Sessions, Stamps, Views

__all__ = ["CrashContract", "DamageContract", "DamagedRecord", "StoreContract"]


class StoreContract(
    Appends,
    UnknownKeys,
    Reading,
    Hiding,
    Replacing,
    Checkpoints,
    Undoing,
    IdempotencyKeys,
    Lossless,
    Keys,
    Writers,
    Following,
    Forks,
    Trash,
    Purging,
    Leases,
    Sessions,
    Stamps,
    Views,
    Closing,
):
    """All tests that a store must pass. A subclass implements `make_store(path)`."""
