"""Write the reference pages: help of every command, public names, and fields of the settings.

    python scripts/reference.py [FOLDER]

The pages are made from help texts and docstrings, so they are built and not committed. The folder
is docs/reference unless another one is given.
"""

import inspect
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import UnionType
from typing import Final, Literal, get_args, get_origin

import click

import stenolog
from stenolog.cli import main as steno
from stenolog.settings.fields import all_fields, describe_type, to_toml

FOLDER: Final = Path(__file__).resolve().parent.parent / "docs" / "reference"
MODULES: Final = ("stenolog", *(f"stenolog.{name}" for name in stenolog._PUBLIC_MODULES.split()))
_COLUMNS: Final = 80


def main(folder: Path = FOLDER) -> None:
    """Write the pages to the folder and print their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, make_lines in PAGES.items():
        page = folder / name
        page.write_text("".join(f"{line}\n" for line in make_lines()), encoding="utf-8")
        print(page)


def cli_page() -> Iterator[str]:
    """Yield the lines of the page with the help of every command."""
    yield "# Commands"
    for context in command_contexts():
        yield from ("", f"## {context.command_path}", "", "```text")
        yield from (context.command.get_help(context), "```")


def command_contexts(parent: click.Context | None = None) -> Iterator[click.Context]:
    """Yield a context of every command below a group, depth first. The default is `steno`."""
    if parent is None:
        settings = {**steno.context_settings, "terminal_width": _COLUMNS}
        parent = click.Context(steno, info_name="steno", **settings)
    if isinstance(parent.command, click.Group):
        for name in parent.command.list_commands(parent):
            command = parent.command.get_command(parent, name)
            assert command is not None
            context = click.Context(command, parent, info_name=name, **command.context_settings)
            yield context
            yield from command_contexts(context)


def api_page() -> Iterator[str]:
    """Yield the lines of the page with every public name and its import path."""
    yield from ("# Public names", "")
    yield "Import a name from the module under which it is listed. Everything else is internal and"
    yield "may change in any release."
    for module in MODULES:
        names = [name for name in import_module(module).__all__ if import_path(name) == module]
        yield from ("", f"## {module}", "", summary(import_module(module)), "")
        yield from ("| name | meaning |", "|---|---|")
        for name in names:
            yield f"| `{name}` | {summary(getattr(import_module(module), name))} |"


def import_path(name: str) -> str:
    """Return the module from which the documentation imports a name: the first that has it."""
    return next(module for module in MODULES if name in import_module(module).__all__)


def summary(thing: object) -> str:
    """Return the first paragraph of a docstring, or the possible values of a type alias."""
    if isinstance(thing, UnionType):
        return ", ".join(f"`{one.__name__}`" for one in get_args(thing))
    if get_origin(thing) is Literal:
        return ", ".join(f"`{value!r}`" for value in get_args(thing))
    # Other values have the docstring of their class, which says nothing about them.
    is_documented = isinstance(thing, type) or inspect.isroutine(thing) or inspect.ismodule(thing)
    paragraph = (inspect.getdoc(thing) or "").partition("\n\n")[0] if is_documented else ""
    return " ".join(paragraph.split()).replace("|", "\\|")


def settings_page() -> Iterator[str]:
    """Yield the lines of the page with every field of the settings."""
    yield from ("# Fields of the settings", "")
    yield from ("| field | default | accepted values | meaning |", "|---|---|---|---|")
    for field in all_fields().values():
        # The other fields of an agent are the same as those of `agent`.
        if field.path[0] != "agents" or field.path[-1] == "routes":
            yield (
                f"| `{field.name}` | `{to_toml(field.default)}` | {describe_type(field)} | "
                f"{field.description} |"
            )


PAGES: Final = {"cli.md": cli_page, "api.md": api_page, "settings.md": settings_page}
"""Functions that make the lines of a page, by the name of its file."""


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
