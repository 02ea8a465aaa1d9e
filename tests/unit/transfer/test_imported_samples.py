"""Every sample of another program, taken in and compared message by message.

What is expected is worked out here from the files as those programs wrote them, and not by our
readers.
"""

import json
import shutil
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import pytest

from stenolog.context.request_messages import ProviderRequirements, prepare_messages
from stenolog.stores.base import Store
from stenolog.stores.open_store import open_store
from stenolog.transfer.importers.legacy_session import ALL_LAYOUTS
from stenolog.transfer.migration import ImportReport, import_folder
from support import temporary_folders

SAMPLES: Final = Path(__file__).parents[2] / "samples"
THE_DAY: Final = datetime(1970, 1, 1, tzinfo=UTC)


@pytest.fixture
def place() -> Iterator[Path]:
    with temporary_folders.folder() as path:
        for sample in SAMPLES.iterdir():
            if sample.is_dir():
                shutil.copytree(sample, path / sample.name)
            else:
                shutil.copy2(sample, path / sample.name)
        yield path


@pytest.fixture(params=["jsonl", "sqlite", "memory"])
def store(request: pytest.FixtureRequest, place: Path) -> Iterator[Store]:
    where = {"jsonl": str(place / "ws"), "sqlite": f"sqlite:{place}/s.db", "memory": "memory:"}
    with open_store(where[request.param]) as opened:
        yield opened


def copied(source: Path, store: Store) -> ImportReport:
    folder, only = (source, None) if source.is_dir() else (source.parent, source.name)
    before = {path: path.read_bytes() for path in _files(source)}
    names = {path.name for path in folder.iterdir()}
    migrated = import_folder(folder, store, only=only, rename_files=False, layouts=ALL_LAYOUTS)
    assert {path: path.read_bytes() for path in _files(source)} == before
    assert {path.name for path in folder.iterdir()} == names
    assert migrated.skipped == ()
    assert all(one.problems == () and one.dropped == 0 for one in migrated.imported)
    return migrated


def _files(source: Path) -> list[Path]:
    return [source] if source.is_file() else [path for path in source.rglob("*") if path.is_file()]


def rows(path: Path, sql: str) -> list[Any]:
    with closing(sqlite3.connect(f"file:{path}?mode=ro&immutable=1", uri=True)) as connection:
        return connection.execute(sql).fetchall()


def compare(
    store: Store, key: str, expected: Sequence[dict[str, Any]], times: Sequence[datetime]
) -> None:
    found = store.get_history(key, full=True)
    assert [message.to_dict() for message in found] == list(expected)
    assert [message.at for message in found] == list(times)
    assert [message.seq for message in found] == list(range(1, len(expected) + 1))
    assert not any(message.hidden for message in found)
    # The session can be gone on with: each call is answered, and nothing is left out.
    sent = prepare_messages(found, ProviderRequirements())
    calls = [call["id"] for message in sent for call in message.get("tool_calls", [])]
    results = [message for message in sent if message["role"] == "tool"]
    assert [message["tool_call_id"] for message in results] == calls
    assert "[interrupted]" not in [message["content"] for message in results]
    assert len(sent) == len(found)


def call(id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_nanobot(store: Store, place: Path) -> None:
    [log] = (place / "nanobot").rglob("*.jsonl")
    head, *lines = [json.loads(line) for line in log.read_text().splitlines()]

    [taken] = copied(place / "nanobot", store).imported

    assert (taken.key, taken.layout, taken.messages) == (head["key"], "nanobot", 4)
    clock = [datetime.fromisoformat(line["timestamp"]).astimezone(UTC) for line in lines]
    compare(store, "telegram:1001", lines, clock)
    assert store.info("telegram:1001").meta["nanobot"] == {
        "last_archived": 0,
        "last_consolidated": 0,
    }


def test_openai_agents(store: Store, place: Path) -> None:
    file = place / "openai-agents.db"
    found = rows(
        file, "SELECT session_id, message_data, created_at FROM agent_messages ORDER BY id"
    )
    given = [(id, json.loads(text), at) for id, text, at in found]

    migrated = copied(file, store)

    assert [(one.key, one.layout, one.messages) for one in migrated.imported] == [
        ("user-1001", "openai-agents", 4),
        ("other-1001", "openai-agents", 1),
    ]
    times = [datetime.fromisoformat(at).replace(tzinfo=UTC) for _, _, at in given]
    asked, called, answered, said, second = (item for _, item, _ in given)
    one = call(called["call_id"], called["name"], called["arguments"])
    expected = [
        asked,
        {"role": "assistant", "content": None, "tool_calls": [one]},
        {"role": "tool", "tool_call_id": answered["call_id"], "content": answered["output"]},
        {"role": "assistant", "content": said["content"][0]["text"]},
    ]
    assert answered["output"] == "rain — 雨"
    compare(store, "user-1001", expected, times[:4])
    compare(store, "other-1001", [second], times[4:])


def test_langchain_part_with_an_odd_type_does_not_end_the_import(
    store: Store, tmp_path: Path
) -> None:
    folder = tmp_path / "histories"
    folder.mkdir()
    odd = [{"type": "human", "data": {"content": [{"type": ["x"]}]}}]
    good = [{"type": "human", "data": {"content": "hello"}}]
    (folder / "a.json").write_text(json.dumps(odd))
    (folder / "b.json").write_text(json.dumps(good))
    import_folder(folder, store, rename_files=False, layouts=ALL_LAYOUTS)
    assert [message.content for message in store.get_history("b")] == ["hello"]


def test_langchain(store: Store, place: Path) -> None:
    file = place / "langchain-history.json"
    human, ai, tool, last = json.loads(file.read_text())

    [taken] = copied(file, store).imported

    assert (taken.key, taken.layout) == ("langchain-history", "langchain")
    [made] = ai["data"]["tool_calls"]
    one = call(made["id"], made["name"], json.dumps(made["args"]))
    result = tool["data"]
    expected = [
        {"role": "user", "content": human["data"]["content"]},
        {"role": "assistant", "content": ai["data"]["content"], "tool_calls": [one]},
        {
            "role": "tool",
            "content": result["content"],
            "tool_call_id": result["tool_call_id"],
            "langchain": {"status": result["status"]},
        },
        {"role": "assistant", "content": last["data"]["content"]},
    ]
    changed = THE_DAY + timedelta(microseconds=file.stat().st_mtime_ns // 1000)
    compare(store, "langchain-history", expected, [changed] * 4)


def test_strands(store: Store, place: Path) -> None:
    agent = place / "strands/session_s1001/agents/agent_a"
    files = [json.loads((agent / f"messages/message_{n}.json").read_text()) for n in range(4)]

    [taken] = copied(place / "strands", store).imported

    assert (taken.key, taken.layout) == ("s1001:a", "strands")
    user, calling, answer, last = (file["message"]["content"][0] for file in files)
    use, result = calling["toolUse"], answer["toolResult"]
    expected = [
        {"role": "user", "content": user["text"]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [call(use["toolUseId"], use["name"], json.dumps(use["input"]))],
        },
        {
            "role": "tool",
            "tool_call_id": result["toolUseId"],
            "content": result["content"][0]["text"],
            "strands": {"status": result["status"]},
        },
        {"role": "assistant", "content": last["text"]},
    ]
    compare(store, "s1001:a", expected, [datetime.fromisoformat(f["created_at"]) for f in files])
    meta = store.info("s1001:a").meta
    assert meta["strands"] == {"state": json.loads((agent / "agent.json").read_text())["state"]}
    assert meta["agent"] == "a"


def test_adk(store: Store, place: Path) -> None:
    file = place / "adk.db"
    found = rows(file, "SELECT event_data FROM events ORDER BY timestamp, rowid")
    events = [json.loads(text) for (text,) in found]

    [taken] = copied(file, store).imported

    assert (taken.key, taken.layout) == ("app:u1001:s1", "adk")
    user, calling, answer, last = (event["content"]["parts"][0] for event in events)
    made, result = calling["function_call"], answer["function_response"]
    expected = [
        {"role": "user", "content": user["text"]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [call(made["id"], made["name"], json.dumps(made["args"]))],
        },
        {
            "role": "tool",
            "tool_call_id": result["id"],
            "name": result["name"],
            "content": json.dumps(result["response"]),
        },
        {"role": "assistant", "content": last["text"]},
    ]
    names = ("id", "author", "invocation_id", "node_info")
    expected = [
        {**message, "adk": {name: event[name] for name in names}}
        for message, event in zip(expected, events, strict=True)
    ]
    times = [THE_DAY + timedelta(seconds=event["timestamp"]) for event in events]
    compare(store, "app:u1001:s1", expected, times)
    state = store.info("app:u1001:s1").meta["adk"]
    assert state == {
        "app_name": "app",
        "user_id": "u1001",
        "id": "s1",
        "state": {"k": 1},
        "user_state": {"lang": "pt"},
    }


def test_all_samples_at_once(place: Path) -> None:
    """The files of a folder, whoever wrote them, and the databases among them."""
    for layout in ("picoclaw", "picoclaw-legacy", "zeroclaw"):
        for path in (place / layout).iterdir():
            shutil.copy2(path, place / path.name)
    shutil.copytree(place / "strands/session_s1001", place / "session_s1001")
    [workspace] = (place / "nanobot").iterdir()
    shutil.copytree(workspace, place / workspace.name)
    with open_store("memory:") as store:
        migrated = import_folder(place, store, rename_files=False, layouts=ALL_LAYOUTS)
        assert [Path(left.file).name for left in migrated.skipped] == ["broken.json"]
        # nanobot and picoclaw have a session of the same key.
        assert sorted(store.list_sessions()) == [
            "app:u1001:s1",
            "cli:torn-1001",
            "discord:1001:77",
            "langchain-history",
            "other-1001",
            "s1001:a",
            "slack:C1001/1700000000.000100",
            "telegram:1001",
            "telegram:1001 (legacy 2026-11-15)",
            "telegram:91001",
            "telegram_1001_alice",
            "user-1001",
        ]
        assert migrated.messages == 52 + 4 + 5 + 4 + 4 + 4
