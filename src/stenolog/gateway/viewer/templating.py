"""Templates and static files of the viewer, for pages and for exported documents.

The templates call the functions of this module to format numbers, times and short phrases.
"""

import shlex
import sys
from base64 import b64encode
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from hashlib import sha256
from importlib.util import cache_from_source
from pathlib import Path
from typing import Final
from urllib.parse import quote

from jinja2 import (
    Environment,
    FileSystemBytecodeCache,
    FileSystemLoader,
    StrictUndefined,
    compiler,
)
from jinja2.bccache import Bucket
from markupsafe import Markup

from stenolog.catalog.message_metadata import model_label
from stenolog.gateway.viewer.safe_html import (
    cover_secrets,
    is_link_address,
    is_picture_url,
    masked_html,
    preview,
    to_html,
)

_FOLDER: Final = Path(__file__).parent
_TEMPLATES: Final = _FOLDER / "templates"


class CompiledTemplates(FileSystemBytecodeCache):
    """Cache of compiled templates. Its errors are ignored: the template is compiled again.

    Compiling the templates of a page takes longer than rendering the page.
    """

    def get_source_checksum(self, source: str) -> str:
        """Return a checksum of the template, the options in this module and Jinja's version."""
        options = Path(__file__).read_text(encoding="utf-8")
        jinja_time = Path(compiler.__file__).stat().st_mtime_ns
        return super().get_source_checksum(f"{source}{options}{jinja_time}")

    def load_bytecode(self, bucket: Bucket) -> None:
        """Load a compiled template."""
        with suppress(Exception):
            super().load_bytecode(bucket)

    def dump_bytecode(self, bucket: Bucket) -> None:
        """Store a compiled template, unless Python must not store compiled modules."""
        if not sys.dont_write_bytecode:
            with suppress(OSError):
                Path(self.directory).mkdir(parents=True, exist_ok=True)
                super().dump_bytecode(bucket)


def new_environment() -> Environment:
    """Return an environment with the viewer's templates, filters and functions."""
    # Python would store compiled modules of the templates' folder here.
    compiled_folder = Path(cache_from_source(_TEMPLATES / "template")).parent
    environment = Environment(  # guard: templates-escape
        loader=FileSystemLoader(_TEMPLATES),
        bytecode_cache=CompiledTemplates(str(compiled_folder)),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        # For these templates the optimizer changes nothing, and compiling is faster without it.
        optimized=False,
    )
    environment.filters.update(
        age=age,
        clock=time_of_day,
        covered=cover_secrets,
        dollars=dollars,
        model_label=model_label,
        moment=utc_time,
        preview=preview,
        short=short_number,
        seconds=duration_text,
        segment=path_segment,
    )
    environment.globals.update(
        to_html=to_html,
        masked_html=masked_html,
        is_link_address=is_link_address,
        is_picture_url=is_picture_url,
        plural=plural,
        message_count=message_count_text,
        interruption_text=interruption_text,
        hidden_by=HIDDEN_REASON_TEXTS,
        unreadable=unreadable_text,
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


# --- numbers, times and phrases ---------------------------------------------------------------


_AGE_UNITS: Final = ((60, "s"), (60, "min"), (24, "h"), (7, "d"))
"""Units of an age, each with the amount that makes one of the next larger unit."""
_NO_LOSS_TEXT: Final = "The log is damaged, but all messages that were read are intact"
HIDDEN_REASON_TEXTS: Final = {
    "summarized": "replaced by a summary",
    "cleared": "cleared",
    "replaced": "replaced by an edit or retry",
    "truncated": "truncated",
    "hidden": "hidden from the model",
}
"""Texts for the reasons why messages are hidden."""
_INTERRUPTION_TEXTS: Final = {
    "stopped": "You stopped this answer.",
    "given up": "The agent gave up before it finished.",
    "too old to be answered": "Not answered: the message was more than a day old.",
}
"""Sentences for the reasons that agents store with an incomplete answer."""


def age(time: datetime | None, now: datetime | None = None) -> str:
    """Return the age in one unit (`5 min`), or the date if the age is more than a week."""
    if time is None:
        return ""
    amount = ((now or datetime.now(UTC)) - time).total_seconds()
    if amount < 10:
        return "now"
    for size, unit in _AGE_UNITS:
        if amount < size:
            return f"{int(amount)} {unit}"
        amount /= size
    return f"{time:%Y-%m-%d}"


def utc_time(time: datetime) -> str:
    """Return the time in UTC with seconds."""
    return f"{time.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def time_of_day(time: datetime, now: datetime | None = None) -> str:
    """Return the time of day in UTC, with the date if the date is not today."""
    utc = time.astimezone(UTC)
    today = (now or datetime.now(UTC)).astimezone(UTC).date()
    return f"{utc:%H:%M}" if utc.date() == today else f"{utc:%Y-%m-%d %H:%M}"


def short_number(number: int) -> str:
    """Return a number in about four characters: 950, 1.2k, 34k, 5.6M."""
    for size, suffix in ((1_000_000, "M"), (1_000, "k")):
        if number >= size:
            amount = number / size
            return f"{amount:.1f}{suffix}" if amount < 10 else f"{amount:.0f}{suffix}"
    return str(number)


def duration_text(seconds: float) -> str:
    """Return a duration: `250 ms`, `1.5 s`, `2 min 5 s`."""
    if round(seconds, 3) < 1:
        return f"{seconds * 1000:.0f} ms"
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s"


def dollars(amount: float) -> str:
    """Return an amount in US dollars; an amount below one dollar has four decimals."""
    if 0 < amount < 0.000_1:
        return "<$0.0001"
    return f"${amount:,.2f}" if amount >= 1 or amount == 0 else f"${amount:.4f}"


def plural(count: int, noun: str) -> str:
    """Return a count with its noun: `1 message`, `2,000 messages`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def message_count_text(visible: int, count: int) -> str:
    """Return the number of messages, and of visible messages if the two numbers differ."""
    total = plural(count, "message")
    return total if visible == count else f"{total} · model sees {visible:,}"


def interruption_text(reason: str) -> str:
    """Return a sentence for the stored reason of an interruption; empty if there is none."""
    return _INTERRUPTION_TEXTS.get(reason, f"Interrupted: {reason}.") if reason else ""


def damage_html(lost_messages: int, damaged_lines: int, workspace: str) -> Markup:
    """Return a sentence about the damage of a session; empty if the session is intact."""
    if not lost_messages and not damaged_lines:
        return Markup()
    verb = "is" if lost_messages == 1 else "are"
    loss_text = f"{plural(lost_messages, 'message')} {verb} damaged and cannot be read"
    command = f"steno doctor {shlex.quote(workspace)}"
    return Markup("{}. For details, run <code>{}</code>").format(
        loss_text if lost_messages else _NO_LOSS_TEXT, command
    )


def unreadable_text(first: int, last: int) -> str:
    """Return the text that is shown in place of damaged messages."""
    if first == last:
        return f"Message {first} is damaged and cannot be read"
    return f"Messages {first} to {last} are damaged and cannot be read"


def path_segment(key: str) -> str:
    """Return a key as one segment of a URL path."""
    return quote(key, safe="")
