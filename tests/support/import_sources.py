"""Small files of plain messages, which can grow turn by turn, and what a store has of them."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from stenolog.stores.base import Store
from stenolog.transfer.merge import IMPORT_TIME

DAY: Final = "2026-11-15"


def words(count: int) -> list[str]:
    """Return the texts of a session, alternating between user and assistant."""
    return [f"word {number}" for number in range(count)]


def role(number: int) -> str:
    return "user" if number % 2 == 0 else "assistant"


def stamp(number: int) -> str:
    return f"{DAY}T09:16:{number:02d}.000001"


def plain(place: Path, count: int) -> Path:
    place.mkdir(parents=True, exist_ok=True)
    found = [{"role": role(n), "content": word} for n, word in enumerate(words(count))]
    (place / "k.json").write_text(json.dumps(found))
    return place / "k.json"


def plain_lines(place: Path, count: int) -> Path:
    place.mkdir(parents=True, exist_ok=True)
    found = [
        {"role": role(n), "content": word, "at": stamp(n)} for n, word in enumerate(words(count))
    ]
    (place / "k.jsonl").write_text("".join(json.dumps(one) + "\n" for one in found))
    return place / "k.jsonl"


SHAPES: Final[dict[str, Callable[[Path, int], Path]]] = {
    "plain": plain,
    "plain-lines": plain_lines,
}
"""Functions that write the session `k` with a number of messages and return SOURCE."""


def picture(store: Store) -> dict[str, Any]:
    """Return everything that a store has of its sessions, without the times of imports."""
    return {
        key: (
            [(m.seq, m.hidden, m.at, m.to_json()) for m in store.get_history(key, full=True)],
            store.get_summary(key),
            store.info(key).floor,
            _timeless(store.info(key).meta),
        )
        for key in store.list_sessions()
    }


def _timeless(meta: Mapping[str, Any]) -> dict[str, Any]:
    receipts = [{**one, IMPORT_TIME: ""} for one in meta.get("imported", [])]
    return {**meta, "imported": receipts}
