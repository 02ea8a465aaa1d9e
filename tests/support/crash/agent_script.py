"""Scripted model of the killed agents; it also records the messages that requests contained.

A message such as `m17: look pay then look` calls two tools in the first step and one in the next.
The final answer names every message that it answers, so the log shows which message was answered
where, and whether twice.
"""

import json
import re
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final

from stenolog.agent.turn import INTERRUPTED_MARK
from stenolog.testing.scripted_model import ScriptedMessage, tool_call

WISHES: Final = (
    "talk",
    "look",
    "pay",
    "look pay",
    "pay pay look",
    "pay then look",
    "look then pay",
)
_TOOLS: Final = ("look", "pay")
_ASKED: Final = re.compile(r"^(m\d+): (.*)$", re.MULTILINE)
_ANSWERED: Final = re.compile(r"\bm\d+\b")


def named_in(text: str) -> list[str]:
    """Return the messages that an answer names."""
    return _ANSWERED.findall(text)


class Script:
    """Answers requests from any thread and records which messages they contained."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self.shown: set[str] = set()
        """Messages that the model has seen; all of them must be in the log."""
        self.idle: list[str] = []
        """Requests in which there was nothing to answer."""

    def __call__(self, request: Mapping[str, Any]) -> ScriptedMessage:
        """Answer a request."""
        messages: Sequence[Mapping[str, Any]] = request["messages"]
        if "response_format" in request:
            return _clerk(str(messages[-1]["content"]))
        waiting, made = _read(messages)
        with self._mutex:
            self.shown.update(name for name, _ in waiting)
            if not waiting:
                self.idle.append(json.dumps(messages[-4:]))
        calls = [call for name, wish in waiting for call in _next_calls(name, wish, made)]
        if calls:
            return {"tool_calls": calls}
        names = " ".join(name for name, _ in waiting)
        return f"This is to answer {names}, in a few pieces, of which each takes its time."


def _read(messages: Sequence[Mapping[str, Any]]) -> tuple[list[tuple[str, str]], set[str]]:
    """Return the unanswered messages with their steps, and the ids of the calls made so far."""
    waiting: dict[str, str] = {}
    made: set[str] = set()
    for message in messages:
        content = str(message.get("content") or "")
        if message["role"] == "user":
            waiting.update(_ASKED.findall(content))
        elif message["role"] == "assistant":
            made.update(call["id"] for call in message.get("tool_calls") or ())
            # Messages before an interruption mark are no longer pending.
            for name in list(waiting) if INTERRUPTED_MARK in content else named_in(content):
                waiting.pop(name, None)
    return list(waiting.items()), made


def _next_calls(name: str, wish: str, made: set[str]) -> list[dict[str, Any]]:
    """Return the calls of the first step that was not made yet."""
    for step, tools in enumerate(wish.split(" then ")):
        wanted = [(f"{name}.{step}.{n}", tool) for n, tool in enumerate(tools.split())]
        calls = [
            tool_call(tool, {"what": id}, id=id)
            for id, tool in wanted
            if tool in _TOOLS and id not in made
        ]
        if calls:
            return calls
    return []


def _clerk(asked: str) -> str:
    """Return a summary, or notes about turns."""
    turns = re.findall(r"^## Turn (\d+)", asked, re.MULTILINE)
    if turns:
        noted = [{"turn": int(n), "daily": f"They spoke, {n}.", "facts": []} for n in turns]
        return json.dumps({"turns": noted})
    sections = ("goals", "decisions", "facts", "open_questions", "tool_outcomes", "outdated")
    return json.dumps({**{name: [] for name in sections}, "last_state": "They go on talking."})
