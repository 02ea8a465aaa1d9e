"""Fixtures of the channel tests: a temporary folder in memory, because nothing here tests syncs."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from support import temporary_folders
from support.telegram_server import TelegramServer


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Yield a folder in memory."""
    with temporary_folders.folder() as path:
        yield path


@pytest.fixture
def server() -> Iterator[TelegramServer]:
    """Yield a fake Telegram server."""
    with TelegramServer() as telegram:
        yield telegram
