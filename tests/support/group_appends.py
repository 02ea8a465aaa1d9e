"""Appends of several callers in one write, as threads that wait for the same session make them."""

from collections.abc import Sequence

from stenolog.errors import StenologError
from stenolog.stores.arguments import Batch
from stenolog.stores.jsonl import JSONLStore
from stenolog.stores.jsonl.write_queue import Waiter


def append_as_group(
    store: JSONLStore, key: str, batches: Sequence[Batch]
) -> list[int | StenologError]:
    """Return the first seq or the error of each caller."""
    group = [Waiter(key, batch, store._fence) for batch in batches]
    store._queue.run_exclusive(key, lambda: store._queue._run_group(group))
    return [
        waiter.error if isinstance(waiter.error, StenologError) else waiter.first_seq
        for waiter in group
    ]
