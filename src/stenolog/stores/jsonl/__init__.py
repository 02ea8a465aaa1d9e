"""The JSONL log: one append-only file per session; docs/format.md is its specification."""

from stenolog.stores.jsonl.store import JSONLStore

__all__ = ["JSONLStore"]
