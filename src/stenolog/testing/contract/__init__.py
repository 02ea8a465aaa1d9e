"""The store contract: tests of the promises P1 to P13 in stores/base.py, for every engine.

The promises P1 (power loss), P9, P11 and P13 cannot be observed through the API of one process: the
crash contract and the tests of each engine cover them. Promise P3 (damage) has a separate contract,
because only the engine knows how to damage a record.
"""

from stenolog.testing.contract.append_contract import (
    Appends,
    IdempotencyKeys,
    Lossless,
    UnknownKeys,
)
from stenolog.testing.contract.concurrency_contract import Following, Leases, Writers
from stenolog.testing.contract.damage_contract import DamageContract, DamagedRecord
from stenolog.testing.contract.history_contract import (
    Checkpoints,
    Hiding,
    Reading,
    Replacing,
    Undoing,
)
from stenolog.testing.contract.lifecycle_contract import Forks, Purging, Trash
from stenolog.testing.contract.session_contract import Closing, Keys, Sessions, Stamps, Views

__all__ = ["DamageContract", "DamagedRecord", "StoreContract"]


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
