"""Transcripts for the rows of `steno view`: copies of a sample with other ids and words."""

import random
import re
import uuid
from pathlib import Path
from typing import Final

SAMPLE: Final = Path(__file__).resolve().parent.parent / "tests/samples/transcripts/claude-code"
_WORDS: Final = re.compile(r"[a-z]{5,}")
_IDS: Final = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")


def make_transcripts(folder: Path, count: int) -> int:
    """Write transcripts of about 100 kB below a folder; return their size in bytes."""
    source = SAMPLE / "projects/-home-ada-harbour/20c7a18b-7d9d-457e-bc34-7dfb461f0515.jsonl"
    text = source.read_text(encoding="utf-8")
    chosen = random.Random(1)
    common = sorted(set(_WORDS.findall(text)))
    size = 0
    for number in range(count):
        ids = {found: str(uuid.UUID(int=chosen.getrandbits(128))) for found in _IDS.findall(text)}
        # Each transcript has some words of its own, as other conversations have.
        swaps = {word: f"{word}{chosen.randrange(5_000)}" for word in chosen.sample(common, 5)}
        made = text
        for found, other in ids.items():
            made = made.replace(found, other)
        made = made.replace("tide table", f"tide table {number}", 1)
        for word, other in swaps.items():
            made = made.replace(f" {word} ", f" {other} ")
        project = folder / f"-home-ada-project{number % 30}"
        project.mkdir(parents=True, exist_ok=True)
        session = ids["20c7a18b-7d9d-457e-bc34-7dfb461f0515"]
        data = made.encode()
        (project / f"{session}.jsonl").write_bytes(data)
        size += len(data)
    return size
