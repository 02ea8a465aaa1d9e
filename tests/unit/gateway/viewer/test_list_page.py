"""Which sessions fit some words, and how a hit is marked."""

from datetime import UTC, datetime

from stenolog.catalog import Catalog, open_catalog
from stenolog.catalog.entries import Hit
from stenolog.gateway.viewer.list_page import (
    SESSIONS_PER_PAGE,
    HomeQuery,
    filter_entries,
    matching_sessions,
    project_labels,
    snippet_html,
)
from stenolog.stores.in_memory import InMemoryStore


def test_filter_requires_all_words_in_title_key_or_tags() -> None:
    with InMemoryStore() as store:
        store.add_message("cli:ada", "user", "Trains to Lugano")
        store.add_message("cli:bob", "user", "Trains to Chur")
        store.set_meta("cli:bob", tags=["Travel"])
        with open_catalog(store) as catalog:
            entries = catalog.list().entries
    assert {one.key for one in filter_entries(entries, "train")} == {"cli:ada", "cli:bob"}
    assert [one.key for one in filter_entries(entries, "TRAIN ada")] == ["cli:ada"]
    assert [one.key for one in filter_entries(entries, "travel chur")] == ["cli:bob"]
    assert filter_entries(entries, "boat") == []


def _pages(catalog: Catalog, words: str) -> list[list[str]]:
    """The keys on each page of what fits."""
    made: list[list[str]] = []
    after = ""
    while True:
        entries, more = matching_sessions(catalog, HomeQuery(q=words, after=after))
        made.append([one.key for one in entries])
        if more is None:
            return made
        after = more


def test_filtered_sessions_are_paged_without_duplicates() -> None:
    with InMemoryStore() as store:
        for number in range(400):
            kind = "chat" if number >= 200 else "invoice" if number % 2 else "bill"
            store.add_message(f"cli:{number:03}", "user", f"{kind} {number}")
        with open_catalog(store) as catalog:
            for words, count in (("chat", 200), ("invoice", 100), ("cli:00", 10), ("boat", 0)):
                pages = _pages(catalog, words)
                found = [key for page in pages for key in page]
                assert len(found) == len(set(found)) == count, words
                assert found == sorted(found, reverse=True)
                assert max(map(len, pages)) == min(SESSIONS_PER_PAGE, count)


def _hit(snippet: str, *marks: tuple[int, int]) -> Hit:
    return Hit(
        key="s",
        uid="u",
        title="",
        seq=1,
        role="user",
        at=datetime.now(UTC),
        hidden=False,
        snippet=snippet,
        marks=marks,
    )


def test_matches_are_marked_and_other_text_is_escaped() -> None:
    assert (
        snippet_html(_hit("<b>owl</b> & <i> <s>", (0, 6), (13, 16)))
        == "<mark>&lt;b&gt;owl</mark>&lt;/b&gt; &amp; <mark>&lt;i&gt;</mark> &lt;s&gt;"
    )


def test_projects_with_the_same_name_are_shown_with_their_folder() -> None:
    paths = [
        *("/data/ada/harbour", "/srv/harbour", "/harbour", "/srv/site", "/"),
        *("C:\\work\\tide", "D:\\old\\tide", "/a/x/app", "/b/x/app"),
    ]
    assert project_labels(paths) == {
        "/data/ada/harbour": "ada/harbour",
        "/srv/harbour": "srv/harbour",
        "/harbour": "/harbour",
        "/srv/site": "site",
        "/": "/",
        "C:\\work\\tide": "work\\tide",
        "D:\\old\\tide": "old\\tide",
        "/a/x/app": "/a/x/app",
        "/b/x/app": "/b/x/app",
    }
