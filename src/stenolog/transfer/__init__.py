"""Moving sessions: import from other programs, copies between stores, export."""

from typing import TYPE_CHECKING

from stenolog.lazy_loading import lazy_exports

if TYPE_CHECKING:
    from stenolog.transfer.copy import copy_place as copy_place
    from stenolog.transfer.migration import migrate_from_json as migrate_from_json
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "stenolog.transfer.copy": "copy_place",
            "stenolog.transfer.migration": "migrate_from_json",
        },
    )
