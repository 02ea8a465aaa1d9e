"""Reads the questions in recall_set.txt, and answers them with plain full-text search."""

import re
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from stenolog.catalog.message_metadata import mark_received
from stenolog.stores.base import Store

TEXT = Path(__file__).parents[1] / "unit" / "memory" / "recall_set.txt"
OWNER = "talk:someone"
ROLES = {"u": "user", "a": "assistant"}

Place = tuple[str, int]
"""Session key and seq of a message."""


@dataclass(frozen=True)
class Asked:
    """A question and the messages with its answer."""

    text: str
    answers: frozenset[Place]


@dataclass(frozen=True)
class Talk:
    """One conversation."""

    key: str
    at: datetime
    said: list[tuple[str, str]] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)


def talks() -> list[Talk]:
    """Return all conversations of the set."""
    found: list[Talk] = []
    for line in TEXT.read_text(encoding="utf-8").splitlines():
        if line.startswith("== "):
            at = datetime.fromisoformat(line[3:]).replace(hour=18, tzinfo=UTC)
            found.append(Talk(f"talk:{len(found)}:someone", at))
        elif line[:3] in ("u: ", "a: "):
            found[-1].said.append((ROLES[line[0]], line[3:]))
        elif line.startswith("? "):
            text, _, seqs = line[2:].partition(" => ")
            places = frozenset((found[-1].key, int(seq)) for seq in seqs.split(","))
            found[-1].asked.append(Asked(text, places))
    return found


def tell_all(store: Store, said: Sequence[Talk]) -> None:
    """Store all conversations."""
    for talk in said:
        plain = [{"role": role, "content": text} for role, text in talk.said]
        messages = [
            mark_received(body, sender=OWNER) if body["role"] == "user" else body for body in plain
        ]
        store.add_messages(talk.key, messages, at=[talk.at] * len(messages))


def plain_search(said: Sequence[Talk], questions: Sequence[str], *, limit: int) -> list[set[Place]]:
    """Return the best messages for each question by FTS5 with its stemmer and bm25."""
    connection = sqlite3.connect(":memory:")
    connection.execute("CREATE VIRTUAL TABLE plain USING fts5 (text, tokenize = 'porter')")
    places: dict[int, Place] = {}
    for talk in said:
        for seq, (_, text) in enumerate(talk.said, 1):
            cursor = connection.execute("INSERT INTO plain (text) VALUES (?)", (text,))
            places[cursor.lastrowid or 0] = (talk.key, seq)
    found = []
    for question in questions:
        words = " OR ".join(f'"{word}"' for word in re.findall(r"\w+", question))
        rows = connection.execute(
            "SELECT rowid FROM plain WHERE plain MATCH ? ORDER BY rank LIMIT ?", (words, limit)
        )
        found.append({places[rowid] for (rowid,) in rows})
    connection.close()
    return found
