"""Logs written by the store, with an index of their records, for tests that damage them."""

import json
from dataclasses import dataclass, field
from pathlib import Path

from stenolog import JSONLStore
from stenolog.stores.arguments import make_batch
from support.group_appends import append_as_group

KEY = "telegram:123"


@dataclass(frozen=True)
class Line:
    """One line of a log as it was written."""

    start: int
    stop: int
    """Offset after its newline."""
    kind: str
    seq: int
    joined: bool
    part: tuple[int, int] | None


@dataclass(frozen=True)
class Account:
    """A log and its records."""

    text: bytes
    lines: list[Line]
    archived: set[int] = field(default_factory=set)

    def unit(self, index: int) -> list[int]:
        """Return the lines of the batch that contains this line."""
        part = self.lines[index].part
        if part is None:
            return [index]
        first = index - (part[0] - 1)
        return list(range(first, first + part[1]))

    def messages(self, indexes: list[int] | set[int]) -> set[int]:
        """Return the seqs of the messages among these lines."""
        return {self.lines[i].seq for i in indexes if self.lines[i].kind == "message"}

    @property
    def all_messages(self) -> set[int]:
        """Return all seqs, including archived ones."""
        return self.archived | self.messages(list(range(len(self.lines))))


def account(text: bytes, archived: set[int] | None = None) -> Account:
    """Parse an undamaged log without the store's code."""
    lines = []
    start = 0
    for raw in text.split(b"\n")[:-1]:
        fields = json.loads(raw)
        part = fields.get("part")
        lines.append(
            Line(
                start=start,
                stop=start + len(raw) + 1,
                kind=fields["kind"],
                seq=fields["seq"],
                joined=fields.get("joined", False),
                part=tuple(part) if part else None,
            )
        )
        start += len(raw) + 1
    return Account(text, lines, archived or set())


def log_path(workspace: Path) -> Path:
    """Return the path of the session's log."""
    return workspace / "sessions" / "telegram%3A123.jsonl"


def write_every_kind(workspace: Path) -> Account:
    """Write a log with every kind of record: messages, batches, changes, states, a void."""
    with JSONLStore(workspace) as store:
        for number in range(4):
            store.add_message(KEY, "user", f"message {number} – naïve ☃")
        store.add_messages(KEY, [{"role": "tool", "n": n} for n in range(3)], once="batch-1")
        store.checkpoint(KEY, summary="the first three", upto=3)
        store.compact(KEY)
        store.add_message(KEY, "assistant", "after the compaction", once="single")
        store.set_meta(KEY, title="A talk")
    path = log_path(workspace)
    with path.open("ab") as file:
        file.write(b'{"kind":"message","seq":9,"at":"2026-')
    with JSONLStore(workspace) as store:
        store.set_history(KEY, [{"role": "user", "content": "other"}, {"role": "user"}])
        store.admin.hide(KEY, 9, 9)
        store.undo(KEY)
        store.add_messages(KEY, [{"role": "tool", "late": n} for n in range(3)])
    text = path.read_bytes()
    cleaned = text.replace(b'{"kind":"message","seq":9,"at":"2026-\n', b"")
    torn = len(text) - len(cleaned)
    assert torn > 0
    lines = []
    for line in account(cleaned).lines:
        shift = torn if line.start >= text.index(b'{"kind":"message","seq":9,"at":"2026-\n') else 0
        lines.append(
            Line(line.start + shift, line.stop + shift, line.kind, line.seq, line.joined, line.part)
        )
    return Account(text, lines, {1, 2, 3})


def write_batches_of_three(workspace: Path, *, followed: bool) -> Account:
    """Write two batches of three messages, the last one followed by another record or not."""
    with JSONLStore(workspace) as store:
        store.add_message(KEY, "user", "first")
        store.add_messages(KEY, [{"role": "tool", "a": n} for n in range(3)])
        store.add_messages(KEY, [{"role": "tool", "b": n} for n in range(3)])
        if followed:
            store.add_message(KEY, "user", "last")
    return account(log_path(workspace).read_bytes())


def write_group(workspace: Path) -> Account:
    """Write the appends of three callers as one group: a batch, a message, a batch."""
    with JSONLStore(workspace) as store:
        store.add_message(KEY, "user", "first")
        append_as_group(
            store,
            KEY,
            [
                make_batch([{"role": "tool", "a": n} for n in range(3)], "a", None),
                make_batch([{"role": "user", "content": "between"}], None, None),
                make_batch([{"role": "tool", "b": n} for n in range(2)], None, None),
            ],
        )
    return account(log_path(workspace).read_bytes())
