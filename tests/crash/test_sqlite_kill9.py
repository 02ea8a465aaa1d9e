"""Tests kill -9 in every operation on SQLite, with the harness of test_kill9.py.

The quick run has the crash contract, which does the same with fewer operations.
"""

from pathlib import Path

import pytest

from support.crash.kill_operations import kill_each_operation
from support.crash.reporting import Say


@pytest.mark.full
def test_p1_p2_fifteen_kills_in_each_operation_lose_no_acknowledged_message(
    tmp_path: Path, say: Say, seed: int
) -> None:
    kill_each_operation(Path(f"sqlite:{tmp_path}"), say, hits=15, seed=seed)
