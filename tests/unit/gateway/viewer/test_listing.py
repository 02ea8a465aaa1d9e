"""Which sessions fit some words, and how a hit is marked."""

from datetime import UTC, datetime

from stenolog.catalog import open_catalog
from stenolog.catalog.entries import Hit
from stenolog.gateway.viewer.listing import fitting, marked
from stenolog.stores.in_memory import InMemoryStore


def test_all_words_stand_in_title_key_or_tags() -> None:
    with InMemoryStore() as store:
        store.add_message("cli:ada", "user", "Trains to Lugano")
        store.add_message("cli:bob", "user", "Trains to Chur")
        store.set_meta("cli:bob", tags=["Travel"])
        with open_catalog(store) as catalog:
            entries = catalog.list().entries
    assert {one.key for one in fitting(entries, "train")} == {"cli:ada", "cli:bob"}
    assert [one.key for one in fitting(entries, "TRAIN ada")] == ["cli:ada"]
    assert [one.key for one in fitting(entries, "travel chur")] == ["cli:bob"]
    assert fitting(entries, "boat") == []


def test_what_was_found_is_marked_and_all_else_is_text() -> None:
    hit = Hit(
        key="s",
        uid="u",
        title="",
        seq=1,
        role="user",
        at=datetime.now(UTC),
        hidden=False,
        snippet="<b>owl</b> & <i> <s>",
        marks=[(0, 6), (13, 16)],
    )
    assert (
        marked(hit) == "<mark>&lt;b&gt;owl</mark>&lt;/b&gt; &amp; <mark>&lt;i&gt;</mark> &lt;s&gt;"
    )
