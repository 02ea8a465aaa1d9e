"""Templates and static files of the viewer, for pages and for exported documents."""

from functools import cache
from pathlib import Path
from typing import Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from stenolog.catalog.message_metadata import model_label
from stenolog.gateway.viewer import formatting
from stenolog.gateway.viewer.markdown_html import to_html
from stenolog.gateway.viewer.secret_masks import covered, masked_html

_HERE: Final = Path(__file__).parent


def new_environment() -> Environment:
    """Return an environment with the viewer's templates, filters and functions."""
    made = Environment(  # guard: templates-escape
        loader=FileSystemLoader(_HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(
        age=formatting.age,
        clock=formatting.clock,
        covered=covered,
        dollars=formatting.dollars,
        model_label=model_label,
        moment=formatting.utc_time,
        short=formatting.short,
        seconds=formatting.seconds,
        segment=formatting.segment,
    )
    made.globals.update(
        to_html=to_html,
        masked_html=masked_html,
        plural=formatting.plural,
        message_count=formatting.message_count,
        interruption_text=formatting.interruption_text,
        hidden_by=formatting.HIDDEN_BY,
        unreadable=formatting.unreadable,
        exported=False,
    )
    return made


@cache
def static_file(name: str) -> bytes:
    """Return the content of a static file."""
    return (_HERE / "static" / name).read_bytes()
