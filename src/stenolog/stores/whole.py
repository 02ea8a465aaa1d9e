"""A session as it is carried from one store to another: all of it, and nothing of the engine.

A store that implements WholeStore can be copied from and to (sessions/transfer.py). It speaks in
lives: what a key was from its beginning to its deletion, told apart by its uid. Stores do not know
each other; what they have in common here is a Life and its messages.
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
    """A database without our tables was opened to read only: it holds nothing, and stays so."""


class LifeMark(Struct, frozen=True, kw_only=True):
    """One life of a session as a listing tells of it."""

    key: str
    uid: str
    """Empty where it is too damaged to tell: reading it raises DamagedStore."""
    deleted: str | None = None
    """When it was put into the trash, as times are written; None while it lives."""
    stamp: str
    """Another one after every change, made anywhere, and whenever a life that was purged is written
    again. Means nothing to anybody but the store."""
    last_seq: int | None = None
    """As in Life; None where the listing does not tell."""


class Life(Struct, frozen=True, kw_only=True):
    """Everything that is known of one life, but for its messages.

    What an engine counts for itself is not part of it: generation, bytes, bytes of voids.
    """

    key: str
    """In the trash the one it had when it was deleted."""
    uid: str
    created: str
    """As times are written: UTC, microseconds, `Z`. When it was made here, not what meta says."""
    updated: str
    deleted: str | None = None
    last_seq: int = 0
    """The newest seq given out, whether its message can be read or not."""
    floor: int = 0
    hidden: list[Span] = []
    """Hidden runs above the floor."""
    number: int = 0
    """The number of the newest change; no change that comes after it may have the same."""
    summary: str = ""
    meta: dict[str, Any] = {}
    undo: list[Undo] = []
    """The oldest first, each with all it needs: none has its rest `elsewhere`."""
    lost: list[Span] = []
    """Seqs whose message is damaged, as far as that is known before the messages are read: one that
    is not among them, nor void or purged, is lost as well. Whoever writes it says all of them."""
    void: list[Span] = []
    purged: list[Span] = []
    archived: int = 0
    """The last seq that lies in an archive; 0 where there is none."""
    forked_from: str | None = None
    tokens: list[Token] = []
    """Only those whose first message is missing: the others stand with their messages."""


class Reading(Struct, frozen=True, kw_only=True):
    """A look at one life as of one moment; of use only inside of the `with` that gave it."""

    life: Life
    messages: Iterator[Message]
    """Those past the seq that was asked for, by seq, each once, hidden and archived ones included;
    to be gone through once; what is damaged is passed over. Of a token (P12) the first message has
    `_once`, and `_part` is `(1, count)` where the token stands for more than one message:
    `token_of` tells both. All else in `_part`, and `_joined` and `hidden`, means nothing here."""
    stamp: str
    """Of exactly what is read, or an older one: never one that hides a change."""
    untouched: bool = False
    """Whether LifeWriter wrote it and nothing has changed in it since."""


class LifeWriter(Protocol):
    """Puts lives into a store."""

    def write(
        self, life: Life, messages: Iterable[Message], *, after: int = 0, instead_of: str = ""
    ) -> None:
        """Make this life stand exactly so, with all of its messages, whole or not at all.

        `after`: messages up to this seq are there already and stay as they are; only those past
        it are given. `instead_of`: the stamp of the life of the same uid that it takes the place
        of; empty where there is none. It may change its key, and go into the trash or out of it.

        Raises SessionExists where the key is that of another living session, or the uid is there
        and `instead_of` is empty; StoreBusy where what it is to take the place of has changed or
        is gone; NotStored, MaybeStored, ReadOnly as an append does; what `messages` raises. After
        each of them all is as it was before.
        """
        ...


@runtime_checkable
class WholeStore(Protocol):
    """A store that can be copied from and to, one namespace at a time."""

    def lives(self) -> list[LifeMark]:
        """Every life in this namespace: those in the trash, then the living ones, each by key.

        One that was purged is none.
        """
        ...

    def read_life(self, mark: LifeMark, *, after: int = 0) -> AbstractContextManager[Reading]:
        """A look at it, with the messages past `after`; nobody is kept waiting.

        It may have been deleted or restored since it was listed: the life says where it is. What
        is read is on the disk to stay: a power cut must not take back what was passed on. Raises
        NoSuchSession where that life is gone, StoreBusy where it is replaced all the time,
        DamagedStore where its state cannot be read. A store that does not look everywhere may
        also raise NoSuchSession where it was deleted, restored or renamed since.
        """
        ...

    def hold_life(self, mark: LifeMark, *, after: int = 0) -> AbstractContextManager[Reading]:
        """The same while nobody else can append to it, change it, delete or restore it.

        On a store that was opened to read only it is no more than a look.
        """
        ...

    def writing_lives(self) -> AbstractContextManager[LifeWriter]:
        """Write several: what was written is durable when the `with` is left without an error.

        An error in `write` undoes that one alone, and others may follow. A `with` that ends in an
        error may have written some of them, each whole. One at a time in each store. Who reads
        inside of it may see what was written, or not yet.
        """
        ...


@runtime_checkable
class NamespacedStore(Protocol):
    """A database, which holds many namespaces."""

    def namespaces(self) -> list[str]:
        """Those that have a life, be it in the trash only, by name."""
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
    """The life that has this state; `undo` are its steps looked up, `lost` adds to what it says."""
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
    """The state of this life, without `archive` and `tokens`; and the changes it relies on.

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
    """The token that begins with this message, and how many messages it stands for."""
    if message._once is None:
        return None
    return message._once, message._part[1] if message._part is not None else 1
