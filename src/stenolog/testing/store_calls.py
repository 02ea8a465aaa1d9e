"""Calls as values, and the content of sessions in a form that can be compared.

This module imports neither pytest nor hypothesis.
"""

from typing import Any

from stenolog.errors import NoSuchSession, StenologError
from stenolog.records import Compacted, Message, Purged, Trashed
from stenolog.stores.base import Store


class Call:
    """One method call on a session of a store, such as `Call("hide", 2, 3)`."""

    def __init__(self, name: str, /, *arguments: Any, **options: Any) -> None:
        """Describe a call by the name of the method, and its arguments after the key."""
        self.name = name
        self.arguments = arguments
        self.options = options

    def __repr__(self) -> str:
        arguments = [repr(value) for value in self.arguments]
        arguments += [f"{name}={value!r}" for name, value in self.options.items()]
        return f"{self.name}({', '.join(arguments)})"

    def make(self, store: Store, key: str) -> Any:
        """Make the call and return its result. Raises errors of the store."""
        return getattr(store, self.name)(key, *self.arguments, **self.options)

    def outcome(self, store: Store, key: str) -> Any:
        """Make the call and return a comparable result, or the type of the error."""
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
            # Engines may archive different numbers of messages at a time.
            return None
        case _:
            return result


def session_content(store: Store, key: str) -> dict[str, Any] | None:
    """Return everything that a session shows to a reader, except times and engine details.

    Returns None if the session does not exist.
    """
    try:
        info = store.info(key)
    except NoSuchSession:
        return None
    view = store.view(key)
    assert (view.uid, view.change, view.summary) == (info.uid, info.change, info.summary)
    assert (view.info.floor, view.info.meta) == (info.floor, info.meta)
    assert view.messages == tuple(store.get_history(key))
    fields = ("meta", "floor", "count", "visible", "undoable", "forked_from")
    return {
        "visible messages": [(m.seq, m.to_json()) for m in view.messages],
        "messages": [(m.seq, m.to_json(), m.hidden) for m in store.get_history(key, full=True)],
        "summary": store.get_summary(key),
        **{name: getattr(info, name) for name in fields},
    }


def all_contents(store: Store) -> dict[str, Any]:
    """Return the content of all sessions."""
    return {key: session_content(store, key) for key in store.list_sessions()}


def trash_content(store: Store) -> list[tuple[str, int]]:
    """Return the deleted sessions in comparable form: keys and numbers of messages."""
    return [(trashed.key, trashed.count) for trashed in store.list_trash()]
