"""The messages that every row writes and reads, the same in every run.

The traffic of an agent that uses tools: about 500 bytes each as JSON, one in ten not ASCII.
"""

import json
import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

_ENGLISH = (
    "the build failed because the second test waits for a port that nobody opened so the fix is "
    "to ask for port zero and to read it back from the socket before the client starts"
)
_OTHER = (
    "Die Prüfung schlägt fehl, weil der Größe nach sortiert wird; я проверил файл и нашёл ошибку "
    "在第三行缺少一个参数 все остальные тесты проходят 😀 señal añadida"
)
_TOOLS = ("read_file", "run_command", "search_text", "list_folder")


def sample(count: int, seed: int = 1) -> list[dict[str, Any]]:
    """So many messages, as the caller of a store holds them."""
    return list(islice(_talk(random.Random(seed)), count))


def payload(message: dict[str, Any]) -> bytes:
    """The message as compact JSON: what a bare loop writes in our place."""
    return json.dumps(message, ensure_ascii=False, separators=(",", ":")).encode()


def _talk(chance: random.Random) -> Iterator[dict[str, Any]]:
    call = 0
    while True:
        yield {"role": "user", "content": _text(chance, 350)}
        for _ in range(chance.randint(1, 3)):
            call += 1
            tool = chance.choice(_TOOLS)
            arguments = json.dumps(
                {"path": f"src/part_{call}/module.py", "query": _text(chance, 150)},
                ensure_ascii=False,
            )
            yield {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {
                        "id": f"call_{call:08x}",
                        "type": "function",
                        "function": {"name": tool, "arguments": arguments},
                    }
                ],
            }
            yield {
                "role": "tool",
                "tool_call_id": f"call_{call:08x}",
                "name": tool,
                "content": _text(chance, 520),
            }
        yield {"role": "assistant", "content": _text(chance, 500)}


def _text(chance: random.Random, mean: int) -> str:
    words = (_OTHER if chance.random() < 0.1 else _ENGLISH).split()
    wanted = chance.randint(mean // 2, mean * 3 // 2)
    found: list[str] = []
    length = 0
    while length < wanted:
        word = chance.choice(words)
        found.append(word)
        length += len(word) + 1
    return " ".join(found)
