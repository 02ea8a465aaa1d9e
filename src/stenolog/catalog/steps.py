"""Steps that bring the catalog entry of a session up to date. Pure.

Each step is small enough for one transaction, and names the version of the row that it starts from.
If the process ends between two steps, the next refresh continues after the last finished step.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Final

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from stenolog.catalog import searchable_text, tokenizer
from stenolog.catalog.answer_prices import Price
from stenolog.catalog.catalog_database import replace_surrogates, to_microseconds
from stenolog.catalog.entries import NANODOLLARS, State
from stenolog.catalog.message_metadata import (
    PROGRAM_FIELDS,
    Ownership,
    has_failed,
    is_copied,
    model_of,
    usage_of,
)
from stenolog.catalog.query import stem_mark
from stenolog.catalog.searchable_text import LONGEST_NAME
from stenolog.messages import Part, ToolResult, read_message
from stenolog.records import Message, SessionInfo, Span
from stenolog.stores import spans
from stenolog.stores.base import fork_seq_of
from stenolog.stores.withdrawn_messages import withdrawn_seqs
from stenolog.tokens import message_tokens

MAX_MESSAGES: Final = 2_000
MAX_CHARACTERS: Final = 2_000_000
"""Approximate maximum numbers of messages and indexed characters in one transaction."""
_MAX_PRICE: Final = 1e6
"""Maximum price of one answer in US dollars, in case a program wrote wrong token counts."""


class CatalogRow(Struct, frozen=True):
    """The columns of a session's catalog row that an update needs."""

    version: int
    listed: int
    uid: str
    generation: int
    archived: int
    indexed: int
    """Seq of the last indexed message."""
    count: int
    tokens: int
    visible_spans: Sequence[Span]
    prompt: str
    stamp: str | None
    owner: str
    mixed: int
    last_at: int | None
    """Time of the message with the seq `indexed`."""
    is_outdated: int
    """Whether a newer price list may know prices that were unknown."""

    @property
    def is_complete(self) -> bool:
        """Whether new messages can be added: the row is neither being emptied nor outdated."""
        is_being_emptied = bool(self.count) and not self.indexed
        return bool(self.uid) and not is_being_emptied and not self.is_outdated

    @property
    def ownership(self) -> Ownership:
        """The ownership that follows from the indexed messages."""
        return Ownership(self.owner, bool(self.mixed)) if self.count else Ownership()


def decode_row(columns: Sequence[Any]) -> CatalogRow:
    """Return the row with these columns. Raises msgspec.DecodeError if the row is damaged."""
    spans_json = columns[CatalogRow.__struct_fields__.index("visible_spans")]
    visible_spans = msgspec.json.decode(spans_json, type=list[Span])
    return replace(CatalogRow(*columns), visible_spans=visible_spans)


class IndexedMessage(Struct, frozen=True):
    """A message in the form in which the catalog stores it."""

    seq: int
    role: str
    at: int
    tokens: int
    text: str
    lines: tokenizer.TokenLines
    stems: str
    speech: bool
    """Whether a user or a model wrote the text, not a tool or another program."""


class UsageSums(Struct, kw_only=True):
    """Sums over some messages, which are added to the columns of their session."""

    model: str | None = None
    """The model of the last answer; None if no model is named."""
    last_message: int = 0
    """Time of the newest message, in microseconds since 1970."""
    answers: int = 0
    unpriced: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cost: int = 0
    """Cost of the answers in nanodollars."""
    failed: int = 0
    """Number of failed tool calls."""


class SessionColumns(Struct, frozen=True, kw_only=True):
    """All columns of a session except its messages."""

    stamp: str | None
    listed: bool = True
    uid: str = ""
    generation: int = 0
    archived: int = 0
    indexed: int = 0
    visible_spans: Sequence[Span] = ()
    withdrawn_spans: Sequence[Span] = ()
    """Ranges of seqs in which a hidden message counts as withdrawn."""
    tokens: int | None = None
    """Tokens of the visible messages; None if they have to be counted."""
    state: State = "idle"
    prompt: str | None = ""
    """Start of the first user message; None if another process may have added that message."""
    created: int = 0
    updated: int = 0
    meta: Mapping[str, Any] = {}
    lost: int = 0
    damaged: int = 0
    problem: str | None = None
    forked_from: str | None = None
    fork_seq: int = 0


ResetValues = tuple[str, int, int]
"""Uid, generation and archived seq in a row after a reset."""


class Step(Struct, frozen=True, kw_only=True):
    """A change of one session in the catalog, small enough for one transaction."""

    key: str
    version: int | None = None
    """Version of the row before the step; None if the row must not exist."""
    reset_to: ResetValues | None = None
    """Values for a reset of the row, or None. The steps after a reset remove the old messages."""
    remove_count: int = 0
    """Number of newest messages to remove."""
    messages: Sequence[IndexedMessage] = ()
    """Messages to add."""
    ownership: Ownership = Ownership()
    """Ownership after all messages that were read; used only if messages are added."""
    usage: UsageSums = field(default_factory=UsageSums)
    """Tokens and costs of the added messages."""
    columns: SessionColumns | None = None
    """Other columns of the session; None except in the last step."""
    delete_row: bool = False
    """Whether to delete the row."""


class SessionContent(Struct, frozen=True):
    """A session as read from the store."""

    info: SessionInfo
    messages: Sequence[Message]
    visible_spans: Sequence[Span]
    has_all_messages: bool
    state: State


def update_steps(
    key: str, stamp: str, row: CatalogRow | None, content: SessionContent, price: Price
) -> Iterator[Step]:
    """Yield the steps that bring a row of the catalog up to date with the session's content."""
    info = content.info
    # Reset a row without messages: its `last_message` is the time of its creation, which may be
    # later than the times of imported messages.
    is_first_batch = row is not None and row.indexed == 0 and bool(content.messages)
    kept_row = None if content.has_all_messages or is_first_batch else row
    reset_to = info.uid, info.generation, info.archived
    removals = _emptying_steps(key, row, reset_to) if kept_row is None else ()
    return _add_versions(row, chain(removals, _adding_steps(key, stamp, kept_row, content, price)))


def steps_to_empty_row(key: str, row: CatalogRow | None, columns: SessionColumns) -> Iterator[Step]:
    """Yield the steps that lead to a row without messages."""
    return _add_versions(row, chain(_emptying_steps(key, row), [Step(key=key, columns=columns)]))


def removal_steps(key: str, row: CatalogRow) -> Iterator[Step]:
    """Yield the steps that remove a deleted session."""
    return _add_versions(row, chain(_emptying_steps(key, row), [Step(key=key, delete_row=True)]))


def _add_versions(row: CatalogRow | None, steps: Iterable[Step]) -> Iterator[Step]:
    """Add to each step the version that it starts from. Each step increases the version."""
    version = row.version if row is not None else None
    for step in steps:
        yield replace(step, version=version)
        version = 1 if version is None else version + 1


def _emptying_steps(
    key: str, row: CatalogRow | None, reset_to: ResetValues = ("", 0, 0)
) -> Iterator[Step]:
    yield Step(key=key, reset_to=reset_to)
    count = row.count if row is not None else 0
    for _ in range(0, count, MAX_MESSAGES):
        yield Step(key=key, remove_count=MAX_MESSAGES)


def _adding_steps(
    key: str, stamp: str, row: CatalogRow | None, content: SessionContent, price: Price
) -> Iterator[Step]:
    info = content.info
    fork_seq = fork_seq_of(info)
    prompt, last_seq, tokens = (row.prompt, row.indexed, row.tokens) if row else ("", 0, 0)
    # If a process was stopped before the last step, the row has messages but maybe not their
    # prompt. Then the prompt must not be taken from later messages.
    is_partial = row is not None and (not row.listed or row.stamp is None)
    ownership = (Ownership() if row is None else row.ownership).with_messages(content.messages)
    groups = list(_split_messages(content.messages)) or [()]
    for group_number, group in enumerate(groups, 1):
        message_dicts = [message.to_dict() for message in group]
        parts_by_message = [list(read_message(fields)) for fields in message_dicts]
        messages = list(map(_index_message, group, message_dicts, parts_by_message))
        if not is_partial:
            roles_and_texts = ((message.role, message.text) for message in messages)
            prompt = prompt or searchable_text.prompt_from(roles_and_texts)
        last_seq = messages[-1].seq if messages else last_seq
        tokens += sum(message.tokens for message in messages)
        columns = None
        if group_number == len(groups):
            columns = SessionColumns(
                stamp=stamp,
                uid=info.uid,
                generation=info.generation,
                archived=info.archived,
                indexed=last_seq,
                visible_spans=content.visible_spans,
                withdrawn_spans=_withdrawn_spans(info),
                tokens=tokens if _has_only_grown(row, content) else None,
                state=content.state,
                prompt=prompt or (None if is_partial else ""),
                created=to_microseconds(info.created),
                updated=to_microseconds(info.updated),
                meta=info.meta,
                lost=info.lost,
                damaged=info.damaged,
                forked_from=info.forked_from,
                fork_seq=fork_seq,
            )
        contents = zip(messages, message_dicts, parts_by_message, strict=True)
        yield Step(
            key=key,
            messages=messages,
            ownership=ownership,
            usage=_sum_usage(contents, fork_seq, price),
            columns=columns,
        )


def _sum_usage(
    messages: Iterable[tuple[IndexedMessage, Mapping[str, Any], Sequence[Part]]],
    fork_seq: int,
    price: Price,
) -> UsageSums:
    """Sum the tokens, costs and failures of these messages.

    Answers and failures that a fork copied count only for the session that was forked.
    """
    sums = UsageSums()
    for message, fields, parts in messages:
        sums.last_message = max(sums.last_message, message.at)
        is_copy = message.seq <= fork_seq or is_copied(fields)
        if not is_copy:
            failed_results = sum(isinstance(part, ToolResult) and part.is_error for part in parts)
            sums.failed += max(failed_results, int(has_failed(fields)))
        if fields.get("role") != "assistant":
            continue
        name = model_of(fields)
        if name is not None:
            sums.model = replace_surrogates(name[:LONGEST_NAME])
        usage = usage_of(fields)
        if usage is None or is_copy:
            continue
        dollars = price(name or "", usage)
        sums.answers += 1
        sums.unpriced += dollars is None
        sums.input_tokens += usage.get("prompt", 0)
        sums.output_tokens += usage.get("answer", 0)
        sums.cost += round(min(dollars or 0.0, _MAX_PRICE) * NANODOLLARS)
    return sums


def _withdrawn_spans(info: SessionInfo) -> list[Span]:
    """Return the ranges of seqs in which a hidden message counts as withdrawn, not summarized.

    The floor (the seq up to which all messages are hidden) does not show which messages were
    withdrawn: a withdrawn message is below the floor, too, if all messages before it are hidden.
    """
    first_seq = info.floor + 1 if info.summary else 1
    unsummarized_spans = [(first_seq, info.last_seq)] if first_seq <= info.last_seq else []
    return spans.union(withdrawn_seqs(info.meta), unsummarized_spans)


def _has_only_grown(row: CatalogRow | None, content: SessionContent) -> bool:
    """Return whether the only change of visibility is that the new messages are visible."""
    old_spans = row.visible_spans if row is not None else ()
    new_spans = spans.from_seqs(message.seq for message in content.messages)
    return spans.union(old_spans, new_spans) == list(content.visible_spans)


def _index_message(
    message: Message, fields: Mapping[str, Any], parts: Sequence[Part]
) -> IndexedMessage:
    text = searchable_text.text_of(fields, parts)
    lines = tokenizer.token_lines(text)
    own_fields = {name: fields[name] for name in fields if name not in PROGRAM_FIELDS}
    return IndexedMessage(
        seq=message.seq,
        role=searchable_text.role_of(fields),
        at=to_microseconds(message.at),
        tokens=message_tokens(own_fields),
        text=text,
        lines=lines,
        stems=stem_marks(lines),
        speech=searchable_text.is_speech(fields, parts),
    )


def stem_marks(lines: tokenizer.TokenLines) -> str:
    """Return the index tokens of all different stems, separated by spaces."""
    return " ".join(map(stem_mark, dict.fromkeys(tokenizer.stem_tokens(lines.parts.split()))))


def _split_messages(messages: Sequence[Message]) -> Iterator[Sequence[Message]]:
    """Yield groups of messages that are small enough for one transaction."""
    start = size = 0
    for index, message in enumerate(messages):
        length = min(len(message.to_json()), searchable_text.LONGEST_TEXT)
        if index > start and (index - start >= MAX_MESSAGES or size + length > MAX_CHARACTERS):
            yield messages[start:index]
            start, size = index, 0
        size += length
    if start < len(messages):
        yield messages[start:]
