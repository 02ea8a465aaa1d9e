"""`steno import` of plain messages in other shapes: folders, aliases, times."""

import json
from pathlib import Path
from typing import Any

import pytest

from stenolog.stores.open_store import open_store
from support.cli import Steno


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(name: str, *lines: Any) -> None:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text("".join(json.dumps(line) + "\n" for line in lines))


def said(key: str, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": key}


def stored(key: str) -> list[dict[str, Any]]:
    with open_store("workspace", read_only=True) as store:
        return [message.to_dict() for message in store.get_history(key)]


def keys() -> list[str]:
    with open_store("workspace", read_only=True) as store:
        return store.list_sessions()


# --- folders -------------------------------------------------------------------------------------


def test_recursive_takes_keys_from_paths(steno: Steno) -> None:
    write("chats/top.json", [said("a")])
    write("chats/2026/11/talk.jsonl", said("b"))
    write("chats/2026/12/talk.jsonl", said("c"))
    write("chats/.git/hidden.jsonl", said("d"))
    shallow = steno("import", "chats", "-w", "other")
    assert "2 subfolders not searched. Use --recursive to search them." in shallow.stderr
    done = steno("import", "--recursive", "chats")
    assert (done.exit_code, done.stderr) == (0, "Imported 3 sessions, 3 messages.\n")
    assert keys() == ["2026/11/talk", "2026/12/talk", "top"]
    assert stored("2026/12/talk") == [said("c")]
    again = steno("import", "--recursive", "chats")
    assert again.stderr == "Imported 0 sessions, 0 messages; 3 sessions already imported.\n"


def test_recursive_does_not_import_the_workspace_into_itself(steno: Steno) -> None:
    write("chats/a.json", [said("a")])
    steno("import", "-r", "chats")
    assert steno("import", "-r", ".").exit_code == 0
    assert keys() == ["a", "chats/a"]


# --- fields --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("timestamp", 1_700_000_000),
        ("timestamp", 1_700_000_000_000),
        ("created_at", "1700000000"),
        ("time", 1_700_000_000.0),
        ("at", "2023-11-14T22:13:20Z"),
    ],
)
def test_times_since_1970_and_their_field(steno: Steno, name: str, value: Any) -> None:
    write("talk.jsonl", {**said("a"), name: value, "time_zone": "x"}, said("b"))
    steno("import", "talk.jsonl")
    with open_store("workspace", read_only=True) as store:
        first = store.get_history("talk")[0].at
    assert first.isoformat() == "2023-11-14T22:13:20+00:00"


@pytest.mark.parametrize(
    ("usage", "counts"),
    [
        (
            {
                "prompt_tokens": 100,
                "completion_tokens": 20,
                "prompt_tokens_details": {"cached_tokens": 60},
            },
            (100, 20, 60),
        ),
        (
            {"input_tokens": 40, "output_tokens": 20, "cache_read_input_tokens": 60},
            (100, 20, 60),
        ),
        (
            {
                "input_tokens": 100,
                "output_tokens": 20,
                "input_tokens_details": {"cached_tokens": 60},
            },
            (100, 20, 60),
        ),
        ({"prompt_tokens": 7, "completion_tokens": True}, (7, 0, 0)),
    ],
)
def test_usage_of_providers_is_counted(
    steno: Steno, usage: dict[str, Any], counts: tuple[int, int, int]
) -> None:
    answer = {**said("b", "assistant"), "model": "gpt-5", "usage": usage}
    write("talk.jsonl", said("a"), answer)
    steno("import", "talk.jsonl")
    found = json.loads(steno("stats", "--json").stdout)
    assert (found["input_tokens"], found["output_tokens"], found["cached_tokens"]) == counts
    assert "gpt-5" in steno("stats", "--json").stdout
