"""Rows about `steno view` and `steno import` with 3,000 transcripts of about 100 kB.

The transcripts are copies of a sample with other ids and words.
"""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter, sleep
from typing import Final
from urllib.parse import urlsplit

import httpx2
import msgspec

from measure import Context, Measurement, environment, percentiles, time_calls

SAMPLE: Final = Path(__file__).resolve().parent.parent / "tests/samples/transcripts/claude-code"
_WORDS: Final = re.compile(r"[a-z]{5,}")
_IDS: Final = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")


def make_transcripts(folder: Path, count: int) -> int:
    """Write transcripts of about 100 kB below a folder; return their size in bytes."""
    source = SAMPLE / "projects/-home-ada-harbour/20c7a18b-7d9d-457e-bc34-7dfb461f0515.jsonl"
    text = source.read_text(encoding="utf-8")
    random_ = random.Random(1)
    words = sorted(set(_WORDS.findall(text)))
    size = 0
    for number in range(count):
        ids = {old: str(uuid.UUID(int=random_.getrandbits(128))) for old in _IDS.findall(text)}
        # Five words of each transcript are different.
        new_words = {word: f"{word}{random_.randrange(5_000)}" for word in random_.sample(words, 5)}
        transcript = text
        for old, new in ids.items():
            transcript = transcript.replace(old, new)
        transcript = transcript.replace("tide table", f"tide table {number}", 1)
        for old, new in new_words.items():
            transcript = transcript.replace(f" {old} ", f" {new} ")
        project = folder / f"-home-ada-project{number % 30}"
        project.mkdir(parents=True, exist_ok=True)
        session = ids["20c7a18b-7d9d-457e-bc34-7dfb461f0515"]
        data = transcript.encode()
        (project / f"{session}.jsonl").write_bytes(data)
        size += len(data)
    return size


def first_list(context: Context, *, indexed: bool) -> Measurement:
    """Measure the time from the start of `steno view` to its first page."""
    folder = _transcripts(context)
    if indexed:
        with _viewer(context) as (client, _):
            _wait_for_index(client)
    seconds = []
    for _ in range(context.times(5)):
        if not indexed:
            shutil.rmtree(_home(context), ignore_errors=True)
        begin = perf_counter()
        with _viewer(context) as (client, _):
            client.get("/").raise_for_status()
            seconds.append(perf_counter() - begin)
    ours = percentiles(seconds)
    raw = percentiles(time_calls(len(seconds), lambda: _stat_all(folder)))
    return Measurement(measured=ours["p50_us"] / 1000, ours=ours, raw=raw)


def complete_index(context: Context) -> Measurement:
    """Measure the time from the first start of `steno view` until everything is indexed."""
    folder = _transcripts(context)
    shutil.rmtree(_home(context), ignore_errors=True)
    begin = perf_counter()
    with _viewer(context) as (client, _):
        _wait_for_index(client)
        ours = percentiles([perf_counter() - begin])
    raw = percentiles(time_calls(1, lambda: _decode_all(folder)))
    return Measurement(measured=ours["p50_us"] / 1000, ours=ours, raw=raw)


def search_transcripts(context: Context) -> Measurement:
    """Measure searches over HTTP, with everything indexed; the slowest query counts."""
    _transcripts(context)
    with _viewer(context) as (client, _):
        _wait_for_index(client)

        def search(query: str) -> None:
            client.get("/v1/search", params={"q": query}).raise_for_status()

        times = context.times(20)
        sides = {
            query: percentiles(time_calls(times, lambda: search(query)))  # noqa: B023 - called at once
            for query in ("tide table", "harbour", "page -tide")
        }
        raw = percentiles(time_calls(times, lambda: client.get("/healthz")))
    ours = max(sides.values(), key=lambda stats: stats["p50_us"])
    others = {query: stats["p50_us"] / 1000 for query, stats in sides.items()}
    return Measurement(measured=ours["p50_us"] / 1000, ours=ours, raw=raw, others=others)


def import_transcripts(context: Context) -> Measurement:
    """Measure `steno import` of all transcripts into a new workspace, in MB per second."""
    folder = _transcripts(context)
    size = sum(file.stat().st_size for file in folder.rglob("*.jsonl")) / 1e6
    workspace = context.folder / "imported"
    shutil.rmtree(workspace, ignore_errors=True)
    command = [sys.executable, "-m", "stenolog", "import", "--from", "claude-code", str(folder)]
    begin = perf_counter()
    subprocess.run([*command, "-w", str(workspace)], check=True, stdout=subprocess.DEVNULL)
    seconds = perf_counter() - begin
    raw = time_calls(1, lambda: _decode_and_write_all(folder, context.folder / "written"))
    return Measurement(measured=size / seconds, ours=percentiles([seconds]), raw=percentiles(raw))


def _transcripts(context: Context) -> Path:
    folder = context.folder / "transcripts"
    if not folder.exists():
        make_transcripts(folder, context.times(3_000))
    return folder


def _home(context: Context) -> Path:
    return context.folder / "view-home"


@contextmanager
def _viewer(context: Context) -> Iterator[tuple[httpx2.Client, str]]:
    """Start `steno view` and yield a client for it, and its address."""
    home = _home(context)
    home.mkdir(exist_ok=True)
    folder = str(context.folder / "transcripts")
    with subprocess.Popen(
        [sys.executable, "-m", "stenolog", "view", "--no-open", "--port", "0", folder],
        env={**environment(), "HOME": str(home)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            link = urlsplit(process.stdout.readline().split()[-1])
            address = f"{link.scheme}://{link.netloc}"
            token = (home / ".config/stenolog/gateway.token").read_text().strip()
            headers = {"Authorization": f"Bearer {token}"}
            with httpx2.Client(base_url=address, headers=headers, timeout=120) as client:
                yield client, address
        finally:
            process.send_signal(signal.SIGINT)


def _wait_for_index(client: httpx2.Client) -> None:
    # Before the first list, the viewer does not know yet that sessions are not indexed.
    client.get("/").raise_for_status()
    while client.get("/indexing").json() is not None:
        sleep(0.1)


def _stat_all(folder: Path) -> None:
    for file in folder.rglob("*.jsonl"):
        file.stat()


def _decode_all(folder: Path) -> None:
    decode = msgspec.json.Decoder().decode
    for file in folder.rglob("*.jsonl"):
        for line in file.read_bytes().splitlines():
            decode(line)


def _decode_and_write_all(folder: Path, target: Path) -> None:
    """Decode every line, encode it again and write one synced file for each transcript."""
    target.mkdir(exist_ok=True)
    decode, encode = msgspec.json.Decoder().decode, msgspec.json.Encoder().encode
    for file in folder.rglob("*.jsonl"):
        lines = [encode(decode(line)) for line in file.read_bytes().splitlines()]
        with (target / file.name).open("wb") as output:
            output.write(b"\n".join(lines))
            output.flush()
            os.fsync(output.fileno())
