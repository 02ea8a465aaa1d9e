"""Export of a session as text: JSON lines or Markdown. Pure."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, Literal, Protocol

import msgspec

from stenolog.catalog.searchable_text import title_from
from stenolog.messages import TextPart, has_text, read_content
from stenolog.records import Message, SessionInfo
from stenolog.transfer.export.message_parts import Conversation, cleaned, read_all

TextFormat = Literal["jsonl", "openai", "markdown"]
ExportFormat = TextFormat | Literal["html"]

DOCUMENT_FORMATS: Final = ("markdown", "html")
"""Formats for human readers."""
_OPENAI_FIELDS: Final = (
    "role",
    "content",
    "name",
    "tool_calls",
    "tool_call_id",
    "refusal",
    "audio",
    "function_call",
)
"""Fields of a message that OpenAI's API accepts."""


class Redactor(Protocol):
    """Redaction: removes and counts content that must not be shared."""

    @property
    def enabled(self) -> bool:
        """Whether redaction is enabled."""
        ...

    def __call__(self, text: str) -> str:
        """Return the redacted text."""
        ...

    def data(self, value: Any) -> Any:
        """Return a JSON value with all texts in it redacted."""
        ...

    def without_counting(self, text: str) -> str:
        """Return the redacted text without counting; for a text that is counted elsewhere."""
        ...


def text_export_pieces(
    format_: TextFormat, info: SessionInfo, messages: Sequence[Message], clean: Redactor
) -> Iterator[bytes]:
    """Yield the export in pieces. `stenolog.gateway.viewer.export_page` exports HTML as well."""
    if format_ != "markdown":
        for message in messages:
            yield _line(message, clean, only_openai=format_ == "openai") + b"\n"
        return
    # Only needed for documents.
    from stenolog.transfer.export.markdown_export import as_markdown

    conversation = Conversation(
        key=cleaned(info.key, clean),
        title=document_title(info, messages, clean),
        summary=cleaned(info.summary, clean),
        # When the messages were said; a session may have been imported later.
        created=messages[0].at if messages else info.created,
        updated=messages[-1].at if messages else info.updated,
        said=tuple(read_all(messages, clean)),
        hidden=info.count - info.visible,
    )
    for piece in as_markdown(conversation):
        yield piece.encode()


def _line(message: Message, clean: Redactor, *, only_openai: bool) -> bytes:
    if not only_openai and not clean.enabled:
        return message.to_json()
    body = message.to_dict()
    if only_openai:
        body = {name: value for name, value in body.items() if name in _OPENAI_FIELDS}
    shared = clean.data(body)
    try:
        return msgspec.json.encode(shared)
    except UnicodeEncodeError:
        # A lone surrogate is written as an escape, as in the store. Very rare.
        from json import dumps

        return dumps(shared, separators=(",", ":")).encode()


def document_title(info: SessionInfo, messages: Iterable[Message], clean: Redactor) -> str:
    """Return the title of a document: the session's title, or the start of the first prompt."""
    given = title_from(info.meta, "")
    if given:
        return cleaned(given, clean)
    # Clean before cutting: half a secret is not recognized. The secret is counted in its message.
    return title_from({}, cleaned(_prompt(messages), clean.without_counting)) or cleaned(
        info.key, clean.without_counting
    )


def _prompt(messages: Iterable[Message]) -> str:
    """Return the text of the first user message that has some."""
    for message in messages:
        body = message.to_dict()
        if has_text(body):
            parts = read_content(body.get("content"))
            if text := "\n".join(part.text for part in parts if isinstance(part, TextPart)):
                return text
    return ""
