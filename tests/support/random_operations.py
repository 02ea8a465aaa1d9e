"""Random operations on a store, which a catalog has to follow."""

import json
import random
from datetime import UTC, datetime, timedelta
from typing import Any

from stenolog.errors import NoSuchSession, NothingToUndo, SessionExists, UsageError
from stenolog.stores.base import Store
from support.catalog_scan import EVERYWHERE

KEYS = [f"{channel}:{number}" for channel in ("telegram", "cli") for number in range(4)]
WORDS = ["alpha", "beta", "gamma", "delta", "epsilon"]

OPERATIONS = {
    "add": 12,
    "batch": 6,
    "truncate": 2,
    "clear": 1,
    "hide": 2,
    "show": 1,
    "pop": 1,
    "replace": 2,
    "checkpoint": 2,
    "undo": 3,
    "compact": 2,
    "meta": 2,
    "summary": 1,
    "fork": 2,
    "delete": 2,
    "restore": 2,
    "purge": 1,
    "purge_before": 1,
}


def operate(store: Store, chance: random.Random) -> str:
    """Run one operation on one session and return its name."""
    [operation] = chance.choices(list(OPERATIONS), list(OPERATIONS.values()))
    key = chance.choice(KEYS)
    try:
        _carry_out(store, chance, operation, key)
    except (NoSuchSession, NothingToUndo, SessionExists, UsageError):
        return f"{operation} (refused)"
    return operation


def message(chance: random.Random) -> dict[str, Any]:
    """Return a message of a random role, with some of the words and the common one."""
    text = " ".join([EVERYWHERE, *chance.choices(WORDS, k=chance.randint(1, 4))])
    role = chance.choice(["user", "assistant", "assistant", "call", "tool", "system"])
    if role == "call":
        arguments = json.dumps({"query": text})
        call = {"id": str(chance.randint(1, 3)), "function": {"name": "f", "arguments": arguments}}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    if role == "tool":
        return {"role": "tool", "tool_call_id": str(chance.randint(1, 3)), "content": text}
    return {"role": role, "content": text}


def _carry_out(store: Store, chance: random.Random, operation: str, key: str) -> None:
    last = store.info(key).last_seq if operation not in ("add", "batch", "restore", "purge") else 0
    some = chance.randint(1, max(1, last))
    match operation:
        case "add":
            store.add_full_message(key, message(chance))
        case "batch":
            said = [message(chance) for _ in range(chance.randint(1, 5))]
            then = datetime(2025, 1, 1, tzinfo=UTC) + timedelta(minutes=chance.randint(0, 99))
            store.add_messages(key, said, at=[then] * len(said) if chance.random() < 0.3 else None)
        case "truncate":
            store.truncate_history(key, chance.randint(0, 5))
        case "clear":
            store.clear(key)
        case "hide":
            store.admin.hide(key, some, some + chance.randint(0, 3))
        case "show":
            store.admin.show(key, some, some + chance.randint(0, 3))
        case "pop":
            store.pop(key)
        case "replace":
            kept = [m.to_dict() for m in store.get_history(key)[: chance.randint(0, 6)]]
            store.set_history(key, [*kept, message(chance)])
        case "checkpoint":
            store.checkpoint(key, summary=f"up to {some}", upto=some)
        case "undo":
            store.undo(key)
        case "compact":
            store.compact(key)
        case "meta":
            tags = chance.sample(WORDS, k=chance.randint(0, 2))
            title = chance.choice([None, "Given", "Another"])
            store.set_meta(key, tags=tags or None, title=title, agent=chance.choice([None, "bob"]))
        case "summary":
            store.set_summary(key, chance.choice(WORDS))
        case "fork":
            store.fork(key, chance.choice(KEYS), at=chance.choice([None, some]))
        case "delete":
            store.delete(key)
        case "restore":
            store.admin.restore(key, as_key=chance.choice([None, chance.choice(KEYS)]))
        case "purge":
            store.admin.purge(key)
        case "purge_before":
            store.admin.purge(key, before=some)


def fill_three_sessions(store: Store) -> None:
    """Create three sessions; the last one was changed last."""
    for key in ("telegram:1", "telegram:2", "cli:default"):
        store.add_message(key, "user", f"allmessages hello from {key}")
        store.add_message(key, "assistant", "allmessages hello yourself")
