"""A place is not copied to itself, whatever it is called."""

import os
from pathlib import Path

import pytest

from stenolog import UsageError
from stenolog.stores.open_store import open_store
from stenolog.transfer.copy import check_different_places, copy_place
from support.postgres_server import Databases


def _fill(where: str) -> str:
    with open_store(where) as store:
        store.add_message("a", "user", "x")
    return where


def test_copy_onto_the_same_database_writes_nothing(own_url: str) -> None:
    _fill(own_url)
    with open_store(own_url) as store:
        store.set_summary("a", "said")
        store.fork("a", "b")
        store.delete("b")
        before = store.info("a"), store.admin.list_trash()
        with pytest.raises(UsageError, match="source and destination are the same place"):
            copy_place(own_url, own_url)
        report = copy_place(own_url, own_url.replace("127.0.0.1", "localhost"))
        assert (report.written, report.problems) == (0, 0)
        assert (store.info("a"), store.admin.list_trash()) == before


def test_other_databases_and_schemas_of_one_server_are_different_stores(
    own_url: str, own_databases: Databases
) -> None:
    _fill(own_url)
    elsewhere = own_databases.new()
    check_different_places(own_url, elsewhere)
    for target in (elsewhere, f"{own_url}?schema=second"):
        assert copy_place(own_url, target).written == 1
        check_different_places(own_url, target)
    own_databases.leave(elsewhere)


def test_copy_onto_the_same_file_or_folder_is_rejected(tmp_path: Path) -> None:
    _fill(f"sqlite:{tmp_path / 'a.db'}")
    _fill(str(tmp_path / "folder"))
    os.link(tmp_path / "a.db", tmp_path / "hard.db")
    (tmp_path / "soft.db").symlink_to("a.db")
    (tmp_path / "soft").symlink_to("folder")
    for source, target in (
        (f"sqlite:{tmp_path / 'a.db'}", f"sqlite:{tmp_path / 'hard.db'}"),
        (f"sqlite:{tmp_path / 'a.db'}", f"sqlite:{tmp_path / 'soft.db'}?cache_kb=9"),
        (str(tmp_path / "folder"), f"jsonl:{tmp_path / 'soft'}"),
    ):
        with pytest.raises(UsageError, match="source and destination are the same place"):
            copy_place(source, target)
