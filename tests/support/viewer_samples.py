"""Sessions for tests in a browser: typical ones, and hostile ones."""

import struct
import zlib
from base64 import b64encode
from pathlib import Path
from typing import Any, Final

from stenolog.stores.base import Store
from stenolog.stores.open_store import open_store

PLAN: Final = "telegram:ada"
"""A session with tools, thinking, a table and code."""
WAITING: Final = "matrix:!room:linus"
"""A session in which another process runs a turn."""
LONG: Final = "cli:default"
"""A summarized session."""


def _picture(width: int = 240, height: int = 96) -> str:
    """Return a picture as a PNG data URL."""

    def part(kind: bytes, inside: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + inside))
        return struct.pack(">I", len(inside)) + kind + inside + check

    rows = b"".join(
        b"\0"
        + bytes((90 + y, 140 + y // 2, 200 - x // 4)[c] for x in range(width) for c in range(3))
        for y in range(height)
    )
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    png = part(b"IHDR", head) + part(b"IDAT", zlib.compress(rows)) + part(b"IEND", b"")
    return "data:image/png;base64," + b64encode(b"\x89PNG\r\n\x1a\n" + png).decode()


PICTURE: Final = _picture()

HOSTILE: Final = (
    "<script>window.hurt=1</script><img src=x onerror=window.hurt=2>"
    "\"'><svg onload=window.hurt=3>[x](javascript:window.hurt=4)"
)
"""A text that runs a script wherever it is treated as HTML."""

_ANSWER: Final = """\
Three trains fit. The **07:32** is the best of them:

| train | from Basel | in Lugano | changes |
|-------|-----------|-----------|---------|
| EC 151 | 07:32 | 10:41 | none |
| IC 773 | 08:03 | 11:30 | Arth-Goldau |
| IR 2319 | 08:33 | 12:30 | Luzern |

I put it into your calendar with this:

```python
event = calendar.add(
    title="Train to Lugano",
    begins=datetime(2026, 3, 14, 7, 32),  # platform 9
    remind=timedelta(minutes=45),
)
```

Shall I book a seat, too? _The quiet car still has some._
"""


def fill(where: Path) -> None:
    """Store the sample sessions."""
    with open_store(str(where)) as store:
        _small(store)
        _compacted(store)
        _plan(store)


def hostile(where: Path) -> str:
    """Store a session with hostile text in every field; return its key."""
    key = f"h:{HOSTILE}"
    call = {"name": HOSTILE, "arguments": f'{{"a": "{HOSTILE[:20]}"}}'}
    mark: dict[str, Any] = {
        "model": HOSTILE,
        "seconds": 0.5,
        "interrupted": HOSTILE,
        "usage": {"prompt": 5, "answer": 6, "cached": 0},
        "origin": {"channel": HOSTILE},
    }
    picture = {"type": "image_url", "image_url": {"url": f"https://evil.example/{HOSTILE}"}}
    bodies: list[dict[str, Any]] = [
        {"role": "user", "content": HOSTILE, "stenolog": mark},
        {"role": HOSTILE, "content": HOSTILE},
        {"role": "user", "content": [picture, {"type": "text", "text": HOSTILE}]},
        {
            "role": "user",
            "content": f"![{HOSTILE}](https://evil.example/x.png)\n\n~~~{HOSTILE}\nx\n~~~",
        },
        {
            "role": "assistant",
            "content": f"```{HOSTILE}\n{HOSTILE}\n```\n[a](data:text/html,<script>1</script>)",
            "reasoning_content": HOSTILE,
            "tool_calls": [{"id": "1", "type": "function", "function": call}],
            "stenolog": mark,
        },
        {"role": "tool", "tool_call_id": "1", "content": HOSTILE, "stenolog": {"failed": True}},
        {"role": "assistant", "content": f"<style>body{{display:none}}</style> words {HOSTILE}"},
    ]
    with open_store(str(where)) as store:
        store.add_messages(key, bodies)
        store.set_meta(key, title=HOSTILE, tags=[HOSTILE, "</span>"])
        store.checkpoint(key, summary=HOSTILE, upto=1)
    return key


def _small(store: Store) -> None:
    titles = {
        "cli:default:20260301-081500-1c2f": "How do I undo the last commit but keep my changes?",
        "slack:C42:grace": "Summarise the incident of last night for the team",
        "api:anonymous:notes": "Translate the release notes into German",
        "telegram:alan": "Which of the two offers is better for a small office?",
        "cli:default:20260305-190012-77aa": "Draft a polite reminder to the landlord",
        WAITING: "Why does the build fail on arm64 only?",
    }
    for number, (key, prompt) in enumerate(titles.items()):
        for turn in range(1 + number % 3):
            asked = prompt if not turn else f"And what about part {turn}?"
            store.add_message(key, "user", asked)
            if key != WAITING:
                store.add_message(key, "assistant", f"Here is what I found, {turn + 1}. " * 12)
    store.set_meta("slack:C42:grace", tags=["incident", "team"], title="Incident of 3 March")
    store.set_meta("telegram:alan", tags=["office"])


def _compacted(store: Store) -> None:
    for number in range(1, 21):
        store.add_message(LONG, "user", f"Question {number}: where is the owl kept?")
        store.add_message(LONG, "assistant", f"Answer {number}: the owl is in box {number}.")
    summary = "The user asks where owls are kept.\n\n- Box 1 to 13: **small owls**\n- all are well"
    store.checkpoint(LONG, summary=summary, upto=26)


def _plan(store: Store) -> None:
    def call(id: str, name: str, arguments: str) -> dict[str, Any]:
        return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}

    def made(prompt: int, answer: int, seconds: float) -> dict[str, Any]:
        usage = {"prompt": prompt, "answer": answer, "cached": 0}
        return {"model": "qwen3-4b", "seconds": seconds, "usage": usage}

    store.add_messages(
        PLAN,
        [
            {"role": "user", "content": "Good morning! I am vegetarian, by the way."},
            {
                "role": "assistant",
                "content": "Good morning, Ada. I will remember that you are **vegetarian**.",
                "stenolog": made(612, 18, 0.8),
            },
            {
                "role": "user",
                "content": "I have to be in Lugano by noon on Saturday. Which train, from Basel?",
                "stenolog": {"origin": {"channel": "telegram"}},
            },
            {
                "role": "assistant",
                "content": "Let me look that up.",
                "reasoning_content": "Noon on Saturday is the 14th. There should be a direct EC.",
                "tool_calls": [
                    call("a", "timetable", '{"from": "Basel SBB", "to": "Lugano", "by": "12:00"}'),
                    call("b", "calendar", '{"day": "2026-03-14"}'),
                ],
                "stenolog": made(655, 74, 1.9),
            },
            {
                "role": "tool",
                "tool_call_id": "a",
                "content": '{"trains": [{"id": "EC 151", "at": "07:32", "changes": 0}]}',
                "stenolog": {"seconds": 0.412},
            },
            {
                "role": "tool",
                "tool_call_id": "b",
                "content": "the calendar did not answer",
                "stenolog": {"seconds": 5.003, "failed": True},
            },
            {"role": "assistant", "content": _ANSWER, "stenolog": made(871, 240, 4.2)},
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "Yes please. Is this the platform?"},
                    {"type": "image_url", "image_url": {"url": PICTURE}},
                ],
            },
            {
                "role": "assistant",
                "content": "Yes, platform 9. The seat is booked: coach 5, seat 42.",
                "stenolog": made(1130, 22, 1.1),
            },
        ],
    )
    store.set_meta(PLAN, tags=["travel"])
