"""What a message says of itself, where anybody may have written it."""

from typing import Any

import pytest

from stenolog.catalog.message_metadata import seconds_of, usage_of


@pytest.mark.parametrize("odd", [10**400, -5, float("inf"), float("nan"), True, "7"])
def test_implausible_token_counts_are_ignored(odd: Any) -> None:
    body = {"stenolog": {"seconds": odd, "usage": {"prompt": odd, "answer": 3}}}
    assert seconds_of(body) is None
    assert usage_of(body) == {"answer": 3, "cached": 0}
