"""The API half of the contract: what each call means, on every engine.

P1 (power loss), P3, P9, P11 and P13 cannot be seen through the API of one process: the crash
half and the tests of each engine have them.
"""

from stenolog.testing.contract.appends import Appends, UnknownKeys
from stenolog.testing.contract.follow import Following
from stenolog.testing.contract.forks import Forks
from stenolog.testing.contract.history import Checkpoints, Hiding, Reading, Replacing
from stenolog.testing.contract.keys import Keys
from stenolog.testing.contract.leases import Leases
from stenolog.testing.contract.lossless import Lossless
from stenolog.testing.contract.purging import Purging
from stenolog.testing.contract.sessions import Closing, Sessions, Stamps
from stenolog.testing.contract.tokens import Tokens
from stenolog.testing.contract.trash import Trash
from stenolog.testing.contract.undo import Undoing
from stenolog.testing.contract.writers import Writers


class StoreContract(
    Appends,
    UnknownKeys,
    Reading,
    Hiding,
    Replacing,
    Checkpoints,
    Undoing,
    Tokens,
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
    Closing,
):
    """Every test that a store must pass; a subclass gives `make_store(path)`."""
