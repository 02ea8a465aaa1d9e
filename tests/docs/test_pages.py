"""Runs the examples of README.md and docs/ as a reader would, each page in an empty folder.

The `python` blocks of a page are one program. Then its blocks marked `sh console-test` are run in
the same folder, in order: a line that starts with `$ ` is a command that must succeed, the lines up
to the next one are its output, and `...` there matches any text.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

import reference
from stenolog.cli import main
from stenolog.maintenance.log_damage import Kind

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    path.relative_to(ROOT)
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if path.exists() and path not in {reference.FOLDER / name for name in reference.PAGES}
]
FENCE = re.compile(r"( *)```(.*)")

_NOT_NAMED = "ignore:Binding:DeprecationWarning"
"""Python 3.12.0 to 3.12.3 wrongly treats `?1` as a named parameter."""


def _blocks(page: Path, wanted: str) -> list[str]:
    """Return the lines of the page, with all lines outside the wanted blocks blank."""
    lines = []
    inside: str | None = None
    indent = ""
    for line in (ROOT / page).read_text().splitlines():
        fence = FENCE.fullmatch(line)
        if fence:
            indent = fence[1]
            inside = fence[2].strip() if inside is None else None
        # Blocks with more words after the language are run too.
        is_wanted = inside is not None and f"{inside} ".startswith(f"{wanted} ")
        lines.append(line.removeprefix(indent) if is_wanted and not fence else "")
    return lines


def _has_examples(page: Path) -> bool:
    return any(_blocks(page, "python")) or any(_blocks(page, "sh console-test"))


def _run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    scripts = Path(sys.executable).parent
    return subprocess.run(
        command,
        check=False,
        cwd=folder,
        env={**os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "100"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("page", [page for page in PAGES if _has_examples(page)], ids=str)
def test_examples_run_as_printed(page: Path, tmp_path: Path) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    program = tmp_path / f"{page.stem}.py"
    program.write_text("\n".join(_blocks(page, "python")))
    # -W error: examples must not use deprecated features.
    ended = _run([sys.executable, "-W", "error", "-W", _NOT_NAMED, str(program)], folder)
    assert ended.returncode == 0, f"{page}:\n{ended.stdout}"

    text = "\n".join(_blocks(page, "sh console-test"))
    for command, printed in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*(?:\n|\Z))*)", text, re.MULTILINE):
        ended = _run(["sh", "-c", command], folder)
        assert ended.returncode == 0, f"{page}: {command}\n{ended.stdout}"
        expected = re.escape(printed.strip()).replace(re.escape("..."), "(?s:.*)")
        assert re.fullmatch(expected, ended.stdout.strip()), f"{page}: {command}\n{ended.stdout}"


def test_doctor_page_lists_every_kind_of_finding_in_order() -> None:
    text = (ROOT / "docs" / "cli.md").read_text()
    assert re.findall(r"(?m)^\| ([^|`]+) \|", text) == ["kind", *Kind]


def test_readme_has_an_example_near_its_top() -> None:
    first = next(number for number, line in enumerate(_blocks(Path("README.md"), "python")) if line)
    assert first <= 25  # on the first screen, below the introduction


def test_every_command_is_documented() -> None:
    pages = "\n".join((ROOT / page).read_text() for page in PAGES)
    missing = [
        name for name in main.list_commands(click.Context(main)) if f"steno {name}" not in pages
    ]
    assert missing == []


def _with_option(command: click.Command, option: str) -> bool:
    """Return whether a command or one of its subcommands has this option."""
    if any(option in one.opts for one in command.params):
        return True
    return any(_with_option(one, option) for one in _below(command).values())


def _below(command: click.Command) -> dict[str, click.Command]:
    """Return the commands of a group by name."""
    if not isinstance(command, click.Group):
        return {}
    context = click.Context(command)
    found = {name: command.get_command(context, name) for name in command.list_commands(context)}
    return {name: one for name, one in found.items() if one is not None}


def test_settings_page_names_the_commands_with_the_option_config() -> None:
    text = " ".join((ROOT / "docs" / "settings.md").read_text().split())
    found = re.search(r"`--config` is an option of ([^;]*);", text)
    assert found is not None
    named = set(re.findall(r"`([a-z]+)`", found[1]))
    assert named == {name for name, one in _below(main).items() if _with_option(one, "--config")}


def test_readme_links_to_a_page_for_each_command_that_it_explains() -> None:
    [paragraph] = re.findall(
        r"(?s)\n\n([^\n]*`steno` looks into.*?)\n\n", (ROOT / "README.md").read_text()
    )
    pages = re.findall(r"\]\((docs/[^)]*)\)", paragraph)
    texts = []
    for page in pages:
        place = ROOT / page
        texts += [one.read_text() for one in (sorted(place.glob("*.md")) or [place])]
    commands = set(re.findall(r"`steno ([a-z]+)", paragraph))
    assert {"memory", "doctor", "backup", "copy", "import"} <= commands
    for command in commands:
        assert any(f"steno {command}" in text for text in texts), command


def test_benchmark_page_does_not_ask_for_another_run() -> None:
    assert "run it again" not in (ROOT / "docs" / "benchmarks.md").read_text()
