"""axe-core, which finds accessibility problems of a page; npm installs it for the tests."""

import fcntl
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any, Final

from playwright.sync_api import Page

from support import needs

_FOLDER: Final = Path(__file__).parents[1] / "browser"
_SCRIPT: Final = _FOLDER / "node_modules" / "axe-core" / "axe.min.js"

_RUN: Final = """async () => {
  const found = await axe.run(document, {
    runOnly: ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"],
    resultTypes: ["violations"],
  });
  return found.violations
    .filter((one) => one.impact === "serious" || one.impact === "critical")
    .map(({ id, nodes }) => [id, nodes.map((one) => `${one.target}: ${one.any[0]?.message}`)]);
}"""


def serious_problems(page: Page) -> list[Any]:
    """Return the serious and critical problems of the page in its current state."""
    # The debugger runs it, so the page's content security policy does not apply.
    page.evaluate(_source())
    found: list[Any] = page.evaluate(_RUN)
    return found


@cache
def _source() -> str:
    needs.tool("npm")
    # Two test processes must not install at the same time.
    with (_FOLDER / "package.json").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _SCRIPT.exists():
            _install()
    return _SCRIPT.read_text()


def _install() -> None:
    npm = shutil.which("npm") or "npm"
    command = [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
    done = subprocess.run(command, cwd=_FOLDER, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        needs.lacking(f"npm could not install axe-core: {done.stderr.strip()[-200:]}")
