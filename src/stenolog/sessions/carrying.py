"""One old session and the session it goes to: the steps of taking it in, in their order.

Each step is one write, and each can be made again: whoever is killed between two of them is
continued by the next run.
"""

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from msgspec import Raw
from msgspec.structs import replace

from stenolog.errors import OnceConflict
from stenolog.records import Message, timestamp
from stenolog.sessions import alias_marks, merging
from stenolog.sessions.aliases import claimed
from stenolog.sessions.importers.old import OF_THE_REFERENCE, OldSession
from stenolog.sessions.merging import Merge, There
from stenolog.stores.base import Store
from stenolog.stores.json_file import KeptMessage

CHUNK: Final = 500
"""So many messages are added in one batch."""
CHUNK_BYTES: Final = 4 * 1024 * 1024
RECEIPTS: Final = 20
"""How many receipts a session keeps."""


class Carrying:
    """`mark`, `add`, `settle`, `receipt`; `problems` says what could not be carried."""

    def __init__(
        self,
        store: Store,
        key: str,
        old: OldSession,
        digest: str,
        there: There | None,
        merge: Merge,
    ) -> None:
        self._store = store
        self._key = key
        self._digest = digest
        self._seqs = list(merge.seqs)
        self.old = old
        self.there = there
        self.merge = merge
        self.problems: list[str] = []

    def mark(self, names: Sequence[str]) -> None:
        """Say what is being taken in, so that a later run can tell what it finds half done."""
        meta = {} if self.there is None else self.there.meta
        begun = {"sha256": self._digest, "carry": self.merge.carry}
        fields: dict[str, Any] = {"importing": begun}
        aliases = [*claimed(meta), *(name for name in names if name not in claimed(meta))]
        if aliases:
            fields["aliases"] = aliases
        for name, value in (("agent", self.old.agent), ("channel", self.old.channel)):
            if value is not None and name not in meta:
                fields[name] = value
        if self.old.state and self._is_newest(meta):
            fields[self.old.layout] = self.old.state
        if names:
            alias_marks.prepare(self._store)
        self._store.set_meta(self._key, **fields)
        if names:
            alias_marks.change(self._store)

    def _is_newest(self, meta: Mapping[str, Any]) -> bool:
        """Whether the state there is not older than the one that is here."""
        known = 0 if self.there is None else len(self.there.payloads)
        return self.old.layout not in meta or known <= len(self.old.messages)

    def add(self) -> Iterator[list[int]]:
        """Add what is not there, a batch at a time; the seqs of each."""
        for start, batch in _batches(self.old.messages, len(self._seqs)):
            token = batch[0].once
            try:
                seqs = self._append(batch, token or f"import:{self._digest}:{start}")
            except OnceConflict:
                words = f"the token of message {start + 1} stands for another one: it has a new one"
                self.problems.append(words)
                seqs = self._append(batch, f"import:{self._digest}:{start}")
            self._seqs += seqs
            yield seqs

    def _append(self, batch: Sequence[KeptMessage], once: str) -> list[int]:
        messages = [Message(seq=1, _at="", _body=Raw(one.payload)) for one in batch]
        times = [one.at for one in batch if one.at is not None]
        return self._store.add_messages(self._key, messages, once=once, at=times)

    def settle(self) -> None:
        """Hide what was hidden and set the summary, unless that would be old over newer."""
        floor = merging.hidden_start(self.old)
        if self.merge.carry and floor and not self._is_all_old(self._seqs[floor - 1]):
            self.merge = replace(self.merge, carry=False)
        self.problems += self.not_carried()
        if not self.merge.carry:
            return
        if floor:
            upto = self._seqs[floor - 1]
            self._store.checkpoint(self._key, summary=self.old.summary, upto=upto)
        elif self.old.summary:
            self._store.set_summary(self._key, self.old.summary)
        hidden = [n for n, message in enumerate(self.old.messages) if message.hidden and n >= floor]
        for first, last in _runs([self._seqs[number] for number in hidden]):
            self._store.hide(self._key, first, last)

    def _is_all_old(self, upto: int) -> bool:
        """Whether a checkpoint up to this seq hides nothing but messages of the old session."""
        sight = {message.seq for message in self._store.get_history(self._key)}
        return all(seq > upto for seq in sight.difference(self._seqs))

    def not_carried(self) -> Iterator[str]:
        """What is left out because the session has gone on since, each as a sentence."""
        if self.merge.carry or len(self.merge.seqs) == len(self.old.messages):
            return
        if self.old.summary:
            yield "its summary is left out, because the session here has gone on without it"
        if self.old.hidden:
            yield f"{self.old.hidden} messages that were hidden there are in sight here"

    def receipt(self, name: str) -> None:
        """Say that it is done: the mark goes and the receipt comes in one step."""
        info = self._store.info(self._key)
        said = [one.at for one in self.old.messages if one.at is not None]
        there = () if self.there is None else self.there.said
        receipt: dict[str, Any] = {
            "from": self.old.layout,
            "file": name,
            "sha256": self._digest,
            "messages": len(self.old.messages),
            "created": timestamp(min([self.old.created, *said])),
            # The conversation's own time counts until somebody says something here.
            "updated": timestamp(max([self.old.updated, *said, *there])),
            "last_seq": info.last_seq,
            merging.TAKEN: timestamp(datetime.now(UTC)),
        }
        if self.old.layout == "stenolog-json" and self.old.messages:
            *_, receipt[merging.SAID] = merging.digests(self.old.messages)
        if self.old.layout not in OF_THE_REFERENCE and info.summary == self.old.summary != "":
            receipt[merging.SUMMARY] = merging.summary_digest(info.summary)
        kept = [*merging.receipts(info.meta), receipt][-RECEIPTS:]
        self._store.set_meta(self._key, importing=None, imported=kept)


def _runs(seqs: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The seqs as runs without a gap, first and last of each: one step hides a run."""
    for start, seq in enumerate(seqs):
        if start == 0 or seqs[start - 1] != seq - 1:
            end = start
            while end + 1 < len(seqs) and seqs[end + 1] == seqs[end] + 1:
                end += 1
            yield seq, seqs[end]


def _batches(
    messages: Sequence[KeptMessage], start: int
) -> Iterator[tuple[int, Sequence[KeptMessage]]]:
    """What is left to be added: messages with a token one by one, the others in batches."""
    while start < len(messages):
        end, size = start + 1, len(messages[start].payload)
        if messages[start].once is None:
            while end < len(messages) and end - start < CHUNK and messages[end].once is None:
                size += len(messages[end].payload)
                if size > CHUNK_BYTES:
                    break
                end += 1
        yield start, messages[start:end]
        start = end
