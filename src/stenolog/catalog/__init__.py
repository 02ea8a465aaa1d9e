"""The catalog of a store, for `steno list`, `steno search`, recall, the picker and the viewer.

The catalog is built from the store alone, stays up to date by itself, and can be deleted at any
time.
"""

from typing import TYPE_CHECKING

from stenolog.lazy_loading import lazy_exports

if TYPE_CHECKING:
    from stenolog.catalog.entries import Entry as Entry
    from stenolog.catalog.entries import Hit as Hit
    from stenolog.catalog.index import Catalog as Catalog
    from stenolog.catalog.index import open_catalog as open_catalog
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "stenolog.catalog.entries": "Entry Hit",
            "stenolog.catalog.index": "Catalog open_catalog",
        },
    )
