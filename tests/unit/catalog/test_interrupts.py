"""Ctrl-C at any place leaves the catalog usable: no lock stays held, no call waits for ever."""

import contextlib
import gc
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from stenolog import JSONLStore
from stenolog.catalog import Catalog, catalog_files, open_catalog
from stenolog.catalog.catalog_files import MemoryDatabase
from stenolog.catalog.index import Refresher
from stenolog.stores.base import Store
from support.interrupts import Striking

MODULES = (catalog_files, contextlib)
SECONDS = 120
"""For failures only."""


def _in_thread(work: Callable[[], object]) -> list[BaseException]:
    """Run it in another thread, and return what it raised; fail if it does not end."""
    raised = list[BaseException]()

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - it is what the test looks at
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(SECONDS)
    assert not thread.is_alive(), "it hangs"
    return raised


def _struck(number: int, store: Store, catalog: Catalog) -> KeyboardInterrupt | None:
    """Strike a refresh with something to write; the exception, or None past the last place."""
    strike = Striking(number, MODULES)
    store.add_message("k", "user", f"word{number}")
    with strike.watching():
        strike.armed.set()
        try:
            catalog.refresh()
        except KeyboardInterrupt as error:
            return error
        finally:
            strike.armed.clear()
    assert not strike.where, f"{strike.where}: the interrupt was swallowed"
    return None


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("kind", ["file", "memory"])
def test_p8_ctrl_c_anywhere_leaves_the_catalog_usable(tmp_path: Path, kind: str, step: int) -> None:
    number, places = 1, list[str]()
    with JSONLStore(tmp_path) as store, open_catalog(store) as catalog:
        if kind == "memory":
            catalog._active = Refresher(catalog._store, MemoryDatabase())
        catalog.refresh()
        while (error := _struck(number, store, catalog)) is not None:
            where = str(error)
            places.append(where)
            # The traceback may keep a connection open (docs/decisions/0017).
            del error
            gc.collect()
            assert catalog.search(f"word{number}").count == 1, where
            assert _in_thread(lambda: catalog.search("word1").count) == [], where
            assert catalog.problems == (), where
            number += step
        assert catalog.search(f"word{number}").count == 1
    assert len(places) > 100 // step, places
