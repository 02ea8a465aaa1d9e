"""The one index of a store: what `steno list`, `steno search`, recall, picker and viewer read.

It is made from the store alone, keeps itself up to date, and can be thrown away at any time.
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
