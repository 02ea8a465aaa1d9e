"""Three hundred turns of small talk and work with fifty facts mentioned in passing, from a seed."""

import json
import random
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

TURNS: Final = 300
SEED: Final = 4_711
FACTS: Final = Path(__file__).with_name("facts.toml")

_WISHES: Final = (
    "Can you explain how {topic} works?",
    "What would you look at first with {topic}?",
    "Is there a simple way to start with {topic}?",
    "Could you compare two ways of doing {topic}?",
    "Write three sentences on {topic}, please?",
    "Why do people argue so much about {topic}?",
    "How long does {topic} take as a rule?",
    "What goes wrong most often with {topic}?",
)
_TOPICS: Final = (
    "pruning apple trees", "reading a balance sheet", "caching web pages", "baking rye bread",
    "packing for a week in the mountains", "planning a small conference", "tuning a bicycle",
    "naming variables", "writing a cover letter", "painting a window frame", "sorting photographs",
    "measuring latency", "growing tomatoes", "choosing a font", "splitting a long function",
    "repairing a zip", "comparing insurance offers", "making a timetable", "folding paper cranes",
    "mixing concrete", "logging in a distributed system", "teaching fractions", "drying herbs",
    "explaining tides", "estimating a project", "cleaning a paint brush", "reviewing code",
    "insulating a roof", "playing chess openings", "recording a podcast",
)  # fmt: skip
_ASIDES: Final = (
    "It has been raining all day.", "The train was late again.", "That was a good hint yesterday.",
    "The coffee machine at the office broke.", "The news are hard to read today.",
    "The neighbours are drilling again.", "The last answer was a bit long.",
    "The weekend went by too fast.", "The street is full of leaves.", "The phone rang twice.",
)  # fmt: skip
_REPLIES: Final = (
    "Start small and look at the result first. Most trouble with {topic} comes from haste.",
    "There are two schools. One plans everything, the other learns by doing; for {topic} do both.",
    "Begin with the part that worries you most. With {topic}, that is where the surprises are.",
    "Three things matter with {topic}: patience, a good light, and notes on what was tried.",
    "It depends on how often it is done. For {topic} once a year, the simple way will do.",
)
_SEARCH: Final = {"name": "web_search"}


class Fact(NamedTuple):
    """A fact, and the question for it."""

    said: str
    about: str
    question: str
    answer: str
    plain: bool


class Turn(NamedTuple):
    """The messages of a turn, and the fact in it, if any."""

    messages: list[dict[str, Any]]
    fact: Fact | None


def facts() -> list[Fact]:
    """Return the fifty facts in the order of the file."""
    return [Fact(**row) for row in tomllib.loads(FACTS.read_text())["facts"]]


def turns(count: int = TURNS, *, seed: int = SEED) -> Iterator[Turn]:
    """Yield the conversation, the same for the same seed; the first nine tenths have all facts."""
    chance = random.Random(seed)
    told = facts()
    chance.shuffle(told)
    places = sorted(chance.sample(range(count * 9 // 10), min(len(told), count * 9 // 10)))
    at = dict(zip(places, told, strict=False))
    for number in range(count):
        yield Turn(_messages(number, at.get(number), chance), at.get(number))


def _messages(number: int, fact: Fact | None, chance: random.Random) -> list[dict[str, Any]]:
    topic = chance.choice(_TOPICS)
    parts = [chance.choice(_WISHES).format(topic=topic)]
    if fact is not None:
        parts.insert(chance.randrange(2), fact.said)
    elif chance.random() < 0.3:
        parts.append(chance.choice(_ASIDES))
    said: list[dict[str, Any]] = [{"role": "user", "content": " ".join(parts)}]
    if chance.random() < 0.2:
        said += _looked_up(f"call_{number}", topic, chance)
    said.append({"role": "assistant", "content": chance.choice(_REPLIES).format(topic=topic)})
    return said


def _looked_up(call: str, topic: str, chance: random.Random) -> list[dict[str, Any]]:
    asked = {**_SEARCH, "arguments": json.dumps({"query": topic})}
    found = [
        {"title": f"On {topic}, part {part}", "score": round(chance.random(), 3)}
        for part in range(chance.randrange(3, 25))
    ]
    return [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": call, "type": "function", "function": asked}],
        },
        {"role": "tool", "tool_call_id": call, "content": json.dumps(found)},
    ]
