"""Tests Context in a caller's own loop: windows, summaries and overflow."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenolog import InMemoryStore, JSONLStore, Store
from stenolog.catalog import open_catalog
from stenolog.context.context import Context
from stenolog.context.request_messages import ProviderRequirements
from stenolog.context.summarize import SummaryReport
from stenolog.context.window import Limits
from stenolog.errors import ContextTooSmall, UnsupportedFormat, UsageError
from stenolog.tokens import Tokens
from support.histories import CHEAP, KEY, assistant, faults, hands, talk, tool, user, uses

LIMITS = Limits(max_context_tokens=4_000, max_history_messages=10)


@pytest.fixture
def store() -> Iterator[Store]:
    """Yield an empty store."""
    with InMemoryStore() as opened:
        yield opened


class Loop:
    """A context that records its reports."""

    def __init__(self, store: Store, **given: Any) -> None:
        self.told: list[SummaryReport] = []
        options: dict[str, Any] = {"limits": LIMITS, "tokens": CHEAP, "on_event": self.told.append}
        self.context = Context(store, **options | given)

    @property
    def reasons(self) -> list[str]:
        return [event.reason for event in self.told]


class Server:
    """A model with a token limit, whose errors name the limit or not."""

    def __init__(self, takes: int, error: str) -> None:
        self.takes = takes
        self.error = error
        self.sent: list[int] = []

    def __call__(self, messages: list[dict[str, Any]]) -> str:
        assert faults(messages) == []
        self.sent.append(sum(map(CHEAP.message, messages)))
        if self.sent[-1] > self.takes:
            raise RuntimeError(self.error)
        return "fine"


async def _async_model(messages: list[dict[str, Any]]) -> str:
    return str(messages)


def _returns_coroutine(messages: list[dict[str, Any]]) -> Any:
    return _async_model(messages)


@pytest.mark.parametrize("model", [_async_model, _returns_coroutine])
def test_async_model_is_rejected(store: Store, model: Any) -> None:
    store.add_message(KEY, "user", "hello")
    with pytest.raises(UsageError, match="without await"):
        Loop(store).context.call(KEY, model)


SILENT = "Your input exceeds the context window of this model."
NAMING = "This model's maximum context length is 1000 tokens. However, you requested 3000 tokens"


def test_short_conversation_is_sent_without_a_summary(store: Store) -> None:
    loop = Loop(store, system="Be brief.")
    store.add_messages(KEY, talk(2))
    assert loop.context.call(KEY, lambda messages: len(messages)) == 5
    assert loop.context.summarize_if_needed(KEY) is None
    assert loop.told == []


def test_message_count_triggers_a_summary_after_a_turn(store: Store) -> None:
    loop = Loop(store)
    store.add_messages(KEY, talk(6))
    done = loop.context.summarize_if_needed(KEY)
    assert done is not None
    assert loop.told == [done]
    assert loop.reasons == ["count"]
    assert len(store.get_history(KEY)) == 4
    assert loop.context.summarize_if_needed(KEY) is None


def test_tokens_trigger_a_summary_before_a_call(store: Store) -> None:
    loop = Loop(store)
    store.add_messages(KEY, [*talk(4, size=3_000), user("and now?")])
    sent = loop.context.call(KEY, lambda messages: messages)
    assert loop.reasons == ["tokens"]
    assert sent[-1] == user("and now?")
    assert sum(map(CHEAP.message, sent)) <= LIMITS.room // 2
    assert "[Summary of the earlier conversation]" in sent[0]["content"]


def test_summarize_on_request(store: Store) -> None:
    loop = Loop(store)
    store.add_messages(KEY, talk(4))
    assert loop.context.summarize(KEY) is not None
    assert loop.reasons == ["manual"]
    assert loop.context.summarize(KEY) is None  # one turn is left, so nothing can be hidden
    assert loop.reasons == ["manual"]


@pytest.mark.parametrize("error", [SILENT, NAMING])
def test_overflow_error_triggers_a_summary_and_a_retry(store: Store, error: str) -> None:
    loop = Loop(store)
    store.add_messages(KEY, [*talk(4, size=1_200), user("and now?")])
    server = Server(1_000, error)
    assert loop.context.call(KEY, server) == "fine"
    assert 2 <= len(server.sent) <= 3
    assert set(loop.reasons) == {"overflow"}
    assert len(store.get_history(KEY)) < 9


def test_stated_limit_is_kept_for_later_calls(store: Store) -> None:
    loop = Loop(store)
    store.add_messages(KEY, [*talk(4, size=1_200), user("and now?")])
    loop.context.call(KEY, Server(1_000, NAMING))
    assert loop.context.limits.max_context_tokens == 900
    store.add_messages(KEY, [assistant("a" * 1_200), *talk(3, size=600), user("and now?")])
    server = Server(1_000, NAMING)
    assert loop.context.call(KEY, server) == "fine"
    assert len(server.sent) == 1


def test_larger_stated_limit_does_not_reduce_ours(store: Store) -> None:
    loop = Loop(store)
    store.add_messages(KEY, [*talk(4, size=1_200), user("and now?")])
    loop.context.call(KEY, Server(1_000, NAMING.replace("1000", "9000")))
    assert loop.context.limits == LIMITS


def test_smaller_limit_learned_by_another_thread_is_kept(store: Store) -> None:
    loop = Loop(store)
    store.add_messages(KEY, [*talk(4, size=1_200), user("and now?")])

    def meanwhile(messages: list[dict[str, Any]]) -> str:
        loop.context.limits = LIMITS.at_most(500)
        return server(messages)

    server = Server(1_000, NAMING)
    loop.context.call(KEY, meanwhile)
    assert loop.context.limits.max_context_tokens == 500


def test_errors_of_on_event_are_logged(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    def fails(_: object) -> int:
        raise RuntimeError("screen is off")

    loop = Loop(store, on_event=fails)
    store.add_messages(KEY, talk(6))
    done = loop.context.summarize_if_needed(KEY)
    assert done is not None
    assert "on_event failed after a summary of 'cli:default': RuntimeError" in caplog.text
    assert loop.context.call(KEY, lambda _: "paid for", usage=fails) == "paid for"
    assert "could not be stored: RuntimeError('screen is off')" in caplog.text


def test_one_long_turn_is_shortened_after_an_overflow(store: Store) -> None:
    loop = Loop(store)
    store.add_messages(KEY, [user("do it"), assistant(None, "c1"), tool("c1", "x" * 9_000)])
    server = Server(1_000, SILENT)
    assert loop.context.call(KEY, server) == "fine"
    assert len(server.sent) <= 3
    assert loop.told == []


def test_error_after_two_retries_says_what_to_do(store: Store) -> None:
    loop = Loop(store)
    store.add_messages(KEY, [*talk(4, size=1_200), user("and now?")])
    server = Server(0, SILENT)
    with pytest.raises(ContextTooSmall, match="after 2 shorter attempts; set max_con") as caught:
        loop.context.call(KEY, server)
    assert f"to less than {server.sent[-1]:,}" in str(caught.value)
    assert len(server.sent) == 3
    assert str(caught.value.__cause__) == SILENT
    assert server.sent == sorted(server.sent, reverse=True)


def test_request_that_cannot_be_shortened_raises_context_too_small(store: Store) -> None:
    loop = Loop(store)
    store.add_message(KEY, "user", "q" * 8_000)
    server = Server(100, "prompt is too long: 2004 tokens > 100 maximum")
    with pytest.raises(ContextTooSmall, match="its limit is 100") as caught:
        loop.context.call(KEY, server)
    assert "give the model a context of at least" in str(caught.value)
    assert "tries" not in str(caught.value)  # there were none
    assert "max_context_tokens" not in str(caught.value)  # a smaller one would not help
    assert caught.value.needed > 2_004
    assert len(server.sent) == 1
    assert loop.context.limits == LIMITS  # unchanged, because it did not help


def test_other_errors_of_the_model_are_raised(store: Store) -> None:
    loop = Loop(store)
    store.add_messages(KEY, talk(4))
    server = Server(0, "Rate limit reached on tokens per min (TPM)")
    with pytest.raises(RuntimeError, match="Rate limit"):
        loop.context.call(KEY, server)
    assert len(server.sent) == 1
    assert loop.told == []


def test_undone_summary_is_not_repeated_after_the_next_turn(store: Store) -> None:
    loop = Loop(store)
    store.add_messages(KEY, talk(6))
    loop.context.summarize_if_needed(KEY)
    store.undo(KEY)
    store.add_message(KEY, "user", "as it was, please")
    assert len(loop.context.call(KEY, lambda messages: messages)) == 13
    store.add_message(KEY, "assistant", "Yes.")
    assert loop.context.summarize_if_needed(KEY) is None
    assert loop.reasons == ["count"]


def test_messages_left_out_of_the_window_are_summarized(store: Store) -> None:
    # The stored messages fit, but not together with a long one.
    store.add_messages(KEY, talk(4, size=500))
    loop = Loop(store)
    assert loop.context.summarize_if_needed(KEY) is None
    store.add_messages(KEY, [user("q" * 4 * (LIMITS.room - 800))])
    assert loop.context.window(KEY).left_out > 0
    sent = loop.context.call(KEY, lambda messages: messages)
    assert loop.reasons == ["tokens"]
    assert "earlier messages are left out" not in str(sent)


def test_missing_results_count_as_they_are_sent(store: Store) -> None:
    lost = [user("look"), assistant("Looking.", *(f"c{n}" for n in range(20))), assistant("No.")]
    left = LIMITS.room - sum(map(CHEAP.message, lost)) - 20
    store.add_messages(KEY, [*lost, user("q" * 4 * left)])
    done = Loop(store).context.summarize_if_needed(KEY)
    assert done is not None
    assert done.reason == "tokens"


def test_fields_that_are_not_sent_trigger_no_summary(store: Store) -> None:
    store.add_messages(KEY, [{**said, "trace": "t" * 8_000} for said in talk(3)])
    assert Loop(store).context.summarize_if_needed(KEY) is None
    sending = Loop(store, needs=ProviderRequirements(keep_fields=("trace",)))
    assert sending.context.summarize_if_needed(KEY) is not None


def test_window_of_an_unknown_session_does_not_create_it(store: Store) -> None:
    loop = Loop(store, system="Be brief.")
    assert len(loop.context.window("cli:none").messages) == 1
    assert loop.context.summarize_if_needed("cli:none") is None
    assert store.list_sessions() == []


def test_reported_tokens_calibrate_the_estimate(store: Store) -> None:
    store.add_messages(KEY, talk(4, size=200))
    context = Context(store, tokens=Tokens(count=lambda text: len(text) // 4))

    def model(messages: list[dict[str, Any]]) -> int:
        return 2 * sum(map(CHEAP.message, messages))

    plain = context.window(KEY).tokens
    for _ in range(12):
        context.call(KEY, model, usage=lambda answer: answer)
    assert 1.9 * plain < context.window(KEY).tokens < 2.1 * plain
    context.call(KEY, model, usage=lambda _: None)


def test_reported_tokens_are_stored_per_model(tmp_path: Path) -> None:
    with JSONLStore(tmp_path) as store:
        store.add_message(KEY, "user", "How tall is it? " * 50)
        with open_catalog(store) as catalog:
            context = Context(store, catalog=catalog, model="small")
            before = context.window(KEY).tokens
            for _ in range(10):
                window = context.window(KEY)
                context.call(KEY, lambda _: "short", usage=lambda _: 2 * before)
            assert context.window(KEY).tokens == pytest.approx(2 * before, rel=0.05)
            assert window.tokens > before
        with open_catalog(store) as catalog:
            again = Context(store, catalog=catalog, model="small").window(KEY)
            assert again.tokens == pytest.approx(2 * before, rel=0.05)
            assert Context(store, catalog=catalog, model="other").window(KEY).tokens == before


def test_object_that_is_no_store_is_rejected() -> None:
    class OwnSessions:
        get_history = InMemoryStore.get_history

    with pytest.raises(UsageError, match=r"Context needs a Store, .* not OwnSessions"):
        Context(cast(Any, OwnSessions()))


@given(
    lengths=st.lists(st.integers(0, 600), min_size=1, max_size=14),
    tokens=st.integers(500, 4_000),
    reported=st.integers(1, 4_000),
)
def test_session_with_room_needs_no_summary(lengths: list[int], tokens: int, reported: int) -> None:
    limits = Limits(max_context_tokens=tokens, max_history_messages=10)
    with InMemoryStore() as store:
        for length in lengths:
            store.add_message(KEY, "user", "x" * length)
            store.add_message(KEY, "assistant", "fine")
        context = Loop(store, limits=limits).context
        try:
            window = context.window(KEY)
        except ContextTooSmall:
            return
        store.add_message(KEY, "assistant", "word " * lengths[0])
        context.record_usage(estimated=window.tokens, reported=reported)
        if context.has_room(window, store.get_history(KEY)):
            assert context.summarize_if_needed(KEY) is None


def test_short_session_has_room_and_a_long_one_has_none(store: Store) -> None:
    context = Loop(store).context
    store.add_messages(KEY, talk(2))
    assert context.has_room(context.window(KEY), store.get_history(KEY))
    store.add_messages(KEY, talk(6))
    assert not context.has_room(context.window(KEY), store.get_history(KEY))


def test_session_with_a_summary_that_was_cut_must_be_counted(store: Store) -> None:
    context = Loop(store).context
    store.add_messages(KEY, talk(2))
    store.set_summary(KEY, "word " * 9_000)
    window = context.window(KEY)
    assert window.summary_cut
    assert not context.has_room(window, store.get_history(KEY))


def test_responses_items_are_neither_left_out_nor_summarized(store: Store) -> None:
    loop = Loop(store)
    item = {"type": "function_call_output", "call_id": "c1", "output": "sunny"}
    store.add_messages(KEY, [*talk(8), item, assistant("It is sunny.")])
    calls: list[Any] = []
    for request in (
        lambda: loop.context.window(KEY),
        lambda: loop.context.call(KEY, calls.append),
        lambda: loop.context.summarize(KEY),
        lambda: loop.context.summarize_if_needed(KEY),
    ):
        with pytest.raises(UnsupportedFormat, match="'cli:default': the message at seq 17") as got:
            request()
        assert (got.value.key, got.value.seq) == (KEY, 17)
    assert (calls, loop.told) == ([], [])
    assert len(store.get_history(KEY)) == 18


def test_session_in_another_format_than_the_model_can_be_summarized(store: Store) -> None:
    loop = Loop(store, needs=ProviderRequirements(chat_only=True))
    for _ in range(8):
        store.add_messages(KEY, [user("look"), uses("so", "c"), hands("c"), assistant("Done.")])
    with pytest.raises(UnsupportedFormat, match="at seq 2 has content of type 'tool_use'"):
        loop.context.window(KEY)
    report = loop.context.summarize(KEY)
    assert report is not None
    assert "look" in store.get_summary(KEY)
