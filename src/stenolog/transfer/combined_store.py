"""A read-only store of several places: workspaces, databases and transcripts in one list.

Nothing is written to the places. The search index is a file elsewhere.
"""

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Protocol, runtime_checkable

from msgspec import Struct
from msgspec.structs import replace

from stenolog.catalog.background_catalog import SessionHead
from stenolog.catalog.catalog_database import to_microseconds
from stenolog.errors import NoSuchSession, StenologError
from stenolog.records import Message, SessionInfo
from stenolog.stores.base import MarkedStore, SessionView, Store, leased_keys
from stenolog.stores.snapshots import SnapshotMark, SnapshotReading
from stenolog.transfer.read_only_store import ReadOnlyStore


class StorePlace(Struct, frozen=True, kw_only=True):
    """An open place. Its keys get the prefix."""

    store: Store
    prefix: str = ""
    exists: Callable[[], bool] = lambda: True
    """Whether the place still exists. If not, it has no sessions."""


@runtime_checkable
class SnapshotReader(Protocol):
    """A store whose sessions can be read up to a message."""

    def read_snapshot(
        self, mark: SnapshotMark, *, after: int = 0
    ) -> AbstractContextManager[SnapshotReading]:
        """Read a session and its messages after a seq."""
        ...


@runtime_checkable
class HeadStore(Protocol):
    """A store that can describe sessions without reading all of them."""

    def heads(self, keys: Sequence[str]) -> Iterator[SessionHead]:
        """Yield what is known of these sessions after a look at the start of their files."""
        ...


class CombinedStore(ReadOnlyStore):
    """The sessions of several places, as a store that cannot be written. It closes the places.

    `catalog`: file for the search index. [default: in memory]
    """

    def __init__(self, places: Sequence[StorePlace], *, catalog: Path | None = None) -> None:
        # A key is looked up at the place with the longest matching prefix.
        self._places = sorted(places, key=lambda place: -len(place.prefix))
        super().__init__(catalog)
        self._lock = threading.Lock()
        self._stamps: dict[str, dict[str, str]] = {}
        """The last stamps of each place, by prefix."""

    # --- sessions ----------------------------------------------------------------------------

    def stamps(self) -> dict[str, str]:
        """Return a stamp for each session. It differs after every change of its files.

        A place that cannot be read now keeps its sessions.
        """
        found: dict[str, str] = {}
        for place in reversed(self._places):
            try:
                stamps = place.store.stamps() if place.exists() else {}
            except StenologError:
                stamps = self._stamps.get(place.prefix, {}) if place.exists() else {}
            with self._lock:
                self._stamps[place.prefix] = stamps
            found |= {place.prefix + key: stamp for key, stamp in stamps.items()}
        return found

    def heads(self, keys: Sequence[str]) -> Iterator[SessionHead]:
        """Yield what is known of these sessions after a look at the start of their files."""
        groups: dict[str, list[str]] = {}
        for key in keys:
            place, own = self._at(key)
            groups.setdefault(place.prefix, []).append(own)
        for place in self._places:
            own_keys = groups.get(place.prefix, [])
            if isinstance(place.store, HeadStore):
                found = place.store.heads(own_keys)
            else:
                found = _heads_from_info(place.store, own_keys)
            for head in found:
                yield replace(head, key=place.prefix + head.key)

    def info(self, key: str) -> SessionInfo:
        """Return the info of the session. Raises NoSuchSession."""
        place, own = self._at(key)
        return _renamed(place.store.info(own), place.prefix)

    def view(self, key: str, last: int | None = None) -> SessionView:
        """Return info, summary and visible messages of one moment. Raises NoSuchSession."""
        place, own = self._at(key)
        view = place.store.view(own, last)
        return replace(view, info=_renamed(view.info, place.prefix))

    def get_history(
        self, key: str, *, last: int | None = None, after: int | None = None, full: bool = False
    ) -> list[Message]:
        """Return the visible messages by seq; with `full` every message."""
        place, own = self._at(key)
        return place.store.get_history(own, last=last, after=after, full=full)

    def get_summary(self, key: str) -> str:
        """Return the summary; empty if there is none."""
        place, own = self._at(key)
        return place.store.get_summary(own)

    def follow(
        self, key: str, *, after: int = 0, uid: str | None = None, timeout: float | None = None
    ) -> Iterator[Message]:
        """Yield each message with a seq greater than `after` once, as its program writes it."""
        place, own = self._at(key)
        return place.store.follow(own, after=after, uid=uid, timeout=timeout)

    def read_snapshot(
        self, mark: SnapshotMark, *, after: int = 0
    ) -> AbstractContextManager[SnapshotReading]:
        """Read a session and its messages after a seq. Raises NoSuchSession."""
        place, own = self._at(mark.key)
        if not isinstance(place.store, SnapshotReader):
            raise NoSuchSession(mark.key)
        return place.store.read_snapshot(replace(mark, key=own), after=after)

    def list_snapshots(self) -> list[SnapshotMark]:
        """Return an empty list: a copy is made from the places themselves."""
        return []

    def leased(self, keys: Collection[str]) -> set[str]:
        """Return those of the keys that are leased now, by any process."""
        found: set[str] = set()
        for place in self._places:
            own = {key: one for key in keys for at, one in [self._at(key)] if at is place}
            # A place that cannot be read now does not hide the others.
            with suppress(StenologError):
                running = leased_keys(place.store, list(own.values())) if own else set()
                found |= {key for key, one in own.items() if one in running}
        return found

    def mark(self, name: str) -> str:
        """Return the change marker of the only place; empty if there are several."""
        store = self._places[0].store
        return store.mark(name) if len(self._places) == 1 and isinstance(store, MarkedStore) else ""

    def _at(self, key: str) -> tuple[StorePlace, str]:
        """Return the place of a session, and its key there. Raises NoSuchSession."""
        for place in self._places:
            if key.startswith(place.prefix):
                return place, key[len(place.prefix) :]
        raise NoSuchSession(key)

    # --- writing is refused ------------------------------------------------------------------

    change_mark = hold_snapshot = snapshot_writer = ReadOnlyStore._refuse

    # --- the store itself --------------------------------------------------------------------

    def close(self) -> None:
        """Close all places. Later calls raise StoreClosed."""
        for place in self._places:
            place.store.close()


def _heads_from_info(store: Store, keys: Sequence[str]) -> Iterator[SessionHead]:
    for key in keys:
        with suppress(StenologError):
            info = store.info(key)
            created, updated = to_microseconds(info.created), to_microseconds(info.updated)
            yield SessionHead(key=key, created=created, updated=updated, meta=info.meta)


def _renamed(info: SessionInfo, prefix: str) -> SessionInfo:
    if not prefix:
        return info
    origin = None if info.forked_from is None else prefix + info.forked_from
    return replace(info, key=prefix + info.key, forked_from=origin)
