"""Tests the pages that `make docs` builds from help texts and docstrings."""

from importlib import import_module
from pathlib import Path

import click
import pytest

import reference
from stenolog.settings.fields import all_fields

COMMANDS = {context.command_path: context for context in reference.command_contexts()}
PAGES = {
    "cli.md": [f"## {path}\n" for path in COMMANDS],
    "api.md": [
        f"| `{name}` | {reference.summary(getattr(import_module(module), name))} |\n"
        for module in reference.MODULES
        for name in import_module(module).__all__
    ],
    "settings.md": [
        f" | {field.description} |\n"
        for path, field in all_fields().items()
        if path[0] != "agents" or path[-1] == "routes"
    ],
}


def test_pages_have_every_command_public_name_and_setting(tmp_path: Path) -> None:
    reference.main(tmp_path)
    for page, texts in PAGES.items():
        text = (tmp_path / page).read_text()
        assert [row for row in texts if row not in text] == [], page


@pytest.mark.parametrize("module", reference.MODULES)
def test_every_public_name_has_a_meaning(module: str) -> None:
    assert reference.summary(import_module(module))
    for name in import_module(module).__all__:
        assert reference.summary(getattr(import_module(module), name)), name


@pytest.mark.parametrize("path", COMMANDS)
def test_every_command_and_option_has_a_help_text(path: str) -> None:
    command = COMMANDS[path].command
    assert command.help
    for parameter in command.params:
        if isinstance(parameter, click.Option) and not parameter.hidden:
            assert parameter.help, parameter.name
