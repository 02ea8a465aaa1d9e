"""Tests finding sessions, agents and namespaces in a workspace, and ignoring other files."""

from pathlib import Path

import pytest

from stenolog.errors import UsageError
from stenolog.sessions.folders import (
    OtherNamespaces,
    check_workspace,
    log_folders,
    other_namespaces,
)
from stenolog.stores.open_store import open_store
from stenolog.transfer.open_sessions import open_sessions


def _say(where: str | Path, *, agent: str | None = None) -> None:
    sessions = open_sessions(where, agent=agent)
    assert sessions.add_message("cli:default", "user", "hello") == 1
    sessions.close()


def _note(where: str | Path, namespace: str) -> None:
    with open_store(where, namespace=namespace) as store:
        store.add_message("main:telegram:1", "user", "hello")


def test_only_folders_of_logs_are_found(tmp_path: Path) -> None:
    _say(tmp_path)
    for agent in ("ada", "B/c"):
        _say(tmp_path, agent=agent)
    _note(tmp_path, "notes")
    _note(tmp_path, "drafts")
    _note(tmp_path / "agents" / "ada", "notes")
    theirs = tmp_path / "data"
    theirs.mkdir()
    (theirs / "rows.jsonl").write_text('{"id": 1}\n')
    (tmp_path / "empty").mkdir()
    (tmp_path / "agents" / "readme.txt").write_text("each agent has a folder")
    (tmp_path / "link").symlink_to(tmp_path / "drafts")
    assert log_folders(tmp_path) == [
        "sessions",
        "drafts",
        "notes",
        "agents/%42%2Fc/sessions",
        "agents/ada/sessions",
        "agents/ada/notes",
    ]


def test_notes_folder_of_another_program_is_not_ours(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "todo.md").write_text("milk")
    assert log_folders(tmp_path) == []


def test_namespace_with_only_deleted_sessions_is_found(tmp_path: Path) -> None:
    _note(tmp_path, "drafts")
    with open_store(tmp_path, namespace="drafts") as store:
        store.delete("main:telegram:1")
    assert log_folders(tmp_path) == ["drafts"]


@pytest.mark.parametrize("where", ["{}", "sqlite:{}/steno.db"])
def test_other_agents_and_namespaces_are_listed_on_every_engine(where: str, tmp_path: Path) -> None:
    place = where.format(tmp_path)
    _say(place)
    assert other_namespaces(place) == OtherNamespaces()
    for agent in ("bob", "Ada: 1"):
        _say(place, agent=agent)
    _note(place, "notes")
    _note(place, "drafts")
    assert other_namespaces(place) == OtherNamespaces(
        agents=("Ada: 1", "bob"), namespaces=("drafts",)
    )


def test_in_memory_store_has_no_other_namespaces() -> None:
    assert other_namespaces("memory:") == OtherNamespaces()


def test_folder_of_a_namespace_is_not_a_workspace(tmp_path: Path) -> None:
    _say(tmp_path)
    _note(tmp_path, "drafts")
    check_workspace(tmp_path)
    with pytest.raises(UsageError, match=r"its parent folder$"):
        check_workspace(tmp_path / "sessions")
    with pytest.raises(UsageError, match=r"its parent folder, with --namespace drafts$"):
        check_workspace(tmp_path / "drafts")
