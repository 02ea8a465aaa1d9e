"""`python bench/transcripts.py` measures `steno view` on 3,000 transcripts of about 100 kB.

They are copies of a sample with other ids and words.
"""

import os
import random
import re
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter, sleep
from typing import Final

import httpx2

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


def main() -> None:
    """Print the seconds of `steno view` on 3,000 transcripts: first and second start, searches.

    Not a row of the table: the figures are those of one run.
    """
    with TemporaryDirectory(prefix="bench-view-") as folder:
        place, home = Path(folder, "projects"), Path(folder, "home")
        home.mkdir()
        print(f"{make_transcripts(place, 3_000) / 1e6:.0f} MB")
        for start in ("first", "second"):
            _measure(start, place, home)


def _measure(start: str, place: Path, home: Path) -> None:
    begun = perf_counter()
    command = [sys.executable, "-m", "stenolog", "view", "--no-open", "--port", "0", str(place)]
    with subprocess.Popen(
        command,
        env={**os.environ, "HOME": str(home)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        url = process.stdout.readline().split()[-1]
        listening = perf_counter()
        token = (home / ".config/stenolog/gateway.token").read_text().strip()
        headers = {"Authorization": f"Bearer {token}"}
        with httpx2.Client(base_url=url, headers=headers, timeout=120) as client:
            client.get("/").raise_for_status()
            listed = perf_counter()
            print(
                f"{start} start: listening after {listening - begun:.2f} s, "
                f"list after {listed - begun:.2f} s ({listed - listening:.2f} s since listening)"
            )
            while client.get("/indexing").json() is not None:
                sleep(0.2)
            print(f"{start} start: complete after {perf_counter() - begun:.1f} s")
            for words in ("tide table", "harbour", "page -tide"):
                asked = perf_counter()
                client.get("/v1/search", params={"q": words}).raise_for_status()
                print(f"{start} start: search {words!r} {(perf_counter() - asked) * 1e3:.0f} ms")
        process.send_signal(signal.SIGINT)


if __name__ == "__main__":
    main()
