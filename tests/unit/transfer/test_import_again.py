"""Taken in twice it adds nothing, grown it goes on, killed it is continued."""

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from stenolog.stores.base import Store
from stenolog.stores.open_store import open_store
from stenolog.transfer.importers.legacy_session import ALL_LAYOUTS
from stenolog.transfer.migration import ImportReport, import_folder
from support import temporary_folders
from support.import_sources import SHAPES, picture, role, words


@pytest.fixture
def place() -> Iterator[Path]:
    with temporary_folders.folder() as path:
        yield path


@pytest.fixture(params=["jsonl", "sqlite", "memory"])
def store(request: pytest.FixtureRequest, place: Path) -> Iterator[Store]:
    where = {"jsonl": str(place / "ws"), "sqlite": f"sqlite:{place}/s.db", "memory": "memory:"}
    with open_store(where[request.param]) as opened:
        yield opened


def copied(source: Path, store: Store) -> ImportReport:
    folder, only = (source, None) if source.is_dir() else (source.parent, source.name)
    return import_folder(folder, store, only=only, rename_files=False, layouts=ALL_LAYOUTS)


def bytes_of(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.mark.parametrize("shape", SHAPES)
def test_second_import_adds_nothing_and_files_are_unchanged(
    store: Store, place: Path, shape: str
) -> None:
    source = SHAPES[shape](place / "old", 6)
    before = bytes_of(place / "old")

    first = copied(source, store)

    assert (first.sessions, first.messages, first.skipped) == (1, 6, ())
    assert first.imported[0].problems == ()
    assert store.list_sessions() == ["k"]
    found = store.get_history("k")
    assert [(m.role, m.content) for m in found] == [
        (role(number), word) for number, word in enumerate(words(6))
    ]
    shown = picture(store)
    again = copied(source, store)
    assert (again.sessions, again.messages) == (0, 0)
    assert [one.already_imported for one in again.imported] == [True]
    assert picture(store) == shown
    assert bytes_of(place / "old") == before


@pytest.mark.parametrize("shape", SHAPES)
def test_new_messages_of_the_source_are_added_by_next_import(
    store: Store, place: Path, shape: str
) -> None:
    write = SHAPES[shape]
    for count, added in ((2, 2), (6, 4), (7, 1), (7, 0)):
        source = write(place / "old", count)
        assert copied(source, store).messages == added
    assert store.list_sessions() == ["k"]
    assert [message.content for message in store.get_history("k")] == words(7)


@pytest.mark.parametrize("shape", SHAPES)
def test_session_with_new_messages_here_is_not_changed_by_reimport(
    store: Store, place: Path, shape: str
) -> None:
    write = SHAPES[shape]
    copied(write(place / "old", 4), store)
    store.add_message("k", "user", "said here")
    for count in (5, 6):
        copied(write(place / "old", count), store)
    apart = [one for one in store.list_sessions() if one != "k"]
    assert [message.content for message in store.get_history("k")] == [*words(4), "said here"]
    # One other conversation, and not one for each import.
    [other] = apart
    assert other.startswith("k (legacy ")
    assert [message.content for message in store.get_history(other)] == words(6)


def test_imported_messages_keep_their_times(place: Path) -> None:
    with open_store("memory:") as store:
        copied(SHAPES["plain-lines"](place, 3), store)
        [first, *_] = store.get_history("k")
        assert first.at.date() == datetime(2026, 11, 15, tzinfo=UTC).date()
        assert store.info("k").created.date() == first.at.date()
