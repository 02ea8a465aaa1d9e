"""The messages to send to the model: always valid, always within the budget."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from stenolog.context.request_messages import (
    FIRST_USER_CONTENT,
    NO_RESULT,
    SENT_REASONING_FIELDS,
    ProviderRequirements,
    RequestMessage,
    finish_messages,
    to_request_messages,
)
from stenolog.errors import ContextTooSmall, UsageError
from stenolog.messages import THINKING_TYPES, Body, as_json, calls_of, results_of, seq_of, text_of
from stenolog.records import Message
from stenolog.tokens import Tokens


class Limits(Struct, frozen=True, kw_only=True):
    """Limits of a request, and thresholds for summarizing. Raises UsageError for invalid values."""

    max_context_tokens: int = 32_000
    """Maximum tokens of system prompt, tools, memory, history and answer together."""
    max_history_messages: int = 50
    """Number of messages above which the oldest are summarized, however short they are."""
    reserve: int | None = None
    """Tokens reserved for the answer. None means a quarter of the context, at most 4,096."""

    def __post_init__(self) -> None:
        for name in ("max_context_tokens", "max_history_messages", "reserve"):
            value = getattr(self, name)
            if name == "reserve" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UsageError(f"{name} must be a whole number of at least 1, not {value!r}")
        if self.answer >= self.max_context_tokens:
            raise UsageError(
                f"reserve must be less than max_context_tokens ({self.max_context_tokens:,}), "
                f"not {self.answer:,}"
            )

    @property
    def answer(self) -> int:
        """Tokens reserved for the answer."""
        if self.reserve is not None:
            return self.reserve
        return max(min(4_096, self.max_context_tokens // 4), 1)

    @property
    def room(self) -> int:
        """Tokens available for the whole request."""
        return self.max_context_tokens - self.answer

    def history(self, fixed: int) -> int:
        """Return the tokens left for summary and history if the other parts take `fixed` tokens."""
        return max(self.room - fixed, 0)

    def summary(self, fixed: int = 0) -> int:
        """Return the maximum tokens of a summary. A longer summary could displace messages."""
        return max(self.history(fixed) // 8, self.room // 32)

    def enough_for(self, sent: int) -> int:
        """Return the smallest max_context_tokens with which `sent` tokens can be sent."""
        if self.reserve is not None:
            return sent + self.reserve
        # The answer gets a quarter of the context, which is a third of the tokens that are sent.
        return sent + max(min(4_096, -(-sent // 3)), 1)

    def at_most(self, max_context_tokens: int) -> "Limits":
        """Return these limits, reduced for a model with a smaller context."""
        if max_context_tokens >= self.max_context_tokens:
            return self
        smaller_context = max(max_context_tokens, 2)
        reserve = None if self.reserve is None else min(self.reserve, max(smaller_context // 4, 1))
        return replace(self, max_context_tokens=smaller_context, reserve=reserve)


SUMMARY_BEGINS: Final = "[Summary of the earlier conversation]"
SUMMARY_ENDS: Final = "[End of the summary]"
# A marker is changed, not removed: the text around a removed marker could form a new marker.
_SUMMARY_MARKER: Final = re.compile(r"\[(?=\s*(?:summary of|end of the)\b)", re.IGNORECASE)

_MAX_ATTEMPTS: Final = 4
"""Maximum number of selections to try for each combination of summary and memory."""

_Messages = Sequence[Message | Mapping[str, Any]]


class Window(Struct, frozen=True, kw_only=True):
    """The messages to send, and how much was shortened or left out to make them fit."""

    messages: list[Body]
    """Messages in OpenAI's chat format, the system prompt first."""
    tokens: int
    """Estimated tokens of the messages and the tools."""
    budget: int
    """Maximum tokens of the messages and the tools."""
    elided: int = 0
    """Number of shortened messages of the newest turn."""
    left_out: int = 0
    """Number of history messages that are not included."""
    memory_left_out: bool = False
    """Whether the recalled memory did not fit."""
    summary_cut: bool = False
    """Whether the summary was cut or left out."""
    upto: int = 0
    """Seq of the newest stored message that was considered."""


def build_window(
    history: _Messages,
    summary: str = "",
    *,
    system: str = "",
    tools: Sequence[Mapping[str, Any]] = (),
    memory: str = "",
    limits: Limits | None = None,
    needs: ProviderRequirements | None = None,
    tokens: Tokens | None = None,
) -> Window:
    """Return the window for this history: its newest turn, and as many older turns as fit.

    Raises ContextTooSmall if even the minimum does not fit: the system prompt, the tools, the
    newest user message, and the parts of its turn that cannot be elided. Raises UnsupportedFormat
    if a message cannot be sent because of its format.
    """
    limits, needs, tokens = limits or Limits(), needs or ProviderRequirements(), tokens or Tokens()
    request = _Request(system, summary, memory, tools, limits, needs, tokens)
    return request.build_window(history)


class Selection(Struct, frozen=True, kw_only=True):
    """The messages of the history that are sent. `elided` and `left_out`: as in Window."""

    entries: list[RequestMessage]
    elided: int = 0
    """Number of shortened messages."""
    left_out: int = 0
    """Number of messages that are not sent."""


class _Request(Struct, frozen=True):
    system: str
    summary: str
    memory: str
    tools: Sequence[Mapping[str, Any]]
    limits: Limits
    needs: ProviderRequirements
    tokens: Tokens

    def build_window(self, history: _Messages) -> Window:
        entries = to_request_messages(history, self.needs)
        tools_tokens = self.tokens.tools(self.tools)
        budget = self.limits.room - tools_tokens
        for summary, memory in self._summary_and_memory_choices():
            # Joined texts may take more tokens than separate texts: retry with fewer messages.
            excess_tokens = 0
            for _ in range(_MAX_ATTEMPTS):
                attempt = self._try_selection(entries, summary, memory, budget - excess_tokens)
                if attempt is None:
                    break
                messages, selection, token_count = attempt
                if token_count <= budget:
                    return Window(
                        messages=messages,
                        tokens=token_count + tools_tokens,
                        budget=self.limits.room,
                        elided=selection.elided,
                        left_out=selection.left_out,
                        memory_left_out=bool(self.memory) and not memory,
                        summary_cut=summary != self.summary,
                        upto=max([seq_of(message) or 0 for message in history], default=0),
                    )
                excess_tokens += token_count - budget
        raise self._make_too_small_error(entries, tools_tokens)

    def _summary_and_memory_choices(self) -> list[tuple[str, str]]:
        """Return the combinations of summary and memory to try, best first.

        A combination is used if the newest turn fits, even if older turns do not. Memory and
        summary are left out only if the newest turn, although shortened, does not fit beside them.
        """
        max_tokens = self.limits.summary()
        summary = self.summary
        if self.tokens.text(summary) > max_tokens:
            summary = cut_middle(summary, max_tokens, self.tokens, mark="[… cut]")
        short_summary = (
            cut_middle(summary, max_tokens // 4, self.tokens, mark="[… cut]") if summary else ""
        )
        choices = [(summary, self.memory), (summary, ""), (short_summary, ""), ("", "")]
        return list(dict.fromkeys(choices))

    def _try_selection(
        self, entries: Sequence[RequestMessage], summary: str, memory: str, budget: int
    ) -> tuple[list[Body], Selection, int] | None:
        """Return the messages, the chosen part of the history, and the tokens of the messages.

        Returns None if the newest turn does not fit, even shortened.
        """
        complete_selection = Selection(entries=list(entries))
        messages = self._make_messages(summary, memory, complete_selection)
        token_count = self._count_tokens(messages)
        if token_count <= budget:
            return messages, complete_selection, token_count
        # The note about left-out messages is measured with the largest possible count.
        longest_system_messages = self._make_system_messages(summary, memory, left_out=len(entries))
        if self.needs.user_first:
            longest_system_messages.append({"role": "user", "content": FIRST_USER_CONTENT})
        selection = self._choose_turns(
            entries, budget - self._count_tokens(longest_system_messages)
        )
        if selection is None:
            return None
        messages = self._make_messages(summary, memory, selection)
        return messages, selection, self._count_tokens(messages)

    def _make_messages(self, summary: str, memory: str, selection: Selection) -> list[Body]:
        system_messages = self._make_system_messages(summary, memory, left_out=selection.left_out)
        bodies = [entry.body for entry in selection.entries]
        return finish_messages([*system_messages, *bodies], self.needs)

    def _choose_turns(self, entries: Sequence[RequestMessage], budget: int) -> Selection | None:
        """Return the newest turns that fit; a newest turn that does not fit is shortened."""
        if not entries:
            return Selection(entries=[]) if budget >= 0 else None
        older_turns = [list(turn) for _, turn in groupby(entries, attrgetter("turn"))]
        newest_turn = older_turns.pop()
        tokens_left = budget - self._count_tokens(entry.body for entry in newest_turn)
        if tokens_left < 0:
            shortened = shorten_turn(newest_turn, budget, self.tokens)
            if shortened is None:
                return None
            return replace(shortened, left_out=shortened.left_out + sum(map(len, older_turns)))
        chosen_turns = [newest_turn]
        while (
            older_turns
            and (token_count := self._count_tokens(entry.body for entry in older_turns[-1]))
            <= tokens_left
        ):
            tokens_left -= token_count
            chosen_turns.insert(0, older_turns.pop())
        chosen_entries = [entry for turn in chosen_turns for entry in turn]
        return Selection(entries=chosen_entries, left_out=sum(map(len, older_turns)))

    def _count_tokens(self, bodies: Iterable[Body]) -> int:
        return sum(map(self.tokens.message, bodies))

    def _make_system_messages(self, summary: str, memory: str, *, left_out: int) -> list[Body]:
        """Return a list with the system message; empty if the message has no text."""
        texts = [self.system]
        if summary:
            # A message quoted in the summary must not be able to end or start a summary.
            escaped_summary = _SUMMARY_MARKER.sub("(", summary)
            texts.append(f"{SUMMARY_BEGINS}\n{escaped_summary}\n{SUMMARY_ENDS}")
        if left_out:
            texts.append(f"[{left_out:,} earlier messages are left out here; the log has them]")
        texts.append(memory)
        content = "\n\n".join(text for text in texts if text.strip())
        return [{"role": "system", "content": content}] if content else []

    def _make_too_small_error(
        self, entries: Sequence[RequestMessage], tools_tokens: int
    ) -> ContextTooSmall:
        """Return an error that lists the required tokens and says which setting to change."""
        newest_turn = [entry for entry in entries if entry.turn == entries[-1].turn]
        message_tokens, rest_tokens = minimum_tokens(newest_turn, self.tokens)
        if self.needs.user_first:
            rest_tokens += self._count_tokens([{"role": "user", "content": FIRST_USER_CONTENT}])
        required_tokens = {
            "the system prompt": self._count_tokens(
                self._make_system_messages("", "", left_out=len(entries))
            ),
            "the tools": tools_tokens,
            "the newest user message": message_tokens,
            "the rest of its turn": rest_tokens,
        }
        limits, total = self.limits, sum(required_tokens.values())
        needed = limits.enough_for(total)
        details = ", ".join(
            f"{name} {tokens:,}" for name, tokens in required_tokens.items() if tokens
        )
        advice = f"or shorten {max(required_tokens, key=lambda name: required_tokens[name])}"
        if limits.answer > total:
            advice = f"or lower reserve, which keeps {limits.answer:,} free for the answer"
        return ContextTooSmall(
            f"max_context_tokens={limits.max_context_tokens:,} is too small: {details}, "
            f"and {limits.answer:,} for the answer; raise max_context_tokens to at least "
            f"{needed:,}, {advice}",
            needed=needed,
            limit=limits.max_context_tokens,
        )


# --- shortening -----------------------------------------------------------------------------------
# A turn that is too long is shortened: old tool results first, the newest messages last.
# A pointer to the seq in the log replaces each elided text, except thinking.


def shorten_turn(
    entries: Sequence[RequestMessage], budget: int, tokens: Tokens
) -> Selection | None:
    """Return the turn shortened to the budget, or None if the shortest form is too long."""
    shortener = _TurnShortener(entries, tokens)
    shortener.shorten(budget)
    return shortener.make_selection() if shortener.fits(budget) else None


def minimum_tokens(entries: Sequence[RequestMessage], tokens: Tokens) -> tuple[int, int]:
    """Return the tokens of the newest user message, and the minimum for the rest of the turn."""
    shortener = _TurnShortener(entries, tokens)
    user_index = shortener.newest_user_index
    message_tokens = shortener.token_counts[user_index] if user_index >= 0 else 0
    shortener.shorten(0)
    return message_tokens, sum(shortener.token_counts) - message_tokens


class _TurnShortener:
    """A turn that is shortened step by step until it fits."""

    def __init__(self, entries: Sequence[RequestMessage], tokens: Tokens) -> None:
        self.entries = list(entries)
        self.tokens = tokens
        self.token_counts = [tokens.message(entry.body) for entry in entries]
        self.elided: set[int] = set()
        self.left_out: set[int] = set()
        self.newest_user_index = max(
            (index for index, entry in enumerate(entries) if _is_user_message(entry)), default=-1
        )
        self.last_call_index = _last_call_index(entries)

    def fits(self, budget: int) -> bool:
        return sum(self.token_counts) <= budget

    def shorten(self, budget: int) -> None:
        """Shorten the turn until it fits, or as far as possible."""
        older_indexes = range(self.last_call_index)
        newest_indexes = range(self.last_call_index, len(self.entries))
        elide_result = partial(_elide_results, keep_tokens=0, tokens=self.tokens)
        elide_text = partial(_elide_texts, tokens=self.tokens)
        steps: list[Callable[[int], None]] = [
            partial(self._shorten_messages, older_indexes, elide_result),
            partial(self._cut_results, newest_indexes, min_tokens=budget // 4),
            partial(self._shorten_messages, older_indexes, elide_text),
            partial(self._cut_results, newest_indexes, min_tokens=0),
            partial(self._shorten_messages, newest_indexes, elide_text),
            self._leave_out_messages,
            partial(self._shorten_messages, range(len(self.entries)), _without_thinking),
        ]
        for step in steps:
            if self.fits(budget):
                return
            step(budget)

    def _shorten_messages(
        self, indexes: Sequence[int], shorten: Callable[[RequestMessage], Body], budget: int
    ) -> None:
        """Shorten these messages, oldest first, until the turn fits."""
        for index in indexes:
            if self.fits(budget):
                return
            if index not in self.left_out:
                self._replace_body(index, shorten(self.entries[index]))

    def _cut_results(self, indexes: Sequence[int], budget: int, *, min_tokens: int) -> None:
        """Cut tool results to equal shares of the tokens that the other messages leave.

        The shares together have at least `min_tokens` tokens.
        """
        result_indexes = [index for index in indexes if _has_results(self.entries[index])]
        other_tokens = sum(self.token_counts) - sum(self.token_counts[i] for i in result_indexes)
        tokens_left = max(budget - other_tokens, min_tokens)
        for rank, index in enumerate(sorted(result_indexes, key=lambda i: self.token_counts[i])):
            max_tokens = tokens_left // (len(result_indexes) - rank)
            if self.token_counts[index] > max_tokens:
                self._cut_result(index, max_tokens)
            tokens_left -= self.token_counts[index]

    def _cut_result(self, index: int, max_tokens: int) -> None:
        entry = self.entries[index]
        overhead = self.tokens.message({**entry.body, "content": ""})
        for kept_tokens in (max_tokens - overhead, (max_tokens - overhead) // 2, 0):
            self._replace_body(index, _elide_results(entry, max(kept_tokens, 0), self.tokens))
            if self.token_counts[index] <= max_tokens:
                return

    def _leave_out_messages(self, budget: int) -> None:
        """Leave out messages, oldest first, and calls only together with their results.

        A user message at the start of the turn goes last. The newest user message and the end of
        the turn stay.
        """
        first_index = 1 if self.entries and _is_user_message(self.entries[0]) else 0
        groups = _group_calls_with_results(self.entries, first_index)
        for group in [*groups, [0]] if first_index else groups:
            if self.fits(budget):
                break
            if self.newest_user_index not in group and len(self.entries) - 1 not in group:
                self.left_out.update(group)
                for index in group:
                    self.token_counts[index] = 0

    def _replace_body(self, index: int, body: Body) -> None:
        token_count = self.tokens.message(body)
        if token_count < self.token_counts[index]:
            self.entries[index] = replace(self.entries[index], body=body)
            self.token_counts[index] = token_count
            self.elided.add(index)

    def make_selection(self) -> Selection:
        return Selection(
            entries=[entry for i, entry in enumerate(self.entries) if i not in self.left_out],
            elided=len(self.elided - self.left_out),
            left_out=len(self.left_out),
        )


def _has_results(entry: RequestMessage) -> bool:
    return bool(results_of(entry.body))


def _is_user_message(entry: RequestMessage) -> bool:
    return entry.body["role"] == "user" and not _has_results(entry)


def _last_call_index(entries: Sequence[RequestMessage]) -> int:
    """Return the index of the newest message with tool calls.

    If there is none, or messages other than results follow it, return the number of entries.
    """
    for index in range(len(entries) - 1, -1, -1):
        if calls_of(entries[index].body):
            return index
        if not _has_results(entries[index]):
            break
    return len(entries)


def _group_calls_with_results(
    entries: Sequence[RequestMessage], first_index: int
) -> list[list[int]]:
    """Group each call with its results; every other message forms a group by itself."""
    groups: list[list[int]] = []
    for index in range(first_index, len(entries)):
        if _has_results(entries[index]) and groups:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def _elide_results(entry: RequestMessage, keep_tokens: int, tokens: Tokens) -> Body:
    body = entry.body
    if not _has_results(entry):
        return body
    if body["role"] == "tool":
        return {**body, "content": _shorten_result(body["content"], entry.seq, keep_tokens, tokens)}
    keep_tokens_each = keep_tokens // len(entry.seqs)
    return {
        **body,
        "content": [
            {**part, "content": _shorten_result(part["content"], seq, keep_tokens_each, tokens)}
            for part, seq in zip(body["content"], entry.seqs, strict=True)
        ],
    }


def _without_thinking(entry: RequestMessage) -> Body:
    """Return the message without thinking; no pointer to the log replaces the thinking."""
    fields = {
        name: value for name, value in entry.body.items() if name not in SENT_REASONING_FIELDS
    }
    if isinstance(content := fields["content"], list):
        other_parts = [part for part in content if part.get("type") not in THINKING_TYPES]
        fields["content"] = other_parts or content
    return fields


def _elide_texts(entry: RequestMessage, tokens: Tokens) -> Body:
    if entry.body["role"] != "assistant":
        return entry.body
    body = dict(entry.body)
    content = body.get("content")
    if isinstance(content, str) and content:
        body["content"] = _shorten_text(content, entry.seq, tokens)
    elif isinstance(content, list):
        body["content"] = [_elide_part(part, entry.seq, tokens) for part in content]
    if body.get("tool_calls"):
        body["tool_calls"] = [_elide_call(call, entry.seq, tokens) for call in body["tool_calls"]]
    return body


def _elide_part(part: Mapping[str, Any], seq: int | None, tokens: Tokens) -> Mapping[str, Any]:
    if isinstance(part.get("text"), str):
        return {**part, "text": _shorten_text(part["text"], seq, tokens)}
    if part.get("type") == "tool_use":
        short_arguments = _elide_arguments(part["input"], seq, tokens)
        return {**part, "input": short_arguments} if short_arguments is not None else part
    return part


def _elide_call(call: Body, seq: int | None, tokens: Tokens) -> Body:
    function = call.get("function")
    if not isinstance(function, Mapping):
        return call
    short_arguments = _elide_arguments(function.get("arguments"), seq, tokens)
    if short_arguments is None:
        return call
    return {**call, "function": {**function, "arguments": as_json(short_arguments)}}


def _elide_arguments(arguments: Any, seq: int | None, tokens: Tokens) -> Body | None:
    """Return arguments that point to the full arguments; None if the full arguments are shorter."""
    text = arguments if isinstance(arguments, str) else as_json(arguments)
    short_arguments = {"elided": pointer(text, seq, tokens)}
    return short_arguments if tokens.text(as_json(short_arguments)) < tokens.text(text) else None


def _shorten_result(content: Any, seq: int | None, keep_tokens: int, tokens: Tokens) -> Any:
    """Shorten a tool result to about `keep_tokens` tokens, or replace it by a pointer.

    A short result is returned unchanged.
    """
    text = text_of(content)
    token_count = _count_content_tokens(content, tokens)
    if text == NO_RESULT or token_count <= keep_tokens:
        return content
    mark = pointer(text, seq, tokens)
    short_text = cut_middle(text, keep_tokens, tokens, mark=mark) if keep_tokens > 0 else mark
    return short_text if _count_content_tokens(short_text, tokens) < token_count else content


def _count_content_tokens(content: Any, tokens: Tokens) -> int:
    """Return the number of tokens of a message's content, including parts that are not text."""
    return tokens.message({"content": content}) - tokens.message({})


def _shorten_text(text: str, seq: int | None, tokens: Tokens) -> str:
    mark = pointer(text, seq, tokens)
    return mark if tokens.text(mark) < tokens.text(text) else text


def cut_middle(text: str, keep_tokens: int, tokens: Tokens, *, mark: str) -> str:
    """Return start and end of a text with `mark` between them, in about `keep_tokens` tokens."""
    kept_share = keep_tokens / max(tokens.text(text), 1)
    while kept_share > 0.01:
        kept_length = int(len(text) * kept_share)
        tail_length = kept_length // 3
        tail = text[len(text) - tail_length :] if tail_length else ""
        short_text = f"{text[: kept_length - tail_length]}\n{mark}\n{tail}"
        if tokens.text(short_text) <= keep_tokens:
            return short_text.rstrip("\n")
        kept_share *= 0.8
    return mark


def pointer(text: str, seq: int | None, tokens: Tokens) -> str:
    """Return the replacement for an elided text, with the token count and the seq of the text."""
    location = "" if seq is None else f"; full text at seq {seq}"
    return f"[… elided: {tokens.text(text):,} tokens{location}]"
