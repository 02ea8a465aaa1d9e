"""Sessions in one SQLite file (extra `[sqlite]`)."""

from stenolog.stores.sqlite.store import SQLiteStore

__all__ = ["SQLiteStore"]
