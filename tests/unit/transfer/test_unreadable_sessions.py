"""A session that cannot be read does not stop the copy of the others."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from stenolog.stores.open_store import open_store
from stenolog.transfer.copy import CopyReport, copy_place
from support import temporary_folders
from support.copied_stores import digests
from support.file_modes import obey_modes

pytestmark = pytest.mark.usefixtures("obey_modes")
__all__ = ["obey_modes"]

KEY = "telegram:123"
LOG = "sessions/telegram%3A123.jsonl"


@pytest.fixture
def place() -> Iterator[Path]:
    with temporary_folders.folder() as path:
        with open_store(str(path / "ws")) as store:
            for key in ("a", KEY, "z"):
                store.add_message(key, "user", f"to {key}")
        yield path


def _of(where: object) -> dict[str, tuple[str, str | None, str]]:
    with open_store(str(where)) as store:
        return digests(store)


def _reason(copied: CopyReport) -> tuple[str, str]:
    [problem] = copied.namespaces["sessions"].problems
    return problem.key, problem.reason


def test_a_copy_to_sqlite_skips_an_unreadable_session(place: Path) -> None:
    (place / "ws" / LOG).chmod(0)
    target = f"sqlite:{place}/new.db"
    copied = copy_place(str(place / "ws"), target)
    assert (copied.sessions, _reason(copied)[0]) == (2, KEY)
    (place / "ws" / LOG).chmod(0o600)
    copy_place(str(place / "ws"), target)
    before = _of(target)
    assert before == _of(place / "ws")
    (place / "ws" / LOG).chmod(0)
    copied = copy_place(str(place / "ws"), target)
    assert (copied.sessions, _reason(copied)[0]) == (2, KEY)
    assert _of(target) == before


@pytest.mark.parametrize("target", ["jsonl:{}/new", "sqlite:{}/new.db"])
def test_an_unreadable_file_in_the_trash_does_not_stop_a_copy(place: Path, target: str) -> None:
    target = target.format(place)
    with open_store(str(place / "ws")) as store:
        store.delete(KEY)
    copy_place(str(place / "ws"), target)
    before = _of(target)
    [deleted] = (place / "ws/sessions/trash").glob("*.jsonl")
    deleted.chmod(0)
    copied = copy_place(str(place / "ws"), target)
    assert copied.sessions == 2
    assert "Permission denied" in _reason(copied)[1]
    assert _of(target) == before


@pytest.mark.parametrize("target", ["jsonl:{}/new", "sqlite:{}/new.db"])
def test_an_unreadable_archive_does_not_stop_a_copy(place: Path, target: str) -> None:
    target = target.format(place)
    with open_store(str(place / "ws")) as store:
        for number in range(10):
            store.add_message(KEY, "user", f"message {number}")
        store.checkpoint(KEY, summary="They counted.", upto=8)
        store.compact(KEY)
    [packed] = (place / "ws/sessions/archive").rglob("*.gz")
    packed.chmod(0)
    copied = copy_place(str(place / "ws"), target)
    assert copied.sessions == 2
    key, reason = _reason(copied)
    assert key == KEY
    assert "Permission denied" in reason
    packed.chmod(0o600)
    assert copy_place(str(place / "ws"), target).problems == 0
    assert _of(target) == _of(place / "ws")


def test_unreadable_copy_in_the_destination_is_unchanged(place: Path) -> None:
    copy_place(str(place / "ws"), str(place / "b"))
    copy = place / "b" / LOG
    text = copy.read_bytes()
    with open_store(str(place / "ws")) as store:
        store.add_message("new", "user", "more")
    copy.chmod(0)
    copied = copy_place(str(place / "ws"), str(place / "b"))
    assert (copied.sessions, copied.written) == (3, 1)
    key, reason = _reason(copied)
    assert key == KEY
    assert "Permission denied" in reason
    copy.chmod(0o600)
    assert copy.read_bytes() == text
    assert copy_place(str(place / "ws"), str(place / "b")).problems == 0
    assert _of(place / "b") == _of(place / "ws")
