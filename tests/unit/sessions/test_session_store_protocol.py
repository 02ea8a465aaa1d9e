"""Tests that `SessionStore` behaves the same on every store and on `SessionManager`."""

import inspect
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pytest

from stenolog.errors import StoreClosed
from stenolog.sessions.session_manager import SessionManager
from stenolog.sessions.session_store import JSONLBackend, SessionStore
from stenolog.stores.in_memory import InMemoryStore
from stenolog.stores.open_store import open_store
from support import temporary_folders

# mypy checks that the legacy store is a SessionStore.
_statically: Callable[[Path], SessionStore] = SessionManager

FACES: Final[dict[str, Callable[[Path], SessionStore]]] = {
    "jsonl": lambda place: JSONLBackend(open_store(place)),
    "memory": lambda _: JSONLBackend(InMemoryStore()),
    "sqlite": lambda place: JSONLBackend(open_store(f"sqlite:{place}/steno.db")),
    "legacy": lambda place: SessionManager(place / "sessions"),
}
ODD_KEYS: Final = [
    *("a:b", "a_b", "a/b", "A:B", "a%3Ab", "../x", "CON", ".hidden", "x.meta", "x", "x.json"),
    *("é", "e\u0301", "日本", "a\0b", "a\nb", " ", "k" * 1000, "k" * 1001, "☃" * 300),
]


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Yield a folder in memory, because nothing here tests syncs."""
    with temporary_folders.folder() as path:
        yield path


def _user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _contents(sessions: SessionStore, key: str = "k", **options: Any) -> list[Any]:
    return [message.content for message in sessions.get_history(key, **options)]


def _picture(sessions: SessionStore) -> list[tuple[Any, ...]]:
    found = sessions.get_history("k", full=True)
    return [(m.seq, m.hidden, m.at, m.to_json()) for m in found]


@pytest.mark.parametrize("face", FACES)
class TestFace:
    @pytest.fixture
    def sessions(self, face: str, tmp_path: Path) -> Iterator[SessionStore]:
        opened = FACES[face](tmp_path / "workspace")
        yield opened
        opened.close()

    def test_implements_the_session_store_protocol(self, sessions: SessionStore) -> None:
        assert isinstance(sessions, SessionStore)
        names = [name for name in vars(SessionStore) if not name.startswith("_")]
        for name in names:
            wanted, found = (getattr(one, name) for one in (SessionStore, type(sessions)))
            if name != "store":
                assert inspect.signature(found) == inspect.signature(wanted), name

    def test_p10_added_message_is_returned_with_its_seq(self, sessions: SessionStore) -> None:
        call = {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "ls"}}],
            "odd": {"z": 1, "a": [1.0, True, None, 10**40, "\ud800", "停车 \0"]},
        }
        assert sessions.add_message("k", "user", "hello") == 1
        assert sessions.add_full_message("k", call) == 2
        first, second = sessions.get_history("k")
        assert (first.seq, first.role, first.content) == (1, "user", "hello")
        assert second.to_dict() == call
        assert list(second.to_dict()["odd"]) == ["z", "a"]
        assert not first.hidden
        assert first.at <= second.at

    def test_a_message_of_one_session_can_be_added_to_another(self, sessions: SessionStore) -> None:
        sessions.add_full_message("a", _user("x"))
        assert sessions.add_full_message("b", sessions.get_history("a")[0]) == 1
        assert sessions.set_history("c", sessions.get_history("a"))
        assert _contents(sessions, "b") == _contents(sessions, "c") == ["x"]

    def test_history_can_be_read_in_pages(self, sessions: SessionStore) -> None:
        for content in "abcdef":
            sessions.add_message("k", "user", content)
        assert _contents(sessions, last=2) == ["e", "f"]
        assert _contents(sessions, last=0) == []
        assert _contents(sessions, last=99) == list("abcdef")
        assert _contents(sessions, after=4) == ["e", "f"]
        assert _contents(sessions, after=2, last=1) == ["f"]
        assert _contents(sessions, last=-1) == []
        assert sessions.health().failed_reads == 1

    def test_p12_message_with_a_known_idempotency_key_is_stored_once(
        self, sessions: SessionStore
    ) -> None:
        assert sessions.add_message("k", "user", "x", once="t") == 1
        assert sessions.add_message("k", "user", "x", once="t") == 1
        assert sessions.add_full_message("k", _user("x"), once="t") == 1
        assert sessions.add_message("k", "user", "other", once="t") is None
        assert sessions.add_message("other", "user", "other", once="t") == 1
        assert sessions.add_message("k", "user", "x", once="") is None
        assert _contents(sessions) == ["x"]
        assert sessions.health().failed_writes == 2

    def test_summary_is_stored_and_rejected_if_invalid(self, sessions: SessionStore) -> None:
        assert sessions.get_summary("k") == ""
        assert sessions.set_summary("k", "so far \ud800")
        assert sessions.get_summary("k") == "so far \ud800"
        assert sessions.set_summary("k", None) is False  # type: ignore[arg-type]
        assert sessions.get_summary("k") == "so far \ud800"
        assert sessions.list_sessions() == ["k"]

    @pytest.mark.quick(5)
    @pytest.mark.parametrize(
        ("keep", "left"), [(2, "de"), (0, ""), (-3, ""), (5, "abcde"), (99, "abcde")]
    )
    def test_p4_truncate_hides_messages_without_deleting_them(
        self, sessions: SessionStore, keep: int, left: str
    ) -> None:
        for content in "abcde":
            sessions.add_message("k", "user", content)
        assert sessions.truncate_history("k", keep)
        assert _contents(sessions) == list(left)
        everything = sessions.get_history("k", full=True)
        assert "".join(message.content for message in everything) == "abcde"
        assert "".join(message.content for message in everything if not message.hidden) == left
        assert sessions.add_message("k", "user", "f") == 6
        assert _contents(sessions) == [*left, "f"]

    def test_p5_checkpoint_moves_floor_and_summary_together(self, sessions: SessionStore) -> None:
        for content in "abcd":
            sessions.add_message("k", "user", content)
        assert sessions.checkpoint("k", summary="a and b", upto=2, expect_floor=0)
        assert sessions.checkpoint("k", summary="stale", upto=3, expect_floor=0) is False
        assert sessions.checkpoint("k", summary="beyond", upto=5) is False
        assert (sessions.get_summary("k"), _contents(sessions)) == ("a and b", ["c", "d"])
        assert sessions.checkpoint("k", summary="only the summary", upto=1)
        assert (sessions.get_summary("k"), _contents(sessions)) == ("only the summary", ["c", "d"])
        assert sessions.checkpoint("k", summary="again", upto=3, expect_floor=2)
        assert _contents(sessions) == ["d"]

    def test_calls_on_an_unknown_key_create_no_session(self, sessions: SessionStore) -> None:
        assert sessions.get_history("k") == []
        assert sessions.get_history("k", full=True) == []
        assert sessions.get_summary("k") == ""
        assert sessions.truncate_history("k", 1)
        sessions.save("k")
        assert sessions.list_sessions() == []
        assert sessions.health().ok

    def test_p6_keys_have_separate_sessions(self, sessions: SessionStore, tmp_path: Path) -> None:
        for number, key in enumerate(ODD_KEYS):
            assert sessions.add_message(key, "user", number) == 1, key
        assert sessions.list_sessions() == sorted(ODD_KEYS)
        for number, key in enumerate(ODD_KEYS):
            assert _contents(sessions, key) == [number]
        assert [path.name for path in tmp_path.iterdir()] in ([], ["workspace"])

    @pytest.mark.quick(5)
    @pytest.mark.parametrize("key", ["", "k" * 1025, "\ud800", None, 7])
    def test_invalid_key_is_a_failed_write(self, sessions: SessionStore, key: Any) -> None:
        assert sessions.add_message(key, "user", "x") is None
        assert sessions.get_history(key) == []
        assert "UsageError" in (sessions.health().last_error or "")

    def test_sessions_can_be_listed_in_pages(self, sessions: SessionStore) -> None:
        for key in ("b:2", "a", "b:1", "c"):
            sessions.add_message(key, "user", "x")
        assert sessions.list_sessions() == ["a", "b:1", "b:2", "c"]
        assert sessions.list_sessions(prefix="b:") == ["b:1", "b:2"]
        assert sessions.list_sessions(limit=2) == ["a", "b:1"]
        assert sessions.list_sessions(limit=2, after="b:1") == ["b:2", "c"]
        assert sessions.list_sessions(limit=-1) == []

    def test_p8_p10_rejected_message_is_a_failed_write(self, sessions: SessionStore) -> None:
        assert sessions.add_message("k", "user", float("nan")) is None
        troubled = sessions.health()
        assert sessions.add_message("k", "user", "x") == 1
        calm = sessions.health()
        assert (troubled.ok, calm.ok) == (False, True)
        assert "RefusedMessage: content" in troubled.problems[-1]
        assert calm.failed_writes == 1
        assert calm.last_error == troubled.last_error

    def test_p1_messages_survive_reopening(
        self, sessions: SessionStore, face: str, tmp_path: Path
    ) -> None:
        if face == "memory":
            return  # it is not persistent, and says so
        for content in "abcde":
            sessions.add_message("k", "user", content, once=content)
        sessions.set_history("k", [_user("a"), _user("b"), _user("x")])
        sessions.checkpoint("k", summary="an a", upto=1)
        before = _picture(sessions)
        # Not closed before: acknowledged data is on disk.
        again = FACES[face](tmp_path / "workspace")
        assert _picture(again) == before
        assert again.get_summary("k") == "an a"
        assert again.add_message("k", "user", "c", once="c") == 3
        assert again.add_message("k", "user", "f") == 7
        again.close()

    def test_p7_threads_can_add_and_read_concurrently(self, sessions: SessionStore) -> None:
        def add(worker: int) -> list[int | None]:
            return [sessions.add_message("k", "user", f"{worker}.{n}") for n in range(15)]

        with ThreadPoolExecutor(8) as pool:
            seqs = [seq for found in pool.map(add, range(8)) for seq in found]
        assert sorted(seq or 0 for seq in seqs) == list(range(1, 121))
        contents = _contents(sessions)
        for worker in range(8):
            own = [text for text in contents if text.startswith(f"{worker}.")]
            assert own == [f"{worker}.{n}" for n in range(15)]

    def test_close_twice_is_harmless_and_later_calls_fail_softly(
        self, sessions: SessionStore
    ) -> None:
        sessions.add_message("k", "user", "x")
        sessions.close()
        sessions.close()
        assert sessions.add_message("k", "user", "y") is None
        assert sessions.get_history("k") == []
        assert sessions.set_summary("k", "s") is False
        health = sessions.health()
        assert not health.ok
        assert (health.failed_writes, health.failed_reads) == (2, 1)
        assert "StoreClosed" in (health.last_error or "")
        with pytest.raises(StoreClosed):
            sessions.save("k")
