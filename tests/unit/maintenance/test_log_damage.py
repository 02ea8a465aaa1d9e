"""Tests the doctor's findings about one log, for each kind of damage."""

import json
from binascii import crc32
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenolog.codec import is_intact
from stenolog.maintenance.log_damage import Kind, examine_log
from stenolog.records import Span
from stenolog.stores.open_store import open_store

KEY = "telegram:123"
NAME = "telegram%3A123.jsonl"


def _line_of(text: bytes, words: bytes) -> bytes:
    return next(line for line in text.split(b"\n") if words in line)


def _without_line(text: bytes, words: bytes) -> bytes:
    return text.replace(_line_of(text, words) + b"\n", b"")


def _signed(line: bytes) -> bytes:
    return b'%b,"crc":"%08x"}\n' % (line, crc32(line))


def _of_kind(kind: bytes, seq: int) -> bytes:
    return _signed(
        b'{"kind":"%b","seq":%d,"at":"2030-01-01T00:00:00.000000Z","body":{}' % (kind, seq)
    )


def _newer_state(text: bytes) -> bytes:
    body = text.split(b"\n")[0].rpartition(b',"crc":"')[0]
    return _signed(body.replace(b'"format":1', b'"format":2'))


@dataclass(frozen=True)
class Case:
    """A way to damage the log of the fixture, and the expected finding."""

    kind: Kind
    damage: Callable[[bytes], bytes]
    lost: tuple[Span, ...] = ()
    repairable: bool = False
    says: str = ""


CASES = {
    "a torn line": Case(
        Kind.TORN_TAIL, lambda t: t + b'{"kind":"message","seq":8,"at":"20', repairable=True
    ),
    "garbage at the end": Case(Kind.TORN_TAIL, lambda t: t + b"\xff\xfe", repairable=True),
    "a torn first line": Case(Kind.TORN_TAIL, lambda t: t[:70], repairable=True),
    "not one intact line": Case(
        Kind.DAMAGED_LINE,
        lambda t: t.replace(b'"at"', b'"ta"'),
        repairable=True,
        says="no message can be read",
    ),
    "a damaged message": Case(
        Kind.DAMAGED_LINE, lambda t: t.replace(b'"three"', b'"three'), lost=((3, 3),)
    ),
    "a damaged state": Case(
        Kind.DAMAGED_LINE, lambda t: t.replace(b"{", b"[", 1), says="No message is missing"
    ),
    "two records in one line": Case(
        Kind.DAMAGED_LINE,
        lambda t: t.replace(b'}\n{"kind":"message","seq":3', b'}{"kind":"message","seq":3'),
        says="every record was found",
    ),
    "changed line ends": Case(
        Kind.DAMAGED_LINE, lambda t: t.replace(b"\n", b"\r\n"), says="and 9 more"
    ),
    "a damaged last line": Case(Kind.DAMAGED_LINE, lambda t: t[:-4] + b"\n", repairable=True),
    "NUL at the end": Case(Kind.NUL_BYTES, lambda t: t + bytes(4096), repairable=True),
    "NUL in the middle": Case(
        Kind.NUL_BYTES,
        lambda t: t.replace(line := _line_of(t, b'"two"'), bytes(len(line))),
        lost=((2, 2),),
    ),
    "nothing but NUL": Case(Kind.NUL_BYTES, lambda t: bytes(len(t)), repairable=True),
    "a batch cut off": Case(
        Kind.INCOMPLETE_BATCH,
        lambda t: t[: t.index(_line_of(t, b'"z"'))],
        repairable=True,
        says="The batch was never acknowledged",
    ),
    "a batch torn": Case(Kind.INCOMPLETE_BATCH, lambda t: t[: t.index(b'"z"')], repairable=True),
    "an edited message": Case(
        Kind.HAND_EDIT, lambda t: t.replace(b'"three"', b'"3"'), lost=((3, 3),)
    ),
    "an edited last message": Case(
        Kind.HAND_EDIT,
        lambda t: t[: t.index(_line_of(t, b'"four"'))].replace(b'"three"', b'"3"'),
        lost=((3, 3),),
    ),
    "an edited last line without its end": Case(
        Kind.HAND_EDIT,
        lambda t: t[: t.index(_line_of(t, b'"four"')) - 1].replace(b'"three"', b'"3"'),
        lost=((3, 3),),
    ),
    "an edited summary": Case(Kind.HAND_EDIT, lambda t: t.replace(b'"so far"', b'"so near"')),
    "a line taken out": Case(
        Kind.MISSING_LINE, lambda t: _without_line(t, b'"two"'), lost=((2, 2),)
    ),
    "another program's log": Case(
        Kind.FOREIGN_LOG,
        lambda _: b'{"role":"user","content":"hello"}\n',
        says="neither reads nor changes",
    ),
    "no text at all": Case(Kind.FOREIGN_LOG, lambda _: b"\x89PNG\r\n\x1a\n"),
    "a newer format": Case(Kind.NEWER_FORMAT, lambda t: t + _newer_state(t), says="format 2"),
    "a newer kind of state": Case(Kind.NEWER_FORMAT, lambda t: t + _of_kind(b"state2", 8)),
    "an unknown kind": Case(Kind.NEWER_FORMAT, lambda t: t + _of_kind(b"poll", 8), says="poll"),
    "an empty file": Case(Kind.EMPTY_FILE, lambda _: b"", repairable=True),
}


@pytest.mark.parametrize("name", CASES)
def test_p3_each_kind_of_damage_is_reported(log: Path, name: str) -> None:
    case = CASES[name]

    judged = examine_log(case.damage(log.read_bytes()), NAME)

    assert [finding.kind for finding in judged.findings] == [case.kind]
    (finding,) = judged.findings
    assert finding.key == KEY
    assert finding.path == f"sessions/{NAME}"
    assert finding.lost == case.lost
    assert finding.repairable == case.repairable
    assert case.says in f"{finding.where} {finding.meaning}"
    assert finding.advice


def test_every_kind_of_log_damage_has_a_case() -> None:
    of_folders = {
        Kind.WRONG_FILE_NAME,
        Kind.NOT_A_FILE,
        Kind.UNREADABLE,
        Kind.MISSING_ARCHIVE,
        Kind.DAMAGED_ARCHIVE,
        Kind.LEFTOVER,
        Kind.UNREFERENCED_ARCHIVE,
        Kind.WIDE_PERMISSIONS,
    }
    assert {case.kind for case in CASES.values()} == set(Kind) - of_folders


def test_intact_log_has_no_findings(log: Path) -> None:
    judged = examine_log(log.read_bytes(), NAME)
    assert judged.findings == ()
    assert not judged.may_be_growing
    assert judged.state is not None


def test_missing_newline_at_the_end_is_not_a_finding(log: Path) -> None:
    assert examine_log(log.read_bytes().removesuffix(b"\n"), NAME).findings == ()


def test_record_of_an_optional_kind_is_not_a_finding(log: Path) -> None:
    assert examine_log(log.read_bytes() + _of_kind(b"x-mark", 8), NAME).findings == ()


def test_voided_tail_is_not_a_finding(workspace: Path, log: Path) -> None:
    log.write_bytes(log.read_bytes() + b'{"kind":"mess')
    with open_store(workspace) as store:
        store.add_message(KEY, "user", "next")

    assert examine_log(log.read_bytes(), NAME).findings == ()


def test_voided_hand_edit_is_still_reported(workspace: Path, log: Path) -> None:
    text = log.read_bytes()
    log.write_bytes(text[: text.index(b'"z"')] + text[text.index(b'"z"') :].replace(b"z", b"Z", 1))
    log.write_bytes(log.read_bytes()[: log.read_bytes().index(b'{"kind":"change"')])
    with open_store(workspace) as store:
        store.add_message(KEY, "user", "next")

    (finding,) = examine_log(log.read_bytes(), NAME).findings
    assert finding.kind is Kind.HAND_EDIT
    assert finding.lost == ((7, 7),)


def test_a_damaged_line_in_the_last_batch_makes_the_batch_incomplete(log: Path) -> None:
    text = log.read_bytes()
    text = text[: text.index(b'{"kind":"change"')].replace(b'"y"', b'"y')

    kinds = {finding.kind: finding for finding in examine_log(text, NAME).findings}

    assert set(kinds) == {Kind.DAMAGED_LINE, Kind.INCOMPLETE_BATCH}
    assert kinds[Kind.DAMAGED_LINE].lost == ((6, 6),)
    assert kinds[Kind.INCOMPLETE_BATCH].lost == ((5, 5), (7, 7))


def test_repair_does_not_void_hand_edit_in_last_batch(log: Path) -> None:
    text = log.read_bytes()
    text = text[: text.index(b'{"kind":"change"')].replace(b'"y"', b'"Y"')

    findings = examine_log(text, NAME).findings

    assert {finding.kind for finding in findings} == {Kind.HAND_EDIT, Kind.INCOMPLETE_BATCH}
    assert not any(finding.repairable for finding in findings)


def test_several_damaged_places_are_reported_with_their_lost_messages(log: Path) -> None:
    text = log.read_bytes()
    text = text.replace(b'"one"', b'"one').replace(b'"three"', b'"III"') + b"{"

    findings = examine_log(text, NAME).findings

    assert [(finding.kind, finding.lost) for finding in findings] == [
        (Kind.DAMAGED_LINE, ((1, 1),)),
        (Kind.HAND_EDIT, ((3, 3),)),
        (Kind.TORN_TAIL, ()),
    ]
    assert findings[0].where.startswith("line 3, bytes ")
    assert findings[1].where.startswith("line 5, bytes ")


def test_seqs_that_were_never_acknowledged_or_purged_are_not_missing() -> None:
    at = b'"at":"2030-01-01T00:00:00.000000Z"'
    gaps = b'"generation":1,"void":[[2,2]],"purged":[[3,4]],'
    text = _small_log().splitlines()[0].rpartition(b',"crc":"')[0].replace(b'"generation":1,', gaps)
    messages = [
        b'{"kind":"message","seq":%d,%b,"body":{"role":"user","content":"hi"}' % (seq, at)
        for seq in (1, 5)
    ]

    assert examine_log(b"".join(map(_signed, [text, *messages])), NAME).findings == ()


@pytest.mark.parametrize("damage", [(b"", b"{"), (b'"two"', b'"2"'), (b'"two"', b'"two')])
def test_misnamed_log_has_only_that_finding(log: Path, damage: tuple[bytes, bytes]) -> None:
    text = log.read_bytes()
    judged = examine_log(text.replace(*damage) if damage[0] else text + damage[1], "somebody.jsonl")

    # --repair and --accept would not find the file, because they use the key.
    assert [finding.kind for finding in judged.findings] == [Kind.WRONG_FILE_NAME]
    assert judged.findings[0].key == KEY
    assert NAME in judged.findings[0].advice
    assert not any(finding.repairable for finding in judged.findings)


def test_repair_is_advised_only_for_repairable_findings(log: Path) -> None:
    torn = log.read_bytes() + b"{"
    *_, tail = examine_log(torn, NAME).findings
    assert tail.repairable
    assert "--repair does so now" in tail.advice
    without_states = torn.replace(b'"state"', b'"stale"')
    *_, tail = examine_log(without_states, NAME).findings
    assert not tail.repairable
    assert tail.advice.startswith("Fix the other findings of this log first. The next write then")


@given(st.data())
def test_p3_no_flipped_byte_goes_unnoticed(data: st.DataObject) -> None:
    text = _small_log()
    place = data.draw(st.integers(0, len(text) - 2))
    flipped = bytearray(text)
    flipped[place] ^= 1 << data.draw(st.integers(0, 7))

    assert examine_log(bytes(flipped), NAME).findings


@given(st.data())
def test_p3_log_truncated_anywhere_is_examined_without_error(data: st.DataObject) -> None:
    text = _small_log()
    cut = data.draw(st.integers(0, len(text)))

    judged = examine_log(text[:cut], NAME)

    whole = text[:cut].endswith(b"\n") or (cut and is_intact(text[:cut].rpartition(b"\n")[2]))
    assert bool(judged.findings) != bool(whole)
    assert all(finding.repairable for finding in judged.findings)


def _small_log() -> bytes:
    state = json.dumps(
        {
            "format": 1,
            "key": KEY,
            "uid": "0123456789abcdef",
            "generation": 1,
            "created": "2030-01-01T00:00:00.000000Z",
        },
        separators=(",", ":"),
    ).encode()
    at = b'"at":"2030-01-01T00:00:00.000000Z"'
    lines = [b'{"kind":"state","seq":1,%b,"body":%b' % (at, state)] * 2
    lines += [
        b'{"kind":"message","seq":%d,%b,"body":{"role":"user","content":"hi"}' % (seq, at)
        for seq in (1, 2, 3)
    ]
    return b"".join(map(_signed, lines))
