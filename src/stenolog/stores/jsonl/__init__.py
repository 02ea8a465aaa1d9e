"""JSONL store: one append-only file per session. docs/format.md specifies the format."""

from stenolog.stores.jsonl.store import JSONLStore

__all__ = ["JSONLStore"]
