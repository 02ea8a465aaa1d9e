"""A place is not copied to itself, whatever it is called."""

import os
from pathlib import Path

import pytest

from stenolog import UsageError
from stenolog.stores.open_store import open_store
from stenolog.transfer.copy import check_different_places, copy_place
from support.pgbouncer import Bouncer
from support.postgres_server import Databases, Server


def _fill(where: str) -> str:
    with open_store(where) as store:
        store.add_message("a", "user", "x")
    return where


@pytest.mark.parametrize("way", ["name", "socket", "parameters", "conninfo"])
def test_copy_onto_the_same_database_is_rejected(own_url: str, postgres: Server, way: str) -> None:
    database = own_url.rpartition("/")[2]
    other = {
        "name": own_url.replace("127.0.0.1", "localhost"),
        "socket": postgres.socket_url(database),
        "parameters": f"{own_url}?application_name=other&schema=stenolog",
        "conninfo": own_url.replace("postgresql://", "postgres://"),
    }[way]
    _fill(own_url)
    for source, target in ((own_url, other), (other, own_url)):
        with pytest.raises(UsageError, match="source and destination are the same place") as caught:
            copy_place(source, target)
        assert postgres.password not in str(caught.value)


def test_copy_onto_the_same_database_through_a_pooler_is_rejected(
    own_url: str, bouncer: Bouncer
) -> None:
    _fill(own_url)
    for source, target in ((own_url, bouncer.url(own_url)), (bouncer.url(own_url), own_url)):
        with pytest.raises(UsageError, match="source and destination are the same place"):
            copy_place(source, target)


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
