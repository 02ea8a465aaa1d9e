"""The summary of a conversation as a value: six sections, rendered as Markdown and parsed back.

The summary is never rewritten as a whole. A model returns new lines and the labels of outdated
lines. All other lines stay, so no line is lost because a model forgot to repeat it. Lines are
dropped only if the summary is too long.
"""

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from msgspec import Struct

from stenolog.context.window import Limits, cut_middle, pointer
from stenolog.messages import (
    CallPosition,
    ToolCall,
    ToolResult,
    as_json,
    body_of,
    calls_of,
    pair_calls,
    results_of,
    role_of,
    text_of,
    text_parts_of,
)
from stenolog.providers.chat_model import COMPLETION_SIGNATURE, CompletionFunction, check_answer
from stenolog.providers.json_answers import read_object
from stenolog.providers.request_errors import read_overflow
from stenolog.records import Message
from stenolog.sessions.usage import SideUsage, count_answer
from stenolog.tokens import Tokens

SECTIONS: Final = {
    "goals": "Goals",
    "decisions": "Decisions",
    "facts": "Facts",
    "open_questions": "Open questions",
    "tool_outcomes": "Tool outcomes",
}
LAST_STATE: Final = "Last state"
MAX_LINE_CHARACTERS: Final = 400
QUOTE_PREFIX: Final = "User said: "
"""Prefix of lines that were quoted from user messages without a model."""

_LINES_SCHEMA: Final = {"type": "array", "items": {"type": "string"}}
SCHEMA: Final[Mapping[str, Any]] = {
    "type": "object",
    "properties": {
        **dict.fromkeys(SECTIONS, _LINES_SCHEMA),
        "last_state": {"type": "string"},
        "outdated": _LINES_SCHEMA,
    },
    "required": [*SECTIONS, "last_state", "outdated"],
    "additionalProperties": False,
}
"""Schema of the model's answer: new lines for each section, and labels of lines to remove."""

_LINE_PREFIXES: Final = re.compile(r"(?:(?:#+|[-*•]) )+")
"""Prefixes that make a line a heading or an item, if a space follows the prefix."""
# The sections lose lines in this order when a summary is too long.
_DROP_ORDER: Final = ("tool_outcomes", "open_questions", "decisions", "goals", "facts")


class Summary(Struct, frozen=True, kw_only=True):
    """A summary of the hidden part of a conversation, in sections."""

    goals: tuple[str, ...] = ()
    decisions: tuple[str, ...] = ()
    facts: tuple[str, ...] = ()
    open_questions: tuple[str, ...] = ()
    tool_outcomes: tuple[str, ...] = ()
    last_state: str = ""

    def lines(self, section: str) -> tuple[str, ...]:
        """Return the lines of a section."""
        lines: tuple[str, ...] = getattr(self, section)
        return lines

    def labels(self) -> dict[str, str]:
        """Return the lines by label, such as G1. A model refers to a line by its label."""
        return {
            f"{title[0]}{number}": line
            for name, title in SECTIONS.items()
            for number, line in enumerate(self.lines(name), start=1)
        }

    @property
    def count(self) -> int:
        """Number of lines in the sections."""
        return sum(len(self.lines(name)) for name in SECTIONS)


def render_summary(summary: Summary, *, labelled: bool = False) -> str:
    """Return the summary as Markdown; empty text for an empty summary."""
    blocks = []
    for name, title in SECTIONS.items():
        lines = [
            f"- [{title[0]}{number}] {line}" if labelled else f"- {line}"
            for number, line in enumerate(summary.lines(name), start=1)
        ]
        if lines:
            blocks.append("\n".join([f"## {title}", *lines]))
    if summary.last_state:
        blocks.append(f"## {LAST_STATE}\n{summary.last_state}")
    return "\n\n".join(blocks)


def parse_summary(text: str) -> Summary:
    """Parse a summary. Lines before the first known heading become facts."""
    name_by_title = {title: name for name, title in SECTIONS.items()} | {LAST_STATE: "last_state"}
    sections: dict[str, list[str]] = {name: [] for name in name_by_title.values()}
    section = "facts"
    for line in text.splitlines():
        heading = line.removeprefix("## ").strip() if line.startswith("## ") else None
        if heading in name_by_title:
            section = name_by_title[heading]
        elif line_text := line.strip().removeprefix("- ").strip():
            # Long lines are wrapped, not cut: text from another source is kept in full.
            sections[section] += textwrap.wrap(line_text, MAX_LINE_CHARACTERS)
    last_state = _clean_line(" ".join(sections.pop("last_state")))
    return Summary(
        last_state=last_state, **{name: _distinct_lines(lines) for name, lines in sections.items()}
    )


def update_summary(summary: Summary, answer: Mapping[str, Any]) -> Summary | None:
    """Return the summary with a model's answer merged in.

    Returns None if the answer has neither new lines nor a last state.
    """
    new_lines = {name: _parse_lines(answer.get(name)) for name in SECTIONS}
    raw_state = answer.get("last_state")
    last_state = _clean_line(raw_state) if isinstance(raw_state, str) else ""
    if not last_state and not any(new_lines.values()):
        return None
    outdated_lines = _find_outdated_lines(summary, _parse_lines(answer.get("outdated")))
    merged_lines = {
        name: _distinct_lines(
            [*(line for line in summary.lines(name) if line not in outdated_lines), *lines]
        )
        for name, lines in new_lines.items()
    }
    return Summary(last_state=last_state or summary.last_state, **merged_lines)


def shorten_summary(summary: Summary, limit: int, tokens: Tokens) -> Summary:
    """Return the summary within `limit` tokens.

    Quoted lines are dropped first and facts last. In each section, the oldest line is dropped
    first.
    """
    sections = {name: list(summary.lines(name)) for name in SECTIONS}
    last_state = summary.last_state
    while True:
        lines = {name: tuple(lines) for name, lines in sections.items()}
        shorter_summary = Summary(last_state=last_state, **lines)
        excess_tokens = tokens.text(render_summary(shorter_summary)) - limit
        if excess_tokens <= 0:
            return shorter_summary
        dropped_tokens = 0
        while dropped_tokens < excess_tokens and (line := _drop_line(sections)):
            dropped_tokens += tokens.text(line) + 1
        if dropped_tokens == 0:
            state_limit = max(limit - tokens.text(render_summary(Summary(last_state=" "))), 0)
            shorter_state = cut_middle(last_state, state_limit, tokens, mark="…").replace("\n", " ")
            is_shorter = state_limit > 0 and shorter_state != last_state
            return Summary(last_state=shorter_state if is_shorter else "")


def _drop_line(sections: Mapping[str, list[str]]) -> str:
    """Remove and return the least important line; empty if no line is left."""
    facts = sections["facts"]
    quote_index = next((i for i, line in enumerate(facts) if line.startswith(QUOTE_PREFIX)), None)
    if quote_index is not None:
        return facts.pop(quote_index)
    return next((sections[name].pop(0) for name in _DROP_ORDER if sections[name]), "")


def _find_outdated_lines(summary: Summary, labels: Sequence[str]) -> frozenset[str]:
    """Return the lines to remove; none if a model names more than two and more than half of all."""
    line_by_label = summary.labels()
    outdated_lines = {
        line_by_label[label] for raw in labels if (label := raw.strip("[] ")) in line_by_label
    }
    is_plausible = len(outdated_lines) <= max(2, len(line_by_label) // 2)
    return frozenset(outdated_lines if is_plausible else ())


def _parse_lines(field: Any) -> list[str]:
    """Return the lines in a field of an answer. The field is a list or a single text."""
    texts = [field] if isinstance(field, str) else field if isinstance(field, list) else []
    return [line for text in texts if isinstance(text, str) and (line := _clean_line(text))]


def _clean_line(text: str) -> str:
    """Return one line of bounded length that is not a heading."""
    line = " ".join(text.encode("utf-8", "replace").decode().split())
    if prefixes := _LINE_PREFIXES.match(line):
        line = line[prefixes.end() :]
    return _clip_text(line, MAX_LINE_CHARACTERS)


def _distinct_lines(lines: Sequence[str]) -> tuple[str, ...]:
    """Return each line once, in its first spelling, because models often repeat known lines."""
    spellings: dict[str, str] = {}
    for line in lines:
        spellings.setdefault(line.casefold(), line)
    return tuple(spellings.values())


INSTRUCTIONS: Final = """\
You keep the summary of a conversation between a user and an assistant that uses tools. You get the
summary so far, each line with a label, and the next part of the conversation. Answer with one JSON
object and nothing else:
- "goals", "decisions", "facts", "open_questions", "tool_outcomes": lists of NEW short lines from \
this part. Keep names, numbers, paths and dates exactly. Do not repeat lines of the summary so far.
- "last_state": one or two sentences on where things stand at the end of this part.
- "outdated": labels of lines of the summary so far that this part has made wrong or settled."""

_MAX_QUOTE_CHARACTERS: Final = 200
MAX_MODEL_CALLS: Final = 20
"""Approximate maximum number of model calls per summary.

If the calls are not enough, the oldest messages are only quoted.
"""
_MIN_PROMPT_TOKENS: Final = 256
"""If a prompt of at most this many tokens is rejected as too long, the model is given up."""


class SummaryWriter:
    """A writer of one summary with at most `max_tokens` tokens.

    `complete`: the model, or None. `limits`: limits of the model. `dropped_lines`: number of lines,
    old or new, that did not fit. `usage`: token counts of the model calls, as far as reported.
    """

    def __init__(
        self, complete: CompletionFunction | None, max_tokens: int, limits: Limits, tokens: Tokens
    ) -> None:
        self._complete = complete
        self._max_tokens = max_tokens
        self._tokens = tokens
        self._max_prompt_tokens = limits.room
        """Maximum tokens of a prompt; halved when the model rejects a prompt as too long."""
        self.usage: SideUsage = {}
        self.dropped_lines = 0
        self.fallback = "" if complete is not None else "no model was given"
        """Reason why some lines were written without the model; empty otherwise."""

    def write_summary(self, messages: Sequence[Message], old_summary: str) -> str:
        """Return the summary of `old_summary` and these messages. Raises no errors of the model."""
        summary = parse_summary(old_summary)
        remaining_messages = read_messages(messages)
        if self._complete is not None and (
            quoted_count := self._count_quoted_messages(remaining_messages)
        ):
            self.fallback = f"{quoted_count:,} messages did not fit into the prompts for the model"
            summary = self._with_quotes(summary, remaining_messages[:quoted_count])
            del remaining_messages[:quoted_count]
        while remaining_messages:
            count, prompt = self._build_prompt(remaining_messages, summary)
            try:
                answer = self._ask_model(prompt)
            except _PromptTooLong:
                continue
            updated_summary = None if answer is None else update_summary(summary, answer)
            if updated_summary is None:
                if self._complete is not None and not self.fallback:
                    self.fallback = "the model's answer could not be used"
                summary = self._with_quotes(summary, remaining_messages[:count])
            else:
                summary = self._shorten_summary(updated_summary)
            del remaining_messages[:count]
        return render_summary(summary)

    def _with_quotes(self, summary: Summary, messages: "Sequence[SummarizedMessage]") -> Summary:
        return self._shorten_summary(update_summary(summary, quote_messages(messages)) or summary)

    def _shorten_summary(self, summary: Summary) -> Summary:
        short_summary = shorten_summary(summary, self._max_tokens, self._tokens)
        self.dropped_lines += summary.count - short_summary.count
        return short_summary

    def _count_quoted_messages(self, messages: "Sequence[SummarizedMessage]") -> int:
        """Return how many of the oldest messages are quoted, not sent to the model; mostly 0.

        A tool call and its results are quoted together.
        """
        tokens_left = MAX_MODEL_CALLS * self._max_prompt_tokens // 2
        texts = list(message_texts(messages, self._max_prompt_tokens // 4, self._tokens))
        for index in range(len(texts) - 1, -1, -1):
            tokens_left -= self._tokens.text(texts[index])
            if tokens_left < 0:
                return next(i + 1 for i in range(index, len(messages)) if messages[i].ends_batch)
        return 0

    def _build_prompt(
        self, messages: "Sequence[SummarizedMessage]", summary: Summary
    ) -> tuple[int, list[dict[str, Any]]]:
        """Return the number of messages (at least 1) that fit into a prompt, and the prompt.

        A tool call is separated from its results only if the results do not fit into one prompt.
        """
        summary_text = render_summary(summary, labelled=True) or "(nothing yet)"
        prompt_start = f"Summary so far:\n{summary_text}\n\nNext part of the conversation:\n"
        fixed_tokens = self._tokens.text(INSTRUCTIONS) + self._tokens.text(prompt_start) + 16
        tokens_left = self._max_prompt_tokens - fixed_tokens
        texts: list[str] = []
        # A message takes at least four tokens, so later messages cannot fit.
        candidates = messages[: max(tokens_left // 4, 1)]
        for text in message_texts(candidates, max(tokens_left // 4, 32), self._tokens):
            tokens_left -= self._tokens.text(text) + 1
            if texts and tokens_left < 0:
                break
            texts.append(text)
        whole_batches = [i + 1 for i in range(len(texts)) if messages[i].ends_batch]
        texts = texts[: max(whole_batches, default=len(texts))]
        prompt = [
            {"role": "system", "content": INSTRUCTIONS},
            {"role": "user", "content": prompt_start + "\n".join(texts)},
        ]
        return len(texts), prompt

    def _ask_model(self, prompt: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
        """Return the model's answer; None if there is no readable answer. Raises _PromptTooLong."""
        if self._complete is None:
            return None
        try:
            answer = self._complete(prompt, schema=SCHEMA, max_tokens=max(256, self._max_tokens))
            answer = check_answer(answer, COMPLETION_SIGNATURE)
            count_answer(self.usage, answer)
        except Exception as error:
            # Any error of a client must still lead to a summary.
            if read_overflow(error) is not None and self._max_prompt_tokens > _MIN_PROMPT_TOKENS:
                self._max_prompt_tokens //= 2
                raise _PromptTooLong from error
            # The next request would probably fail, too, and each attempt may take a minute.
            self._complete = None
            # Leave out the text of the error, because some clients put API keys into error texts.
            self.fallback = f"the model failed with {type(error).__name__}"
            return None
        return read_object(answer) if isinstance(answer, str) else None


class _PromptTooLong(Exception):
    """The model rejected the prompt as too long; send a shorter prompt."""


class SummarizedMessage(Struct, frozen=True):
    """A message for a summary. Each of its tool results comes with the call that it answers."""

    seq: int
    role: str
    text: str
    calls: Sequence[ToolCall]
    results: Sequence[tuple[ToolResult, ToolCall | None]]
    ends_batch: bool
    """Whether no tool call of this or an earlier message has its result in a later message."""


def read_messages(messages: Sequence[Message]) -> list[SummarizedMessage]:
    """Return the messages with their tool calls and results."""
    bodies = [body_of(message) for message in messages]
    calls = [calls_of(body) for body in bodies]
    call_by_result: dict[CallPosition, ToolCall] = {}
    last_result_index = 0
    result_index_by_call = [0] * len(bodies)
    for (index, call_index), result_position in pair_calls(bodies).items():
        call_by_result[result_position] = calls[index][call_index]
        result_index_by_call[index] = max(result_index_by_call[index], result_position[0])
    summarized_messages: list[SummarizedMessage] = []
    for index, (message, body) in enumerate(zip(messages, bodies, strict=True)):
        last_result_index = max(last_result_index, result_index_by_call[index])
        summarized_messages.append(
            SummarizedMessage(
                seq=message.seq,
                role=role_of(body),
                text=text_parts_of(body),
                calls=calls[index],
                results=[
                    (result, call_by_result.get((index, result_index)))
                    for result_index, result in enumerate(results_of(body))
                ],
                ends_batch=last_result_index <= index,
            )
        )
    return summarized_messages


def message_texts(
    messages: Sequence[SummarizedMessage], max_tokens: int, tokens: Tokens
) -> Iterator[str]:
    """Yield for each message a text for the model, of at most about `max_tokens` tokens."""
    for message in messages:
        parts = [
            f"result of {call.name if call else 'a tool'}: {text_of(result.content)}"
            for result, call in message.results
        ]
        parts.append(message.text)
        parts += [f"calls {call.name}({_format_arguments(call)})" for call in message.calls]
        text = "\n".join(filter(None, parts))
        if tokens.text(text) > max_tokens:
            text = cut_middle(text, max_tokens, tokens, mark=pointer(text, message.seq, tokens))
        yield f"[{message.seq}] {message.role or 'note'}: {text}"


def quote_messages(messages: Sequence[SummarizedMessage]) -> dict[str, Any]:
    """Return quotes of these messages in the format of a model's answer."""
    facts: list[str] = []
    outcomes: list[str] = []
    last_state = ""
    for message in messages:
        for result, call in message.results:
            arguments = _clip_text(_format_arguments(call), 80) if call else ""
            call_text = f"{call.name}({arguments})" if call else "a tool"
            outcomes.append(f"{call_text}: {_clip_text(text_of(result.content), 120)}")
        text = _clip_text(message.text, _MAX_QUOTE_CHARACTERS)
        if text and message.role == "user":
            facts.append(QUOTE_PREFIX + text)
        if text and message.role in ("user", "assistant"):
            last_state = f"The {message.role} said last: {text}"
    return {"facts": facts, "tool_outcomes": outcomes, "last_state": last_state}


def _format_arguments(call: ToolCall) -> str:
    return call.arguments if isinstance(call.arguments, str) else as_json(call.arguments)


def _clip_text(text: str, max_characters: int) -> str:
    line = " ".join(text.split())
    return line if len(line) <= max_characters else line[: max_characters - 1] + "…"
