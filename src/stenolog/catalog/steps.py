"""Steps that bring the catalog entry of a session up to date. Pure.

Each step is small enough for one transaction, and names the version of the row that it starts from.
The process may end between any two steps; the next refresh continues from there.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec import Struct

from stenolog.catalog import searchable_text, stemming, tokenizer
from stenolog.catalog.catalog_database import to_microseconds
from stenolog.catalog.entries import State
from stenolog.catalog.message_metadata import Ownership
from stenolog.catalog.query import stem_mark
from stenolog.records import Message, SessionInfo, Span
from stenolog.stores import spans
from stenolog.stores.withdrawn_messages import withdrawn_seqs
from stenolog.tokens import message_tokens

MAX_MESSAGES: Final = 2_000
MAX_BYTES: Final = 2_000_000
"""Limits of one transaction."""


class CatalogRow(Struct, frozen=True):
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


def decode_row(columns: Sequence[Any]) -> CatalogRow:
    """Return the row with these columns. Raises msgspec.DecodeError if the row is damaged."""
    sight = columns[CatalogRow.__struct_fields__.index("sight")]
    seqs = msgspec.json.decode(sight, type=list[Span])
    return msgspec.structs.replace(CatalogRow(*columns), sight=seqs)


class IndexedMessage(Struct, frozen=True):
    """One message in indexed form."""

    seq: int
    role: str
    at: int
    tokens: int
    text: str
    lines: tokenizer.Lines
    stems: str


class SessionColumns(Struct, frozen=True, kw_only=True):
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


class SessionStart(Struct, frozen=True):
    """The session that is read from its start."""

    uid: str = ""
    generation: int = 0
    archived: int = 0


_NO_SESSION: Final = SessionStart()


class Step(Struct, frozen=True, kw_only=True):
    """A change of one session in the catalog, small enough for one transaction."""

    key: str
    version: int | None
    """Version of the row that the step starts from; None if the row must not exist."""
    start: SessionStart | None = None
    """Reset the row. Its messages are removed in the next steps."""
    remove: int = 0
    """Number of newest messages to remove."""
    add: Sequence[IndexedMessage] = ()
    ownership: Ownership = Ownership()
    """Ownership after all messages that were read; used only if messages are added."""
    columns: SessionColumns | None = None
    """Set in the last step."""
    delete_row: bool = False
    """Whether to delete the row."""


class SessionContent(Struct, frozen=True):
    """A session as read from the store."""

    info: SessionInfo
    messages: Sequence[Message]
    sight: Sequence[Span]
    from_start: bool
    state: State


def update_steps(
    key: str, stamp: str, row: CatalogRow | None, content: SessionContent
) -> Iterator[Step]:
    """Yield the steps from the row in the catalog to the session as read."""
    info = content.info
    known = None if content.from_start else row
    if known is None:
        beginning = SessionStart(info.uid, info.generation, info.archived)
        yield from empty_steps(key, row, beginning=beginning)
    version = _emptied_version(row) if known is None else known.version
    prompt = known.prompt if known is not None else ""
    # Another process may have been stopped before it stored the prompt.
    is_partial = known is not None and (not known.listed or known.stamp is None)
    last_seq = known.indexed if known is not None else 0
    tokens = known.tokens if known is not None else 0
    ownership = (Ownership() if known is None else known.ownership).after(content.messages)
    parts = list(_split_messages(content.messages)) or [()]
    for number, part in enumerate(parts, 1):
        messages = [_index_message(message) for message in part]
        if not is_partial:
            prompt = prompt or searchable_text.prompt_from((one.role, one.text) for one in messages)
        last_seq = messages[-1].seq if messages else last_seq
        tokens += sum(one.tokens for one in messages)
        columns = None
        if number == len(parts):
            columns = SessionColumns(
                stamp=stamp,
                uid=info.uid,
                generation=info.generation,
                archived=info.archived,
                indexed=last_seq,
                sight=content.sight,
                withdrawn=_withdrawn_spans(info),
                tokens=tokens if _only_grew(known, content) else None,
                state=content.state,
                prompt=prompt or (None if is_partial else ""),
                created=to_microseconds(info.created),
                updated=to_microseconds(info.updated),
                meta=info.meta,
                lost=info.lost,
                damaged=info.damaged,
            )
        yield Step(key=key, version=version, add=messages, ownership=ownership, columns=columns)
        version += 1


def _withdrawn_spans(info: SessionInfo) -> list[Span]:
    """Return the seqs whose hidden messages were withdrawn: those that no summary covers.

    The floor alone does not show it: a message that was hidden by hand is below the floor too, as
    soon as all messages before it are hidden.
    """
    told = info.floor if info.summary else 0
    behind = [(told + 1, info.last_seq)] if told < info.last_seq else []
    return spans.union(withdrawn_seqs(info.meta), behind)


def _only_grew(known: CatalogRow | None, content: SessionContent) -> bool:
    """Whether exactly the new messages became visible and none was hidden."""
    old = known.sight if known is not None else ()
    return spans.union(old, ((m.seq, m.seq) for m in content.messages)) == list(content.sight)


def empty_steps(
    key: str,
    row: CatalogRow | None,
    *,
    beginning: SessionStart = _NO_SESSION,
    columns: SessionColumns | None = None,
) -> Iterator[Step]:
    """Yield steps to a row without messages; final if `columns` is given."""
    version = row.version if row is not None else None
    yield Step(key=key, version=version, start=beginning)
    version = 1 if version is None else version + 1
    for _ in range(_removals(row)):
        yield Step(key=key, version=version, remove=MAX_MESSAGES)
        version += 1
    if columns is not None:
        yield Step(key=key, version=version, columns=columns)


def _emptied_version(row: CatalogRow | None) -> int:
    return 1 if row is None else row.version + 1 + _removals(row)


def _removals(row: CatalogRow | None) -> int:
    return 0 if row is None else -(-row.count // MAX_MESSAGES)


def removal_steps(key: str, row: CatalogRow) -> Iterator[Step]:
    """Yield the steps that remove a deleted session."""
    yield from empty_steps(key, row)
    yield Step(key=key, version=_emptied_version(row), delete_row=True)


def _index_message(message: Message) -> IndexedMessage:
    fields = message.to_dict()
    text = searchable_text.text_of(fields)
    lines = tokenizer.lines(text)
    return IndexedMessage(
        seq=message.seq,
        role=searchable_text.role_of(fields),
        at=to_microseconds(message.at),
        tokens=message_tokens(fields),
        text=text,
        lines=lines,
        stems=stem_marks(lines),
    )


def stem_marks(lines: tokenizer.Lines) -> str:
    """Return the marks of all different stems, separated by spaces."""
    return " ".join(map(stem_mark, dict.fromkeys(stemming.stem_tokens(lines.parts.split()))))


def _split_messages(messages: Sequence[Message]) -> Iterator[Sequence[Message]]:
    """Yield groups of messages that are small enough for one transaction."""
    start = size = 0
    for index, message in enumerate(messages):
        length = min(len(message.to_json()), searchable_text.LONGEST_TEXT)
        if index > start and (index - start >= MAX_MESSAGES or size + length > MAX_BYTES):
            yield messages[start:index]
            start, size = index, 0
        size += length
    if start < len(messages):
        yield messages[start:]
