"""`steno list`: golden outputs, filters, errors, and the terminal."""

import json
import os
import re
from pathlib import Path

import pytest
from click.testing import Result

from stenolog.cli import workspace
from stenolog.stores.open_store import open_store
from stenolog.transfer.open_sessions import open_sessions
from support.cli import InTerminal, Steno, documented_columns, log_of_newer_version

pytestmark = pytest.mark.usefixtures("place")

MOMENT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")


def _keys(result: Result) -> list[str]:
    assert result.exit_code == 0
    return [line.split("\t")[0] for line in result.stdout.splitlines()]


def test_help_of_list_names_each_column_of_a_pipe(steno: Steno) -> None:
    columns = documented_columns(steno("list", "--help").stdout, "separated by tabs:")
    words = ["key", "visible messages", "all messages", "last change", "state", "title"]
    assert len(columns) == len(words)
    assert all(word in column for word, column in zip(words, columns, strict=True))
    rows = steno("list").stdout.splitlines()
    assert {row.count("\t") + 1 for row in rows} == {len(columns)}


def test_long_title_is_cut_and_long_key_is_shown_as_a_part_that_selects_it(
    steno: Steno, in_terminal: InTerminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [f"claude-code:{n}0c7a18b-7d9d-457e-bc34-{n}dfb461f0515" for n in range(1, 4)]
    keys.append(f"{keys[0]}:a7371e2533c617445")
    with open_store("workspace") as store:
        for key in keys:
            store.add_message(key, "user", "a title that is too long for a table " * 3)
    _, shown = in_terminal("list", "--prefix", "claude", NO_COLOR="1", COLUMNS="80")
    header, *lines = shown.splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert [line[: header.index("key")].strip()[-1] for line in lines] == ["…"] * 4, shown
    assert header.index("key") >= 45
    monkeypatch.setattr(workspace, "_is_in_terminal", lambda: True)
    selected_keys = []
    for line in lines:
        short_key = line[header.index("key") :].split()[0]
        assert len(short_key) <= 16
        selected_keys.append(json.loads(steno("show", short_key, "--json").stdout)["key"])
    assert selected_keys == keys[::-1]
    assert _keys(steno("list", "--prefix", "claude")) == keys[::-1]


def test_list_is_limited_to_fifty_rows_only_in_a_terminal(
    steno: Steno, in_terminal: InTerminal
) -> None:
    with open_store("workspace") as store:
        for number in range(60):
            store.add_message(f"many:{number:02}", "user", "x")
    assert len(_keys(steno("list"))) == 63
    _, shown = in_terminal("list", NO_COLOR="1")
    assert len(shown.splitlines()) == 52
    assert shown.splitlines()[-1] == "Showing the newest 50. Use --limit for more."
    limited = steno("list", "--limit", "2")
    assert _keys(limited) == ["many:59", "many:58"]
    assert limited.stderr == "Showing the newest 2. Use --limit for more.\n"


def test_list_filters_by_failed_tool_call_program_and_project(steno: Steno) -> None:
    result = {"role": "tool", "tool_call_id": "1", "content": "x", "stenolog": {"failed": True}}
    here = str(Path.cwd())
    folders = {"c:1": "/srv/billing", "c:2": "/opt/billing", "c:3": "/srv/site", "c:4": here}
    with open_store("workspace") as store:
        for key, folder in folders.items():
            store.add_message(key, "user", "hello")
            program = "codex" if key == "c:1" else "claude-code"
            store.set_meta(key, transcript={"program": program, "folders": [folder]})
        store.add_full_message("c:2", result)
    assert _keys(steno("list", "--failed")) == ["c:2"]
    assert _keys(steno("list", "--program", "codex")) == ["c:1"]
    assert _keys(steno("list", "--program", "claude-code", "--failed")) == ["c:2"]
    assert _keys(steno("list", "--project", "/srv/billing")) == ["c:1"]
    assert _keys(steno("list", "--project", "site")) == ["c:3"]
    assert _keys(steno("list", "--project", ".")) == ["c:4"]
    none = steno("list", "--project", "site", "--prefix", "d:")
    assert (none.exit_code, none.stdout, none.stderr) == (0, "", "No matching sessions.\n")
    both = steno("list", "--project", "billing")
    assert (both.exit_code, both.stdout) == (2, "")
    assert "2 projects are named 'billing': /opt/billing, /srv/billing" in both.stderr


def test_title_cannot_control_the_terminal(steno: Steno, in_terminal: InTerminal) -> None:
    with open_store("workspace") as store:
        store.add_message("k", "user", "a\x1b[31mb\x9b2J\tc\u202ed [bold]e")
    assert steno("list", "--prefix", "k").stdout.endswith("\tab cd [bold]e\n")
    _, shown = in_terminal("list", "--prefix", "k", NO_COLOR="1")
    assert "ab cd [bold]e" in shown
    assert not {"\x1b", "\x9b", "\u202e"} & set(shown)


def test_list_reports_an_unreadable_session_and_continues(place: Path, steno: Steno) -> None:
    steno("list")
    log = place / "workspace" / "sessions" / "telegram%3A123.jsonl"
    log.write_bytes(log_of_newer_version(log.read_bytes()))

    result = steno("list")

    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1] == "telegram:123\t-\t-\t-\t-\t"
    assert "cli:default\t2" in result.stdout
    assert "newer stenolog" in result.stderr


def test_list_finds_foreign_sessions_of_databases_and_agents(place: Path, steno: Steno) -> None:
    for folder in ("beside/sessions", "workspace/agents/ada/sessions"):
        (place / folder).mkdir(parents=True, mode=0o700)
        (place / folder / "older.json").write_text('{"key": "older", "messages": []}')
    with open_store("sqlite:beside/some.db") as store:
        store.add_message("k", "user", "hello")
    told = steno("list", "sqlite:beside/some.db").stderr
    assert "import with `steno import beside/sessions -w sqlite:beside/some.db`" in told
    told = steno("list", "--agent", "ada").stderr
    assert "`steno import workspace/agents/ada/sessions -w ./workspace --agent ada`" in told


def test_list_works_without_a_writable_index(place: Path, steno: Steno) -> None:
    (place / "workspace" / "sessions" / "catalog.db").mkdir()
    result = steno("list")
    assert len(_keys(result)) == 3
    assert result.stderr.startswith("the catalog cannot be stored and was built in memory: ")
    assert result.stderr.count("\n") == 1


# --- agents and namespaces -------------------------------------------------------------------


@pytest.mark.parametrize("where", ["workspace", "sqlite:steno.db"])
def test_agents_and_namespaces_can_be_listed(where: str, steno: Steno) -> None:
    for agent in ("ada", "Bob 2"):
        sessions = open_sessions(where, agent=agent)
        sessions.add_message(f"cli:{agent}", "user", "hello")
        sessions.close()
    for namespace in ("notes", "drafts"):
        with open_store(where, namespace=namespace) as store:
            store.add_message(f"in:{namespace}", "user", "hello")

    told = steno("list", "-w", where).stderr
    assert "2 agents have their own sessions: --agent 'Bob 2', --agent ada\n" in told
    assert "1 namespace has its own sessions: --namespace drafts\n" in told

    mine = steno("list", where, "--agent", "Bob 2")
    assert mine.stdout.startswith("cli:Bob 2\t1\t1\t")
    assert mine.stderr == ""
    assert steno("list", where, "--namespace", "drafts").stdout.startswith("in:drafts\t")
    assert "hello" in steno("show", "cli:ada", "-w", where, "--agent", "ada").stdout
    exported = steno("export", "in:notes", "-w", where, "--namespace", "notes")
    assert exported.stdout == '{"role":"user","content":"hello"}\n'
    assert steno("search", "hello", "-w", where, "--agent", "ada").stdout.startswith("cli:ada\t")


def test_error_for_a_namespace_folder_names_the_option(steno: Steno) -> None:
    with open_store("workspace", namespace="drafts") as store:
        store.add_message("cli:default", "user", "hello")
    result = steno("list", "workspace/drafts")
    assert result.exit_code == 1
    assert "give the workspace, which is its parent folder, with --namespace drafts" in (
        result.stderr
    )
    assert steno("list", "workspace", "--namespace", "drafts").exit_code == 0


@pytest.mark.parametrize("command", [["list"], ["show", "k"], ["search", "x"], ["doctor"]])
def test_unreachable_server_is_reported_without_the_password(
    command: list[str], steno: Steno
) -> None:
    result = steno(*command, "-w", "postgres://me:hush@127.0.0.1:1/x?busy_timeout=0")
    assert result.exit_code == (3 if command == ["doctor"] else 1)
    assert result.stderr.startswith("Error: PostgreSQL at 127.0.0.1:1/x: Connection refused;")
    assert "check that the server runs" in result.stderr
    assert "hush" not in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_error_without_a_workspace_names_the_option(
    steno: Steno, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for command in (["list"], ["show", "k"], ["search", "x"], ["doctor"]):
        told = steno(*command).stderr
        assert told == (
            "Error: There is no folder ./workspace here; name a workspace with -w DIR. "
            "`steno chat`, `steno ask` and `steno import` create one, `steno view` works "
            "without one.\n"
        )


def _folder_of_another_program(home: Path, program: str) -> Path:
    """Return a folder as Codex or Claude Code leave it."""
    if program == "codex":
        folder = home / ".codex"
        file = folder / "sessions" / "2026" / "11" / "05" / "rollout-2026-11-05T10-00-00-a.jsonl"
        line = {"type": "session_meta", "payload": {"id": "a"}}
    else:
        folder = home / ".claude"
        file = folder / "projects" / "-home-me" / "a.jsonl"
        line = {"sessionId": "a", "type": "user", "message": {"role": "user", "content": "hi"}}
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(line) + "\n")
    (folder / "history.jsonl").write_text('{"display": "hi"}\n')
    return folder


@pytest.mark.parametrize("program", ["codex", "claude"])
def test_reading_commands_create_no_file_among_those_of_another_program(
    steno: Steno, tmp_path: Path, program: str
) -> None:
    folder = _folder_of_another_program(tmp_path, program)
    files = sorted(tmp_path.rglob("*"))
    name = f".{program}"
    for command in (["list"], ["search", "hi"], ["show", "k"], ["stats"], ["export", "k"]):
        steno(*command, "-w", str(folder))
        steno(*command, "-w", str(tmp_path), "--namespace", name)
    steno("doctor", "-v", str(folder))
    assert sorted(tmp_path.rglob("*")) == files


@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_pipe_or_folder_with_the_name_of_a_log_is_no_log(
    steno: Steno, tmp_path: Path, kind: str
) -> None:
    if kind == "pipe":
        os.mkfifo(tmp_path / "x.jsonl")
    else:
        (tmp_path / "x.jsonl").mkdir()
    done = steno("list", "-w", str(tmp_path))
    assert "there is no stenolog data" in done.stderr.lower()


@pytest.mark.parametrize(
    ("program", "name"), [("codex", "Codex"), ("claude", "Claude Code")], ids=["codex", "claude"]
)
def test_list_says_which_commands_read_the_transcripts_of_a_known_program(
    steno: Steno, tmp_path: Path, program: str, name: str
) -> None:
    folder = _folder_of_another_program(tmp_path, program)
    hint = (
        f"t has transcripts of {name}: `steno view {folder}` shows them, "
        f"`steno import {folder}` imports them.\n"
    )
    for arguments in ([str(folder)], ["-w", str(tmp_path), "--namespace", f".{program}"]):
        told = steno("list", *arguments).stderr
        assert told.endswith(hint)
        assert "contains logs itself" not in told
        assert "doctor" not in told
    assert hint in steno("doctor", str(folder)).stderr
