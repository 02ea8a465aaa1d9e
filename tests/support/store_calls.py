"""Store calls as values, and the content of sessions in a form that can be compared.

As a program, this module is the process that the crash contract kills: it makes the calls that its
standard input describes. This module imports neither pytest nor hypothesis.
"""

import importlib
import json
import os
import sys
from collections.abc import Iterable
from typing import Any

from stenolog.errors import NoSuchSession, StenologError
from stenolog.records import CompactionResult, Message, PurgeResult, TrashedSession
from stenolog.stores.admin import StoreAdmin
from stenolog.stores.base import Store


class Call:
    """One method call on a session of a store, such as `Call("hide", 2, 3)`."""

    def __init__(self, name: str, /, *arguments: Any, **options: Any) -> None:
        """Describe a call: the name of the method, and the arguments that follow the key."""
        self.name = name
        self.arguments = arguments
        self.options = options

    def __repr__(self) -> str:
        arguments = [repr(value) for value in self.arguments]
        arguments += [f"{name}={value!r}" for name, value in self.options.items()]
        return f"{self.name}({', '.join(arguments)})"

    def make(self, store: Store, key: str) -> Any:
        """Make the call and return its result. Raises errors of the store."""
        return find_method(store, self.name)(key, *self.arguments, **self.options)

    def outcome(self, store: Store, key: str) -> Any:
        """Make the call and return a comparable result, or the type of the error."""
        try:
            result = self.make(store, key)
        except StenologError as error:
            return type(error)
        return comparable_result(result)


def find_method(store: Any, name: str) -> Any:
    """Return the method with this name, of the store or of its `admin`."""
    return getattr(store.admin if hasattr(StoreAdmin, name) else store, name)


def comparable_result(result: Any) -> Any:
    """Return the result of a call without the parts that may differ between stores."""
    match result:
        case Message():
            return result.seq, result.to_json()
        case TrashedSession():
            return result.key, result.count
        case PurgeResult():
            return result.messages, result.first, result.last
        case CompactionResult():
            # Engines may archive different numbers of messages at a time.
            return None
        case _:
            return result


def session_content(store: Store, key: str) -> dict[str, Any] | None:
    """Return all data of a session that readers can see, except times and engine details.

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
    info_fields = ("meta", "floor", "count", "visible", "undoable", "forked_from")
    return {
        "visible messages": [(m.seq, m.to_json()) for m in view.messages],
        "messages": [(m.seq, m.to_json(), m.hidden) for m in store.get_history(key, full=True)],
        "summary": store.get_summary(key),
        **{name: getattr(info, name) for name in info_fields},
    }


def all_contents(store: Store) -> dict[str, Any]:
    """Return the content of all sessions."""
    return {key: session_content(store, key) for key in store.list_sessions()}


def trash_content(store: Store) -> list[tuple[str, int]]:
    """Return the deleted sessions in comparable form: keys and numbers of messages."""
    return [(trashed.key, trashed.count) for trashed in store.admin.list_trash()]


# --- process that makes calls ---------------------------------------------------------------------


def open_with_factory(factory: str, argument: str) -> Store:
    """Open a store with a factory, given as `module:function`."""
    module, _, function = factory.partition(":")
    store: Store = getattr(importlib.import_module(module), function)(argument)
    return store


def make_calls(store: Store, call_lines: Iterable[str]) -> None:
    """Make calls, given as one JSON line each, and report their start and result on stdout."""
    for call_index, line in enumerate(call_lines):
        key, name, arguments, options = json.loads(line)
        _report("begin", call_index, None)
        result = find_method(store, name)(key, *arguments, **options)
        _report("done", call_index, result if isinstance(result, int | list) else None)


def _report(event: str, call_index: int, result: object) -> None:
    os.write(1, json.dumps([event, call_index, result]).encode() + b"\n")


if __name__ == "__main__":
    make_calls(open_with_factory(sys.argv[1], sys.argv[2]), sys.stdin)
