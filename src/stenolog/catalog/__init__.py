"""The catalog of a store, for `steno list`, `steno search`, recall, the picker and the viewer.

It is built from the store alone, stays up to date by itself, and can be deleted at any time.
"""

from stenolog.catalog.entries import Candidate, Candidates, Entry, Hit, Hits, Page, State
from stenolog.catalog.index import Catalog, open_catalog

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
