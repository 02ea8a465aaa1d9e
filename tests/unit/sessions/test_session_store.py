"""Tests the SessionStore facade: the result of each method on success and on failure."""

import inspect
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stenolog.errors import StoreClosed, StoreUnavailable
from stenolog.sessions.session_store import JSONLBackend, SessionStore
from stenolog.stores.base import Store
from stenolog.stores.in_memory import InMemoryAdmin, InMemoryStore
from stenolog.stores.open_store import open_store

# mypy checks that the backend is a SessionStore.
_statically: Callable[[Store], SessionStore] = JSONLBackend


FAILED: dict[str, tuple[Callable[[SessionStore], Any], Any, str]] = {
    # method: (a call, the result of a failure, its description in the docstring)
    "add_message": (lambda s: s.add_message("k", "user", "x", once="t"), None, "None"),
    "add_full_message": (lambda s: s.add_full_message("k", {"role": "user"}), None, "None"),
    "get_history": (lambda s: s.get_history("k", last=1), [], "empty list"),
    "get_summary": (lambda s: s.get_summary("k"), "", "empty text"),
    "set_summary": (lambda s: s.set_summary("k", "x"), False, "False"),
    "set_history": (lambda s: s.set_history("k", []), False, "False"),
    "truncate_history": (lambda s: s.truncate_history("k", 1), False, "False"),
    "checkpoint": (lambda s: s.checkpoint("k", summary="x", upto=0), False, "False"),
    "save": (lambda s: s.save("k"), StoreClosed, "raised"),
    "list_sessions": (lambda s: s.list_sessions(), [], "empty list"),
    "health": (lambda s: s.health().ok, False, "problem"),
    "close": (lambda s: s.close().ok, False, "raised"),
    "store": (lambda s: s.store and s.store.info("k"), StoreClosed, "raise when they fail"),
}
WRITES = (
    "add_message",
    "add_full_message",
    "set_summary",
    "set_history",
    "truncate_history",
    "checkpoint",
)


class BrokenDriver(InMemoryStore):
    """A third-party store that does not convert the errors of its driver."""

    def add_message(self, key: str, role: str, content: Any, *, once: str | None = None) -> int:
        raise ConnectionResetError(104, f"gone while sending {(key, role, content, once)}")

    def get_summary(self, key: str) -> str:
        raise ConnectionResetError(104, f"gone while reading {key}")

    @property
    def admin(self) -> InMemoryAdmin:
        raise ConnectionResetError(104, "the server went away")

    def close(self) -> None:
        raise ConnectionResetError(104, "the server went away")


@pytest.fixture
def failing() -> SessionStore:
    """Return a facade whose calls fail, because its store is closed."""
    backend = JSONLBackend(InMemoryStore())
    backend.store.close()
    return backend


def _methods(face: type) -> set[str]:
    return {name for name in vars(face) if not name.startswith("_")}


@pytest.mark.parametrize("face", [SessionStore, JSONLBackend])
def test_docstrings_describe_failures(face: type) -> None:
    assert _methods(face) == set(FAILED)
    for name, (_, _, words) in FAILED.items():
        text = " ".join((inspect.getdoc(vars(face)[name]) or "").split())
        assert "fail" in text, name
        assert words in text, name


@pytest.mark.parametrize("method", FAILED)
def test_p8_failures_match_their_docstrings(failing: SessionStore, method: str) -> None:
    call, outcome, _ = FAILED[method]
    if isinstance(outcome, type):
        with pytest.raises(outcome):
            call(failing)
    else:
        assert call(failing) == outcome


@pytest.mark.parametrize("method", WRITES)
def test_p8_a_failed_write_is_logged_counted_and_in_health(
    failing: SessionStore, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    call, _, _ = FAILED[method]

    call(failing)

    health = failing.health()
    assert health.failed_writes == 1
    assert health.failed_reads == 0
    assert health.last_error is not None
    assert health.last_error.startswith(f"{method} of 'k' failed: StoreClosed: ")
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert health.last_error in caplog.text


def test_p8_failed_read_is_counted_separately_and_logged(
    failing: SessionStore, caplog: pytest.LogCaptureFixture
) -> None:
    failing.get_history("k")
    failing.list_sessions()

    health = failing.health()
    assert (health.failed_writes, health.failed_reads) == (0, 2)
    assert health.last_error is not None
    assert health.last_error.startswith("list_sessions failed: StoreClosed: ")
    assert "taken as empty" in caplog.text


def test_unexpected_driver_errors_do_not_reach_the_loop(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sessions = JSONLBackend(BrokenDriver())

    assert sessions.add_message("k", "user", "x") is None
    assert sessions.get_summary("k") == ""
    health = sessions.health()
    with pytest.raises(ConnectionResetError):
        sessions.close()
    with pytest.raises(ConnectionResetError):
        sessions.close()

    assert not health.ok
    assert "the server went away" in health.problems[0]
    assert (health.failed_writes, health.failed_reads) == (1, 1)
    assert [record.exc_info is not None for record in caplog.records] == [True] * 4


def test_p8_close_reports_failed_writes() -> None:
    sessions = JSONLBackend(InMemoryStore())
    assert sessions.add_message("k", "user", "kept")
    assert sessions.add_message("k", "user", object()) is None

    at_end = sessions.close()

    assert at_end.failed_writes == 1
    assert "RefusedMessage" in (at_end.last_error or "")
    assert sessions.close() == at_end


def test_p8_close_raises_error_of_the_store() -> None:
    store = BrokenDriver()
    sessions = JSONLBackend(store)

    with pytest.raises(ConnectionResetError):
        sessions.close()
    with pytest.raises(ConnectionResetError):
        sessions.close()

    closed = list[bool]()
    store.close = lambda: closed.append(True)  # type: ignore[method-assign]
    assert not sessions.close().ok
    assert not sessions.close().ok
    assert closed == [True]


def _fill(sessions: SessionStore, messages: int, size: int) -> None:
    for number in range(messages):
        assert sessions.add_message("k", "user", f"{number} " + "x" * size)


@pytest.mark.parametrize(
    ("messages", "size", "kept", "archived"),
    [
        pytest.param(10, 10_000, 4, 6, id="more-below-than-above-and-large"),
        pytest.param(10, 10_000, 5, 0, id="as-much-below-as-above"),
        pytest.param(10, 100, 1, 0, id="not-worth-a-rewrite"),
    ],
)
def test_save_archives_only_if_worthwhile(
    tmp_path: Path, messages: int, size: int, kept: int, archived: int
) -> None:
    with open_store(str(tmp_path / "workspace")) as store:
        sessions = JSONLBackend(store)
        _fill(sessions, messages, size)
        sessions.truncate_history("k", kept)

        sessions.save("k")

        assert store.info("k").archived == archived
        assert len(sessions.get_history("k")) == kept
        assert len(sessions.get_history("k", full=True)) == messages


def test_p9_save_does_not_compact_archived_messages_again(tmp_path: Path) -> None:
    with open_store(str(tmp_path / "workspace")) as store:
        sessions = JSONLBackend(store)
        _fill(sessions, 12, 20_000)
        sessions.truncate_history("k", 4)

        sessions.save("k")
        once = store.info("k")
        sessions.save("k")

        assert once.archived == 8
        assert once.bytes >= 64 * 1024
        assert store.info("k").generation == once.generation

        sessions.truncate_history("k", 3)
        sessions.save("k")

        assert store.info("k").archived == 8


def test_p8_save_raises_error_of_compact(tmp_path: Path) -> None:
    with open_store(str(tmp_path / "workspace")) as store:
        sessions = JSONLBackend(store)
        _fill(sessions, 10, 10_000)
        sessions.truncate_history("k", 1)
        (tmp_path / "workspace" / "sessions" / "archive").write_text("in the way")

        with pytest.raises(StoreUnavailable, match="archiving 'k'"):
            sessions.save("k")

        assert [m.seq for m in sessions.get_history("k")] == [10]
