"""Whose notes are whose: no two scopes share a session, and none is lost on the way back."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stenolog.errors import InvalidKey
from stenolog.memory.scopes import Scope, agent_prefix, scope_of, scope_of_key
from stenolog.sessions.keys import Parts, join

names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40) | st.text(
    "a:%325A", min_size=1, max_size=8
)
scopes = st.builds(Scope, agent=names, who=names)


@given(scopes, scopes)
@example(Scope(agent="a:b", who="c"), Scope(agent="a", who="b:c"))
@example(Scope(agent="a%3Ab", who="c"), Scope(agent="a:b", who="c"))
def test_no_two_scopes_have_the_same_key(one: Scope, other: Scope) -> None:
    assert (one.key == other.key) == (one == other)


@given(scopes)
def test_a_key_tells_its_scope(scope: Scope) -> None:
    assert scope_of_key(scope.key) == scope
    assert scope.key.startswith(agent_prefix(scope.agent))


@given(names, scopes)
def test_the_keys_of_an_agent_begin_as_those_of_no_other(agent: str, scope: Scope) -> None:
    assert scope.key.startswith(agent_prefix(agent)) == (scope.agent == agent)


def test_a_key_is_pleasant_to_read() -> None:
    assert Scope(who="telegram:123").key == "main:telegram:123"


@pytest.mark.parametrize("key", ["", "main", ":x", "main:", "a%:b", "a%3ab:c", "%41:b"])
def test_a_key_of_no_scope_is_refused(key: str) -> None:
    with pytest.raises(InvalidKey):
        scope_of_key(key)


@pytest.mark.parametrize(
    ("key", "who"),
    [
        ("telegram:123", "telegram:123"),
        ("slack:C42", "slack:C42"),
        ("slack:T9:U7", "slack:U7"),
        ("slack:T%3A9:U%25", "slack:U%25"),
        ("cli:default", "cli:default"),
        ("no parts", "no parts"),
        ("a:b:c:d", "a:b:c:d"),
        ("a%:b:c", "a%:b:c"),
    ],
)
def test_joined_threads_belong_to_their_sender(key: str, who: str) -> None:
    assert scope_of(key, threads=True) == Scope(agent="main", who=who)
    assert scope_of(key, agent="other", threads=True) == Scope(agent="other", who=who)


@given(names, names)
@example("app:alice:1", "app:bob:1")
def test_unless_threads_are_joined_no_two_sessions_share_a_scope(one: str, other: str) -> None:
    assert (scope_of(one) == scope_of(other)) == (one == other)
    assert scope_of(one).who == one


@given(names, names, names, names)
def test_two_senders_never_share_a_scope(channel: str, thread: str, a: str, b: str) -> None:
    in_thread = scope_of(join(Parts(channel, a, thread)), threads=True)
    assert in_thread == scope_of(join(Parts(channel, a)), threads=True)
    assert (in_thread == scope_of(join(Parts(channel, b)), threads=True)) == (a == b)


@pytest.mark.parametrize(
    "scope", [Scope(who=""), Scope(agent="", who="x"), Scope(who="x" * 1020), Scope(who="\ud800")]
)
def test_what_can_be_no_scope_is_refused(scope: Scope) -> None:
    with pytest.raises(InvalidKey):
        assert scope.key
