"""`steno retention`: rules from the settings, what they would do, and that nobody is surprised."""

import json
from collections.abc import Callable
from pathlib import Path

import jsonschema_rs
import msgspec
import pytest
from click.testing import Result
from msgspec import Struct

from stenolog.stores.open_store import open_store

Steno = Callable[..., Result]

RULES = """
[retention.spam]
action = "delete"
tag = "spam"

[retention.aged]
action = "purge"
older_than_days = 9

[retention.nothing]
action = "purge"
"""


class _Exact(Struct, forbid_unknown_fields=True):
    """A shape that has these fields and no others."""


class RuleShape(_Exact):
    name: str
    action: str
    older_than_days: float | None
    tag: str | None
    spare_tag: str | None


class DoneShape(_Exact):
    action: str
    rule: str
    agent: str | None
    namespace: str
    key: str
    uid: str
    messages: int
    updated: str
    outcome: str
    message: str


@pytest.fixture
def ruled(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A workspace with something to delete, and a file with rules."""
    (place / "steno.toml").write_text(RULES)
    monkeypatch.setenv("STENO_CONFIG", str(place / "steno.toml"))
    with open_store("workspace") as store:
        store.add_message("telegram:new", "user", "hello")
        store.set_meta("cli:default", tags=["spam"])
    return place


def _keys() -> list[str]:
    with open_store("workspace") as store:
        return store.list_sessions()


def test_retention_without_rules_deletes_nothing(
    place: Path, steno: Steno, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(place / "nowhere"))
    monkeypatch.delenv("STENO_CONFIG", raising=False)
    before = _keys()
    for command in (["list"], ["run"]):
        result = steno("retention", *command)
        assert (result.exit_code, result.stdout) == (0, "")
        assert result.stderr.startswith("There are no rules: all sessions are kept.")
    assert _keys() == before


@pytest.mark.usefixtures("ruled")
def test_rules_are_listed_in_words_and_as_json(steno: Steno) -> None:
    assert steno("retention", "list").stdout == (
        "aged\tpurge\tsessions in the trash, deleted 9 days ago, except those tagged keep\n"
        "nothing\tpurge\tno sessions: a purge rule needs an age\n"
        "spam\tdelete\tsessions tagged spam, except those tagged keep\n"
    )
    schema = msgspec.json.schema(RuleShape)
    for line in steno("retention", "list", "--json").stdout.splitlines():
        jsonschema_rs.validate(schema, json.loads(line))


@pytest.mark.usefixtures("ruled")
def test_retention_dry_run_prints_what_is_due_and_changes_nothing(steno: Steno) -> None:
    before = _keys()
    result = steno("retention", "run", "--dry-run")
    assert result.exit_code == 0
    assert [line.split("\t")[:4] for line in result.stdout.splitlines()] == [
        ["delete", "spam", "cli:default", "2"],
    ]
    assert result.stderr == (
        "Rule nothing matches no session: a purge rule needs an age.\n"
        "1 session would be moved to the trash.\n"
    )
    assert _keys() == before


@pytest.mark.usefixtures("ruled")
def test_retention_applies_the_rules_and_leaves_restored_sessions(steno: Steno) -> None:
    result = steno("retention", "run", "--json")
    assert result.exit_code == 0, result.stderr
    schema = msgspec.json.schema(DoneShape)
    found = [json.loads(line) for line in result.stdout.splitlines()]
    for one in found:
        jsonschema_rs.validate(schema, one)
    assert [(one["key"], one["outcome"]) for one in found] == [("cli:default", "done")]
    assert "cli:default" not in _keys()
    assert "1 session moved to the trash." in result.stderr
    assert steno("restore", "cli:default").exit_code == 0
    again = steno("retention", "run")
    assert "There is nothing to do." in again.stderr, "what was brought back stays"


@pytest.mark.usefixtures("ruled")
def test_session_with_the_tag_keep_is_not_deleted(steno: Steno) -> None:
    assert steno("tag", "cli:default", "+keep").exit_code == 0
    assert steno("retention", "run").exit_code == 0
    assert "cli:default" in _keys()


def test_invalid_rule_is_rejected(ruled: Path, steno: Steno) -> None:
    rules = '[retention.old]\naction = "burn"\n[retention.large]\nolder_than_days = -1\n'
    (ruled / "steno.toml").write_text(rules)
    result = steno("retention", "run")
    assert result.exit_code == 1
    assert 'retention.old.action: must be one of "delete", "purge"' in result.stderr
    assert "retention.large.older_than_days" in result.stderr
    (ruled / "steno.toml").write_text("[retention]\nold = 3\n")
    assert "retention" in steno("retention", "list").stderr
