"""Tests views while another process is in the middle of a write."""

from collections.abc import Callable
from pathlib import Path

import pytest

from stenolog import JSONLStore, Store
from support.contract.open_store_base import append, user_message

WRITES: dict[str, Callable[[Store], object]] = {
    "batch": lambda store: store.add_messages(
        "a", [user_message("3"), user_message("4"), user_message("5")]
    ),
    "replace": lambda store: store.set_history(
        "a", [user_message("1"), user_message("other"), user_message("more")]
    ),
}


@pytest.mark.parametrize("name", WRITES)
def test_view_read_during_a_write_is_refreshed_after_it(name: str, tmp_path: Path) -> None:
    with JSONLStore(tmp_path) as writer:
        append(writer, "a", "1", "2")
        [log] = tmp_path.rglob("*.jsonl")
        before = log.read_bytes()
        WRITES[name](writer)
        written = log.read_bytes()[len(before) :]
        expected = writer.view("a")
    lines = written.splitlines(keepends=True)
    assert len(lines) > 2
    for count in range(1, len(lines)):
        log.write_bytes(before + b"".join(lines[:count]))
        with JSONLStore(tmp_path, read_only=True) as reader:
            view = reader.view("a")
            assert [message.content for message in view.messages] == ["1", "2"]
            with log.open("ab") as file:
                file.write(b"".join(lines[count:]))
            newer = view.merged(reader.view(view.key, since=view))
            assert newer.messages == expected.messages, f"{count} lines were there"
            assert (newer.change, newer.upto) == (expected.change, expected.upto)
