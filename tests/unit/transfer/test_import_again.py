"""Whatever kept it: taken in twice it adds nothing, grown it goes on, killed it is continued."""

import json
import shutil
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import pytest

from stenolog.stores.base import Store
from stenolog.stores.in_memory import InMemoryStore
from stenolog.stores.open_store import open_store
from stenolog.transfer import session_import
from stenolog.transfer.importers.legacy_session import ALL_LAYOUTS
from stenolog.transfer.merge import IMPORT_TIME
from stenolog.transfer.migration import ImportReport, import_folder
from support import temporary_folders
from support.import_sources import LAYOUTS, adk, events, nanobot, role, said, strands, words

STEPS: Final = ("set_meta", "add_messages", "checkpoint", "hide", "set_summary")


@pytest.fixture
def place() -> Iterator[Path]:
    with temporary_folders.folder() as path:
        yield path


@pytest.fixture(params=["jsonl", "sqlite", "memory"])
def store(request: pytest.FixtureRequest, place: Path) -> Iterator[Store]:
    where = {"jsonl": str(place / "ws"), "sqlite": f"sqlite:{place}/s.db", "memory": "memory:"}
    with open_store(where[request.param]) as opened:
        yield opened


def copied(source: Path, store: Store) -> ImportReport:
    folder, only = (source, None) if source.is_dir() else (source.parent, source.name)
    return import_folder(folder, store, only=only, rename_files=False, layouts=ALL_LAYOUTS)


def bytes_of(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def picture(store: Store) -> dict[str, Any]:
    return {
        key: (
            [(m.seq, m.hidden, m.at, m.to_json()) for m in store.get_history(key, full=True)],
            store.get_summary(key),
            store.info(key).floor,
            _timeless(store.info(key).meta),
        )
        for key in store.list_sessions()
    }


def _timeless(meta: Mapping[str, Any]) -> dict[str, Any]:
    """The meta without the times at which something was taken in."""
    receipts = [{**one, IMPORT_TIME: ""} for one in meta.get("imported", [])]
    return {**meta, "imported": receipts}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_second_import_adds_nothing_and_files_are_unchanged(
    store: Store, place: Path, layout: str
) -> None:
    write, key = LAYOUTS[layout]
    source = write(place / "old", 6)
    before = bytes_of(place / "old")

    first = copied(source, store)

    assert (first.sessions, first.messages, first.skipped) == (1, 6, ())
    assert first.imported[0].problems == ()
    assert store.list_sessions() == [key]
    found = store.get_history(key)
    assert [(m.role, m.content) for m in found] == [
        (role(number), word) for number, word in enumerate(words(6))
    ]
    shown = picture(store)
    again = copied(source, store)
    assert (again.sessions, again.messages) == (0, 0)
    assert [one.already_imported for one in again.imported] == [True]
    assert picture(store) == shown
    assert bytes_of(place / "old") == before


@pytest.mark.parametrize("layout", LAYOUTS)
def test_new_messages_of_the_source_are_added_by_next_import(
    store: Store, place: Path, layout: str
) -> None:
    write, key = LAYOUTS[layout]
    for count, added in ((2, 2), (6, 4), (7, 1), (7, 0)):
        source = write(place / "old", count)
        assert copied(source, store).messages == added
    assert store.list_sessions() == [key]
    assert [message.content for message in store.get_history(key)] == words(7)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_session_with_new_messages_here_is_not_changed_by_reimport(
    store: Store, place: Path, layout: str
) -> None:
    write, key = LAYOUTS[layout]
    copied(write(place / "old", 4), store)
    store.add_message(key, "user", "said here")
    for count in (5, 6):
        copied(write(place / "old", count), store)
    apart = [one for one in store.list_sessions() if one != key]
    assert [message.content for message in store.get_history(key)] == [*words(4), "said here"]
    # One other conversation, and not one for each import.
    [other] = apart
    assert other.startswith(f"{key} (legacy ")
    assert [message.content for message in store.get_history(other)] == words(6)


class Dying(InMemoryStore):
    """Is killed before, or right after, one of its writes."""

    steps = 0
    at = -1
    after = False


def _dying(name: str) -> Any:
    plain = getattr(InMemoryStore, name)

    def step(self: Dying, *arguments: Any, **more: Any) -> Any:
        self.steps += 1
        if self.steps == self.at and not self.after:
            raise KeyboardInterrupt
        answer = plain(self, *arguments, **more)
        if self.steps == self.at:
            raise KeyboardInterrupt
        return answer

    return step


for _name in STEPS:
    setattr(Dying, _name, _dying(_name))


@pytest.mark.parametrize("layout", [*LAYOUTS, "hidden"])
def test_p2_import_killed_between_any_two_steps_is_continued(
    place: Path, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_import, "BATCH_MESSAGES", 2)
    write, _ = LAYOUTS.get(layout, (_with_hidden, ""))
    source = write(place / "old", 5)
    with InMemoryStore() as whole:
        copied(source, whole)
        expected = picture(whole)
    steps = 0
    for after in (False, True):
        at = 0
        while True:
            at += 1
            with Dying() as store:
                store.at, store.after = at, after
                try:
                    copied(source, store)
                except KeyboardInterrupt:
                    store.at = -1
                    copied(source, store)
                else:
                    break
                assert picture(store) == expected
                steps += 1
    # A mark, three batches, a receipt; each before and after.
    assert steps >= 10


def _with_hidden(place: Path, count: int) -> Path:
    """Summary, a hidden start, and two taken back in the middle."""
    compaction = {
        "start_timestamp": said(0)["timestamp"],
        "end_timestamp": said(1)["timestamp"],
        "compacted_content": {"role": "model", "parts": [{"text": "so far"}]},
    }
    found = [said(n, {"text": word}) for n, word in enumerate(words(count))]
    found.append(said(count, actions={"compaction": compaction}, content=None))
    found.append(said(count + 1, actions={"rewind_before_invocation_id": "i2"}, content=None))
    return events(place, [*found, said(count + 2, {"text": "after"})])


def _summarised(place: Path, count: int, summary: str, removed: int) -> Path:
    source = strands(place, count)
    manager = {
        "removed_message_count": removed,
        "summary_message": {"role": "user", "content": [{"text": summary}]},
    }
    about = source / "session_k/agents/agent_default/agent.json"
    about.write_text(json.dumps({"conversation_manager_state": manager}))
    return source


def test_repeated_summaries_of_the_source_are_imported(store: Store, place: Path) -> None:
    for count, summary, removed in ((4, "one", 1), (6, "two", 3), (6, "three", 4), (7, "", 4)):
        [taken] = copied(_summarised(place / "old", count, summary, removed), store).imported
        assert taken.problems == ()
        assert store.get_summary("k") == summary
        assert [message.content for message in store.get_history("k")] == words(count)[removed:]
    # A summary that was written here is nobody's to replace.
    store.set_summary("k", "ours")
    [taken] = copied(_summarised(place / "old", 8, "theirs", 5), store).imported
    assert store.get_summary("k") == "ours"
    assert "the summary was skipped" in taken.problems[0]


def test_messages_rewound_after_import_are_hidden_by_next_import(store: Store, place: Path) -> None:
    copied(adk(place / "old", 6), store)
    rewind = said(6, actions={"rewind_before_invocation_id": "i1"}, content=None)
    taken = copied(events(place / "old", [*_as_before(6), rewind]), store)
    assert taken.messages == 1
    visible_spans = [message.content for message in store.get_history("a:u:s")]
    assert visible_spans == words(2)
    assert len(store.get_history("a:u:s", full=True)) == 7


def _as_before(count: int) -> list[dict[str, Any]]:
    authors = {"user": "user", "assistant": "agent"}
    return [said(n, {"text": word}, author=authors[role(n)]) for n, word in enumerate(words(count))]


def test_truncated_nanobot_file_continues_its_session(store: Store, place: Path) -> None:
    copied(nanobot(place / "old", 6), store)
    [log] = nanobot(place / "old", 9).rglob("*.jsonl")
    head, *lines = log.read_text().splitlines(keepends=True)
    log.write_text(head + "".join(lines[4:]))
    assert copied(place / "old", store).messages == 3
    assert [message.content for message in store.get_history("k")] == words(9)
    # What begins later than what is here ends is another conversation.
    log.write_text(head + "".join(lines[7:]).replace("word", "other"))
    copied(place / "old", store)
    assert len(store.list_sessions()) == 2


def test_state_of_the_newest_import_is_kept(store: Store, place: Path) -> None:
    copied(strands(place / "old", 2), store)
    shutil.copytree(place / "old", place / "copy")
    copied(strands(place / "old", 4), store)
    assert store.info("k").meta["strands"] == {"state": {"n": 4}}
    (place / "copy/session_k/agents/agent_default/agent.json").write_text('{"state": {"n": 9}}')
    copied(place / "copy", store)
    assert store.info("k").meta["strands"] == {"state": {"n": 4}}


def test_imported_messages_keep_their_times(place: Path) -> None:
    for layout in ("strands", "openai-agents", "adk", "plain-lines"):
        write, key = LAYOUTS[layout]
        with open_store("memory:") as store:
            copied(write(place / layout, 3), store)
            [first, *_] = store.get_history(key)
            assert first.at.date() == datetime(2026, 11, 15, tzinfo=UTC).date()
            assert store.info(key).created.date() == first.at.date()


def test_nanobot_times_are_read_as_local_time(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for zone, hour in (("UTC", 9), ("America/New_York", 14)):
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        with open_store("memory:") as store:
            copied(nanobot(place / "old", 2), store)
            assert store.get_history("k")[0].at.hour == hour
    monkeypatch.undo()
    time.tzset()
