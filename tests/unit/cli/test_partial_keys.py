"""The start or end of a key instead of the whole key: only for commands that change nothing."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenolog.cli import workspace
from stenolog.stores.open_store import open_store
from stenolog.transfer.open_sessions import open_sessions
from support.cli import Steno

_is_in_terminal = workspace._is_in_terminal

pytestmark = pytest.mark.usefixtures("place")


@pytest.fixture(autouse=True)
def _terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspace, "_is_in_terminal", lambda: True)


@pytest.mark.parametrize("command", ["show", "tail", "export", "stats"])
def test_script_needs_the_whole_key(
    steno: Steno, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workspace, "_is_in_terminal", _is_in_terminal)
    result = steno(command, "telegram:1")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "A script needs a whole key. 1 key matches" in result.stderr


@pytest.mark.quick(5)
@pytest.mark.parametrize("part", ["telegram:1", "te", "123", "egram:123"])
@pytest.mark.parametrize("command", [["show"], ["tail"], ["export"], ["stats"]])
def test_reading_command_accepts_the_start_or_end_of_one_key(
    steno: Steno, command: list[str], part: str
) -> None:
    result = steno(*command, part)
    assert (result.exit_code, result.stdout) == (0, steno(*command, "telegram:123").stdout)
    assert result.stderr.startswith("Session telegram:123\n")
    assert "Session" not in steno(*command, "telegram:123").stderr


def test_part_of_a_key_needs_to_be_at_its_start_or_end(steno: Steno) -> None:
    result = steno("show", "gram")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == (
        "Error: There is no session 'gram' in ./workspace. `steno list` lists the sessions.\n"
    )


def test_start_of_a_part_after_a_colon_is_enough(steno: Steno) -> None:
    with open_store("workspace") as store:
        store.add_message("claude-code:da6cea2d-1:agent:7f", "user", "hello")
    for part in ("da6cea", "da6cea2d-1:ag", "age"):
        shown = steno("show", part, "--json")
        assert json.loads(shown.stdout)["key"] == "claude-code:da6cea2d-1:agent:7f"
    assert steno("show", "a6cea").exit_code == 1


def test_error_names_the_workspace_that_was_searched(place: Path, steno: Steno) -> None:
    other = str(place / "workspace")
    assert f"no session 'nobody' in {other}. `steno" in steno("show", "nobody", "-w", other).stderr


def test_whole_key_takes_precedence_over_parts_of_keys(steno: Steno) -> None:
    with open_store("workspace") as store:
        store.add_message("telegram:1234", "user", "longer")
        store.add_message("old:telegram:123", "user", "longer at the start")
    assert json.loads(steno("show", "telegram:123", "--json").stdout)["key"] == "telegram:123"


def test_alias_takes_precedence_over_parts_of_keys(place: Path, steno: Steno) -> None:
    folder = place / "old"
    folder.mkdir()
    (folder / "x.jsonl").write_text('{"role":"user","content":"from the alias"}\n')
    meta = {"key": "imported:1", "aliases": ["telegram"]}
    (folder / "x.meta.json").write_text(json.dumps(meta))
    assert steno("import", str(folder), "--aliases").exit_code == 0
    shown = json.loads(steno("show", "telegram", "--json").stdout)
    assert shown["key"] == "imported:1"


def test_ambiguous_part_is_reported_with_five_keys(steno: Steno) -> None:
    with open_store("workspace") as store:
        for number in range(7):
            store.add_message(f"cli:many-{number}", "user", "hello")
    result = steno("show", "cli:many")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == (
        "Error: There is no session 'cli:many' in ./workspace. 7 keys match:\n"
        "  cli:many-0\n  cli:many-1\n  cli:many-2\n  cli:many-3\n  cli:many-4\n  … and 2 more\n"
    )


def test_key_that_starts_and_ends_with_the_part_matches_once(steno: Steno) -> None:
    with open_store("workspace") as store:
        store.add_message("aba:x:aba", "user", "hello")
    assert json.loads(steno("show", "aba", "--json").stdout)["key"] == "aba:x:aba"


@pytest.mark.parametrize(
    "command",
    [
        ["delete", "telegram", "--yes"],
        ["delete", "telegram", "--dry-run"],
        ["purge", "telegram", "--yes"],
        ["rename", "telegram", "A title"],
        ["tag", "telegram", "x"],
        ["tag", "telegram"],
        ["fork", "telegram", "copy"],
        ["undo", "telegram"],
        ["archive", "telegram"],
        ["summarize", "telegram", "-m", "scripted"],
    ],
)
def test_changing_command_names_the_key_and_changes_nothing(
    place: Path, steno: Steno, command: list[str]
) -> None:
    logs = place / "workspace" / "sessions"
    before = {path: path.read_bytes() for path in logs.iterdir() if path.is_file()}
    result = steno(*command)
    assert (result.exit_code, result.stdout) == (1, "")
    place_text = "" if command[0] == "summarize" else " in ./workspace"
    assert result.stderr == (
        f"Error: There is no session 'telegram'{place_text}. This command needs a whole key. "
        "1 key matches:\n  telegram:123\n"
    )
    assert {path: path.read_bytes() for path in before} == before


def test_keys_in_the_error_cannot_control_the_terminal(steno: Steno) -> None:
    with open_store("workspace") as store:
        store.add_message("bad:\x1b[2J1", "user", "hello")
        store.add_message("bad:2", "user", "hello")
    result = steno("show", "bad")
    assert result.exit_code == 1
    assert "\x1b" not in result.stderr


def test_part_of_a_key_finds_only_sessions_of_the_named_agent(steno: Steno) -> None:
    sessions = open_sessions("workspace", agent="ada")
    sessions.add_message("cli:secret", "user", "hello")
    sessions.close()
    assert steno("show", "secret").exit_code == 1
    assert steno("show", "secret", "--agent", "ada").exit_code == 0


@given(
    st.lists(st.text(alphabet="ab:-1", min_size=1, max_size=30), min_size=1, unique=True),
    st.sampled_from([(1, 2), (3, 5), (8, 12)]),
)
def test_short_key_selects_only_its_session(keys: list[str], lengths: tuple[int, int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workspace, "_SHORT_KEY_LENGTHS", lengths)
        patch.setattr(workspace, "_MAX_WHOLE_KEY_LENGTH", lengths[0])
        for key, text in workspace.short_keys(keys, keys).items():
            assert text == key or (
                workspace.matching_keys(keys, text) == [key] and len(text) in lengths
            )


def test_shortest_part_of_a_key_is_chosen() -> None:
    first = "claude-code:20c7a18b-7d9d-457e-bc34-7dfb461f0515"
    child = f"{first}:a7371e2533c617445"
    second = "claude-code:20c7a18b-7f55-457e-bc34-000000000000"
    keys = [
        first,
        child,
        second,
        "telegram:123",
        "slack:general:1700000000.000100",
        "x:-abcdefghijklmnop",
    ]
    assert workspace.short_keys(keys, keys) == {
        first: "461f0515",
        child: "a7371e25",
        second: "00000000",
        "telegram:123": "telegram:123",
        "slack:general:1700000000.000100": "17000000",
        "x:-abcdefghijklmnop": "x:-abcde",
    }
    assert workspace.short_keys([first], [first, second]) == {first: "461f0515"}
    assert workspace.short_keys([first], [first]) == {first: "20c7a18b"}
