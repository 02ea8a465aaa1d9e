"""Export of a session in each export format. Pure."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, Literal, Protocol

import msgspec

from stenolog.catalog.searchable_text import title_from
from stenolog.messages import TextPart, has_text, read_content
from stenolog.records import Message, SessionInfo
from stenolog.transfer.export.message_parts import Conversation, cleaned, read_all

Form = Literal["jsonl", "openai", "markdown", "html"]

FOR_READERS: Final = ("markdown", "html")
"""Formats for human readers."""
_OF_OPENAI: Final = (
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


class Cleaner(Protocol):
    """Redaction: removes and counts content that must not be shared."""

    @property
    def wanted(self) -> bool:
        """Whether redaction is enabled."""
        ...

    def __call__(self, text: str) -> str:
        """Return the redacted text."""
        ...

    def data(self, value: Any) -> Any:
        """Return a JSON value with all texts in it redacted."""
        ...

    def again(self, text: str) -> str:
        """Return the redacted text without counting; for a text that is counted elsewhere."""
        ...


def pieces(
    form: Form, info: SessionInfo, messages: Sequence[Message], clean: Cleaner
) -> Iterator[bytes]:
    """Yield the export in pieces."""
    if form not in FOR_READERS:
        for message in messages:
            yield _line(message, clean, only_openai=form == "openai") + b"\n"
        return
    # Slow to import, and only needed for documents.
    from stenolog.transfer.export.html_export import as_page
    from stenolog.transfer.export.markdown_export import as_markdown

    told = Conversation(
        key=cleaned(info.key, clean),
        title=_title(info, messages, clean),
        summary=cleaned(info.summary, clean),
        created=info.created,
        updated=info.updated,
        said=tuple(read_all(messages, clean)),
        hidden=info.count - info.visible,
    )
    for piece in as_page(told) if form == "html" else as_markdown(told):
        yield piece.encode()


def _line(message: Message, clean: Cleaner, *, only_openai: bool) -> bytes:
    if not only_openai and not clean.wanted:
        return message.to_json()
    body = message.to_dict()
    if only_openai:
        body = {name: value for name, value in body.items() if name in _OF_OPENAI}
    shared = clean.data(body)
    try:
        return msgspec.json.encode(shared)
    except UnicodeEncodeError:
        # A lone surrogate is written as an escape, as in the store. Very rare.
        from json import dumps

        return dumps(shared, separators=(",", ":")).encode()


def _title(info: SessionInfo, messages: Iterable[Message], clean: Cleaner) -> str:
    given = title_from(info.meta, "")
    if given:
        return cleaned(given, clean)
    # Clean before cutting: half a secret is not recognized. The secret is counted in its message.
    return title_from({}, cleaned(_prompt(messages), clean.again)) or cleaned(info.key, clean.again)


def _prompt(messages: Iterable[Message]) -> str:
    """Return the text of the first user message that has some."""
    for message in messages:
        body = message.to_dict()
        if has_text(body):
            parts = read_content(body.get("content"))
            if text := "\n".join(part.text for part in parts if isinstance(part, TextPart)):
                return text
    return ""
