"""Tests how each part of the package reads each sample, compared with a file next to this one.

STENO_UPDATE=1 writes the file.
"""

import io
import json
import os
import re
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, Final

import pytest

from stenolog.catalog.searchable_text import text_of as searchable
from stenolog.cli.show import MessageRenderer, print_message
from stenolog.context.request_messages import ProviderRequirements, prepare_messages
from stenolog.errors import UnsupportedFormat
from stenolog.gateway.viewer.message_views import message_views
from stenolog.gateway.viewer.safe_html import is_picture_url
from stenolog.memory import transcript
from stenolog.messages import calls_of, has_text, read_message, results_of, text_of, text_parts_of
from stenolog.records import Message
from stenolog.stores.in_memory import InMemoryStore
from stenolog.tokens import message_tokens
from stenolog.transfer.export.formats import readable_parts
from support.message_samples import SAMPLES

FILE: Final = Path(__file__).with_name("readings.json")
_TIME: Final = re.compile(r"\d{4}-\d\d-\d\d(T\d\d:\d\d:\d\dZ| \d\d:\d\d:\d\d \S+)")


def _stored(body: dict[str, Any]) -> Message:
    with InMemoryStore() as store:
        store.add_full_message("k", body)
        return store.get_history("k")[0]


def _tokens(body: dict[str, Any]) -> Any:
    return message_tokens(body)


def _window(body: dict[str, Any]) -> Any:
    try:
        return [
            prepare_messages([body], ProviderRequirements()),
            prepare_messages([body], ProviderRequirements(reasoning="all")),
        ]
    except UnsupportedFormat:
        return "refused"


def _context(body: dict[str, Any]) -> Any:
    return {
        "calls": [[call.id, call.name, call.arguments] for call in calls_of(body)],
        "results": [[result.id, result.content] for result in results_of(body)],
        "has_text": has_text(body),
        "content": text_of(body.get("content")),
        "text": text_parts_of(body),
    }


def _catalog(body: dict[str, Any]) -> Any:
    return searchable(body)


def _export(body: dict[str, Any]) -> Any:
    stored = _stored(body).to_dict()
    parts = readable_parts(stored, list(read_message(stored)), {}, str)
    return [[part.kind, part.name, part.text] for part in parts]


def _viewer(body: dict[str, Any]) -> Any:
    return [
        {
            "kind": one.kind,
            "words": str(one.html),
            "thoughts": [str(text) for text in one.thoughts],
            "pictures": [[address, is_picture_url(address)] for address in one.pictures],
            "calls": [
                [call.name, call.line, str(call.arguments), call.failed] for call in one.calls
            ],
        }
        for one in message_views([_stored(body)])
    ]


def _memory(body: dict[str, Any]) -> Any:
    message = _stored(body)
    with InMemoryStore() as store:
        store.add_full_message("k", body)
        turn = transcript.make_turn([message], store.info("k"))
    return None if turn is None else [[line.role, line.text] for line in turn.lines]


def _cli(body: dict[str, Any]) -> Any:
    with redirect_stdout(io.StringIO()) as printed:
        print_message(_stored(body))
    return _TIME.sub("TIME", printed.getvalue()).splitlines()


def _terminal(body: dict[str, Any]) -> Any:
    lines = MessageRenderer(color=False).message_lines(_stored(body))
    return [_TIME.sub("TIME", line) for line in lines]


READERS: Final[dict[str, Callable[[dict[str, Any]], Any]]] = {
    "tokens": _tokens,
    "context": _context,
    "window": _window,
    "catalog": _catalog,
    "export": _export,
    "viewer": _viewer,
    "memory": _memory,
    "show": _cli,
    "terminal": _terminal,
}


def _as_lines(known: dict[str, dict[str, Any]]) -> str:
    """Return JSON with one line for each reading."""
    tables = [
        f"{json.dumps(reader)}: {{\n"
        + ",\n".join(f" {json.dumps(name)}: {json.dumps(made)}" for name, made in table.items())
        + "\n}"
        for reader, table in known.items()
    ]
    return "{" + ",\n".join(tables) + "}\n"


@pytest.fixture(autouse=True)
def _columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")


@pytest.mark.parametrize("reader", READERS)
def test_readings_of_all_samples_are_unchanged(reader: str) -> None:
    made = {name: READERS[reader](body) for name, body in SAMPLES.items()}
    made = json.loads(json.dumps(made))
    known = json.loads(FILE.read_text()) if FILE.exists() else {}
    if os.environ.get("STENO_UPDATE"):
        known[reader] = made
        ordered = {name: known[name] for name in READERS if name in known}
        FILE.write_text(_as_lines(ordered))
    assert known[reader] == made, "a reading changed: see it with STENO_UPDATE=1"
