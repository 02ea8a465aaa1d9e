"""What list and search say, on every engine."""

import subprocess
import sys
import threading
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import stenolog
from stenolog.catalog import Catalog, open_catalog
from stenolog.errors import StoreClosed, UsageError
from stenolog.stores.base import Store
from stenolog.tokens import message_tokens
from support.random_operations import fill_three_sessions
from support.strategies import hostile_keys, keys, messages, texts


def _keys(catalog: Catalog, **how: object) -> list[str]:
    return [entry.key for entry in catalog.list(**how).entries]  # type: ignore[arg-type]


def _found(catalog: Catalog, query: str, **how: object) -> list[tuple[str, int]]:
    return [(hit.key, hit.seq) for hit in catalog.search(query, **how).hits]  # type: ignore[arg-type]


# --- list ------------------------------------------------------------------------------------


def test_list_imports_no_modules_that_only_other_calls_need(
    tmp_path: Path,
) -> None:
    with stenolog.open_store(tmp_path) as store, open_catalog(store) as catalog:
        fill_three_sessions(store)
        catalog.refresh()
    script = (
        "import sys, msgspec; before = set(sys.modules)\n"
        "import stenolog; from stenolog.catalog import open_catalog\n"
        f"with stenolog.open_store({str(tmp_path)!r}) as store, open_catalog(store) as catalog:\n"
        "    assert len(catalog.list().entries) == 3\n"
        "print(*set(sys.modules) - before)"
    )
    child = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    )
    loaded = set(child.stdout.split())
    assert "stenolog.catalog.index" in loaded
    slow = {"asyncio", "hashlib", "json", "logging", "psycopg", "tempfile"}
    slow |= {"stenolog.catalog.tokenizer", "stenolog.catalog.catalog_tables"}
    assert loaded & slow == set()


def test_entry_describes_the_session(store: Store, catalog: Catalog) -> None:
    store.add_message("telegram:7", "system", "be brief")
    store.add_message("telegram:7", "user", "What is\n the time?")
    store.add_message("telegram:7", "assistant", "Noon.")
    store.truncate_history("telegram:7", 2)
    store.set_meta("telegram:7", tags=["b", "a"], agent="clock")

    [entry] = catalog.list().entries

    info = store.info("telegram:7")
    assert (entry.key, entry.uid) == ("telegram:7", info.uid)
    assert (entry.title, entry.prompt) == ("What is the time?", "What is\n the time?")
    assert (entry.state, entry.visible, entry.count) == ("idle", 2, 3)
    assert entry.tokens == sum(map(message_tokens, store.get_history("telegram:7")))
    assert (entry.created, entry.updated) == (info.created, info.updated)
    assert (entry.tags, entry.agent, entry.channel) == (("a", "b"), "clock", "telegram")
    assert (entry.lost, entry.damaged, entry.problem) == (0, 0, None)


def test_session_is_found_by_its_key_among_longer_keys(store: Store, catalog: Catalog) -> None:
    store.add_message("telegram:1", "user", "Where is it?")
    store.set_meta("telegram:1", tags=["b", "a"])
    for number in range(60):
        store.fork("telegram:1", f"telegram:1{number:03}")
    store.delete("telegram:1007")

    entry = catalog.entry("telegram:1")

    assert entry == next(one for one in catalog.list(limit=99).entries if one.key == "telegram:1")
    assert (entry.title, entry.tags, entry.state) == ("Where is it?", ("a", "b"), "interrupted")
    with store.lease("telegram:1", ttl=60):
        running = catalog.entry("telegram:1")
    assert running is not None
    assert running.state == "running"
    store.add_message("?", "user", "What?")
    for nobody in ("telegram:", "telegram:1007", "telegram:2", "\ud800", ""):
        assert catalog.entry(nobody) is None


def test_turn_that_ends_during_a_lookup_leaves_no_outdated_state(
    store: Store, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.add_message("k", "user", "Where is it?")
    lease = store.lease("k", ttl=60)
    admin_type: Any = type(store.admin)
    leased = admin_type.leased

    def ends_meanwhile(admin: Any, keys: Collection[str]) -> Any:
        found = leased(admin, keys)
        store.add_message("k", "assistant", "Here.")
        lease.release()
        return found

    catalog.refresh()
    monkeypatch.setattr(admin_type, "leased", ends_meanwhile)
    entry = catalog.entry("k")
    assert entry is not None
    assert (entry.state, entry.count) == ("running", 2)
    monkeypatch.undo()
    later = catalog.entry("k")
    assert later is not None
    assert later.state == "idle"


def test_given_title_is_kept(store: Store, catalog: Catalog) -> None:
    store.add_message("k", "user", "prompt")
    assert catalog.list().entries[0].title == "prompt"
    store.set_meta("k", title="Given")
    assert catalog.list().entries[0].title == "Given"
    store.set_meta("k", title=None)
    assert catalog.list().entries[0].title == "prompt"


def test_list_filters(store: Store, catalog: Catalog) -> None:
    fill_three_sessions(store)
    store.set_meta("telegram:1", tags=["work", "urgent"])
    store.set_meta("telegram:2", tags=["work"], agent="bob")
    store.add_message("telegram:2", "user", "still there?")
    assert _keys(catalog, prefix="telegram:") == ["telegram:2", "telegram:1"]
    assert _keys(catalog, prefix="tele%") == []
    assert _keys(catalog, tag="work") == ["telegram:2", "telegram:1"]
    assert _keys(catalog, tag="urgent") == ["telegram:1"]
    assert _keys(catalog, channel="cli") == ["cli:default"]
    assert _keys(catalog, agent="bob") == ["telegram:2"]
    assert _keys(catalog, state="interrupted") == ["telegram:2"]
    assert _keys(catalog, state="idle") == ["telegram:1", "cli:default"]
    assert _keys(catalog, state="idle", tag="work", channel="telegram") == ["telegram:1"]
    assert _keys(catalog, state="running") == []


def test_leased_session_is_running(store: Store, catalog: Catalog) -> None:
    fill_three_sessions(store)
    store.add_message("telegram:1", "user", "work on it")
    with store.lease("telegram:1", ttl=60):
        states = {entry.key: entry.state for entry in catalog.list().entries}
        assert states == {"telegram:1": "running", "telegram:2": "idle", "cli:default": "idle"}
        assert _keys(catalog, state="running") == ["telegram:1"]
        assert _keys(catalog, state="interrupted") == []
    assert _keys(catalog, state="interrupted") == ["telegram:1"]


@pytest.mark.quick(6)
@pytest.mark.parametrize(
    "how",
    [
        {"limit": 0},
        {"limit": True},
        {"state": "asleep"},
        {"sort": "size"},
        {"after": "x"},
        {"after": "1"},
    ],
)
def test_list_rejects_invalid_arguments(catalog: Catalog, how: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        _keys(catalog, **how)


# --- search ----------------------------------------------------------------------------------


def test_hit_has_session_role_time_and_snippet(store: Store, catalog: Catalog) -> None:
    store.add_message("telegram:7", "user", "Where is the\nneedle?")
    store.add_message("telegram:7", "assistant", "In the haystack.")
    store.truncate_history("telegram:7", 1)

    [hit] = catalog.search("NEEDLE").hits

    [message, _] = store.get_history("telegram:7", full=True)
    assert (hit.key, hit.uid, hit.seq) == ("telegram:7", store.info("telegram:7").uid, 1)
    assert (hit.role, hit.at, hit.hidden) == ("user", message.at, True)
    assert (hit.title, hit.snippet) == ("Where is the needle?", "Where is the needle?")
    assert [hit.snippet[start:end] for start, end in hit.marks] == ["needle"]


@pytest.mark.parametrize("begun", ["s", "r", "u", "=", "=s", "=r"])
def test_index_marks_cannot_be_searched_for(store: Store, catalog: Catalog, begun: str) -> None:
    store.add_message("k", "user", "hello")
    assert _found(catalog, f"{begun}*") == []
    assert _found(catalog, f"hello -{begun}*") == [("k", 1)]
    assert _found(catalog, "h*", role="user", prefix="k") == [("k", 1)]


@pytest.mark.parametrize("letters", [1, 2, 3, 4, 5])
def test_words_are_found_by_prefix(store: Store, catalog: Catalog, letters: int) -> None:
    words = ["therefore", "thereupon", "theory", "though", "tree", "Österreich", "das"]
    store.add_messages("k", [{"role": "user", "content": f"x {word} y"} for word in words])
    for word in words:
        expected = [seq for seq, one in enumerate(words, 1) if one[:letters] == word[:letters]]
        found = [seq for _, seq in _found(catalog, f"{word[:letters]}*")]
        assert sorted(found) == expected


def test_p4_hidden_and_archived_messages_are_found_and_marked(
    store: Store, catalog: Catalog
) -> None:
    for number in range(6):
        store.add_message("k", "user", f"word number {number}")
    store.truncate_history("k", 4)
    store.compact("k")
    store.admin.hide("k", 5, 5)
    hits = catalog.search("word").hits
    assert {hit.seq: hit.hidden for hit in hits} == {
        1: True, 2: True, 3: False, 4: False, 5: True, 6: False
    }  # fmt: skip
    store.undo("k")
    assert [hit.seq for hit in catalog.search("word").hits if hit.hidden] == [2, 1]


def test_all_words_are_required_and_excluded_words_forbidden(
    store: Store, catalog: Catalog
) -> None:
    for text in ("red green", "green blue", "red blue", "red green blue"):
        store.add_message("k", "user", text)
    assert sorted(_found(catalog, "red blue")) == [("k", 3), ("k", 4)]
    assert sorted(_found(catalog, '"red blue"')) == [("k", 3)]
    assert sorted(_found(catalog, "red -green")) == [("k", 3)]
    assert sorted(_found(catalog, "gre* -blue")) == [("k", 1)]
    assert _found(catalog, "-red") == []


def test_search_filters(store: Store, catalog: Catalog) -> None:
    noon = datetime(2026, 1, 1, 12, tzinfo=UTC)
    for number, key in enumerate(("telegram:1", "telegram:2", "cli:x")):
        said = [{"role": role, "content": "word"} for role in ("user", "assistant")]
        times = [noon + timedelta(days=number), noon + timedelta(days=number, hours=1)]
        store.add_messages(key, said, at=times)
    store.set_meta("telegram:2", tags=["t"])
    assert _found(catalog, "word", role="user", newest=True) == [
        ("cli:x", 1), ("telegram:2", 1), ("telegram:1", 1)
    ]  # fmt: skip
    assert _found(catalog, "word", role="tool") == []
    assert _found(catalog, "word", prefix="cli:", newest=True) == [("cli:x", 2), ("cli:x", 1)]
    assert _found(catalog, "word", tag="t", newest=True) == [("telegram:2", 2), ("telegram:2", 1)]
    assert _found(catalog, "word", tag="t", prefix="cli:") == []
    late = noon + timedelta(days=1, hours=1)
    assert _found(catalog, "word", since=late, newest=True) == [
        ("cli:x", 2), ("cli:x", 1), ("telegram:2", 2)
    ]  # fmt: skip
    assert _found(catalog, "word", until=late, newest=True) == [
        ("telegram:2", 1), ("telegram:1", 2), ("telegram:1", 1)
    ]  # fmt: skip
    assert _found(catalog, "word", since=late, until=late) == []


def test_best_or_newest_match_comes_first(store: Store, catalog: Catalog) -> None:
    store.add_message("k", "user", "needle needle needle")
    store.add_message("k", "user", "a needle in a haystack of many other words that say nothing")
    assert _found(catalog, "needle") == [("k", 1), ("k", 2)]
    assert _found(catalog, "needle", newest=True) == [("k", 2), ("k", 1)]


@pytest.mark.parametrize("newest", [True, False])
def test_pages_of_a_search_are_consecutive(store: Store, catalog: Catalog, newest: bool) -> None:
    for number in range(11):
        store.add_message(f"k{number % 3}", "user", f"word {'word ' * number}")
    seen: list[tuple[str, int]] = []
    after = None
    for _ in range(4):
        page = catalog.search("word", limit=3, newest=newest, after=after)
        seen += [(hit.key, hit.seq) for hit in page.hits]
        after = page.after
    assert (len(seen), len(set(seen)), after) == (11, 11, None)


def test_very_common_word_returns_the_newest_matches_and_an_inexact_count(
    store: Store, catalog: Catalog
) -> None:
    start = datetime(2026, 1, 1, tzinfo=UTC)
    # Said by turns in three sessions, so that they are not indexed in the order of time.
    for number in range(3):
        said = [{"role": "user", "content": f"word {seq}"} for seq in range(1_700)]
        times = [start + timedelta(seconds=seq * 3 + number) for seq in range(1_700)]
        store.add_messages(f"k{number}", said, at=times)

    newest = catalog.search("word", newest=True, limit=5)
    assert [(hit.key, hit.seq) for hit in newest.hits] == [
        ("k2", 1700), ("k1", 1700), ("k0", 1700), ("k2", 1699), ("k1", 1699)
    ]  # fmt: skip
    assert not newest.exact
    second = catalog.search("word", newest=True, limit=2, after=newest.after)
    assert [(hit.key, hit.seq) for hit in second.hits] == [("k0", 1699), ("k2", 1698)]

    best = catalog.search("word", limit=1_000)
    assert (best.count, best.exact, best.after) == (1_000, False, None)
    assert min(hit.at for hit in best.hits) == start + timedelta(seconds=1_700 * 3 - 1_000)

    early = catalog.search("word", until=start + timedelta(seconds=4), newest=True)
    assert [(hit.key, hit.seq) for hit in early.hits] == [
        ("k0", 2),
        ("k2", 1),
        ("k1", 1),
        ("k0", 1),
    ]
    assert len(catalog.search("word", prefix="k1", limit=1_000).hits) == 1_000


def test_sessions_beyond_the_mark_limit_are_filtered_too(store: Store, catalog: Catalog) -> None:
    for number in range(70):
        store.add_message(f"a{number:02}", "user", "word")
        store.add_message(f"b{number:02}", "user", "word")
    found = _found(catalog, "word", prefix="a", limit=1_000)
    assert sorted(key for key, _ in found) == [f"a{number:02}" for number in range(70)]


@pytest.mark.quick(5)
@pytest.mark.parametrize(
    "how",
    [
        {"limit": 0},
        {"since": datetime(2026, 1, 1)},  # noqa: DTZ001 - that it has no zone is the matter
        {"after": "x"},
        {"after": "x", "newest": True},
    ],
)
def test_search_rejects_invalid_arguments(
    store: Store, catalog: Catalog, how: dict[str, object]
) -> None:
    fill_three_sessions(store)
    with pytest.raises(UsageError):
        _found(catalog, "hello", **how)


# --- anything at all -------------------------------------------------------------------------


@settings(max_examples=40)
@given(
    said=st.lists(st.tuples(keys(), messages()), min_size=1, max_size=5),
    meta=st.dictionaries(
        st.sampled_from(["title", "tags", "agent"]),
        st.one_of(texts(), st.lists(texts(), max_size=3), st.integers()),
    ),
    query=texts(),
)
def test_p10_any_message_and_key_can_be_indexed_and_searched(
    said: list[tuple[str, dict[str, object]]], meta: dict[str, object], query: str
) -> None:
    with stenolog.InMemoryStore() as store, open_catalog(store) as catalog:
        for key, message in said:
            store.add_full_message(key, message)
            store.set_meta(key, **meta)
        assert set(_keys(catalog, limit=1_000)) == {key for key, _ in said}
        for key, _ in said:
            assert key in _keys(catalog, prefix=key)
            entry = catalog.entry(key)
            assert entry is not None
            assert entry.key == key
        _found(catalog, query, role=query, prefix=query, tag=query)
        _keys(catalog, tag=query, channel=query, agent=query)


def test_p6_similar_keys_are_not_confused(store: Store, catalog: Catalog) -> None:
    hostile = hostile_keys()
    for key in hostile:
        store.add_message(key, "user", "word")
    assert sorted(_keys(catalog, limit=10_000)) == sorted(hostile)
    assert sorted(_found(catalog, "word", limit=10_000)) == sorted((key, 1) for key in hostile)
    for key in hostile[::20]:
        assert set(_keys(catalog, prefix=key)) == {k for k in hostile if k.startswith(key)}


def test_closed_catalog_raises_and_the_store_stays_open(store: Store) -> None:
    catalog = open_catalog(store)
    catalog.close()
    catalog.close()
    with pytest.raises(UsageError, match="closed"):
        catalog.list()
    store.add_message("k", "user", "x")


def test_catalog_closed_during_a_refresh_reopens_nothing(store: Store) -> None:
    fill_three_sessions(store)
    catalog = open_catalog(store)
    catalog.refresh()
    store.add_message("k", "user", "more")
    inside, closed = threading.Event(), threading.Event()

    def wait(_done: int, _total: int) -> None:
        inside.set()
        assert closed.wait(120)

    with ThreadPoolExecutor(1) as thread:
        refreshing = thread.submit(catalog.refresh, wait)
        assert inside.wait(120)
        catalog.close()
        closed.set()
        with pytest.raises(UsageError, match="the catalog is closed"):
            refreshing.result()
    assert catalog.problems == ()
    opened = [link for link in map(_target, Path("/proc/self/fd").iterdir()) if "catalog" in link]
    assert opened == []


def _target(link: Path) -> str:
    try:
        return link.readlink().name
    except FileNotFoundError:  # the descriptor of the listing itself
        return ""


def test_closed_store_raises_store_closed(store: Store, catalog: Catalog) -> None:
    fill_three_sessions(store)
    catalog.refresh()
    store.close()
    with pytest.raises(StoreClosed):
        catalog.list()
