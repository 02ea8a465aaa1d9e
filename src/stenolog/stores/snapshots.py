"""Snapshots: the complete content of a session, as it is copied from one store to another.

A store that implements WholeStore can be copied from and to (sessions/transfer.py). A life is a
session from its creation to its deletion, identified by its uid; several lives may have had the
same key. Engines do not know each other: they exchange a Life and its messages.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

from msgspec import Struct

from stenolog.errors import StoreUnavailable
from stenolog.records import Change, Message, Span, State, Token, Undo
from stenolog.stores import spans
from stenolog.stores import state as states


class NothingYet(StoreUnavailable):
    """A database without our tables was opened read-only: it is empty."""


class LifeMark(Struct, frozen=True, kw_only=True):
    """One life of a session in a listing."""

    key: str
    uid: str
    """Empty if it is not known: the life is too damaged, or cannot be opened."""
    deleted: str | None = None
    """Time of its deletion, as times are written; None if it is not in the trash."""
    stamp: str
    """Differs after every change by any process, and if a purged life is written again. Only the
    store can interpret it."""
    last_seq: int | None = None
    """As in Life; None if the listing does not know it."""
    problem: str = ""
    """Why the life cannot be opened; empty if it can, or if it is damaged."""


class Life(Struct, frozen=True, kw_only=True):
    """Everything about one life except its messages.

    Values that belong to an engine are not part of it: generation, bytes, bytes of voids.
    """

    key: str
    """In the trash: the key when it was deleted."""
    uid: str
    created: str
    """As times are written: UTC, microseconds, `Z`. When it was made here, not what meta says."""
    updated: str
    deleted: str | None = None
    last_seq: int = 0
    """The newest seq given out, even if its message cannot be read."""
    floor: int = 0
    hidden: list[Span] = []
    """Hidden runs above the floor."""
    number: int = 0
    """Number of the newest change; later changes have higher numbers."""
    summary: str = ""
    meta: dict[str, Any] = {}
    undo: list[Undo] = []
    """Complete steps, oldest first: none has its rest `elsewhere`."""
    lost: list[Span] = []
    """Seqs whose message is damaged, as far as known before the messages are read: a missing seq
    that is not listed here, void or purged is lost as well. The writer is given all of them."""
    void: list[Span] = []
    purged: list[Span] = []
    archived: int = 0
    """The last seq in an archive; 0 if there is no archive."""
    forked_from: str | None = None
    tokens: list[Token] = []
    """Only tokens whose first message is missing: the others are part of their messages."""


class Reading(Struct, frozen=True, kw_only=True):
    """One life as of one moment; valid only inside the `with` that returned it."""

    life: Life
    messages: Iterator[Message]
    """The messages after the requested seq, by seq, hidden and archived ones included; an iterator
    for one pass that skips damaged messages. The first message of a token (P12) has `_once`, and
    `_part` is `(1, count)` if the token covers more than one message: see `token_of`. All else in
    `_part`, and `_joined` and `hidden`, has no meaning here."""
    stamp: str
    """Stamp of exactly this content, or an older one: never one that hides a change."""
    untouched: bool = False
    """Whether a LifeWriter wrote it and it has not changed since."""


class LifeWriter(Protocol):
    """Writes lives into a store."""

    def write(self, life: Life, messages: Iterable[Message], *, instead_of: str = "") -> None:
        """Write this life with all of its messages in one step.

        `instead_of`: the stamp of the life of the same uid that it replaces; empty if there is
        none. The new one may have another key, and be in the trash or not.

        Raises SessionExists if another session has the key, or if the uid exists and `instead_of`
        is empty; StoreBusy if the life to replace has changed or is gone; NotStored, MaybeStored,
        ReadOnly as an append does; what `messages` raises. Except after MaybeStored, an error
        leaves the store unchanged.
        """
        ...


@runtime_checkable
class WholeStore(Protocol):
    """A store that can be copied from and to, one namespace at a time."""

    def lives(self) -> list[LifeMark]:
        """Return every life in this namespace: those in the trash, then the others, each by key.

        Purged lives are not listed.
        """
        ...

    def read_life(self, mark: LifeMark, *, after: int = 0) -> AbstractContextManager[Reading]:
        """Read it, with the messages after a seq, without blocking writers.

        It may have been deleted or restored since it was listed: the life says where it is. The
        content is durable: a power cut must not take back what was copied. Raises NoSuchSession if
        the life is gone, StoreBusy if it is replaced all the time, DamagedStore if its state
        cannot be read. A store that does not search everywhere may also raise NoSuchSession if it
        was deleted, restored or renamed since it was listed.
        """
        ...

    def hold_life(self, mark: LifeMark) -> AbstractContextManager[Reading]:
        """Read it while nobody else can append to it, change it, delete or restore it.

        A store that was opened read-only takes no lock.
        """
        ...

    def writing_lives(self) -> AbstractContextManager[LifeWriter]:
        """Write several lives, which are durable if the `with` ends without an error.

        An error in `write` undoes only that life, and others may follow. A `with` that ends with
        an error may have written some of them, each completely. Only one at a time in each store.
        A read inside of it may see the new lives, or not yet.
        """
        ...


@runtime_checkable
class NamespacedStore(Protocol):
    """A database with several namespaces."""

    def namespaces(self) -> list[str]:
        """Return the namespaces that have a life, even if only in the trash, by name."""
        ...


@runtime_checkable
class SharedPlace(Protocol):
    """A store that several addresses may lead to."""

    def is_same_place(self, other: Any) -> bool:
        """Return whether another store of this engine keeps its sessions in the same tables."""
        ...


# --- between a Life and the State that engines keep ------------------------------------------


def life_of(
    state: State,
    *,
    last_seq: int,
    updated: str,
    undo: list[Undo],
    deleted: str | None = None,
    lost: Iterable[Span] = (),
    tokens: Iterable[Token] = (),
) -> Life:
    """Return the life of a state; `undo` are its complete steps, `lost` adds to its lost seqs."""
    return Life(
        key=state.key,
        uid=state.uid,
        created=state.created,
        updated=updated,
        deleted=deleted,
        last_seq=last_seq,
        floor=state.floor,
        hidden=list(state.hidden),
        number=state.number,
        summary=state.summary,
        meta=state.meta,
        undo=undo,
        lost=spans.minus(spans.union(state.lost, lost), spans.union(state.void, state.purged)),
        void=list(state.void),
        purged=list(state.purged),
        archived=state.archive.last if state.archive is not None else 0,
        forked_from=state.forked_from,
        tokens=sorted(tokens, key=lambda token: (token.first, token.token)),
    )


def state_of(life: Life, *, generation: int) -> tuple[State, list[Change]]:
    """Return the state of a life, without `archive` and `tokens`, and the changes it relies on.

    Steps too long to be carried in each state have their rest in a change of the same number.
    """
    state = states.blank(life.key, life.uid, generation, life.created)
    state.floor, state.hidden, state.number = life.floor, list(life.hidden), life.number
    state.summary, state.meta = life.summary, life.meta
    state.lost, state.void, state.purged = list(life.lost), list(life.void), list(life.purged)
    state.forked_from = life.forked_from
    changes = []
    for entry in life.undo:
        change = states.only(entry)
        short = states.blank("", "", 1, "")
        states.apply_change(short, change)
        state.undo = [*state.undo, *short.undo]
        if short.undo[-1].elsewhere:
            changes.append(change)
    return state, changes


def token_of(message: Message) -> tuple[str, int] | None:
    """Return the token that starts with this message and its number of messages, or None."""
    if message._once is None:
        return None
    return message._once, message._part[1] if message._part is not None else 1
