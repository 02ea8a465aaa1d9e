"""What the model of the demo says: a few rules, which understand nothing and need no network."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from stenolog.testing.scripted_model import ScriptedMessage, tool_call

Messages = Sequence[Mapping[str, Any]]


def answer(request: Mapping[str, Any]) -> ScriptedMessage:
    """The answer to one request, as a model's server gets it."""
    messages: Messages = request["messages"]
    if "response_format" in request:
        # The agent asks for JSON: for the notes it keeps, or for a summary.
        asked = str(messages[-1]["content"])
        return json.dumps(_notes(asked) if "## Turn" in asked else _summary(asked))
    if messages[-1]["role"] == "tool":
        return _after_tools(messages)
    said = str(messages[-1]["content"])
    if "cost" in said:
        return _calls(messages, ("price", "cake"), ("price", "coffee"))
    if "order" in said:
        return _calls(messages, ("price", "candles"), ("order", "chocolate cake"))
    if "allergic" in said and said.endswith("?"):
        known = any("hazelnuts" in str(message["content"]) for message in messages[:-1])
        return "You are allergic to hazelnuts: you told me." if known else "I do not know."
    if "allergic" in said:
        return "Good to know, Ada: no hazelnuts, then."
    return f"I have read it: {said[:22]}."


def _calls(messages: Messages, *wanted: tuple[str, str]) -> ScriptedMessage:
    """Several tools at once."""
    made = sum(len(message.get("tool_calls") or ()) for message in messages)
    calls = [
        tool_call(name, {"item": item}, id=f"call_{number}")
        for number, (name, item) in enumerate(wanted, made + 1)
    ]
    return {"tool_calls": calls}


def _after_tools(messages: Messages) -> str:
    """What the tools said, told in words."""
    *_, calling = (message for message in messages if message.get("tool_calls"))
    told = []
    for call in calling["tool_calls"]:
        item = json.loads(call["function"]["arguments"])["item"]
        [result] = (m["content"] for m in messages if m.get("tool_call_id") == call["id"])
        if result.startswith("[interrupted"):
            told.append(
                f"whether the {item} was ordered I cannot say, and I did not order it again"
            )
        elif call["function"]["name"] == "price":
            told.append(f"{item}: {result}")
        else:
            told.append(f"the {item} is ordered")
    return f"I have looked: {'; '.join(told)}."


def _notes(asked: str) -> dict[str, Any]:
    """What is to be remembered of each turn: here, one fact that the user told."""
    quote = "I am allergic to hazelnuts"
    fact = {
        "text": "Is allergic to hazelnuts.",
        "about": "allergy",
        "quote": quote,
        "confidence": 1,
    }
    turns = re.split(r"^## Turn \d+.*$", asked, flags=re.MULTILINE)[1:]
    return {
        "turns": [
            {"turn": number, "daily": "They talked.", "facts": [fact] if quote in turn else []}
            for number, turn in enumerate(turns, 1)
        ]
    }


def _summary(asked: str) -> dict[str, Any]:
    """What is new in this part of the conversation."""
    facts = ["The user is called Ada."] if "I am Ada" in asked else []
    pages = re.findall(r"user: Page (\d+)", asked)
    read = f"Ada has read her diary out, up to page {pages[-1]}." if pages else "Ada shops."
    none: list[str] = []
    empty = dict.fromkeys(("goals", "decisions", "open_questions", "tool_outcomes"), none)
    return {**empty, "facts": facts, "last_state": read, "outdated": none}
