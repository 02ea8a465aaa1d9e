"""Export of a session as one HTML page that looks like the viewer's page.

The page has no scripts and loads nothing. The page's content security policy allows only its own
style sheet and embedded images, so that a mistake elsewhere cannot cause a request. Secrets are
redacted before anything is rendered or cut.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import groupby
from operator import attrgetter
from typing import Any, Final

from jinja2 import Environment

from stenolog.catalog.message_metadata import has_failed, model_of, usage_of
from stenolog.gateway.viewer.hidden_messages import HIDDEN, SUMMARIZED
from stenolog.gateway.viewer.message_views import document_views, prompt_line
from stenolog.gateway.viewer.safe_html import is_picture_url
from stenolog.gateway.viewer.templating import csp_hash, new_environment, static_text
from stenolog.messages import calls_of, results_of
from stenolog.records import Message, SessionInfo
from stenolog.redaction.redact import SharingRedactor, redact_fields, redact_text
from stenolog.sessions.usage import Counts, Price, load_prices
from stenolog.transfer.export.formats import (
    ExportFormat,
    document_title,
    export_as_text,
    fork_source_text,
    format_minute,
)
from stenolog.transfer.transcripts.program_messages import is_in_place, is_prompt, kind_of

_STYLES: Final = ("viewer.css", "tools.css")
_HIDDEN_RUN_END: Final = b"</details>\n"
_MAX_NESTING: Final = 200
"""Maximum nesting depth to which a message is searched for pictures."""
_PICTURE_PLACEHOLDER: Final = "stenolog-picture:"


def export_pieces(
    export_format: ExportFormat,
    info: SessionInfo,
    messages: Sequence[Message],
    redactor: SharingRedactor,
) -> Iterator[bytes]:
    """Yield the export of a session in pieces."""
    if export_format != "html":
        return export_as_text(export_format, info, messages, redactor)
    return _render_page(info, messages, redactor)


def _render_page(
    info: SessionInfo, messages: Sequence[Message], redactor: SharingRedactor
) -> Iterator[bytes]:
    bodies = {message.seq: _clean_body(message.to_dict(), redactor) for message in messages}
    environment = _environment()
    in_place = is_in_place(info)
    has_summary_message = any(kind_of(body) == "summary" for body in bodies.values())
    page_html = environment.get_template("export.html").render(
        key=redact_text(info.key, redactor),
        title=" ".join(document_title(info, messages, redactor).split()),
        source=" ".join(fork_source_text(info, redactor).split()),
        summary="" if has_summary_message else redact_text(info.summary, redactor),
        left_out=info.count - len(messages),
        totals=_count_totals(messages, bodies, load_prices()),
        style=static_text(_STYLES),
        style_hash=csp_hash(_STYLES),
    )
    start, _, end = page_html.partition("<!-- messages -->\n")
    yield start.encode(errors="replace")
    template, divider = map(environment.get_template, ("message.html", "export_divider.html"))
    hidden_runs = [
        list(run) for is_hidden, run in groupby(messages, attrgetter("hidden")) if is_hidden
    ]
    run_lengths = {message.seq: len(run) for run in hidden_runs for message in run}
    was_hidden = False
    for view in document_views(messages, bodies, mark_hidden=not (in_place and info.summary)):
        is_folded = view.hidden and not in_place
        if is_folded and not was_hidden:
            reason = SUMMARIZED if info.summary and view.seq <= info.floor else HIDDEN
            yield divider.render(count=run_lengths[view.seq], reason=reason).encode()
        elif was_hidden and not is_folded:
            yield _HIDDEN_RUN_END
        was_hidden = is_folded
        yield template.render(one=view).encode(errors="replace")
    yield _HIDDEN_RUN_END * was_hidden + end.encode(errors="replace")


def index_page(sessions: Sequence[Any]) -> bytes:
    """Return a page that links to the pages of exported sessions.

    Each session has the attributes `title`, `key`, `file`, `messages` and `last`.
    """
    template = _environment().get_template("export_index.html")
    style, style_hash = static_text(_STYLES), csp_hash(_STYLES)
    html = template.render(sessions=sessions, style=style, style_hash=style_hash)
    return html.encode(errors="replace")


# --- redaction -------------------------------------------------------------------------------


def _clean_body(body: dict[str, Any], redactor: SharingRedactor) -> dict[str, Any]:
    """Return a message without secrets and control sequences. Pictures stay unchanged."""
    pictures: dict[str, str] = {}
    cleaned = redact_fields(_without_pictures(body, pictures, 0), redactor)
    return dict(_with_pictures(cleaned, pictures)) if pictures else cleaned


def _without_pictures(value: Any, pictures: dict[str, str], depth: int) -> Any:
    """Move the pictures of a value to `pictures`, and return the value with placeholders.

    The placeholder of a picture is its key in `pictures`.
    """
    if depth > _MAX_NESTING:
        return value
    match value:
        case list():
            return [_without_pictures(item, pictures, depth + 1) for item in value]
        case Mapping():
            fields = {}
            for name, item in value.items():
                if isinstance(item, str) and _is_picture_field(value, name, item):
                    fields[name] = f"{_PICTURE_PLACEHOLDER}{len(pictures)}"
                    pictures[fields[name]] = item
                else:
                    fields[name] = _without_pictures(item, pictures, depth + 1)
            return fields
    return value


def _is_picture_field(part: Mapping[str, Any], name: str, text: str) -> bool:
    """Return whether this field of a part contains an encoded picture."""
    if name in ("url", "image_url"):
        return is_picture_url(text)
    kind = part.get("media_type", part.get("type"))
    is_image = isinstance(kind, str) and kind.startswith(("image/", "image_generation"))
    return (
        is_image and name in ("data", "result") and is_picture_url(f"data:image/png;base64,{text}")
    )


def _with_pictures(value: Any, pictures: Mapping[str, str]) -> Any:
    match value:
        case str():
            return pictures.get(value, value)
        case list():
            return [_with_pictures(item, pictures) for item in value]
        case dict():
            return {name: _with_pictures(item, pictures) for name, item in value.items()}
    return value


# --- the top of the page ---------------------------------------------------------------------


def _count_totals(
    messages: Sequence[Message], bodies: Mapping[int, Mapping[str, Any]], price: Price | None
) -> dict[str, Any]:
    """Return counts, times and prompts of the exported messages."""
    tokens = Counts()
    for body in bodies.values():
        if (usage := usage_of(body)) is not None:
            cost = None if price is None else price(model_of(body) or "", usage)
            tokens.add_answer(usage, cost)
    return {
        "count": len(messages),
        "hidden": sum(message.hidden for message in messages),
        "tools": sum(len(calls_of(body)) for body in bodies.values()),
        "failures": sum(
            has_failed(body) or any(result.is_error for result in results_of(body))
            for body in bodies.values()
        ),
        "tokens": tokens,
        "first": messages[0].at if messages else None,
        "last": messages[-1].at if messages else None,
        "prompts": [
            {"seq": message.seq, "at": message.at, "text": prompt_line(bodies[message.seq])}
            for message in messages
            if is_prompt(bodies[message.seq])
        ],
    }


@cache
def _environment() -> Environment:
    environment = new_environment()
    environment.globals.update(exported=True, is_running=False, last_prompt=0)
    # A document may be read on another day, so times are shown with their date.
    environment.filters["clock"] = format_minute
    return environment
