"""Tests P2 and P3: a cut, flipped or overwritten log opens and loses only the damaged records.

The store reports the damage, accepts an append, and has it after reopening.
"""

import logging
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from stenolog import JSONLStore
from support.jsonl_logs import (
    KEY,
    Account,
    log_path,
    write_batches_of_three,
    write_every_kind,
    write_group,
)

SEED = 20_261_115


@pytest.fixture
def bench(fast_path: Path) -> "Bench":
    return Bench(fast_path)


class Bench:
    """Checks a damaged copy of a log: broken → readable → writable → readable."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rounds = 0

    def make(self, write: Callable[[Path], Account]) -> Account:
        return write(self.folder)

    def judge(
        self,
        damaged: bytes,
        caplog: pytest.LogCaptureFixture,
        *,
        expected: set[int],
        reported: bool,
        what: str,
    ) -> None:
        """Check that only `expected` is left, damage is reported, and the session can be used."""
        self.rounds += 1
        log_path(self.folder).write_bytes(damaged)
        caplog.clear()
        with JSONLStore(self.folder) as store:
            found = {m.seq: m.to_json() for m in store.get_history(KEY, full=True)}
            assert set(found) == expected, what
            if expected:
                info = store.info(KEY)
                said = info.damaged + info.lost + info.void_bytes
                assert bool(said) or not reported, f"{what}: not counted"
                assert info.count == len(expected), what
            seq = store.add_message(KEY, "user", "after the damage")
            assert caplog.records or not reported, f"{what}: no warning"
            assert seq > max(expected, default=0), f"{what}: a seq was given out again"
            # A process that has synced everything writes the second: it proves the records before
            # it.
            more = store.add_message(KEY, "user", "proof")
        with JSONLStore(self.folder) as store:
            again = {m.seq: m.to_json() for m in store.get_history(KEY, full=True)}
            assert set(again) == expected | {seq, more}, f"{what}: after reopening"
            assert b"after the damage" in again[seq], what
            assert {s: again[s] for s in found} == found, f"{what}: a neighbour changed"
        with JSONLStore(self.folder, read_only=True) as store:
            seqs = {m.seq for m in store.get_history(KEY, full=True)}
            assert seqs == expected | {seq, more}, what


def whole_within(log: Account, cut: int) -> set[int]:
    """Return what is left of a cut log: a record counts without its newline."""
    kept = {i for i, line in enumerate(log.lines) if line.stop - 1 <= cut}
    return log.messages({i for i in kept if all(j in kept for j in log.unit(i))})


def proven(log: Account, index: int) -> bool:
    """Return whether a later line proves that this one was acknowledged."""
    last = max(log.unit(index))
    return any(not line.joined for line in log.lines[last + 1 :])


def left_after(log: Account, index: int) -> set[int]:
    """Return what is left if this line cannot be read."""
    gone = [index] if proven(log, index) else log.unit(index)
    return log.all_messages - log.messages(gone)


@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_p2_log_truncated_at_any_byte_keeps_complete_records_and_accepts_appends(
    bench: Bench, caplog: pytest.LogCaptureFixture, step: int
) -> None:
    caplog.set_level(logging.WARNING, "stenolog")
    log = bench.make(write_every_kind)
    clean = {0, *(line.start for line in log.lines), *(line.stop for line in log.lines)}
    # Every byte near the end of a record; within records only every `step`th.
    near = {end + offset for end in clean for offset in range(-3, 4)}
    for cut in range(len(log.text) + 1):
        if cut % step and cut not in near:
            continue
        has_state = cut >= log.lines[0].stop - 1
        archived = log.archived if has_state else set()
        bench.judge(
            log.text[:cut],
            caplog,
            expected=archived | whole_within(log, cut),
            reported=cut not in clean and cut + 1 not in clean,
            what=f"cut at {cut}",
        )
    print(f"cut: {bench.rounds} cuts")


@pytest.mark.parametrize(
    "write",
    [
        pytest.param(write_every_kind, id="every kind"),
        pytest.param(partial(write_batches_of_three, followed=True), id="batches, proven"),
        pytest.param(partial(write_batches_of_three, followed=False), id="batches, last"),
        pytest.param(write_group, id="a group in one write"),
    ],
)
def test_p3_flipped_byte_hides_only_its_own_record(
    bench: Bench, caplog: pytest.LogCaptureFixture, write: Callable[[Path], Account]
) -> None:
    caplog.set_level(logging.WARNING, "stenolog")
    log = bench.make(write)
    dice = random.Random(SEED)
    for index, line in enumerate(log.lines):
        for offset in range(line.start, line.stop):
            newline = offset == line.stop - 1
            before = log.text[offset]
            after = dice.choice([before ^ 1, before ^ 0x20, before ^ 0x80, 0x0A, 0x00])
            if after == before:
                after = before ^ 1
            bench.judge(
                log.text[:offset] + bytes([after]) + log.text[offset + 1 :],
                caplog,
                expected=log.all_messages if newline else left_after(log, index),
                reported=True,
                what=f"byte {offset} of line {index + 1} ({line.kind}): {before:#x} → {after:#x}",
            )
    print(f"flips: {bench.rounds}, seed {SEED}")


@pytest.mark.parametrize("followed", [True, False])
def test_p3_nul_bytes_in_a_batch_hide_only_the_overwritten_records(
    bench: Bench, caplog: pytest.LogCaptureFixture, followed: bool
) -> None:
    caplog.set_level(logging.WARNING, "stenolog")
    log = bench.make(partial(write_batches_of_three, followed=followed))
    for index, line in enumerate(log.lines):
        inside = bytes(line.stop - line.start - 1)
        bench.judge(
            log.text[: line.start] + inside + log.text[line.stop - 1 :],
            caplog,
            expected=left_after(log, index),
            reported=True,
            what=f"NUL instead of line {index + 1}",
        )


@pytest.mark.parametrize("length", [1, 511, 512, 4096, 70_000])
def test_p3_nul_padding_at_the_end_loses_nothing(
    bench: Bench, caplog: pytest.LogCaptureFixture, length: int
) -> None:
    caplog.set_level(logging.WARNING, "stenolog")
    log = bench.make(write_every_kind)
    bench.judge(
        log.text + bytes(length),
        caplog,
        expected=log.all_messages,
        reported=True,
        what=f"{length} NUL bytes at the end",
    )


def test_p3_torn_tail_does_not_damage_the_next_message(tmp_path: Path) -> None:
    with JSONLStore(tmp_path) as store:
        store.add_message(KEY, "user", "before the power cut")
    with log_path(tmp_path).open("ab") as file:
        file.write(b'{"kind":"message","seq":2,"at":"2026-11-15T12:00:00.000000Z","body":{"ro')
    torn = log_path(tmp_path).read_bytes()
    with JSONLStore(tmp_path) as store:
        assert store.add_message(KEY, "user", "after it") == 2
    with JSONLStore(tmp_path) as store:
        assert [m.content for m in store.get_history(KEY)] == ["before the power cut", "after it"]
        assert store.info(KEY).void_bytes > 0
    assert log_path(tmp_path).read_bytes().startswith(torn), "the torn bytes are kept"
