"""`steno delete`, `restore` and `purge`: what goes, what comes back, and who is asked."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from stenolog.cli import chat_input
from stenolog.errors import StoreUnavailable
from stenolog.memory.notes import Draft, Notes
from stenolog.memory.scopes import Scope
from stenolog.records import TrashedSession
from stenolog.sessions.aliases import change_alias_mark, prepare_alias_mark
from stenolog.sessions.folders import locate_sessions
from stenolog.stores.jsonl import JSONLStore
from stenolog.stores.jsonl.admin import JSONLAdmin
from stenolog.stores.open_store import open_store
from support.cli import InTerminal, Steno, log_of_newer_version

pytestmark = pytest.mark.usefixtures("place")

KEY = "telegram:123"
NEEDLE = "mountaineering"


def _rows(result: Result) -> list[dict[str, Any]]:
    assert result.exit_code == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def _keys(where: str) -> list[str]:
    with open_store(where, read_only=True) as store:
        return store.list_sessions()


# --- on every engine -------------------------------------------------------------------------


def test_one_of_several_deleted_sessions_is_restored_under_another_key(
    steno: Steno, where: str
) -> None:
    [first] = _rows(steno("delete", KEY, "--yes", "--json", "-w", where))
    with open_store(where) as store:
        store.add_message(KEY, "user", "the second life")
    assert steno("delete", KEY, "--yes", "-w", where).exit_code == 0
    with open_store(where) as store:
        store.add_message(KEY, "user", "the third life")

    taken = steno("restore", KEY, "-w", where)
    assert (taken.exit_code, taken.stdout) == (1, "")
    arguments = ("restore", KEY, "--uid", first["uid"], "--as", "old", "--json", "-w", where)
    [back] = _rows(steno(*arguments))
    assert back == {"key": "old", "uid": first["uid"], "was": KEY, "messages": 4}


def test_purge_deletes_everything_of_a_key(steno: Steno, where: str) -> None:
    assert steno("delete", KEY, "--yes", "-w", where).exit_code == 0
    with open_store(where) as store:
        store.add_message(KEY, "user", "again")

    would = steno("purge", KEY, "--dry-run", "-w", where)
    assert (would.exit_code, would.stdout) == (0, "")
    assert would.stderr == (
        "Would be deleted permanently:\n"
        f"  {KEY}: 1 message, and 1 session of this key in the trash with 4 messages\n"
    )
    assert KEY in _keys(where)

    [gone] = _rows(steno("purge", KEY, "--yes", "--json", "-w", where))
    assert (gone["key"], gone["messages"]) == (KEY, 5)
    assert KEY not in _keys(where)
    assert steno("restore", "--list", "-w", where).stdout == ""


@pytest.mark.parametrize("scoped", [True, False])
@pytest.mark.parametrize("there", ["workspace", "sqlite:some.db"])
def test_purge_reports_messages_in_the_fallback_folder(
    steno: Steno, there: str, scoped: bool
) -> None:
    fallback = locate_sessions(there, None).fallback
    for namespace in ("sessions", "sessions.merged-1"):
        with JSONLStore(str(fallback), namespace=namespace) as store:
            store.add_message(KEY, "user", "a secret")
            store.add_message("telegram:other", "user", "hello")
    with open_store(there) as store:
        store.add_message(KEY, "user", "a secret")
    done = steno("purge", *(["--scope"] if scoped else []), KEY, "--yes", "-w", there)
    told = [line for line in done.stderr.splitlines() if "fallback" in line]
    assert told == [
        f"Not deleted: messages of {KEY} in the fallback folder {fallback}/{namespace}; delete "
        f"them with `steno purge {KEY} -w {fallback}{option}`."
        for namespace, option in [
            ("sessions", ""),
            ("sessions.merged-1", " --namespace sessions.merged-1"),
        ]
    ]
    for options in ([], ["--namespace", "sessions.merged-1"]):
        assert steno("purge", KEY, "--yes", "-w", str(fallback), *options).exit_code == 0
    with open_store(there) as store:
        store.add_message(KEY, "user", "again")
    assert "fallback" not in steno("purge", KEY, "--yes", "-w", there).stderr


def _person(where: str) -> None:
    """Fill a place with all there can be of a person, and with others beside."""
    who = "telegram:77"
    with open_store(where) as store:
        for key in (who, "telegram:topic:77", "telegram:777", "telegram:77:9", "slack:77"):
            store.add_message(key, "user", f"{NEEDLE} in {key}")
        store.checkpoint(who, summary=f"About {NEEDLE}.", upto=1)
        store.compact(who)
        store.fork("telegram:topic:77", "telegram:twin:77")
        store.add_message("telegram:gone:77", "user", NEEDLE)
        store.delete("telegram:gone:77")
    agents = "workspace/agents/ada" if where == "./workspace" else where
    namespace = "sessions" if where == "./workspace" else "agents.ada"
    with open_store(agents, namespace=namespace) as store:
        store.add_message(who, "user", f"{NEEDLE} told to ada")
    with open_store(where, namespace="notes") as store:
        for agent in ("main", "ada"):
            for one in (who, "telegram:777"):
                draft = Draft(kind="core", text=f"likes {NEEDLE}")
                Notes(store).add(Scope(agent=agent, who=one), [draft])


def test_purge_scope_deletes_one_person_everywhere(steno: Steno, where: str) -> None:
    _person(where)
    assert NEEDLE in steno("search", NEEDLE, "--prefix", "telegram:77", "-w", where).stdout

    would = _rows(steno("purge", "--scope", "telegram:77", "--dry-run", "--json", "-w", where))
    done = steno("purge", "--scope", "telegram:77", "--yes", "--json", "-w", where)

    gone = _rows(done)
    assert {(one["namespace"], one["key"]) for one in gone} == {
        ("sessions", "telegram:77"),
        ("sessions", "telegram:topic:77"),
        ("sessions", "telegram:twin:77"),
        ("sessions", "telegram:gone:77"),
        ("agents.ada", "telegram:77"),
        ("notes", "main:telegram:77"),
        ("notes", "ada:telegram:77"),
    }
    assert [one["key"] for one in would] == [one["key"] for one in gone]
    assert [one["messages"] for one in would] == [one["messages"] for one in gone]
    # The fork went too, so that it is no more to be told of.
    assert "the fork" not in done.stderr
    assert "Not deleted: messages of telegram:77 in other sessions" in done.stderr
    found = steno("search", NEEDLE, "-w", where).stdout.splitlines()
    assert sorted(line.split("\t")[0] for line in found) == [
        "slack:77",
        "telegram:777",
        "telegram:77:9",
    ]
    assert len(steno("memory", "list", "-w", where).stdout.splitlines()) == 2
    again = steno("purge", "--scope", "telegram:77", "--yes", "-w", where)
    assert (again.exit_code, again.stdout) == (1, "")
    assert again.stderr == "Error: There is no data about telegram:77 here.\n"


def test_no_file_contains_text_of_a_purged_person(place: Path, steno: Steno) -> None:
    for where in ("./workspace", "sqlite:some.db"):
        with open_store(where) as store:
            store.add_message("telegram:77", "user", f"I love {NEEDLE}")
        with open_store(where, namespace="notes") as store:
            draft = Draft(kind="core", text=f"likes {NEEDLE}")
            Notes(store).add(Scope(who="telegram:77"), [draft])
        assert steno("search", NEEDLE, "-w", where).exit_code == 0
        assert steno("purge", "--scope", "telegram:77", "--yes", "-w", where).exit_code == 0
        assert steno("search", NEEDLE, "-w", where).exit_code == 1
    for path in place.rglob("*"):
        if path.is_file():
            assert NEEDLE.encode() not in path.read_bytes(), path


def test_purge_scope_reports_unreadable_sessions_and_deletes_the_rest(
    place: Path, steno: Steno
) -> None:
    with open_store("workspace") as store:
        for key in ("telegram:77", "telegram:topic:77"):
            store.add_message(key, "user", "hello")
    log = place / "workspace" / "sessions" / "telegram%3A77.jsonl"
    log.write_bytes(log_of_newer_version(log.read_bytes()))

    would = steno("purge", "--scope", "telegram:77", "--dry-run")
    assert "  telegram:77: unreadable\n" in would.stderr
    done = steno("purge", "--scope", "telegram:77", "--yes")
    assert done.exit_code == 3
    assert "newer stenolog" in done.stderr
    assert "Deleted permanently: telegram:topic:77, 1 message.\n" in done.stderr
    assert "telegram:topic:77" not in _keys("workspace")
    assert log.exists()


# --- who is asked ----------------------------------------------------------------------------


def test_delete_lists_sessions_and_asks_in_a_terminal(in_terminal: InTerminal) -> None:
    code, shown = in_terminal("delete", KEY, "cli:default", typed="n\n")
    assert code == 1
    assert "To be moved to the trash (`steno restore` brings them back):\n" in shown
    assert f"  {KEY}: 4 messages\n  cli:default: 2 messages\n" in shown
    assert "Delete 2 sessions? [y/N]" in shown
    assert KEY in _keys("workspace")

    code, shown = in_terminal("delete", KEY, "cli:default", typed="y\n")
    assert code == 0
    assert f"Moved {KEY} to the trash. `steno restore {KEY}` brings it back.\n" in shown
    assert _keys("workspace") == ["日本:\n語"]


@pytest.mark.parametrize("answer", ["\n", "n\n", f"{KEY}\n"])
def test_purge_asks_in_a_terminal(answer: str, in_terminal: InTerminal) -> None:
    for command in (["purge", KEY], ["purge", "--scope", KEY]):
        # An answer that is not understood is asked for again; `n` ends the question.
        code, shown = in_terminal(*command, typed=f"{answer}n\n")
        assert code == 1
        assert f"To be deleted permanently:\n  {KEY}: 4 messages\n" in shown
        assert "Delete permanently? This cannot be undone. [y/N]" in shown
        assert KEY in _keys("workspace")


@pytest.mark.parametrize("named", [[KEY, "cli:default"], ["--scope", KEY]], ids=["keys", "scope"])
def test_purge_runs_after_yes(named: list[str], in_terminal: InTerminal) -> None:
    code, shown = in_terminal("purge", *named, typed="y\n")
    assert code == 0
    assert f"Deleted permanently: {KEY}, 4 messages.\n" in shown
    assert KEY not in _keys("workspace")


# --- what can be wrong -----------------------------------------------------------------------


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_one_unknown_key_prevents_all_deletions(steno: Steno, more: list[str]) -> None:
    for command in ("delete", "purge"):
        result = steno(command, KEY, "nobody", "--yes", *more)
        assert (result.exit_code, result.stdout) == (1, "")
        assert "There is no session 'nobody' in ./workspace." in result.stderr
    assert KEY in _keys("workspace")


def test_session_that_cannot_be_deleted_is_reported_and_the_rest_is_deleted(
    steno: Steno, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = JSONLStore.delete

    def delete(store: JSONLStore, key: str) -> TrashedSession:
        if key == KEY:
            raise StoreUnavailable("the disk is away")
        return real(store, key)

    monkeypatch.setattr(JSONLStore, "delete", delete)
    result = steno("delete", KEY, "cli:default", "--yes")
    assert (result.exit_code, "The disk is away." in result.stderr) == (3, True)
    assert (KEY in _keys("workspace"), "cli:default" in _keys("workspace")) == (True, False)


def test_session_that_no_rule_can_delete_exits_with_3(
    place: Path, steno: Steno, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise StoreUnavailable("the disk is away")

    (place / "rules.toml").write_text('[retention.old]\naction = "delete"\ntag = "old"\n')
    steno("tag", KEY, "+old")
    monkeypatch.setattr(JSONLAdmin, "delete_unchanged", fail)
    result = steno("retention", "run", "--config", "rules.toml")
    assert (result.exit_code, result.stdout.split("\t")[0]) == (3, "failed")
    assert f"{KEY}: the disk is away." in result.stderr


def test_a_dry_run_writes_nothing(place: Path, steno: Steno) -> None:
    def files() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}

    before = files()
    for command in (["delete", KEY], ["purge", KEY], ["purge", "--scope", KEY]):
        result = steno(*command, "--dry-run")
        assert result.exit_code == 0, result.stderr
    assert files() == before


def test_long_list_before_the_question_is_shortened(steno: Steno) -> None:
    keys = [f"many:{number:02}" for number in range(25)]
    with open_store("workspace") as store:
        for key in keys:
            store.add_message(key, "user", "hello")
    result = steno("delete", *keys, "--dry-run")
    lines = result.stderr.splitlines()
    assert (len(lines), lines[-1]) == (22, "  … and 5 more")


# --- interrupted purges ----------------------------------------------------------------------


def _interrupt(where: str, key: str) -> None:
    """Leave what a purge leaves that was killed."""
    with open_store(where) as store:
        store.delete(key)
        if where.startswith("sqlite:"):
            store.admin.purge(key)
    if where.startswith("sqlite:"):
        with closing(sqlite3.connect(where.removeprefix("sqlite:"))) as database, database:
            database.execute("INSERT INTO purge (begun) VALUES ('2026-11-05T10:00:00.000000Z')")
    else:
        [log] = Path(where, "sessions", "trash").iterdir()
        log.rename(f"{log}.purged")


@pytest.mark.parametrize("where", ["./workspace", "sqlite:some.db"], indirect=True)
@pytest.mark.parametrize("named", [[KEY], ["--scope", KEY]], ids=["key", "scope"])
def test_interrupted_purge_is_found_and_completed(
    steno: Steno, where: str, named: list[str]
) -> None:
    _interrupt(where, KEY)
    assert "purge" in steno("doctor", "-w", where).stdout
    would = steno("purge", *named, "--dry-run", "-w", where)
    assert would.exit_code == 0, would.stderr
    assert "files of an interrupted purge" in would.stderr
    done = steno("purge", *named, "--yes", "-w", where)
    assert done.exit_code == 0, done.stderr
    assert f"Deleted permanently: {KEY}, " in done.stderr
    assert steno("doctor", "-w", where).exit_code == 0
    assert steno("purge", *named, "--yes", "-w", where).exit_code == 1
    assert _keys(where) == [key for key in _keys(where) if key != KEY]


def test_rest_of_an_interrupted_purge_is_deleted_with_a_new_session(steno: Steno) -> None:
    _interrupt("./workspace", KEY)
    with open_store("workspace") as store:
        store.add_message(KEY, "user", "again")
    would = steno("purge", KEY, "--dry-run", "--json")
    assert "1 message, and files of an interrupted purge" in would.stderr
    done = steno("purge", KEY, "--yes", "--json")
    assert [_rows(one)[0]["messages"] for one in (would, done)] == [5, 5]
    assert not list(Path("workspace/sessions/trash").iterdir())


# --- other names, forks, and what else tells of it -------------------------------------------


def test_purge_scope_follows_aliases(steno: Steno, where: str) -> None:
    with open_store(where) as store:
        for key, names in (
            ("agent:main:direct:1", ["telegram:77"]),
            ("agent:main:direct:2", ["telegram:topic:77", "x"]),
            ("agent:main:direct:3", ["telegram:77"]),
            ("agent:main:other", ["telegram:777"]),
        ):
            store.add_message(key, "user", "hello")
            prepare_alias_mark(store)
            store.set_meta(key, aliases=names)
            change_alias_mark(store)
        store.delete("agent:main:direct:3")
    done = _rows(steno("purge", "--scope", "telegram:77", "--yes", "--json", "-w", where))
    assert {one["key"] for one in done} == {f"agent:main:direct:{number}" for number in (1, 2, 3)}
    assert "agent:main:other" in _keys(where)
    assert steno("restore", "--list", "-w", where).stdout == ""


@pytest.mark.usefixtures("place")
def test_notes_of_a_session_and_of_a_sender_have_different_names(steno: Steno) -> None:
    with open_store("workspace", namespace="notes") as store:
        for scope in (Scope(who="telegram:77"), Scope(who="telegram:77", of="sender")):
            Notes(store).add(scope, [Draft(kind="core", text="likes tea")])
    done = steno("purge", "--scope", "telegram:77", "--yes")
    assert done.exit_code == 0, done.stderr
    assert "Deleted permanently: notes of telegram:77, 1 note." in done.stderr
    assert "Deleted permanently: notes of @telegram:77, 1 note." in done.stderr


def test_purge_names_the_input_history(
    place: Path, steno: Steno, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = place / "state" / "chat-history"
    monkeypatch.setattr(chat_input, "history_file", lambda: file)
    assert "chat input" not in steno("purge", "cli:default", "--yes").stderr
    chat_input.InputHistory(file).store_string("message 1")
    assert f"Not deleted: chat input in {file}.\n" in steno("purge", KEY, "--yes").stderr
    assert file.exists()


def test_a_session_with_a_message_without_role_and_content_can_be_purged(steno: Steno) -> None:
    with open_store("workspace") as store:
        store.add_messages("odd", [{}, {"role": "user"}, {"content": "x"}])
    assert steno("purge", "odd", "--yes").exit_code == 0
