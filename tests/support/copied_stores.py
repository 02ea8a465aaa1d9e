"""Stores of every engine with everything that a copy must preserve, and functions to compare."""

from pathlib import Path
from typing import Any

from stenolog import StenologError
from stenolog.stores.base import Store
from stenolog.stores.in_memory import InMemoryStore
from stenolog.stores.open_store import open_store
from stenolog.stores.snapshots import SnapshotMark
from stenolog.transfer.copy import digest_of

LONG = "what was said \ud800 \x00 " * 1_000
"""A summary that is too long for an engine to repeat in each state."""
LONG_KEY = "K" * 900

_NOT_COPIED = {"damaged", "void_bytes", "generation", "bytes", "change"}
"""Fields of SessionInfo whose values a copy does not keep."""


def opened(engine: str, place: Path, *, name: str = "x", **options: Any) -> Store:
    """Open the store of an engine in a folder. PostgreSQL stores are opened by their tests."""
    match engine:
        case "jsonl":
            return open_store(f"jsonl:{place / name}", **options)
        case "sqlite":
            return open_store(f"sqlite:{place / name}.db", **options)
        case _:
            return InMemoryStore()


def mark_of(store: Store, key: str) -> SnapshotMark:
    """Return the mark of the session with this key that is not deleted."""
    [found] = [m for m in store.admin.list_snapshots() if m.key == key and m.deleted is None]
    return found


def fill(store: Store) -> None:
    """Create sessions with everything that a session can contain."""
    for number in range(30):
        once = f"t{number} \udfff" if number % 3 == 0 else None
        store.add_message("a", "user", f"m{number} \ud800", once=once)
    store.add_messages("a", [{"n": number} for number in range(4)], once="batch")
    store.checkpoint("a", summary=LONG, upto=12)
    store.compact("a")
    store.admin.hide("a", 15, 16)
    store.set_history("a", [*store.get_history("a")[:5], {"x": 1}, {"y": [2.5, None]}])
    store.checkpoint("a", summary="then " + LONG, upto=14)
    store.add_message("a", "user", "after it all", once="last")
    store.set_summary("a", "short \x00")
    store.set_meta("a", title="T", aliases=["another name"], **{"\ud800": {"b": 1, "a": 2}})
    store.set_meta("only meta", x=1)
    store.set_summary("only a summary", "yes")
    store.fork("a", "fork")
    for text in ("first", "second", "third"):
        store.add_message("b/\u00e9:X", "user", text, once=text)
        if text != "third":
            store.delete("b/\u00e9:X")
    for number in range(10):
        store.add_message("purged", "user", str(number), once=f"p{number}")
    store.clear("purged")
    store.undo("purged")
    store.truncate_history("purged", 3)
    store.admin.purge("purged", before=5)
    store.add_message(LONG_KEY, "user", "a long key")


def go_on(store: Store) -> None:
    """Change copied sessions in every possible way."""
    store.add_message("a", "user", "more", once="more")
    store.undo("a")
    store.admin.purge("a", before=5)
    store.compact("purged")
    store.delete("fork")
    store.admin.restore("b/\u00e9:X", as_key="another key")
    store.delete("only meta")
    store.add_message("only meta", "user", "another life")
    store.set_summary("only a summary", LONG)
    store.add_message("new", "user", "new")


def everything(store: Store) -> dict[str, Any]:
    """Return everything that can be read from the store, including times."""
    found: dict[str, Any] = {
        "trash": [(one.key, one.uid, one.deleted, one.count) for one in store.admin.list_trash()]
    }
    for key in store.list_sessions():
        info = store.info(key)
        found[key] = (
            {
                name: getattr(info, name)
                for name in info.__struct_fields__
                if name not in _NOT_COPIED
            },
            store.get_summary(key),
            [(m.seq, m.at, m.to_json()) for m in store.get_history(key)],
            [(m.seq, m.at, m.hidden, m.to_json()) for m in store.get_history(key, full=True)],
            [m.seq for m in store.follow(key, timeout=0)],
        )
    return found


def digests(store: Store) -> dict[str, tuple[str, str | None, str]]:
    """Return key, deletion time and digest of each session, by uid."""
    found = {}
    for mark in store.admin.list_snapshots():
        with store.admin.read_snapshot(mark) as reading:
            found[mark.uid] = mark.key, mark.deleted, digest_of(reading)
    return found


def undone(store: Store) -> dict[str, list[object]]:
    """Undo everything step by step and return the results, by session."""
    found: dict[str, list[object]] = {}
    for key in store.list_sessions():
        found[key] = []
        for _ in range(9):
            try:
                step: object = store.undo(key)
            except StenologError as error:
                step = type(error)
            seqs = [(m.seq, m.hidden) for m in store.get_history(key, full=True)]
            found[key].append((step, store.get_summary(key), seqs))
    return found
