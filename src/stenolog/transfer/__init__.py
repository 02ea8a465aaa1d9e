"""Moving sessions: import from other programs, copies between stores, backups, export."""

from typing import TYPE_CHECKING

from stenolog.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from stenolog.transfer.copy import copy_snapshots
    from stenolog.transfer.copy_all import copy_place
    from stenolog.transfer.migration import ImportReport, migrate_from_json
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "ImportReport": "stenolog.transfer.migration",
            "copy_place": "stenolog.transfer.copy_all",
            "copy_snapshots": "stenolog.transfer.copy",
            "migrate_from_json": "stenolog.transfer.migration",
        },
    )

__all__ = [
    "ImportReport",
    "copy_place",
    "copy_snapshots",
    "migrate_from_json",
]
