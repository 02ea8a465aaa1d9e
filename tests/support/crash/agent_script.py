"""The model of the killed agents: what users ask it, what it does about that, and what it saw.

A message is `m17: look pay then look`: in one step both tools are called, in the next the other
one. When all of it is done, the answer names every message that it answers. So a log shows by
itself which message was answered where, and whether twice.
"""

import json
import re
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final

from stenolog.agent.turn import INTERRUPTED
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
    """The messages that an answer says to answer."""
    return _ANSWERED.findall(text)


class Script:
    """Answers requests, from any thread, and remembers what they showed."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self.shown: set[str] = set()
        """The messages that the model has seen: whatever it has seen must be in the log."""
        self.idle: list[str] = []
        """The windows in which there was nothing to answer."""

    def __call__(self, request: Mapping[str, Any]) -> ScriptedMessage:
        """What is said to this request."""
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
    """The messages that are not answered yet, with their wishes; and the calls that were made."""
    waiting: dict[str, str] = {}
    made: set[str] = set()
    for message in messages:
        content = str(message.get("content") or "")
        if message["role"] == "user":
            waiting.update(_ASKED.findall(content))
        elif message["role"] == "assistant":
            made.update(call["id"] for call in message.get("tool_calls") or ())
            # What was closed with a mark is no longer waited for.
            for name in list(waiting) if INTERRUPTED in content else named_in(content):
                waiting.pop(name, None)
    return list(waiting.items()), made


def _next_calls(name: str, wish: str, made: set[str]) -> list[dict[str, Any]]:
    """The calls of the first step that was not made yet."""
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
    """A summary, or notes of turns."""
    turns = re.findall(r"^## Turn (\d+)", asked, re.MULTILINE)
    if turns:
        noted = [{"turn": int(n), "daily": f"They spoke, {n}.", "facts": []} for n in turns]
        return json.dumps({"turns": noted})
    sections = ("goals", "decisions", "facts", "open_questions", "tool_outcomes", "outdated")
    return json.dumps({**{name: [] for name in sections}, "last_state": "They go on talking."})
