"""Transcripts of other programs in the tests: their samples, and an outline of what was read."""

from pathlib import Path

from stenolog.transfer.transcripts.transcript import Transcript

SAMPLES = Path(__file__).parents[1] / "samples" / "transcripts"


def outline(transcript: Transcript) -> list[str]:
    """Return a line per message: visible or hidden, role, kind, text, tools, tokens, failure."""
    lines = []
    for one in transcript.messages:
        body, notes = one.message, one.message["stenolog"]
        content = body.get("content")
        text = content if isinstance(content, str) else " ".join(p["type"] for p in content or [])
        words = [
            "-" if one.hidden else "+",
            body["role"],
            notes.get("kind", ""),
            " ".join(text.split())[:28],
            "thinking" if body.get("reasoning_content") else "",
            *(f"{call['function']['name']}()" for call in body.get("tool_calls", ())),
            f"[{notes['usage']['answer']}]" if "usage" in notes else "",
            "failed" if notes.get("failed") else "",
        ]
        lines.append(" ".join(" ".join(words).split()))
    return lines
