"""The turns of a session: their messages, tokens, failed tools and cost."""

from collections.abc import Sequence
from typing import Any

import pytest

from stenolog.gateway.viewer.export_page import export_pieces
from stenolog.gateway.viewer.safe_html import preview
from stenolog.gateway.viewer.session_outline import MessageFilter, Outline, read_outline
from stenolog.records import Message
from stenolog.redaction.redact import SharingRedactor
from stenolog.sessions.usage import Price
from stenolog.stores.in_memory import InMemoryStore
from stenolog.transfer.viewed_places import open_places, recognize_place
from support.transcripts import SAMPLES


def _answer(model: str, prompt: int, answer: int, cached: int = 0) -> dict[str, Any]:
    usage = {"prompt": prompt, "answer": answer, "cached": cached}
    mark = {"model": model, "seconds": 1.5, "usage": usage}
    return {"role": "assistant", "content": "x", "stenolog": mark}


def _history() -> list[Message]:
    with InMemoryStore() as store:
        store.add_messages(
            "s",
            [
                {"role": "assistant", "content": "Before any prompt."},
                {"role": "user", "content": "One?"},
                _answer("big", 10, 5, 2),
                _answer("small", 100, 0),
                {"role": "user", "content": "Two?"},
                _answer("nobody/knows", 7, 7),
                {"role": "user", "content": "Three?"},
                {"role": "assistant", "content": "Nobody counted this."},
            ],
        )
        return store.get_history("s")


def _outline(history: Sequence[Message], price: Price | None = None) -> Outline:
    outline = Outline(price)
    for message in history:
        outline.add(message)
    return outline


def test_turn_contains_the_messages_up_to_the_next_prompt() -> None:
    found = [
        (one.seq, one.prompt, one.input_tokens, one.output_tokens, one.has_counts)
        for one in _outline(_history()).turns
    ]
    assert found == [
        (2, "One?", 110, 5, True),
        (5, "Two?", 7, 7, True),
        (7, "Three?", 0, 0, False),
    ]


def test_prompt_of_a_turn_has_no_part_of_a_secret() -> None:
    secret = "ghp_" + "A1b2C3d4" * 5
    outline = Outline()
    with InMemoryStore() as store:
        for length in range(440, 500):
            store.add_message("s", "user", f"see {' ' * length}{secret} {'x' * 500}")
        for message in store.get_history("s"):
            outline.add(message)
    assert {preview(turn.prompt) for turn in outline.turns} == {"see •••••• …"}


def test_cost_of_a_turn_is_the_sum_of_its_answers() -> None:
    price = {"big": 100.0, "small": 1.0}
    outline = _outline(_history(), lambda model, _: price.get(model))
    assert [turn.cost for turn in outline.turns] == [101.0, None, None]
    assert (outline.totals().cost, list(outline.totals().unpriced_models)) == (
        101.0,
        ["nobody/knows"],
    )


def test_answers_that_a_fork_copied_count_only_for_its_source() -> None:
    with InMemoryStore() as store:
        store.add_messages("s", [{"role": "user", "content": "One?"}, _answer("gpt-4o", 10, 5)])
        store.fork("s", "fork")
        store.add_messages("fork", [{"role": "user", "content": "Two?"}, _answer("gpt-4o", 30, 7)])
        fork, source = (read_outline(store, store.info(key)) for key in ("fork", "s"))
        assert [turn.input_tokens for turn in fork.turns] == [0, 30]
        assert (fork.totals().input_tokens, fork.totals().output_tokens) == (30, 7)
        assert source.totals().input_tokens == 10


def test_turn_names_its_failed_tools_once() -> None:
    calls = [
        {"id": id, "type": "function", "function": {"name": name, "arguments": "{}"}}
        for id, name in (("1", "Bash"), ("2", "Read"), ("3", "Bash"), ("4", "Write"))
    ]
    failed = {"failed": True}
    with InMemoryStore() as store:
        store.add_messages(
            "s",
            [
                {"role": "user", "content": "One?"},
                {"role": "assistant", "content": None, "tool_calls": calls},
                *(
                    {"role": "tool", "tool_call_id": id, "content": "x", "stenolog": failed}
                    for id in ("1", "2", "3")
                ),
                {"role": "tool", "tool_call_id": "4", "content": "fine"},
                {"role": "user", "content": "Two?"},
                {"role": "tool", "tool_call_id": "none", "content": "x", "stenolog": failed},
            ],
        )
        first, second = _outline(store.get_history("s")).turns
    assert (first.failed, first.failed_tools) == (3, ["Bash", "Read"])
    assert (second.failed, second.failed_tools) == (1, [])


def test_without_prices_no_turn_has_a_cost() -> None:
    assert [turn.cost for turn in _outline(_history()).turns] == [None, None, None]


@pytest.mark.parametrize(
    ("program", "key", "prompts"),
    [
        (
            "claude-code/projects",
            "claude-code:20c7a18b-7d9d-457e-bc34-7dfb461f0515",
            [
                "Add a tide table to the harbour page",
                "I think the table is wrong, check nosuchfile.txt",
                "What did we do so far?",
            ],
        ),
        (
            "codex/sessions",
            "codex:01a1e437-7030-7230-8002-8dfe870f6794",
            ["Count the lighthouses", "and write it down"],
        ),
    ],
)
def test_injected_messages_do_not_start_a_turn(
    program: str, key: str, prompts: Sequence[str]
) -> None:
    with open_places([recognize_place(str(SAMPLES / program))], catalog=None) as store:
        history = store.get_history(key, full=True)
        outline = read_outline(store, store.info(key))
        pieces = export_pieces("html", store.info(key), history, SharingRedactor(enabled=True))
        exported = b"".join(pieces).decode()
    assert [turn.prompt for turn in _outline(history).turns] == prompts
    only_prompts = outline.selected_spans(MessageFilter(only="prompts"))
    assert sum(last - first + 1 for first, last in only_prompts) == len(prompts)
    assert f"<dt>Turns</dt><dd>{len(prompts)}</dd>" in exported
    assert exported.count('<article class="message user"') == len(prompts)
    assert '<article class="message program"' in exported


def test_tokens_before_the_first_prompt_are_in_the_totals() -> None:
    command = {"role": "user", "content": "/review", "stenolog": {"kind": "command"}}
    with InMemoryStore() as store:
        store.add_messages("s", [command, _answer("big", 10, 5)])
        outline = read_outline(store, store.info("s"))
    assert outline.turns == []
    assert (outline.totals().input_tokens, outline.totals().output_tokens) == (10, 5)


def test_message_that_arrives_while_the_outline_is_read_is_in_it_once() -> None:
    with InMemoryStore() as store:
        store.add_message("s", "user", "One?")
        earlier = store.info("s")
        store.add_message("s", "user", "Two?")
        for info in (earlier, store.info("s")):
            outline = read_outline(store, info)
    assert [turn.prompt for turn in outline.turns] == ["One?", "Two?"]


def test_purged_prompts_leave_the_outline_even_if_messages_have_arrived() -> None:
    with InMemoryStore() as store:
        for prompt in ("One?", "Two?"):
            store.add_message("s", "user", prompt)
        read_outline(store, store.info("s"))
        store.admin.purge("s", before=2)
        store.add_message("s", "user", "Three?")
        outline = read_outline(store, store.info("s"))
    assert [turn.prompt for turn in outline.turns] == ["Two?", "Three?"]
