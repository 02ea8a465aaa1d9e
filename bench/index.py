"""Rows about the catalog: the list of 10,000 sessions, and search in their 1,000,000 messages.

The sessions are made once per run, and all rows share them. Every list and every search first looks
whether something has changed, as users' calls do.
"""

import sys
from collections.abc import Callable

import stenolog
from measure import Figure, Place, percentiles, run_process, timed
from messages import sample
from stenolog.catalog import Catalog, open_catalog

SESSIONS = 10_000
EACH = 100
_RARE_EVERY = 2_000
RARE = "zanzibar"
EVERYWHERE = "the"
BEGUN = "t*"

_FRESH = """
import stenolog
from stenolog.catalog import open_catalog
with stenolog.open_store({where!r}, namespace="catalog") as store, open_catalog(store) as catalog:
    assert len(catalog.list(limit=50).entries) == 50
"""


def _where(place: Place) -> str:
    return str(place.folder / "catalog")


def _filled(place: Place) -> stenolog.Store:
    """The store with all its sessions, made when first asked for."""
    store = stenolog.open_store(_where(place), namespace="catalog")
    sessions, each = place.times(SESSIONS), EACH
    if store.list_sessions(limit=1):
        return store
    messages = sample(997)
    for number in range(sessions):
        batch = [dict(messages[(number * 7 + index) % len(messages)]) for index in range(each)]
        rare = (number * each) % _RARE_EVERY
        if rare < each:
            batch[rare] = {"role": "user", "content": f"the ferry to {RARE} leaves at nine"}
        store.add_messages(f"bench:{number:05d}", batch)
    with open_catalog(store) as catalog:
        catalog.refresh()
    return store


def _measured(place: Place, times: int, action: Callable[[Catalog], object]) -> Figure:
    with _filled(place) as store, open_catalog(store) as catalog:
        action(catalog)
        ours = percentiles(timed(place.times(times), lambda: action(catalog)))
        raw = percentiles(timed(place.times(times), store.stamps))
    return Figure(measured=ours["p50_us"] / 1000, ours=ours, raw=raw)


def list_warm(place: Place) -> Figure:
    """The newest 50 of all sessions, in ms, in a process that has listed before."""
    return _measured(place, 40, lambda catalog: catalog.list(limit=50))


def list_fresh(place: Place) -> Figure:
    """The same in a process that has just begun, from its start to its end."""
    _filled(place).close()
    program = [sys.executable, "-c", _FRESH.format(where=_where(place))]
    nothing = [sys.executable, "-c", "pass"]
    run_process(program)
    ours = percentiles(timed(place.times(20), lambda: run_process(program)))
    raw = percentiles(timed(place.times(20), lambda: run_process(nothing)))
    return Figure(measured=ours["p50_us"] / 1000, ours=ours, raw=raw)


def search_rare(place: Place) -> Figure:
    """A word that 500 messages hold, in ms."""
    return _measured(place, 40, lambda catalog: catalog.search(RARE))


def search_newest(place: Place) -> Figure:
    """The newest messages with a word found everywhere, in ms."""
    return _measured(place, 40, lambda catalog: catalog.search(EVERYWHERE, newest=True))


def search_everywhere(place: Place) -> Figure:
    """The best messages with a word found everywhere, in ms: the first page."""
    return _measured(place, 12, lambda catalog: catalog.search(EVERYWHERE))


def search_begun(place: Place) -> Figure:
    """The best messages with a word of which only the first letter is typed, in ms."""
    return _measured(place, 12, lambda catalog: catalog.search(BEGUN))
