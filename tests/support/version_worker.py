"""A process with one open store, which makes the calls of its input, one JSON line each.

It runs with the current code and with that of an older commit, so it uses only public names that
both have. The first line of its output says which code was imported.
"""

import json
import sys
from typing import Any

import stenolog
from stenolog import errors


def main(place: str) -> None:
    """Answer every line of the input with one line of output, until the input ends."""
    _answer(stenolog.__file__)
    leases: dict[str, Any] = {}
    store: Any = None
    for line in sys.stdin:
        name, arguments, options = json.loads(line)
        try:
            if name == "open":
                store = stenolog.open_store(place)
                result = None
            elif name == "picture":
                result = _picture(store)
            elif name == "lease":
                leases[arguments[0]] = store.lease(*arguments, **options)
                result = leases[arguments[0]].epoch
            elif name == "add_with_lease":
                result = leases[arguments[0]].store.add_message(*arguments, **options)
            elif name == "release":
                result = leases.pop(arguments[0]).release()
            else:
                result = _plain(getattr(store, name)(*arguments, **options))
        except errors.StenologError as error:
            _answer({"error": type(error).__name__, "message": str(error)})
        else:
            _answer(result)
    if store is not None:
        store.close()


def _answer(result: Any) -> None:
    print(json.dumps(result), flush=True)


def _plain(result: Any) -> Any:
    """Return a result if it can be compared between versions and engines."""
    if hasattr(result, "seq"):
        return result.seq
    return result if result is None or isinstance(result, int | str | list) else None


def _picture(store: Any) -> Any:
    """Return everything that a reader can see in the store."""
    with stenolog.open_catalog(store) as catalog:
        listed = [
            [entry.key, entry.title, entry.visible, entry.count]
            for entry in catalog.list(limit=100).entries
        ]
        found = [[hit.key, hit.seq, hit.hidden] for hit in catalog.search("apple", limit=100).hits]
    return {
        "sessions": {key: _session(store, key) for key in sorted(store.list_sessions())},
        "trash": sorted([one.key, one.uid, one.count] for one in store.list_trash()),
        "catalog": sorted(listed),
        "found": sorted(found),
    }


def _session(store: Any, key: str) -> Any:
    info = store.info(key)
    return {
        "uid": info.uid,
        "visible": [[m.seq, m.to_json().decode()] for m in store.get_history(key)],
        "all": [
            [m.seq, m.to_json().decode(), m.hidden, m.at.isoformat()]
            for m in store.get_history(key, full=True)
        ],
        "summary": store.get_summary(key),
        "meta": dict(info.meta),
        "floor": info.floor,
        "archived": info.archived,
        "last_seq": info.last_seq,
        "undoable": info.undoable,
        "lost": info.lost,
        "damaged": info.damaged,
        "forked_from": info.forked_from,
    }


if __name__ == "__main__":
    main(sys.argv[1])
