"""Templates and static files of the viewer, for pages and for exported documents."""

import sys
from base64 import b64encode
from contextlib import suppress
from functools import cache
from hashlib import sha256
from importlib.util import cache_from_source
from pathlib import Path
from secrets import token_hex
from typing import Final

from jinja2 import BytecodeCache, Environment, FileSystemLoader, StrictUndefined, compiler
from jinja2.bccache import Bucket
from markupsafe import Markup

from stenolog.catalog.message_metadata import model_label
from stenolog.gateway.viewer import formatting
from stenolog.gateway.viewer.markdown_html import to_html
from stenolog.gateway.viewer.secret_masks import cover_secrets, masked_html

_FOLDER: Final = Path(__file__).parent
_TEMPLATES: Final = _FOLDER / "templates"


class CompiledTemplates(BytecodeCache):
    """Cache of compiled templates, in the folder where Python stores its compiled modules.

    Compiling the templates of a page takes longer than rendering the page.
    """

    def get_cache_key(self, name: str, filename: str | None = None) -> str:
        """Return the file of a compiled template."""
        del filename
        return cache_from_source(_TEMPLATES / name)

    def get_source_checksum(self, source: str) -> str:
        """Return a checksum of everything that determines the compiled code."""
        return sha256(_compiler_version() + source.encode()).hexdigest()

    def load_bytecode(self, bucket: Bucket) -> None:
        """Load a compiled template. A file that cannot be read is written again."""
        with suppress(Exception):
            bucket.bytecode_from_string(Path(bucket.key).read_bytes())

    def dump_bytecode(self, bucket: Bucket) -> None:
        """Store a compiled template, unless Python must not or cannot store compiled modules."""
        if sys.dont_write_bytecode:
            return
        path = Path(bucket.key)
        new_file = path.with_name(f"{path.name}.{token_hex(8)}")
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                new_file.write_bytes(bucket.bytecode_to_string())
                new_file.replace(path)
            finally:
                new_file.unlink(missing_ok=True)


@cache
def _compiler_version() -> bytes:
    """Return bytes that change with the options in this module and with the version of Jinja."""
    return Path(__file__).read_bytes() + str(Path(compiler.__file__).stat().st_mtime_ns).encode()


def new_environment() -> Environment:
    """Return an environment with the viewer's templates, filters and functions."""
    environment = Environment(  # guard: templates-escape
        loader=FileSystemLoader(_TEMPLATES),
        bytecode_cache=CompiledTemplates(),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        # For these templates the optimizer changes nothing, and compiling is faster without it.
        optimized=False,
    )
    environment.filters.update(
        age=formatting.age,
        clock=formatting.clock,
        covered=cover_secrets,
        dollars=formatting.dollars,
        model_label=model_label,
        moment=formatting.utc_time,
        short=formatting.short_number,
        seconds=formatting.seconds,
        segment=formatting.path_segment,
    )
    environment.globals.update(
        to_html=to_html,
        masked_html=masked_html,
        plural=formatting.plural,
        message_count=formatting.message_count,
        interruption_text=formatting.interruption_text,
        hidden_by=formatting.HIDDEN_REASON_TEXTS,
        unreadable=formatting.unreadable_text,
        exported=False,
    )
    return environment


_COMMON_STYLES: Final = ("viewer.css", "banners.css", "tools.css")
STYLE_SHEETS: Final = {
    "page.css": _COMMON_STYLES,
    "list-page.css": (*_COMMON_STYLES, "list.css"),
    "session-page.css": (*_COMMON_STYLES, "conversation.css"),
}
"""Files of each style sheet. A page has one style sheet, so it waits for only one response."""


@cache
def static_file(name: str) -> bytes:
    """Return the content of a static file or style sheet."""
    files = STYLE_SHEETS.get(name, (name,))
    return b"\n".join((_FOLDER / "static" / file).read_bytes() for file in files)


@cache
def static_text(names: tuple[str, ...]) -> Markup:
    """Return the joined content of static files, to embed it in a page."""
    return Markup("\n".join(static_file(name).decode() for name in names))


@cache
def csp_hash(names: tuple[str, ...]) -> str:
    """Return the hash of `static_text` for a content security policy."""
    return f"sha256-{b64encode(sha256(static_text(names).encode()).digest()).decode()}"
