"""Scripted model of the demo: a few rules that need no network."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from stenolog.testing.scripted_model import ScriptedMessage, tool_call

Messages = Sequence[Mapping[str, Any]]


def answer(request: Mapping[str, Any]) -> ScriptedMessage:
    """Answer one request, as a model's server receives it."""
    messages: Messages = request["messages"]
    if "response_format" in request:
        # The agent requests JSON for notes and for summaries.
        instructions = str(messages[-1]["content"])
        return json.dumps(
            _make_notes(instructions) if "## Turn" in instructions else _make_summary(instructions)
        )
    if messages[-1]["role"] == "tool":
        return _describe_results(messages)
    prompt = str(messages[-1]["content"])
    if "cost" in prompt:
        return _call_tools(messages, ("price", "cake"), ("price", "coffee"))
    if "order" in prompt:
        return _call_tools(messages, ("price", "candles"), ("order", "chocolate cake"))
    if "allergic" in prompt and prompt.endswith("?"):
        known = any("hazelnuts" in str(message["content"]) for message in messages[:-1])
        return "You are allergic to hazelnuts: you told me." if known else "I do not know."
    if "allergic" in prompt:
        return "Good to know, Ada: no hazelnuts, then."
    return f"I have read it: {prompt[:22]}."


def _call_tools(messages: Messages, *names_and_items: tuple[str, str]) -> ScriptedMessage:
    """Return several tool calls at once."""
    earlier_calls = sum(len(message.get("tool_calls") or ()) for message in messages)
    calls = [
        tool_call(name, {"item": item}, id=f"call_{number}")
        for number, (name, item) in enumerate(names_and_items, earlier_calls + 1)
    ]
    return {"tool_calls": calls}


def _describe_results(messages: Messages) -> str:
    """Return an answer that describes the tool results."""
    *_, calling = (message for message in messages if message.get("tool_calls"))
    sentences = []
    for call in calling["tool_calls"]:
        item = json.loads(call["function"]["arguments"])["item"]
        [result] = (m["content"] for m in messages if m.get("tool_call_id") == call["id"])
        if result.startswith("[interrupted"):
            sentences.append(
                f"whether the {item} was ordered I cannot say, and I did not order it again"
            )
        elif call["function"]["name"] == "price":
            sentences.append(f"{item}: {result}")
        else:
            sentences.append(f"the {item} is ordered")
    return f"I have looked: {'; '.join(sentences)}."


def _make_notes(instructions: str) -> dict[str, Any]:
    """Return the notes about each turn: one fact that the user mentioned."""
    quote = "I am allergic to hazelnuts"
    fact = {
        "text": "Is allergic to hazelnuts.",
        "about": "allergy",
        "quote": quote,
    }
    turns = re.split(r"^## Turn \d+.*$", instructions, flags=re.MULTILINE)[1:]
    return {
        "turns": [
            {"turn": number, "daily": "They talked.", "facts": [fact] if quote in turn else []}
            for number, turn in enumerate(turns, 1)
        ]
    }


def _make_summary(instructions: str) -> dict[str, Any]:
    """Summarize this part of the conversation."""
    facts = ["The user is called Ada."] if "I am Ada" in instructions else []
    pages = re.findall(r"user: Page (\d+)", instructions)
    read = f"Ada has read her diary out, up to page {pages[-1]}." if pages else "Ada shops."
    none: list[str] = []
    empty = dict.fromkeys(("goals", "decisions", "open_questions", "tool_outcomes"), none)
    return {**empty, "facts": facts, "last_state": read, "outdated": none}
