"""Tests the folder of logs with several threads."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from stenolog import JSONLStore


def test_p7_concurrent_lists_are_complete(fast_path: Path) -> None:
    with JSONLStore(fast_path) as store:
        for number in range(600):
            store.set_meta(f"k{number:03}", title="x")
        expected = [f"k{number:03}" for number in range(600)]
        with ThreadPoolExecutor(8) as pool:
            for found in pool.map(lambda _: store.list_sessions(), range(40)):
                assert found == expected
