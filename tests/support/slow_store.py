"""A store whose reads wait until a test allows them."""

import threading
from pathlib import Path
from typing import Any

from stenolog.records import Message, SessionInfo
from stenolog.stores.admin import Place
from stenolog.stores.in_memory import InMemoryAdmin, InMemoryStore


class SlowStore(InMemoryStore):
    """A store whose reads wait until a test allows them."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self._file = file
        self.allowed = threading.Event()
        self.reading = threading.Event()
        self.read_keys: list[str] = []
        """Keys of the sessions whose messages were read, in the order of their first read."""

    @property
    def admin(self) -> InMemoryAdmin:
        """The calls that administer the store."""
        return _SlowAdmin(self)

    def info(self, key: str) -> SessionInfo:
        """Wait until the test allows it."""
        self.reading.set()
        assert self.allowed.wait(60)
        return super().info(key)

    def get_history(self, key: str, **options: Any) -> list[Message]:
        """Wait until the test allows it."""
        assert self.allowed.wait(60)
        if key not in self.read_keys:
            self.read_keys.append(key)
        return super().get_history(key, **options)


class _SlowAdmin(InMemoryAdmin):
    _store: SlowStore

    @property
    def place(self) -> Place:
        """The place of the catalog."""
        return Place(namespace="sessions", catalog_file=self._store._file)
