"""docs/cli.md holds the help texts as they are; `make fix` writes them anew."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import click
from click.testing import CliRunner

from stenolog.cli import main
from stenolog.maintenance.log_damage import Kind

PAGE = Path(__file__).resolve().parents[3] / "docs" / "cli.md"
BEGIN = "<!-- begin help: written by tests/unit/cli/test_cli_page.py -->\n"
END = "<!-- end help -->\n"


def test_cli_page_has_the_help_of_every_command() -> None:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    current = before + BEGIN + "".join(_sections()) + END + after
    if os.environ.get("STENO_UPDATE"):
        PAGE.write_text(current)
    assert PAGE.read_text() == current, "the help changed: run make fix"


def test_doctor_page_lists_every_kind_of_finding_in_order() -> None:
    rows = re.findall(r"(?m)^\| ([^|`]+) \|", PAGE.read_text())
    assert rows == ["kind", *Kind]


def _sections() -> Iterator[str]:
    for words in _commands(main, ()):
        shown = CliRunner().invoke(main, [*words, "--help"], prog_name="steno", terminal_width=80)
        yield f"## steno {' '.join(words)}\n\n```text\n{shown.stdout}```\n\n"


def _commands(group: click.Group, words: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        yield (*words, name)
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from _commands(command, (*words, name))
