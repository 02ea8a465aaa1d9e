"""Writing a summary chunk by chunk, each time with the summary so far.

If the model fails on a chunk, shortened quotes of its messages are used instead. So there is always
a summary, and it always includes the previous one.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from msgspec import Struct

from stenolog.context.budget import Limits
from stenolog.context.overflow import read_overflow
from stenolog.context.shortening import cut_middle, pointer
from stenolog.context.summary import QUOTED, SCHEMA, Summary, bounded, parse, render, update
from stenolog.messages import (
    Spot,
    ToolCall,
    as_json,
    body_of,
    calls_of,
    pair,
    results_of,
    role_of,
    text_of,
    text_parts_of,
)
from stenolog.providers.chat_model import COMPLETION_SIGNATURE, CompletionFunction, check_answer
from stenolog.providers.json_answers import read_object
from stenolog.records import Message
from stenolog.tokens import Tokens

INSTRUCTIONS: Final = """\
You keep the summary of a conversation between a user and an assistant that uses tools. You get the
summary so far, each line with a label, and the next part of the conversation. Answer with one JSON
object and nothing else:
- "goals", "decisions", "facts", "open_questions", "tool_outcomes": lists of NEW short lines from \
this part. Keep names, numbers, paths and dates exactly. Do not repeat lines of the summary so far.
- "last_state": one or two sentences on where things stand at the end of this part.
- "outdated": labels of lines of the summary so far that this part has made wrong or settled."""

_QUOTE: Final = 200
MOST_QUESTIONS: Final = 20
"""Approximate maximum number of model calls per summary. Older messages are only quoted."""
_SMALLEST: Final = 256
"""A model that rejects this many tokens as too long is not asked again."""


class SummaryResult(Struct, frozen=True, kw_only=True):
    """A summary and how it was made."""

    text: str
    asked: int
    """Number of model calls."""
    fallback: str
    """Why some of it was made without the model. Empty: the model made all of it."""
    given_up: int
    """Number of lines, old or new, that did not fit."""


def write_summary(
    messages: Sequence[Message],
    previous: str,
    *,
    ask: CompletionFunction | None,
    most: int,
    limits: Limits,
    tokens: Tokens,
) -> SummaryResult:
    """Return the summary of `previous` and these messages in at most `most` tokens. Never fails."""
    return _SummaryWriter(ask, most, limits, tokens).run(messages, previous)


class _SummaryWriter:
    """A summary in progress."""

    def __init__(
        self, ask: CompletionFunction | None, most: int, limits: Limits, tokens: Tokens
    ) -> None:
        self._ask = ask
        self._most = most
        self._tokens = tokens
        self._size = limits.room
        self._asked = 0
        self._given_up = 0
        self._fallback = "" if ask is not None else "there is no model to ask"

    def run(self, messages: Sequence[Message], previous: str) -> SummaryResult:
        summary = parse(previous)
        unread = self._unread(messages) if self._ask is not None else 0
        if unread:
            self._fallback = f"{unread:,} messages were more than the model could be asked about"
            summary = self._extracted(summary, messages[:unread])
        waiting = list(messages[unread:])
        while waiting:
            taken, question = self._question(waiting, summary)
            answer: Mapping[str, Any] | None = None
            if self._ask is not None:
                try:
                    answer = self._answer(self._ask, question)
                except _TooLong:
                    continue
            updated = update(summary, answer) if answer is not None else None
            if updated is None:
                if self._ask is not None and not self._fallback:
                    self._fallback = "the model's answer could not be used"
                summary = self._extracted(summary, waiting[:taken])
            else:
                summary = self._bounded(updated)
            del waiting[:taken]
        return SummaryResult(
            text=render(summary),
            asked=self._asked,
            fallback=self._fallback,
            given_up=self._given_up,
        )

    def _extracted(self, summary: Summary, messages: Sequence[Message]) -> Summary:
        return self._bounded(update(summary, extract(messages)) or summary)

    def _bounded(self, summary: Summary) -> Summary:
        short = bounded(summary, self._most, self._tokens)
        self._given_up += summary.count - short.count
        return short

    def _unread(self, messages: Sequence[Message]) -> int:
        """Return the number of oldest messages that are only quoted; nearly always 0."""
        left = MOST_QUESTIONS * self._size // 2
        texts = list(transcript(messages, self._size // 4, self._tokens))
        for index in range(len(texts) - 1, -1, -1):
            left -= self._tokens.text(texts[index])
            if left < 0:
                return index + 1
        return 0

    def _question(
        self, waiting: Sequence[Message], summary: Summary
    ) -> tuple[int, list[dict[str, Any]]]:
        """Return how many messages (at least one) fit into a question, and the question."""
        known = render(summary, labelled=True) or "(nothing yet)"
        head = f"Summary so far:\n{known}\n\nNext part of the conversation:\n"
        left = self._size - self._tokens.text(INSTRUCTIONS) - self._tokens.text(head) - 16
        said: list[str] = []
        # A message takes at least four tokens, so later ones cannot fit.
        near = waiting[: max(left // 4, 1)]
        for text in transcript(near, max(left // 4, 32), self._tokens):
            left -= self._tokens.text(text) + 1
            if said and left < 0:
                break
            said.append(text)
        question = [
            {"role": "system", "content": INSTRUCTIONS},
            {"role": "user", "content": head + "\n".join(said)},
        ]
        return len(said), question

    def _answer(
        self, ask: CompletionFunction, question: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any] | None:
        """Return the model's answer, or None if it is unreadable. Raises _TooLong."""
        self._asked += 1
        try:
            said = ask(question, schema=SCHEMA, max_tokens=max(256, self._most))
            said = check_answer(said, COMPLETION_SIGNATURE)
        except Exception as error:
            # Any error of a client must still lead to a summary.
            if read_overflow(error) is not None and self._size > _SMALLEST:
                self._size //= 2
                raise _TooLong from error
            # The next part would probably fail too, and each attempt may take a minute.
            self._ask = None
            # Without the error's text: some clients put API keys into it.
            self._fallback = f"the model failed with {type(error).__name__}"
            return None
        return read_object(said) if isinstance(said, str) else None


class _TooLong(Exception):
    """The question must be shortened and asked again."""


def transcript(messages: Sequence[Message], most: int, tokens: Tokens) -> Iterator[str]:
    """Yield a text for each message, at most about `most` tokens, for the model to read."""
    bodies = [body_of(message) for message in messages]
    asked_by = _calls_by_result(bodies)
    for index, (message, body) in enumerate(zip(messages, bodies, strict=True)):
        said = []
        for place, result in enumerate(results_of(body)):
            call = asked_by.get((index, place))
            said.append(f"result of {call.name if call else 'a tool'}: {text_of(result.content)}")
        said.append(text_parts_of(body))
        said += [f"calls {call.name}({_arguments(call)})" for call in calls_of(body)]
        text = "\n".join(filter(None, said))
        if tokens.text(text) > most:
            text = cut_middle(text, most, tokens, mark=pointer(text, message.seq, tokens))
        yield f"[{message.seq}] {role_of(body) or 'note'}: {text}"


def extract(messages: Sequence[Message]) -> dict[str, Any]:
    """Return quotes of these messages in the format of a model's answer."""
    bodies = [body_of(message) for message in messages]
    asked_by = _calls_by_result(bodies)
    facts: list[str] = []
    outcomes: list[str] = []
    last_state = ""
    for index, body in enumerate(bodies):
        for place, result in enumerate(results_of(body)):
            call = asked_by.get((index, place))
            made = f"{call.name}({_clip(_arguments(call), 80)})" if call else "a tool"
            outcomes.append(f"{made}: {_clip(text_of(result.content), 120)}")
        text = _clip(text_parts_of(body), _QUOTE)
        if text and role_of(body) == "user":
            facts.append(QUOTED + text)
        if text and role_of(body) in ("user", "assistant"):
            last_state = f"The {role_of(body)} said last: {text}"
    return {"facts": facts, "tool_outcomes": outcomes, "last_state": last_state}


def _calls_by_result(bodies: Sequence[Mapping[str, Any]]) -> dict[Spot, ToolCall]:
    """Return the call for each result."""
    return {
        result: calls_of(bodies[index])[place] for (index, place), result in pair(bodies).items()
    }


def _arguments(call: ToolCall) -> str:
    return call.arguments if isinstance(call.arguments, str) else as_json(call.arguments)


def _clip(text: str, longest: int) -> str:
    words = " ".join(text.split())
    return words if len(words) <= longest else words[: longest - 1] + "…"
