"""Shortens a turn that is too long: old tool results first, the newest messages last.

No text is lost: a pointer to the seq in the log replaces each elided text.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from stenolog.context.request_messages import NO_RESULT, SENT_REASONING_FIELDS, RequestMessage
from stenolog.messages import THINKING_TYPES, Body, as_json, calls_of, results_of, text_of
from stenolog.tokens import Tokens


class ShortenedTurn(Struct, frozen=True, kw_only=True):
    """A turn that fits the budget."""

    entries: list[RequestMessage]
    elided: int
    """Number of shortened messages."""
    left_out: tuple[int | None, ...]
    """Seqs of the messages that were left out of the turn."""


def pointer(text: str, seq: int | None, tokens: Tokens) -> str:
    """Return the replacement for an elided text, with its number of tokens and its seq."""
    location = "" if seq is None else f"; full text at seq {seq}"
    return f"[… elided: {tokens.text(text):,} tokens{location}]"


def cut_middle(text: str, keep_tokens: int, tokens: Tokens, *, mark: str) -> str:
    """Return start and end of a text with `mark` between them, in about `keep_tokens` tokens."""
    share = keep_tokens / max(tokens.text(text), 1)
    while share > 0.01:
        kept_length = int(len(text) * share)
        tail = kept_length // 3
        short = f"{text[: kept_length - tail]}\n{mark}\n{text[len(text) - tail :] if tail else ''}"
        if tokens.text(short) <= keep_tokens:
            return short.rstrip("\n")
        share *= 0.8
    return mark


class _Shortening:
    """A turn that is shortened step by step until it fits."""

    def __init__(self, entries: Sequence[RequestMessage], tokens: Tokens) -> None:
        self.entries = list(entries)
        self.tokens = tokens
        self.costs = [tokens.message(entry.body) for entry in entries]
        self.elided: set[int] = set()
        self.left_out: list[int] = []
        user_indexes = [at for at, entry in enumerate(entries) if _is_user(entry)]
        self.newest_user = user_indexes[-1] if user_indexes else -1
        self.last_step = _last_step_index(entries)

    def fits(self, budget: int) -> bool:
        return sum(self.costs) <= budget

    def shorten(self, budget: int) -> None:
        """Shorten the turn until it fits, or as far as possible."""
        older_indexes = range(self.last_step)
        newest_indexes = range(self.last_step, len(self.entries))
        steps: list[Callable[[], None]] = [
            partial(self._elide_results, older_indexes, budget),
            partial(self._cut_results, newest_indexes, budget, min_tokens=budget // 4),
            partial(self._elide_speech, older_indexes, budget),
            partial(self._cut_results, newest_indexes, budget, min_tokens=0),
            partial(self._elide_speech, newest_indexes, budget),
            partial(self._leave_out_steps, budget),
            partial(self._remove_thinking, budget),
        ]
        for step in steps:
            if self.fits(budget):
                return
            step()

    def _elide_results(self, indexes: Sequence[int], budget: int) -> None:
        for at in indexes:
            if self.fits(budget):
                return
            if _is_result(self.entries[at]):
                self._replace_body(at, _with_elided_results(self.entries[at], 0, self.tokens))

    def _cut_results(self, indexes: Sequence[int], budget: int, *, min_tokens: int) -> None:
        """Cut tool results to equal shares of the tokens that the other messages leave."""
        result_indexes = [at for at in indexes if _is_result(self.entries[at])]
        other_tokens = sum(self.costs) - sum(self.costs[at] for at in result_indexes)
        tokens_left = max(budget - other_tokens, min_tokens)
        for index, at in enumerate(sorted(result_indexes, key=lambda at: self.costs[at])):
            share = tokens_left // (len(result_indexes) - index)
            if self.costs[at] > share:
                self._cut_result_to(at, share)
            tokens_left -= self.costs[at]

    def _cut_result_to(self, at: int, share: int) -> None:
        entry = self.entries[at]
        overhead = self.tokens.message({**entry.body, "content": ""})
        for keep in (share - overhead, (share - overhead) // 2, 0):
            self._replace_body(at, _with_elided_results(entry, max(keep, 0), self.tokens))
            if self.costs[at] <= share:
                return

    def _elide_speech(self, indexes: Sequence[int], budget: int) -> None:
        for at in indexes:
            if self.fits(budget):
                return
            if self.entries[at].body["role"] == "assistant":
                self._replace_body(at, _with_elided_speech(self.entries[at], self.tokens))

    def _leave_out_steps(self, budget: int) -> None:
        """Leave out calls with their results, oldest first; the turn's first message goes last."""
        first = 1 if self.entries and _is_user(self.entries[0]) else 0
        dropped_indexes: set[int] = set()
        for step in [*_group_steps(self.entries, first), *([[0]] if first else [])]:
            if sum(self.costs) - sum(self.costs[at] for at in dropped_indexes) <= budget:
                break
            if self.newest_user not in step and len(self.entries) - 1 not in step:
                dropped_indexes.update(step)
        self.left_out = sorted(dropped_indexes)
        for at in dropped_indexes:
            self.costs[at] = 0

    def _remove_thinking(self, budget: int) -> None:
        """Remove thinking, oldest first. A pointer cannot replace thinking."""
        for at in range(len(self.entries)):
            if self.fits(budget):
                return
            if at not in self.left_out:
                self._replace_body(at, _without_thinking(self.entries[at].body))

    def _replace_body(self, index: int, body: Body) -> None:
        cost = self.tokens.message(body)
        if cost < self.costs[index]:
            self.entries[index] = replace(self.entries[index], body=body)
            self.costs[index] = cost
            self.elided.add(index)

    def result(self) -> ShortenedTurn:
        dropped_indexes = set(self.left_out)
        return ShortenedTurn(
            entries=[entry for at, entry in enumerate(self.entries) if at not in dropped_indexes],
            elided=len(self.elided - dropped_indexes),
            left_out=tuple(self.entries[at].seq for at in self.left_out),
        )


def _is_result(entry: RequestMessage) -> bool:
    return bool(results_of(entry.body))


def _is_user(entry: RequestMessage) -> bool:
    return entry.body["role"] == "user" and not _is_result(entry)


def _last_step_index(entries: Sequence[RequestMessage]) -> int:
    """Return the index of the newest message with tool calls, if only results follow it.

    Otherwise return the number of entries.
    """
    for at in range(len(entries) - 1, -1, -1):
        if calls_of(entries[at].body):
            return at
        if not _is_result(entries[at]):
            break
    return len(entries)


def _group_steps(entries: Sequence[RequestMessage], first: int) -> list[list[int]]:
    """Group each call with its results; every other message forms a group by itself."""
    steps: list[list[int]] = []
    for at in range(first, len(entries)):
        if _is_result(entries[at]) and steps:
            steps[-1].append(at)
        else:
            steps.append([at])
    return steps


def _with_elided_results(entry: RequestMessage, keep_tokens: int, tokens: Tokens) -> Body:
    body = entry.body
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


def _without_thinking(body: Body) -> Body:
    fields = {name: value for name, value in body.items() if name not in SENT_REASONING_FIELDS}
    if isinstance(content := fields["content"], list):
        other_parts = [part for part in content if part.get("type") not in THINKING_TYPES]
        fields["content"] = other_parts or content
    return fields


def _with_elided_speech(entry: RequestMessage, tokens: Tokens) -> Body:
    body = dict(entry.body)
    content = body.get("content")
    if isinstance(content, str) and content:
        body["content"] = _shorten_text(content, entry.seq, tokens)
    elif isinstance(content, list):
        body["content"] = [_elided_part(part, entry.seq, tokens) for part in content]
    if body.get("tool_calls"):
        body["tool_calls"] = [_elided_call(call, entry.seq, tokens) for call in body["tool_calls"]]
    return body


def _elided_part(part: Mapping[str, Any], seq: int | None, tokens: Tokens) -> Mapping[str, Any]:
    if isinstance(part.get("text"), str):
        return {**part, "text": _shorten_text(part["text"], seq, tokens)}
    if part.get("type") == "tool_use":
        short = _elided_arguments(part["input"], seq, tokens)
        return {**part, "input": short} if short is not None else part
    return part


def _elided_call(call: Body, seq: int | None, tokens: Tokens) -> Body:
    function = call.get("function")
    if not isinstance(function, Mapping):
        return call
    short = _elided_arguments(function.get("arguments"), seq, tokens)
    if short is None:
        return call
    return {**call, "function": {**function, "arguments": as_json(short)}}


def _elided_arguments(arguments: Any, seq: int | None, tokens: Tokens) -> Body | None:
    """Return arguments that point to the full arguments; None if the full arguments are shorter."""
    text = arguments if isinstance(arguments, str) else as_json(arguments)
    short = {"elided": pointer(text, seq, tokens)}
    return short if tokens.text(as_json(short)) < tokens.text(text) else None


def _shorten_result(content: Any, seq: int | None, keep_tokens: int, tokens: Tokens) -> Any:
    """Shorten a tool result to about `keep_tokens` tokens, or replace it by a pointer.

    A short result is returned unchanged.
    """
    text = text_of(content)
    cost = _content_tokens(content, tokens)
    if text == NO_RESULT or cost <= keep_tokens:
        return content
    mark = pointer(text, seq, tokens)
    short = cut_middle(text, keep_tokens, tokens, mark=mark) if keep_tokens > 0 else mark
    return short if _content_tokens(short, tokens) < cost else content


def _content_tokens(content: Any, tokens: Tokens) -> int:
    """Return the number of tokens of a message's content, including parts that are not text."""
    return tokens.message({"content": content}) - tokens.message({})


def _shorten_text(text: str, seq: int | None, tokens: Tokens) -> str:
    mark = pointer(text, seq, tokens)
    return mark if tokens.text(mark) < tokens.text(text) else text


def shorten_turn(
    entries: Sequence[RequestMessage], budget: int, tokens: Tokens
) -> ShortenedTurn | None:
    """Return the turn within the budget, or None if even its minimum is too long."""
    shortening = _Shortening(entries, tokens)
    shortening.shorten(budget)
    return shortening.result() if shortening.fits(budget) else None


def minimum_tokens(entries: Sequence[RequestMessage], tokens: Tokens) -> tuple[int, int]:
    """Return the tokens of the newest user message, and the minimum for the rest of its turn."""
    shortening = _Shortening(entries, tokens)
    message_tokens = shortening.costs[shortening.newest_user] if shortening.newest_user >= 0 else 0
    shortening.shorten(0)
    return message_tokens, sum(shortening.costs) - message_tokens
