"""Calls as values, and comparable pictures of sessions, to compare two stores.

This module imports neither pytest nor hypothesis.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stenolog.errors import NoSuchSession, StenologError
from stenolog.records import Compacted, Message, Purged, Trashed
from stenolog.stores.base import Store


@dataclass(frozen=True, slots=True)
class Call:
    """One method call on a session of a store."""

    name: str
    arguments: tuple[Any, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        given = [repr(value) for value in self.arguments]
        given += [f"{name}={value!r}" for name, value in self.options.items()]
        return f"{self.name}({', '.join(given)})"

    def make(self, store: Store, key: str) -> Any:
        """Make the call and return its result. Raises errors of the store."""
        return getattr(store, self.name)(key, *self.arguments, **self.options)

    def outcome(self, store: Store, key: str) -> Any:
        """Make the call and return a comparable result: for an error, its type."""
        try:
            result = self.make(store, key)
        except StenologError as error:
            return type(error)
        return comparable(result)


def comparable(result: Any) -> Any:
    """Return a result without the parts that may differ between stores."""
    match result:
        case Message():
            return result.seq, result.to_json()
        case Trashed():
            return result.key, result.count
        case Purged():
            return result.messages, result.first, result.last
        case Compacted():
            # Engines may archive different amounts at a time.
            return None
        case _:
            return result


@dataclass(frozen=True, slots=True)
class SessionContent:
    """Everything that a session shows to a reader, except times and engine details."""

    visible: list[tuple[int, bytes]]
    everything: list[tuple[int, bytes, bool]]
    summary: str
    meta: Mapping[str, Any]
    floor: int
    counted: int
    counted_visible: int
    undoable: int
    forked_from: str | None


def session_content(store: Store, key: str) -> SessionContent | None:
    """Return the current picture of a session, or None if it does not exist."""
    try:
        info = store.info(key)
    except NoSuchSession:
        return None
    view = store.view(key)
    assert (view.uid, view.change, view.summary) == (info.uid, info.change, info.summary)
    assert (view.info.floor, view.info.meta) == (info.floor, info.meta)
    assert view.messages == tuple(store.get_history(key))
    return SessionContent(
        visible=[(m.seq, m.to_json()) for m in view.messages],
        everything=[(m.seq, m.to_json(), m.hidden) for m in store.get_history(key, full=True)],
        summary=store.get_summary(key),
        meta=info.meta,
        floor=info.floor,
        counted=info.count,
        counted_visible=info.visible,
        undoable=info.undoable,
        forked_from=info.forked_from,
    )


def all_contents(store: Store) -> dict[str, SessionContent | None]:
    """Return pictures of all sessions."""
    return {key: session_content(store, key) for key in store.list_sessions()}


def trash_content(store: Store) -> list[tuple[str, int]]:
    """Return the deleted sessions in comparable form: keys and numbers of messages."""
    return [(trashed.key, trashed.count) for trashed in store.list_trash()]
