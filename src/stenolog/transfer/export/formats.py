"""Export of a session as text: JSON lines or Markdown. Pure functions."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, Literal, Protocol

import msgspec

from stenolog.catalog.searchable_text import title_from
from stenolog.messages import TextPart, has_text, read_content
from stenolog.records import Message, SessionInfo
from stenolog.transfer.export.message_parts import Conversation, readable_messages, redact_text

TextFormat = Literal["jsonl", "openai", "markdown"]
ExportFormat = TextFormat | Literal["html"]

DOCUMENT_FORMATS: Final = ("markdown", "html")
"""Formats for human readers."""
_OPENAI_FIELDS: Final = (
    *("role", "content", "name", "tool_calls", "tool_call_id"),
    *("refusal", "audio", "function_call"),
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
        """Return the redacted text without counting its secrets, which are counted elsewhere."""
        ...


def text_export_pieces(
    format_: TextFormat, info: SessionInfo, messages: Sequence[Message], clean: Redactor
) -> Iterator[bytes]:
    """Yield the export in pieces. `stenolog.gateway.viewer.export_page` exports HTML as well."""
    if format_ != "markdown":
        for message in messages:
            yield _json_line(message, clean, only_openai=format_ == "openai") + b"\n"
        return
    # Only needed for documents.
    from stenolog.transfer.export.markdown_export import markdown_pieces

    conversation = Conversation(
        key=redact_text(info.key, clean),
        title=document_title(info, messages, clean),
        summary=redact_text(info.summary, clean),
        # Use the times of the messages, because the session may have been imported later.
        created=messages[0].at if messages else info.created,
        updated=messages[-1].at if messages else info.updated,
        messages=tuple(readable_messages(messages, clean)),
        hidden=info.count - info.visible,
    )
    for piece in markdown_pieces(conversation):
        yield piece.encode()


def _json_line(message: Message, clean: Redactor, *, only_openai: bool) -> bytes:
    if not only_openai and not clean.enabled:
        return message.to_json()
    body = message.to_dict()
    if only_openai:
        body = {name: value for name, value in body.items() if name in _OPENAI_FIELDS}
    shared_fields = clean.data(body)
    try:
        return msgspec.json.encode(shared_fields)
    except UnicodeEncodeError:
        # A lone surrogate, which is very rare, is written as an escape, as in the store.
        from json import dumps

        return dumps(shared_fields, separators=(",", ":")).encode()


def document_title(info: SessionInfo, messages: Iterable[Message], clean: Redactor) -> str:
    """Return the title of a document: the session's title, or the start of the first prompt."""
    title = title_from(info.meta, "")
    if title:
        return redact_text(title, clean)
    # Redact the text before it is cut, because half a secret is not recognized.
    # Secrets in the title are not counted, because they are counted in their message.
    return title_from(
        {}, redact_text(_first_prompt(messages), clean.without_counting)
    ) or redact_text(info.key, clean.without_counting)


def _first_prompt(messages: Iterable[Message]) -> str:
    """Return the text of the first user message that has text."""
    for message in messages:
        body = message.to_dict()
        if has_text(body):
            parts = read_content(body.get("content"))
            if text := "\n".join(part.text for part in parts if isinstance(part, TextPart)):
                return text
    return ""
