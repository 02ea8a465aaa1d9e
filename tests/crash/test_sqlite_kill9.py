"""kill -9, aimed at every operation in turn on SQLite, by the harness of test_kill9.py.

The quick run has the crash half of the contract, which does the same with fewer operations.
"""

from pathlib import Path

import pytest

from crash import test_kill9
from crash.conftest import Say


@pytest.mark.full
def test_p1_p2_every_operation_killed_within_it_fifteen_times(
    tmp_path: Path, say: Say, seed: int
) -> None:
    test_kill9.kill_each(Path(f"sqlite:{tmp_path}"), say, hits=15, seed=seed)
