"""Rows about the catalog: listing 10,000 sessions and searching their 1,000,000 messages.

The sessions are created once per run and shared by all rows. Every list and every search first
checks for changes, as users' calls do.
"""

import sys
from collections.abc import Callable

import stenolog
from measure import Context, Measurement, percentiles, run_process, time_calls
from messages import sample
from stenolog.catalog import Catalog, open_catalog

SESSIONS = 10_000
MESSAGES_PER_SESSION = 100
_RARE_EVERY = 2_000
RARE = "zanzibar"
COMMON = "the"
PREFIX = "t*"

_LIST_PROGRAM = """
import stenolog
from stenolog.catalog import open_catalog
with stenolog.open_store({path!r}, namespace="catalog") as store, open_catalog(store) as catalog:
    assert len(catalog.list(limit=50).entries) == 50
"""


def _workspace(context: Context) -> str:
    return str(context.folder / "catalog")


def _prepared_store(context: Context) -> stenolog.Store:
    """Open the store; the first call creates all sessions."""
    store = stenolog.open_store(_workspace(context), namespace="catalog")
    sessions, per_session = context.times(SESSIONS), MESSAGES_PER_SESSION
    if store.list_sessions(limit=1):
        return store
    messages = sample(997)
    for number in range(sessions):
        batch = [
            dict(messages[(number * 7 + index) % len(messages)]) for index in range(per_session)
        ]
        rare = (number * per_session) % _RARE_EVERY
        if rare < per_session:
            batch[rare] = {"role": "user", "content": f"the ferry to {RARE} leaves at nine"}
        store.add_messages(f"bench:{number:05d}", batch)
    with open_catalog(store) as catalog:
        catalog.refresh()
    return store


def _measure(context: Context, times: int, action: Callable[[Catalog], object]) -> Measurement:
    with _prepared_store(context) as store, open_catalog(store) as catalog:
        action(catalog)
        ours = percentiles(time_calls(context.times(times), lambda: action(catalog)))
        raw = percentiles(time_calls(context.times(times), store.admin.stamps))
    return Measurement(measured=ours["p50_us"] / 1000, ours=ours, raw=raw)


def list_warm(context: Context) -> Measurement:
    """Measure the list of the newest 50 sessions, in ms, in a process that has listed before."""
    return _measure(context, 40, lambda catalog: catalog.list(limit=50))


def list_fresh(context: Context) -> Measurement:
    """Measure the same list in a new process, from its start to its end."""
    _prepared_store(context).close()
    program = [sys.executable, "-c", _LIST_PROGRAM.format(path=_workspace(context))]
    nothing = [sys.executable, "-c", "pass"]
    run_process(program)
    ours = percentiles(time_calls(context.times(20), lambda: run_process(program)))
    raw = percentiles(time_calls(context.times(20), lambda: run_process(nothing)))
    return Measurement(measured=ours["p50_us"] / 1000, ours=ours, raw=raw)


def search_rare(context: Context) -> Measurement:
    """Measure the search for a word in 500 messages, in ms."""
    return _measure(context, 40, lambda catalog: catalog.search(RARE))


def search_newest(context: Context) -> Measurement:
    """Measure the search for the newest messages with a common word, in ms."""
    return _measure(context, 40, lambda catalog: catalog.search(COMMON, newest=True))


def search_common(context: Context) -> Measurement:
    """Measure the search for the best messages with a common word, first page, in ms."""
    return _measure(context, 12, lambda catalog: catalog.search(COMMON))


def search_prefix(context: Context) -> Measurement:
    """Measure the search for the best messages with words of one first letter, in ms."""
    return _measure(context, 12, lambda catalog: catalog.search(PREFIX))
