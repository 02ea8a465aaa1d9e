"""Export of a session as text: JSON lines or Markdown. Pure functions.

Most messages are Markdown and are exported to Markdown unchanged. But a message must not affect the
text around it, so open fences are closed, and HTML tags are shown as text.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from html import escape
from itertools import chain
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from stenolog.catalog.message_metadata import (
    FIELD,
    PROGRAM_FIELDS,
    has_failed,
    interruption,
    model_of,
    seconds_of,
)
from stenolog.catalog.searchable_text import title_from
from stenolog.errors import UsageError
from stenolog.messages import (
    UNNAMED,
    FilePart,
    ImagePart,
    TextPart,
    ThinkingPart,
    ToolCall,
    ToolResult,
    UnknownPart,
    read_content,
    read_message,
    unread_fields,
)
from stenolog.messages import Part as AnyPart
from stenolog.records import Message, SessionInfo
from stenolog.redaction.redact import (
    SharingRedactor,
    TextCleaner,
    redact_fields,
    redact_text,
)
from stenolog.sessions.fork_source import fork_source
from stenolog.transfer.export.code_blocks import fence_for, split_blocks
from stenolog.transfer.export.tool_views import (
    ChecklistItem,
    ToolBlock,
    argument_blocks,
    checklist_text,
    diff_text,
    one_line,
    summary_of,
)
from stenolog.transfer.transcripts.program_messages import (
    is_in_place,
    is_prompt,
    kind_of,
    program_line,
)

TextFormat = Literal["jsonl", "openai", "markdown"]
ExportFormat = TextFormat | Literal["html"]

DOCUMENT_FORMATS: Final = ("markdown", "html")
"""Formats for human readers."""
_OPENAI_FIELDS: Final = (
    *("role", "content", "name", "tool_calls", "tool_call_id"),
    *("refusal", "audio", "function_call"),
)
"""Fields of a message that OpenAI's API accepts."""
_OPENAI_ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function")
_OPENAI_PARTS: Final = ("text", "image_url", "input_audio", "file", "refusal")
"""Types of the parts of a content that OpenAI's chat API accepts."""
# The pattern also matches inline code, because `&lt;` would be shown literally there.
_TAG_OR_CODE: Final = re.compile(
    r"(?<!`)(?P<tick>`{1,3})(?!`)(?P<code>[^\n]{1,500}?)(?<!`)(?P=tick)(?!`)"
    r"|(?P<slashes>(?<!\\)\\*+)<(?=[A-Za-z/!?])"
)
_SYNTAX_CHARACTERS: Final = re.compile(r"([\\`*_\[\]<>#|~])")
_LANGUAGE: Final = re.compile(r"[A-Za-z0-9_+.#-]{0,40}")
_IMAGE: Final = re.compile(r"data:image/(?:png|jpeg|gif|webp);base64,[A-Za-z0-9+/=]+")


class Part(Struct, frozen=True, kw_only=True):
    """One readable part of a message."""

    kind: Literal["text", "thought", "call", "result", "image", "field"]
    text: str
    """Text of the part; for an image its `data:` URL."""
    name: str = ""
    """Name of the tool, for a call or a result; name of an additional field."""


def export_as_text(
    format_: TextFormat, info: SessionInfo, messages: Sequence[Message], clean: SharingRedactor
) -> Iterator[bytes]:
    """Yield the exported bytes in pieces. For HTML, see `stenolog.gateway.viewer.export_page`.

    Raises UsageError before the first piece if a message cannot be written in the format openai.
    """
    if format_ == "markdown":
        for piece in _markdown_pieces(info, messages, clean):
            yield piece.encode(errors="replace")  # lone surrogates cannot be encoded
        return
    if format_ == "openai":
        for message in messages:  # before the first line, so that no incomplete file is written
            if reason := _reason_not_openai(message.to_dict()):
                raise UsageError(
                    f"cannot write message {message.seq} of {info.key!r} in the format openai: "
                    f"{reason}. Use the format jsonl, which writes messages as stored."
                )
    for message in messages:
        yield _json_line(message, clean, only_openai=format_ == "openai") + b"\n"


def _reason_not_openai(body: Mapping[str, Any]) -> str:
    """Return why a message is no message of OpenAI's chat API; empty if it is one."""
    role, content = body.get("role"), body.get("content")
    if not isinstance(role, str):
        kind = body.get("type")
        return f"it is an item of type {kind!r}" if isinstance(kind, str) else "it has no role"
    if role not in _OPENAI_ROLES:
        return f"its role is {role!r}"
    if isinstance(content, list):
        kinds = [part.get("type") if isinstance(part, Mapping) else None for part in content]
        others = [kind for kind in kinds if kind not in _OPENAI_PARTS]
        return f"a part of its content has the type {others[0]!r}" if others else ""
    return "" if content is None or isinstance(content, str) else "its content is no text"


def _json_line(message: Message, clean: SharingRedactor, *, only_openai: bool) -> bytes:
    if not only_openai and not clean.enabled:
        return message.to_json()
    body = message.to_dict()
    if only_openai:
        body = {name: value for name, value in body.items() if name in _OPENAI_FIELDS}
    shared_fields = redact_fields(body, clean) if clean.enabled else body
    try:
        return msgspec.json.encode(shared_fields)
    except UnicodeEncodeError:
        # A lone surrogate, which is very rare, is written as an escape, as in the store.
        return json.dumps(shared_fields, separators=(",", ":")).encode()


def exports_hidden_messages(format_: ExportFormat, info: SessionInfo) -> bool:
    """Return whether an export has summarized messages unless the user decides otherwise."""
    return format_ == "html" or (format_ == "markdown" and is_in_place(info))


def document_title(info: SessionInfo, messages: Iterable[Message], clean: SharingRedactor) -> str:
    """Return the session's title, or the start of the first prompt, or the key."""
    title = title_from(info.meta, "")
    if title:
        return redact_text(title, clean)
    # Redact the text before it is cut, because half a secret is not recognized.
    # Secrets in the title are not counted, because they are counted in their message.
    return title_from(
        {}, redact_text(_find_first_prompt(messages), clean.without_counting)
    ) or redact_text(info.key, clean.without_counting)


def _find_first_prompt(messages: Iterable[Message]) -> str:
    """Return the text of the first user message that has text."""
    for message in messages:
        body = message.to_dict()
        if is_prompt(body):
            parts = read_content(body.get("content"))
            if text := "\n".join(part.text for part in parts if isinstance(part, TextPart)):
                return text
    return ""


def fork_source_text(info: SessionInfo, clean: SharingRedactor) -> str:
    """Return the source of a fork as redacted text; empty for other sessions."""
    source = fork_source(info)
    return "" if source is None else redact_text(str(source), clean)


def format_minute(at: datetime) -> str:
    """Return a time as text, without seconds. Years before 1000 have four digits too."""
    return f"{at.date()} {at:%H:%M}"


# --- Markdown -------------------------------------------------------------------------------------


def _markdown_pieces(
    info: SessionInfo, messages: Sequence[Message], clean: SharingRedactor
) -> Iterator[str]:
    key, title = redact_text(info.key, clean), document_title(info, messages, clean)
    source, summary = fork_source_text(info, clean), redact_text(info.summary, clean)
    if summary and any(kind_of(message.to_dict()) == "summary" for message in messages):
        summary = ""  # it is one of the messages
    tool_names: dict[str | None, str] = {}
    message_texts = ["".join(_message_markdown(m, tool_names, clean)) for m in messages]
    # Use the times of the messages, because the session may have been imported later.
    first = format_minute(messages[0].at if messages else info.created)
    last = format_minute(messages[-1].at if messages else info.updated)
    count = len(messages)
    count_text = f"{count:,} message{'' if count == 1 else 's'}{_hidden_note(info, messages)}"
    facts = [_escape_line(key), f"{first} – {last} UTC", count_text, _escape_line(source)]
    yield f"# {_escape_line(title)}\n\n"
    yield f"{' · '.join(filter(None, facts))}\n\n"
    if summary:
        yield "## Summary\n\n"
        yield f"{_escape_prose(summary)}\n\n"
    yield from message_texts


def _hidden_note(info: SessionInfo, messages: Sequence[Message]) -> str:
    if hidden_count := sum(message.hidden for message in messages):
        return f", {hidden_count:,} of them hidden"
    hidden_count = info.count - info.visible
    return f" (and {hidden_count:,} hidden, not shown)" if hidden_count else ""


def _message_markdown(
    message: Message, tool_names: dict[str | None, str], clean: TextCleaner
) -> Iterator[str]:
    body = message.to_dict()
    line = one_line(redact_text(program_line(body), clean))
    if kind_of(body) and not line:
        return  # it only marks a place
    role, seconds = body.get("role"), seconds_of(body)
    role_text = redact_text(role if isinstance(role, str) else _format_json(role), clean)
    parts = list(read_message(body))
    results = (part for part in parts if isinstance(part, ToolResult))
    is_failed = has_failed(body) or any(result.is_error for result in results)
    cause = redact_text(interruption(body), clean)
    details = [
        format_minute(message.at),
        _escape_line(redact_text(model_of(body) or "", clean)),
        "" if seconds is None else f"{seconds:.1f} s",
        "failed" if is_failed else "",
        f"interrupted: {_escape_line(cause)}" if cause else "",
        "hidden" if message.hidden else "",
    ]
    anchor = f'<a id="m{message.seq}"></a>'
    content = [f"*{' · '.join(filter(None, details))}*"]
    content += map(_part_markdown, readable_parts(body, parts, tool_names, clean))
    if line:
        folded = _details_element(line, "\n\n".join(content))
        yield f"{anchor}\n\n{folded}\n\n"
        return
    yield f"## {anchor}{message.seq} · {_escape_line(role_text)}\n\n"
    yield from (f"{block}\n\n" for block in content)


def _part_markdown(part: Part) -> str:
    match part.kind:
        case "text":
            return _escape_prose(part.text)
        case "image":
            return f"![an image]({part.text})"
        case "call":
            heading = " ".join(filter(None, (part.name, summary_of(part.text))))
            blocks = map(_block_markdown, argument_blocks(part.text))
            return _details_element(heading, "\n\n".join(blocks))
        case "result":
            heading = f"{part.name} · result" if part.name else "Result"
        case "thought":
            heading = "Thinking"
        case "field":
            heading = part.name
    return _details_element(heading, _fenced_code(part.text))


def _details_element(heading: str, content: str) -> str:
    # Markdown inside HTML needs an empty line before the Markdown.
    summary = escape(" ".join(heading.split()))
    return f"<details><summary>{summary}</summary>\n\n{content}\n\n</details>"


def _block_markdown(block: ToolBlock) -> str:
    omitted_text = f"\n\n{block.omitted:,} more" if block.omitted else ""
    label = f"{_escape_line(one_line(block.label))}\n\n" if block.label else ""
    match block.kind:
        case "diff":
            content = _fenced_code(diff_text(block.lines), "diff")
        case "checklist":
            items = [ChecklistItem(_escape_line(item.text), item.state) for item in block.items]
            content = checklist_text(items)
        case kind:
            language = {"shell": "sh", "json": "json"}.get(kind, block.language)
            content = _fenced_code(block.text, language)
    return label + content + omitted_text


def _escape_prose(text: str) -> str:
    parts = []
    for block in split_blocks(text):
        if block.is_code:
            parts.append(_fenced_code(block.text, block.language))
        else:
            parts.append(_TAG_OR_CODE.sub(_escape_tag, block.text))
    return "\n".join(parts).strip("\n")


def _escape_tag(match: re.Match[str]) -> str:
    """Escape `<`, even in inline code: other parsers may not recognize the inline code."""
    code = match["code"]
    if code is None:
        backslashes = match["slashes"]
        return backslashes[: len(backslashes) // 2 * 2] + "&lt;"
    if "<" not in code:
        return match[0]
    return f"<code>{_SYNTAX_CHARACTERS.sub(lambda char: f'&#{ord(char[0])};', code)}</code>"


def _fenced_code(text: str, language: str = "") -> str:
    fence = fence_for(text)
    info = language if _LANGUAGE.fullmatch(language) else ""
    return f"{fence}{info}\n{text}\n{fence}"


def _escape_line(text: str) -> str:
    """Return a text as one line in which no character is Markdown syntax."""
    return _SYNTAX_CHARACTERS.sub(r"\\\1", " ".join(text.split()))


# --- the readable parts of a message --------------------------------------------------------------


def readable_parts(
    body: Mapping[str, Any],
    parts: Sequence[AnyPart],
    tool_names: dict[str | None, str],
    clean: TextCleaner,
) -> list[Part]:
    """Return the parts of a message in readable form.

    `tool_names` has the tool name of each call id. The calls of this message are added to it.
    """
    calls = (part for part in parts if isinstance(part, ToolCall) and part.name != UNNAMED)
    tool_names.update({call.id: call.name for call in calls if call.id is not None})
    readable = [_convert_part(part, body, tool_names, clean) for part in parts]
    return [*chain.from_iterable(readable), *_field_parts(unread_fields(body), clean)]


def _convert_part(
    part: AnyPart, body: Mapping[str, Any], tool_names: Mapping[str | None, str], clean: TextCleaner
) -> Iterator[Part]:
    """Yield the readable form of a part; JSON if the part has no readable form."""
    match part:
        case TextPart():
            yield Part(kind="text", text=redact_text(part.text, clean))
        case ThinkingPart() if part.in_content or isinstance(part.value, str):
            if text := redact_text(part.text, clean).strip():
                yield Part(kind="thought", text=text)
            elif part.in_content:
                yield _field_part("content", part.value, clean)
        case ThinkingPart():
            yield from _field_parts({part.field: part.value}, clean)
        case ToolCall() if part.name != UNNAMED:
            args = part.arguments
            text = args if isinstance(args, str) else "" if args is None else _format_json(args)
            name = redact_text(part.name, clean)
            yield Part(kind="call", name=name, text=redact_text(text, clean))
        case ToolResult():
            name = redact_text(tool_names.get(part.id, ""), clean)
            content_parts = list(read_content(part.content))
            for content_part in content_parts:
                for readable_part in _convert_part(content_part, body, tool_names, clean):
                    yield (
                        replace(readable_part, kind="result", name=name)
                        if readable_part.kind == "text"
                        else readable_part
                    )
            if part.in_content and not content_parts:
                yield Part(kind="result", name=name, text="")
        case FilePart() if part.value is body.get("audio"):
            if isinstance(part.content, str):
                yield Part(kind="text", text=redact_text(part.content, clean))
            yield from _field_parts({"audio": part.value}, clean)
        # Only embedded images are shown, because showing other images would cause a request.
        case ImagePart() if _IMAGE.fullmatch(part.url):
            yield Part(kind="image", text=part.url)
        case ToolCall() | UnknownPart(field="tool_calls" | "function_call"):
            yield Part(kind="call", name="tool", text=redact_text(_format_json(part.value), clean))
        case UnknownPart() if part.field != "content":
            yield from _field_parts({part.field: part.value}, clean)
        case UnknownPart() if part.text is not None:
            yield Part(kind="text", text=redact_text(part.text, clean))
        case _ if part.value is not body:
            yield _field_part("content", part.value, clean)


def _field_parts(fields: Mapping[str, Any], clean: TextCleaner) -> Iterator[Part]:
    for name, value in fields.items():
        if name != FIELD and name not in PROGRAM_FIELDS and value is not None:
            # Clean name and value together, because the name may reveal that the value is a secret.
            yield _field_part(redact_text(name, clean), {name: value}, clean)


def _field_part(name: str, value: Any, clean: TextCleaner) -> Part:
    return Part(kind="field", name=name, text=redact_text(_format_json(value), clean))


def _format_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
