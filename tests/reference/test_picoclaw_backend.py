"""The eight tests of picoclaw's SessionStore face, by their names, on every store of ours."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from stenolog import InMemoryStore, JSONLBackend, SessionManager, SessionStore, open_store

FACES: Final[dict[str, Callable[[Path], SessionStore]]] = {
    "jsonl": lambda place: JSONLBackend(open_store(place)),
    "memory": lambda _: JSONLBackend(InMemoryStore()),
    "sqlite": lambda place: JSONLBackend(open_store(f"sqlite:{place}/sessions.db")),
    "legacy": SessionManager,
}


@pytest.fixture(params=FACES)
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SessionStore]:
    opened = FACES[request.param](tmp_path / "workspace")
    yield opened
    opened.close()


def test_jsonl_backend_add_and_get_history(backend: SessionStore) -> None:
    backend.add_message("s1", "user", "hello")
    backend.add_message("s1", "assistant", "hi")
    history = backend.get_history("s1")
    assert [(m.role, m.content) for m in history] == [("user", "hello"), ("assistant", "hi")]


def test_jsonl_backend_add_full_message(backend: SessionStore) -> None:
    call = {"id": "tc1", "function": {"name": "read_file", "arguments": {"path": "x"}}}
    message = {"role": "assistant", "content": "done", "tool_calls": [call]}
    backend.add_full_message("s1", message)
    [stored] = backend.get_history("s1")
    assert stored.to_dict() == message
    assert stored.tool_calls[0]["id"] == "tc1"


def test_jsonl_backend_summary(backend: SessionStore) -> None:
    assert backend.get_summary("s1") == ""
    backend.set_summary("s1", "test summary")
    assert backend.get_summary("s1") == "test summary"


def test_jsonl_backend_truncate_and_save(backend: SessionStore) -> None:
    for number in range(10):
        backend.add_message("s1", "user", f"msg {number} " + "x" * 10_000)
    backend.truncate_history("s1", 3)
    assert [m.content[:5] for m in backend.get_history("s1")] == ["msg 7", "msg 8", "msg 9"]
    backend.save("s1")
    assert [m.content[:5] for m in backend.get_history("s1")] == ["msg 7", "msg 8", "msg 9"]
    # There, saving destroys what was truncated.
    assert len(backend.get_history("s1", full=True)) == 10


def test_jsonl_backend_set_history(backend: SessionStore) -> None:
    backend.add_message("s1", "user", "old")
    new = [{"role": "user", "content": "new1"}, {"role": "assistant", "content": "new2"}]
    backend.set_history("s1", new)
    assert [m.to_dict() for m in backend.get_history("s1")] == new


def test_jsonl_backend_empty_session(backend: SessionStore) -> None:
    assert backend.get_history("nonexistent") == []


def test_jsonl_backend_session_isolation(backend: SessionStore) -> None:
    backend.add_message("s1", "user", "session1")
    backend.add_message("s2", "user", "session2")
    assert [m.content for m in backend.get_history("s1")] == ["session1"]
    assert [m.content for m in backend.get_history("s2")] == ["session2"]


def test_jsonl_backend_summarize_flow(backend: SessionStore) -> None:
    for number in range(20):
        backend.add_message("s1", "user", f"msg {number}")
    backend.set_summary("s1", "conversation about testing")
    backend.truncate_history("s1", 4)
    backend.save("s1")
    assert backend.get_summary("s1") == "conversation about testing"
    assert [m.content for m in backend.get_history("s1")] == [f"msg {n}" for n in range(16, 20)]
