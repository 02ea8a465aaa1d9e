"""Tests that the doctor repairs everything it promises, without losing a byte."""

import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from stenolog.maintenance.log_damage import Kind
from stenolog.maintenance.repair import accept, repair
from stenolog.maintenance.workspace_check import examine
from stenolog.stores.open_store import open_store

KEY = "telegram:123"
NAME = "telegram%3A123.jsonl"
Break = Callable[[Path], Path]
"""Damages the log or a related file, and returns the changed file."""


def _ends_with(extra: bytes) -> Break:
    def spoil(log: Path) -> Path:
        log.write_bytes(log.read_bytes() + extra)
        return log

    return spoil


def _cut_before(words: bytes) -> Break:
    def spoil(log: Path) -> Path:
        text = log.read_bytes()
        log.write_bytes(text[: text.index(words)])
        return log

    return spoil


def _new_file(name: str, text: bytes) -> Break:
    def spoil(log: Path) -> Path:
        path = log.with_name(name)
        path.touch(mode=0o600)
        path.write_bytes(text)
        return path

    return spoil


BREAKS: dict[str, Break] = {
    "a torn line": _ends_with(b'{"kind":"message","seq":8,"at":"20'),
    "NUL bytes": _ends_with(bytes(300)),
    "a damaged last line": _ends_with(b'{"kind":"message","seq":8}\n'),
    "a torn batch": _cut_before(b'"z"'),
    "an empty file": _new_file("empty.jsonl", b""),
    "a torn beginning": _new_file("torn.jsonl", b'{"kind":"state","seq":1,"a'),
    "a ruin": _new_file("ruin.jsonl", b'{"kind":"state","seq":1}\n{"kind":"state"}\n'),
}


def _all_bytes(workspace: Path) -> list[bytes]:
    return [path.read_bytes() for path in workspace.rglob("*") if path.is_file()]


def _seqs(workspace: Path) -> list[int]:
    with open_store(workspace, read_only=True) as store:
        return [message.seq for message in store.get_history(KEY)]


@pytest.mark.parametrize("name", BREAKS)
def test_p3_repair_fixes_the_finding_and_keeps_every_byte(
    workspace: Path, log: Path, name: str
) -> None:
    touched = BREAKS[name](log)
    spoilt = touched.read_bytes()
    visible = _seqs(workspace)

    settled = repair(workspace)

    assert [one.done for one in settled] == [True]
    assert examine(workspace).findings == ()
    assert any(text.startswith(spoilt) for text in _all_bytes(workspace))
    assert _seqs(workspace) == visible
    with open_store(workspace) as store:
        seq = store.add_message(KEY, "user", "next")
    assert _seqs(workspace) == [*visible, seq]
    assert examine(workspace).findings == ()


def test_p3_a_torn_tail_is_voided_in_place_and_the_file_never_shrinks(
    workspace: Path, log: Path
) -> None:
    _ends_with(b'{"kind":"mess')(log)
    torn = log.read_bytes()

    repair(workspace)

    assert log.read_bytes().startswith(torn + b"\n" + b'{"kind":"void",')
    assert not (workspace / "sessions" / "aside").exists()


def test_p11_files_moved_aside_are_private(workspace: Path, log: Path) -> None:
    _new_file("empty.jsonl", b"")(log)

    (one,) = repair(workspace)

    folder = workspace / "sessions" / "aside"
    (moved,) = folder.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(moved.stat().st_mode) == 0o600
    assert one.message == f"moved to sessions/aside/{moved.name}"
    assert moved.name.startswith("empty.jsonl.")


def test_unreferenced_archives_are_moved_aside_and_referenced_ones_stay(compacted: Path) -> None:
    archives = sorted((compacted / "sessions" / "archive").glob("*/*"))
    spare = archives[0].with_name("1-9.jsonl.gz")
    shutil.copy2(archives[0], spare)
    before = sorted(_all_bytes(compacted))

    assert [one.done for one in repair(compacted)] == [True]

    assert sorted(_all_bytes(compacted)) == before
    assert sorted((compacted / "sessions" / "archive").glob("*/*")) == archives
    assert examine(compacted).findings == ()
    with open_store(compacted) as store:
        assert len(store.get_history(KEY, full=True)) == 8


def test_archives_of_a_key_too_long_for_a_file_name_stay(tmp_path: Path) -> None:
    place = tmp_path / "workspace"
    key = "k" * 900
    with open_store(place) as store:
        for content in "abc":
            store.add_message(key, "user", content)
        store.truncate_history(key, 1)
        store.compact(key)
    (archive,) = (place / "sessions" / "archive").glob("*/*")
    archive.with_name("1-9.jsonl.gz").touch(mode=0o600)

    (one,) = repair(place)

    assert (one.finding.kind, one.finding.key, one.done) == (Kind.UNREFERENCED_ARCHIVE, key, True)
    assert archive.exists()
    assert examine(place).findings == ()


UNSETTLED: dict[str, Break] = {
    "damage in the middle": lambda log: _replace(log, b'"two"', b'"two'),
    "a hand edit": lambda log: _replace(log, b'"two"', b'"2"'),
    "a hand edit at the end": lambda log: _replace(log, b'"so far"', b'"so near"'),
    "another program's log": _new_file("other.jsonl", b'{"role":"user"}\n'),
}


def _replace(log: Path, old: bytes, new: bytes) -> Path:
    log.write_bytes(log.read_bytes().replace(old, new))
    return log


@pytest.mark.parametrize("name", UNSETTLED)
def test_repair_does_not_change_unrepairable_findings(
    workspace: Path, log: Path, name: str
) -> None:
    UNSETTLED[name](log)
    before = sorted(_all_bytes(workspace))

    assert repair(workspace) == []

    assert sorted(_all_bytes(workspace)) == before
    assert len(examine(workspace).findings) == 1


def test_repair_of_a_healthy_workspace_changes_nothing(compacted: Path) -> None:
    before = sorted(_all_bytes(compacted))
    assert repair(compacted) == []
    assert accept(compacted) == []
    assert sorted(_all_bytes(compacted)) == before


def test_failed_repair_reports_reason(workspace: Path, log: Path) -> None:
    _new_file("empty.jsonl", b"")(log)
    (workspace / "sessions" / "aside").write_text("in the way")

    (one,) = repair(workspace)

    assert not one.done
    assert "something else is at this path" in one.message
    assert (workspace / "sessions" / "empty.jsonl").exists()


# --- hand edits ------------------------------------------------------------------------------


def _contents(workspace: Path) -> list[object]:
    with open_store(workspace, read_only=True) as store:
        return [message.content for message in store.get_history(KEY)]


def test_accept_accepts_edit_and_keeps_previous_log(workspace: Path, log: Path) -> None:
    edited = _replace(log, b'"two"', '"zwei ☕"'.encode()).read_bytes()

    (one,) = accept(workspace)

    assert one.done
    assert _contents(workspace) == ["one", "zwei ☕", "three", "four", "x", "y", "z"]
    assert examine(workspace).findings == ()
    (kept,) = (workspace / "sessions" / "aside").iterdir()
    assert kept.read_bytes() == edited
    assert one.message.endswith(f"sessions/aside/{kept.name}")
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600


PLAIN = b'{"role": "user", "content": "by hand"}\n'


@pytest.mark.parametrize("line", [PLAIN, PLAIN.rstrip(), PLAIN + PLAIN])
def test_plain_message_added_by_hand_is_reported_and_accepted(
    workspace: Path, log: Path, line: bytes
) -> None:
    _ends_with(line)(log)
    count = len(line.splitlines())

    findings = examine(workspace).findings

    assert [one.kind for one in findings] == [Kind.HAND_EDIT] * count
    assert all("added by hand" in one.meaning and one.lost == () for one in findings)
    assert all("cannot be read" not in one.meaning for one in findings)
    assert [one.done for one in accept(workspace)] == [True]
    before = ["one", "two", "three", "four", "x", "y", "z"]
    assert _contents(workspace) == [*before, *["by hand"] * count]
    assert examine(workspace).findings == ()
    with open_store(workspace) as store:
        assert store.add_message(KEY, "user", "next") == 8 + count


def test_voided_plain_message_can_still_be_accepted(workspace: Path, log: Path) -> None:
    _ends_with(PLAIN)(log)
    with open_store(workspace) as store:
        store.add_message(KEY, "user", "later")

    [finding] = examine(workspace).findings
    assert "added by hand" in finding.meaning
    assert [one.done for one in accept(workspace)] == [True]

    assert _contents(workspace)[-2:] == ["by hand", "later"]
    assert examine(workspace).findings == ()
    with open_store(workspace, read_only=True) as store:
        assert (store.info(KEY).lost, store.info(KEY).damaged) == (0, 0)


def test_accept_accepts_all_edits_of_a_log(workspace: Path, log: Path) -> None:
    _replace(log, b'"one"', b'"1"')
    _replace(log, b'"y"', b'"Y"')
    _replace(log, b'"so far"', b'"edited"')

    assert len(accept(workspace)) == 1

    assert _contents(workspace) == ["1", "two", "three", "four", "x", "Y", "z"]
    with open_store(workspace) as store:
        assert store.get_summary(KEY) == "edited"
        info = store.info(KEY)
        assert (info.lost, info.damaged, info.generation) == (0, 0, 2)
        assert store.add_message(KEY, "user", "next") == 8


def test_accept_makes_lost_messages_readable(workspace: Path, log: Path) -> None:
    """A state or void written after the edit records the message as lost."""
    _replace(log, b'"two"', b'"2"')
    with open_store(workspace) as store:
        for number in range(300):
            store.add_message(KEY, "user", f"filler {number}")
        assert store.info(KEY).lost == 1

    accept(workspace)

    assert _contents(workspace)[:3] == ["one", "2", "three"]
    with open_store(workspace) as store:
        assert store.info(KEY).lost == 0


@pytest.mark.parametrize("part", ["x", "y", "z"])
def test_accept_makes_voided_batch_readable(workspace: Path, log: Path, part: str) -> None:
    _cut_before(b'{"kind":"change"')(log)
    _replace(log, f'"{part}"'.encode(), f'"{part.upper()}"'.encode())
    with open_store(workspace) as store:
        store.add_message(KEY, "user", "after")

    accept(workspace)

    expected = ["one", "two", "three", "four", "x", "y", "z", "after"]
    assert _contents(workspace) == [part.upper() if c == part else c for c in expected]
    assert examine(workspace).findings == ()


def test_accept_does_not_change_other_damage(workspace: Path, log: Path) -> None:
    _replace(log, b'"two"', b'"2"')
    _replace(log, b'"three"', b'"three')
    _ends_with(b'{"kind')(log)

    accept(workspace)

    assert _contents(workspace) == ["one", "2", "four", "x", "y", "z"]
    assert [finding.kind for finding in examine(workspace).findings] == [Kind.DAMAGED_LINE]
    with open_store(workspace) as store:
        assert store.info(KEY).lost == 1


def test_accept_of_a_compacted_log_keeps_its_archives(compacted: Path) -> None:
    _replace(compacted / "sessions" / NAME, b'"newest"', b'"edited"')

    accept(compacted)

    assert _contents(compacted) == ["edited"]
    with open_store(compacted) as store:
        assert len(store.get_history(KEY, full=True)) == 8
    assert examine(compacted).findings == ()


def test_p7_accept_during_writes_loses_no_message(workspace: Path, log: Path) -> None:
    _replace(log, b'"two"', b'"2"')
    with open_store(workspace) as store:
        store.add_message(KEY, "user", "before")
        accept(workspace)
        store.add_message(KEY, "user", "after")

    assert _contents(workspace)[-2:] == ["before", "after"]
    assert list((workspace / "sessions" / "aside").iterdir())


# --- the trash -------------------------------------------------------------------------------


def test_damaged_logs_in_the_trash_stay(workspace: Path) -> None:
    with open_store(workspace) as store:
        store.delete(KEY)
    [log] = (workspace / "sessions" / "trash").iterdir()
    damaged_logs = {
        "0123456789abcdef.20260101T000000.000000Z.jsonl": b"",
        "0123456789abcdee.20260101T000000.000000Z.jsonl": b'{"kind":"state","seq"',
    }
    for name, text in damaged_logs.items():
        _new_file(name, text)(log)

    assert repair(workspace) == []
    assert [finding.kind for finding in examine(workspace).findings] == [Kind.DAMAGED_LINE] * 2
    assert {path.name for path in log.parent.iterdir()} == {log.name, *damaged_logs}


def test_repair_does_not_change_a_deleted_session(compacted: Path) -> None:
    with open_store(compacted) as store:
        store.delete(KEY)
        store.add_message(KEY, "user", "the next life")
    [log] = (compacted / "sessions" / "trash").iterdir()
    log.write_bytes(log.read_bytes().replace(b'"newest"', b'"edited"') + b"torn")
    before = log.read_bytes()
    assert [finding.kind for finding in examine(compacted).findings] == [Kind.HAND_EDIT]

    assert repair(compacted) == accept(compacted) == []

    assert log.read_bytes() == before
    [finding] = examine(compacted).findings
    assert "Restore" in finding.advice
    with open_store(compacted) as store:
        store.admin.restore(KEY, as_key="b")
    assert [one.done for one in accept(compacted)] == [True]
    with open_store(compacted) as store:
        assert store.get_history("b")[-1].content == "edited"
    assert examine(compacted).findings == ()


def test_spare_archives_of_a_deleted_session_are_moved_aside(compacted: Path) -> None:
    archive = sorted((compacted / "sessions" / "archive").glob("*/*"))[0]
    shutil.copy2(archive, archive.with_name("1-9.jsonl.gz"))
    with open_store(compacted) as store:
        store.delete(KEY)
        store.add_message(KEY, "user", "the next life")

    assert [one.done for one in repair(compacted)] == [True]

    assert examine(compacted).findings == ()
    with open_store(compacted) as store:
        store.admin.restore(KEY, as_key="b")
        assert len(store.get_history("b", full=True)) == 8
