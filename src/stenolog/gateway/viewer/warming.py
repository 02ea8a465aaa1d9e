"""What the first page would wait for, done before: templates, and the colours of code.

Compiling the templates takes longer than reading and showing a session of any length; the modules
of the languages as long again, and those are fetched while nobody waits.
"""

import logging
from functools import cache
from threading import Timer
from typing import Final

from stenolog.gateway.viewer.markdown import to_html
from stenolog.gateway.viewer.serving import compile_templates

_LATER: Final = 5.0
"""Seconds; a page that is asked for at once does not share the processor with it."""
_LANGUAGES: Final = ("python", "json", "bash", "javascript", "html", "sql", "yaml", "diff")

_logger = logging.getLogger("stenolog")


@cache
def warm() -> None:
    """Have it done, once in a process; the languages a little later, in a thread."""
    compile_templates()
    later = Timer(_LATER, _learn)
    later.name, later.daemon = "viewer-languages", True
    later.start()


def _learn() -> None:
    try:
        for language in _LANGUAGES:
            to_html(f"```{language}\nx\n```")
    except Exception:
        # A page that shows such code will tell.
        _logger.exception("the viewer could not be prepared")
