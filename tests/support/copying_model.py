"""Scripted model that copies sentences from its prompt."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from stenolog.catalog.tokenizer import STOP_WORDS

_TURN: Final = re.compile(r"^## Turn (\d+), ", re.MULTILINE)
_USER: Final = re.compile(r"^(?:\[\d+\] )?user:\s+(.*)$", re.MULTILINE)
_SENTENCE: Final = re.compile(r"[^.!?]*(?:[.!?](?!\s)[^.!?]*)*[.!?]")
_WORD: Final = re.compile(r"[A-Za-z-]{3,}")


def copying(
    messages: Sequence[Mapping[str, Any]],
    *,
    schema: Mapping[str, Any] | None = None,
    max_tokens: int | None = None,
) -> str:
    """Answer a request for notes or a summary with sentences of the prompt."""
    del max_tokens
    asked = messages[-1]["content"]
    wanted = (schema or {}).get("properties", {})
    return json.dumps(_turns(asked) if "turns" in wanted else _summary(asked))


def statements(text: str) -> list[str]:
    """Return the user's sentences that are not questions."""
    said = [found[0].strip() for line in _USER.findall(text) for found in _SENTENCE.finditer(line)]
    return [sentence for sentence in said if not sentence.endswith("?")]


def _turns(asked: str) -> dict[str, Any]:
    _, *parts = _TURN.split(asked)
    return {
        "turns": [
            {
                "turn": int(number),
                "daily": _USER.findall(text)[0][:200],
                "facts": [_fact(sentence) for sentence in statements(text)],
            }
            for number, text in zip(parts[::2], parts[1::2], strict=True)
        ]
    }


def _fact(sentence: str) -> dict[str, Any]:
    words = [word for word in _WORD.findall(sentence) if word.lower() not in STOP_WORDS]
    longest = sorted(words, key=len, reverse=True)[:2]
    return {"text": sentence, "quote": sentence, "about": " ".join(longest)}


def _summary(asked: str) -> dict[str, Any]:
    part = asked.partition("Next part of the conversation:\n")[2]
    last = part.rstrip().rpartition("\n")[2].partition(": ")[2]
    return {
        "goals": [],
        "decisions": [],
        "facts": statements(part),
        "open_questions": [],
        "tool_outcomes": [],
        "last_state": last[:200],
        "outdated": [],
    }
