"""Tests the record of withdrawn messages in the metadata."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenolog.stores import spans
from stenolog.stores.withdrawn_messages import MAX_RANGES, META_FIELD, updated_field, withdrawn_seqs
from support.strategies import values

SPANS = st.lists(
    st.tuples(st.integers(1, 60), st.integers(0, 5)).map(lambda at: (at[0], at[0] + at[1]))
)


def seqs(found: list[tuple[int, int]]) -> set[int]:
    return {seq for first, last in found for seq in range(first, last + 1)}


@given(values())
def test_any_value_of_the_meta_field_is_parsed(value: Any) -> None:
    found = withdrawn_seqs({META_FIELD: value})
    assert found == spans.union(found)
    assert all(1 <= first <= last for first, last in found)


@pytest.mark.parametrize("other", [None, 5, "3-4", [3, 4], [[0, 4]], [[4, 3]], [[True, 2]], [{}]])
def test_invalid_seq_ranges_are_ignored(other: Any) -> None:
    assert withdrawn_seqs({META_FIELD: other}) == []
    assert withdrawn_seqs({}) == []
    if isinstance(other, list):
        assert withdrawn_seqs({META_FIELD: [*other, [7, 8]]}) == [(7, 8)]


@given(SPANS, SPANS, SPANS)
def test_updated_field_adds_new_seqs_and_drops_visible_ones(
    known: list[tuple[int, int]], taken: list[tuple[int, int]], shown: list[tuple[int, int]]
) -> None:
    meta = {META_FIELD: [list(span) for span in known]}
    value = updated_field(meta, taken, visible=spans.union(shown))
    assert seqs(withdrawn_seqs({META_FIELD: value})) == (seqs(known) - seqs(shown)) | seqs(taken)
    assert value is None or value == [list(span) for span in withdrawn_seqs({META_FIELD: value})]


def test_number_of_ranges_is_limited_to_the_newest() -> None:
    value = updated_field({}, [(seq, seq) for seq in range(1, 1_000, 2)])
    assert value is not None
    assert len(value) == MAX_RANGES
    assert value[-1] == [999, 999]
