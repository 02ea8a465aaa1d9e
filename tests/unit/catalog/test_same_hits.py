"""The same query finds the same messages in a PostgreSQL store as on files."""

import random
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import stenolog
from stenolog.catalog import Catalog, open_catalog
from stenolog.stores.base import Store
from support.catalog_scan import words_said
from support.strategies import messages, texts

WORDS = [
    *("the", "of", "getUserName", "get", "user", "name", "username", "GitHub", "github", "git"),
    *("hub", "HTTPServer2", "a.b/c-d", "well-known", "Österreich", "o'clock", "\\x", "=s1", "wor"),
    *(
        "word",
        "words",
        "world",
        "東京",
        "京都",
        "東",
        "東京都に",
        "ﬁne",
        "½",
        "🎉",
        "x_y",
        "2",
        "22",
    ),
]
THEN = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
def both(tmp_path: Path, postgres_schema: str) -> Iterator[list[tuple[Store, Catalog]]]:
    """A store on files and one in a database, each with its catalog."""
    with (
        stenolog.open_store(tmp_path / "w") as files,
        stenolog.open_store(postgres_schema) as server,
        open_catalog(files) as of_files,
        open_catalog(server) as of_server,
    ):
        yield [(files, of_files), (server, of_server)]
        assert of_files.problems == of_server.problems == ()


def _found(catalog: Catalog, query: str, **how: Any) -> tuple[set[tuple[str, int]], bool]:
    hits = catalog.search(query, limit=2_000, **how)
    return {(hit.key, hit.seq) for hit in hits.hits}, hits.exact


def _phrase(chance: random.Random, most: int) -> str:
    return chance.choice([" ", " ", " ", ""]).join(chance.choices(WORDS, k=chance.randint(1, most)))


def _query(chance: random.Random) -> str:
    terms = []
    for _ in range(chance.randint(1, 3)):
        term = _phrase(chance, 3) if chance.random() < 0.4 else chance.choice(WORDS)
        if chance.random() < 0.3:
            term = term[: chance.randint(1, len(term))] + "*"
        if " " in term or chance.random() < 0.2:
            term = f'"{term}"' + "*" * (chance.random() < 0.3)
        terms.append("-" * (chance.random() < 0.25) + term)
    return " ".join(terms)


def _filter(chance: random.Random) -> dict[str, Any]:
    moment = THEN + timedelta(seconds=chance.randint(0, 300))
    return dict(
        chance.sample(
            [
                ("role", chance.choice(["user", "assistant", "nobody"])),
                ("prefix", chance.choice(["a:", "b:1", "none"])),
                ("tag", chance.choice(["x", "y"])),
                ("since", moment),
                ("until", moment),
                ("newest", True),
            ],
            k=chance.choice([0, 0, 1, 2]),
        )
    )


@pytest.mark.parametrize("seed", range(1))
def test_both_databases_find_the_same_random_messages(
    both: list[tuple[Store, Catalog]], seed: int
) -> None:
    chance = random.Random(seed)
    keys = [f"{channel}:{number}" for channel in "ab" for number in range(3)]
    said = [
        (chance.choice(keys), chance.choice(["user", "assistant"]), _phrase(chance, 12), seconds)
        for seconds in range(300)
    ]
    for store, _ in both:
        for key in keys:
            own = [one for one in said if one[0] == key]
            store.add_messages(
                key,
                [{"role": role, "content": text} for _, role, text, _ in own],
                at=[THEN + timedelta(seconds=seconds) for *_, seconds in own],
            )
        store.set_meta("a:1", tags=["x", "y"])
        store.set_meta("b:2", tags=["y"])
    hits = 0
    for _ in range(150):
        query, how = _query(chance), _filter(chance)
        on_files, in_database = (_found(catalog, query, **how) for _, catalog in both)
        assert in_database == on_files, (query, how)
        hits += len(on_files[0])
    assert hits > 500, "too little was found"
    for word in ("the", "git", "words"):
        assert {place for _, catalog in both for place in _found(catalog, word)[0]} >= words_said(
            both[0][0], word
        )


_namespaces = count()


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(said=st.lists(messages(), min_size=1, max_size=4), asked=st.lists(texts(), max_size=3))
def test_p10_both_databases_find_the_same_messages(
    postgres_schema: str, said: list[dict[str, object]], asked: list[str]
) -> None:
    namespace = f"n{next(_namespaces)}"
    with (
        stenolog.InMemoryStore() as memory,
        stenolog.open_store(postgres_schema, namespace=namespace) as server,
        open_catalog(memory) as in_memory,
        open_catalog(server) as in_database,
    ):
        for store in (memory, server):
            store.add_messages("k", said)
        queries = asked + [text for text in map(_told, said) if text]
        for query in queries + [f'"{query}"' for query in queries]:
            expected = _found(in_memory, query)
            assert _found(in_database, query) == expected
            assert _found(in_database, query, role=query, tag=query, prefix=query)[0] == set()
        assert in_database.problems == ()
        assert [entry.title for entry in in_database.list().entries] == [
            entry.title for entry in in_memory.list().entries
        ]


def _told(message: dict[str, object]) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else ""


@pytest.mark.parametrize(
    "text",
    [
        "the needle " * 300 + "the thread " + "the needle " * 300,
        " ".join(f"w{number}" for number in range(9_000)) + " the last phrase",
        "".join(chr(0x4E00 + number * 7919 % 20_900) for number in range(20_000)),
        "word " * 300_000 + "beyond what is indexed",
        f"{'a b ' * 16_000}c d e",
        "東京" * 9_000 + "都に",
    ],
)
def test_a_very_long_message_is_found_by_the_same_phrases(
    both: list[tuple[Store, Catalog]], text: str
) -> None:
    chance = random.Random(1)
    words = text[:70_000].split()
    queries = [
        '"the thread"',
        '"thread the"',
        '"the last phra"*',
        '"c d e"',
        '"d c"',
        "都に",
        '"b c d"',
    ]
    queries += ['"of it end"', "beyond", "needle -thread", 'word -"word word"', "京東京", '"京都"']
    for _ in range(6):
        at = chance.randrange(len(words))
        queries.append(f'"{" ".join(words[at : at + chance.randint(1, 4)])[-300:]}"')
        cut = chance.randrange(max(1, len(text[:65_536]) - 8))
        queries.append(f'"{text[cut : cut + 6]}"')
    for store, _ in both:
        store.add_message("long", "user", text)
        store.add_message("short", "user", "the thread of the needle, word")
    found = 0
    for query in queries:
        on_files, in_database = (_found(catalog, query) for _, catalog in both)
        assert in_database == on_files, query
        found += ("long", 1) in on_files[0]
    assert found >= 5
    [entry] = [entry for entry in both[1][1].list().entries if entry.key == "long"]
    assert entry.count == 1


def test_both_databases_return_the_same_hits_and_pages(both: list[tuple[Store, Catalog]]) -> None:
    for store, _ in both:
        for number in range(30):
            text = f"before\0it the needle\ud800{number} {'needle ' * (number % 3)}"
            store.add_messages(
                f"k\0{number % 4}",
                [{"role": "user", "content": text}],
                at=[THEN + timedelta(seconds=number)],
            )
    shown = []
    for _, catalog in both:
        after, pages = None, []
        for _ in range(4):
            page = catalog.search('"the needle"', newest=True, limit=9, after=after)
            pages += [(h.key, h.seq, h.snippet, h.marks, h.title, h.at) for h in page.hits]
            after = page.after
        assert after is None
        best = {(hit.key, hit.seq) for hit in catalog.search("needle", limit=50).hits}
        shown.append((pages, best, catalog.search("needle").count))
    assert shown[0] == shown[1]
    assert len(shown[0][0]) == 30
