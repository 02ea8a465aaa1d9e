"""Nobody's message, query or damaged index breaks the search of the others."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from stenolog import InMemoryStore, JSONLStore, UsageError
from stenolog.catalog import Catalog, open_catalog, searchable_text
from stenolog.catalog.query import MAX_TERMS, parse_query
from stenolog.stores.base import Store


@pytest.mark.parametrize("sign", ["㌔", "㋿", "🈁", "東京℡", "ำ", "ﷺ", "½東"])
def test_ligature_is_shown_unchanged_in_a_snippet(sign: str) -> None:
    with InMemoryStore() as store, open_catalog(store) as catalog:
        store.add_message("a", "user", f"hello {sign}")
        store.add_message("b", "user", f"hello 東京 {sign}")
        assert {hit.key for hit in catalog.search("hello").hits} == {"a", "b"}
        assert catalog.search("東京 hello").hits[0].key == "b"
        for hit in catalog.search("hello").hits:
            assert sign in hit.snippet
            assert all(0 <= first < last <= len(hit.snippet) for first, last in hit.marks)


def test_repeated_word_is_searched_once() -> None:
    assert len(parse_query("word " * 100_000).terms) == 1
    assert len(parse_query('word -word "word" word*').terms) == 4
    assert len(parse_query(" ".join(f"w{n}" for n in range(1_000))).terms) == MAX_TERMS


def test_implausible_numbers_are_rejected_or_find_nothing() -> None:
    with InMemoryStore() as store, open_catalog(store) as catalog:
        store.add_message("a", "user", "hello")
        with pytest.raises(UsageError, match="limit must be"):
            catalog.list(limit=2**63)
        assert [entry.key for entry in catalog.list(after="9" * 30 + ":k").entries] == ["a"]
        assert catalog.search("hello", newest=True, after="9" * 30 + ".1").hits
        assert not catalog.search("hello", after="9" * 30).hits


def test_key_with_a_nul_is_found_by_state(tmp_path: Path) -> None:
    with JSONLStore(tmp_path) as store, open_catalog(store) as catalog:
        for key in ("a", "a\0b"):
            store.add_message(key, "user", "hello")
        with store.lease("a\0b", ttl=60):
            assert [entry.key for entry in catalog.list(state="running").entries] == ["a\0b"]


# --- odd content -----------------------------------------------------------------------------

ODD_TYPES: list[Any] = [{"x": 1}, ["text"], None, 1, 1.5, True, {}, [[]]]


@pytest.mark.parametrize("odd", ODD_TYPES, ids=repr)
def test_a_part_with_an_odd_type_is_indexed_like_any_text(
    store: Store, catalog: Catalog, odd: Any
) -> None:
    store.add_message("good", "user", "hello from the good one")
    body = {"role": "user", "content": [{"type": odd, "text": "hello from the odd one"}]}
    store.add_messages("odd", [body])
    assert {entry.key: entry.problem for entry in catalog.list().entries} == {
        "good": None,
        "odd": None,
    }
    assert {hit.key for hit in catalog.search("hello").hits} == {"good", "odd"}


def _fail_for(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the catalog fail at messages with this text, as an unknown defect of it would."""
    real = searchable_text.text_of

    def text_of(fields: Mapping[str, Any], parts: Any = None) -> str:
        if fields.get("content") == text:
            raise TypeError("unhashable type: 'dict'")
        return real(fields, parts)

    monkeypatch.setattr(searchable_text, "text_of", text_of)


@pytest.mark.parametrize("before", [0, 2_500])
def test_a_session_that_cannot_be_indexed_is_listed_with_a_problem_and_others_work(
    store: Store, catalog: Catalog, monkeypatch: pytest.MonkeyPatch, before: int
) -> None:
    store.add_message("a", "user", "hello from a")
    if before:
        store.add_messages("bad", [{"role": "user", "content": "hello"}] * before)
    store.add_message("bad", "user", "poison")
    store.add_message("z", "user", "hello from z")
    with monkeypatch.context() as failing:
        _fail_for("poison", failing)
        for _ in range(2):
            entries = {entry.key: entry for entry in catalog.list().entries}
            assert entries.keys() == {"a", "bad", "z"}
            assert "unhashable type" in (entries["bad"].problem or "")
            assert (entries["a"].problem, entries["z"].problem) == (None, None)
            assert {hit.key for hit in catalog.search("hello").hits} == {"a", "z"}
        store.add_message("z", "assistant", "hello again")
        assert catalog.search("again").count == 1
        store.add_message("bad", "assistant", "hello")
        assert "unhashable type" in (catalog.list(prefix="bad").entries[0].problem or "")
    store.add_message("bad", "assistant", "hello")
    assert [entry.problem for entry in catalog.list().entries] == [None] * 3
    assert catalog.search("poison").count == 1
