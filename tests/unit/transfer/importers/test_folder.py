"""The files of old sessions: whatever is renamed, no file ever takes the place of another."""

import json
import os
import shutil
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, Final

import pytest

from stenolog.errors import NotStored
from stenolog.stores.in_memory import InMemoryStore
from stenolog.stores.open_store import open_store
from stenolog.transfer.importers.folder import Folder
from stenolog.transfer.importers.legacy_session import Source
from stenolog.transfer.migration import migrate_from_json
from support import temporary_folders

FIRST: Final = ("the first conversation", "and more of it")
SECOND: Final = ("the second conversation",)


@pytest.fixture
def place() -> Iterator[Path]:
    with temporary_folders.folder() as workspace:
        folder = workspace / "sessions"
        folder.mkdir(mode=0o700)
        yield folder


def log(path: Path, *contents: str, meta: dict[str, Any] | None = None) -> None:
    """A log of another program, with its meta where there is one."""
    lines = [json.dumps({"role": "user", "content": content}) + "\n" for content in contents]
    path.write_text("".join(lines))
    if meta is not None:
        beside = path.name.replace(".jsonl", ".meta.json", 1)
        (path.parent / beside).write_text(json.dumps(meta))


def kept(place: Path) -> set[str]:
    """The texts of all old files there; our own logs are left out."""
    texts = [path.read_text() for path in place.iterdir() if path.is_file()]
    return {text for text in texts if not text.startswith('{"kind":')}


def sources(place: Path) -> list[tuple[str | None, str | None]]:
    with Folder(place) as folder:
        return [(source.body, source.meta) for source in folder.sources()]


# --- set aside, and a new log of that name ---------------------------------------------------


@pytest.mark.parametrize("meta", [False, True])
@pytest.mark.parametrize("times", [1, 2])
def test_p4_log_renamed_for_import_is_not_replaced_by_new_log_of_same_name(
    place: Path, meta: bool, times: int
) -> None:
    about = {"key": "telegram_7", "summary": "theirs"} if meta else None
    texts = [FIRST, SECOND, ("the third conversation",)][: times + 1]
    for contents in texts:
        log(place / "telegram_7.jsonl", *contents, meta=about)
        if contents is not texts[-1]:
            with Folder(place) as folder:  # killed right after
                [source] = [one for one in folder.sources() if one.name == one.body]
                folder.rename_for_import(source)
    before = kept(place)

    with open_store(place.parent) as store:
        migrated = migrate_from_json(place, store)
        found = {
            tuple(message.content for message in store.get_history(key, full=True))
            for key in store.list_sessions()
        }

    assert found == set(texts)
    assert (migrated.sessions, migrated.skipped) == (times + 1, ())
    assert before <= kept(place)
    assert all(".migrated" in path.name for path in place.glob("telegram_7.*") if _is_old(path))


def _is_old(path: Path) -> bool:
    return not path.read_text().startswith('{"kind":')


def test_p4_newest_of_two_logs_gets_its_name_back_after_failure(place: Path) -> None:
    log(place / "telegram_7.jsonl.importing", *FIRST)
    log(place / "telegram_7.jsonl", *SECOND)

    class Full(InMemoryStore):
        def add_messages(self, *_: object, **__: object) -> list[int]:
            raise NotStored("no space left on device; free some space, then try again")

    with Folder(place) as folder:
        [_, new] = folder.sources()
        folder.rename_for_import(new)
    with Full() as full, pytest.raises(NotStored):
        migrate_from_json(place, full)

    assert SECOND[0] in (place / "telegram_7.jsonl").read_text()
    assert FIRST[0] in (place / "telegram_7.jsonl.importing").read_text()


def test_log_and_meta_file_are_paired_under_any_suffix(place: Path) -> None:
    for end in ("", ".importing", ".importing-2", ".importing-10"):
        log(place / f"a.jsonl{end}", end, meta={"key": end})
    assert sources(place) == [
        (f"a.jsonl{end}", f"a.meta.json{end}")
        for end in (".importing", ".importing-2", ".importing-10", "")
    ]


@pytest.mark.parametrize("end", [".importing", ".importing-2"])
@pytest.mark.parametrize("half", ["meta", "log"])
def test_pair_is_found_after_kill_between_two_renames(place: Path, end: str, half: str) -> None:
    if end == ".importing-2":
        log(place / "a.jsonl.importing", *FIRST, meta={"key": "a"})
    log(place / "a.jsonl", *SECOND, meta={"key": "a"})
    name = "a.meta.json" if half == "meta" else "a.jsonl"
    (place / name).rename(place / f"{name}{end}")
    meta, body = ("a.meta.json" + end, "a.jsonl") if half == "meta" else (None, "a.jsonl" + end)
    assert (body, meta or "a.meta.json") in sources(place)
    with Folder(place) as folder:
        folder.rename_for_import(next(one for one in folder.sources() if one.body == body))
    assert {path.name for path in place.iterdir()} >= {f"a.jsonl{end}"}
    assert len(kept(place)) == len(sources(place)) + 1


def test_last_imported_meta_file_is_paired_with_unimported_log(place: Path) -> None:
    log(place / "a.jsonl", *FIRST)
    for end in ("", "-2", "-10"):
        (place / f"a.meta.json.migrated{end}").write_text("{}")
    assert sources(place) == [("a.jsonl", "a.meta.json.migrated-10")]


# --- every rename ----------------------------------------------------------------------------


def test_p4_name_created_by_another_program_is_not_overwritten(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other program begins a new log while the old one is given its name back."""
    log(place / "a.jsonl.importing", *FIRST)
    stat = os.stat

    def late(name: Any, *arguments: Any, **options: Any) -> os.stat_result:
        try:
            return stat(name, *arguments, **options)
        finally:
            if name == "a.jsonl":
                log(place / "a.jsonl", *SECOND)

    with Folder(place) as folder:
        source = Source(name="a.jsonl", body="a.jsonl.importing")
        monkeypatch.setattr(os, "stat", late)
        folder.restore_names(source)
    monkeypatch.undo()
    assert SECOND[0] in (place / "a.jsonl").read_text()
    assert FIRST[0] in (place / "a.jsonl.importing").read_text()


@pytest.mark.parametrize("links", [True, False])
def test_p4_no_rename_replaces_a_file(
    place: Path, links: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever names are taken: as many files with as many texts are there after each step."""
    if not links:

        def refuse(*_: object, **__: object) -> None:
            raise OSError(1, "Operation not permitted")

        monkeypatch.setattr(os, "link", refuse)
    ends = ("", ".importing", ".importing-2", ".migrated", ".migrated-2")
    numbers = count()
    for step in ("rename_for_import", "restore_names", "rename_imported"):
        for end in ends[:3]:
            shutil.rmtree(place)
            place.mkdir()
            for taken in ends:
                log(place / f"a.jsonl{taken}", f"text {next(numbers)}")
                (place / f"a.meta.json{taken}").write_text(f"meta {next(numbers)}")
            before = kept(place)
            source = Source(name="a.jsonl", body=f"a.jsonl{end}", meta=f"a.meta.json{end}")
            with Folder(place) as folder:
                getattr(folder, step)(source)
            assert kept(place) == before, (step, end)
            assert len(list(place.iterdir())) == len(before), (step, end)


def test_hard_link_left_by_kill_is_removed(place: Path) -> None:
    """Who was killed while giving it back leaves both."""
    log(place / "a.jsonl.importing", *FIRST, meta={"key": "k"})
    for name in ("a.jsonl", "a.meta.json"):
        (place / name).hardlink_to(place / f"{name}.importing")
    with InMemoryStore() as store:
        migrated = migrate_from_json(place, store)
    assert (migrated.sessions, len(migrated.imported)) == (1, 1)
    assert sorted(path.name for path in place.iterdir()) == [
        "a.jsonl.migrated",
        "a.meta.json.migrated",
    ]
