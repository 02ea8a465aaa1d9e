"""Histories for tests of context windows, and checks for everything that providers reject.

The checks share no code with the code under test: they only read the finished messages.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from stenolog import InMemoryStore, Message
from stenolog.tokens import Tokens
from support.strategies import messages as any_messages

KEY = "cli:default"

CHEAP = Tokens(count=lambda text: -(-len(text) // 4))
"""Counts four characters as a token: fast, and easy to calculate."""


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any, *ids: Any, arguments: Any = "{}") -> dict[str, Any]:
    said: dict[str, Any] = {"role": "assistant", "content": content}
    if ids:
        said["tool_calls"] = [
            {"id": id, "type": "function", "function": {"name": "look", "arguments": arguments}}
            for id in ids
        ]
    return said


def tool(id: Any, content: Any = "seen") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": content}


def uses(text: str, *ids: Any) -> dict[str, Any]:
    parts = [{"type": "tool_use", "id": id, "name": "look", "input": {"at": "x"}} for id in ids]
    return {"role": "assistant", "content": [{"type": "text", "text": text}, *parts]}


def uses_with_a_text(text: Any, *ids: Any) -> dict[str, Any]:
    """Return tool calls with an additional field of another kind of part."""
    said = uses("so", *ids)
    parts = [part if part["type"] == "text" else {**part, "text": text} for part in said["content"]]
    return {**said, "content": parts}


def hands(*ids: Any, text: str = "") -> dict[str, Any]:
    parts: list[Any] = [
        {"type": "tool_result", "tool_use_id": id, "content": f"seen {id}"} for id in ids
    ]
    return user(parts + ([{"type": "text", "text": text}] if text else []))


def stored(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return the messages as a store returns them, with seqs."""
    with InMemoryStore() as store:
        if messages:
            store.add_messages(KEY, messages)
        return store.get_history(KEY)


def talk(turns: int, *, size: int = 40, calls: int = 0) -> list[dict[str, Any]]:
    """Return `turns` turns, each with a question, calls with results, and an answer."""
    said: list[dict[str, Any]] = []
    for turn in range(turns):
        said.append(user(f"question {turn} " + "q" * size))
        for call in range(calls):
            said += [assistant(None, f"c{turn}.{call}"), tool(f"c{turn}.{call}", "r" * size)]
        said.append(assistant(f"answer {turn} " + "a" * size))
    return said


# --- arbitrary histories ---------------------------------------------------------------------

_IDS = st.sampled_from(["c1", "c1", "c2", "c3", "", None, 5])
_TEXTS = st.one_of(
    st.sampled_from(["", " \n", "yes", "word " * 30, "x" * 700, "\ud800", "\x00"]),
    st.text(max_size=30),
)
_CONTENTS: SearchStrategy[Any] = st.one_of(
    _TEXTS,
    st.none(),
    st.lists(
        st.one_of(
            _TEXTS,
            st.builds(lambda text: {"type": "text", "text": text}, _TEXTS),
            st.just({"type": "image_url", "image_url": {"url": "x", "detail": "low"}}),
            st.builds(
                lambda kind, text: {"type": kind, "text": text},
                st.sampled_from(["text", "input_text", "output_text", "image_url"]),
                st.one_of(_TEXTS, st.sampled_from([None, 5, True, [], ["a"], {"a": "b"}])),
            ),
        ),
        max_size=3,
    ),
)
_ARGUMENTS = st.sampled_from(["{}", '{"a": 1}', "", "not json", "[1]", None, {"a": 1}, "{" * 9])
_FURTHER: SearchStrategy[dict[str, Any]] = st.dictionaries(
    st.sampled_from(
        ["reasoning", "reasoning_content", "reasoning_details", "thinking_blocks", "cache", "at"]
    ),
    st.one_of(
        _TEXTS,
        st.builds(lambda text: [{"type": "thinking", "thinking": text, "signature": "s"}], _TEXTS),
        st.builds(lambda text: {"inner": [text, 2**70, None]}, _TEXTS),
    ),
    max_size=2,
)
"""Fields that only some providers accept, and that must be counted if present."""


def thinks(text: str, *ids: Any) -> dict[str, Any]:
    """Return a message with thinking among its parts."""
    said = uses("so", *ids)
    thought = {"type": "thinking", "thinking": text, "signature": "s"}
    return {**said, "content": [thought, *said["content"]]}


def anything() -> SearchStrategy[list[dict[str, Any]]]:
    """Generate well-formed histories, histories after crashes, and malformed ones."""
    ids = st.lists(_IDS, min_size=1, max_size=3)
    one = st.one_of(
        st.builds(user, _CONTENTS),
        st.builds(assistant, _CONTENTS),
        st.builds(
            lambda content, ids, given: assistant(content, *ids, arguments=given),
            _CONTENTS,
            ids,
            _ARGUMENTS,
        ),
        st.builds(tool, _IDS, _CONTENTS),
        st.builds(tool, _IDS, _CONTENTS),
        st.builds(lambda ids: uses("use", *ids), ids),
        st.builds(lambda text, ids: thinks(text, *ids), _TEXTS, ids),
        st.builds(
            lambda text, ids: uses_with_a_text(text, *ids), st.one_of(_TEXTS, st.none()), ids
        ),
        st.builds(lambda content, more: {**assistant(content), **more}, _CONTENTS, _FURTHER),
        st.builds(lambda content, more: {**user(content), **more}, _CONTENTS, _FURTHER),
        st.builds(lambda more: {**assistant(None, "c1"), **more}, _FURTHER),
        st.builds(lambda role: {"role": role, "content": "be brief"}, st.just("developer")),
        st.builds(lambda ids, text: hands(*ids, text=text), ids, st.sampled_from(["", "more"])),
        st.builds(
            lambda calls: {"role": "assistant", "content": None, "tool_calls": calls},
            st.sampled_from([None, [], {}, "c1", [None], [{}], [{"id": "c1"}], [{"function": 3}]]),
        ),
        st.sampled_from([{"role": "system", "content": "be brief"}, {"role": "odd"}, {}]),
        any_messages(),
    )
    return st.lists(one, max_size=14)


def sessions() -> SearchStrategy[list[dict[str, Any]]]:
    """Generate complete turns with calls, some interrupted, some with a second user message."""
    sizes = st.sampled_from([1, 40, 400, 4_000])
    turn = st.tuples(sizes, st.integers(0, 3), st.integers(0, 3), st.booleans(), st.booleans())
    return st.lists(turn, min_size=1, max_size=8).map(_session)


def _session(turns: Sequence[tuple[int, int, int, bool, bool]]) -> list[dict[str, Any]]:
    said: list[dict[str, Any]] = []
    for number, (size, calls, answered, steers, ends) in enumerate(turns):
        said.append(user(f"q{number} " + "q" * min(size, 200)))
        ids = [f"t{number}.{call}" for call in range(calls)]
        if ids:
            said.append(assistant(None, *ids))
        if steers:
            said.append(user(f"steer {number}"))
        said += [tool(id, f"result of {id} " + "r" * size) for id in ids[:answered]]
        if ends:
            said.append(assistant(f"a{number} " + "a" * size))
    return said


# --- checks ----------------------------------------------------------------------------------


def faults(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return everything that a strict provider would reject."""
    found: list[str] = []
    waiting: list[str] = []
    known: set[str] = set()
    for at, message in enumerate(messages):
        role, content = message["role"], message.get("content")
        try:
            json.dumps(message, ensure_ascii=False).encode()
        except (TypeError, ValueError) as error:
            found.append(f"{at}: cannot be sent: {error}")
        results = _results(message)
        for id in results:
            if waiting[:1] != [id]:
                found.append(f"{at}: result {id!r} where {waiting} were expected")
            waiting = waiting[1:]
        if waiting and not results:
            found.append(f"{at}: {waiting} were not answered before a {role} message")
            waiting = []
        calls = _calls(message)
        if role not in ("system", "developer", "user", "assistant", "tool"):
            found.append(f"{at}: role {role!r}")
        if _says_nothing(content) and not (calls and content is None):
            found.append(f"{at}: nothing in it")
        if "tool_calls" in message and not message["tool_calls"]:
            found.append(f"{at}: an empty list of calls")
        for id in calls:
            if not isinstance(id, str) or not id or id in known:
                found.append(f"{at}: call id {id!r}")
            known.add(id)
        found += [f"{at}: {fault}" for fault in _odd_calls(message)]
        waiting += calls
    return found + ([f"{waiting} were never answered"] if waiting else [])


def _calls(message: Mapping[str, Any]) -> list[Any]:
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    uses = [part["id"] for part in parts if part["type"] == "tool_use"]
    return [call["id"] for call in message.get("tool_calls", [])] + uses


def _results(message: Mapping[str, Any]) -> list[Any]:
    if message["role"] == "tool":
        return [message["tool_call_id"]]
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    return [part["tool_use_id"] for part in parts if part["type"] == "tool_result"]


def _odd_calls(message: Mapping[str, Any]) -> list[str]:
    found = []
    for call in message.get("tool_calls", []):
        function = call["function"]
        given = function["arguments"]
        whole = isinstance(given, str) and isinstance(json.loads(given), dict)
        if not whole or not isinstance(function["name"], str):
            found.append(f"call {call}")
    return found


def _says_nothing(content: Any) -> bool:
    """Return whether a text in it is blank, or it has no text; strict providers reject both."""
    if isinstance(content, str):
        return not content.strip()
    if not isinstance(content, list) or not content:
        return True
    kinds = ("text", "input_text", "output_text")
    texts = [part.get("text") for part in content if part["type"] in kinds]
    results = [part["content"] for part in content if part["type"] == "tool_result"]
    return not all(isinstance(text, str) and text.strip() for text in texts) or any(
        map(_says_nothing, results)
    )
