"""Tests `sqlite:` addresses: accepted forms and error messages."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import stenolog
from stenolog import SQLiteStore, UsageError
from stenolog.errors import install_command
from stenolog.stores.sqlite.connections import Settings


def _pragma(store: stenolog.Store, name: str) -> object:
    assert isinstance(store, SQLiteStore)
    with store.database.write_transaction() as transaction:
        [(value,)] = transaction.execute(f"PRAGMA {name}")
    return value


def test_a_url_opens_the_file(file: Path) -> None:
    with stenolog.open_store(f"sqlite:{file}") as store:
        assert isinstance(store, SQLiteStore)
        store.add_message("a", "user", "x")
        assert _pragma(store, "synchronous") == 2
        assert _pragma(store, "cache_size") == -Settings().cache_kb
    with stenolog.open_store(f"sqlite:{file}", read_only=True) as store:
        assert len(store.get_history("a")) == 1


def test_a_url_carries_parameters(file: Path) -> None:
    with stenolog.open_store(f"sqlite:{file}?synchronous=normal&cache_kb=512") as store:
        assert _pragma(store, "synchronous") == 1
        assert _pragma(store, "cache_size") == -512
    with stenolog.open_store(f"sqlite:{file}?synchronous=full") as store:
        assert _pragma(store, "synchronous") == 2


@pytest.mark.parametrize(
    "parameters",
    [
        "synchronous=off",
        "synchronous=",
        "cache_kb=0",
        "cache_kb=many",
        f"cache_kb={'9' * 5_000}",
        "cache_kb",
        "cache=1",
        "&",
    ],
    ids=lambda text: text[:20],
)
def test_p8_unknown_parameters_are_rejected_with_the_accepted_names(
    file: Path, parameters: str
) -> None:
    with pytest.raises(UsageError, match=r"synchronous=normal.* cache_kb=NUMBER"):
        stenolog.open_store(f"sqlite:{file}?{parameters}")
    assert not file.exists()


@pytest.mark.parametrize("where", ["sqlite:", "sqlite:?cache_kb=512", "sqlite::memory:"])
def test_p8_url_without_a_file_is_rejected(where: str) -> None:
    with pytest.raises(UsageError):
        stenolog.open_store(where)


@pytest.mark.parametrize(
    "wrong",
    [
        {"synchronous": "off"},
        {"cache_kb": 0},
        {"cache_kb": True},
        {"cache_kb": 2**31},
        {"namespace": "a/b"},
        {"namespace": "\ud800"},
    ],
    ids=str,
)
def test_p8_class_rejects_the_same_arguments(file: Path, wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        SQLiteStore(file, **wrong)  # type: ignore[arg-type]
    assert not file.exists()


@pytest.mark.parametrize("name", [b"w\xff/x.db", b"x\xff.db"])
def test_p8_path_that_is_not_utf_8_is_rejected(tmp_path: Path, name: bytes) -> None:
    file = os.fsdecode(os.fsencode(tmp_path) + b"/" + name)
    for opened in (stenolog.open_store, stenolog.open_sessions):
        with pytest.raises(UsageError, match="UTF-8"):
            opened(f"sqlite:{file}")
    assert list(tmp_path.iterdir()) == []


def test_error_without_apsw_names_the_extra(file: Path) -> None:
    script = (
        "import sys; sys.modules['apsw'] = None\n"
        "import stenolog\n"
        "from stenolog import *\n"
        "from stenolog.maintenance.workspace_check import examine\n"
        "for opened in (lambda: stenolog.open_store('sqlite:' + sys.argv[1]),\n"
        "               lambda: stenolog.SQLiteStore(sys.argv[1]),\n"
        "               lambda: examine('sqlite:' + sys.argv[1])):\n"
        "    try:\n"
        "        opened()\n"
        "    except stenolog.UsageError as error:\n"
        "        print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(file)], capture_output=True, text=True, check=True
    )
    told = done.stdout.splitlines()
    assert len(told) == 3
    assert len(set(told)) == 1
    assert told[0].endswith(install_command("sqlite"))
    assert not file.exists()


def test_namespaces_in_one_file_are_independent(file: Path) -> None:
    with SQLiteStore(file) as sessions, SQLiteStore(file, namespace="notes") as notes:
        sessions.add_message("a", "user", "said")
        notes.add_message("a", "user", "remembered")
        notes.set_summary("a", "text")
        assert [message.content for message in sessions.get_history("a")] == ["said"]
        assert sessions.get_summary("a") == ""
        notes.delete("a")
        assert sessions.list_sessions() == ["a"]
        assert sessions.admin.list_trash() == []
        assert notes.admin.purge("a").messages == 1
        assert sessions.info("a").count == 1
