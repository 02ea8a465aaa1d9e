"""Take the screenshots of README and docs: `steno view` with invented transcripts.

Needs the dev environment and Chromium: `.venv/bin/python scripts/screenshots.py [FOLDER]`.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from playwright.sync_api import Page, ViewportSize, sync_playwright

ROOT: Final = Path(__file__).resolve().parent.parent
MODELS: Final = ("claude-opus-4-5", "claude-sonnet-4-5-20250929")
NOW: Final = datetime.now(UTC).replace(second=0, microsecond=0)

OLD: Final = """\
def total(lines):
    amount = sum(line.price * line.count for line in lines)
    return round(amount * 1.19, 2)
"""
NEW: Final = """\
def total(lines):
    net = sum((line.price * line.count for line in lines), Decimal(0))
    return (net * VAT).quantize(CENT, rounding=ROUND_HALF_UP)
"""
FAILED: Final = """\
tests/test_invoice.py F..                                              [100%]
=================================== FAILURES ===================================
_____________________________ test_total_is_rounded ____________________________
>       assert total(lines) == Decimal("12.35")
E       AssertionError: assert Decimal('12.34') == Decimal('12.35')
========================= 1 failed, 2 passed in 0.21s ==========================
"""
ANSWER: Final = """\
The rounding bug is fixed. `round()` on floats rounded **12.345** down, because the closest float is
slightly smaller.

| case | before | after |
|---|---:|---:|
| 1 × 10.374 | 12.34 | 12.35 |
| 3 × 0.10 | 0.36 | 0.36 |

- `total()` now works with `Decimal` and rounds half up.
- Next: old invoices keep their stored amounts, so nothing has to be recalculated.
"""

HALF_CENT: Final = """\
from decimal import Decimal

from billing.invoice import Line, total


def test_half_a_cent_is_rounded_up():
    assert total([Line(Decimal("10.374"), 1)]) == Decimal("12.35")
"""

SHOWCASE: Final[tuple[tuple[str, Any], ...]] = (
    ("user", "A customer says that invoice 2041 is one cent too low. Can you find out why?"),
    ("thinking", "The total is probably rounded from a float. I will look for the function first."),
    ("say", "I will look at how the total is calculated."),
    (
        "call",
        (
            "Grep",
            {"pattern": "def total", "path": "src/billing"},
            "src/billing/invoice.py:41:def total(lines):",
        ),
    ),
    (
        "call",
        (
            "Bash",
            {"command": "pytest -q tests/test_invoice.py", "description": "Run the invoice tests"},
            FAILED,
            True,
        ),
    ),
    ("say", "The test fails for 12.345: this is float rounding."),
    (
        "call",
        (
            "TodoWrite",
            {
                "todos": [
                    {"content": "Reproduce the wrong total", "status": "completed"},
                    {"content": "Use Decimal in total()", "status": "in_progress"},
                    {"content": "Add a test for half a cent", "status": "pending"},
                ]
            },
            "Todos have been modified successfully.",
        ),
    ),
    (
        "call",
        (
            "Edit",
            {"file_path": "src/billing/invoice.py", "old_string": OLD, "new_string": NEW},
            "The file src/billing/invoice.py has been updated.",
        ),
    ),
    (
        "call",
        (
            "Bash",
            {"command": "pytest -q tests/test_invoice.py", "description": "Run the tests again"},
            "...                    [100%]\n3 passed in 0.18s",
        ),
    ),
    ("say", ANSWER),
    ("user", "Great. Please add a test for half a cent and commit it."),
    (
        "call",
        (
            "Write",
            {
                "file_path": "tests/test_half_cent.py",
                "content": HALF_CENT,
            },
            "File created successfully at: tests/test_half_cent.py",
        ),
    ),
    (
        "call",
        (
            "Bash",
            {"command": 'git commit -am "billing: round totals half up"', "description": "Commit"},
            "[main 3f2a91c] billing: round totals half up\n 2 files changed",
        ),
    ),
    ("say", "Done: `3f2a91c` on `main`, with a test for half a cent."),
)

OTHERS: Final = (
    ("harbour", "main", 1, "Add a tide table to the harbour page", "npm test", False),
    ("harbour", "main", 3, "Why does the map jump when the page loads?", "npm run build", True),
    ("harbour", "tides", 26, "Translate the opening hours into Danish", "npm test", False),
    (
        "billing",
        "main",
        5,
        "Export all invoices of October as CSV",
        "python export.py --month 10",
        False,
    ),
    ("billing", "dunning", 30, "Send reminders only on weekdays", "pytest -q", True),
    ("billing", "main", 50, "Upgrade to Python 3.13 and fix what breaks", "pytest -q", True),
    ("notes-app", "main", 7, "Search should ignore accents", "cargo test", False),
    (
        "notes-app",
        "sync",
        73,
        "Two devices lost an edit yesterday, please find the race",
        "cargo test sync",
        True,
    ),
    (
        "notes-app",
        "main",
        98,
        "Explain how the sync protocol resolves conflicts",
        "cargo doc",
        False,
    ),
    (
        "dotfiles",
        "main",
        120,
        "Make the prompt faster, it takes 200 ms",
        "time zsh -i -c exit",
        False,
    ),
)


class Transcript:
    """A transcript of Claude Code, written record by record."""

    def __init__(self, home: Path, project: str, branch: str, began: datetime, model: str) -> None:
        self.session = str(uuid.uuid4())
        folder = home / ".claude" / "projects" / f"-srv-{project}"
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"{self.session}.jsonl"
        self._common = {
            "isSidechain": False,
            "userType": "external",
            "cwd": f"/srv/{project}",
            "sessionId": self.session,
            "version": "2.1.325",
            "gitBranch": branch,
        }
        self._at = began
        self._model = model
        self._parent: str | None = None
        self._lines: list[str] = []

    def user(self, content: Any, seconds: float = 20, **fields: Any) -> None:
        """Add a prompt or a tool result."""
        self._add("user", {"role": "user", "content": content}, seconds, **fields)

    def assistant(self, block: dict[str, Any], seconds: float = 4) -> None:
        """Add one content block of an answer, as its own response."""
        message = {
            "id": f"msg_{uuid.uuid4().hex[:20]}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [block],
            "usage": {
                "input_tokens": 900,
                "output_tokens": 220,
                "cache_read_input_tokens": 18_400,
                "cache_creation_input_tokens": 1_200,
            },
        }
        self._add("assistant", message, seconds, requestId=f"req_{uuid.uuid4().hex[:20]}")

    def call(self, name: str, arguments: dict[str, Any], result: str, failed: bool = False) -> None:
        """Add a tool call and its result."""
        identity = f"toolu_{uuid.uuid4().hex[:20]}"
        self.assistant({"type": "tool_use", "id": identity, "name": name, "input": arguments})
        block = {"type": "tool_result", "tool_use_id": identity, "content": result}
        self.user([{**block, "is_error": failed}], seconds=2)

    def save(self) -> None:
        """Write the file, with the time of its last record."""
        self._path.write_text("".join(self._lines), encoding="utf-8")
        os.utime(self._path, (self._at.timestamp(), self._at.timestamp()))

    def _add(self, kind: str, message: dict[str, Any], seconds: float, **fields: Any) -> None:
        self._at += timedelta(seconds=seconds)
        identity = str(uuid.uuid4())
        record = {
            "parentUuid": self._parent,
            **self._common,
            "type": kind,
            "message": message,
            "uuid": identity,
            "timestamp": self._at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            **fields,
        }
        self._lines.append(json.dumps(record) + "\n")
        self._parent = identity


def write_transcripts(home: Path) -> str:
    """Write the transcripts and return the id of the session to show."""
    for number, (project, branch, hours, prompt, command, failed) in enumerate(OTHERS):
        began = NOW - timedelta(hours=hours, minutes=7 * number)
        session = Transcript(home, project, branch, began, MODELS[number % 2])
        session.user(prompt)
        for step in range(3 + number % 4):
            output = "error: 1 test failed" if failed and step == 0 else "ok"
            session.call("Bash", {"command": command}, output, failed and step == 0)
        session.assistant({"type": "text", "text": "Done. The change is small and has a test."})
        session.save()
    shown = Transcript(home, "billing", "main", NOW - timedelta(minutes=12), MODELS[0])
    for kind, value in SHOWCASE:
        match kind:
            case "user":
                shown.user(value)
            case "say":
                shown.assistant({"type": "text", "text": value})
            case "thinking":
                shown.assistant({"type": "thinking", "thinking": value, "signature": "c2ln"})
            case "call":
                shown.call(*value)
    shown.save()
    return shown.session


@contextmanager
def running(home: Path, address: str, *command: str) -> Iterator[str]:
    """Run steno with this home folder, and yield the first output that matches `address`."""
    process = subprocess.Popen(
        [sys.executable, "-m", "stenolog", *command],
        cwd=home,
        env=environment(home),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if link := re.search(address, line):
                yield link[0]
                break
        else:
            raise SystemExit(f"steno {' '.join(command)} printed no link")
    finally:
        process.terminate()
        process.wait()


def run(home: Path, *command: str) -> str:
    """Run a command of steno and return its output."""
    return subprocess.run(
        [sys.executable, "-m", "stenolog", *command],
        cwd=home,
        env=environment(home),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout


def environment(home: Path) -> dict[str, str]:
    """Return environment variables that hide the settings and transcripts of this machine."""
    foreign = ("XDG_", "CLAUDE_", "CODEX_", "STENO")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(foreign)}
    return {**kept, "HOME": str(home)}


def take(page: Page, session: str, folder: Path) -> None:
    """Take the four pictures."""
    page.wait_for_selector("[data-row]")
    time.sleep(2)  # wait for the index
    page.screenshot(path=folder / "view-list.png")
    page.fill("#search", "cent")
    page.keyboard.press("Enter")
    page.wait_for_selector("mark")
    page.screenshot(path=folder / "view-search.png")
    page.click(f'a.title[href*="{session}"]')
    page.wait_for_selector("article.message")
    time.sleep(1)
    for details in page.query_selector_all("details.tool"):
        details.evaluate("one => one.open = true")
    page.evaluate("document.querySelector('.block.diff').scrollIntoView()")
    page.mouse.wheel(0, -420)
    time.sleep(1)
    page.screenshot(path=folder / "view-conversation.png")
    with page.expect_download() as download:
        page.click("details.export summary")
        page.click('a[href*="export.html"]')
    exported = folder / "export.html"
    download.value.save_as(exported)
    page.goto(exported.as_uri())
    page.screenshot(path=folder / "view-export.png")
    exported.unlink()


def take_inspector(page: Page, session: str, folder: Path) -> None:
    """Take the pictures of the pages Turns and Context."""
    page.wait_for_selector("[data-row]")
    page.click(f'a.title[href*="{session}"]')
    for tab in ("Turns", "Context"):
        page.click(f"nav.tabs >> text={tab}")
        page.wait_for_load_state("networkidle")
        page.screenshot(path=folder / f"viewer-{tab.lower()}.png")


def main() -> None:
    """Take the screenshots."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "images"
    home = Path(tempfile.mkdtemp(prefix="steno-screenshots-"))
    try:
        session = write_transcripts(home)
        with sync_playwright() as playwright:
            chromium = playwright.chromium.launch(
                executable_path=shutil.which("chromium"), args=["--no-sandbox"]
            )
            size: ViewportSize = {"width": 1440, "height": 900}
            with running(home, r"http://\S+/login\?code=\S+", "view", "--no-open") as link:
                page = chromium.new_page(viewport=size)
                page.goto(link)
                take(page, session, folder)
            run(home, "import", "claude-code")
            serve = ("serve", "--model=scripted", "--port=0")
            with running(home, r"http://[\d.:]+", *serve) as address:
                page = chromium.new_page(viewport=size)
                page.goto(
                    run(home, "open", "--no-open", "--port", address.rpartition(":")[2]).strip()
                )
                take_inspector(page, session, folder)
            chromium.close()
    finally:
        shutil.rmtree(home)


if __name__ == "__main__":
    main()
