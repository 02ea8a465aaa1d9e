"""What all stores have in common that can only be read: a list from stamps, and refused writes."""

from abc import ABC, abstractmethod
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

from stenolog.errors import ReadOnly
from stenolog.records import Health, Trashed
from stenolog.stores.base import SessionView


class ReadOnlyStore(ABC):
    """A store that cannot be written.

    `catalog`: file for the search index. [default: in memory]
    """

    refusal = "the sessions are shown read-only"
    """The error text of a call that would write."""

    def __init__(self, catalog: Path | None) -> None:
        self._catalog = catalog

    @abstractmethod
    def stamps(self) -> dict[str, str]:
        """Return a stamp for each session. It differs after every change of its files."""

    @abstractmethod
    def view(self, key: str, last: int | None = None) -> SessionView:
        """Return info, summary and visible messages of one moment. Raises NoSuchSession."""

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
        """Return a full view."""
        return self.view(view.key, view.last)

    def list_trash(self) -> list[Trashed]:
        """Return an empty list: nothing can be restored here."""
        return []

    def health(self) -> Health:
        """Return that the store can be read."""
        return Health(ok=True, free_bytes=None, problems=())

    def catalog_file(self) -> Path | None:
        """Return the path of the search index; None if it is in memory."""
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
