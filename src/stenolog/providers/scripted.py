"""A model that answers by script: for tests, examples and everything that must run offline."""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from stenolog.errors import UsageError

Answer = str | Exception | Callable[[Sequence[Mapping[str, Any]]], str]
"""A text, an exception to raise, or a function from the messages to the text."""


class Scripted:
    """An `Ask` that gives the next answer of its script at each call.

    Raises UsageError when it is asked once more than the script has answers.
    """

    def __init__(self, answers: Iterable[Answer]) -> None:
        self._answers: Iterator[Answer] = iter(answers)
        self._lock = threading.Lock()
        self.asked: list[list[Mapping[str, Any]]] = []
        """The messages of each call, the first call first."""

    def __call__(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        schema: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
    ) -> str:
        """The next answer of the script; it takes no notice of schema and max_tokens."""
        del schema, max_tokens
        # Two threads at once get two answers, and each its own place in `asked`.
        with self._lock:
            self.asked.append([dict(message) for message in messages])
            answer = next(self._answers, None)
        if answer is None:
            raise UsageError("the script has no answer left; give Scripted one more")
        if isinstance(answer, Exception):
            raise answer
        return answer if isinstance(answer, str) else answer(messages)
