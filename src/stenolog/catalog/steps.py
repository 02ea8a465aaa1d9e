"""Steps that bring the catalog entry of a session up to date. Pure.

Each step is small enough for one transaction, and names the version of the row that it starts from.
The process may end between any two steps; the next refresh continues from there.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec import Struct

from stenolog.catalog import searchable_text, stemming, tokenizer
from stenolog.catalog.catalog_database import microseconds
from stenolog.catalog.entries import State
from stenolog.catalog.owners import Ownership
from stenolog.catalog.query import stem_mark
from stenolog.records import Message, SessionInfo, Span
from stenolog.stores import spans
from stenolog.stores.withdrawn_messages import withdrawn_seqs
from stenolog.tokens import message_tokens

MOST_MESSAGES: Final = 2_000
MOST_BYTES: Final = 2_000_000
"""Limits of one transaction."""


class Row(Struct, frozen=True):
    """The catalog row of a session, as far as an update needs it."""

    id: int
    version: int
    listed: int
    uid: str
    generation: int
    archived: int
    indexed: int
    count: int
    visible: int
    tokens: int
    sight: Sequence[Span]
    prompt: str
    stamp: str | None
    problem: str | None
    owner: str
    mixed: int
    last_at: int | None
    """Time of the message with the seq `indexed`."""

    @property
    def ownership(self) -> Ownership:
        """The ownership according to the messages in the catalog."""
        return Ownership(self.owner, bool(self.mixed)) if self.count else Ownership()


def row_of(columns: Sequence[Any]) -> Row:
    """Return the row with these columns. Raises msgspec.DecodeError if the row is damaged."""
    sight = columns[Row.__struct_fields__.index("sight")]
    seqs = msgspec.json.decode(sight, type=list[Span])
    return msgspec.structs.replace(Row(*columns), sight=seqs)


class Said(Struct, frozen=True):
    """One message in indexed form."""

    seq: int
    role: str
    at: int
    tokens: int
    text: str
    lines: tokenizer.Lines
    stems: str


class Settled(Struct, frozen=True, kw_only=True):
    """All columns of a session except its messages."""

    stamp: str | None
    listed: bool = True
    uid: str = ""
    generation: int = 0
    archived: int = 0
    indexed: int = 0
    sight: Sequence[Span] = ()
    withdrawn: Sequence[Span] = ()
    """Ranges of seqs in which a hidden message counts as withdrawn."""
    tokens: int | None = None
    """Tokens of the visible messages; None if they have to be counted."""
    state: State = "idle"
    prompt: str | None = ""
    """None if the prompt may be in messages that another process added."""
    created: int = 0
    updated: int = 0
    meta: Mapping[str, Any] = {}
    lost: int = 0
    damaged: int = 0
    problem: str | None = None


class Beginning(Struct, frozen=True):
    """The session that is read from its start."""

    uid: str = ""
    generation: int = 0
    archived: int = 0


_NOTHING: Final = Beginning()


class Step(Struct, frozen=True, kw_only=True):
    """A change of one session in the catalog, small enough for one transaction."""

    key: str
    version: int | None
    """Version of the row that the step starts from; None if the row must not exist."""
    anew: Beginning | None = None
    """Reset the row. Its messages are removed in the next steps."""
    remove: int = 0
    """Number of newest messages to remove."""
    add: Sequence[Said] = ()
    ownership: Ownership = Ownership()
    """Ownership after all messages that were read; used only if messages are added."""
    settled: Settled | None = None
    """Set in the last step."""
    gone: bool = False
    """Whether to delete the row."""


class Seen(Struct, frozen=True):
    """A session as read from the store."""

    info: SessionInfo
    messages: Sequence[Message]
    sight: Sequence[Span]
    anew: bool
    state: State


def steps(key: str, stamp: str, row: Row | None, seen: Seen) -> Iterator[Step]:
    """Yield the steps from the row in the catalog to the session as read."""
    info = seen.info
    known = None if seen.anew else row
    if known is None:
        beginning = Beginning(info.uid, info.generation, info.archived)
        yield from emptied(key, row, beginning=beginning)
    version = _emptied_version(row) if known is None else known.version
    prompt = known.prompt if known is not None else ""
    # Another process may have been stopped before it stored the prompt.
    partly = known is not None and (not known.listed or known.stamp is None)
    last_seq = known.indexed if known is not None else 0
    tokens = known.tokens if known is not None else 0
    ownership = (Ownership() if known is None else known.ownership).after(seen.messages)
    parts = list(_parts(seen.messages)) or [()]
    for number, part in enumerate(parts, 1):
        said = [_said(message) for message in part]
        if not partly:
            prompt = prompt or searchable_text.prompt_from((one.role, one.text) for one in said)
        last_seq = said[-1].seq if said else last_seq
        tokens += sum(one.tokens for one in said)
        settled = None
        if number == len(parts):
            settled = Settled(
                stamp=stamp,
                uid=info.uid,
                generation=info.generation,
                archived=info.archived,
                indexed=last_seq,
                sight=seen.sight,
                withdrawn=_withdrawn(info),
                tokens=tokens if _only_grew(known, seen) else None,
                state=seen.state,
                prompt=prompt or (None if partly else ""),
                created=microseconds(info.created),
                updated=microseconds(info.updated),
                meta=info.meta,
                lost=info.lost,
                damaged=info.damaged,
            )
        yield Step(key=key, version=version, add=said, ownership=ownership, settled=settled)
        version += 1


def _withdrawn(info: SessionInfo) -> list[Span]:
    """Return the seqs whose hidden messages were withdrawn: those that no summary covers.

    The floor alone does not show it: a message that was hidden by hand is below the floor too, as
    soon as all messages before it are hidden.
    """
    told = info.floor if info.summary else 0
    behind = [(told + 1, info.last_seq)] if told < info.last_seq else []
    return spans.union(withdrawn_seqs(info.meta), behind)


def _only_grew(known: Row | None, seen: Seen) -> bool:
    """Whether exactly the new messages became visible and none was hidden."""
    old = known.sight if known is not None else ()
    return spans.union(old, ((m.seq, m.seq) for m in seen.messages)) == list(seen.sight)


def emptied(
    key: str, row: Row | None, *, beginning: Beginning = _NOTHING, settled: Settled | None = None
) -> Iterator[Step]:
    """Yield steps to a row without messages; final if `settled` is given."""
    version = row.version if row is not None else None
    yield Step(key=key, version=version, anew=beginning)
    version = 1 if version is None else version + 1
    for _ in range(_removals(row)):
        yield Step(key=key, version=version, remove=MOST_MESSAGES)
        version += 1
    if settled is not None:
        yield Step(key=key, version=version, settled=settled)


def _emptied_version(row: Row | None) -> int:
    return 1 if row is None else row.version + 1 + _removals(row)


def _removals(row: Row | None) -> int:
    return 0 if row is None else -(-row.count // MOST_MESSAGES)


def removal(key: str, row: Row) -> Iterator[Step]:
    """Yield the steps that remove a deleted session."""
    yield from emptied(key, row)
    yield Step(key=key, version=_emptied_version(row), gone=True)


def _said(message: Message) -> Said:
    fields = message.to_dict()
    text = searchable_text.text_of(fields)
    lines = tokenizer.lines(text)
    return Said(
        seq=message.seq,
        role=searchable_text.role_of(fields),
        at=microseconds(message.at),
        tokens=message_tokens(fields),
        text=text,
        lines=lines,
        stems=stem_marks(lines),
    )


def stem_marks(lines: tokenizer.Lines) -> str:
    """Return the marks of all different stems, separated by spaces."""
    return " ".join(map(stem_mark, dict.fromkeys(stemming.of_tokens(lines.parts.split()))))


def _parts(messages: Sequence[Message]) -> Iterator[Sequence[Message]]:
    """Yield groups of messages that are small enough for one transaction."""
    start = size = 0
    for index, message in enumerate(messages):
        length = min(len(message.to_json()), searchable_text.LONGEST_TEXT)
        if index > start and (index - start >= MOST_MESSAGES or size + length > MOST_BYTES):
            yield messages[start:index]
            start, size = index, 0
        size += length
    if start < len(messages):
        yield messages[start:]
