"""The messages to send to the model: always valid, always within the budget."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from msgspec import Struct

from stenolog.context.budget import Limits, RequiredTokens, context_too_small
from stenolog.context.request_messages import (
    CONTINUATION,
    ProviderRequirements,
    RequestMessage,
    finish_messages,
    to_request_messages,
)
from stenolog.context.shortening import cut_middle, minimum_tokens, shorten_turn
from stenolog.messages import Body, seq_of
from stenolog.records import Message
from stenolog.tokens import Tokens

SUMMARY_BEGINS: Final = "[Summary of the earlier conversation]"
SUMMARY_ENDS: Final = "[End of the summary]"
# Changed, not removed: removing a marker could join the text around it into another one.
_SUMMARY_MARKER: Final = re.compile(r"\[(?=\s*(?:summary of|end of the)\b)", re.IGNORECASE)

_TRIES: Final = 4

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

    Raises ContextTooSmall if the system prompt, the tools, the newest user message and the parts of
    its turn that cannot be elided do not fit.
    """
    request = _Request(
        system=system,
        summary=summary,
        memory=memory,
        tools=tools,
        limits=limits or Limits(),
        needs=needs or ProviderRequirements(),
        tokens=tokens or Tokens(),
    )
    return request.window(history)


class _Selection(Struct, frozen=True, kw_only=True):
    entries: list[RequestMessage]
    elided: int = 0
    left_out: int = 0


class _Request(Struct, frozen=True, kw_only=True):
    system: str
    summary: str
    memory: str
    tools: Sequence[Mapping[str, Any]]
    limits: Limits
    needs: ProviderRequirements
    tokens: Tokens

    def window(self, history: _Messages) -> Window:
        entries = to_request_messages(history, self.needs)
        tools = self.tokens.tools(self.tools)
        budget = self.limits.room - tools
        for summary, memory in self._headings():
            # Joined texts may take more tokens than separate ones; then try again with less.
            slack = 0
            for _ in range(_TRIES):
                made = self._try(entries, summary, memory, budget - slack)
                if made is None:
                    break
                messages, chosen = made
                cost = sum(self.tokens.message(message) for message in messages)
                if cost <= budget:
                    return Window(
                        messages=messages,
                        tokens=cost + tools,
                        budget=self.limits.room,
                        elided=chosen.elided,
                        left_out=chosen.left_out,
                        memory_left_out=bool(self.memory) and not memory,
                        upto=max((seq_of(message) or 0 for message in history), default=0),
                    )
                slack += cost - budget
        raise context_too_small(self._parts(entries, tools), self.limits)

    def _headings(self) -> list[tuple[str, str]]:
        """Return the summary and memory to try, best first. Both give way before messages do."""
        most = self.limits.summary()
        whole = self.summary
        if self.tokens.text(whole) > most:
            whole = cut_middle(whole, most, self.tokens, mark="[… cut]")
        short = cut_middle(whole, most // 4, self.tokens, mark="[… cut]") if whole else ""
        found = [(whole, self.memory), (whole, ""), (short, ""), ("", "")]
        return list(dict.fromkeys(found))

    def _try(
        self, entries: Sequence[RequestMessage], summary: str, memory: str, budget: int
    ) -> tuple[list[Body], _Selection] | None:
        head = self._head(summary, memory, left_out=0)
        opened = finish_messages([entry.body for entry in entries], self.needs)
        if self._cost([*head, *opened], ()) <= budget:
            chosen = _Selection(entries=list(entries))
        else:
            # The note about left-out messages is measured with the largest possible number.
            noted = self._head(summary, memory, left_out=len(entries))
            if self.needs.user_first:
                noted.append({"role": "user", "content": CONTINUATION})
            found = self._choose(entries, budget - self._cost(noted, ()))
            if found is None:
                return None
            chosen = found
            head = self._head(summary, memory, left_out=chosen.left_out)
        return finish_messages(
            [*head, *(entry.body for entry in chosen.entries)], self.needs
        ), chosen

    def _choose(self, entries: Sequence[RequestMessage], budget: int) -> _Selection | None:
        """Return the newest turns that fit; the newest one is shortened if it does not fit."""
        if not entries:
            return _Selection(entries=[]) if budget >= 0 else None
        turns: dict[int, list[RequestMessage]] = {}
        for entry in entries:
            turns.setdefault(entry.turn, []).append(entry)
        older = list(turns.values())
        newest = older.pop()
        left = budget - self._cost((), newest)
        if left < 0:
            short = shorten_turn(newest, budget, self.tokens)
            if short is None:
                return None
            gone = sum(map(len, older)) + len(short.left_out)
            return _Selection(entries=short.entries, elided=short.elided, left_out=gone)
        chosen = [newest]
        while older and (cost := self._cost((), older[-1])) <= left:
            left -= cost
            chosen.insert(0, older.pop())
        kept = [entry for turn in chosen for entry in turn]
        return _Selection(entries=kept, left_out=sum(map(len, older)))

    def _cost(self, head: Sequence[Body], entries: Sequence[RequestMessage]) -> int:
        bodies = [*head, *(entry.body for entry in entries)]
        return sum(self.tokens.message(body) for body in bodies)

    def _head(self, summary: str, memory: str, *, left_out: int) -> list[Body]:
        """Return the system message, or an empty list if it has no text."""
        texts = [self.system]
        if summary:
            # A summary quotes messages, which must not be able to end it or start another.
            told = _SUMMARY_MARKER.sub("(", summary)
            texts.append(f"{SUMMARY_BEGINS}\n{told}\n{SUMMARY_ENDS}")
        if left_out:
            texts.append(f"[{left_out:,} earlier messages are left out here; the log has them]")
        texts.append(memory)
        said = "\n\n".join(text for text in texts if text.strip())
        return [{"role": "system", "content": said}] if said else []

    def _parts(self, entries: Sequence[RequestMessage], tools: int) -> RequiredTokens:
        last = [entry for entry in entries if entry.turn == entries[-1].turn]
        newest, rest = minimum_tokens(last, self.tokens)
        if self.needs.user_first:
            rest += self._cost([{"role": "user", "content": CONTINUATION}], ())
        note = len(entries) if entries else 0
        system = self._cost(self._head("", "", left_out=note), ())
        return RequiredTokens(system=system, tools=tools, newest=newest, skeleton=rest)
