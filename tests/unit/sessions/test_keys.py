"""Tests keys made of channel, sender, thread and chat: readable and unique."""

from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenolog.errors import UsageError
from stenolog.sessions import keys
from stenolog.sessions.keys import KeyParts, Scope
from stenolog.sessions.session_store import JSONLBackend
from stenolog.stores.in_memory import InMemoryStore
from stenolog.transfer.importers.layouts import key_of_scope
from stenolog.transfer.migration import migrate_from_json

_IN_A_GROUP = "slack:group%3AC1:u7"
names = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from(":%_"), min_size=1)
parts = st.builds(
    KeyParts,
    names.filter(lambda n: len(n) < 50),
    names.filter(lambda n: len(n) < 50),
    st.none() | names,
)


@pytest.mark.parametrize(
    ("scope", "key", "alone"),
    [
        ("sender", "telegram:7", "telegram:7"),
        ("thread", "telegram:99:7", "telegram:7"),
        ("group", "telegram:-100", "telegram:7"),
    ],
)
def test_scope_decides_which_senders_share_a_session(scope: Scope, key: str, alone: str) -> None:
    assert keys.key_for("telegram", "7", chat="-100", thread="99", scope=scope) == key
    assert keys.key_for("telegram", "7", scope=scope) == alone
    assert keys.key_for("telegram", "7", chat="-100", thread="99") == "telegram:7"


def test_colon_inside_a_part_is_escaped() -> None:
    assert keys.join_key(KeyParts("matrix", "@a:b.org")) == "matrix:@a%3Ab.org"
    assert keys.join_key(KeyParts("matrix", "@a%3Ab.org")) == "matrix:@a%253Ab.org"
    assert keys.split_key("matrix:@a%3Ab.org") == KeyParts("matrix", "@a:b.org")


@given(parts)
def test_p6_split_key_is_inverse_of_join_key(given: KeyParts) -> None:
    try:
        key = keys.join_key(given)
    except UsageError:
        return  # too long
    assert keys.split_key(key) == given


@given(parts, parts)
def test_p6_different_senders_have_different_keys(one: KeyParts, other: KeyParts) -> None:
    try:
        assert (keys.join_key(one) == keys.join_key(other)) == (one == other)
    except UsageError:
        return


@pytest.mark.parametrize("key", ["plain", "a:b:c:d", ":b", "a:", "a:%41", "a:%3a", "a:50%", ""])
def test_foreign_key_has_no_parts(key: str) -> None:
    assert keys.split_key(key) is None


@pytest.mark.parametrize("sender", ["", "x" * 2000, "\ud800"])
def test_invalid_keys_are_rejected(sender: str) -> None:
    with pytest.raises(UsageError):
        keys.key_for("telegram", sender)


def test_unknown_scope_is_rejected_with_the_valid_names() -> None:
    wrong: Any = "everybody"
    with pytest.raises(UsageError, match="sender, thread, group"):
        keys.key_for("a", "b", scope=wrong)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("telegram_alice", "telegram:alice"),
        ("telegram_1001_alice", "telegram:1001:alice"),
        ("telegram_-1001_alice", "telegram:-1001:alice"),
        ("telegram_alice_b", None),
        ("slack_C42_U7", None),
        ("telegram_1001_alice_b", None),
        ("gw", None),
        ("_alice", None),
        ("telegram_", None),
        ("telegram__alice", None),
    ],
)
def test_zeroclaw_name_is_converted_only_if_unambiguous(name: str, key: str | None) -> None:
    assert keys.key_from_zeroclaw_name(name) == key


@pytest.mark.parametrize(
    ("scope", "key"),
    [
        ({"channel": "telegram", "values": {"chat": "direct:123"}}, "telegram:123"),
        ({"channel": "telegram", "values": {"chat": "group:-1001"}}, "telegram:-1001"),
        ({"channel": "irc", "values": {"chat": "group:123"}}, "irc:group%3A123"),
        ({"channel": "irc", "values": {"chat": "123"}}, None),
        ({"channel": "irc", "values": {"chat": "direct:"}}, None),
        ({"channel": "slack", "values": {"chat": "group:C1", "sender": "u7"}}, _IN_A_GROUP),
        ({"channel": "slack", "values": {"chat": "direct:7", "sender": "7"}}, "slack:direct%3A7:7"),
        ({"channel": "slack", "values": {"topic": "17.5", "sender": "u7"}}, "slack:17.5:u7"),
        ({"channel": "slack", "values": {"chat": "group:C1", "topic": "5"}}, None),
        ({"channel": "slack", "values": {"space": "T1", "sender": "u7"}}, None),
        ({"channel": "slack", "values": {"topic": "5"}}, None),
        ({"channel": "slack", "values": {"space": "T1"}}, None),
        ({"channel": "slack", "values": {"sender": "u:7"}}, "slack:u%3A7"),
        ({"channel": "slack", "values": {"space": "s", "chat": "c", "sender": "u"}}, None),
        ({"channel": "slack", "values": {}}, None),
        ({"channel": "slack"}, None),
        ({"values": {"chat": "direct:123"}}, None),
        ({"channel": "slack", "values": {"chat": 7}}, None),
        ({"channel": "slack", "values": {"chat": "x" * 2000}}, None),
    ],
)
def test_scope_of_a_picoclaw_session_becomes_a_key(scope: dict[str, Any], key: str | None) -> None:
    assert key_of_scope(scope) == key


@pytest.mark.parametrize(
    "old",
    [
        # A message in a private chat, and one in a group: no other sender may get them.
        {"telegram_alice_b.jsonl": '{"role":"user","content":"a secret"}\n'},
        {
            "sk_v1_x.jsonl": '{"role":"user","content":"a secret"}\n',
            "sk_v1_x.meta.json": '{"key":"sk_v1_x","scope":{"channel":"telegram",'
            '"values":{"chat":"group:123"}}}',
        },
    ],
    ids=["zeroclaw", "picoclaw"],
)
def test_p6_sender_never_gets_an_imported_session_of_another(
    old: dict[str, str], tmp_path: Path
) -> None:
    for name, text in old.items():
        (tmp_path / name).write_text(text)
    sessions = JSONLBackend(InMemoryStore())
    assert migrate_from_json(tmp_path, sessions.store).messages == 1
    for sender, chat, thread in (("b", "g", "alice"), ("123", None, None), ("alice", None, "b")):
        for scope in get_args(Scope):
            key = keys.key_for("telegram", sender, chat=chat, thread=thread, scope=scope)
            assert sessions.get_history(key) == []
    sessions.close()


def test_numeric_id_is_used_as_its_digits() -> None:
    assert keys.key_for("telegram", 123, thread=7, scope="thread") == "telegram:7:123"
    assert keys.key_for("telegram", 123, chat=-1001, scope="group") == "telegram:-1001"


@pytest.mark.quick(5)
@pytest.mark.parametrize("name", ["channel", "sender", "chat", "thread"])
@pytest.mark.parametrize("wrong", [1.5, True, b"123", ["123"]])
def test_error_names_part_that_is_neither_text_nor_number(name: str, wrong: Any) -> None:
    said: dict[str, Any] = {"channel": "telegram", "sender": "1", name: wrong}
    with pytest.raises(UsageError, match=f"^{name} must be a string or an int, not "):
        keys.key_for(**said)
    with pytest.raises(UsageError, match=r"^sender must be a string or an int, not None"):
        keys.key_for("telegram", None)  # type: ignore[arg-type]
