"""The index of a workspace for commands that list and search, with a bar while it is made."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import click

from stenolog.catalog import Catalog, open_catalog
from stenolog.cli.text import one_line
from stenolog.cli.workspace import Where, open_to_read
from stenolog.errors import StoreUnavailable
from stenolog.stores.opening import address, open_store

if TYPE_CHECKING:
    from rich.progress import Progress

    from stenolog.sessions.folders import Place
    from stenolog.stores.base import Store

_SOON: Final = 0.5
"""What takes no longer than this needs no bar."""


class Meter:
    """A bar on stderr, from the moment that making the index takes a while."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self._bar: Progress | None = None

    def __call__(self, done: int, total: int) -> None:
        """So many of the changed sessions are in the index."""
        if self._bar is None:
            if time.monotonic() - self._begun < _SOON or not sys.stderr.isatty():
                return
            self._bar = _bar()
            self._bar.start()
            self._bar.add_task("indexing")
        self._bar.update(self._bar.task_ids[0], completed=done, total=total)

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()


@contextmanager
def catalog_of(where: Where) -> Iterator[tuple[Catalog, Meter]]:
    """The index of a workspace. The sessions are only read; the index itself is kept up to date."""
    place = where.place
    with open_to_read(where) as store:
        if address(place.where).engine not in ("sqlite", "postgresql"):
            with _opened(open_catalog(store, keep=True)) as found:
                yield found
            return
        kept = _to_be_indexed(store, place)
        if kept is None:
            with _opened(open_catalog(store, keep=False)) as found:
                yield found
            return
    with kept, _opened(open_catalog(kept)) as found:
        yield found


def _to_be_indexed(store: "Store", place: "Place") -> "Store | None":
    """The same database, opened so that its index, which is in it, can be kept up to date.

    None where that cannot be, or would bring older tables up to date: whoever only looks does not
    take a database away from an older program that uses it.
    """
    # Who has a folder does not wait for them.
    from stenolog.stores.postgres import PostgresStore
    from stenolog.stores.sqlite import SQLiteStore

    if isinstance(store, SQLiteStore | PostgresStore) and store.database.outdated:
        return None
    try:
        return open_store(place.where, namespace=place.namespace)
    except StoreUnavailable:
        return None


@contextmanager
def _opened(catalog: Catalog) -> Iterator[tuple[Catalog, Meter]]:
    meter = Meter()
    with catalog:
        try:
            yield catalog, meter
        finally:
            meter.close()
            for problem in catalog.problems:
                click.echo(one_line(f"{problem}."), err=True)


def _bar() -> "Progress":
    # Slow to import, and only for who has to wait anyway.
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    return Progress(
        TextColumn("Indexing sessions"),
        BarColumn(),
        MofNCompleteColumn(),
        console=Console(stderr=True),
        transient=True,
    )
