"""The catalog of a store, for `steno list`, `steno search`, recall, the picker and the viewer.

It is built from the store alone, stays up to date by itself, and can be deleted at any time.
"""

from typing import TYPE_CHECKING

from stenolog.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from stenolog.catalog.entries import Candidate, Candidates, Entry, Hit, Hits, Page, State
    from stenolog.catalog.index import Catalog, open_catalog
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "Candidate": "stenolog.catalog.entries",
            "Candidates": "stenolog.catalog.entries",
            "Catalog": "stenolog.catalog.index",
            "Entry": "stenolog.catalog.entries",
            "Hit": "stenolog.catalog.entries",
            "Hits": "stenolog.catalog.entries",
            "Page": "stenolog.catalog.entries",
            "State": "stenolog.catalog.entries",
            "open_catalog": "stenolog.catalog.index",
        },
    )

__all__ = [
    "Candidate",
    "Candidates",
    "Catalog",
    "Entry",
    "Hit",
    "Hits",
    "Page",
    "State",
    "open_catalog",
]
