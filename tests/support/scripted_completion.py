"""A completion function that follows a script, for summaries and notes."""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from stenolog.errors import UsageError

CompletionStep = str | Exception | Callable[[Sequence[Mapping[str, Any]]], str]
"""One answer of a script: a text, an exception to raise, or a function that returns the text."""


class ScriptedCompletion:
    """A completion function that returns the next answer of its script for each call.

    Raises UsageError if the script has no more answers.
    """

    def __init__(self, answers: Iterable[CompletionStep]) -> None:
        self._answers: Iterator[CompletionStep] = iter(answers)
        self._lock = threading.Lock()
        self.calls: list[list[Mapping[str, Any]]] = []
        """The messages of each call, oldest call first."""

    def __call__(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        schema: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
    ) -> str:
        """Return the next answer of the script. `schema` and `max_tokens` are ignored."""
        del schema, max_tokens
        # Concurrent calls get different answers, and one entry each in `calls`.
        with self._lock:
            self.calls.append([dict(message) for message in messages])
            answer = next(self._answers, None)
        if answer is None:
            raise UsageError("the script has no answer left; give ScriptedCompletion one more")
        if isinstance(answer, Exception):
            raise answer
        return answer if isinstance(answer, str) else answer(messages)
