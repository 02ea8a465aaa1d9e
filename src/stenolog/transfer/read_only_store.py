"""Base class of stores that can only be read. Methods that would write raise ReadOnly."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

from stenolog.errors import ReadOnly
from stenolog.records import Health, Trashed
from stenolog.stores.base import SessionView


class ReadOnlyStore(ABC):
    """A store that cannot be written.

    `catalog` is the file for the search index. Without a file, the index is in memory.
    """

    refusal = "the sessions are shown read-only"
    """The error text of a call that would write."""

    def __init__(self, catalog: Path | None) -> None:
        self._catalog = catalog
        self.problems: Mapping[str, str] = {}
        """Reasons why places could not be read the last time, by the name of the place.

        A new dict replaces this dict after each read; the dict itself is never modified.
        """

    @abstractmethod
    def stamps(self) -> dict[str, str]:
        """Return the change stamp of each session: a text that differs after every change."""

    @abstractmethod
    def view(self, key: str, last: int | None = None) -> SessionView:
        """Return info, summary and visible messages, read together. Raises NoSuchSession."""

    @abstractmethod
    def close(self) -> None:
        """Close the store. Later calls raise StoreClosed."""

    def list_sessions(
        self, *, prefix: str = "", limit: int | None = None, after: str | None = None
    ) -> list[str]:
        """Return the keys in byte order."""
        keys = sorted(
            key
            for key in self.stamps()
            if key.startswith(prefix) and (after is None or key > after)
        )
        return keys if limit is None else keys[:limit]

    def refresh(self, view: SessionView) -> SessionView:
        """Return the current view of the same session, without reusing the old view."""
        return self.view(view.key, view.last)

    def list_trash(self) -> list[Trashed]:
        """Return an empty list, because a read-only store cannot restore sessions."""
        return []

    def health(self) -> Health:
        """Return the places that could not be read the last time, and the reasons."""
        problems = tuple(f"{place}: {reason}" for place, reason in self.problems.items())
        return Health(ok=True, free_bytes=None, problems=problems)

    def catalog_file(self) -> Path | None:
        """Return the path of the search index; None if the index is in memory."""
        return self._catalog

    def _refuse(self, *_args: Any, **_options: Any) -> NoReturn:
        raise ReadOnly(self.refusal)

    add_message = add_full_message = add_messages = _refuse
    set_summary = truncate_history = clear = set_history = hide = pop = checkpoint = _refuse
    undo = compact = fork = delete = restore = purge = lease = set_meta = _refuse

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
