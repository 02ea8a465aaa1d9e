"""Tests kill -9 in every operation.

The child reports each operation that it starts, and the parent kills it at a random moment during
it. The store is checked after each kill and used further.
"""

from pathlib import Path

import pytest

from support.crash.kill_operations import kill_each_operation
from support.crash.reporting import Say


def test_p1_p2_kill_9_in_each_operation_loses_no_acknowledged_message(
    tmp_path: Path, say: Say, seed: int
) -> None:
    kill_each_operation(tmp_path, say, hits=1, seed=seed)


@pytest.mark.full
def test_p1_p2_fifteen_kills_in_each_operation_lose_no_acknowledged_message(
    tmp_path: Path, say: Say, seed: int
) -> None:
    kill_each_operation(tmp_path, say, hits=15, seed=seed)
