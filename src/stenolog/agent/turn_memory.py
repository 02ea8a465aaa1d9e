"""The memories for the requests of a turn.

A search is repeated if the user's text changes, or if a session with recalled messages is deleted
or purged. So no request contains a message that was deleted before the request was built.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from msgspec import Struct

from stenolog.agent.instance import AgentInstance
from stenolog.errors import StenologError
from stenolog.memory.recall import RecallResult
from stenolog.messages import text_parts_of
from stenolog.records import Message
from stenolog.stores.base import SessionView

_MAX_SEARCHED_MESSAGES: Final = 50
"""Number of newest messages that are searched for the user's newest text."""
_MAX_SEARCHES: Final = 3
"""Maximum number of searches for one text.

A search is repeated if a session that it found is gone. If the last search has the same problem,
the turn continues without memories.
"""


class TurnMemory(Struct, eq=False):
    """The last memory search of a turn. `sender`: see `AgentInstance.memory_scope`."""

    instance: AgentInstance
    key: str
    sender: str | None
    text: str = ""
    """User text of the last search."""
    result: RecallResult = RecallResult()
    sources: dict[str, tuple[str, int] | None] = {}
    """Sessions that contain the recalled messages, as returned by `_find_sources`."""

    def search(self, view: SessionView) -> bool:
        """Update `result` for the user's newest text, if a new search is due. This call blocks.

        Returns whether the memory was searched.
        """
        text = _newest_user_text(view.messages[-_MAX_SEARCHED_MESSAGES:]) or self.text
        if text == self.text and self.sources == self._find_sources(self.result):
            return False
        self.text, self.result, self.sources = text, RecallResult(), {}
        for _ in range(_MAX_SEARCHES):
            result = self.instance.recall(text, self.key, sender=self.sender, info=view.info)
            sources = self._find_sources(result)
            if None not in sources.values():
                self.result, self.sources = result, sources
                break
        return self.instance.memory is not None

    def _find_sources(self, result: RecallResult) -> dict[str, tuple[str, int] | None]:
        """Return uid and generation of each session that contains recalled messages, by key.

        The generation increases when messages are purged. The value is None for a session that is
        gone or unreadable.
        """
        sources: dict[str, tuple[str, int] | None] = {}
        for hit in result.found:
            key = hit.source.rpartition(":")[0]
            if hit.kind == "message" and key not in sources:
                sources[key] = None
                with suppress(StenologError):
                    info = self.instance.store.info(key)
                    sources[key] = info.uid, info.generation
        return sources


def _newest_user_text(history: Sequence[Message]) -> str:
    texts = (_user_text(message.to_dict()) for message in reversed(history))
    return next((text for text in texts if text), "")


def _user_text(body: Mapping[str, Any]) -> str:
    return text_parts_of(body).strip() if body.get("role") == "user" else ""
