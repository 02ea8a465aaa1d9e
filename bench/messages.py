"""Sample messages that every row writes and reads, the same in every run.

The messages resemble those of an agent with tools. Each has about 500 bytes as JSON, and every
tenth message contains characters that are not ASCII.
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
    """Return `count` messages as dictionaries."""
    return list(islice(_conversation(random.Random(seed)), count))


def payload(message: dict[str, Any]) -> bytes:
    """Return the message as compact JSON, as a bare loop writes it."""
    return json.dumps(message, ensure_ascii=False, separators=(",", ":")).encode()


def _conversation(rng: random.Random) -> Iterator[dict[str, Any]]:
    call = 0
    while True:
        yield {"role": "user", "content": _text(rng, 350)}
        for _ in range(rng.randint(1, 3)):
            call += 1
            tool = rng.choice(_TOOLS)
            arguments = json.dumps(
                {"path": f"src/part_{call}/module.py", "query": _text(rng, 150)},
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
                "content": _text(rng, 520),
            }
        yield {"role": "assistant", "content": _text(rng, 500)}


def _text(rng: random.Random, mean: int) -> str:
    words = (_OTHER if rng.random() < 0.1 else _ENGLISH).split()
    length = rng.randint(mean // 2, mean * 3 // 2)
    chosen: list[str] = []
    size = 0
    while size < length:
        word = rng.choice(words)
        chosen.append(word)
        size += len(word) + 1
    return " ".join(chosen)
