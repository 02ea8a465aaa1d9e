"""Tests that errors about wrong arguments say what to pass instead."""

from pathlib import Path
from typing import Any

import pytest

from stenolog.errors import RefusedMessage, UsageError
from stenolog.stores.open_store import open_store


class ChatCompletionMessage:
    """An object as the OpenAI client returns it."""

    def model_dump(self, **_options: Any) -> dict[str, Any]:
        return {"role": "assistant", "content": "hello"}


@pytest.fixture(params=["memory:", "{}/w", "sqlite:{}/s.db"], ids=["memory", "jsonl", "sqlite"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    place: str = request.param
    return place.format(tmp_path)


def test_single_message_instead_of_a_list_is_rejected_with_a_hint(where: str) -> None:
    message: Any = {"role": "user", "content": "hello"}
    with open_store(where) as store, pytest.raises(UsageError, match="use add_full_message"):
        store.add_messages("k", message)


def test_message_object_of_a_client_library_is_rejected_with_a_hint(where: str) -> None:
    message: Any = ChatCompletionMessage()
    with open_store(where) as store, pytest.raises(RefusedMessage, match="model_dump"):
        store.add_full_message("k", message)
