"""Convert messages to the values that templates show: text, thinking, pictures, tool calls."""

import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from markupsafe import Markup, escape
from msgspec import Struct

from stenolog.catalog.message_metadata import (
    has_failed,
    interruption,
    model_of,
    origin_of,
    seconds_of,
    usage_of,
)
from stenolog.gateway.viewer.safe_html import (
    MAX_COLOURED_ON_PAGE,
    MAX_RENDERED,
    SecretMask,
    coloured_code,
    to_html,
)
from stenolog.gateway.viewer.templating import plural
from stenolog.messages import (
    FilePart,
    ImagePart,
    Part,
    TextPart,
    ThinkingPart,
    ToolCall,
    ToolResult,
    UnknownPart,
    as_json,
    read_content,
    read_message,
    text_of,
    type_of,
)
from stenolog.records import Message
from stenolog.redaction.redact import cut_start, printable_data
from stenolog.transfer.export.code_blocks import ColourBudget
from stenolog.transfer.export.tool_views import (
    MAX_OPEN_LINES,
    MAX_PREVIEW_LINES,
    DiffBudget,
    ToolBlock,
    argument_blocks,
    cut_text,
    decode_json,
    diff_text,
    error_line,
    find_read_path,
    format_json,
    one_line,
    result_blocks,
    summary_source,
)
from stenolog.transfer.transcripts.program_messages import kind_of, program_line

_ROLES: Final = {"user", "assistant", "tool", "system", "developer"}
_INTERRUPTED_MARK: Final = "[interrupted]"
"""Text that marks an interrupted answer for the model."""
_CODE_BLOCK: Final = re.compile(r"<pre>(.*?)</pre>", re.DOTALL)
_CODE_WITH_BUTTON: Final = (
    r'<div class="copyable"><button type="button" class="copy-code" data-copy="code">copy</button>'
    r"<pre>\1</pre></div>"
)
_MAX_PREVIEW_LENGTH: Final = 4_000
"""Maximum number of characters that are shown of a long text while it is folded."""
_COPY_BUTTON: Final = Markup(
    '<button type="button" class="copy-code" data-copy="block">copy</button>'
)
_BLOCK_FRAME: Final = Markup('<div class="block {}"><div class="label">{}</div>{}{}</div>\n')
_CHECKBOXES: Final = {"done": ("done", "☑"), "active": ("in progress", "◐"), "open": ("open", "☐")}
"""Label and symbol of each state of a checklist item."""
_MAX_COLOURED_IN_DOCUMENT: Final = 1_000_000
"""Maximum number of characters of code that are coloured in one exported document."""


class ToolCallView(Struct, frozen=True, kw_only=True):
    """A tool call, with its result if it has one."""

    name: str
    line: str
    """The most informative argument, in one line."""
    arguments: Markup
    result: Markup | None
    pictures: tuple[str, ...] = ()
    """Pictures in the result."""
    seconds: float | None
    failed: bool
    error: str = ""
    """The first line of the error, if the call failed."""


class MessageView(Struct, frozen=True, kw_only=True):
    """One message as the page shows it."""

    seq: int
    at: datetime
    hidden: bool
    role: str
    """The role as stored, which may be any text."""
    kind: str
    """`program` for a message of a program, the role if the style sheet knows it, else `other`."""
    hidden_mark: bool = False
    """Whether the message is marked as hidden from the model."""
    program_line: str = ""
    """The line to which a message of a program is folded; empty for other messages."""
    is_summary: bool = False
    """Whether the message is the summary that a compaction of another program wrote."""
    html: Markup
    thoughts: tuple[Markup, ...] = ()
    pictures: tuple[str, ...] = ()
    """Addresses of the pictures. Embedded pictures are shown, others only linked."""
    calls: tuple[ToolCallView, ...] = ()
    model: str | None = None
    seconds: float | None = None
    usage: Mapping[str, int] | None = None
    interrupted: str = ""
    origin: str = ""


Bodies = Mapping[int, Mapping[str, Any]]
"""Bodies of messages by seq, in order."""
ResultsByCall = dict[tuple[int, int], tuple[ToolResult, int]]
"""Result of each call and the result's seq, by the seq of the calling message and call index."""


class _Renderer:
    """Renders the texts of one page or document, within its budgets for coloured code and diffs."""

    def __init__(self, max_coloured: int, *, on_page: bool) -> None:
        self.on_page = on_page
        self.colours = ColourBudget(max_coloured)
        self.diffs = DiffBudget()
        self.mask = SecretMask(enabled=on_page)

    def markdown(self, text: str) -> Markup:
        # The rest is not shown, so it is not masked. Padding keeps it after MAX_RENDERED.
        start = cut_start(text, MAX_RENDERED)  # guard: markdown-cut
        if rest := text[len(start) :]:
            start = self.mask.with_placeholders(start)
            text = start[: self.mask.cut_position(start, MAX_RENDERED)].ljust(MAX_RENDERED) + rest
        else:
            text = self.mask.with_placeholders(text)
        html = self.mask.with_buttons(to_html(text, self.colours))
        return Markup(_CODE_BLOCK.sub(_CODE_WITH_BUTTON, str(html))) if self.on_page else html

    def code(self, masked_text: str, language: str) -> Markup:
        if not language:
            return escape(masked_text)
        return coloured_code(masked_text, language, self.colours)


def message_views(
    messages: Sequence[Message], later: Sequence[Message] = (), *, mark_hidden: bool = True
) -> list[MessageView]:
    """Return the messages for the page. A tool result is shown at its call if possible.

    `later` are the messages after `messages`, which may contain the results of the last calls.
    """
    renderer = _Renderer(MAX_COLOURED_ON_PAGE, on_page=True)
    bodies = {message.seq: printable_data(message.to_dict()) for message in (*messages, *later)}
    # The newest messages get the colour budget first, because a page opens at its end.
    return list(_make_views(messages[::-1], bodies, renderer, mark_hidden=mark_hidden))[::-1]


def document_views(
    messages: Sequence[Message], bodies: Bodies, *, mark_hidden: bool = True
) -> Iterator[MessageView]:
    """Yield all messages of a session for a document. `bodies` must already be redacted."""
    renderer = _Renderer(_MAX_COLOURED_IN_DOCUMENT, on_page=False)
    return _make_views(messages, bodies, renderer, mark_hidden=mark_hidden)


def _make_views(
    messages: Sequence[Message], bodies: Bodies, renderer: _Renderer, *, mark_hidden: bool
) -> Iterator[MessageView]:
    """Yield the messages in the given order. `bodies` may include later messages with results."""
    parts = {seq: list(read_message(body)) for seq, body in bodies.items()}
    results = _results_by_call({message.seq for message in messages}, bodies, parts)
    placed_ids = {id(result) for result, _ in results.values()}
    for message in messages:
        seq, body = message.seq, bodies[message.seq]
        other_parts = [part for part in parts[seq] if id(part) not in placed_ids]
        kind, line = kind_of(body), one_line(renderer.mask.cover(program_line(body)))
        # A message of a program without content, such as the place of a compaction, is not shown.
        if (parts[seq] and not other_parts) or (kind and not line):
            continue
        calls = tuple(_call_views(seq, parts[seq], results, bodies, renderer))
        thoughts = [text for text in _thinking_texts(other_parts) if text.strip()]
        role = body.get("role")
        role_name = role if isinstance(role, str) else "?"
        channel = (origin_of(body) or {}).get("channel")
        html = _text_html(body, other_parts, renderer)
        yield MessageView(
            seq=seq,
            at=message.at,
            hidden=message.hidden,
            role=role_name,
            kind="program" if line else role_name if role_name in _ROLES else "other",
            hidden_mark=message.hidden and mark_hidden,
            program_line=line,
            is_summary=kind == "summary",
            html=html,
            thoughts=tuple(map(renderer.markdown, thoughts)),
            pictures=tuple(_image_urls(parts[seq])),
            calls=calls,
            model=model_of(body),
            seconds=seconds_of(body),
            usage=usage_of(body),
            interrupted=interruption(body),
            origin=channel if isinstance(channel, str) else "",
        )


def prompt_line(body: Mapping[str, Any]) -> str:
    """Return the user's prompt in one line, without pictures."""
    return one_line(prompt_text(body))


def prompt_text(body: Mapping[str, Any]) -> str:
    """Return the user's prompt without pictures."""
    content = body.get("content")
    if content is not None and not isinstance(content, str | list):
        return as_json(content)
    return _message_text(body, read_message(body))


def pretty_json(value: Any, budget: ColourBudget, mask: SecretMask) -> Markup:
    """Return a value or JSON text as indented HTML, and other text unchanged. Long text is cut."""
    # Longer JSON is not decoded, because indented JSON may be many times longer than compact JSON.
    if isinstance(value, str) and len(value) <= MAX_RENDERED:
        value = decode_json(value)
    if isinstance(value, str):
        html = escape(mask.with_placeholders(cut_text(value)))
    else:
        html = coloured_code(mask.with_placeholders(format_json(value)), "json", budget)
    return mask.with_buttons(html)


def _text_html(body: Mapping[str, Any], parts: Sequence[Part], renderer: _Renderer) -> Markup:
    """Return a message's text as HTML, after its tool results whose call is not on the page."""
    results = [_result_text(part) for part in parts if isinstance(part, ToolResult)]
    content = body.get("content")
    if not results and content is not None and not isinstance(content, str | list):
        json_html = pretty_json(content, renderer.colours, renderer.mask)
        return Markup("<pre>{}</pre>").format(json_html)
    text = _message_text(body, parts)
    if isinstance(content, str) and interruption(body):
        # The page shows the interruption and its reason, so the mark for the model is not needed.
        text = text.removesuffix(_INTERRUPTED_MARK).rstrip()
    html = [
        _blocks_html(result_blocks(result, renderer.diffs), "Result", renderer)
        for result in results
    ]
    if text or not html:
        html.append(renderer.markdown(text))
    return Markup().join(html)


def _message_text(body: Mapping[str, Any], parts: Iterable[Part]) -> str:
    return "\n".join(filter(None, (_part_text(part, body) for part in parts)))


def _part_text(part: Part, body: Mapping[str, Any]) -> str:
    match part:
        case TextPart():
            return part.text
        case FilePart() if part.value is body.get("audio"):
            return part.content if isinstance(part.content, str) else "[audio]"
        case UnknownPart() if part.field != "content":
            return as_json({part.field: part.value})
        case FilePart() | UnknownPart():
            return text_of([part.value])
    return ""


def _thinking_texts(parts: Iterable[Part]) -> Iterator[str]:
    thoughts = [part for part in parts if isinstance(part, ThinkingPart)]
    for part in thoughts:
        if part.in_content:
            yield part.text or f"[{type_of(part.value)}]"
    # Some providers send the same text in two fields. Show only the first field.
    yield from [part.text for part in thoughts if not part.in_content and part.text][:1]


def _image_urls(parts: Iterable[Part]) -> Iterator[str]:
    for part in parts:
        if isinstance(part, ImagePart):
            yield part.url
        elif isinstance(part, ToolResult) and isinstance(part.content, Mapping | list):
            yield from _image_urls(read_content(part.content))


# --- calls and results -----------------------------------------------------------------------


def _results_by_call(
    calling_seqs: Container[int], bodies: Bodies, parts: Mapping[int, Sequence[Part]]
) -> ResultsByCall:
    """Return the results of the calls in the messages with the seqs `calling_seqs`."""
    results: ResultsByCall = {}
    open_calls: dict[str | None, list[tuple[int, int]]] = {}
    for seq, message_parts in parts.items():
        if seq in calling_seqs and (calls := _calls_in(message_parts)):
            # Items of the Responses API have no role. An answer has several: none ends open calls.
            if "role" in bodies[seq]:
                # Calls with other ids stay open, because their results may follow later.
                for call_id in {None, *(call.id for call in calls)}:
                    open_calls.pop(call_id, None)
            for index, call in enumerate(calls):
                open_calls.setdefault(call.id, []).append((seq, index))
        for part in message_parts:
            if isinstance(part, ToolResult) and (positions := open_calls.get(part.id)):
                results[positions.pop(0)] = part, seq
    return results


def _calls_in(parts: Iterable[Part]) -> list[ToolCall]:
    """Return each call of a message once, even if it is in both `tool_calls` and the content."""
    calls = [part for part in parts if isinstance(part, ToolCall)]
    listed_ids = {call.id for call in calls if not call.in_content}
    return [call for call in calls if not call.in_content or call.id not in listed_ids]


def _call_views(
    seq: int,
    parts: Iterable[Part],
    results: ResultsByCall,
    bodies: Bodies,
    renderer: _Renderer,
) -> Iterator[ToolCallView]:
    for index, call in enumerate(_calls_in(parts)):
        result, result_seq = results.get((seq, index), (None, seq))
        text = None if result is None else _result_text(result)
        failed = result is not None and (has_failed(bodies[result_seq]) or result.is_error)
        path = "" if failed else find_read_path(call.arguments)
        yield ToolCallView(
            name=call.name,
            line=renderer.mask.preview(summary_source(call.arguments)),
            arguments=_blocks_html(
                argument_blocks(call.arguments, renderer.diffs), "Arguments", renderer
            ),
            result=None
            if text is None
            else _blocks_html(result_blocks(text, renderer.diffs, path=path), "Result", renderer),
            pictures=tuple(_image_urls([result])) if result and result_seq != seq else (),
            seconds=None if result is None else seconds_of(bodies[result_seq]),
            failed=failed,
            error=renderer.mask.preview(error_line(text)) if failed and text else "",
        )


def _result_text(result: ToolResult) -> str:
    is_part = isinstance(result.content, Mapping) and type_of(result.content)
    return text_of([result.content] if is_part else result.content)


# --- blocks of calls and results -------------------------------------------------------------


def _blocks_html(blocks: Sequence[ToolBlock], label: str, renderer: _Renderer) -> Markup:
    """Return blocks as HTML. `label` is for the first block."""
    button = _COPY_BUTTON if renderer.on_page else Markup()
    html_blocks = []
    for index, block in enumerate(blocks):
        default_label = _block_label(block, label, is_first=index == 0)
        block_label = renderer.mask.preview(block.label) or default_label
        content = _block_html(block, renderer)
        html_blocks.append(_BLOCK_FRAME.format(block.kind, block_label, button, content))
    return renderer.mask.with_buttons(Markup().join(html_blocks))


def _block_label(block: ToolBlock, label: str, *, is_first: bool) -> str:
    if is_first:
        return {"shell": "Command", "checklist": "Steps"}.get(block.kind, label)
    return "More" if block.kind == "json" else ""


def _block_html(block: ToolBlock, renderer: _Renderer) -> Markup:
    """Return the content of a block as HTML with placeholders for its secrets."""
    match block.kind:
        case "diff":
            return _diff_html(block, renderer.mask)
        case "checklist":
            return _checklist_html(block, renderer.mask)
        case "shell":
            code = renderer.code(renderer.mask.with_placeholders(block.text), "bash")
            return Markup('<pre class="shell">{}</pre>').format(code)
    return _folded_html(block.text, "json" if block.kind == "json" else block.language, renderer)


def _diff_html(block: ToolBlock, mask: SecretMask) -> Markup:
    # The lines are masked as one text, because a private key has several lines.
    texts = mask.with_placeholders("\n".join(line.text for line in block.lines)).split("\n")
    if len(texts) != len(block.lines):
        text = mask.with_placeholders(diff_text(block.lines))
        return Markup('<pre class="diff">{}</pre>').format(text)
    row = Markup('<span class="{}"><i>{}</i>{}\n</span>')
    rows = Markup().join(
        row.format("hunk" if line.kind == "head" else line.kind, line.sign, text)
        for line, text in zip(block.lines, texts, strict=True)
    )
    return Markup('<pre class="diff">{}</pre>{}').format(rows, _omitted_html(block, "more line"))


def _checklist_html(block: ToolBlock, mask: SecretMask) -> Markup:
    row = Markup('<li class="{}"><span role="img" aria-label="{}">{}</span> {}</li>\n')
    rows = Markup().join(
        row.format(item.state, *_CHECKBOXES[item.state], mask.with_placeholders(item.text))
        for item in block.items
    )
    return Markup('<ul class="checklist">{}</ul>{}').format(rows, _omitted_html(block, "more item"))


def _omitted_html(block: ToolBlock, noun: str) -> Markup:
    text = plural(block.omitted, noun)
    return Markup('<p class="cut">{}</p>').format(text) if block.omitted else Markup()


def _folded_html(text: str, language: str, renderer: _Renderer) -> Markup:
    """Return a text as HTML. A long text shows only its start; the rest can be unfolded."""
    text = renderer.mask.with_placeholders(text.rstrip("\n"))
    line_count = text.count("\n") + 1
    if line_count <= MAX_OPEN_LINES and len(text) <= 2 * _MAX_PREVIEW_LENGTH:
        return Markup("<pre>{}</pre>").format(renderer.code(text, language))
    end = renderer.mask.cut_position(text, _find_preview_end(text))
    start, rest = text[:end].removesuffix("\n"), text[end:]
    size = plural(line_count, "line") if line_count > 1 else plural(len(text), "character")
    return Markup(
        '<pre>{}</pre><details class="rest"><summary>{} · show all</summary><pre>{}</pre></details>'
    ).format(renderer.code(start, language), size, rest)


def _find_preview_end(text: str) -> int:
    """Return the index at which the preview of a text ends."""
    end = 0
    for _ in range(MAX_PREVIEW_LINES):
        line_end = text.find("\n", end, _MAX_PREVIEW_LENGTH)
        if line_end < 0:
            return end or _MAX_PREVIEW_LENGTH
        end = line_end + 1
    return end
