"""What a model must be for the work behind a conversation: asked once, it answers in text."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Ask(Protocol):
    """A model that is asked once and answers in text; a plain function will do.

    It is synchronous: who has an async client runs it in a thread. Whatever its client raises is
    let through. It may be called from several threads at once.
    """

    def __call__(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        schema: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
    ) -> str:
        """The answer to these messages, in OpenAI chat shape.

        `schema`: a JSON schema that the answer should follow, where the model can be held to one;
        the caller checks the answer anyhow. `max_tokens`: how long the answer may be.
        """
        ...
