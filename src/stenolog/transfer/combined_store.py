"""A read-only store of several places: workspaces, databases and transcripts in one list.

The store writes nothing to the workspaces, databases and transcripts. The search index of the store
is in memory, or in a file outside of the workspaces and transcripts.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Protocol, runtime_checkable

from msgspec import Struct
from msgspec.structs import replace

from stenolog.catalog.background_catalog import SessionHead
from stenolog.catalog.catalog_database import to_microseconds
from stenolog.catalog.searchable_text import source_from
from stenolog.errors import NoSuchSession, StenologError
from stenolog.records import Health, Message, SessionInfo
from stenolog.stores.base import ChangeMarkerStore, SessionView, Store, leased_keys
from stenolog.stores.snapshots import SnapshotMark, SnapshotReading
from stenolog.transfer.read_only_store import ReadOnlyStore
from stenolog.transfer.transcripts.transcript import as_dict, identity_of
from stenolog.transfer.transcripts.transcript_import import META_FIELD


class StorePlace(Struct, frozen=True, kw_only=True):
    """An open workspace, database or folder of transcripts.

    In the combined store, the keys of its sessions start with `prefix`.
    """

    store: Store
    prefix: str = ""
    name: str = ""
    """Path or address, for messages about the place."""
    exists: Callable[[], bool] = lambda: True
    """Function that returns whether the place still exists. A missing place has no sessions."""
    has_transcripts: bool = False
    """Whether the sessions are transcripts. Other places may have imported copies of them."""


class _ImportedCopy(Struct, frozen=True, kw_only=True):
    """A session that was imported from a transcript."""

    is_continued: bool
    """Whether the session has messages that are not from the transcript."""
    size: int
    """Bytes of the transcript when it was imported."""
    modified: int
    """Modification time of the transcript when it was imported, in nanoseconds."""

    def is_covered_by(self, stamp: str) -> bool:
        """Return whether a transcript with this stamp still has the content of the copy.

        True if the transcript has become neither smaller nor older since the import.
        """
        size, _, modified = stamp.partition("-")
        if not (size.isdecimal() and modified.isdecimal()):
            return True
        return int(size) >= self.size and int(modified) >= self.modified


@runtime_checkable
class SnapshotReader(Protocol):
    """A store whose sessions can be read as snapshots."""

    def read_snapshot(
        self, mark: SnapshotMark, *, after: int = 0
    ) -> AbstractContextManager[SnapshotReading]:
        """Read a session and its messages with a seq greater than `after`."""
        ...


@runtime_checkable
class HeadStore(Protocol):
    """A store that can describe sessions without reading all of their messages."""

    def heads(self, keys: Sequence[str]) -> Iterator[SessionHead]:
        """Yield title, project and times of these sessions, without reading all messages."""
        ...


class CombinedStore(ReadOnlyStore):
    """The sessions of several places, as a store that cannot be written.

    Closing the store closes the places. `catalog` is the file for the search index; without a file
    the index is in memory. `unopened` are the places that could not be opened, with the reasons.
    """

    def __init__(
        self,
        places: Sequence[StorePlace],
        *,
        catalog: Path | None = None,
        unopened: Mapping[str, str] | None = None,
    ) -> None:
        # A key belongs to the place with the longest matching prefix, so long prefixes come first.
        self._places = sorted(places, key=lambda place: -len(place.prefix))
        super().__init__(catalog)
        self._unopened = self.problems = dict(unopened or {})
        self._lock = threading.Lock()
        self._stamps: dict[str, dict[str, str]] = {}
        """Last known change stamps of each place, by the prefix of the place."""
        self._copies: dict[str, tuple[str, _ImportedCopy]] = {}
        """Change stamp and data of each imported copy, as last read, by key."""

    # --- sessions ----------------------------------------------------------------------------

    def stamps(self) -> dict[str, str]:
        """Return the change stamp of each session: a text that differs after every change.

        For a place that cannot be read now, the last known stamps are returned. If a transcript has
        an imported copy, only one of the two is listed: the copy if it was continued in stenolog,
        otherwise the transcript. The unlisted session can still be read. Both are listed if the
        copy was not continued, and the transcript has become smaller or older since the import.
        """
        all_stamps: dict[str, str] = {}
        problems = dict(self._unopened)
        for place in reversed(self._places):
            try:
                stamps = place.store.stamps() if place.exists() else {}
            except StenologError as error:
                stamps = self._stamps.get(place.prefix, {}) if place.exists() else {}
                problems[place.name] = str(error)
            with self._lock:
                self._stamps[place.prefix] = stamps
            all_stamps |= {place.prefix + key: stamp for key, stamp in stamps.items()}
        self.problems = problems
        for key in list(self._unlisted_keys(all_stamps)):
            all_stamps.pop(key, None)
        return all_stamps

    def _unlisted_keys(self, stamps: Mapping[str, str]) -> Iterator[str]:
        transcripts: defaultdict[str, list[str]] = defaultdict(list)
        stored_sessions: list[tuple[str, StorePlace, str]] = []
        for key in stamps if len(self._places) > 1 else ():
            place, inner_key = self._find_place(key)
            if place.has_transcripts:
                transcripts[inner_key].append(key)
            else:
                stored_sessions.append((key, place, inner_key))
        for key, place, inner_key in stored_sessions:
            if inner_key not in transcripts:
                continue
            copy = self._read_copy(key, stamps[key], place.store, inner_key)
            if copy is not None and copy.is_continued:
                yield from transcripts[inner_key]
            elif copy and any(copy.is_covered_by(stamps[name]) for name in transcripts[inner_key]):
                yield key

    def _read_copy(
        self, key: str, stamp: str, store: Store, inner_key: str
    ) -> _ImportedCopy | None:
        """Return the imported copy with this key; None if the session is no copy."""
        known_stamp, copy = self._copies.get(key, ("", None))
        if copy is None or known_stamp != stamp:
            try:
                facts = store.info(inner_key).meta.get(META_FIELD)
                messages = store.get_history(inner_key, full=True) if facts else []
            except StenologError:
                return None
            if not facts:
                return None
            is_continued = any(identity_of(message.to_dict()) is None for message in messages)
            values = [as_dict(facts).get(name) for name in ("size", "modified")]
            size, modified = (value if isinstance(value, int) else 0 for value in values)
            copy = _ImportedCopy(is_continued=is_continued, size=size, modified=modified)
            self._copies[key] = stamp, copy
        return copy

    def heads(self, keys: Sequence[str]) -> Iterator[SessionHead]:
        """Yield title, project and times of these sessions, without reading all messages."""
        for place in self._places:
            inner_keys = list(self._inner_keys(keys, place).values())
            if isinstance(place.store, HeadStore):
                place_heads = place.store.heads(inner_keys)
            else:
                place_heads = _heads_from_info(place.store, inner_keys)
            for head in place_heads:
                yield replace(head, key=place.prefix + head.key)

    def info(self, key: str) -> SessionInfo:
        """Return the info of the session. Raises NoSuchSession."""
        place, inner_key = self._find_place(key)
        return _with_key_prefix(place.store.info(inner_key), place.prefix)

    def view(self, key: str, last: int | None = None) -> SessionView:
        """Return info, summary and visible messages, read together. Raises NoSuchSession."""
        place, inner_key = self._find_place(key)
        view = place.store.view(inner_key, last)
        return replace(view, info=_with_key_prefix(view.info, place.prefix))

    def get_history(
        self, key: str, *, last: int | None = None, after: int | None = None, full: bool = False
    ) -> list[Message]:
        """Return the visible messages in the order of their seqs; with `full`, all messages."""
        place, inner_key = self._find_place(key)
        return place.store.get_history(inner_key, last=last, after=after, full=full)

    def get_summary(self, key: str) -> str:
        """Return the summary; empty if there is none."""
        place, inner_key = self._find_place(key)
        return place.store.get_summary(inner_key)

    def follow(
        self, key: str, *, after: int = 0, uid: str | None = None, timeout: float | None = None
    ) -> Iterator[Message]:
        """Yield each message with a seq greater than `after` once, as soon as it is written."""
        place, inner_key = self._find_place(key)
        return place.store.follow(inner_key, after=after, uid=uid, timeout=timeout)

    def read_snapshot(
        self, mark: SnapshotMark, *, after: int = 0
    ) -> AbstractContextManager[SnapshotReading]:
        """Read a session and its messages with a seq above `after`. Raises NoSuchSession."""
        place, inner_key = self._find_place(mark.key)
        if not isinstance(place.store, SnapshotReader):
            raise NoSuchSession(mark.key)
        return place.store.read_snapshot(replace(mark, key=inner_key), after=after)

    def list_snapshots(self) -> list[SnapshotMark]:
        """Return an empty list, because copies are made from the places themselves."""
        return []

    def leased(self, keys: Collection[str]) -> set[str]:
        """Return the keys of sessions that any process leases now."""
        all_leased: set[str] = set()
        for place in self._places:
            inner = self._inner_keys(keys, place)
            # Skip a place that cannot be read now, so that the other places are still shown.
            with suppress(StenologError):
                leased_here = leased_keys(place.store, list(inner.values())) if inner else set()
                all_leased |= {key for key, inner_key in inner.items() if inner_key in leased_here}
        return all_leased

    def read_marker(self, name: str) -> str:
        """Return the change marker of this name; empty if there are several places."""
        store = self._places[0].store
        return (
            store.read_marker(name)
            if len(self._places) == 1 and isinstance(store, ChangeMarkerStore)
            else ""
        )

    def _find_place(self, key: str) -> tuple[StorePlace, str]:
        """Return the place of a session, and its key in that place. Raises NoSuchSession."""
        for place in self._places:
            if key.startswith(place.prefix):
                return place, key[len(place.prefix) :]
        raise NoSuchSession(key)

    def _inner_keys(self, keys: Iterable[str], place: StorePlace) -> dict[str, str]:
        """Return the keys that belong to a place, each mapped to the key without the prefix."""
        located_keys = ((key, *self._find_place(key)) for key in keys)
        return {key: inner_key for key, key_place, inner_key in located_keys if key_place is place}

    # --- writing is refused ------------------------------------------------------------------

    update_marker = hold_snapshot = snapshot_writer = ReadOnlyStore._refuse

    # --- the store itself --------------------------------------------------------------------

    def health(self) -> Health:
        """Return the health; its problems are places that could not be opened or read."""
        stores = (place.store for place in self._places if isinstance(place.store, ReadOnlyStore))
        inner_problems = (problem for store in stores for problem in store.health().problems)
        health = super().health()
        return replace(health, problems=(*health.problems, *inner_problems))

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


def _with_key_prefix(info: SessionInfo, prefix: str) -> SessionInfo:
    if not prefix:
        return info
    origin = None if info.forked_from is None else prefix + info.forked_from
    meta = info.meta
    if (source := source_from(meta)) is not None:
        meta = {**meta, META_FIELD: {**meta[META_FIELD], "forked_from": prefix + source}}
    return replace(info, key=prefix + info.key, forked_from=origin, meta=meta)
