"""`steno import`: what it is told, and in a terminal a table, and a bar where it takes long."""

import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Final

import pytest
from click.testing import CliRunner, Result

from stenolog.cli import main
from stenolog.stores.open_store import open_store
from support.cli import InTerminal, Steno
from support.import_sources import SHAPES, plain, words

SAMPLES: Final = Path(__file__).parents[2] / "samples"


@pytest.fixture
def steno(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Steno:
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> Result:
        return CliRunner().invoke(main, [str(one) for one in arguments], prog_name="steno")

    return run


def row(result: Result, number: int = 0) -> list[str]:
    return result.stdout.splitlines()[number].split("\t")


# --- whose sessions --------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_program_is_detected_or_given(steno: Steno, tmp_path: Path, shape: str) -> None:
    source = SHAPES[shape](tmp_path / "old", 3)
    first = steno("import", source.relative_to(tmp_path))
    assert (first.exit_code, first.stderr) == (0, "Imported 1 session, 3 messages.\n")
    assert row(first)[:4] == ["k", "3", "3", "plain"]
    named = steno("import", source, "--from", "plain", "-w", "other")
    assert named.stdout.split("\t")[:4] == ["k", "3", "3", "plain"]
    assert steno("export", "k").exit_code == 0
    again = steno("import", source)
    assert again.stderr == "Imported 0 sessions, 0 messages; 1 session already imported.\n"


def test_format_is_detected_by_content_not_by_name(steno: Steno, tmp_path: Path) -> None:
    for name in ("chat.txt", "history"):
        plain(tmp_path / "old", 2).rename(tmp_path / name)
        result = steno("import", name)
        assert (result.exit_code, result.stderr) == (0, "Imported 1 session, 2 messages.\n"), name
    lines = "".join(json.dumps({"role": "user", "content": word}) + "\n" for word in words(2))
    (tmp_path / "lines.json").write_text(lines)
    (tmp_path / "array.jsonl").write_text('[{"role": "user", "content": "x"}]')
    assert row(steno("import", "lines.json"))[:4] == ["lines", "2", "2", "plain"]
    assert row(steno("import", "array.jsonl"))[:4] == ["array", "1", "1", "plain"]


def test_plain_chat_messages_are_not_attributed_to_a_program(steno: Steno, tmp_path: Path) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    chat = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "1", "tool_call_id": "c"},
    ]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(one) + "\n" for one in chat))
    (tmp_path / "talk.jsonl").write_text(json.dumps(chat[0]) + "\n")
    shutil.copy(SAMPLES / "zeroclaw/telegram_1001_alice.jsonl", tmp_path / "packed.jsonl")
    layouts = {
        name: row(steno("import", f"{name}.jsonl"))[3] for name in ("chat", "talk", "packed")
    }
    assert layouts == {"chat": "plain", "talk": "plain", "packed": "zeroclaw"}
    with open_store("workspace") as store:
        assert [message.to_dict() for message in store.get_history("chat")] == chat


def test_complete_model_request_is_imported_as_a_session(steno: Steno, tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hi"}]
    whole = {"model": "gpt", "temperature": 0.5, "messages": chat}
    (tmp_path / "request.json").write_text(json.dumps(whole, indent=2))
    assert row(steno("import", "request.json"))[:4] == ["request", "1", "1", "plain"]
    (tmp_path / "old.json").write_text(json.dumps({"summary": "s", "messages": chat}))
    assert row(steno("import", "old.json"))[3] == "picoclaw-legacy"


def test_foreign_logs_in_the_session_folder_are_renamed(steno: Steno, tmp_path: Path) -> None:
    place = tmp_path / "workspace/sessions"
    place.mkdir(parents=True)
    for name in "ab":
        message = {"role": "user", "content": name, "timestamp": "2026-11-15T09:16:12"}
        (place / f"{name}.jsonl").write_text(json.dumps(message) + "\n")
    result = steno("import", "workspace")
    assert result.stderr == "Imported 2 sessions, 2 messages.\n"
    assert sorted(path.name for path in place.glob("*.migrated")) == [
        "a.jsonl.migrated",
        "b.jsonl.migrated",
    ]


def test_databases_of_stenolog_are_not_imported(steno: Steno, tmp_path: Path) -> None:
    plain(tmp_path / "old", 2)
    with open_store("sqlite:old/steno.db") as store:
        store.add_message("k2", "user", "ours")
    result = steno("import", "old")
    assert result.stderr == "Imported 1 session, 2 messages.\n"
    result = steno("import", "old/steno.db")
    assert result.exit_code == 2
    assert "this is a store of stenolog; copy it with `steno copy SRC DST`." in result.stderr


def test_database_of_another_program_is_reported(steno: Steno, tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "x.db")) as connection, connection:
        connection.execute("CREATE TABLE messages (id, conversation)")
    result = steno("import", "x.db", "-w", "new")
    assert result.exit_code == 1
    assert "x.db was skipped: line 1 is not JSON: 'SQLite format 3" in result.stderr
    assert not (tmp_path / "new").exists()


# --- under which keys ------------------------------------------------------------------------


def test_later_messages_are_imported_under_the_mapped_key(steno: Steno, tmp_path: Path) -> None:
    for count in (2, 5):
        source = plain(tmp_path / "old", count)
        assert steno("import", source, "--map", "k*=cli:s*").exit_code == 0
    with open_store("workspace") as store:
        assert store.list_sessions() == ["cli:s"]
        assert [message.content for message in store.get_history("cli:s")] == words(5)


def test_no_session_is_mapped_to_the_alias_of_another(steno: Steno, tmp_path: Path) -> None:
    source = tmp_path / "old"
    source.mkdir()
    for name, aliases in (("a_1", ["x:9"]), ("b_2", [])):
        (source / f"{name}.jsonl").write_text('{"role": "user", "content": "hi"}\n')
        fields = {"key": name.replace("_", ":"), "aliases": aliases}
        (source / f"{name}.meta.json").write_text(json.dumps(fields))
    result = steno("import", source, "--aliases", "--map", "b:2=x:9")
    assert result.exit_code == 2
    assert "--map: x:9 is an alias of a:1" in result.stderr
    assert steno("import", source, "--map", "b:2=x:9").exit_code == 0
    with open_store("workspace") as store:
        assert store.list_sessions() == ["a:1", "x:9"]


# --- in a terminal ---------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "shown"), [(2_000, True), (20, False)])
def test_long_import_shows_progress(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    in_terminal: InTerminal,
    count: int,
    shown: bool,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old").mkdir()
    messages = [{"role": "user", "content": "x" * 600} for _ in range(count)]
    (tmp_path / "old" / "k.json").write_text(json.dumps({"key": "k", "messages": messages}))

    code, said = in_terminal("import", "old")

    assert code == 0
    assert ("Importing" in said) == shown
    assert ("100%" in said) == shown
    assert f"Imported 1 session, {count:,} messages." in said
    with open_store("workspace") as store:
        assert store.info("k").count == count
