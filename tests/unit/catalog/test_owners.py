"""Whose a session is where threads are joined."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stenolog.catalog.owners import owner_of
from stenolog.sessions.keys import Parts, join, split


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
    assert owner_of(key) == owner


parts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)


@given(parts, parts, parts)
def test_all_threads_of_a_sender_are_one_owner(channel: str, thread: str, sender: str) -> None:
    alone = join(Parts(channel, sender))
    assert owner_of(join(Parts(channel, sender, thread))) == alone == owner_of(alone)


@given(st.text(st.sampled_from("ab:%325A"), min_size=1, max_size=12) | st.text(min_size=1))
@example("%25:%3A:%")
def test_a_key_that_was_not_made_for_a_thread_is_its_own(key: str) -> None:
    made = split(key)
    assert (owner_of(key) == key) == (made is None or made.thread is None)
