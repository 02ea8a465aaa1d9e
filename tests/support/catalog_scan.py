"""Expected content of a catalog, found by reading the whole store without the catalog's code."""

import json
import os
import re
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from stenolog.catalog import Catalog
from stenolog.records import Message
from stenolog.stores.base import Store
from stenolog.tokens import message_tokens

EVERYWHERE = "allmessages"
"""A word that tests put into every message, so that a search can return all of them."""

Found = dict[str, dict[str, Any]]


def full_scan(store: Store) -> Found:
    """Return each session and its messages as the store returns them."""
    found: Found = {}
    for key in store.list_sessions():
        info = store.info(key)
        messages = store.get_history(key, full=True)
        visible = store.get_history(key)
        prompts = [text for m in messages if _role(m) == "user" and (text := _text(m).strip())]
        tags = info.meta.get("tags", [])
        found[key] = {
            "uid": info.uid,
            "title": info.meta.get("title") or " ".join((prompts or [""])[0].split()),
            "state": _state(visible),
            "visible": len(visible),
            "count": len(messages),
            "tokens": sum(message_tokens(m) for m in visible),
            "created": info.created,
            "updated": info.updated,
            "last_message": max((m.at for m in messages), default=info.created),
            "forked_from": info.forked_from,
            "tags": tuple(sorted(tags)),
            "agent": info.meta.get("agent"),
            "channel": key.split(":")[0] if ":" in key else None,
            "messages": {
                m.seq: (_role(m), m.at, m.hidden)
                for m in messages
                if EVERYWHERE in _text(m).split()
            },
        }
    return found


def differences(told: Found, expected: Found) -> dict[str, Any]:
    """Return the differences as short texts; empty if there are none."""
    found: dict[str, Any] = {}
    for key in told.keys() | expected.keys():
        if key not in told or key not in expected:
            found[key] = "not listed" if key in expected else "no such session"
            continue
        for name, value in expected[key].items():
            if told[key][name] != value:
                found[f"{key}: {name}"] = (told[key][name], value)
    return found


def words_said(store: Store, word: str) -> set[tuple[str, int]]:
    """Return the messages that contain this word, spelled like this."""
    return {
        (key, m.seq)
        for key in store.list_sessions()
        for m in store.get_history(key, full=True)
        if word in re.split(r"\W+", _text(m))
    }


def catalogued(catalog: Catalog) -> Found:
    """Return what the catalog contains, page by page, so that paging is tested as well."""
    found: Found = {}
    after = None
    while True:
        page = catalog.list(limit=7, after=after)
        for entry in page.entries:
            assert entry.key not in found, "a page repeats what one before it had"
            assert entry.problem is None
            found[entry.key] = {
                "uid": entry.uid,
                "title": entry.title,
                "state": entry.state,
                "visible": entry.visible,
                "count": entry.count,
                "tokens": entry.tokens,
                "created": entry.created,
                "updated": entry.updated,
                "last_message": entry.last_message,
                "forked_from": entry.forked_from,
                "tags": entry.tags,
                "agent": entry.agent,
                "channel": entry.channel,
                "messages": {},
            }
        after = page.after
        if after is None:
            break
    while True:
        hits = catalog.search(EVERYWHERE, newest=True, limit=50, after=after)
        for hit in hits.hits:
            messages = found[hit.key]["messages"]
            assert hit.seq not in messages, "a page repeats what one before it had"
            assert hit.uid == found[hit.key]["uid"]
            messages[hit.seq] = (hit.role, hit.at, hit.hidden)
        after = hits.after
        if after is None:
            return found


def found_words(catalog: Catalog, word: str) -> set[tuple[str, int]]:
    """Return the messages that the catalog finds for a word."""
    hits = catalog.search(word, limit=100_000)
    assert hits.exact
    return {(hit.key, hit.seq) for hit in hits.hits}


def _role(message: Message) -> Any:
    return message.to_dict().get("role")


def _text(message: Message) -> str:
    """Return the content of a message and the arguments of its tool calls."""
    fields = message.to_dict()
    said = [fields["content"]] if isinstance(fields.get("content"), str) else []
    for call in fields.get("tool_calls", []):
        said += [call["function"]["name"], *json.loads(call["function"]["arguments"]).values()]
    return " ".join(said)


def _state(visible: list[Message]) -> str:
    if not visible:
        return "idle"
    last = visible[-1].to_dict()
    ended = last.get("role") in ("assistant", "system") and not last.get("tool_calls")
    return "idle" if ended else "interrupted"


def change_unnoticed(file: Path, statement: str) -> None:
    """Change a catalog file, and restore its modification time."""
    modified = file.stat().st_mtime_ns
    with closing(sqlite3.connect(file)) as connection, connection:
        # Allows to change the tables of which a virtual table consists.
        connection.execute("PRAGMA writable_schema = ON")
        connection.execute(statement)
    os.utime(file, ns=(modified, modified))
