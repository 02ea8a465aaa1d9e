"""A catalog that a thread fills answers at once from what it has."""

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from stenolog.catalog.background_catalog import BackgroundCatalog, SessionHead
from support.slow_store import SlowStore

COUNT = 30


def heads(keys: Sequence[str]) -> Iterator[SessionHead]:
    for number, key in enumerate(sorted(keys)):
        yield SessionHead(key=key, prompt=f"prompt of {key}", created=number, updated=number)


@pytest.fixture
def store(tmp_path: Path) -> SlowStore:
    made = SlowStore(tmp_path / "catalog.db")
    for number in range(COUNT):
        made.add_message(f"s{number:02}", "user", f"a question about tides {number}")
    return made


def wait_until_indexed(catalog: BackgroundCatalog) -> None:
    while catalog.progress is not None or catalog.search("tides").count < COUNT:
        pass


def test_list_does_not_wait_for_the_messages(store: SlowStore) -> None:
    with BackgroundCatalog(store, heads=heads) as catalog:
        page = catalog.list(limit=100)
        assert [entry.key for entry in page.entries] == [
            f"s{number:02}" for number in reversed(range(COUNT))
        ]
        assert page.entries[0].title == "prompt of s29"
        assert store.reading.wait(60)
        assert catalog.progress == (0, COUNT)
        assert catalog.search("tides").count == 0
        store.allowed.set()
        wait_until_indexed(catalog)
        assert catalog.list(limit=100).entries[0].count == 1
        assert catalog.progress is None


def test_newest_sessions_are_indexed_first_and_marked_until_then(store: SlowStore) -> None:
    with BackgroundCatalog(store, heads=heads) as catalog:
        assert store.reading.wait(60)
        assert not any(entry.is_indexed for entry in catalog.list(limit=100).entries)
        store.allowed.set()
        wait_until_indexed(catalog)
        assert store.read_keys == [f"s{number:02}" for number in reversed(range(COUNT))]
        assert all(entry.is_indexed for entry in catalog.list(limit=100).entries)


def test_second_start_lists_at_once(store: SlowStore) -> None:
    store.allowed.set()
    with BackgroundCatalog(store, heads=heads) as catalog:
        wait_until_indexed(catalog)
    store.allowed.clear()
    with BackgroundCatalog(store, heads=heads) as catalog:
        assert len(catalog.list(limit=100).entries) == COUNT
        assert catalog.search("tides").count == COUNT
        assert catalog.progress is None
        store.allowed.set()


def test_new_messages_are_found_and_deleted_sessions_vanish(store: SlowStore) -> None:
    store.allowed.set()
    with BackgroundCatalog(store, heads=heads) as catalog:
        wait_until_indexed(catalog)
        store.add_message("s00", "assistant", "spring and neap")
        store.delete("s01")
        while catalog.search("neap").count == 0 or catalog.entry("s01") is not None:
            pass
        assert len(catalog.list(limit=100).entries) == COUNT - 1


def test_close_ends_the_thread_while_it_indexes(store: SlowStore) -> None:
    catalog = BackgroundCatalog(store, heads=heads)
    assert store.reading.wait(60)
    closing = threading.Thread(target=catalog.close)
    closing.start()
    store.allowed.set()
    closing.join(60)
    assert not closing.is_alive()
    assert not any(one.name == "catalog" for one in threading.enumerate())


def test_few_sessions_are_indexed_before_the_first_list(tmp_path: Path) -> None:
    store = SlowStore(tmp_path / "catalog.db")
    store.allowed.set()
    store.add_message("one", "user", "a question about tides")
    with BackgroundCatalog(store, heads=heads) as catalog:
        [entry] = catalog.list().entries
        assert (entry.title, entry.count) == ("a question about tides", 1)
