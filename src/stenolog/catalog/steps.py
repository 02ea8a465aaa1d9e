"""Steps that bring the catalog entry of a session up to date. Pure.

Each step is small enough for one transaction, and names the version of the row that it starts from.
The process may end between any two steps; the next refresh continues from there.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec import Struct

from stenolog.catalog import searchable_text, stemming, tokenizer
from stenolog.catalog.answer_prices import Price
from stenolog.catalog.catalog_database import replace_surrogates, to_microseconds
from stenolog.catalog.entries import NANO, State
from stenolog.catalog.message_metadata import Ownership, has_failed, model_of, usage_of
from stenolog.catalog.query import stem_mark
from stenolog.catalog.searchable_text import LONGEST_NAME
from stenolog.messages import Part, ToolResult, read_message
from stenolog.records import Message, SessionInfo, Span
from stenolog.stores import spans
from stenolog.stores.base import forked_at
from stenolog.stores.withdrawn_messages import withdrawn_seqs
from stenolog.tokens import message_tokens

MAX_MESSAGES: Final = 2_000
MAX_BYTES: Final = 2_000_000
"""Limits of one transaction."""
_MAX_PRICE: Final = 1e6
"""Maximum price of one answer in US dollars: any program can write token counts."""


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
    visible_spans: Sequence[Span]
    prompt: str
    stamp: str | None
    problem: str | None
    owner: str
    mixed: int
    last_at: int | None
    """Time of the message with the seq `indexed`."""
    is_outdated: int = 0
    """Whether a newer price list may know prices that were unknown."""

    @property
    def ownership(self) -> Ownership:
        """The ownership according to the messages in the catalog."""
        return Ownership(self.owner, bool(self.mixed)) if self.count else Ownership()


def decode_row(columns: Sequence[Any]) -> CatalogRow:
    """Return the row with these columns. Raises msgspec.DecodeError if the row is damaged."""
    visible_spans = columns[CatalogRow.__struct_fields__.index("visible_spans")]
    seqs = msgspec.json.decode(visible_spans, type=list[Span])
    return msgspec.structs.replace(CatalogRow(*columns), visible_spans=seqs)


class IndexedMessage(Struct, frozen=True):
    """One message in indexed form."""

    seq: int
    role: str
    at: int
    tokens: int
    text: str
    lines: tokenizer.Lines
    stems: str
    speech: bool
    """Whether a user or a model said it; not tool calls, their results, or text of a program."""


class UsageSums(Struct, frozen=True, kw_only=True):
    """What some messages add to the columns of their session."""

    model: str | None = None
    """The model of the last answer; None if no model is named."""
    last_message: int = 0
    answers: int = 0
    unpriced: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cost: int = 0
    """In nanodollars."""
    failed: int = 0


class SessionColumns(Struct, frozen=True, kw_only=True):
    """All columns of a session except its messages."""

    stamp: str | None
    listed: bool = True
    uid: str = ""
    generation: int = 0
    archived: int = 0
    indexed: int = 0
    visible_spans: Sequence[Span] = ()
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
    forked_from: str | None = None
    forked_at: int = 0


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
    usage: UsageSums = UsageSums()
    """What the added messages used."""
    columns: SessionColumns | None = None
    """Set in the last step."""
    delete_row: bool = False
    """Whether to delete the row."""


class SessionContent(Struct, frozen=True):
    """A session as read from the store."""

    info: SessionInfo
    messages: Sequence[Message]
    visible_spans: Sequence[Span]
    from_start: bool
    state: State


def update_steps(
    key: str,
    stamp: str,
    row: CatalogRow | None,
    content: SessionContent,
    price: Price | None = None,
) -> Iterator[Step]:
    """Yield the steps from the row in the catalog to the session as read."""
    info = content.info
    copied = forked_at(info)
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
        bodies = [message.to_dict() for message in part]
        parts_of = [list(read_message(body)) for body in bodies]
        messages = list(map(_index_message, part, bodies, parts_of))
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
                visible_spans=content.visible_spans,
                withdrawn=_withdrawn_spans(info),
                tokens=tokens if _only_grew(known, content) else None,
                state=content.state,
                prompt=prompt or (None if is_partial else ""),
                created=to_microseconds(info.created),
                updated=to_microseconds(info.updated),
                meta=info.meta,
                lost=info.lost,
                damaged=info.damaged,
                forked_from=info.forked_from,
                forked_at=copied,
            )
        yield Step(
            key=key,
            version=version,
            add=messages,
            ownership=ownership,
            usage=_usage_of(zip(messages, bodies, parts_of, strict=True), copied, price),
            columns=columns,
        )
        version += 1


def _usage_of(
    messages: Iterable[tuple[IndexedMessage, Mapping[str, Any], Sequence[Part]]],
    copied: int,
    price: Price | None,
) -> UsageSums:
    """Return what these messages used. Answers that a fork copied count for its source only."""
    model: str | None = None
    last_message = answers = unpriced = input_tokens = output_tokens = cost = failed = 0
    for message, body, parts in messages:
        last_message = max(last_message, message.at)
        failed += _failed_calls(body, parts)
        if body.get("role") != "assistant":
            continue
        name = model_of(body)
        model = replace_surrogates(name[:LONGEST_NAME]) if name is not None else model
        usage = usage_of(body)
        if usage is None or message.seq <= copied:
            continue
        dollars = price(name or "", usage) if price is not None else None
        answers += 1
        unpriced += dollars is None
        input_tokens += usage.get("prompt", 0)
        output_tokens += usage.get("answer", 0)
        cost += round(min(dollars or 0.0, _MAX_PRICE) * NANO)
    return UsageSums(
        model=model,
        last_message=last_message,
        answers=answers,
        unpriced=unpriced,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        cost=cost,
        failed=failed,
    )


def _failed_calls(body: Mapping[str, Any], parts: Sequence[Part]) -> int:
    """Return the number of failed tool calls whose results are in a message."""
    errors = sum(isinstance(one, ToolResult) and one.is_error for one in parts)
    return max(errors, int(has_failed(body)))


def _withdrawn_spans(info: SessionInfo) -> list[Span]:
    """Return the seqs whose hidden messages were withdrawn: those that no summary covers.

    The floor alone does not show it: a message that was hidden by hand is below the floor too, as
    soon as all messages before it are hidden.
    """
    summarized = info.floor if info.summary else 0
    unsummarized = [(summarized + 1, info.last_seq)] if summarized < info.last_seq else []
    return spans.union(withdrawn_seqs(info.meta), unsummarized)


def _only_grew(known: CatalogRow | None, content: SessionContent) -> bool:
    """Whether exactly the new messages became visible and none was hidden."""
    old = known.visible_spans if known is not None else ()
    return spans.union(old, ((m.seq, m.seq) for m in content.messages)) == list(
        content.visible_spans
    )


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


def _index_message(
    message: Message, fields: Mapping[str, Any], parts: Sequence[Part]
) -> IndexedMessage:
    text = searchable_text.text_of(fields, parts)
    lines = tokenizer.lines(text)
    return IndexedMessage(
        seq=message.seq,
        role=searchable_text.role_of(fields),
        at=to_microseconds(message.at),
        tokens=message_tokens(fields),
        text=text,
        lines=lines,
        stems=stem_marks(lines),
        speech=searchable_text.is_speech(fields, parts),
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
