"""Nobody's message, query or damaged index breaks the search of the others."""

import os
import sqlite3
from pathlib import Path

import pytest

from stenolog import InMemoryStore, JSONLStore, UsageError
from stenolog.catalog import open_catalog
from stenolog.catalog.query import MOST_TERMS, parse


@pytest.mark.parametrize("sign", ["㌔", "㋿", "🈁", "東京℡", "ำ", "ﷺ", "½東"])
def test_a_sign_that_stands_for_several_is_shown_as_it_is(sign: str) -> None:
    with InMemoryStore() as store, open_catalog(store) as catalog:
        store.add_message("a", "user", f"hello {sign}")
        store.add_message("b", "user", f"hello 東京 {sign}")
        assert {hit.key for hit in catalog.search("hello").hits} == {"a", "b"}
        assert catalog.search("東京 hello").hits[0].key == "b"
        for hit in catalog.search("hello").hits:
            assert sign in hit.snippet
            assert all(0 <= first < last <= len(hit.snippet) for first, last in hit.marks)


def test_the_same_word_many_times_is_asked_for_once() -> None:
    assert len(parse("word " * 100_000).terms) == 1
    assert len(parse('word -word "word" word*').terms) == 4
    assert len(parse(" ".join(f"w{n}" for n in range(1_000))).terms) == MOST_TERMS


def test_numbers_that_nobody_means_are_refused_or_find_nothing() -> None:
    with InMemoryStore() as store, open_catalog(store) as catalog:
        store.add_message("a", "user", "hello")
        with pytest.raises(UsageError, match="how many"):
            catalog.list(limit=2**63)
        assert [entry.key for entry in catalog.list(after="9" * 30 + ":k").entries] == ["a"]
        assert catalog.search("hello", newest=True, after="9" * 30 + ".1").hits
        assert not catalog.search("hello", after="9" * 30).hits


def test_a_key_with_a_nul_is_found_by_its_state(tmp_path: Path) -> None:
    with JSONLStore(tmp_path) as store, open_catalog(store) as catalog:
        for key in ("a", "a\0b"):
            store.add_message(key, "user", "hello")
        with store.lease("a\0b", ttl=60):
            assert [entry.key for entry in catalog.list(state="running").entries] == ["a\0b"]


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE catalog_session SET title = CAST(x'ff41' AS TEXT)",
        "UPDATE catalog_session SET sight = 'not json'",
    ],
)
def test_an_index_that_holds_what_nobody_wrote_is_made_anew(tmp_path: Path, damage: str) -> None:
    with JSONLStore(tmp_path) as store:
        store.add_message("a", "user", "hello there")
        with open_catalog(store) as catalog:
            catalog.list()
        (index,) = tmp_path.rglob("catalog.db")
        status = index.stat()
        connection = sqlite3.connect(index)
        connection.execute(damage)
        connection.commit()
        connection.close()
        assert index.stat().st_size == status.st_size
        # As bit rot leaves it: whoever looks at size and time sees no difference.
        os.utime(index, ns=(status.st_atime_ns, status.st_mtime_ns))
        with open_catalog(store) as catalog:
            assert [entry.title for entry in catalog.list().entries] == ["hello there"]
            assert [hit.key for hit in catalog.search("hello").hits] == ["a"]
