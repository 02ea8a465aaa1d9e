"""Export of a session as one HTML page that looks like the viewer's page.

The page has no scripts and loads nothing. Its content security policy allows only its own style
sheet and embedded images, so that a mistake elsewhere cannot cause a request. Secrets are redacted
before anything is rendered or cut.
"""

from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import cache
from hashlib import sha256
from typing import Any, Final

from jinja2 import Environment
from markupsafe import Markup
from msgspec import Struct

from stenolog.catalog.message_metadata import has_failed, model_of, usage_of
from stenolog.gateway.viewer.markdown_html import is_picture
from stenolog.gateway.viewer.message_views import document_views, prompt_line
from stenolog.gateway.viewer.templating import new_environment, static_file
from stenolog.messages import calls_of, has_text, results_of
from stenolog.records import Message, SessionInfo
from stenolog.sessions.usage import Counts, Price, prices
from stenolog.transfer.export.formats import (
    ExportFormat,
    Redactor,
    document_title,
    text_export_pieces,
)
from stenolog.transfer.export.message_parts import cleaned, minute, plain

_STYLES: Final = ("viewer.css", "tools.css")
_MAX_DEPTH: Final = 200
"""Maximum depth of a message in which pictures are searched."""
_PICTURE_MARK: Final = "stenolog-picture:"


class Prompt(Struct, frozen=True, kw_only=True):
    """A prompt in the outline."""

    seq: int
    at: datetime
    text: str


class Totals(Struct, kw_only=True):
    """Numbers about an exported session."""

    count: int = 0
    hidden: int = 0
    """Number of exported messages that are hidden from the model."""
    tools: int = 0
    failures: int = 0
    tokens: Counts
    first: datetime | None = None
    last: datetime | None = None
    prompts: list[Prompt] = []

    @property
    def seconds(self) -> float:
        """Time between the first and the last message."""
        if self.first is None or self.last is None:
            return 0.0
        return (self.last - self.first).total_seconds()


def export_pieces(
    format_: ExportFormat, info: SessionInfo, messages: Sequence[Message], clean: Redactor
) -> Iterator[bytes]:
    """Yield the export of a session in pieces."""
    if format_ != "html":
        return text_export_pieces(format_, info, messages, clean)
    return _page(info, messages, clean)


def _page(info: SessionInfo, messages: Sequence[Message], clean: Redactor) -> Iterator[bytes]:
    bodies = {one.seq: _clean_body(one.to_dict(), clean) for one in messages}
    environment = _environment()
    head = environment.get_template("export.html").render(
        key=cleaned(info.key, clean),
        title=" ".join(document_title(info, messages, clean).split()),
        summary=cleaned(info.summary, clean),
        left_out=info.count - info.visible,
        totals=_totals(messages, bodies, prices()),
        style=_style(),
        style_hash=_style_hash(),
    )
    start, _, end = head.partition("<!-- messages -->\n")
    yield start.encode(errors="replace")
    template = environment.get_template("message.html")
    for view in document_views(messages, lambda one: bodies[one.seq]):
        yield template.render(one=view).encode(errors="replace")
    yield end.encode(errors="replace")


def index_page(sessions: Sequence[Any]) -> bytes:
    """Return a page that links to exported pages: `title`, `key`, `file`, `messages`, `last`."""
    template = _environment().get_template("export_index.html")
    made = template.render(sessions=sessions, style=_style(), style_hash=_style_hash())
    return made.encode(errors="replace")


# --- redaction -------------------------------------------------------------------------------


def _clean_body(body: dict[str, Any], clean: Redactor) -> dict[str, Any]:
    """Return a message without secrets and invisible characters. Pictures stay unchanged."""
    pictures: list[str] = []
    # guard: html-export-redacted
    shown: dict[str, Any] = clean.data(_set_aside(body, pictures, 0))
    return dict(_put_back(shown, pictures)) if pictures else shown


def _set_aside(value: Any, pictures: list[str], depth: int) -> Any:
    """Return the value as it may be searched for secrets: printable, without pictures."""
    if depth > _MAX_DEPTH:
        return value
    match value:
        case str():
            return plain(value)
        case list():
            return [_set_aside(one, pictures, depth + 1) for one in value]
        case Mapping():
            made = {}
            for name, one in value.items():
                if isinstance(one, str) and _is_picture_field(value, name, one):
                    pictures.append(one)
                    made[name] = f"{_PICTURE_MARK}{len(pictures) - 1}"
                else:
                    made[name] = _set_aside(one, pictures, depth + 1)
            return made
    return value


def _is_picture_field(part: Mapping[str, Any], name: str, text: str) -> bool:
    """Return whether this field of a part contains an encoded picture."""
    if name in ("url", "image_url"):
        return is_picture(text)
    kind = part.get("media_type", part.get("type"))
    is_image = isinstance(kind, str) and kind.startswith(("image/", "image_generation"))
    return is_image and name in ("data", "result") and is_picture(f"data:image/png;base64,{text}")


def _put_back(value: Any, pictures: Sequence[str]) -> Any:
    match value:
        case str() if value.startswith(_PICTURE_MARK):
            number = value.removeprefix(_PICTURE_MARK)
            known = number.isascii() and number.isdecimal() and int(number[:9]) < len(pictures)
            return pictures[int(number[:9])] if known else value
        case list():
            return [_put_back(one, pictures) for one in value]
        case dict():
            return {name: _put_back(one, pictures) for name, one in value.items()}
    return value


# --- the top of the page ---------------------------------------------------------------------


def _totals(
    messages: Sequence[Message], bodies: Mapping[int, Mapping[str, Any]], price: Price | None
) -> Totals:
    made = Totals(tokens=Counts())
    for message in messages:
        body = bodies[message.seq]
        made.count += 1
        made.hidden += message.hidden
        made.tools += len(calls_of(body))
        made.failures += has_failed(body) or any(one.is_error for one in results_of(body))
        made.first = made.first or message.at
        made.last = message.at
        if has_text(body):
            text = prompt_line(body)
            made.prompts.append(Prompt(seq=message.seq, at=message.at, text=text))
        usage = usage_of(body)
        if usage is not None:
            cost = None if price is None else price(model_of(body) or "", usage)
            made.tokens.add_answer(usage, cost)
    return made


@cache
def _environment() -> Environment:
    made = new_environment()
    made.globals.update(exported=True)
    # A document is read on any day: times have their date.
    made.filters.update(clock=minute, duration=_duration)
    return made


def _duration(seconds: float) -> str:
    """Return a duration of any length: `12 s`, `5 min`, `3 h 10 min`, `4 days`."""
    minutes = round(seconds / 60)
    if minutes < 2:
        return f"{seconds:.0f} s"
    if minutes < 60:
        return f"{minutes} min"
    hours, rest = divmod(minutes, 60)
    return f"{hours} h {rest} min" if hours < 48 else f"{hours // 24} days"


@cache
def _style() -> Markup:
    return Markup("\n".join(static_file(name).decode() for name in _STYLES))


@cache
def _style_hash() -> str:
    return f"sha256-{b64encode(sha256(_style().encode()).digest()).decode()}"
