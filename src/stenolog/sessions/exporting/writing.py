"""A session in each of the forms in which it is given away. Pure."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, Literal, Protocol

import msgspec

from stenolog.catalog.texts import title_from
from stenolog.records import Message, SessionInfo
from stenolog.sessions.exporting.reading import Conversation, cleaned, read_all

Form = Literal["jsonl", "openai", "markdown", "html"]

FOR_READERS: Final = ("markdown", "html")
"""The forms that people read, and share."""
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
"""The fields of a message that OpenAI's API knows."""


class Cleaner(Protocol):
    """Takes out what is not to be shared, and counts it."""

    @property
    def wanted(self) -> bool:
        """Whether it takes out anything at all."""
        ...

    def __call__(self, text: str) -> str:
        """The text as it may be shared."""
        ...

    def data(self, value: Any) -> Any:
        """What is made of texts, lists and objects, as it may be shared."""
        ...

    def again(self, text: str) -> str:
        """The same for a text that is counted elsewhere."""
        ...


def pieces(
    form: Form, info: SessionInfo, messages: Sequence[Message], clean: Cleaner
) -> Iterator[bytes]:
    """What is written, piece by piece."""
    if form not in FOR_READERS:
        for message in messages:
            yield _line(message, clean, only_openai=form == "openai") + b"\n"
        return
    # Slow to import, and only for documents.
    from stenolog.sessions.exporting.markdown import as_markdown
    from stenolog.sessions.exporting.page import as_page

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
        # Half a character is written as an escape, as the store has it; almost nobody meets one.
        from json import dumps

        return dumps(shared, separators=(",", ":")).encode()


def _title(info: SessionInfo, messages: Iterable[Message], clean: Cleaner) -> str:
    given = title_from(info.meta, "")
    if given:
        return cleaned(given, clean)
    # Before it is cut: half a secret is not known by its form. And it is counted where it was said.
    return title_from({}, cleaned(_prompt(messages), clean.again)) or cleaned(info.key, clean.again)


def _prompt(messages: Iterable[Message]) -> str:
    """What the user said first."""
    for message in messages:
        body = message.to_dict()
        if body.get("role") == "user" and isinstance(body.get("content"), str):
            return str(body["content"])
    return ""
