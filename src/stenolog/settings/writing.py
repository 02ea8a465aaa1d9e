"""Settings as TOML: single values, and the commented file that `steno config init` writes."""

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any, Final

from stenolog.settings.fields import Field, all_fields
from stenolog.settings.paths import Path, quoted

_COLUMNS: Final = 78
_EXAMPLES: Final = {"models": "fast", "agents": "ada", "webhooks": "shop", "retention": "old"}
"""The names that the commented file gives to what users name."""
_OF_KINDS: Final = {
    "models": "# A model with a name of your own, for agent.model; as many as you like.\n",
    "agents": (
        "# A further agent; as many as you like. It takes every field of [agent] and\n"
        "# [agent.context], and what it does not say is as it is said there.\n"
    ),
    "webhooks": (
        "# A program that sends messages to /webhooks/shop while `steno serve` runs; as many\n"
        "# as you like.\n"
    ),
    "retention": (
        "# A rule by which old sessions go; as many as you like. Without one all is kept.\n"
        "# `steno retention run --dry-run` tells what it would do.\n"
    ),
}
_OF_AGENTS: Final = ("model", "system", "routes")
"""What further agents mostly differ in; the rest is listed once, under [agent]."""

_HEAD: Final = """\
# Settings of stenolog. Each line below that begins with # and a name is a
# default: take the # away and change it. Environment variables stand over this
# file, as in STENO_AGENT__MODEL for agent.model; flags of a command over both.
# `steno config show` tells what is in force and where it comes from.
"""


def literal(value: Any) -> str:
    """A value as TOML. Raises TypeError for what is no setting's value."""
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case str():
            return quoted(value)
        case tuple() | list():
            return f"[{', '.join(map(literal, value))}]"
        case Mapping():
            pairs = ", ".join(f"{literal(name)} = {literal(each)}" for name, each in value.items())
            return f"{{ {pairs} }}" if pairs else "{}"
    raise TypeError(f"{type(value).__name__} is no value of a setting")


def commented_file() -> str:
    """A config file with every field, its default and what it is for; as it is, it sets nothing."""
    lines = [_HEAD]
    section: Path = ()
    for field in all_fields().values():
        if field.path[0] == "agents" and (len(field.path) > 3 or field.path[-1] not in _OF_AGENTS):
            continue
        if field.path[:-1] != section:
            section = field.path[:-1]
            lines += _header(section)
        lines += _lines_of(field)
    return "\n".join(lines)


def _header(section: Path) -> Iterator[str]:
    match section:
        case (kind, _, *_):
            if kind not in _EXAMPLES:
                yield f"[{'.'.join(section)}]\n"
                return
            yield _OF_KINDS[kind]
            yield f"#[{kind}.{_EXAMPLES[kind]}]\n"
        case _:
            yield f"[{'.'.join(section)}]\n"


def _lines_of(field: Field) -> Iterator[str]:
    yield from (f"# {line}" for line in textwrap.wrap(field.text, _COLUMNS))
    yield f"#{field.path[-1]} = {literal(field.default)}\n"
