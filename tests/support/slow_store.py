"""A store whose reads wait until a test allows them."""

import threading
from pathlib import Path
from typing import Any

from stenolog.records import Message, SessionInfo
from stenolog.stores.in_memory import InMemoryStore


class SlowStore(InMemoryStore):
    """A store whose reads wait until a test allows them."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self._file = file
        self.allowed = threading.Event()
        self.reading = threading.Event()
        self.read_keys: list[str] = []
        """Keys of the sessions whose messages were read, in the order of their first read."""

    def catalog_file(self) -> Path:
        """Return the file of the catalog."""
        return self._file

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
