"""What `--json` writes is what these shapes say: each command's output against a JSON schema."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import click
import jsonschema_rs
import msgspec
import pytest
from click.testing import Result
from msgspec import Struct

from stenolog.cli import main
from stenolog.memory.notes import Draft, Notes
from stenolog.memory.scopes import Scope
from stenolog.stores.open_store import open_store

Steno = Callable[..., Result]

KEY = "telegram:123"


class _Exact(Struct, forbid_unknown_fields=True):
    """A shape that has these fields and no others."""


class Listed(_Exact):
    key: str
    uid: str
    title: str
    state: Literal["idle", "running", "interrupted"]
    visible: int
    count: int
    tokens: int
    created: str | None
    updated: str | None
    tags: list[str]
    agent: str | None
    channel: str | None
    prompt: str
    problem: str | None
    last_message: str | None
    program: str | None
    project: str | None
    model: str | None
    input_tokens: int
    output_tokens: int
    usd: float | None
    failed: int
    forked_from: str | None


class Said(_Exact):
    seq: int
    at: str
    hidden: bool
    message: dict[str, Any]


class Shown(_Exact):
    key: str
    uid: str
    title: str
    created: str
    updated: str
    summary: str
    visible: int
    count: int
    messages: list[Said]


class Found(_Exact):
    anchor: str
    key: str
    uid: str
    title: str
    seq: int
    role: str
    at: str
    hidden: bool
    snippet: str
    marks: list[tuple[int, int]]


class Renamed(_Exact):
    key: str
    title: str | None
    was: str | None


class Tagged(_Exact):
    key: str
    tags: list[str]
    was: list[str]


class Forked(_Exact):
    key: str
    uid: str
    forked_from: str
    at: int
    messages: int


class TakenBack(_Exact):
    key: str
    op: Literal["truncate", "clear", "hide", "show", "replace", "checkpoint", "summary"]
    shown: int
    hid: int
    summary_restored: bool
    left: int


class Compacted(_Exact):
    key: str
    hidden: int
    first: int | None
    last: int | None
    tokens_before: int | None
    tokens_after: int | None
    fallback: str | None
    dry_run: bool


class Archived(_Exact):
    key: str
    archived: int
    bytes_before: int | None
    bytes_after: int | None
    dry_run: bool
    problem: str | None


class Deleted(_Exact):
    key: str
    uid: str
    messages: int
    deleted: str | None
    dry_run: bool


class InTrash(_Exact):
    key: str
    uid: str
    messages: int
    deleted: str


class Restored(_Exact):
    key: str
    uid: str
    was: str
    messages: int


class Purged(_Exact):
    key: str
    namespace: str | None
    messages: int
    before: int | None
    not_reached: list[str]
    problem: str | None
    dry_run: bool


class Noted(_Exact):
    id: str
    agent: str
    who: str
    kind: Literal["core", "daily"]
    at: str
    state: Literal["in force", "superseded", "forgotten"]
    about: str
    text: str
    quote: str
    session: str
    uid: str
    seqs: list[int]
    confidence: float
    supersedes: list[str]
    superseded: str | None
    superseded_by: str | None


class Forgotten(_Exact):
    id: str
    agent: str
    who: str
    purged: bool
    in_force_again: list[str]
    not_reached: list[str]
    dry_run: bool


class Remembered(_Exact):
    agent: str
    who: str
    in_force_again: list[str]
    superseded_again: list[str]


class Imported(_Exact):
    key: str
    added: int
    messages: int
    dropped: int
    layout: str
    file: str
    problems: list[str]
    notes: list[str]
    aliases: list[str]
    aliases_left: list[str]
    dry_run: bool


class Exported(_Exact):
    key: str
    file: str
    format: Literal["jsonl", "openai", "markdown", "html"]
    messages: int
    redacted: int


class ConfigFile(_Exact):
    file: str


class ConfigPath(ConfigFile):
    found: bool


class Usage(_Exact):
    input_tokens: int
    output_tokens: int
    cached_tokens: int


class Answered(_Exact):
    key: str
    answer: str
    seq: int | None
    outcome: str
    saved: bool
    model: str
    usage: Usage
    tools: list[dict[str, Any]]


class CopyProblem(_Exact):
    key: str
    uid: str
    reason: str


class CopiedNamespace(_Exact):
    sessions: int
    messages: int
    problems: list[CopyProblem]
    only_there: list[str]


class Copied(_Exact):
    sessions: int
    deleted: int
    written: int
    messages: int
    seconds: float
    messages_per_second: int
    lost: int
    namespaces: dict[str, CopiedNamespace]


class Setting(_Exact):
    value: Any
    source: str


class SettingsShown(_Exact):
    file: str
    found: bool
    settings: dict[str, Setting]
    keys: list[str]


class Report(Struct):
    """Of the doctor."""

    findings: list[dict[str, Any]]
    repairs: list[dict[str, Any]]


CASES: list[tuple[str, type[Struct]]] = [
    ("list", Listed),
    ("show telegram:123", Shown),
    ("show telegram:123 --all", Shown),
    ("show telegram:123 --at 2", Shown),
    ("tail telegram:123", Said),
    ("search message", Found),
    ("rename telegram:123 Counting", Renamed),
    ("tag telegram:123", Tagged),
    ("tag telegram:123 +a -b", Tagged),
    ("fork telegram:123 other", Forked),
    ("undo telegram:123", TakenBack),
    ("summarize telegram:123 --model scripted", Compacted),
    ("summarize telegram:123 --model scripted --dry-run", Compacted),
    ("summarize cli:default --model scripted", Compacted),
    ("archive telegram:123", Archived),
    ("archive --all --dry-run", Archived),
    ("delete telegram:123 --yes", Deleted),
    ("delete telegram:123 cli:default --dry-run", Deleted),
    ("restore --list", InTrash),
    ("restore gone", Restored),
    ("purge telegram:123 --yes", Purged),
    ("purge telegram:123 --before 2 --yes", Purged),
    ("purge --scope telegram:123 --dry-run", Purged),
    ("purge --scope telegram:123 --yes", Purged),
    ("memory list", Noted),
    ("memory search tea", Noted),
    ("memory show {note}", Noted),
    ("memory forget {note}", Forgotten),
    ("memory forget {note} --dry-run", Forgotten),
    ("memory forget {note} --purge --yes", Forgotten),
    ("memory undo --who gone", Remembered),
    ("import old", Imported),
    ("import old --dry-run", Imported),
    ("export telegram:123 -o page.html", Exported),
    ("config init", ConfigFile),
    ("config path", ConfigPath),
    ("ask hello --model scripted", Answered),
    ("copy workspace sqlite:copy.db", Copied),
    ("backup copies", Copied),
    ("config show", SettingsShown),
    ("doctor", Report),
]

WITHOUT = {
    "chat": "it talks",
    "hook": "it prints settings of another program, which are JSON",
    "open": "it opens a browser",
    "serve": "it serves",
    "token": "it prints one line for `$(steno token)`",
    "view": "it serves",
}
"""Commands that take no --json, and why."""

OF_THEIR_OWN = {"retention list", "retention run", "stats"}
"""Commands whose reports are held against a schema in tests of their own."""


@pytest.fixture
def note(place: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A workspace with notes and a trash; the id of a note."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(place / "config"))
    (place / "old").mkdir()
    (place / "old" / "old.json").write_text('[{"role": "user", "content": "from before"}]')
    with open_store("workspace") as store:
        store.add_message("gone", "user", "hello")
        store.delete("gone")
        for number in range(5, 11):
            store.add_message(KEY, "user" if number % 2 else "assistant", f"message {number}")
    with open_store("workspace", namespace="notes") as store:
        notes = Notes(store)
        [made] = notes.add(Scope(who=KEY), [Draft(kind="core", text="likes tea")])
        [lost] = notes.add(Scope(who="gone"), [Draft(kind="core", text="likes rain")])
        notes.forget(Scope(who="gone"), lost.id)
    return made.id


@pytest.mark.parametrize(("line", "shape"), CASES, ids=[line for line, _ in CASES])
def test_json_output_matches_its_schema(
    steno: Steno, note: str, line: str, shape: type[Struct]
) -> None:
    result = steno(*line.format(note=note).split(), "--json")
    assert result.exit_code == 0, result.stderr
    schema = msgspec.json.schema(shape)
    objects = _objects(result.stdout)
    assert objects
    for one in objects:
        jsonschema_rs.validate(schema, one)


def test_schemas_reject_wrong_output() -> None:
    schema = msgspec.json.schema(Renamed)
    fine = {"key": "k", "title": None, "was": "x"}
    jsonschema_rs.validate(schema, fine)
    for wrong in ({**fine, "more": 1}, {**fine, "key": 1}, {"key": "k"}):
        with pytest.raises(jsonschema_rs.ValidationError):
            jsonschema_rs.validate(schema, wrong)


def test_every_command_takes_json_and_has_a_schema() -> None:
    takes = dict(_commands(main, ()))
    tested = {name for line, _ in CASES for name in takes if f"{line} ".startswith(f"{name} ")}
    with_json = {name for name, has_json in takes.items() if has_json}
    assert with_json - tested - OF_THEIR_OWN == set()
    assert takes.keys() - with_json - WITHOUT.keys() - OF_THEIR_OWN == set()


def test_every_help_lists_the_exit_codes(steno: Steno) -> None:
    for name, _ in _commands(main, ()):
        told = " ".join(steno(*name.split(), "--help").stdout.split())
        assert "Exit codes: 0" in told, name


def _objects(text: str) -> list[Any]:
    """One object, laid out in lines or not, or one in each line."""
    try:
        return [json.loads(text)]
    except ValueError:
        return [json.loads(line) for line in text.splitlines()]


def _commands(group: click.Group, words: tuple[str, ...]) -> Iterator[tuple[str, bool]]:
    """Every command by its words, and whether it takes --json."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from _commands(command, (*words, name))
        elif command is not None:
            has_json = any("--json" in param.opts for param in command.params)
            yield " ".join((*words, name)), has_json
