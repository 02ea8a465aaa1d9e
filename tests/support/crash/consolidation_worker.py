"""Processes that talk and consolidate, and are killed at the n-th step; see migration_worker."""

import json
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from stenolog.memory.consolidation import ConsolidationReport, Consolidator
from stenolog.memory.notes import Notes
from stenolog.memory.scopes import Scope
from stenolog.providers.chat_model import CompletionFunction
from stenolog.sessions.keys import owner_in_key
from stenolog.stores.open_store import open_store
from support.crash.migration_worker import serve

KEYS: Final = ("telegram:1", "telegram:thread:1", "telegram:2")
"""Two sessions of one user, and one of another."""

PLACES: Final = ("Oslo", "Rome", "Lima", "Bern", "Riga")


def said(key: str, number: int) -> str:
    """Return the user's text of a turn, with a recurring subject and a unique one."""
    return f"I live in {PLACES[number]} now, and I have seen city{number} from {key[-1]}"


def _clerk(tone: str) -> CompletionFunction:
    """Return a model that extracts every fact and phrases it with `tone`."""

    def ask(
        messages: Sequence[Mapping[str, Any]],
        *,
        schema: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
    ) -> str:
        del schema, max_tokens
        turns = []
        for number, text in enumerate(str(messages[-1]["content"]).split("## Turn ")[1:], 1):
            lives = re.search(r"I live in (\w+) now", text)
            seen = re.search(r"I have seen (\w+)", text)
            assert lives is not None
            assert seen is not None
            facts = [
                {"text": f"Lives in {lives[1]}.", "about": "home", "quote": lives[0]},
                {"text": f"Has seen {seen[1]}.", "about": seen[1], "quote": seen[0]},
                {"text": "Owns a boat.", "about": "boat", "quote": "I own a boat"},
            ]
            turns.append({"turn": number, "daily": f"{tone} {lives[1]}", "facts": facts})
        return json.dumps({"turns": turns})

    return ask


def talk(where: str) -> None:
    """Store three turns in each session, and summarize the first one."""
    with open_store(where) as sessions:
        for key in KEYS:
            for number in range(3):
                _turn(sessions.add_message, key, number)
            sessions.checkpoint(key, summary="They talked.", upto=2)


def go_on(where: str) -> None:
    """Store two more turns in each session."""
    with open_store(where) as sessions:
        for key in KEYS:
            for number in (3, 4):
                _turn(sessions.add_message, key, number)


def _turn(add: Callable[[str, str, str], int], key: str, number: int) -> None:
    add(key, "user", said(key, number))
    add(key, "assistant", "You don't say.")


def consolidate(where: str) -> None:
    """Consolidate all sessions in batches of two turns."""
    _consolidate(where, "Spoke of", max_turns=2)


def consolidate_otherwise(where: str) -> None:
    """Consolidate with a model that phrases notes differently, in other batches."""
    _consolidate(where, "Told about", max_turns=3)


def _consolidate(where: str, tone: str, *, max_turns: int) -> None:
    with open_store(where) as sessions, open_store(where, namespace="notes") as notes:
        consolidation = Consolidator(
            sessions,
            Notes(notes),
            _clerk(tone),
            scope_of=lambda key: Scope(who=owner_in_key(key), of="sender"),
            max_turns=max_turns,
        )
        for key in KEYS:
            found: ConsolidationReport = consolidation.run(key)
            assert not found.problems, found.problems


PROGRAMS: Final[dict[str, Callable[[str], None]]] = {
    "talk": talk,
    "go on": go_on,
    "consolidate": consolidate,
    "consolidate otherwise": consolidate_otherwise,
}


def _warm_up() -> None:
    """Do everything that is imported or read on first use, so that children do not repeat it."""
    with tempfile.TemporaryDirectory() as folder:
        for where in (str(Path(folder) / "w"), f"sqlite:{folder}/s.db"):
            talk(where)
            consolidate(where)


if __name__ == "__main__":
    _warm_up()
    serve(PROGRAMS)
