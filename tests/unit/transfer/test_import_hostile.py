"""Whatever stands in the files of others: a report, nothing half written, and never a traceback."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stenolog.stores.in_memory import InMemoryStore
from stenolog.transfer.importers.legacy_session import ALL_LAYOUTS
from stenolog.transfer.migration import ImportReport, import_folder
from support import temporary_folders
from support.import_sources import SHAPES, words

DEEP: Final = "[" * 100_000 + "]" * 100_000
NESTED: Final = (
    json.dumps({"role": "user", "content": "x"})[:-1] + ', "a": ' + "[" * 300 + "]" * 300
)
BAD_TEXTS: Final = {
    "not JSON": "this is not JSON",
    "cut": '{"role": "user", "content": "hel',
    "nan": '{"role": "user", "content": "x", "score": NaN}',
    "infinity": '{"role": "user", "content": "x", "score": 1e999}',
    "deep": DEEP,
    "nested": NESTED + "}",
    "number": "7",
    "list": "[1, 2]",
    "null": "null",
    "no role": '{"content": "x"}',
    "role of another kind": '{"role": 7, "content": "x"}',
    "empty": "",
    "digits": '{"role": "user", "n": ' + "9" * 5_000 + "}",
}


@pytest.fixture
def place() -> Iterator[Path]:
    with temporary_folders.folder() as path:
        yield path


def copied(source: Path, store: InMemoryStore) -> ImportReport:
    folder, only = (source, None) if source.is_dir() else (source.parent, source.name)
    return import_folder(folder, store, only=only, rename_files=False, layouts=ALL_LAYOUTS)


def contents(store: InMemoryStore, key: str) -> list[Any]:
    return [message.content for message in store.get_history(key, full=True)]


@pytest.mark.quick(5)
@pytest.mark.parametrize("bad", BAD_TEXTS)
def test_p3_bad_message_is_skipped_and_reported(place: Path, bad: str) -> None:
    good = [json.dumps({"role": "user", "content": word, "x": 1}) for word in "ab"]
    source = place / "k.jsonl"
    source.write_text("\n".join([good[0], BAD_TEXTS[bad] or "x", good[1], ""]))
    with InMemoryStore() as store:
        [taken] = copied(source, store).imported
        assert contents(store, "k") == ["a", "b"]
        assert taken.dropped == 1
        assert len(taken.problems) == 1
        assert len(taken.problems[0]) < 400
        again = copied(source, store)
        assert again.messages == 0
        assert again.imported[0].problems == taken.problems


def test_invalid_utf8_affects_only_its_message(place: Path) -> None:
    texts = ["a", "\xff", "b"]
    lines = [json.dumps({"role": "user", "content": text}, ensure_ascii=False) for text in texts]
    (place / "k.jsonl").write_text("\n".join(lines), "latin-1")
    with InMemoryStore() as store:
        [taken] = copied(place / "k.jsonl", store).imported
        assert contents(store, "k") == ["a", "b"]
        assert taken.dropped == 1
        assert "is not JSON" in taken.problems[0]


@pytest.mark.parametrize("encoding", ["utf-16", "latin-1", "utf-8-sig"])
def test_file_in_another_encoding_is_reported(place: Path, encoding: str) -> None:
    text = json.dumps([{"role": "user", "content": "Zürich"}], ensure_ascii=False)
    (place / "k.json").write_text(text, encoding)
    with InMemoryStore() as store:
        migrated = copied(place / "k.json", store)
        if encoding == "utf-8-sig":
            assert contents(store, "k") == ["Zürich"]
        else:
            assert store.list_sessions() == []
            assert "it is not JSON" in migrated.skipped[0].reason


@pytest.mark.parametrize("shape", SHAPES)
def test_p10_truncated_file_gives_prefix_or_reason(place: Path, shape: str) -> None:
    source = SHAPES[shape](place / "old", 4)
    text = source.read_bytes()
    for cut in range(0, len(text), max(1, len(text) // 60)):
        source.write_bytes(text[:cut])
        with InMemoryStore() as store:
            migrated = copied(source, store)
            found = contents(store, "k")
            assert found == words(4)[: len(found)]
            # Lines that were cut between two messages are whole; an empty file is a reason.
            is_whole = len(found) == 4 or shape == "plain-lines"
            assert is_whole or migrated.skipped or migrated.dropped
            assert "importing" not in (store.info("k").meta if found else {})


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    *("role", "content", "type", "data", "parts", "text", "tool_calls", "name"),
                    *("messages", "message", "at", "time", "timestamp", "created_at", "summary"),
                ]
            )
            | st.text(max_size=3),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
_shaped = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool", "human"]) | _json},
    optional={"content": _json, "text": _json, "parts": _json, "timestamp": _json},
)


@settings(max_examples=150, deadline=None)
@given(found=st.lists(_shaped | _json, min_size=1, max_size=4))
@example(found=[2**63, -(2**63) - 1])
@example(found=[{"role": "user", "content": "x", "timestamp": 10**400}])
def test_any_content_is_imported_or_reported(found: list[Any]) -> None:
    with temporary_folders.folder() as place, InMemoryStore() as store:
        texts = {
            "a.json": _text(found),
            "b.jsonl": "".join(_text(one) + "\n" for one in found),
            "c.jsonl": _text({"messages": found}),
        }
        for name, text in texts.items():
            source = place / name
            source.write_text(text)
            migrated = copied(source, store)
            # A log of ours in its first moment is empty, too.
            is_blank = not source.read_bytes().strip()
            assert is_blank or len(migrated.imported) + len(migrated.skipped) == 1
            for taken in migrated.imported:
                assert taken.messages == taken.added + (
                    0 if not taken.already_imported else taken.messages
                )
            assert copied(source, store).messages == 0


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def test_links_in_a_folder_are_not_followed(place: Path) -> None:
    (place / "old").mkdir()
    (place / "secret.json").write_text('[{"role": "user", "content": "secret"}]')
    (place / "secret.jsonl").write_text('{"messages": [{"role": "user", "content": "secret"}]}')
    for name in ("a.json", "a.jsonl"):
        (place / "old" / name).symlink_to(place / f"secret{Path(name).suffix}")
    with InMemoryStore() as store:
        migrated = copied(place / "old", store)
        assert store.list_sessions() == []
        assert len(migrated.skipped) == 2


def test_invalid_times_are_replaced_by_file_time(place: Path) -> None:
    times = ["x", 1e300, 10**400, True]
    found = [{"role": "user", "content": "a", "timestamp": at} for at in times]
    (place / "k.json").write_text(json.dumps(found))
    os.utime(place / "k.json", (1_800_000_000, 1_800_000_000))
    with InMemoryStore() as store:
        copied(place / "k.json", store)
        assert {one.at.timestamp() for one in store.get_history("k")} == {1_800_000_000}


def test_only_first_problems_are_listed_and_rest_counted(place: Path) -> None:
    found: list[Any] = [{"role": "user", "content": "a"}, *range(1_000)]
    (place / "k.json").write_text(json.dumps(found))
    with InMemoryStore() as store:
        [taken] = copied(place / "k.json", store).imported
    assert (taken.dropped, len(taken.problems)) == (1_000, 21)
    assert taken.problems[-1] == "and 980 more like these"
