"""`steno doctor`: what it prints, what it settles, and how it ends."""

import json
from pathlib import Path

import pytest

from stenolog.stores.open_store import open_store
from support.cli import InTerminal, Steno

pytestmark = pytest.mark.usefixtures("place")


@pytest.fixture
def log(place: Path) -> Path:
    return place / "workspace" / "sessions" / "telegram%3A123.jsonl"


def _tear(log: Path) -> None:
    log.write_bytes(log.read_bytes() + b'{"kind":"mess')


def _damage(log: Path) -> None:
    log.write_bytes(log.read_bytes().replace(b'"message 3"', b'"message 3'))


def test_repair_names_the_agent(place: Path, steno: Steno) -> None:
    with open_store(place / "workspace" / "agents" / "ada") as store:
        store.add_message("telegram:123", "user", "hello")
    _tear(place / "workspace" / "agents" / "ada" / "sessions" / "telegram%3A123.jsonl")
    assert steno("doctor").exit_code == 1
    told = steno("doctor", "--repair").stderr
    assert told == (
        "telegram:123 (agents/ada/sessions/telegram%3A123.jsonl): torn tail fixed: "
        "marked as void; its bytes are still in the file\n"
        "Checked 4 logs: no problems found.\n"
    )


def test_json_is_one_object_with_everything(log: Path, steno: Steno) -> None:
    _damage(log)
    _tear(log)

    result = steno("doctor", "--json", "--repair")
    report = json.loads(result.stdout)

    assert result.exit_code == 1
    assert result.stderr == ""
    assert (report["workspace"], report["sessions"]) == ("workspace", 3)
    (left,) = report["findings"]
    assert (left["kind"], left["key"], left["lost"]) == ("damaged line", "telegram:123", [[3, 3]])
    (settled,) = report["repairs"]
    assert settled["done"]
    assert settled["finding"]["kind"] == "torn tail"


def test_key_cannot_control_the_terminal(place: Path, in_terminal: InTerminal) -> None:
    with open_store("workspace") as store:
        store.add_message("evil\x1b[2J\nkey", "user", "x")
    (log,) = (place / "workspace" / "sessions").glob("evil*")
    _tear(log)

    code, shown = in_terminal("doctor", NO_COLOR="1")

    assert code == 1
    assert "\x1b" not in shown
    assert "torn tail · evil\\x1b[2J\\nkey\n" in shown
