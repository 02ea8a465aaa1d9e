"""Tests that any JSON message can be listed, searched, shown, exported and counted."""

import io
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout, suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from stenolog import InMemoryStore
from stenolog.catalog.indexing import SessionReader
from stenolog.cli.show import MessageRenderer, message_fields, print_message
from stenolog.context import summary, turn_state
from stenolog.context.window import Limits, build_window
from stenolog.errors import ContextTooSmall, UsageError
from stenolog.gateway.viewer import message_views as viewer
from stenolog.gateway.viewer.export_page import export_pieces
from stenolog.gateway.viewer.session_outline import Outline
from stenolog.memory import transcript
from stenolog.records import Message, SessionInfo
from stenolog.redaction.redact import SharingRedactor
from stenolog.stores.base import Store
from stenolog.tokens import Tokens, message_tokens
from stenolog.transfer.export.formats import ExportFormat
from support.strategies import messages

_FIELDS = (
    *("role", "content", "name", "tool_calls", "tool_call_id", "function_call", "stenolog"),
    *("reasoning_content", "reasoning", "reasoning_details", "thinking_blocks", "thinking"),
    *("refusal", "audio", "annotations"),
)
_PART_FIELDS = (
    *("type", "text", "content", "image_url", "source", "input", "id", "tool_use_id", "name"),
    *("function", "arguments", "url", "detail", "data", "media_type", "thinking", "is_error"),
    *("input_audio", "file", "seen", "origin", "channel", "usage", "prompt", "answer", "cached"),
    *("model", "seconds", "failed", "interrupted", "of_client"),
)
_WORDS = (
    *("user", "assistant", "tool", "system", "developer", "text", "image_url", "image", "thinking"),
    *("input_image", "redacted_thinking", "reasoning", "tool_use", "tool_result", "input_audio"),
    *("file", "function", "refusal", "call_1", "", "{", '{"a": [1, {"b": null}]}', "[interrupted]"),
    *("data:image/png;base64,AAAA", "https://example.org/x.png", "```python\nx = 1\n```"),
)


_ODD: tuple[Any, ...] = (
    None,
    True,
    0,
    1.5,
    -1,
    2**70,
    {},
    [],
    {"x": 1},
    ["text"],
    [[]],
    [{}],
    "\ud800",
    "\x00",
)


def _odd_messages() -> SearchStrategy[dict[str, Any]]:
    """Generate messages of the known shapes with any value in any place."""
    scalars = st.one_of(st.sampled_from(_WORDS), st.sampled_from(_ODD))
    flat = st.dictionaries(st.sampled_from(_PART_FIELDS), scalars, min_size=1, max_size=6)
    part = st.dictionaries(
        st.sampled_from(_PART_FIELDS),
        st.one_of(scalars, flat, st.lists(flat, max_size=2)),
        min_size=1,
        max_size=6,
    )
    typed = st.builds(lambda kind, more: {**more, "type": kind}, scalars, part)
    value = st.one_of(scalars, st.lists(st.one_of(part, typed, scalars), max_size=4), part)
    chat = st.builds(
        lambda role, content, more: {"role": role, "content": content, **more},
        st.one_of(st.sampled_from(_WORDS[:5]), scalars),
        value,
        st.dictionaries(st.sampled_from(_FIELDS[2:]), value, max_size=3),
    )
    return st.one_of(chat, chat, messages())


def _catalog(store: Store, info: SessionInfo, _history: list[Message]) -> None:
    # Raises NotIndexable if a catalog would list the session with a problem.
    for step in SessionReader(store).steps_to_current(info.key, "stamp", None):
        assert len(step.messages) in (0, info.count)


def _tokens(_store: Store, _info: SessionInfo, history: list[Message]) -> None:
    for message in history:
        assert message_tokens(message) > 0


def _window(_store: Store, _info: SessionInfo, history: list[Message]) -> None:
    for most in (60, 400, 100_000):
        try:
            build_window(history, limits=Limits(max_context_tokens=most, reserve=10))
        except ContextTooSmall:
            continue
    turn_state.turn_state(history)
    list(summary.message_texts(summary.read_messages(history), 100, Tokens()))


def _memory(_store: Store, info: SessionInfo, history: list[Message]) -> None:
    for turn in transcript.finished_turns(history):
        told = transcript.make_turn(turn, info)
        if told is not None:
            transcript.describe_turn(told)
            transcript.format_turn(told, turn_number=1, budget=100)


def _viewer(_store: Store, _info: SessionInfo, history: list[Message]) -> None:
    viewer.message_views(history[:1], history[1:])
    for one in viewer.message_views(history):
        assert "<script" not in one.html
    outline = Outline()
    for message in history:
        outline.add(message)


def _cli(_store: Store, _info: SessionInfo, history: list[Message]) -> None:
    page = MessageRenderer(color=False)
    with redirect_stdout(io.StringIO()):
        for message in history:
            list(page.message_lines(message))
            print_message(message)
            message_fields(message)


def _export(_store: Store, info: SessionInfo, history: list[Message]) -> None:
    forms: tuple[ExportFormat, ...] = ("jsonl", "openai", "markdown", "html")
    for form in forms:
        for wanted in (False, True):
            # Only the format openai may refuse a message that it cannot hold.
            with suppress(UsageError) if form == "openai" else nullcontext():
                assert b"".join(export_pieces(form, info, history, SharingRedactor(enabled=wanted)))


_Use = Callable[[Store, SessionInfo, list[Message]], None]
USES: list[_Use] = [_catalog, _tokens, _window, _memory, _viewer, _cli, _export]


@pytest.mark.quick(1)
@pytest.mark.parametrize("use", USES)
@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(bodies=st.lists(_odd_messages(), min_size=1, max_size=4))
def test_no_message_makes_a_reader_fail(use: _Use, bodies: list[dict[str, Any]]) -> None:
    with InMemoryStore() as store:
        store.add_messages("odd", bodies)
        use(store, store.info("odd"), store.get_history("odd", full=True))


_NESTED = "[" * 500 + '"xylophone"' + "]" * 500
_LISTS: Any = "xylophone"
for _ in range(190):
    _LISTS = [_LISTS]
_RESULTS: Any = "xylophone"
for _ in range(90):
    _RESULTS = [{"type": "tool_result", "tool_use_id": "a", "content": _RESULTS}]
DEEP = [
    {"role": "tool", "content": _NESTED},
    {"role": "user", "content": _LISTS},
    {"role": "user", "content": _RESULTS},
    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": _NESTED}}]},
    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": _LISTS}}]},
    {"role": "assistant", "content": "x", "stenolog": _LISTS, "further": _LISTS},
]


@pytest.mark.quick(5)
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("body", [{}, {"content": "x"}, {"role": None}], ids=repr)
def test_a_message_without_a_role_makes_no_reader_fail(use: _Use, body: dict[str, Any]) -> None:
    with InMemoryStore() as store:
        store.add_messages("k", [body, {"role": "assistant", "content": "x"}, body])
        use(store, store.info("k"), store.get_history("k", full=True))


@pytest.mark.quick(5)
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("body", DEEP, ids=lambda body: "-".join(body))
def test_deeply_nested_content_makes_no_reader_fail(use: _Use, body: dict[str, Any]) -> None:
    with InMemoryStore() as store:
        store.add_messages("deep", [{"role": "user", "content": "go"}, body])
        use(store, store.info("deep"), store.get_history("deep", full=True))
