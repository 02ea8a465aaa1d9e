"""Whose a session is: the same by the index and by the scopes of memory."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stenolog.catalog.owners import owner_of
from stenolog.memory.scopes import scope_of
from stenolog.sessions.keys import Parts, join


@pytest.mark.parametrize(
    ("key", "owner"),
    [
        ("telegram:123", "telegram:123"),
        ("slack:C42:U7", "slack:U7"),
        ("slack:C42", "slack:C42"),
        ("plain", "plain"),
        ("a:b:c:d", "a:b:c:d"),
        ("a::c", "a::c"),
        (":b:c", ":b:c"),
        ("a:%zz:c", "a:%zz:c"),
        ("a:%3a:c", "a:%3a:c"),
        ("x:t%3A1:u%253A", "x:u%253A"),
    ],
)
def test_a_thread_is_its_senders_and_every_other_key_its_own(key: str, owner: str) -> None:
    assert owner_of(key) == owner == scope_of(key).who


keys = st.text(st.sampled_from("ab:%325A"), min_size=1, max_size=12) | st.text(min_size=1)


@given(keys)
@example("%25:%3A:%")
def test_the_index_and_memory_never_differ(key: str) -> None:
    assert owner_of(key) == scope_of(key).who


parts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)


@given(parts, parts, parts)
def test_all_threads_of_a_sender_are_one_owner(channel: str, thread: str, sender: str) -> None:
    alone = join(Parts(channel, sender))
    assert owner_of(join(Parts(channel, sender, thread))) == alone == owner_of(alone)
