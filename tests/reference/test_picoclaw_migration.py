"""The tests of picoclaw's migration from JSON, by their names, into both of our stores."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from stenolog import JSONLBackend, Store, open_store
from stenolog.transfer import migrate_from_json

WHERE: Final = {"jsonl": "{}", "sqlite": "sqlite:{}/sessions.db"}
NOW: Final = "2026-11-15T09:15:41.571920657Z"


@pytest.fixture(params=WHERE)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    with open_store(WHERE[request.param].format(tmp_path / "workspace")) as opened:
        yield opened


@pytest.fixture
def old(tmp_path: Path) -> Path:
    folder = tmp_path / "old"
    folder.mkdir()
    return folder


def _write(folder: Path, name: str, key: str, *messages: dict[str, Any], summary: str = "") -> None:
    session = {"key": key, "messages": messages, "created": NOW, "updated": NOW}
    if summary:
        session["summary"] = summary
    (folder / name).write_text(json.dumps(session, indent=2))


def _user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def test_migrate_from_json_basic(store: Store, old: Path) -> None:
    answer = {"role": "assistant", "content": "hi"}
    _write(old, "test.json", "test", _user("hello"), answer, summary="A greeting.")
    assert migrate_from_json(old, store).sessions == 1
    assert [m.content for m in store.get_history("test")] == ["hello", "hi"]
    assert store.get_summary("test") == "A greeting."


def test_migrate_from_json_with_tool_calls(store: Store, old: Path) -> None:
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "web_search", "arguments": '{"q":"test"}'},
    }
    messages: list[dict[str, Any]] = [
        {"role": "assistant", "content": "Searching...", "tool_calls": [call]},
        {"role": "tool", "content": "result", "tool_call_id": "call_1"},
    ]
    _write(old, "tools.json", "tools", *messages)
    assert migrate_from_json(old, store).sessions == 1
    assert [m.to_dict() for m in store.get_history("tools")] == messages


def test_migrate_from_json_multiple_files(store: Store, old: Path) -> None:
    for key in "abc":
        _write(old, f"{key}.json", key, _user(f"msg {key}"))
    assert migrate_from_json(old, store).sessions == 3
    for key in "abc":
        assert [m.content for m in store.get_history(key)] == [f"msg {key}"]


def test_migrate_from_json_invalid_json(store: Store, old: Path) -> None:
    _write(old, "good.json", "good", _user("ok"))
    (old / "bad.json").write_text("{invalid json")
    migrated = migrate_from_json(old, store)
    assert migrated.sessions == 1
    assert len(store.get_history("good")) == 1
    # There, only the log knows of it.
    assert [Path(left.file).name for left in migrated.skipped] == ["bad.json"]
    assert (old / "bad.json").read_text() == "{invalid json"


def test_migrate_from_json_renames_files(store: Store, old: Path) -> None:
    _write(old, "rename.json", "rename", _user("hi"))
    migrate_from_json(old, store)
    assert [path.name for path in old.iterdir()] == ["rename.json.migrated"]


def test_migrate_from_json_idempotent(store: Store, old: Path) -> None:
    _write(old, "idem.json", "idem", _user("once"))
    assert migrate_from_json(old, store).sessions == 1
    assert migrate_from_json(old, store).sessions == 0
    assert len(store.get_history("idem")) == 1
    # There, a file that could not be renamed is put over what came since.
    store.add_message("idem", "user", "newer")
    _write(old, "idem.json", "idem", _user("once"))
    assert migrate_from_json(old, store).messages == 0
    assert [m.content for m in store.get_history("idem")] == ["once", "newer"]


def test_migrate_from_json_colon_in_key(store: Store, old: Path) -> None:
    _write(old, "telegram_123.json", "telegram:123", _user("from telegram"))
    assert migrate_from_json(old, store).sessions == 1
    assert [m.content for m in store.get_history("telegram:123")] == ["from telegram"]
    # There, both names are one file. Here the second is an alias of this one session, and no
    # other two keys that look alike share anything.
    assert len(JSONLBackend(store).get_history("telegram_123")) == 1
    assert store.get_history("telegram_123") == []


def test_migrate_from_json_nonexistent_dir(store: Store, tmp_path: Path) -> None:
    assert migrate_from_json(tmp_path / "nowhere", store).sessions == 0


def test_migrate_from_json_makes_no_session_of_a_meta_file(store: Store, old: Path) -> None:
    """The reference's #1340: a `.meta.json` was taken for a session and emptied the real one."""
    store.add_message("k", "user", "x")
    (old / "k.meta.json").write_text('{"key":"k","summary":"","skip":0,"count":1}')
    assert migrate_from_json(old, store).sessions == 0
    assert [m.content for m in store.get_history("k")] == ["x"]
    assert [path.name for path in old.iterdir()] == ["k.meta.json.migrated"]
