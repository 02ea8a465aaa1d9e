"""`steno import` in a terminal: a table, and a bar where it takes long enough to look at one."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from stenolog.stores.opening import open_store

InTerminal = Callable[..., tuple[int, str]]


@pytest.mark.parametrize(("count", "shown"), [(2_000, True), (20, False)])
def test_a_long_import_shows_how_far_it_is(
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
    assert ("Taking in" in said) == shown
    assert ("100%" in said) == shown
    assert f"1 session taken in, {count:,} messages." in said
    with open_store("workspace") as store:
        assert store.info("k").count == count


def test_in_a_terminal_it_is_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_terminal: InTerminal
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old").mkdir()
    message = {"role": "user", "content": "x"}
    (tmp_path / "old" / "k.json").write_text(json.dumps({"key": "k", "messages": [message]}))

    code, said = in_terminal("import", "old", NO_COLOR="1")

    assert code == 0
    head, row, words = (line.rstrip() for line in said.splitlines())
    assert head.split() == ["key", "added", "messages", "layout", "file"]
    assert row.split() == ["k", "1", "1", "picoclaw-legacy", "k.json"]
    assert words == "1 session taken in, 1 message."
    assert "\t" not in said


@pytest.mark.parametrize(
    ("columns", "shown"),
    [
        ("80", ["key", "added", "messages", "layout", "file"]),
        ("70", ["key", "added", "messages", "file"]),
        ("55", ["key", "added", "file"]),
        ("40", ["key", "added"]),
    ],
)
def test_a_narrow_terminal_keeps_the_keys_whole(
    columns: str,
    shown: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    in_terminal: InTerminal,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old").mkdir()
    old = {"key": "telegram:1001:alice", "messages": [{"role": "user", "content": "x"}]}
    (tmp_path / "old" / "telegram_1001_alice.json").write_text(json.dumps(old))

    _, said = in_terminal("import", "old", NO_COLOR="1", COLUMNS=columns)

    head, row, *_ = said.splitlines()
    assert head.split() == shown
    assert row.startswith("telegram:1001:alice ")
